"""How often ringspec's diagnosis names a bug that was written by somebody else, in other code.

    python tests/benchmarks/diagnose_independent.py [--blind] [--dtype bf16] [--bugs NAME ...] [--out FILE]

Each bug of tests/independent (or the blind ones) is run as a target over the golden, special and noise cases of
``core`` until its budget of diagnoses is used, and the verdict of the run is compared with the ids in
tests/independent/names.py. Prints a line for each bug, then the shares. Needs torch.

The kernel is bfloat16, but for the bugs of ``ACTS_IN``, which change nothing there. The tiles, the merge and the
seeds of the ring are its own. What is measured with ``--blind`` is blind: nobody who wrote mutants has read those
bugs. The other bugs were known when the guises of mutants were written, so that their share says what the
diagnosis can tell apart, and is no forecast for bugs yet unseen.
"""

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]
warnings.filterwarnings("ignore")

from independent import blind_bugs, bugs, names, target  # noqa: E402

from ringspec.conformance.cases.profiles import run_cases  # noqa: E402
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely  # noqa: E402
from ringspec.conformance.run.case import run_case  # noqa: E402

FORMATS = {"bf16": ("bfloat16",), "f32": ("float32",), "fp16": ("float16",)}
ACTS_IN = {"dq_always_bfloat16": "fp16"}  # results in bfloat16 have no more bits than that
ENOUGH = 6  # failures that were diagnosed


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--dtype", choices=FORMATS, help="of all bugs")
    parser.add_argument("--bugs", nargs="*")
    parser.add_argument("--enough", type=int, default=ENOUGH)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def diagnosed(made, cases, enough):
    """The verdict of a run that ends after a few diagnoses."""
    diagnose, records = Diagnoser(), []
    for case in cases:
        records.append(run_case(made, case, diagnose))
        if sum(bool(one.diagnosis) for one in records) >= enough:
            break
    return most_likely(records), records


def of_its_layout(name, made):
    """A kernel for one layout, where the bug is a bug of that layout."""
    words = bugs.BUGS[name].what.lower()
    for layout in ("striped", "zigzag"):
        if words.startswith((layout, f"causal {layout}")):
            made.capabilities = dataclasses.replace(made.capabilities, layouts=(layout,))
    return made


def main():
    given = arguments()
    chosen = blind_bugs.BLIND if given.blind else bugs.BUGS
    cases = [case for case in run_cases("core") if not case.id.startswith("probe/")]
    cases.sort(key=lambda case: not case.id.startswith("ring/"))
    counts, rows = Counter(), []
    for name in given.bugs or chosen:
        start = time.monotonic()
        dtype = given.dtype or ACTS_IN.get(name, "bf16")
        if given.blind:
            made = blind_bugs.blind_target(name, formats=FORMATS[dtype])
        else:
            made = of_its_layout(name, target.independent(name, formats=FORMATS[dtype]))
        found, records = diagnosed(made, cases, given.enough)
        right = () if given.blind else names.SAME.get(name, ())
        seen = None if found is None else found["id"]
        class_of = set() if found is None else {seen, *found["alike"]}
        kind = "not killed" if found is None else "right" if class_of & set(right) else "wrong"
        if found is not None and not right:
            kind = "rightly unknown" if seen is None else "wrongly named"
        elif found is not None and seen is None:
            kind = "not named"
        counts[kind] += 1
        cases_seen = {r.id: (r.diagnosis or {}).get("id") for r in records if r.diagnosis}
        rows.append(
            {
                "bug": name,
                "dtype": dtype,
                "kind": kind,
                "named": seen,
                "right": right,
                "cases": cases_seen,
            }
        )
        print(
            f"{kind:16} {name} -> {seen} {cases_seen} {time.monotonic() - start:.0f} s", flush=True
        )
    print(dict(counts))
    known = [row for row in rows if row["right"]]
    if known:
        right = sum(row["kind"] == "right" for row in known)
        print(f"named right: {right} of {len(known)} known bugs, {right / len(known):.1%}")
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
