"""What correct and wrong programs answer in the operation 'layout', so that a wrong answer can be named.

Each bug of :data:`BUGS` is a function of the call. It returns the results of all workers, or None where the bug cannot
occur. An answer is named only if it equals that of the bug and differs from the correct one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.target.protocol import Call
from ringspec.spec import layout as spec
from ringspec.spec.layout import Layout

Arrays = list[NDArray]
LINK = "https://github.com/"


@dataclass(frozen=True)
class LayoutBug:
    """A known wrong way to compute a result: ``title`` completes "where ..."."""

    id: str
    title: str
    answer: Callable[[Call], Arrays | None]
    links: tuple[str, ...] = ()


def layout_of(call: Call) -> Layout:
    """Return the layout of a call, from the specification."""
    starts, workers = call.terms["cu_seqlens"], call.workers
    if call.layout == "interleaved":
        return spec.interleaved(starts, workers, call.terms["interleave"])
    inside = {"zigzag_padded": spec.zigzag, "contiguous_padded": spec.contiguous}
    deal = inside.get(call.layout, spec.striped)
    return spec.padded(call.layout, deal, starts, call.terms["cu_seqlens_padded"], workers)


def expected(call: Call) -> Arrays:
    """Return the correct result of a call, for each worker."""
    [result], starts = call.passes, call.terms["cu_seqlens"]
    table = layout_of(call).table
    if result == "table":
        return list(table)
    if result == "positions":
        prefix = call.terms.get("prefix", (0,) * (len(starts) - 1))
        return list(spec.positions(table, starts, prefix))
    if result == "visible":
        return visible(
            call, lambda p, r: spec.visible_length(p, r, call.workers, call.terms["interleave"])
        )
    held = spec.local_cu_seqlens(table, starts)
    return list(held if result == "cu_seqlens" else np.diff(held, axis=1))


def lengths_of(call: Call, padded: bool = False) -> list[int]:
    return np.diff(call.terms["cu_seqlens_padded" if padded else "cu_seqlens"]).tolist()


def visible(call: Call, count: Callable[[int, int], int]) -> Arrays:
    """Return [N, Q] for each worker: ``count(position, worker)`` for the last Q positions of each document."""
    queries = range(-call.terms["queries"], 0)
    return [
        np.array(
            [[count(n + j, r) if n + j >= 0 else 0 for j in queries] for n in lengths_of(call)]
        )
        for r in range(call.workers)
    ]


def changed(call: Call, **terms: Any) -> Arrays:
    """Return the correct result of the call with other terms."""
    return expected(replace(call, terms={**call.terms, **terms}))


def lengths_as(call: Call, each: Callable[[int, int], list[int]]) -> Arrays | None:
    """Return lengths or cu_seqlens if worker r holds ``each(n, room)[r]`` tokens of a document."""
    if call.passes[0] not in ("lengths", "cu_seqlens"):
        return None
    rooms = lengths_of(call, True) if "cu_seqlens_padded" in call.terms else lengths_of(call)
    held = [each(n, room) for n, room in zip(lengths_of(call), rooms, strict=True)]
    by_worker = np.array(held, dtype=np.int64).reshape(-1, call.workers).T
    if call.passes[0] == "lengths":
        return list(by_worker)
    return [np.concatenate(([0], np.cumsum(row))) for row in by_worker]


def floor_of_cu_seqlens(call: Call) -> Arrays | None:
    if call.passes[0] not in ("lengths", "cu_seqlens"):
        return None
    starts = np.asarray(call.terms["cu_seqlens"]) // call.workers
    return [starts if call.passes[0] == "cu_seqlens" else np.diff(starts)] * call.workers


def padding_read(call: Call) -> Arrays | None:
    if "cu_seqlens_padded" not in call.terms or call.passes[0] == "visible":
        return None
    return changed(call, cu_seqlens=call.terms["cu_seqlens_padded"])


def interleave_ignored(call: Call) -> Arrays | None:
    if call.layout != "interleaved" or call.passes[0] in ("table", "positions"):
        return (
            fitted(call, lambda: changed(call, interleave=1))
            if call.layout == "interleaved"
            else None
        )
    return changed(call, interleave=1)


def half_interleave(call: Call) -> Arrays | None:
    each = call.terms.get("interleave", 1)
    return fitted(call, lambda: changed(call, interleave=each // 2)) if each >= 2 else None


def fitted(call: Call, answer: Callable[[], Arrays]) -> Arrays | None:
    """Return the answer with its padding cut or filled to the slots of the call, for tables and positions."""
    found, slots = answer(), len(expected(call)[0])
    if call.passes[0] not in ("table", "positions"):
        return found
    held = [x[x >= 0][:slots] for x in found]
    return [np.concatenate((x, np.full(slots - len(x), -1, dtype=np.int64))) for x in held]


def batch_position(call: Call) -> Arrays | None:
    """Ownership by the token's number in the batch."""
    if call.layout != "interleaved" or call.passes[0] == "visible":
        return None
    starts, each = call.terms["cu_seqlens"], call.terms["interleave"]
    rows = spec.interleaved((0, starts[-1]), call.workers, each).table
    if call.passes[0] in ("lengths", "cu_seqlens"):
        held = spec.local_cu_seqlens(rows, starts)
        return list(held if call.passes[0] == "cu_seqlens" else np.diff(held, axis=1))
    values = (
        rows
        if call.passes[0] == "table"
        else spec.positions(rows, starts, (0,) * (len(starts) - 1))
    )
    return fitted(call, lambda: list(values))


