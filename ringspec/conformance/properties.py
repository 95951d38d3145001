"""Properties: what several answers of one target must have to do with each other.

The same problem on other rings and layouts, gradients of a sum of two dy, and blocks merged to the whole.
Inputs are fixed, and each answer is compared with its own truth as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.capabilities import Capabilities, why_not
from ringspec.conformance.cases import Judgement, Outputs, RunCase
from ringspec.conformance.drawing import (
    DTYPES,
    RINGS,
    Seen,
    call_for,
    dealt,
    drawn,
    few_rings,
    judged,
    needs_of,
    run_case,
)
from ringspec.conformance.golden import passes_for
from ringspec.conformance.merged import merge_cases
from ringspec.conformance.special import special_cases
from ringspec.conformance.target import Call
from ringspec.conformance.unchanged import bound_rows, differs_in, result_rows, whose
from ringspec.vectors.case import Case, TensorRecipe
from ringspec.vectors.inputs import draw

TOKENS = 72
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (20, 0)},
}
GRADIENTS = ("dq", "dk", "dv")


def cases(profile: str = "core") -> list[RunCase]:
    """Properties and special values; none of them in 'smoke'.

    >>> [case.id for case in cases()][:2]
    ['property/rings/full-bf16', 'property/rings/full-f32']
    """
    if profile == "smoke":
        return []
    return [*ring_cases(), *linearity_cases(), *merge_cases(), *special_cases()]


def ring_cases() -> Iterator[RunCase]:
    """One problem over all claimed rings and layouts."""
    for mask, terms in MASKS.items():
        for dtype in DTYPES:
            yield over_rings(f"property/rings/{mask}-{dtype}", f"rings-{mask}", dtype, terms)


def over_rings(id: str, name: str, dtype: str, terms: dict[str, Any]) -> RunCase:
    problem = drawn(name, dtype, S=TOKENS, **terms)
    every = [dealt(problem, f"{id}-{layout}-w{w}", w, layout) for w, layout in RINGS]

    def chosen(claims: Capabilities) -> list[Case]:
        return [case for case in every if reason(claims, case) is None]

    def reason(claims: Capabilities, case: Case) -> str | None:
        return why_not(claims, needs_of([case]) | {"passes": passes_for(case, claims)})

    def claimed(claims: Capabilities) -> str | None:
        if len(chosen(claims)) >= 2:
            return None
        first = next(filter(None, (reason(claims, case) for case in every)), "")
        return f"fewer than two of its rings: {first}"

    def make(claims: Capabilities) -> list[Call]:
        return [call_for(claims, case) for case in chosen(claims)]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        seen = Seen(claims, tuple(chosen(claims)), tuple(calls), tuple(outputs))
        return judged(seen, agree)

    needs = {key: x for key, x in needs_of(every).items() if key not in PER_RING}
    return RunCase(
        id,
        "The same problem over every claimed ring size and layout gives the same results.",
        needs,
        make,
        judge,
        rules=("LAYOUT-5", "RING-2"),
        flags=("partials-rounded-to-16-bit", "zigzag-chunk-order", "striped-diagonal"),
        claimed=claimed,
    )


PER_RING = ("workers", "layout", "tokens_per_worker")


def agree(seen: Seen) -> tuple[str, None]:
    """Whether all rings agree with the first one, within the bounds of both."""
    for call in range(1, len(seen.calls)):
        for name in seen.outputs[call]:
            rows = differs_in(seen, call, name).any(axis=(0, 1))
            if rows.any():
                first, other = (ring_name(seen.calls[n]) for n in (0, call))
                where = whose(seen, call, name, np.flatnonzero(rows))
                return f"{name} over {other} is not that over {first}, for {where}.", None
    return "", None


def ring_name(call: Call) -> str:
    """'4 workers, zigzag'."""
    return f"{call.workers} worker{'s' if call.workers > 1 else ''}, {call.layout}"


def linearity_cases() -> Iterator[RunCase]:
    """Gradients are linear in dy: of 2 dy + dy' they are 2 g + g'."""
    for dtype in DTYPES:
        base = drawn("linearity", dtype, causal=True)
        assert base.shape is not None
        recipe = base.inputs.tensors["dy"]
        shape = (base.shape.B, base.shape.H, base.shape.Sq, base.shape.Dv)
        first, second = (draw("dy", shape, recipe, seed) for seed in ("first dy", "second dy"))
        problems = [with_dy(base, dy) for dy in (first, second, 2 * first + second)]
        for workers, layout in few_rings(dtype):
            id = f"property/linearity/{layout}-w{workers}-{dtype}"
            parts = zip(problems, "abc", strict=True)
            yield run_case(
                id,
                "The gradients of 2 dy + dy' are twice those of dy and those of dy' together.",
                [dealt(problem, f"{id}-{part}", workers, layout) for problem, part in parts],
                linear,
                only_backward=True,
                rules=("BWD-2", "BWD-3"),
                flags=("dy-ignored", "delta-of-few-rows"),
            )


def with_dy(case: Case, dy: NDArray[np.float64]) -> Case:
    """A problem with a dy that is given number by number."""
    given = {"dy": TensorRecipe("values", values=dy.tolist())}
    inputs = dataclasses.replace(case.inputs, tensors=case.inputs.tensors | given)
    return dataclasses.replace(case, inputs=inputs)


def linear(seen: Seen) -> tuple[str, None]:
    for name in GRADIENTS:
        got = [result_rows(seen, call, name) for call in range(3)]
        bounds = [bound_rows(seen, call, name) for call in range(3)]
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(got[2] - (2 * got[0] + got[1]))
            far = ~(error <= 2 * bounds[0] + bounds[1] + bounds[2])
        rows = far.any(axis=(0, 1, 3))
        if rows.any():
            where = whose(seen, 2, name, np.flatnonzero(rows))
            return f"{name} is not linear in dy, for {where}.", None
    return "", None
