"""False alarms of the whole-tensor statistics on correct kernels, and whether their p-values are uniform.

    python tests/benchmarks/false_alarms.py [--problems 200] [--first 0] [--recipe bf16] [--jobs 1] [--json]

Random problems (recipes, layouts, circulations, masks, W in 1, 2, 4, 8, S <= 512, flat and peaked rows)
run under the recipe simulation; every test of :func:`ringspec.compare.statistics.tests.examine` on all of o, lse, dq, dk, dv. Printed
are alarms at the rate of a run (1e-9, over the tests of one problem), how often ``p`` and ``p_allowed`` fall below 1e-2 and 1e-3, a Kolmogorov-Smirnov
test of the linear p-values, the rms of error / predicted, and how often recipe inference would
contradict a recipe that is right. "16 bits": o, dq, dk, dv of recipes that round to 16 bits, whose p-values
must be uniform; "undeclared": lse, and float32, whose sums have no declared order. Exit status 1 if there is an alarm or a contradiction.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

LINEAR = ("slope", "mean", "temperature")


def examined(problem: Any, inferring: bool) -> tuple[list[Any], Any, dict[str, float]]:
    """The tests of one problem, its inference or None, and rms of error / predicted by tensor."""
    import numpy as np
    from compare import noise_problems as simulated

    from ringspec.compare.inference.infer import infer
    from ringspec.compare.noise.predict import predict
    from ringspec.compare.statistics.strata import strata_for
    from ringspec.compare.statistics.tests import errors_of, examine
    from ringspec.compare.statistics.types import allowance_for

    attention, geometry = simulated.attention_of(problem), simulated.geometry_of(problem)
    want, got = simulated.truth_of(problem), simulated.run(problem)
    if "dq" not in got:  # a merge recipe without a backward pass
        attention = dataclasses.replace(attention, dy=None)
    noise = predict(attention, problem.recipe, geometry)
    direction = simulated.directions(problem)
    parts = strata_for(geometry, attention.p, problem.k.shape[1])
    errors = {name: errors_of(got[name], want[name]) for name in want if name in got}
    tests, rms = [], {}
    for name, error in errors.items():
        allowance = allowance_for(problem.recipe, name, problem.workers)
        tests += examine(
            name,
            error,
            want[name],
            noise,
            parts[name],
            allowance=allowance,
            direction=direction[name],
        )
        used = noise.sd[name] > 0
        if used.any():
            z = (error - noise.mean[name])[used] / noise.sd[name][used]
            rms[name] = float(np.sqrt((z * z).mean()))
    inference = infer(errors, attention, geometry, problem.recipe, predict) if inferring else None
    return tests, inference, rms


def one(work: tuple[int, str | None, int]) -> tuple[Any, ...]:
    """The outcome of one problem: seed, problem's recipe and W, tests, inference in words, rms."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from compare.noise_problems import random_problem

    seed, recipe, every = work
    problem = random_problem(seed, recipe)
    tests, inference, rms = examined(problem, bool(every) and seed % every == 0)
    words = None
    if inference is not None:
        other = inference.best is not inference.declared
        words = (other, "; ".join(inference.lines()) if inference.contradicted else "")
    return seed, problem.recipe.name, problem.workers, tests, words, rms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument(
        "--recipe", help="this recipe alone, or bf16 with the merges of this merge recipe"
    )
    parser.add_argument(
        "--infer", type=int, default=20, help="infer the recipe of every n-th problem (0: of none)"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    from ringspec.compare.statistics.tests import alarms, in_words

    p_values, counts, loud = defaultdict(list), Counter(), []
    ratios, strange, started = defaultdict(list), [], time.perf_counter()
    seeds = range(args.first, args.first + args.problems)
    work = [(seed, args.recipe, args.infer) for seed in seeds]
    pool = multiprocessing.get_context("spawn").Pool(args.jobs)
    for seed, recipe, workers, tests, words, rms in pool.imap(one, work):
        counts["tests"] += len(tests)
        for test in alarms(tests):
            loud.append(f"problem {seed}, {recipe}, W = {workers}: {in_words(test)}")
        for test in tests:
            whole = test.stratum == "all"
            pair = test.p, test.p_allowed
            p_values[test.name, "whole" if whole else "parts"].append(pair)
            if whole and test.name in LINEAR:
                p_values["linear", recipe].append(pair)
                # Where sums decide, whose order no recipe declares, sd is right within a factor of 2.
                sure = test.allowance.high < 2.0
                p_values[test.name, "16 bits" if sure else "undeclared"].append(pair)
        for name, ratio in rms.items():
            ratios[recipe, name].append(ratio)
        if words is None:
            continue
        counts["inferred"] += 1
        counts["other recipe named"] += words[0]
        if words[1]:
            strange.append(f"problem {seed}, {recipe}: {words[1]}")
    report = {
        "problems": args.problems,
        "tests": counts["tests"],
        "alarms": loud,
        "inferred": counts["inferred"],
        "contradicted": strange,
        "other recipe named": counts["other recipe named"],
        "p": table_of(p_values),
        "rms": {
            f"{recipe} {name}": [min(x), sum(x) / len(x), max(x)]
            for (recipe, name), x in sorted(ratios.items())
        },
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(report, indent=1) if args.json else as_text(report))
    return 1 if loud or strange else 0


def table_of(p_values: dict[tuple[str, str], list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """One line for each test and kind of stratum."""
    import numpy as np
    from scipy import stats

    lines = []
    for (name, where), pairs in p_values.items():
        p, allowed = np.array(pairs).T
        lines.append(
            {
                "test": name,
                "over": where,
                "number": len(p),
                "uniform": float(stats.kstest(p, "uniform").pvalue)
                if name in (*LINEAR, "linear")
                else None,
                "p < 1e-2": float((p < 1e-2).mean()),
                "p < 1e-3": float((p < 1e-3).mean()),
                "allowed < 1e-2": float((allowed < 1e-2).mean()),
                "allowed < 1e-3": float((allowed < 1e-3).mean()),
                "least allowed": float(allowed.min()),
            }
        )
    return lines


def as_text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['problems']} problems, {report['tests']} tests, {len(report['alarms'])} alarms, "
        f"{report['inferred']} recipes inferred, {len(report['contradicted'])} contradicted, "
        f"{report['other recipe named']} times another one named; {report['seconds']:.0f} s",
        *report["alarms"],
        *report["contradicted"],
        "",
        f"{'test':13}{'over':14}{'number':>7}  {'uniform':>8}  {'p<1e-2':>8}{'p<1e-3':>9}"
        f"  {'allowed<1e-2':>12}{'<1e-3':>9}{'least':>10}",
    ]
    for line in report["p"]:
        uniform = "" if line["uniform"] is None else f"{line['uniform']:.3f}"
        lines.append(
            f"{line['test']:13}{line['over']:14}{line['number']:7}  {uniform:>8}  "
            f"{line['p < 1e-2']:8.4f}{line['p < 1e-3']:9.5f}  {line['allowed < 1e-2']:12.5f}"
            f"{line['allowed < 1e-3']:9.5f}{line['least allowed']:10.1e}"
        )
    lines += ["", "rms of error / predicted: least, mean, largest"]
    lines += [f"{k:24}" + "  ".join(f"{x:.2f}" for x in v) for k, v in report["rms"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