def triangle(call: Call) -> Arrays | None:
    if call.passes[0] != "visible":
        return None
    queries, each = call.terms["queries"], call.terms["interleave"]
    return [
        np.array([
            [max(spec.interleaved_length(n, r, call.workers, each) - queries + 1 + j, 0) for j in range(queries)]
            for n in lengths_of(call)
        ])
        for r in range(call.workers)
    ]  # fmt: skip


def only_positions(call: Call, value: Callable[[NDArray, Call], NDArray]) -> Arrays | None:
    """Return ``value(table, call)`` for a call that asks for positions; padding slots are -1."""
    if call.passes[0] != "positions":
        return None
    table = layout_of(call).table
    return list(np.where(table < 0, -1, value(table, call)))


def global_zigzag(call: Call) -> Arrays | None:
    if call.layout != "zigzag_padded" or call.passes[0] != "table":
        return None
    rooms, starts = call.terms["cu_seqlens_padded"], call.terms["cu_seqlens"]
    tokens = np.concatenate([
        np.where(np.arange(b - a) < n, first + np.arange(b - a), -1)
        for a, b, first, n in zip(rooms[:-1], rooms[1:], starts[:-1], lengths_of(call), strict=True)
    ])  # fmt: skip
    return list(tokens[spec.zigzag(rooms[-1], call.workers).table])


def second_chunk_in_order(call: Call) -> Arrays | None:
    """The second chunk of worker r is W + r, not 2W - 1 - r."""
    if call.layout != "zigzag_padded" or call.passes[0] != "table":
        return None

    def inside(room: int, workers: int) -> Layout:
        chunks = np.arange(room, dtype=np.int64).reshape(2, workers, -1)
        return Layout("wrong", np.concatenate((chunks[0], chunks[1]), axis=1))

    terms = call.terms
    return list(
        spec.padded(
            "wrong", inside, terms["cu_seqlens"], terms["cu_seqlens_padded"], call.workers
        ).table
    )


def padded_prefix(call: Call) -> Arrays | None:
    if (
        call.passes[0] != "positions"
        or "prefix" not in call.terms
        or "cu_seqlens_padded" not in call.terms
    ):
        return None
    pads = np.subtract(lengths_of(call, True), lengths_of(call))
    return changed(
        call, prefix=tuple(np.maximum(np.subtract(call.terms["prefix"], pads), 0).tolist())
    )


