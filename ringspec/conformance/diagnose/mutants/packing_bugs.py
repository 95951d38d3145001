"""Document boundaries and padding that are ignored or misplaced.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. Documents that are packed into one sequence have ids; a
negative id marks a padding token. A slot is a place in a worker's block; a padding slot holds no token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    packed,
    padded,
    ring,
    term,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, mask
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.conformance.diagnose.mutants.wrong_masks import Mask, by_call, slots, taken
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Booleans, Columns, Integers, Rows, Terms
from ringspec.recipes import Recipe
from ringspec.spec.worker import KeySide, QuerySide


def window_across_documents(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    if terms.window is None:
        return mask(at, rows, columns, terms)
    return no_documents(at, rows, columns, terms)


def no_documents(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Compute a mask that ignores document boundaries; padding tokens stay masked."""
    if rows.segment is None or columns.segment is None:
        return mask(at, rows, columns, terms)
    return mask(
        at,
        dataclasses.replace(rows, segment=np.minimum(rows.segment, 0)),
        dataclasses.replace(columns, segment=np.minimum(columns.segment, 0)),
        terms,
    )


def no_segments(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    rows = dataclasses.replace(rows, segment=None)
    return mask(at, rows, dataclasses.replace(columns, segment=None), terms)


def padding_is_a_document(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Compute a mask in which padding tokens attend to each other."""
    if rows.segment is None or columns.segment is None:
        return mask(at, rows, columns, terms)
    rows = dataclasses.replace(rows, segment=np.maximum(rows.segment, -1) + 1)
    columns = dataclasses.replace(columns, segment=np.maximum(columns.segment, -1) + 1)
    return mask(at, rows, columns, terms)


def padding_counted(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Compute a mask that takes padding slots for keys of the last document in their block."""
    real = dataclasses.replace(columns, index=np.maximum(columns.index, 0))
    if columns.segment is not None and columns.segment.size:
        segment = np.where(columns.index < 0, columns.segment.max(), columns.segment)
        real = dataclasses.replace(real, segment=segment)
    return mask(at, rows, real, terms)


def documents_by_slot(call: Call) -> Mask:
    """Return a mask that gives slot i of every worker the document id of token i of the sequence."""
    on_q, on_k = slots(call.index_q), slots(call.index_k)

    def by_slot(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        ids_q, ids_k = at.all_queries[0].rows, at.all_keys[0].columns
        if ids_q is None or ids_q.segment is None or ids_k is None or ids_k.segment is None:
            return mask(at, rows, columns, terms)
        row_ids = taken(ids_q.segment, taken(on_q, rows.index)[0])
        column_ids = taken(ids_k.segment, taken(on_k, columns.index)[0])
        return mask(
            at,
            dataclasses.replace(rows, segment=row_ids),
            dataclasses.replace(columns, segment=column_ids),
            terms,
        )

    return by_slot


def numbered_by_worker(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
    """Compute a mask from ids that each worker renumbers, starting with 0 in its own block."""
    of_rows, of_columns = at.query.rows, at.key.columns
    assert of_rows is not None and of_columns is not None
    if of_rows.segment is None or of_columns.segment is None:
        return mask(at, rows, columns, terms)
    assert rows.segment is not None and columns.segment is not None
    row_ids = number_among(rows.segment, of_rows.segment)
    column_ids = number_among(columns.segment, of_columns.segment)
    return mask(
        at,
        dataclasses.replace(rows, segment=row_ids),
        dataclasses.replace(columns, segment=column_ids),
        terms,
    )


def number_among(ids: Integers, held: Integers) -> Integers:
    """Return the index of each id among the sorted distinct ids in ``held``; negative ids stay."""
    known = [np.unique(row[row >= 0]) for row in held]
    places = [np.searchsorted(a, row) for a, row in zip(known, ids, strict=True)]
    return np.where(ids < 0, ids, np.stack(places))


def keys_cut_short(call: Call, recipe: Recipe) -> Hooks:
    return Hooks(keys=cut_short(call, recipe).keys)


def cut_short(call: Call, recipe: Recipe) -> Hooks:
    """Return pieces that use only a multiple of W tokens of each document and treat the rest as padding."""
    starts_q = call.terms["cu_seqlens"]
    starts_k = call.terms.get("cu_seqlens_k", starts_q)

    def ids(starts: Any, segment: Integers | None, index: Integers) -> Integers | None:
        if segment is None:
            return None
        first = np.asarray(starts)[np.maximum(segment, 0)]
        length = np.asarray(starts)[np.maximum(segment, 0) + 1] - first
        lost = index - first >= length // call.workers * call.workers
        return np.where(lost, -1, segment)

    def queries(phase: str, side: QuerySide) -> QuerySide:
        assert side.rows is not None
        segment = ids(starts_q, side.rows.segment, side.rows.index)
        return dataclasses.replace(side, rows=dataclasses.replace(side.rows, segment=segment))

    def keys(phase: str, side: KeySide) -> KeySide:
        assert side.columns is not None
        segment = ids(starts_k, side.columns.segment, side.columns.index)
        return dataclasses.replace(side, columns=dataclasses.replace(side.columns, segment=segment))

    return Hooks(queries=queries, keys=keys)


def has_uneven_document(call: Call) -> bool:
    starts = call.terms.get("cu_seqlens")
    return starts is not None and bool((np.diff(starts) % call.workers).any())


def empty_documents_forgotten(call: Call) -> Mask:
    """Return a mask whose query ids skip documents without queries; key ids count every document."""
    starts = np.asarray(call.terms["cu_seqlens"])
    number = np.concatenate((np.cumsum(np.diff(starts) > 0) - 1, [-1]))  # id -1: the last entry

    def renumbered(at: At, rows: Rows, columns: Columns, terms: Terms) -> Booleans:
        assert rows.segment is not None
        return mask(at, dataclasses.replace(rows, segment=number[rows.segment]), columns, terms)

    return renumbered


def has_empty_document(call: Call) -> bool:
    starts, starts_k = (call.terms.get(name) for name in ("cu_seqlens", "cu_seqlens_k"))
    return starts is not None and starts_k is not None and 0 in np.diff(starts)


BUGS = (
    mutant(
        "window-over-documents",
        "the window reaches into other documents",
        "The window is limited by the start of the packed sequence instead of the start of the "
        "document. Documents much longer than the window hide most of the error.",
        "radixark/miles/pull/2038",
        flags=("window-over-documents",),
        applies=when(attends, term("window"), packed),
        mask=window_across_documents,
    ),
    mutant(
        "packing-ignored",
        "tokens attend across document boundaries",
        "The ring is called through a batch interface that has no argument for document starts. "
        "A single document hides the bug.",
        "axolotl-ai-cloud/axolotl/issues/3608", "NVIDIA-NeMo/Automodel/pull/2999",
        flags=("packing-ignored",),
        applies=when(attends, packed),
        mask=no_documents,
        guises=(guise("padding tokens are visible as well", when(attends, packed), mask=no_segments),),
    ),
    mutant(
        "local-document-starts",
        "document starts of the whole sequence are used as indices into each worker's tokens",
        "Each worker applies the document boundaries of the first worker's tokens to its own.",
        "PrimeIntellect-ai/prime-rl/pull/2392", "axolotl-ai-cloud/axolotl/pull/2495",
        flags=("local-document-starts", "positions-not-sharded"),
        applies=when(ring(2), packed),
        hooks=by_call(documents_by_slot),
    ),
    mutant(
        "documents-numbered-by-worker",
        "each worker numbers its documents from 0",
        "Document ids are computed from the tokens that a worker holds. Document 0 of two "
        "workers is then treated as one document, and a document that spans two workers as two. "
        "With one worker the bug has no effect.",
        flags=("local-document-starts",),
        applies=when(ring(2), packed),
        mask=numbered_by_worker,
    ),
    mutant(
        "length-floored",
        "document lengths are rounded down to a multiple of the worker count",
        "The last tokens of a document are dropped, both as queries and as keys. Document "
        "lengths divisible by W hide the bug.",
        "NVIDIA/TransformerEngine/issues/1930",
        flags=("length-floored",),
        applies=when(ring(2), term("cu_seqlens"), has_uneven_document),
        hooks=cut_short,
        guises=(
            guise(
                "these tokens are dropped as keys only",
                when(ring(2), term("cu_seqlens"), has_uneven_document),
                hooks=keys_cut_short,
            ),
        ),
    ),
    mutant(
        "empty-document",
        "a document without queries shifts the numbers of later documents",
        "Only documents that have queries are counted, so queries of later documents attend to "
        "the keys of an earlier document.",
        "Dao-AILab/flash-attention/issues/2562", "Dao-AILab/flash-attention/pull/2568",
        flags=("empty-document",),
        applies=when(attends, has_empty_document),
        hooks=by_call(empty_documents_forgotten),
    ),
    mutant(
        "padding-is-a-document",
        "padding tokens attend to each other",
        "Negative document ids, which mark padding, are compared like any other id, so o and the "
        "gradients of padding are not 0.",
        "NVIDIA/TransformerEngine/pull/1012",
        flags=("padding-not-zero",),
        applies=when(attends, packed),
        mask=padding_is_a_document,
    ),
    mutant(
        "padding-slots-counted",
        "padding slots are counted as keys",
        "The zero keys in padding slots get a score of 0 instead of -inf and take weight in "
        "every row that can see their position.",
        "NVIDIA/TransformerEngine/pull/1012",
        flags=("padding-not-zero", "padding-nan"),
        applies=when(attends, padded),
        mask=padding_counted,
    ),
)  # fmt: skip
