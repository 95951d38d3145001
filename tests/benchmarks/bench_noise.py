"""Time of the noise prediction and of all tests, beside that of the exact truth they are compared with.

    python tests/benchmarks/bench_noise.py [--lengths 256 512 1024] [--recipes bf16 float32] [--json]

One head, causal, D = 128, forward and backward, four workers, zigzag; CPU seconds of one run in one
process with one BLAS thread. *exact* is :func:`ringspec.exact.backward`, rounded to the format of the results;
*predict* is :func:`ringspec.compare.noise.predict.predict`, *tests* :func:`ringspec.compare.statistics.tests.examine` of
o, lse, dq, dk, dv with all strata. The ratio (predict + tests) / exact must stay below 1.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

WIDTH, WORKERS = 128, 4


def seconds(call: Callable[[], object]) -> tuple[float, object]:
    """CPU seconds of a call, and what it gives."""
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measured(length: int, recipe: str) -> dict:
    """The three times of one problem."""
    import numpy as np
    from benchmarks.power_problem import Asked, setting_of

    from ringspec import exact
    from ringspec.compare.noise.predict import predict
    from ringspec.compare.statistics.tests import errors_of, examine

    setting = setting_of(
        Asked(recipe=recipe, tokens=length, head_dim=WIDTH, workers=WORKERS, layout="zigzag")
    )
    got, problem = setting.got(), setting.problem
    predicted, noise = seconds(lambda: predict(setting.attention, recipe, setting.geometry))

    def tests() -> int:
        return sum(
            len(
                examine(
                    name, errors_of(x, setting.truth[name]), setting.truth[name], noise,
                    setting.strata[name], allowance=setting.allowance(name),
                    direction=setting.directions[name],
                )
            )
            for name, x in got.items()
        )  # fmt: skip

    examined, count = seconds(tests)
    visible = np.tril(np.ones((length, length), dtype=bool))[None, None]
    asked = exact.Problem(problem.q, problem.k, problem.v, problem.terms.scale, visible=visible)
    formats = (setting.recipe.outputs,)
    truth, _ = seconds(lambda: exact.backward(asked, setting.upstream.dy, None, formats))
    return {
        "length": length,
        "recipe": recipe,
        "exact": truth,
        "predict": predicted,
        "tests": examined,
        "number of tests": count,
        "ratio": (predicted + examined) / truth,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--recipes", nargs="+", default=["bf16", "float32"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lines = [measured(length, recipe) for length in given.lengths for recipe in given.recipes]
    if given.json:
        print(json.dumps(lines, indent=1))
    else:
        print(f"{'S':>5} {'recipe':8} {'exact':>8} {'predict':>8} {'tests':>8}  ratio")
        for x in lines:
            times = " ".join(f"{x[name]:8.3f}" for name in ("exact", "predict", "tests"))
            print(f"{x['length']:5} {x['recipe']:8} {times}  {x['ratio']:.2f}")
    return 0 if all(x["ratio"] < 1 for x in lines) else 1


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
