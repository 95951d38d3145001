"""Masks that are dropped, narrowed or misread, and windows."""

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
    """The dense mask of head 0 stands for all heads."""
    if rows.mask is None:
        return mask(at, rows, columns, terms)
    return mask(at, dataclasses.replace(rows, mask=rows.mask[:, :1]), columns, terms)


def local_columns_of_mask(call: Call) -> Mask:
    """Columns 0 to n - 1 of the dense mask, whichever block of keys is here."""
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
    """The window that a kernel uses for the one that was asked for."""

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
    """The window counts slots; the causal diagonal is the true one."""
    counted = local(call)

    def windowed(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        others = mask(at, rows, columns, only(terms, "causal"))
        local_rows, local_columns = counted(rows, columns)
        return others & mask(at, *without_others(local_rows, local_columns), only(terms, "window"))

    return windowed


def without_others(rows: Rows, columns: Columns) -> tuple[Rows, Columns]:
    return bare(rows), dataclasses.replace(columns, segment=None)


def empty_band(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """The window (-1, 0): keys from one after the row to the row, which is empty."""
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
        "The ring calls its kernel for full attention, whatever mask the caller passed.",
        "NVIDIA/TensorRT-LLM/pull/13821",
        flags=("mask-ignored-in-ring",),
        applies=when(attends, ANY_MASK),
        mask=everything,
    ),
    mutant(
        "causal-alone",
        "every mask is replaced by the causal one",
        "Windows, documents and dense masks are dropped and the call is marked causal; layers with a "
        "window are trained as if they had none.",
        "huggingface/accelerate/pull/4177",
        flags=("mask-ignored-in-ring",),
        applies=attends,
        mask=triangle_alone,
    ),
    mutant(
        "mask-of-first-head",
        "the dense mask of the first head is used for all heads",
        "The mask is indexed without its head axis. A mask that is the same for all heads hides it.",
        applies=when(attends, tensor("mask"), lambda call: call.worker("mask", 0).shape[1] > 1),
        mask=first_head_of_mask,
    ),
    mutant(
        "mask-columns-local",
        "the dense mask is read at local key indices",
        "Every visiting block reads columns 0 to n - 1 of the mask, those of the first worker's keys.",
        flags=("causal-on-every-step",),
        applies=when(ring(2), tensor("mask")),
        hooks=by_call(local_columns_of_mask),
    ),
    mutant(
        "bounds-inclusive",
        "the upper key bound of a row is inclusive",
        "A row sees the key at bound_max, the first one that it must not see.",
        flags=("window-off-by-one",),
        applies=when(attends, tensor("bound_max")),
        mask=bounds_inclusive,
    ),
    mutant(
        "window-ignored",
        "the window is ignored",
        "The ring looks up the window under another name and finds none; the causal mask and "
        "documents are applied.",
        "PrimeIntellect-ai/prime-rl/pull/2828", "huggingface/accelerate/pull/4177",
        flags=("mask-ignored-in-ring",),
        applies=WINDOW,
        terms=without_window,
    ),
    mutant(
        "window-per-block",
        "each block applies the window to local indices",
        "Every ring step gets the same window and applies it to local indices: keys of other "
        "workers are wrongly hidden or wrongly visible. With one worker, or a window as wide as "
        "the sequence, nothing shows.",
        "zhuzilin/ring-flash-attention",
        flags=("window-per-block",),
        applies=when(ring(2), term("window")),
        hooks=by_call(window_per_block),
    ),
    mutant(
        "window-off-by-one",
        "the window has one key too many on each bounded side",
        "The window is a count of keys where the kernel expects inclusive distances, or the "
        "reverse.",
        "huggingface/transformers/issues/39408",
        flags=("window-off-by-one",),
        applies=WINDOW,
        terms=window_is(lambda left, right: (less(left, -1), less(right, -1))),
    ),
    mutant(
        "window-one-wide",
        "the window has one key too many to the left",
        "The left side is a count of keys where a distance is expected; the right side is correct.",
        "huggingface/transformers/issues/39408",
        flags=("window-off-by-one",),
        applies=when(WINDOW, lambda call: call.terms["window"][0] is not None),
        terms=window_is(lambda left, right: (less(left, -1), right)),
    ),
    mutant(
        "window-one-short",
        "the window lacks its farthest key to the left",
        "The left side of the window is exclusive.",
        flags=("window-off-by-one",),
        applies=WINDOW,
        terms=window_is(lambda left, right: (less(left, 1), right)),
    ),
    mutant(
        "window-sentinel",
        "an unbounded side of the window is read as the distance -1",
        "One side of an interface writes -1 for 'unbounded' and the other reads a distance. The "
        "band is empty: o = 0, lse = -inf.",
        "NVIDIA/TransformerEngine/issues/3528",
        flags=("window-sentinel",),
        applies=when(WINDOW, lambda call: None in call.terms["window"]),
        terms=window_is(literal),
    ),
    mutant(
        "causal-as-empty-band",
        "causal is passed as the window (-1, 0), which is taken literally",
        "All rows are empty: o = 0, lse = -inf.",
        "NVIDIA/TransformerEngine/issues/3528", "NVIDIA/TransformerEngine/pull/3532",
        flags=("window-sentinel",),
        applies=when(attends, term("causal"), without("window")),
        mask=empty_band,
    ),
    mutant(
        "window-zero-unbounded",
        "a window side of 0 is read as unbounded",
        "0 is treated as 'not given'. A causal mask together with a right side of 0 hides it.",
        flags=("window-sentinel",),
        applies=when(WINDOW, lambda call: 0 in call.terms["window"]),
        terms=window_is(lambda left, right: (left or None, right or None)),
    ),
    mutant(
        "window-sides-swapped",
        "left and right of the window are swapped",
        "Rows see later keys where they should see earlier ones.",
        applies=WINDOW,
        terms=window_is(lambda left, right: (right, left)),
    ),
)  # fmt: skip
