"""The set cp, first part: attention split over ranks, one case for each known way to get it wrong.

Padded documents lie in rooms, the differences of ``cu_seqlens_padded``. Requests of a decode are packed documents, of which
the queries are the last tokens.
"""

from __future__ import annotations

from typing import Any

from ringspec.vectors.catalogue.build import (
    case,
    numbers,
    packed_requests,
    put,
    spread,
    telling,
    times,
)
from ringspec.vectors.format.case import Case, SchemeCall

Axes = tuple[tuple[str, int], ...]
ALL = None
RING_OUTER: Axes = (("ring", 2), ("ulysses", 2))
ULYSSES_OUTER: Axes = (("ulysses", 2), ("ring", 2))
TP_DCP: Axes = (("tp", 2), ("dcp", 2))
FORWARD_ONLY = ("pcp", "dcp")
OWN = (
    "layout", "table_q", "table_k", "cu_seqlens_padded", "circulation", "direction", "text", "text_at",
    "interleave",
)  # fmt: skip
# The absorbed form of latent attention: q and k are 8 + 3 wide, but the scale is that of 5 + 3.
LATENT: dict[str, Any] = {"Hkv": 1, "D": 11, "Dv": 8, "scale": 8**-0.5}


def split(
    id: str,
    reason: str,
    rules: str,
    flags: str = "",
    *,
    by: str,
    mesh: Axes | int,
    **data: Any,
) -> Case:
    """Make a case that the scheme ``by`` splits over a mesh; a number is the size of its only axis."""
    axis = {"all_gather": "cp"}.get(by, by)
    axes = ((axis, mesh),) if isinstance(mesh, int) else mesh
    call = SchemeCall(by, axes, **{name: data.pop(name) for name in OWN if name in data})
    passes = ("forward",) if by in FORWARD_ONLY else ("forward", "backward")
    return case(
        id,
        reason,
        rules,
        flags,
        operation="context_parallel",
        scheme=call,
        **{"passes": passes} | data,
    )


def telling_values(keys: int, kv_heads: int) -> dict[str, Any]:
    return {"Hkv": kv_heads, "Dv": keys, "v": telling(kv_heads, keys)}


def after(keys: int, queries: int) -> dict[str, Any]:
    """Return the lengths and terms of queries that come last."""
    return {"Sq": queries, "Sk": keys, "causal": True, "q_offset": keys - queries}


def requests(lengths: tuple[int, ...], queries: tuple[int, ...]) -> dict[str, Any]:
    """Return the lengths and terms of packed requests, each with all its keys and its last queries."""
    return {"Sq": sum(queries), "Sk": sum(lengths), **packed_requests(lengths, queries)}


