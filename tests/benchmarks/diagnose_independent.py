"""How often ringspec's diagnosis names a bug that was written by somebody else, in other code.

    python tests/benchmarks/diagnose_independent.py [--blind] [--dtype bf16] [--bugs NAME ...] [--out FILE]

Each bug of tests/independent (or the blind ones) is run as a target over the golden, special and noise cases of
``core`` until its budget of diagnoses is used, and the verdict of the run is compared with the ids in
tests/independent/names.py. Prints a line for each bug, then the shares. Needs torch.
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

from ringspec.conformance.cases import run_cases  # noqa: E402
from ringspec.conformance.diagnoser import Diagnoser, most_likely  # noqa: E402
from ringspec.conformance.execute import run_case  # noqa: E402

FORMATS = {"bf16": ("bfloat16",), "f32": ("float32",)}
ENOUGH = 6  # failures that were diagnosed


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--dtype", choices=FORMATS, default="bf16")
    parser.add_argument("--bugs", nargs="*")
    parser.add_argument("--enough", type=int, default=ENOUGH)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def diagnosed(made, cases, enough):
    """The verdict of a run that ends after a few diagnoses."""
    diagnose, records = Diagnoser(), []
    for case in cases:
        record = run_case(made, case, diagnose)
        if record.outcome == "mismatch":
            records.append(record)
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
    cases += run_cases("noise")
    cases.sort(key=lambda case: not case.id.startswith("ring/"))
    counts, rows = Counter(), []
    for name in given.bugs or chosen:
        start = time.monotonic()
        if given.blind:
            made = blind_bugs.blind_target(name, formats=FORMATS[given.dtype])
        else:
            made = of_its_layout(name, target.independent(name, formats=FORMATS[given.dtype]))
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
        rows.append({"bug": name, "kind": kind, "named": seen, "right": right, "cases": cases_seen})
        print(
            f"{kind:16} {name} -> {seen} {cases_seen} {time.monotonic() - start:.0f} s", flush=True
        )
    print(dict(counts))
    if given.out:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
