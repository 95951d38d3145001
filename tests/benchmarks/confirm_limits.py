"""Are errors found at the limits that a report prints, and mostly not at a fifth of them?

    python tests/benchmarks/confirm_limits.py [--seeds 40] [--first 1000] [--recipe bf16] [--undeclared]
        [--tokens 96] [--jobs 1] [--json]

Each seed is one random problem like those of the noise cases. The specification's ring computes it under the
recipe, with results that are not rounded yet. The case judges the rounded results, which must pass, and gives the
limits. Then each error is added to the results before their last rounding, at its limit and at a fifth of it,
and the case judges again, with all its tests and bounds. The scale is wrong in the whole computation. Printed for
each tensor and error: in how many problems it was found at either size. Exit status 1 if the correct results failed
in a problem, or less than 99 % of all errors were found at their limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

FRACTION = 0.2
OF_CASE = {"bf16": "bf16", "bf16_partials": "bf16", "fp16": "fp16", "float32": "f32"}
RINGS = (("causal", 4, "zigzag"), ("full", 2, "contiguous"), ("causal", 3, "striped"))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem: its case, call and claims, and results by tensor and worker, before their last rounding."""

    case: Any
    call: Any
    claims: Any
    wide: dict[str, list[np.ndarray]]

    def judged(self, results: dict[str, list[np.ndarray]]) -> Any:
        """Judge results as the noise case does, after their last rounding."""
        from ringspec.conformance.cases.noise import judged
        from ringspec.formats import store

        stored = {
            name: [store(x, self.format_of(name)) for x in parts] for name, parts in results.items()
        }
        return judged(self.claims, self.case, self.call, stored)

    def format_of(self, name: str) -> str:
        return self.call.formats["statistics" if name == "lse" else "outputs"]


def problem_of(seed: int, recipe: str, tokens: int, declared: bool) -> Problem:
    """Draw a problem and compute it."""
    from ringspec.conformance.cases.calls import call_of
    from ringspec.conformance.cases.noise import problem
    from ringspec.conformance.cases.problems import dealt
    from ringspec.conformance.target.capabilities import Capabilities

    mask, workers, layout = RINGS[seed % len(RINGS)]
    made = problem(mask, OF_CASE[recipe], tokens=tokens, head_dim=16, kv_heads=2, seed=seed)
    case = dealt(made, f"limits/{seed}", workers, layout)
    call = call_of(case, {})
    claims = Capabilities(
        layouts=(layout,), formats=(call.formats["inputs"],), recipe=recipe if declared else None
    )
    return Problem(case, call, claims, wide_of(call, recipe))


def wide_of(call: Any, recipe: str) -> dict[str, list[np.ndarray]]:
    """Results before their last rounding; the backward pass reads o after it."""
    from ringspec.conformance.targets.reference import ring_results
    from ringspec.recipes import RECIPES

    used = RECIPES[recipe]
    forward = ring_results(call, used.replace(outputs="float64"))
    both = ring_results(call, used.replace(gradients="float64"))
    return {name: (forward if name in ("o", "lse") else both)[name] for name in TENSORS}


TENSORS = ("o", "lse", "dq", "dk", "dv")


def planted(
    given: Problem, recipe: str, name: str, kind: str, size: float, rng: np.random.Generator
) -> dict[str, list[np.ndarray]]:
    """Results with one error."""
    if kind == "scale":
        terms = dict(given.call.terms) | {"scale": given.call.terms["scale"] * (1.0 + size)}
        wrong = wide_of(dataclasses.replace(given.call, terms=terms), recipe)
        return {**given.wide, name: wrong[name]}
    changed = [wrong_part(x, given.format_of(name), kind, size, rng) for x in given.wide[name]]
    return {**given.wide, name: changed}


def wrong_part(
    x: np.ndarray, format: str, kind: str, size: float, rng: np.random.Generator
) -> np.ndarray:
    """The results of one worker with an error."""
    from ringspec.compare.noise.rounding import spacing, truncated_to
    from ringspec.formats import load, round_to

    x = np.asarray(load(x) if x.dtype.kind == "V" else x, dtype=np.float64)
    if kind == "factor":
        return x * (1.0 + size)
    if kind == "shift":
        return x + size
    chosen = rng.random(x.shape) < (2.0 * size if kind == "bias" else size)
    if kind == "bias":  # a truncation loses half a unit in the last place, in the mean
        return np.where(chosen, truncated_to(x, format), round_to(x, format))
    right = round_to(x, format)
    sign = rng.choice((-1.0, 1.0), size=x.shape)
    return np.where(chosen, right + sign * spacing(right, format), right)


def one(work: tuple[int, str, int, bool]) -> dict[str, Any]:
    """The outcomes of one seed: (tensor, kind, whether at the limit, whether found)."""
    from ringspec.conformance.judge import noise as noise_judge

    seed, recipe, tokens, declared = work
    noise_judge.inferred = lambda *_: ()  # made of failures only, and slow
    given = problem_of(seed, recipe, tokens, declared)
    right = given.judged(given.wide)
    found = []
    for name, sizes in (right.noise or {})["limits"].items():
        for kind, limit in sizes.items():
            for at in (1.0, FRACTION):
                rng = np.random.default_rng([seed, len(found)])
                wrong = planted(given, recipe, name, kind, at * limit, rng)
                found.append((name, kind, at == 1.0, not given.judged(wrong).passed))
    return {"seed": seed, "passed": right.passed, "found": found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--recipe", default="bf16", choices=OF_CASE)
    parser.add_argument("--undeclared", action="store_true", help="the kernel declares no recipe")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    work = [(seed, given.recipe, given.tokens, not given.undeclared) for seed in seeds]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        outcomes = list(pool.imap(one, work))
    if given.json:
        print(json.dumps(outcomes, indent=1))
    else:
        print("\n".join(told(outcomes)))
    at_limit = [found for x in outcomes for *_, at, found in x["found"] if at]
    return 0 if all(x["passed"] for x in outcomes) and np.mean(at_limit) >= 0.99 else 1


def told(outcomes: list[dict[str, Any]]) -> Iterator[str]:
    """The counts as lines."""
    tried: Counter[tuple[str, str, bool]] = Counter()
    seen: Counter[tuple[str, str, bool]] = Counter()
    for outcome in outcomes:
        for name, kind, at, found in outcome["found"]:
            tried[name, kind, at] += 1
            seen[name, kind, at] += found
    yield f"{'':12}found at the limit   at {FRACTION:g} of it"
    for name, kind in dict.fromkeys((name, kind) for name, kind, _ in tried):
        counts = [f"{seen[name, kind, at]} of {tried[name, kind, at]}" for at in (True, False)]
        yield f"{name:4}{kind:8}{counts[0]:>18}   {counts[1]:>12}"
    right = sum(x["passed"] for x in outcomes)
    yield f"correct results passed in {right} of {len(outcomes)} problems"
    at_limit = [found for x in outcomes for *_, at, found in x["found"] if at]
    yield f"found at the limit: {sum(at_limit)} of {len(at_limit)}"


if __name__ == "__main__":
    sys.exit(main())
