"""Diagonals, offsets and layouts: blocks whose place in the sequence is taken for another."""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    circulates,
    either,
    forward,
    in_parts,
    layout,
    ring,
    tensor,
    term,
    tokens,
    unequal,
    when,
    without,
)
from ringspec.conformance.diagnose.mutants.hooks import At, mask, merged
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.conformance.diagnose.mutants.wrong_masks import (
    Mask,
    at_positions,
    believing,
    by_call,
    local,
    moved_keys,
    only,
    positions_if,
    rows_at,
    taken,
)
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array, Booleans, Columns, Integers, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec import masks
from ringspec.spec.block import BlockGradients
from ringspec.spec.online_softmax import SoftmaxState


def triangle_on_every_step(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Blocks that are not wholly hidden get the triangle of the own block."""
    allowed = mask(at, rows, columns, terms)
    if at.own or not allowed.any():
        return allowed
    assert at.query.rows is not None and at.key.columns is not None
    by = at.query.rows.position.min() - at.key.columns.position.min()
    return moved_keys(rows, columns, terms, int(by))


def local_positions(call: Call) -> Mask:
    counted = local(call)
    return lambda at, rows, columns, terms: mask(at, *counted(rows, columns), terms)


def causal_on_first_step_alone(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    return mask(at, rows, columns, terms if at.own else only(terms, "window"))


def not_later_than_worker(at: At) -> bool:
    """The worker's rank <= the step, where the step must be <= the rank."""
    return at.worker <= at.step


def rank_not_above_step(at: At) -> bool:
    """The same test of the pair that meets, whichever of the two travels."""
    step = at.direction * (at.query.owner - at.key.owner) % at.workers
    return at.query.owner <= step


def mirrored(call: Call) -> Mask:
    """Key block b stands where block 2a - b does, for queries of worker a."""
    assert call.index_k is not None
    n = call.index_k.shape[1]

    def flipped(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        return moved_keys(rows, columns, terms, 2 * n * (at.query.owner - at.key.owner))

    return flipped


def inclusive(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    later = at.key.owner > at.query.owner
    return moved_keys(rows, columns, terms, -at.workers if later else 0)


def exclusive(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    earlier = at.key.owner < at.query.owner
    return moved_keys(rows, columns, terms, at.workers if earlier else 0)


def shifted_diagonal(by: int, late_rows_alone: bool = False) -> Mask:
    """The causal diagonal ``by`` keys further; all other terms as they are."""

    def shifted(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        assert at.query.rows is not None
        position = rows.position + by
        if late_rows_alone:
            whole = at.query.rows.position
            late = rows.position >= np.median(whole, axis=1, keepdims=True)
            position = np.where(late, position, rows.position)
        others = mask(at, rows, columns, only(terms, "window"))
        diagonal = masks.causal(position, columns.position)[:, None]
        return others & diagonal if terms.causal else others

    return shifted


def last_key_hidden(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    assert at.key.columns is not None
    last = at.key.columns.index[-1:]
    return mask(at, rows, columns, terms) & ~np.isin(columns.index, last)[None, None, None]


def dealt_in_order(table: Integers) -> Integers:
    return np.arange(table.size).reshape(table.shape)


def swapped_chunks(table: Integers) -> Integers:
    half = table.shape[1] // 2
    return np.concatenate((table[:, half:], table[:, :half]), axis=1)


def chunks_in_order(table: Integers) -> Integers:
    """Worker r holds chunks r and W + r, and not 2W - 1 - r."""
    half = table.shape[1] // 2
    return np.concatenate((table[:, :half], table[::-1, half:]), axis=1)


def keys_in_order(call: Call) -> Mask:
    """Gathered keys lie in the order of the workers and are masked as if in the order of tokens."""
    assert call.index_k is not None
    on_k = positions_if(call, "k", dealt_in_order(call.index_k))
    return lambda at, rows, columns, terms: mask(
        at, rows, at_positions(columns, taken(on_k, columns.index)), terms
    )


def offset_dropped(call: Call) -> Mask:
    by = call.terms["q_offset"]
    return lambda at, rows, columns, terms: mask(
        at, rows_at(rows, rows.position - by), columns, terms
    )


def other_end(call: Call) -> Mask:
    """Aligned at the end of the sequences where the start is asked for, and the reverse."""
    by = tokens(call.index_k) - tokens(call.index_q)
    by = -by if call.terms.get("q_offset", 0) == by else by
    return lambda at, rows, columns, terms: mask(
        at, rows_at(rows, rows.position + by), columns, terms
    )


def halves_swapped(x: Array) -> Array:
    half = x.shape[2] // 2
    return np.concatenate((x[:, :, half:], x[:, :, :half]), axis=2)


def into_first_half(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    if at.key.owner > at.query.owner:
        part = SoftmaxState(*(halves_swapped(x) for x in (part.m, part.l, part.o)))
    return merged(at, running, part, recipe)


def to_second_half(at: At, share: BlockGradients) -> BlockGradients:
    if at.key.owner >= at.query.owner:
        return share
    dk, dv = halves_swapped(share.dk), halves_swapped(share.dv)
    return dataclasses.replace(share, dk=dk, dv=dv)


CAUSAL = when(attends, term("causal"))
PLAIN_CAUSAL = when(ring(2), term("causal"), layout("contiguous"))
ZIGZAG_HALVES = when(
    ring(2), layout("zigzag"), term("causal"), without("window", "q_offset"),
    lambda call: not unequal(call),
)  # fmt: skip
MASKED = either(term("causal"), term("window"), tensor("bound_min"))

BUGS = (
    mutant(
        "causal-on-every-step",
        "the causal triangle of the worker's own block is applied to blocks of other workers",
        "Blocks that lie entirely in the past get the causal triangle of the diagonal block, "
        "which hides their later keys. With one worker nothing shows.",
        "zhuzilin/ring-flash-attention/commit/63b1c31", "zhuzilin/ring-flash-attention/pull/10",
        flags=("causal-on-every-step",),
        applies=PLAIN_CAUSAL,
        mask=triangle_on_every_step,
    ),
    mutant(
        "inverted-skip",
        "the test that skips future blocks is inverted",
        "Workers skip their own diagonal and past blocks, and compute future ones without a mask.",
        "zhuzilin/ring-flash-attention/commit/63b1c31",
        flags=("inverted-skip",),
        applies=when(PLAIN_CAUSAL, circulates("kv")),
        mask=causal_on_first_step_alone,
        computes=not_later_than_worker,
        guises=(
            guise(
                "the blocks that are computed have the right mask",
                when(ring(2), term("causal")),
                computes=rank_not_above_step,
            ),
        ),
    ),
    mutant(
        "future-not-skipped",
        "future blocks are computed without a mask",
        "The causal triangle is applied to the diagonal block only, and blocks of later workers "
        "are not skipped.",
        flags=("inverted-skip",),
        applies=PLAIN_CAUSAL,
        mask=causal_on_first_step_alone,
    ),
    mutant(
        "local-positions",
        "blocks are masked by local indices instead of positions",
        "Every pair of blocks is masked as a diagonal block, slots 0 to n - 1 against slots 0 to "
        "n - 1. With one worker nothing shows.",
        flags=("causal-on-every-step", "positions-not-sharded"),
        applies=when(in_parts, MASKED),
        hooks=by_call(local_positions),
    ),
    mutant(
        "offset-sign",
        "the offset between two blocks has the wrong sign",
        "Past key blocks are treated as future ones, and the reverse. The diagonal block is "
        "right. With one worker nothing shows.",
        flags=("inverted-skip",),
        applies=when(ring(2), layout("contiguous"), MASKED),
        hooks=by_call(mirrored),
    ),
    mutant(
        "q-offset-ignored",
        "the offset of the queries is ignored",
        "Queries that continue a longer sequence are masked as if they started it.",
        flags=("end-alignment",),
        applies=when(attends, term("q_offset")),
        hooks=by_call(offset_dropped),
    ),
    mutant(
        "end-alignment",
        "the causal diagonal is aligned at the wrong end when Sq differs from Sk",
        "The diagonal starts at the first key where it should end at the last, or the reverse. "
        "Equal lengths hide it.",
        "ROCm/flash-attention/pull/185",
        flags=("end-alignment",),
        applies=when(unequal, either(term("causal"), term("window"))),
        hooks=by_call(other_end),
    ),
    mutant(
        "diagonal-inclusive",
        "each row sees the key after its own",
        "The causal diagonal is off by one key to the right.",
        applies=CAUSAL,
        mask=shifted_diagonal(1),
    ),
    mutant(
        "diagonal-exclusive",
        "no row sees its own key",
        "The causal diagonal is off by one key to the left; the first row sees nothing.",
        applies=CAUSAL,
        mask=shifted_diagonal(-1),
    ),
    mutant(
        "half-of-diagonal",
        "the diagonal is off by one in the second half of a worker's rows",
        "Rows of the second half see one key too many. In a long sequence that hardly changes o, "
        "and tolerances scaled by the largest value accept it.",
        flags=("striped-diagonal",),
        applies=CAUSAL,
        mask=shifted_diagonal(1, late_rows_alone=True),
    ),
    mutant(
        "half-of-diagonal-exclusive",
        "the second half of a worker's rows do not see their own key",
        "Rows of the second half of a block see one key too few.",
        flags=("striped-diagonal",),
        applies=CAUSAL,
        mask=shifted_diagonal(-1, late_rows_alone=True),
    ),
    mutant(
        "striped-diagonal",
        "the diagonal of striped key blocks of later workers is inclusive",
        "Slot i must not see key j = i of a later worker; here it does.",
        "lucidrains/ring-attention-pytorch/issues/11",
        flags=("striped-diagonal",),
        applies=when(ring(2), layout("striped"), term("causal")),
        mask=inclusive,
    ),
    mutant(
        "striped-diagonal-exclusive",
        "the diagonal of striped key blocks of earlier workers is exclusive",
        "The strict triangle, right for keys of later workers, is applied to keys of earlier "
        "workers as well.",
        "lucidrains/ring-attention-pytorch/issues/11",
        flags=("striped-diagonal",),
        applies=when(ring(2), layout("striped"), term("causal")),
        mask=exclusive,
    ),
    mutant(
        "zigzag-chunk-order",
        "the two zigzag chunks of a worker are used in the wrong order",
        "The kernel assumes that the later chunk comes first. Without a mask nothing shows.",
        "feifeibear/long-context-attention/issues/53",
        flags=("zigzag-chunk-order",),
        applies=when(attends, layout("zigzag"), MASKED),
        hooks=by_call(lambda call: believing(call, swapped_chunks)),
    ),
    mutant(
        "zigzag-chunks-in-order",
        "zigzag workers are assumed to hold chunks r and W + r",
        "The second chunk of worker r is chunk 2W - 1 - r. With one worker both are the same.",
        "feifeibear/long-context-attention/issues/53",
        flags=("zigzag-chunk-order",),
        applies=when(ring(2), layout("zigzag"), MASKED),
        hooks=by_call(lambda call: believing(call, chunks_in_order)),
    ),
    mutant(
        "zigzag-half-step-misplaced",
        "zigzag results of the later chunk are merged into the earlier chunk",
        "Only the later chunk sees the keys of a later worker. Its half-size result is merged "
        "into the first half of o and lse.",
        "NVIDIA/TransformerEngine/pull/716",
        flags=("zigzag-chunk-order",),
        applies=when(ZIGZAG_HALVES, forward),
        merge=into_first_half,
    ),
    mutant(
        "zigzag-half-gradient-misplaced",
        "zigzag gradients of the earlier keys are added to the later keys",
        "Only the first chunk of an earlier worker's keys is visible. Its half-size dk and dv are "
        "added to the second half.",
        "NVIDIA/TransformerEngine/pull/716",
        flags=("zigzag-chunk-order",),
        applies=when(ZIGZAG_HALVES, backward),
        share=to_second_half,
    ),
    mutant(
        "positions-not-sharded",
        "positions are sharded by rank and not with their tokens",
        "The layout decides which worker holds a token, but its position is assigned by rank. A "
        "striped or zigzag ring then has the mask of a contiguous one.",
        "NVIDIA/TransformerEngine/pull/2349",
        flags=("positions-not-sharded", "zigzag-chunk-order"),
        applies=when(
            ring(2), MASKED, layout("striped", "zigzag", "zigzag_per_document", "table")
        ),
        hooks=by_call(lambda call: believing(call, dealt_in_order)),
    ),
    mutant(
        "gathered-keys-in-rank-order",
        "gathered keys are masked as if they were in token order",
        "After the gather the blocks are in worker order and are not reordered. A contiguous "
        "layout hides it.",
        flags=("positions-not-sharded",),
        applies=when(ring(2), circulates("gather"), MASKED, layout("striped", "zigzag", "table")),
        hooks=by_call(keys_in_order),
    ),
    mutant(
        "last-key-of-block-lost",
        "the last key of each block is not seen",
        "A loop over keys ends one early; each ring step loses another key.",
        flags=("short-or-uneven-length",),
        applies=attends,
        mask=last_key_hidden,
    ),
)  # fmt: skip
