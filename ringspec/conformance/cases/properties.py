"""Properties: relations between several results of one target, the program under test.

The results of one problem must agree over different rings (numbers of workers and layouts), gradients must be linear in
dy, and merged blocks must give attention over all keys. Inputs are fixed. Each result is also compared with its own
correct values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.claimed_rings import MOST_TOKENS, case_of_rings
from ringspec.conformance.cases.invariance import bound_rows, differs_in, result_rows, whose
from ringspec.conformance.cases.merge import merge_cases
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import (
    DTYPES,
    RINGS,
    Seen,
    dealt,
    drawn,
    few_rings,
    judged,
    run_case,
)
from ringspec.conformance.cases.special_values import special_cases
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.case import Case, TensorRecipe
from ringspec.vectors.format.inputs import draw

TOKENS = 72
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (20, 0)},
}
GRADIENTS = ("dq", "dk", "dv")
MOST_WORKERS = 8  # starting more processes takes seconds
WORKER_PROBLEMS = (
    ("causal", "contiguous"),
    ("causal", "striped"),
    ("causal", "zigzag"),
    ("full", "contiguous"),
)


def cases(profile: str = "core") -> list[RunCase]:
    """Return the properties of a profile, followed by the cases of special values.

    'smoke' has only properties of rings of at least three workers.

    >>> [case.id for case in cases()][:2]
    ['property/rings/full-bf16', 'property/rings/full-f32']
    """
    if profile == "smoke":
        return list(worker_cases())
    return [
        *ring_cases(),
        *worker_cases(),
        *linearity_cases(),
        *merge_cases(),
        *special_cases(),
    ]


def ring_cases() -> Iterator[RunCase]:
    """Yield cases that run one problem in every ring that the target claims to support."""
    for mask, terms in MASKS.items():
        for dtype in DTYPES:
            yield over_rings(f"property/rings/{mask}-{dtype}", f"rings-{mask}", dtype, terms)


def over_rings(id: str, name: str, dtype: str, terms: dict[str, Any]) -> RunCase:
    problem = drawn(name, dtype, S=TOKENS, **terms)
    every = [dealt(problem, f"{id}-{layout}-w{w}", w, layout) for w, layout in RINGS]
    return case_of_rings(
        id,
        "The same problem over every claimed ring size and layout gives the same results.",
        lambda claims: every,
        partial(judged, look=agree),
        least=2,
        rules=("LAYOUT-5", "RING-2"),
        flags=("partials-rounded-to-16-bit", "zigzag-chunk-order", "striped-diagonal"),
    )


def worker_cases() -> Iterator[RunCase]:
    """Yield cases that run one problem in claimed rings of at least three workers."""
    for mask, layout in WORKER_PROBLEMS:
        for dtype in DTYPES:
            id = f"property/workers/{mask}-{layout}-{dtype}"
            yield case_of_rings(
                id,
                "Rings of three workers or more, where the direction matters.",
                partial(worker_rings, id, mask, layout, dtype),
                rules=("RING-1", "RING-2", "RING-4"),
                flags=("ring-direction", "dkv-not-home"),
            )


def worker_rings(id: str, mask: str, layout: str, dtype: str, claims: Capabilities) -> list[Case]:
    """Divide a problem among each of the :func:`numbers_of_workers`."""
    found = []
    for workers in numbers_of_workers(claims):
        tokens = tokens_for(workers, claims.tokens_multiple)
        heads = math.lcm(2, claims.kv_heads_unit(workers))
        problem = drawn(f"workers-{mask}", dtype, S=tokens, H=heads, **MASKS[mask])
        found.append(dealt(problem, f"{id}-w{workers}", workers, layout))
    return found


def numbers_of_workers(claims: Capabilities) -> tuple[int, ...]:
    """Return the two smallest claimed W >= 3 and the largest W <= 8.

    A number that needs too many tokens is left out.

    >>> numbers_of_workers(Capabilities(workers=(2, 4, 6, 8, 64)))
    (4, 6, 8)
    >>> numbers_of_workers(Capabilities()), numbers_of_workers(Capabilities(workers=(2,)))
    ((3, 4), ())
    """
    several = sorted({3, 4} if claims.workers is None else {w for w in claims.workers if w >= 3})
    fit = [w for w in several if tokens_for(w, claims.tokens_multiple) <= MOST_TOKENS]
    few = {*fit[:2], *[w for w in fit if w <= MOST_WORKERS][-1:]}
    return tuple(sorted(few))


def tokens_for(workers: int, multiple: int) -> int:
    """Return a length of at least 24 that gives each worker an even number of tokens, divisible by ``multiple``."""
    step = workers * math.lcm(2, multiple)
    return step * -(-24 // step)


def agree(seen: Seen) -> tuple[str, None]:
    """Check that the results in each ring agree with those in the first ring, within the error bounds of both."""
    for call in range(1, len(seen.calls)):
        for name in seen.outputs[call]:
            rows = differs_in(seen, call, name).any(axis=(0, 1))
            if rows.any():
                first, other = (ring_name(seen.calls[n]) for n in (0, call))
                where = whose(seen, call, name, np.flatnonzero(rows))
                return f"{name} over {other} differs from {name} over {first}, for {where}.", None
    return "", None


def ring_name(call: Call) -> str:
    """Describe the ring of a call: '4 workers, zigzag'."""
    return f"{call.workers} worker{'s' if call.workers > 1 else ''}, {call.layout}"


def linearity_cases() -> Iterator[RunCase]:
    """Yield cases that test that gradients are linear in dy.

    If dy and dy' give the gradients g and g', then 2 dy + dy' must give 2 g + g'.
    """
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
                "The gradients of 2 dy + dy' are twice those of dy plus those of dy'.",
                [dealt(problem, f"{id}-{part}", workers, layout) for problem, part in parts],
                linear,
                only_backward=True,
                rules=("BWD-2", "BWD-3"),
                flags=("dy-ignored", "delta-of-few-rows"),
            )


def with_dy(case: Case, dy: NDArray[np.float64]) -> Case:
    """Replace the dy of a problem by the given numbers."""
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
