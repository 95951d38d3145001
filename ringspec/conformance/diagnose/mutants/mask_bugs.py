"""Masks and windows that are ignored, replaced or misread.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    either,
    packed,
    ring,
    tensor,
    term,
    when,
    without,
)
from ringspec.conformance.diagnose.mutants.hooks import At, mask
from ringspec.conformance.diagnose.mutants.mutant import mutant
from ringspec.conformance.diagnose.mutants.wrong_masks import (
    Mask,
    bare,
    by_call,
    local,
    only,
    slots,
    taken,
)
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Booleans, Columns, Rows, Terms, columns_of
from ringspec.spec import masks

Sides = tuple[int | None, int | None]


def everything(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    return mask(at, bare(rows), dataclasses.replace(columns, segment=None), only(terms))


def triangle_alone(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    terms = dataclasses.replace(only(terms), causal=True)
    return mask(at, bare(rows), dataclasses.replace(columns, segment=None), terms)


def first_head_of_mask(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Apply the dense mask of head 0 to all heads."""
    if rows.mask is None:
        return mask(at, rows, columns, terms)
    return mask(at, dataclasses.replace(rows, mask=rows.mask[:, :1]), columns, terms)


def local_columns_of_mask(call: Call) -> Mask:
    """Return a mask that reads the wrong columns of the dense mask: 0 to n - 1 for every block of n keys."""
    on_k = slots(call.index_k)

    def at_slots(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        assert rows.mask is not None
        others = mask(at, dataclasses.replace(rows, mask=None), columns, terms)
        local = dataclasses.replace(columns, index=taken(on_k, columns.index)[0])
        return others & columns_of(rows.mask, local)

    return at_slots


def bounds_inclusive(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    if rows.bound_max is None:
        return mask(at, rows, columns, terms)
    return mask(at, dataclasses.replace(rows, bound_max=rows.bound_max + 1), columns, terms)


def window_is(sides: Callable[[Any, Any], Sides]) -> Callable[[str, Terms], Terms]:
    """Return a piece that replaces the window (left, right) by ``sides(left, right)``."""

    def changed(phase: str, terms: Terms) -> Terms:
        if terms.window is None:
            return terms
        return dataclasses.replace(terms, window=sides(*terms.window))

    return changed


def less(side: int | None, by: int) -> int | None:
    return None if side is None else max(side - by, 0)


def without_window(phase: str, terms: Terms) -> Terms:
    return dataclasses.replace(terms, window=None)


def window_per_block(call: Call) -> Mask:
    """Return a mask whose window counts from the start of each worker's block; the causal diagonal is correct."""
    counted = local(call)

    def windowed(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        others = mask(at, rows, columns, only(terms, "causal"))
        local_rows, local_columns = counted(rows, columns)
        return others & mask(at, *without_others(local_rows, local_columns), only(terms, "window"))

    return windowed


def without_others(rows: Rows, columns: Columns) -> tuple[Rows, Columns]:
    return bare(rows), dataclasses.replace(columns, segment=None)


def empty_band(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Compute a mask with the window (-1, 0). It is empty, because it begins after the row and ends at the row."""
    band = masks.window(rows.position, columns.position, (-1, 0))[:, None]
    return mask(at, rows, columns, terms) & band


def literal(left: int | None, right: int | None) -> Sides:
    return -1 if left is None else left, -1 if right is None else right


WINDOW = when(attends, term("window"))
ANY_MASK = either(
    term("causal"), term("window"), packed, tensor("mask"), tensor("bound_min"), tensor("bias")
)

BUGS = (
    mutant(
        "mask-ignored-in-ring",
        "no mask is applied",
        "The ring always calls its kernel for full attention, whatever mask the caller passes.",
        "NVIDIA/TensorRT-LLM/pull/13821",
        flags=("mask-ignored-in-ring",),
        applies=when(attends, ANY_MASK),
        mask=everything,
    ),
    mutant(
        "causal-alone",
        "every mask is replaced by a causal mask",
        "Windows, document boundaries and dense masks are dropped, and the call is marked "
        "causal. Layers with a window are then trained without it.",
        "huggingface/accelerate/pull/4177",
        flags=("mask-ignored-in-ring",),
        applies=attends,
        mask=triangle_alone,
    ),
    mutant(
        "mask-of-first-head",
        "the dense mask of the first head is used for all heads",
        "The mask is indexed without its head axis. A mask that is the same for all heads hides "
        "the bug.",
        applies=when(attends, tensor("mask"), lambda call: call.worker("mask", 0).shape[1] > 1),
        mask=first_head_of_mask,
    ),
    mutant(
        "mask-columns-local",
        "the dense mask is read at key indices within the block",
        "Every visiting block reads columns 0 to n - 1 of the mask, which belong to the first "
        "worker's keys.",
        flags=("causal-on-every-step",),
        applies=when(ring(2), tensor("mask")),
        hooks=by_call(local_columns_of_mask),
    ),
    mutant(
        "bounds-inclusive",
        "the upper key bound of a row (bound_max) is treated as inclusive",
        "A query attends to the key at bound_max, the first one that must be masked.",
        flags=("window-off-by-one",),
        applies=when(attends, tensor("bound_max")),
        mask=bounds_inclusive,
    ),
    mutant(
        "window-ignored",
        "the window is ignored",
        "The ring looks up the window under a name that the caller does not use. The causal mask "
        "and document boundaries are still applied.",
        "PrimeIntellect-ai/prime-rl/pull/2828", "huggingface/accelerate/pull/4177",
        flags=("mask-ignored-in-ring",),
        applies=WINDOW,
        terms=without_window,
    ),
    mutant(
        "window-per-block",
        "the window is applied to indices within each block",
        "Every ring step measures the window in indices within the block instead of positions, "
        "so keys of other workers are wrongly masked or wrongly visible. With one worker, or a "
        "window as wide as the sequence, the bug has no effect.",
        "zhuzilin/ring-flash-attention",
        flags=("window-per-block",),
        applies=when(ring(2), term("window")),
        hooks=by_call(window_per_block),
    ),
    mutant(
        "window-off-by-one",
        "the window is one key too wide on each bounded side",
        "The window is passed as numbers of keys where the kernel expects inclusive distances, "
        "or vice versa.",
        "huggingface/transformers/issues/39408",
        flags=("window-off-by-one",),
        applies=WINDOW,
        terms=window_is(lambda left, right: (less(left, -1), less(right, -1))),
    ),
    mutant(
        "window-one-wide",
        "the window is one key too wide on the left",
        "The left side is passed as a number of keys where a distance is expected. The right "
        "side is correct.",
        "huggingface/transformers/issues/39408",
        flags=("window-off-by-one",),
        applies=when(WINDOW, lambda call: call.terms["window"][0] is not None),
        terms=window_is(lambda left, right: (less(left, -1), right)),
    ),
    mutant(
        "window-one-short",
        "the window is one key too narrow on the left",
        "The left side of the window is treated as exclusive.",
        flags=("window-off-by-one",),
        applies=WINDOW,
        terms=window_is(lambda left, right: (less(left, 1), right)),
    ),
    mutant(
        "window-sentinel",
        "an unbounded side of the window is read as the distance -1",
        "One side of an interface writes -1 for 'unbounded', and the other reads a distance. A "
        "window with an unbounded left side and a right side of 0 then masks every key: o = 0 "
        "and lse = -inf.",
        "NVIDIA/TransformerEngine/issues/3528",
        flags=("window-sentinel",),
        applies=when(WINDOW, lambda call: None in call.terms["window"]),
        terms=window_is(literal),
    ),
    mutant(
        "causal-as-empty-band",
        "a causal mask is passed as the window (-1, 0), which is taken literally",
        "No query attends to any key: o = 0 and lse = -inf.",
        "NVIDIA/TransformerEngine/issues/3528", "NVIDIA/TransformerEngine/pull/3532",
        flags=("window-sentinel",),
        applies=when(attends, term("causal"), without("window")),
        mask=empty_band,
    ),
    mutant(
        "window-zero-unbounded",
        "a window side of 0 is read as unbounded",
        "0 is treated as 'not given'. If only the right side is 0, a causal mask hides the bug.",
        flags=("window-sentinel",),
        applies=when(WINDOW, lambda call: 0 in call.terms["window"]),
        terms=window_is(lambda left, right: (left or None, right or None)),
    ),
    mutant(
        "window-sides-swapped",
        "the left and right sides of the window are swapped",
        "Queries attend to later keys where they should attend to earlier ones, and vice versa.",
        applies=WINDOW,
        terms=window_is(lambda left, right: (right, left)),
    ),
)  # fmt: skip
