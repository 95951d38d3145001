"""Is a wrong softmax scale found in simulated kernels, over many seeds, and a right one never blamed?

    python tests/benchmarks/confirm_power.py [--seeds 20] [--error 1e-4] [--tokens 2048] [--head-dim 128]
        [--heads 1] [--workers 4] [--recipe bf16] [--forward-only] [--jobs 1] [--json]

Each seed is one random problem of :mod:`benchmarks.power_problem`. The recipe's simulated kernel is run
with the softmax scale times 1 + error, and with the right one; all tests of o, and with gradients of
dq, dk, dv, are made at the false-alarm rate of one case. lse, which alone would tell, is not looked at. Printed
for each seed: the strongest test in predicted standard deviations. Exit status 1 if the error was not found in
every seed, or the right kernel raised an alarm in one. A job needs
1.6 GB at 2048 tokens with one head, and as much for each further one.
"""

import argparse
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]


def one(work: tuple[int, float, dict[str, Any]]) -> dict[str, Any]:
    """The alarms of one seed, with the error and without."""
    from benchmarks.power_measure import PASSES, found_in
    from benchmarks.power_problem import Asked, setting_of

    from ringspec.compare.statistics.tests import in_words

    seed, error, asked = work
    setting = setting_of(Asked(seed=seed, **asked))
    names = PASSES["gradients" if setting.upstream.dy is not None else "forward"]
    scale = setting.problem.terms.scale * (1.0 + error)
    wrong = found_in(setting, setting.got(wide=setting.simulated(scale)), names)
    right = found_in(setting, setting.got(), names)
    return {
        "seed": seed,
        "found": [in_words(x) for x in wrong],
        "false": [in_words(x) for x in right],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--error", type=float, default=1e-4)
    parser.add_argument("--recipe", default="bf16")
    for name, default in (("tokens", 2048), ("head-dim", 128), ("heads", 1), ("workers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    asked = {x: getattr(given, x) for x in ("recipe", "tokens", "head_dim", "heads", "workers")}
    asked["gradients"] = not given.forward_only
    seeds = range(given.first, given.first + given.seeds)
    work = [(seed, given.error, asked) for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        outcomes = list(pool.imap(one, work))
    found = sum(bool(x["found"]) for x in outcomes)
    false = sum(bool(x["false"]) for x in outcomes)
    if given.json:
        print(json.dumps({"asked": asked, "error": given.error, "seeds": outcomes}, indent=1))
    else:
        for x in outcomes:
            print(f"seed {x['seed']}: {len(x['found'])} alarms; {(x['found'] or ['none'])[0]}")
            for line in x["false"]:
                print(f"    false alarm: {line}")
        print(f"found in {found} of {len(outcomes)}; false alarms in {false}")
    return 0 if found == len(outcomes) and not false else 1


if __name__ == "__main__":
    sys.exit(main())
