"""How many precision faults of an independent kernel are named or inferred rightly, and how many wrongly.

    python tests/benchmarks/name_precision_faults.py [--faults NAME ...] [--cases ID ...] [--out FILE]

Each fault of tests/independent/numpy_faults.py is one switched rounding point of a NumPy kernel that shares no
code with ringspec; what is right to say of it is in the table of faults. It is run over noise cases with the
recipe bf16 declared. A line is printed for each fault, then the counts; --out appends JSON lines.
A case that fails takes up to a minute, most of it for the inference.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

for threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(threads, "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from independent.judged import RIGHTLY, said_of  # noqa: E402
from independent.numpy_faults import FAULTS, RIGHT  # noqa: E402

from ringspec.conformance.cases import noise as noise_cases  # noqa: E402

CASES = ("noise/causal-contiguous-w4-bf16", "noise/causal-zigzag-w4-bf16")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", nargs="*", choices=[*FAULTS, *RIGHT], default=[*RIGHT, *FAULTS])
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--undeclared", action="store_true", help="declare no recipe")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    known = {case.id: case for case in noise_cases.cases()}
    cases, found = [known[id] for id in given.cases], []
    for fault in given.faults:
        started = time.monotonic()
        said = said_of(fault, cases, None if given.undeclared else "bf16")
        found.append(said)
        print(f"{fault}: {said.kind}; fails {said.failed} of {said.cases}; name {said.name}; "
              f"inference: {said.claim}; {time.monotonic() - started:.0f} s", flush=True)  # fmt: skip
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(said) | {"kind": said.kind}) + "\n")
    faults = Counter(said.kind for said in found if said.fault in FAULTS)
    right = Counter(said.kind for said in found if said.fault in RIGHT)
    print(f"faults: {sum(faults[x] for x in RIGHTLY)} of {faults.total()} rightly; {dict(faults)}")
    print(f"right kernels: {dict(right)}")


if __name__ == "__main__":
    main()
