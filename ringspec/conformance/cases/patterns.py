"""Probes that read the attention pattern of the forward and of the backward pass from the results.

A probe is a case with inputs so simple that a failure shows its cause; the pattern says which keys each query sees.
With zero queries every visible key has the same weight, and one-hot values write that weight into the column of the
key. So o *is* the attention pattern, divided by its row sums. In the backward pass, one-hot dy makes dv the transposed
pattern. One-hot keys write dZ (the gradient of the masked scores) to dq, and one-hot queries write it to dk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.problems import (
    DTYPES,
    HEAD_DIM,
    MASKS,
    RINGS,
    TOKENS,
    USUAL_DTYPES,
    Seen,
    Tensors,
    dealt,
    drawn,
    few_rings,
    run_case,
    side_of,
    tables_of,
    tensors_of,
)
from ringspec.conformance.diagnose.picture import (
    KEYS_FIRST,
    describe,
    first_difference,
    gathered,
    not_a_number,
    patterns,
    pictured,
)
from ringspec.vectors.catalogue import build
from ringspec.vectors.catalogue.build import constant, put
from ringspec.vectors.format.case import Case, TensorRecipe

Join = Callable[[NDArray[np.float64]], NDArray[np.float64]]
IN_FEW_RINGS = ("bounds", "dense", "two-sided-window")
MORE_RINGS = {
    "causal": ((3, "table"), (8, "contiguous")),
    "documents": ((2, "zigzag_per_document"), (3, "zigzag_per_document")),
}
FLAGS = {
    "causal": ("causal-on-every-step", "striped-diagonal", "zigzag-chunk-order"),
    "full": ("ring-direction", "mask-ignored-in-ring"),
    "window": ("window-per-block", "window-off-by-one"),
    "two-sided-window": ("window-per-block", "window-sentinel"),
    "documents": ("packing-ignored", "local-document-starts"),
    "segments": ("packing-ignored", "positions-not-sharded"),
}


def one_hot(tokens: int = TOKENS) -> TensorRecipe:
    """Make a tensor in which token t is 1 in column t, in every batch and head."""
    return constant(0.0, None, *(put(1.0, None, None, t, t) for t in range(tokens)))


def grid() -> Iterator[tuple[str, str, int, str]]:
    """Yield (mask, dtype, workers, layout) of each pattern case.

    Cases with the same correct results follow each other, because these results are cached.
    """
    for mask in MASKS:
        for dtype in USUAL_DTYPES if mask in IN_FEW_RINGS else DTYPES:
            every = dtype in USUAL_DTYPES and mask not in IN_FEW_RINGS
            more = MORE_RINGS.get(mask, ()) if dtype in USUAL_DTYPES else ()
            for workers, layout in (*(RINGS if every else few_rings(dtype)), *more):
                yield mask, dtype, workers, layout


@functools.cache
def forward_problem(mask: str, dtype: str) -> Case:
    """Make the problem that all rings of a mask and a format divide. To make it takes longer than to divide it."""
    return drawn(
        f"pattern-{mask}", dtype, backward=False, q=constant(0.0), v=one_hot(), **MASKS[mask]
    )


@functools.cache
def backward_problems(mask: str, dtype: str) -> tuple[Case, Case]:
    name, ones, zero = f"pattern-{mask}", one_hot(), constant(0.0)
    return (
        drawn(name, dtype, q=zero, k=ones, v=ones, dy=ones, **MASKS[mask]),
        drawn(name, dtype, q=ones, k=zero, v=ones, dy=ones, **MASKS[mask]),
    )


def pattern_cases() -> Iterator[RunCase]:
    """Yield cases that read the pattern of the forward pass, for every mask and ring."""
    for mask, dtype, workers, layout in grid():
        id = f"probe/pattern/{mask}-{word(layout)}-w{workers}-{dtype}"
        yield run_case(
            id,
            "Zero queries and one-hot values: o is the attention pattern divided by its row sums.",
            [dealt(forward_problem(mask, dtype), id, workers, layout)],
            Reads(("o",)),
            rules=("FWD-4", "MASK-9"),
            flags=FLAGS.get(mask, ("mask-ignored-in-ring",)),
        )


def gradient_pattern_cases() -> Iterator[RunCase]:
    """Yield cases of two calls that read the pattern of the backward pass.

    In the first call q is 0: dv shows the pattern, and dq shows dZ. In the second call k is 0: dk shows dZ.
    """
    for mask, dtype, workers, layout in grid():
        id = f"probe/gradient-pattern/{mask}-{word(layout)}-w{workers}-{dtype}"
        parts = zip(backward_problems(mask, dtype), "ab", strict=True)
        yield run_case(
            id,
            "Zero scores and one-hot inputs: dv, dq and dk show which query contributed to which key.",
            [dealt(problem, f"{id}-{part}", workers, layout) for problem, part in parts],
            Reads(("dv", "dq"), ("dk",)),
            only_backward=True,
            rules=("BWD-5", "BWD-6", "BWD-7", "MASK-9"),
            flags=("stale-keys", "dy-ignored", *FLAGS.get(mask, ("mask-ignored-in-ring",))),
        )


def block_cases() -> Iterator[RunCase]:
    """Yield cases of one causal block: forward, and backward from a given lse and delta."""
    counts = np.arange(1, TOKENS + 1)
    rows = {"lse": np.log(counts).astype(np.float32), "delta": (1 / counts).astype(np.float32)}
    given = {
        name: np.broadcast_to(x.astype(np.float64), (1, 2, TOKENS)) for name, x in rows.items()
    }
    inputs: dict[str, Any] = {"q": constant(0.0), "v": one_hot(), "causal": True}
    more: dict[str, Any] = {"k": one_hot(), "dy": one_hot()} | {
        name: TensorRecipe("values", values=x.tolist()) for name, x in given.items()
    }
    for dtype in USUAL_DTYPES:
        sizes: dict[str, Any] = {"S": TOKENS, "D": HEAD_DIM, "dtype": dtype}
        for label, make, names, extra in (
            ("pattern", build.block_forward, ("o",), {}),
            ("gradient-pattern", build.block_backward, ("dv", "dq"), more),
        ):
            id = f"probe/{label}/block-causal-{dtype}"
            yield run_case(
                id,
                "Zero queries and one-hot inputs: the results are the pattern of the diagonal block.",
                [make(id, "", "", **sizes, **inputs, **extra)],
                Reads(names),
                rules=("MASK-1", "BWD-11"),
            )


def word(layout: str) -> str:
    """Return the name of a layout as it is written in case ids."""
    return layout.replace("_", "-")


class Reads:
    """Finds the first tensor, in all calls of a case, that shows an unexpected pattern.

    ``names``: the tensors to read, for each call. ``join``: how to join the heads, if a pattern is distributed over
    them.
    """

    def __init__(self, *names: tuple[str, ...], join: Join = np.asarray) -> None:
        self.names, self.join = names, join

    def __call__(self, seen: Seen) -> tuple[str, dict[str, Any] | None]:
        for case, output, names in zip(seen.cases, seen.outputs, self.names, strict=True):
            tensors = tensors_of(case)
            for name in names:
                message, picture = read(name, tensors, output[name], self.join)
                if message:
                    return message, picture
        return "", None


def read(
    name: str, tensors: Tensors, shards: Sequence[NDArray], join: Join
) -> tuple[str, dict[str, Any] | None]:
    """Compare the pattern in one tensor with the expected one.

    Returns a message and a picture, or ('', None) if the pattern is as expected.
    """
    tables = tables_of(tensors)
    rows, columns = (tables[side] for side in ("qk" if side_of(name) == "q" else "kq"))
    want = tensors[f"out.{name}.float64"]
    in_order = gathered(list(want if "layout.q" in tensors else want[None]), rows)
    got, keys = gathered(shards, rows), int((columns >= 0).sum())
    expected, seen = patterns(name, join(in_order), join(got), keys)
    at = first_difference(expected, seen)
    if np.isnan(got).any():
        rows_side = "kq" if name in KEYS_FIRST else "qk"
        return not_a_number(name, got, tables[rows_side[0]]), pictured(expected, seen, at)
    if at is None:
        return "", None
    what = describe(name, expected[at], seen[at], tables)
    return f"In batch {at[0]}, head {at[1]}, {what}", pictured(expected, seen, at)