BUGS = (
    LayoutBug("layout-floor-length", "the local length is n // W", lambda c: lengths_as(c, lambda n, _: [n // c.workers] * c.workers), (f"{LINK}NVIDIA/TransformerEngine/issues/1930", f"{LINK}NVIDIA/TransformerEngine/issues/3331")),
    LayoutBug("layout-ceil-length", "the local length is n / W, rounded up", lambda c: lengths_as(c, lambda n, _: [-(-n // c.workers)] * c.workers)),
    LayoutBug("layout-floor-cu-seqlens", "the local cu_seqlens are cu_seqlens // W", floor_of_cu_seqlens, (f"{LINK}ISEEKYAN/Megatron-LM/issues/111",)),
    LayoutBug("layout-padding-as-tokens", "padding is read as tokens", padding_read),
    LayoutBug("layout-global-lengths", "the local length is the global length", lambda c: lengths_as(c, lambda n, _: [n] * c.workers), (f"{LINK}vllm-project/vllm/issues/48003",)),
    LayoutBug("layout-packed-positions", "a token's position is its number in the pack", lambda c: only_positions(c, lambda t, _: t), (f"{LINK}NVIDIA/Megatron-LM/pull/5243",)),
    LayoutBug("layout-slot-positions", "a token's position is its slot on the worker", lambda c: only_positions(c, lambda t, _: np.broadcast_to(np.arange(t.shape[1]), t.shape))),
    LayoutBug("layout-prefix-dropped", "positions ignore the prefix", lambda c: changed(c, prefix=(0,) * len(lengths_of(c))) if c.passes[0] == "positions" and "prefix" in c.terms else None),
    LayoutBug("layout-padded-prefix", "the prefix is the whole length minus the padded length", padded_prefix, (f"{LINK}sgl-project/sglang/pull/23415",)),
    LayoutBug("layout-positions-as-table", "the table lists positions in place of tokens", lambda c: list(spec.positions(layout_of(c).table, c.terms["cu_seqlens"], (0,) * len(lengths_of(c)))) if c.passes[0] == "table" else None, (f"{LINK}NVIDIA/Megatron-LM/pull/5243",)),
    LayoutBug("layout-global-zigzag", "zigzag covers the whole pack instead of each document", global_zigzag),
    LayoutBug("layout-second-chunk", "worker r holds chunks r and W + r instead of 2W - 1 - r", second_chunk_in_order),
    LayoutBug("layout-interleave-ignored", "the interleave is ignored", interleave_ignored),
    LayoutBug("layout-kernel-block", "half the interleave, a kernel's smaller block, decides the owner", half_interleave, (f"{LINK}vllm-project/vllm/pull/51031",)),
    LayoutBug("layout-batch-position", "the position in the batch decides the owner in place of that in the request", batch_position),
    LayoutBug("layout-right-aligned", "the last queries see a right-aligned triangle of the local keys", triangle, (f"{LINK}vllm-project/vllm/issues/46076",)),
)  # fmt: skip


def alike(call: Call, got: Sequence[NDArray]) -> list[LayoutBug]:
    """Return the known bugs that give exactly these results, which must differ from the correct ones."""
    want = expected(call)
    real = [x >= 0 if call.passes[0] == "positions" else np.ones(x.shape, bool) for x in want]

    def same(one: Sequence[NDArray], other: Sequence[NDArray]) -> bool:
        shapes = all(a.shape == b.shape for a, b in zip(one, other, strict=True))
        return shapes and all((a == b)[r].all() for a, b, r in zip(one, other, real, strict=True))

    answers = [(bug, bug.answer(call)) for bug in BUGS]
    return [
        bug
        for bug, answer in answers
        if answer is not None and not same(answer, want) and same(got, answer)
    ]


def diagnosed_layout(calls: Sequence[Call], outputs: Sequence[Any]) -> dict[str, Any]:
    """Return the diagnosis of a failing case as plain data; its id is that of the first known bug that fits."""
    [call], [output] = calls, outputs
    found = alike(call, [np.asarray(x) for x in output[call.passes[0]]])
    if not found:
        return {"id": None, "title": "no known bug", "text": "no known bug gives these integers"}
    first, *others = found
    text = f"known bug: {first.title}" + "".join(f"; or {one.title}" for one in others)
    return {
        "id": first.id, "title": first.title, "links": list(first.links),
        "alike": [one.id for one in others], "text": text,
    }  # fmt: skip
