"""Wrong diagonals, offsets and layouts: kernels that mistake where in the sequence a block lies.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. A layout table lists the tokens of each worker: row r has
those of worker r.
"""

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
    """Apply the causal triangle of the diagonal block to every other block.

    Blocks without a visible query-key pair stay masked.
    """
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
    """Compute the block only if the worker's rank <= step; the correct test is step <= rank."""
    return at.worker <= at.step


def rank_not_above_step(at: At) -> bool:
    """Compute the block only if the rank that owns the queries is <= step; the correct test is step <= rank.

    The step is the one at which the two blocks meet if keys travel, even in a ring in which queries travel.
    """
    step = at.direction * (at.query.owner - at.key.owner) % at.workers
    return at.query.owner <= step


def mirrored(call: Call) -> Mask:
    """Return a mask in which queries of worker a find key block b at the position of block 2a - b."""
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
    """Return a mask whose causal diagonal lies ``by`` keys further right; window and documents stay correct.

    ``late_rows_alone``: shift the diagonal only for the later half of the rows.
    """

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
    """Return a layout table with chunks r and W + r on worker r; zigzag puts r and 2W - 1 - r there."""
    half = table.shape[1] // 2
    return np.concatenate((table[:, :half], table[::-1, half:]), axis=1)


def keys_in_order(call: Call) -> Mask:
    """Return a mask that takes gathered keys to be in token order, although they are in worker order."""
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
    """Return a mask whose diagonal ends at the last query and key, instead of starting at the first ones.

    If the correct diagonal ends there, it is the other way round.
    """
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
        "which masks their later keys. With one worker the bug has no effect.",
        "zhuzilin/ring-flash-attention/commit/63b1c31", "zhuzilin/ring-flash-attention/pull/10",
        flags=("causal-on-every-step",),
        applies=PLAIN_CAUSAL,
        mask=triangle_on_every_step,
    ),
    mutant(
        "inverted-skip",
        "the test that skips future blocks is inverted",
        "Workers compute future blocks, without a mask, and skip their own block and most past "
        "ones.",
        "zhuzilin/ring-flash-attention/commit/63b1c31",
        flags=("inverted-skip",),
        applies=when(PLAIN_CAUSAL, circulates("kv")),
        mask=causal_on_first_step_alone,
        computes=not_later_than_worker,
        guises=(
            guise(
                "the blocks that are computed are masked correctly",
                when(ring(2), term("causal")),
                computes=rank_not_above_step,
            ),
        ),
    ),
    mutant(
        "future-not-skipped",
        "future blocks are computed without a mask",
        "The causal mask is applied to the diagonal block only, and blocks of later workers are "
        "not skipped.",
        flags=("inverted-skip",),
        applies=PLAIN_CAUSAL,
        mask=causal_on_first_step_alone,
    ),
    mutant(
        "local-positions",
        "blocks are masked by indices within the block instead of positions",
        "Every pair of blocks is masked like a diagonal block, as if both started at position 0. "
        "With one worker the bug has no effect.",
        flags=("causal-on-every-step", "positions-not-sharded"),
        applies=when(in_parts, MASKED),
        hooks=by_call(local_positions),
    ),
    mutant(
        "offset-sign",
        "the offset between two blocks has the wrong sign",
        "Past key blocks are treated as future ones, and vice versa. The diagonal block is "
        "correct, so with one worker the bug has no effect.",
        flags=("inverted-skip",),
        applies=when(ring(2), layout("contiguous"), MASKED),
        hooks=by_call(mirrored),
    ),
    mutant(
        "q-offset-ignored",
        "the position offset of the queries (q_offset) is ignored",
        "Queries that continue a longer sequence are masked as if they started it.",
        flags=("end-alignment",),
        applies=when(attends, term("q_offset")),
        hooks=by_call(offset_dropped),
    ),
    mutant(
        "end-alignment",
        "the causal diagonal is aligned at the wrong end when Sq differs from Sk",
        "The causal diagonal is aligned to the first key instead of the last, or vice versa. "
        "Equal numbers of queries and keys hide the bug.",
        "ROCm/flash-attention/pull/185",
        flags=("end-alignment",),
        applies=when(unequal, either(term("causal"), term("window"))),
        hooks=by_call(other_end),
    ),
    mutant(
        "diagonal-inclusive",
        "each query also attends to the key after its own position",
        "The causal diagonal is off by one key to the right.",
        applies=CAUSAL,
        mask=shifted_diagonal(1),
    ),
    mutant(
        "diagonal-exclusive",
        "no query attends to the key at its own position",
        "The causal diagonal is off by one key to the left; the first query attends to no key.",
        applies=CAUSAL,
        mask=shifted_diagonal(-1),
    ),
    mutant(
        "half-of-diagonal",
        "the causal diagonal is one key too far right in the second half of each worker's rows",
        "These queries attend to one key too many. In a long sequence this hardly changes o, and "
        "tolerances scaled by the largest value accept it.",
        flags=("striped-diagonal",),
        applies=CAUSAL,
        mask=shifted_diagonal(1, late_rows_alone=True),
    ),
    mutant(
        "half-of-diagonal-exclusive",
        "queries in the second half of each worker's rows do not attend to their own key",
        "The causal diagonal of these rows is off by one key to the left.",
        flags=("striped-diagonal",),
        applies=CAUSAL,
        mask=shifted_diagonal(-1, late_rows_alone=True),
    ),
    mutant(
        "striped-diagonal",
        "in a striped layout, key blocks of later workers are masked with the inclusive diagonal",
        "The query in slot i must not attend to the key in slot i of a later worker; here it does.",
        "lucidrains/ring-attention-pytorch/issues/11",
        flags=("striped-diagonal",),
        applies=when(ring(2), layout("striped"), term("causal")),
        mask=inclusive,
    ),
    mutant(
        "striped-diagonal-exclusive",
        "in a striped layout, key blocks of earlier workers are masked with the exclusive diagonal",
        "The strict triangle, which is correct for keys of later workers, is also applied to "
        "keys of earlier workers.",
        "lucidrains/ring-attention-pytorch/issues/11",
        flags=("striped-diagonal",),
        applies=when(ring(2), layout("striped"), term("causal")),
        mask=exclusive,
    ),
    mutant(
        "zigzag-chunk-order",
        "the two zigzag chunks of a worker are used in the wrong order",
        "The kernel assumes that the later chunk comes first. Without a mask the bug has no "
        "effect.",
        "feifeibear/long-context-attention/issues/53",
        flags=("zigzag-chunk-order",),
        applies=when(attends, layout("zigzag"), MASKED),
        hooks=by_call(lambda call: believing(call, swapped_chunks)),
    ),
    mutant(
        "zigzag-chunks-in-order",
        "the mask assumes that zigzag worker r holds chunks r and W + r",
        "The second chunk of worker r is chunk 2W - 1 - r. With one worker both are the same "
        "chunk.",
        "feifeibear/long-context-attention/issues/53",
        flags=("zigzag-chunk-order",),
        applies=when(ring(2), layout("zigzag"), MASKED),
        hooks=by_call(lambda call: believing(call, chunks_in_order)),
    ),
    mutant(
        "zigzag-half-step-misplaced",
        "zigzag results of the later chunk are merged into the earlier chunk",
        "Only a worker's later chunk attends to keys of a later worker. The half-size result of "
        "that step is merged into the first half of o and lse.",
        "NVIDIA/TransformerEngine/pull/716",
        flags=("zigzag-chunk-order",),
        applies=when(ZIGZAG_HALVES, forward),
        merge=into_first_half,
    ),
    mutant(
        "zigzag-half-gradient-misplaced",
        "zigzag dk and dv of the earlier chunk are added to the later chunk",
        "Of an earlier worker's keys only the first chunk is visible. Its half-size dk and dv "
        "are added to the second half.",
        "NVIDIA/TransformerEngine/pull/716",
        flags=("zigzag-chunk-order",),
        applies=when(ZIGZAG_HALVES, backward),
        share=to_second_half,
    ),
    mutant(
        "positions-not-sharded",
        "positions are assigned in rank order instead of following their tokens",
        "The layout decides which tokens a worker holds, but positions are numbered as in a "
        "contiguous layout. A striped or zigzag ring then uses the mask of a contiguous one.",
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
        "Gathered blocks arrive in worker order and are not put back into token order. A "
        "contiguous layout hides the bug.",
        flags=("positions-not-sharded",),
        applies=when(ring(2), circulates("gather"), MASKED, layout("striped", "zigzag", "table")),
        hooks=by_call(keys_in_order),
    ),
    mutant(
        "last-key-of-block-lost",
        "the last key of each block is skipped",
        "The loop over the keys of a block ends one key early, so each ring step loses one key.",
        flags=("short-or-uneven-length",),
        applies=attends,
        mask=last_key_hidden,
    ),
)  # fmt: skip
