"""Profile ``seeds``: twelve problems with twenty seeds each, to test that a correct target never fails.

A case runs its problem in every claimed input format and layout, with 2, 3 and 4 workers; only two problems have
float64 inputs. The 16-bit formats share inputs of 8 significant bits; float32 and float64 share inputs of 24.

The seed also sets how peaked the softmax is (q is scaled by 2**-4 to 2**5, two seeds for each factor) and how large v
and dy are. In seeds 10 to 19, one token each of q, k and v has far larger numbers than all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ringspec.conformance.cases.claimed_rings import PER_RING, case_of_rings
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import dealt, drawn, judged_each
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.catalogue.build import numbers, times
from ringspec.vectors.format.case import Case, Patch

SEEDS = 20
WORKERS = (2, 3, 4)
BITS = {"bf16": 8, "fp16": 8, "f32": 24, "f64": 24}


@dataclass(frozen=True)
class SeededProblem:
    """One problem: sizes and terms for ``ringspec.vectors.catalogue.build.case``, layouts and formats."""

    name: str
    layouts: tuple[str, ...]
    sizes: dict[str, int]
    terms: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bf16", "fp16", "f32")


CAUSAL = {"causal": True}
EVEN, EVERY_DTYPE = ("contiguous", "zigzag"), ("bf16", "fp16", "f32", "f64")
PROBLEMS = (
    SeededProblem("full", ("contiguous",), {"S": 48, "D": 16}, dtypes=EVERY_DTYPE),
    SeededProblem("full-batches", ("contiguous",), {"S": 24, "D": 64, "B": 2}),
    SeededProblem("full-grouped", ("contiguous",), {"S": 48, "D": 32, "H": 4, "Hkv": 2}),
    SeededProblem("causal", EVEN, {"S": 48, "D": 16}, CAUSAL, EVERY_DTYPE),
    SeededProblem("causal-batches", EVEN, {"S": 24, "D": 64, "B": 2}, CAUSAL),
    SeededProblem("causal-grouped", EVEN, {"S": 48, "D": 32, "H": 4, "Hkv": 2}, CAUSAL),
    SeededProblem("causal-long", EVEN, {"S": 120, "D": 8, "H": 1}, CAUSAL),
    SeededProblem("causal-large-head", EVEN, {"S": 48, "D": 128, "H": 1}, CAUSAL),
    SeededProblem(
        "documents", ("contiguous", "striped"), {"S": 48, "D": 16},
        CAUSAL | {"cu_seqlens": (0, 7, 30, 31, 48)},
    ),
    SeededProblem("window", EVEN, {"S": 48, "D": 16}, CAUSAL | {"window": (17, 0)}),
    SeededProblem(
        "sinks", ("striped",), {"S": 24, "D": 16}, CAUSAL | {"sinks": ((0.5,), (-1.25,))}
    ),
    SeededProblem("softcap", EVEN, {"S": 48, "D": 16}, CAUSAL | {"softcap": 4.0}),
)  # fmt: skip


def cases() -> list[RunCase]:
    """Return the 240 cases, ``seeded/<problem>/<seed>``, problem after problem.

    >>> made = cases()
    >>> made[0].id, made[-1].id, len(made)
    ('seeded/full/00', 'seeded/softcap/19', 240)
    """
    return [case_of(problem, seed) for problem in PROBLEMS for seed in range(SEEDS)]


def case_of(problem: SeededProblem, seed: int) -> RunCase:
    """Make the case of one problem and one seed, which runs in all claimed formats, layouts and numbers of workers."""
    id = f"seeded/{problem.name}/{seed:02}"
    every = list(variants(problem, seed, id))
    return case_of_rings(
        id,
        "Random inputs: a correct target is within its bounds for every seed.",
        lambda claims: every,
        partial(judged_each, ring_name),
        varying=(*PER_RING, "inputs", "outputs", "statistics"),
        rules=("FWD-4", "BWD-5", "BWD-6", "BWD-7", "RING-2"),
    )


def variants(problem: SeededProblem, seed: int, id: str) -> Iterator[Case]:
    """Yield the problem in each format, layout and number of workers.

    Those with the same correct results follow each other, because these results are cached.
    """
    for dtype in problem.dtypes:
        drawn_once = problem_in(problem, seed, dtype)
        for layout in problem.layouts:
            for workers in WORKERS:
                name = f"{id}-{dtype}-{layout.replace('_', '-')}-w{workers}"
                yield dealt(drawn_once, name, workers, layout)


def problem_in(problem: SeededProblem, seed: int, dtype: str) -> Case:
    """Draw the inputs of a seed: numbers between -2 and 2, times powers of two that depend on the seed."""
    bits = BITS[dtype]
    powers = {"q": seed % 10 - 4, "k": 0, "v": 7 * seed % 5 - 2, "dy": 3 * seed % 5 - 2}
    given: dict[str, Any] = problem.sizes | problem.terms
    given |= {name: numbers(bits, power + 2 - bits) for name, power in powers.items()}
    name = f"seeded/{problem.name}/{seed:02}/{bits}"
    return drawn(name, dtype, patches=outliers(problem, seed), **given)


def outliers(problem: SeededProblem, seed: int) -> dict[str, tuple[Patch, ...]]:
    """Return changes that multiply one token of q and one of k by 4, and one of v by 16.

    Seeds below 10 have no such changes.
    """
    if seed < 10:
        return {}
    tokens = problem.sizes["S"]
    return {
        name: (times(factor, None, None, step * seed % tokens, None),)
        for name, factor, step in (("q", 4.0, 5), ("k", 4.0, 7), ("v", 16.0, 11))
    }


def ring_name(case: Case, call: Call) -> str:
    """Describe the format, the number of workers and the layout of a call, for a message."""
    return f"In {call.formats['inputs']}, {call.layout}, {call.workers} workers"
