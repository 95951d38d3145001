"""Does the noise case of many heads find a relative error of 1e-4 in o, and does a correct kernel pass it?

    python tests/benchmarks/confirm_many_heads.py [--seeds 200] [--first 1] [--wrong 20] [--size 1e-4]
        [--undeclared] [--jobs 1]

Each seed is a problem like that of the case, with other random inputs, in one of the rings of the case. The
specification's ring computes it under the recipe bf16. In the first problems, as many as ``--wrong`` says, o is also
multiplied by 1 + size before its last rounding. The case judges all results. Printed: in how many problems the correct
results passed and the wrong ones failed, and the limits of o. Exit status 1 if a correct result failed, or a wrong
one passed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

RECIPE = "bf16"


def one(work: tuple[int, float | None, bool]) -> dict[str, Any]:
    """The outcomes of one seed; ``size``: the error of o, None for correct results alone."""
    from benchmarks.confirm_limits import Problem

    from ringspec.conformance.cases import noise
    from ringspec.conformance.cases.calls import call_of
    from ringspec.conformance.cases.problems import dealt
    from ringspec.conformance.judge import noise as noise_judge
    from ringspec.conformance.target.capabilities import Capabilities
    from ringspec.conformance.targets.reference import ring_results
    from ringspec.recipes import RECIPES

    seed, size, undeclared = work
    noise_judge.inferred = lambda *_: ()  # made of failures only, and slow
    # The first nine rings have 2, 4 and 1 workers.
    mask, workers, layout = noise.RINGS_IN_ORDER[seed % 9]
    case = dealt(noise.many_heads_problem(mask, seed), f"many-heads/{seed}", workers, layout)
    call = call_of(case, {})
    claims = Capabilities(
        layouts=(layout,), formats=("bfloat16",), recipe=None if undeclared else RECIPE
    )
    wide = ring_results(call, RECIPES[RECIPE].replace(outputs="float64"))
    given = Problem(case, call, claims, {name: wide[name] for name in ("o", "lse")})
    right = given.judged(given.wide)
    limit = right.noise["limits"]["o"]["factor"] if right.passed else None
    found = None
    if size is not None:
        wrong = given.judged({**given.wide, "o": [x * (1.0 + size) for x in wide["o"]]})
        found = not wrong.passed
    return {"seed": seed, "passed": right.passed, "limit": limit, "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--wrong", type=int, default=20)
    parser.add_argument("--size", type=float, default=1e-4)
    parser.add_argument("--undeclared", action="store_true", help="the kernel declares no recipe")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    work = [
        (seed, given.size if n < given.wrong else None, given.undeclared)
        for n, seed in enumerate(seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        outcomes = list(pool.imap(one, work))
    passed = [x["passed"] for x in outcomes]
    found = [x["found"] for x in outcomes if x["found"] is not None]
    limits = [x["limit"] for x in outcomes if x["limit"] is not None]
    print(f"correct results passed in {sum(passed)} of {len(passed)} problems")
    print(f"o times 1 + {given.size:g}: found in {sum(found)} of {len(found)} problems")
    print(f"limits of o: {min(limits):.2e} to {max(limits):.2e}, mean {np.mean(limits):.2e}")
    return 0 if all(passed) and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