def rooms(*sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the terms of documents of (tokens, slots) each."""
    starts, padded = [0], [0]
    for tokens, room in sizes:
        starts.append(starts[-1] + tokens)
        padded.append(padded[-1] + room)
    return {"S": starts[-1], "cu_seqlens": tuple(starts), "cu_seqlens_padded": tuple(padded)}


RINGS = (
    split(
        "cp-ring/backward-w2", "Each rank's dk and dv have a part from the other rank's queries.",
        "CP-1 RING-4", "stale-keys dkv-not-home", by="ring", mesh=2, S=2,
    ),
    split(
        "cp-ring/q-ring-w3", "In the backward pass the queries travel, with dq.", "CP-1 RING-5", "dq-not-home",
        by="ring", mesh=3, S=6, circulation="q", direction=-1, causal=True,
    ),
    split(
        "cp-ring/dlse-softcap-w3", "dlse and a soft cap on three ranks: delta - dlse travels.", "RING-7 BWD-4",
        "dlse-ignored", by="ring", mesh=3, S=6, softcap=2.0, dlse=True,
    ),
    split(
        "double-ring/three-inner-w6", "With three ranks in the inner ring, the directions of hops differ.",
        "CP-1 CP-2", "ring-direction", by="double_ring", mesh=(("outer", 2), ("inner", 3)), S=12,
        **telling_values(12, 1),
    ),
    split(
        "all-gather/zigzag-causal-w3", "Gathered keys lie rank by rank, not in the order of tokens.",
        "CP-1 RING-10", "zigzag-chunk-order", by="all_gather", mesh=3, layout="zigzag", S=12, causal=True,
        **telling_values(12, 1),
    ),
    split(
        "all-gather/table-w3", "A table without order, with padding slots and a rank of one token.", "CP-2 LAYOUT-5",
        by="all_gather", mesh=3, layout="table", S=7, causal=True,
        table_q=((6, 0, 3), (2, -1, -1), (5, 1, 4)),
    ),
)  # fmt: skip

HEADS = (
    split(
        "ulysses/gqa", "Two key heads on four ranks: each is repeated for its query heads, not tiled.", "CP-4",
        "gqa-wrong-head", by="ulysses", mesh=4, H=8, S=8, **telling_values(8, 2),
    ),
    split(
        "ulysses/gqa-backward", "Both ranks use one key head: its dk and dv are the sum of both copies.", "CP-3 CP-4",
        "gqa-not-summed", by="ulysses", mesh=2, H=2, Hkv=1, S=2,
    ),
    split(
        "ulysses/uneven-key-heads-w3", "The query heads of rank 1 use key heads 0 and 1.", "CP-4", "gqa-wrong-head",
        by="ulysses", mesh=3, H=6, S=6, **telling_values(6, 2),
    ),
    split(
        "ulysses/zigzag-causal", "After the exchange, rows lie rank by rank: chunks 0, 3, 1, 2.", "CP-1 RING-10",
        "zigzag-chunk-order", by="ulysses", mesh=2, layout="zigzag", H=2, S=4, causal=True, **telling_values(4, 2),
    ),
    split(
        "ulysses/sinks-dropout-w4", "Sinks and the dropout mask belong to global heads, not to local ones.",
        "FWD-5 DROP-1", "sink-per-block", by="ulysses", mesh=4, H=4, Hkv=2, S=8, causal=True,
        sinks=spread(-1.0, 0.75, 5, 4, 1), dropout_p=0.25, dropout_seed=7,
    ),
    split(
        "usp/both-orders-ring-outside", "The ring outside: neighbours along it are two ranks apart.", "CP-1 CP-2",
        "group-ranks", by="usp", mesh=RING_OUTER, S=4, causal=True, **telling_values(4, 2),
    ),
    split(
        "usp/both-orders-ulysses-outside",
        "Ulysses outside: the ring's blocks are chunks 0, 2 and 1, 3, so no step is causal as a whole.",
        "CP-1 CP-2", "group-ranks", by="usp", mesh=ULYSSES_OUTER, S=4, causal=True, **telling_values(4, 2),
    ),
    split(
        "usp/every-row-far", "Every row meets the keys of all four ranks; a local result lacks components.", "CP-2",
        "stale-keys", by="usp", mesh=RING_OUTER, S=8, **telling_values(8, 1),
    ),
    split(
        "usp/sinks-w6", "Six ranks with sinks of both signs, which count once per row.", "FWD-5 CP-3", "sink-dropped",
        by="usp", mesh=(("ring", 3), ("ulysses", 2)), S=12, layout="zigzag", causal=True,
        sinks=((1.5,), (-0.5,)),
    ),
)  # fmt: skip

TEXT = (
    split(
        "joint/front", "Text keys are used in the first ring step alone; each counts once.", "CP-5",
        by="joint", mesh=RING_OUTER, S=11, text=(0, 1, 2), text_at="front", **telling_values(11, 2),
    ),
    split(
        "joint/rear", "Text keys are used in the last ring step alone, and lie last in the sequence.", "CP-5",
        by="joint", mesh=RING_OUTER, S=11, text=(8, 9, 10), text_at="rear", **telling_values(11, 2),
    ),
    split(
        "joint/backward", "Only text rows have a dy: differentiated on every copy, dk is R times too large.", "CP-5 CP-3",
        "dkv-not-home", by="joint", mesh=RING_OUTER, S=11, text=(0, 1, 2),
        dy=numbers(6, -4, head=4, patches=(put(0.0, ALL, ALL, (3, 11), ALL),)),
    ),
    split(
        "joint/scattered-ulysses-outside", "Text tokens 1, 6 and 9 lie between the others, with causal masks.", "CP-5 CP-2",
        by="joint", mesh=ULYSSES_OUTER, S=11, text=(1, 6, 9), text_at="rear", causal=True,
    ),
)  # fmt: skip

PADDED = (
    split(
        "padded/three-of-four-w2", "Three tokens in four slots: chunks of one slot, the last of which is empty.",
        "LAYOUT-8 CP-2", "length-floored", by="ring", mesh=2, layout="zigzag_padded", causal=True, **rooms((3, 4)),
    ),
    split(
        "padded/six-of-eight-w2", "Six tokens in eight slots: the empty slots are both on rank 0.", "LAYOUT-8 CP-2",
        "length-floored", by="ring", mesh=2, layout="zigzag_padded", causal=True, **rooms((6, 8)),
    ),
    split(
        "padded/two-documents-w2", "Documents of 7 and 5 tokens in rooms of 8: each has its own zigzag.", "LAYOUT-8 CP-2",
        "document-balance", by="all_gather", mesh=2, layout="zigzag_padded", causal=True,
        **rooms((7, 8), (5, 8)),
    ),
    split(
        "padded/usp-w4", "Documents of 7 and 2 tokens over a ring of Ulysses groups, some ranks without tokens.",
        "LAYOUT-8 CP-2", "padding-nan", by="usp", mesh=RING_OUTER, layout="zigzag_padded", causal=True,
        **rooms((7, 8), (2, 8)),
    ),
    split(
        "padded/striped-w3", "Slots are dealt out one by one, and padding ends each document.", "LAYOUT-8 CP-2",
        by="ulysses", mesh=3, H=3, layout="striped_padded", causal=True, **rooms((5, 6), (4, 6)),
    ),
    split(
        "padded/contiguous-w3", "All padding of a document is on the last rank.", "LAYOUT-8 CP-2", "padding-not-zero",
        by="ring", mesh=3, layout="contiguous_padded", causal=True, **rooms((4, 6), (6, 6)),
    ),
)  # fmt: skip

SERVING = (
    split(
        "pcp/chunks", "Five cached keys, then a chunk of 16 queries in zigzag order.", "CP-2 CP-1", "end-alignment",
        by="pcp", mesh=4, **after(21, 16),
    ),
    split(
        "pcp/chunks-and-no-prefix", "A request without a prefix beside one with five cached keys.", "CP-2 CP-1",
        "local-document-starts", by="pcp", mesh=4, layout="zigzag_per_document", **requests((8, 13), (8, 8)),
    ),
    split(
        "dcp/base", "Four keys and one: with lse of another base the shards weigh otherwise.", "CP-3 SOFT-3",
        "natural-lse-as-log2 log2-lse", by="dcp", mesh=2, H=4, Sq=1, Sk=5, interleave=4, **telling_values(5, 2),
    ),
    split(
        "dcp/empty-rank", "Three keys on four ranks: one rank has none.", "CP-6", "empty-merge-nan",
        by="dcp", mesh=4, H=4, Sq=1, Sk=3, **telling_values(3, 1),
    ),
    split(
        "dcp/empty-rank-i16", "With blocks of 16 keys, three of four ranks have none.", "CP-6", "empty-merge-nan",
        by="dcp", mesh=4, H=4, Hkv=1, Sq=1, Sk=16, interleave=16,
    ),
    split(
        "dcp/mtp", "Two queries, three keys: the first query does not see the newest key, on rank 0.", "CP-2 LAYOUT-13",
        "end-alignment", by="dcp", mesh=2, **(after(3, 2) | telling_values(3, 1)),
    ),
    split(
        "dcp/mtp-ten-keys", "Three queries see 4, 4 and 5 keys of rank 1: no triangle.", "CP-2 LAYOUT-13", "end-alignment",
        by="dcp", mesh=2, **(after(10, 3) | telling_values(10, 1)),
    ),
    split(
        "dcp/mtp-i16", "With blocks of 16, the 17th key is alone on rank 1, and only the last query sees it.",
        "CP-2 LAYOUT-13", "end-alignment", by="dcp", mesh=2, interleave=16, **after(17, 3),
    ),
    split(
        "dcp/gqa-group", "Two groups of two ranks: all ranks of a group hold the same key head.", "CP-4", "gqa-wrong-head",
        by="dcp", mesh=TP_DCP, H=8, Sq=1, Sk=7, **telling_values(7, 2),
    ),
    split(
        "dcp/requests-mtp", "Three requests with three, one and two queries; each begins with rank 0.",
        "LAYOUT-9 CP-2", "local-document-starts", by="dcp", mesh=2, interleave=2,
        **requests((9, 4, 12), (3, 1, 2)),
    ),
    split(
        "mla/scale", "The scale is 1 / sqrt(8), not that of the width 11, over one latent key head.", "CP-4 FWD-10",
        "value-width", by="dcp", mesh=4, H=4, Sq=1, Sk=9, **LATENT,
    ),
    split(
        "mla/ulysses-backward", "The latent head is gathered to all ranks, and its gradients are added.", "CP-4 CP-3",
        "gqa-not-summed", by="ulysses", mesh=4, H=4, S=8, causal=True, **LATENT,
    ),
    split(
        "mla/mtp-large-scores", "Latent attention of two queries with scores up to some hundred.", "CP-3 SOFT-4",
        by="dcp", mesh=2, **(after(9, 2) | LATENT),
        patches={"q": (times(16.0, ALL, ALL, ALL, ALL),)},
    ),
)  # fmt: skip

CASES = RINGS + HEADS + TEXT + PADDED + SERVING
