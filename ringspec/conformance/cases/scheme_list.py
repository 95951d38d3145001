"""The list of cases of the operation 'context_parallel': one for each published bug, and a covering of all schemes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ringspec.conformance.cases.scheme_terms import TERMS
from ringspec.conformance.cases.splits import Split
from ringspec.vectors.catalogue.build import packed_requests, put

Axes = tuple[tuple[str, int], ...]
RING_OUTER: Axes = (("ring", 2), ("ulysses", 2))
ULYSSES_OUTER: Axes = (("ulysses", 2), ("ring", 2))
TP_DCP: Axes = (("tp", 2), ("dcp", 2))
CAUSAL = {"causal": True}


def ring(size: int) -> Axes:
    return (("ring", size),)


def ulysses(size: int) -> Axes:
    return (("ulysses", size),)


def decode(size: int) -> Axes:
    return (("dcp", size),)


def heads(count: int, kv_heads: int, **sizes: int) -> dict[str, int]:
    return {"H": count, "Hkv": kv_heads, **sizes}


def after(keys: int, queries: int) -> dict[str, Any]:
    """Return the terms of queries that come last."""
    return {"causal": True, "q_offset": keys - queries}


def packed(*lengths: int, causal: bool = True) -> dict[str, Any]:
    starts = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
    return {"causal": causal, "cu_seqlens": starts}


# The absorbed form of multi-head latent attention: the width of q is 8 + 3, but its scale that of 5 + 3.
MLA = {"scale": 8**-0.5}
LATENT = {"Hkv": 1, "D": 11, "Dv": 8}
THREE_REQUESTS = packed_requests((7, 1, 12), (1, 1, 1))
SEVERAL_QUERIES = packed_requests((9, 4, 12), (3, 1, 2))

NAMED = (
    # Rings and gathered keys
    Split("ring/backward-w2", "Each rank's gradient of k and v has a part from the other rank.", "ring", ring(2), heads(2, 2, S=2), smoke=True),
    Split("ring/all-keys-w3", "Each query meets the keys of all ranks, also with no mask.", "ring", ring(3), heads(2, 1, S=9), telling=True),
    Split("ring/zigzag-causal-w3", "A block is needed by rows of two chunks, whose masks differ.", "ring", ring(3), heads(2, 1, S=12), CAUSAL, "zigzag"),
    Split("double-ring/causal-w4", "The inner ring ends before the outer hop.", "double_ring", (("outer", 2), ("inner", 2)), heads(2, 1, S=16), CAUSAL, "zigzag", smoke=True),
    Split("double-ring/three-w6", "With three inner ranks, the directions of hops differ.", "double_ring", (("outer", 2), ("inner", 3)), heads(2, 1, S=12), telling=True),
    Split("all-gather/zigzag-causal-w3", "Gathered keys lie rank by rank, not in the order of tokens.", "all_gather", (("cp", 3),), heads(2, 1, S=12), CAUSAL, "zigzag", telling=True, smoke=True),
    Split("all-gather/backward-w3", "The gradients of gathered keys are added over all ranks.", "all_gather", (("cp", 3),), heads(2, 2, S=6)),
    # Ulysses
    Split("ulysses/gqa-w4", "A key head that several ranks need is repeated, not tiled.", "ulysses", ulysses(4), heads(8, 2, S=8), telling=True, smoke=True),
    Split("ulysses/gqa-backward-w2", "Both ranks use one key head; its gradients are added.", "ulysses", ulysses(2), heads(2, 1, S=2), smoke=True),
    Split("ulysses/uneven-kv-heads-w3", "The heads of rank 1 use key heads 0 and 1: the group size is not that of the rank.", "ulysses", ulysses(3), heads(6, 2, S=6), telling=True),
    Split("ulysses/heads-w3", "After the exchange back, heads lie in the order of their numbers.", "ulysses", ulysses(3), heads(6, 6, S=6), telling=True),
    Split("ulysses/zigzag-causal-w2", "After the exchange, rows lie rank by rank, not in the order of tokens.", "ulysses", ulysses(2), heads(2, 2, S=4), CAUSAL, "zigzag", telling=True, smoke=True),
    Split("ulysses/zigzag-causal-w3", "The same with three ranks, forward and backward.", "ulysses", ulysses(3), heads(3, 1, S=12), CAUSAL, "zigzag"),
    Split("ulysses/window-striped-w4", "A window is measured in positions, not in slots.", "ulysses", ulysses(4), heads(4, 4, S=16), {"causal": True, "window": (3, 0)}, "striped"),
    Split("ulysses/mla-w4", "One latent key head is gathered; the scale is not that of its width.", "ulysses", ulysses(4), {"H": 4, "S": 8, **LATENT}, MLA, mla=True),
    # USP
    Split("usp/ring-outer-causal-w4", "The ring's blocks are tokens of neighbouring ranks.", "usp", RING_OUTER, heads(2, 2, S=4), CAUSAL, telling=True, smoke=True),
    Split("usp/ulysses-outer-causal-w4", "The ring's blocks are tokens of ranks that are not neighbours.", "usp", ULYSSES_OUTER, heads(2, 2, S=4), CAUSAL, telling=True, smoke=True),
    Split("usp/ring-outer-zigzag-w4", "Zigzag over all ranks, whichever ring they are in.", "usp", RING_OUTER, heads(4, 2, S=16), CAUSAL, "zigzag"),
    Split("usp/ulysses-outer-zigzag-w4", "The same with the other order of axes.", "usp", ULYSSES_OUTER, heads(4, 2, S=16), CAUSAL, "zigzag"),
    Split("usp/every-row-far-w4", "Each query meets keys of all four ranks.", "usp", RING_OUTER, heads(2, 2, S=8), telling=True),
    Split("usp/ring-of-three-w6", "With three ranks in a ring, its direction matters.", "usp", (("ring", 3), ("ulysses", 2)), heads(2, 1, S=12), CAUSAL),
    Split("usp/heads-outer-w6", "With three head groups, the order of heads matters.", "usp", (("ulysses", 3), ("ring", 2)), heads(6, 6, S=12), telling=True),
    # Joint attention
    Split("joint/front-w4", "Text keys count once, in the first step.", "joint", RING_OUTER, heads(2, 2, S=11), own={"text": (0, 1, 2), "text_at": "front"}, telling=True, smoke=True),
    Split("joint/rear-w4", "Text keys count once, in the last step.", "joint", RING_OUTER, heads(2, 2, S=11), own={"text": (8, 9, 10), "text_at": "rear"}, telling=True, smoke=True),
    Split("joint/ring-w3", "Three ranks hold the text; each copy of a text row is complete.", "joint", ring(3), heads(2, 1, S=8), own={"text": (0, 1), "text_at": "front"}, telling=True),
    Split("joint/ulysses-w3", "The text is split by heads and its output is gathered.", "joint", ulysses(3), heads(3, 3, S=8), own={"text": (0, 1), "text_at": "front"}, telling=True),
    Split("joint/backward-w4", "Only text rows have a gradient, which counts once.", "joint", RING_OUTER, heads(2, 2, S=11), {"patches": {"dy": (put(0.0, None, None, (3, 11), None),)}}, own={"text": (0, 1, 2), "text_at": "front"}, smoke=True),
    # Padded documents
    Split("padded/thd-w2", "The last chunk of a document is partly padding.", "ring", ring(2), heads(2, 1, S=3), packed(3), rooms=(4,), telling=True, smoke=True),
    Split("padded/thd-takes-padding-w2", "Real and padded lengths divide differently.", "ring", ring(2), heads(2, 1, S=6), packed(6), rooms=(8,)),
    Split("padded/documents-w3", "An empty document, a full one and one of a single token.", "ring", ring(3), heads(2, 1, S=20), packed(7, 0, 12, 1), rooms=(12, 6, 12, 6)),
    Split("padded/full-w2", "Without a causal mask nothing else hides the padding.", "ring", ring(2), heads(2, 1, S=9), packed(3, 6, causal=False), rooms=(4, 8), telling=True),
    Split("padded/all-gather-w3", "Padding lies between the gathered tokens.", "all_gather", (("cp", 3),), heads(2, 1, S=15), packed(7, 8), rooms=(12, 12)),
    Split("padded/ulysses-w2", "Padding lies between the exchanged tokens.", "ulysses", ulysses(2), heads(2, 2, S=9), packed(3, 6), rooms=(4, 8)),
    Split("padded/usp-w4", "Padding in each ring and in each group.", "usp", RING_OUTER, heads(2, 1, S=20), packed(7, 13), rooms=(8, 16)),
    # Prefill
    Split("pcp/prefix-w4", "Five cached keys, then a chunk of 16 queries.", "pcp", (("pcp", 4),), heads(2, 1, Sq=16, Sk=21), after(21, 16), smoke=True),
    Split("pcp/prefix-one-w2", "One cached key, which every query sees.", "pcp", (("pcp", 2),), heads(2, 1, Sq=4, Sk=5), after(5, 4), telling=True),
    Split("pcp/requests-w4", "A request without prefix beside one with a prefix.", "pcp", (("pcp", 4),), heads(2, 1, Sq=16, Sk=21), packed_requests((8, 13), (8, 8)), "zigzag_per_document", smoke=True),
    Split("pcp/interleaved-w3", "Blocks of four cached keys go to the ranks in turn.", "pcp", (("pcp", 3),), heads(2, 1, Sq=12, Sk=30), after(30, 12), own={"interleave": 4}),
    # Decoding
    Split("dcp/unequal-shards-w2", "The lse of the ranks differ: they have 4 keys and 1.", "dcp", decode(2), heads(4, 2, Sq=1, Sk=5), own={"interleave": 4}, telling=True, smoke=True),
    Split("dcp/empty-rank-w4", "One rank has no key.", "dcp", decode(4), heads(4, 1, Sq=1, Sk=3), telling=True, smoke=True),
    Split("dcp/empty-rank-i16-w2", "Only rank 0 has keys.", "dcp", decode(2), heads(2, 1, Sq=1, Sk=16), own={"interleave": 16}),
    Split("dcp/two-empty-w4", "Three of four ranks have no key: two empty parts meet in a merge.", "dcp", decode(4), heads(4, 1, Sq=1, Sk=16), own={"interleave": 16}),
    Split("dcp/two-empty-requests-w4", "Two ranks have no key of the first request, all have some of the second.", "dcp", decode(4), heads(4, 1, Sq=2, Sk=11), packed_requests((2, 9), (1, 1)), smoke=True),
    Split("dcp/mtp-w2", "The last three queries see 5, 5 and 5, or 4, 4 and 5 keys of a rank.", "dcp", decode(2), heads(2, 1, Sq=3, Sk=10), after(10, 3), telling=True, smoke=True),
    Split("dcp/mtp-i16-w2", "With blocks of 16, the error begins with the 17th key.", "dcp", decode(2), heads(2, 1, Sq=3, Sk=17), after(17, 3), own={"interleave": 16}),
    Split("dcp/mtp-few-keys-w2", "The first query does not see the newest keys, which are all on one rank.", "dcp", decode(2), heads(2, 1, Sq=2, Sk=3), after(3, 2), telling=True),
    Split("dcp/gqa-group-w4", "The ranks of a group hold the key heads of this group.", "dcp", TP_DCP, heads(8, 2, Sq=1, Sk=7), telling=True, smoke=True),
    Split("dcp/heads-w3", "After the merge, heads lie in the order of their numbers.", "dcp", decode(3), heads(6, 2, Sq=1, Sk=7), telling=True),
    Split("dcp/requests-w2", "Each request begins with rank 0, wherever it lies in the batch.", "dcp", decode(2), heads(2, 1, Sq=3, Sk=20), THREE_REQUESTS),
    Split("dcp/requests-mtp-w2", "Requests with several queries each.", "dcp", decode(2), heads(2, 1, Sq=6, Sk=25), SEVERAL_QUERIES, own={"interleave": 2}),
    Split("dcp/mla-w4", "The scale is not that of the absorbed width.", "dcp", decode(4), {"H": 4, "Sq": 1, "Sk": 9, **LATENT}, MLA, mla=True, smoke=True),
    Split("dcp/mla-requests-mtp-w2", "Latent attention with several requests and queries.", "dcp", decode(2), {"H": 2, "Sq": 6, "Sk": 25, **LATENT}, SEVERAL_QUERIES | MLA, mla=True),
)  # fmt: skip

MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": CAUSAL,
    "window": {"causal": True, "window": (5, 0)},
    "documents": packed(5, 1, 18),
}
RATIOS = (4, 2, 1)  # Hkv, where H = 4
TOKENS = 24
SPLIT_BY_TOKENS: tuple[tuple[str, str, Axes, tuple[str, ...]], ...] = (
    ("ring", "ring", ring(3), ("contiguous", "zigzag", "striped", "contiguous")),
    ("double_ring", "double-ring", (("outer", 2), ("inner", 2)), ("zigzag", "contiguous", "zigzag", "striped")),
    ("all_gather", "all-gather", (("cp", 4),), ("striped", "zigzag", "contiguous", "zigzag")),
    ("ulysses", "ulysses", ulysses(4), ("zigzag", "striped", "contiguous", "zigzag")),
    ("usp", "usp-ring-outer", RING_OUTER, ("contiguous", "striped", "zigzag", "contiguous")),
    ("usp", "usp-ulysses-outer", ULYSSES_OUTER, ("zigzag", "contiguous", "striped", "zigzag")),
)  # fmt: skip


def covering() -> Iterator[Split]:
    """Yield each scheme with each mask and each number of key heads; layouts take turns."""
    every = "Every scheme, mask and number of key heads."
    for (scheme, name, mesh, placed), kv_heads in product(SPLIT_BY_TOKENS, RATIOS):
        for number, (mask, terms) in enumerate(MASKS.items()):
            if scheme == "double_ring" and kv_heads == 2:
                continue
            layout = placed[(number + RATIOS.index(kv_heads)) % len(placed)]
            yield Split(
                f"scheme/{name}/{mask}-kv{kv_heads}-{layout}", every, scheme, mesh,
                heads(4, kv_heads, S=TOKENS), terms, layout, drawn_as=f"{mask}-kv{kv_heads}",
            )  # fmt: skip
    for mesh, kv_heads in product((RING_OUTER, ULYSSES_OUTER), RATIOS):
        own = {"text": tuple(range(4)), "text_at": "front" if kv_heads == 2 else "rear"}
        name = f"scheme/joint/{mesh[0][0]}-outer-kv{kv_heads}"
        yield Split(
            name,
            every,
            "joint",
            mesh,
            heads(4, kv_heads, S=TOKENS),
            own=own,
            drawn_as=f"full-kv{kv_heads}",
        )
    for (mask, terms), kv_heads in product(SERVED.items(), RATIOS):
        sizes = heads(4, kv_heads, Sq=8, Sk=TOKENS)
        drawn_as = f"served-{mask}-kv{kv_heads}"
        layout = "zigzag_per_document" if mask == "requests" else "zigzag"
        if mask != "requests":
            yield Split(
                f"scheme/pcp/{mask}-kv{kv_heads}",
                every,
                "pcp",
                (("pcp", 2),),
                sizes,
                terms,
                layout,
                drawn_as=drawn_as,
            )
        for mesh, each in ((decode(4), 1), (TP_DCP, 4)):
            name = f"scheme/{'-'.join(axis for axis, _ in mesh)}/{mask}-i{each}-kv{kv_heads}"
            yield Split(
                name, every, "dcp", mesh, sizes, terms, own={"interleave": each}, drawn_as=drawn_as
            )


# Ulysses and USP with enough key heads that no two ranks share one, which is what public programs accept; not in smoke.
RING_OF_THREE: Axes = (("ring", 3), ("ulysses", 2))
OUTER_OF_TWO: Axes = (("ulysses", 2), ("ring", 3))
PLAIN: tuple[tuple[Axes, int, int, tuple[str, ...]], ...] = (
    # mesh, H, Hkv, "mask-layout" ...
    (ulysses(2), 4, 4, ("full-contiguous", "full-zigzag", "causal-contiguous", "causal-zigzag", "window-zigzag")),
    (ulysses(2), 4, 2, ("full-zigzag", "causal-contiguous", "causal-zigzag", "window-contiguous")),
    (ulysses(3), 6, 3, ("causal-contiguous", "causal-zigzag")),
    (ulysses(3), 6, 6, ("full-zigzag", "window-contiguous")),
    (ulysses(4), 8, 8, ("full-contiguous", "causal-zigzag")),
    (ulysses(4), 8, 4, ("full-zigzag", "causal-contiguous", "window-zigzag")),
    (RING_OUTER, 4, 4, ("full-zigzag", "causal-contiguous", "causal-striped")),
    (RING_OUTER, 4, 2, ("full-zigzag", "causal-striped", "causal-zigzag")),
    (ULYSSES_OUTER, 4, 4, ("full-contiguous", "causal-zigzag")),
    (ULYSSES_OUTER, 4, 2, ("full-contiguous", "causal-zigzag")),
    (RING_OF_THREE, 4, 4, ("causal-contiguous", "causal-zigzag", "causal-striped", "full-zigzag")),
    (RING_OF_THREE, 4, 2, ("full-contiguous", "causal-zigzag")),
    (OUTER_OF_TWO, 4, 4, ("full-contiguous", "causal-zigzag")),
)  # fmt: skip


def named(mesh: Axes) -> tuple[str, str]:
    """Return the scheme of a mesh of Ulysses or USP, and the mesh as a part of an id."""
    scheme = "ulysses" if len(mesh) == 1 else "usp"
    return scheme, "-".join(f"{axis}{size}" for axis, size in mesh)


def plain() -> Iterator[Split]:
    """Yield cases in which no two ranks share a key head; each is claimed by at least one public program."""
    every = "Ulysses and USP, with key heads that the ranks divide."
    for mesh, count, kv_heads, kinds in PLAIN:
        scheme, axes = named(mesh)
        for kind in kinds:
            mask, layout = kind.split("-")
            yield Split(
                f"scheme/plain/{axes}-{mask}-h{count}-kv{kv_heads}-{layout}", every, scheme, mesh,
                heads(count, kv_heads, S=TOKENS), MASKS[mask], layout,
                drawn_as=f"{mask}-h{count}-kv{kv_heads}",
            )  # fmt: skip
    for mesh, lengths, rooms in PADDED:
        scheme, axes = named(mesh)
        yield Split(
            f"scheme/plain/{axes}-padded-{'-'.join(map(str, lengths))}", every, scheme, mesh,
            heads(4, 4, S=sum(lengths)), packed(*lengths), rooms=rooms,
        )  # fmt: skip


PADDED: tuple[tuple[Axes, tuple[int, ...], tuple[int, ...]], ...] = (
    (ulysses(2), (1, 12, 5), (4, 12, 8)),
    (ulysses(4), (7, 13, 8), (8, 16, 8)),
    (RING_OUTER, (3, 17, 8), (8, 24, 8)),
)


SERVED: dict[str, dict[str, Any]] = {
    "causal": after(TOKENS, 8),
    "window": after(TOKENS, 8) | {"window": (6, 0)},
    "requests": packed_requests((11, 3, 10), (3, 1, 4)),
}
SPLITS = (*(replace(one, id=f"scheme/{one.id}") for one in (*NAMED, *TERMS)), *covering(), *plain())
