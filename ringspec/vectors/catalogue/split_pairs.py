"""The set cp, second part: each scheme with each mask, number of key heads, number format and layout.

The rows are a pairwise covering: any two values of different columns are in a row together, where they fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringspec.vectors.catalogue.splits import (
    RING_OUTER,
    TP_DCP,
    ULYSSES_OUTER,
    Axes,
    after,
    requests,
    split,
)
from ringspec.vectors.format.case import Case

# A scheme, its mesh and the number of tokens.
TRAINED: dict[str, tuple[str, Axes, int]] = {
    "ring": ("ring", (("ring", 3),), 12),
    "double-ring": ("double_ring", (("outer", 2), ("inner", 2)), 16),
    "all-gather": ("all_gather", (("cp", 4),), 16),
    "ulysses": ("ulysses", (("ulysses", 4),), 16),
    "usp-ring-outside": ("usp", RING_OUTER, 16),
    "usp-ulysses-outside": ("usp", ULYSSES_OUTER, 16),
    "joint": ("joint", RING_OUTER, 19),
}
# scheme, mask, Hkv of H = 4, format, layout
ROWS = (
    ("ring", "full", 4, "bf16", "contiguous"),
    ("ring", "causal", 2, "fp16", "zigzag"),
    ("ring", "window", 4, "bf16", "contiguous"),
    ("ring", "documents", 1, "f32", "striped"),
    ("double-ring", "full", 1, "fp16", "contiguous"),
    ("double-ring", "causal", 2, "bf16", "striped"),
    ("double-ring", "window", 4, "f32", "contiguous"),
    ("double-ring", "documents", 4, "bf16", "zigzag"),
    ("all-gather", "full", 2, "f32", "striped"),
    ("all-gather", "causal", 4, "fp16", "contiguous"),
    ("all-gather", "window", 1, "bf16", "zigzag"),
    ("all-gather", "documents", 4, "bf16", "contiguous"),
    ("ulysses", "full", 2, "f32", "zigzag"),
    ("ulysses", "causal", 1, "bf16", "contiguous"),
    ("ulysses", "window", 4, "fp16", "striped"),
    ("ulysses", "documents", 4, "bf16", "contiguous"),
    ("usp-ring-outside", "full", 1, "fp16", "striped"),
    ("usp-ring-outside", "causal", 4, "bf16", "contiguous"),
    ("usp-ring-outside", "window", 2, "f32", "contiguous"),
    ("usp-ring-outside", "documents", 4, "bf16", "zigzag"),
    ("usp-ulysses-outside", "full", 4, "bf16", "striped"),
    ("usp-ulysses-outside", "causal", 1, "f32", "contiguous"),
    ("usp-ulysses-outside", "window", 4, "bf16", "zigzag"),
    ("usp-ulysses-outside", "documents", 2, "fp16", "contiguous"),
    ("joint", "full", 4, "bf16", "contiguous"),
    ("joint", "causal", 2, "f32", "striped"),
    ("joint", "window", 1, "fp16", "zigzag"),
)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (5, 0)},
    "documents": {"causal": True},
}

SERVED: dict[str, Axes] = {"pcp": (("pcp", 2),), "dcp": (("dcp", 4),), "tp-dcp": TP_DCP}
# scheme, mask, Hkv of H = 4, format, interleave
SERVED_ROWS = (
    ("pcp", "full", 4, "fp16", 1),
    ("pcp", "causal", 2, "f32", 4),
    ("pcp", "window", 1, "bf16", 1),
    ("pcp", "requests", 1, "f32", 1),
    ("dcp", "full", 2, "bf16", 4),
    ("dcp", "causal", 1, "fp16", 1),
    ("dcp", "window", 4, "f32", 4),
    ("dcp", "requests", 2, "fp16", 1),
    ("tp-dcp", "full", 1, "f32", 4),
    ("tp-dcp", "causal", 4, "bf16", 1),
    ("tp-dcp", "window", 2, "fp16", 4),
    ("tp-dcp", "requests", 4, "bf16", 4),
)
SERVED_MASKS: dict[str, dict[str, Any]] = {
    "full": {"Sq": 4, "Sk": 14},
    "causal": after(14, 4),
    "window": after(14, 4) | {"window": (6, 0)},
    "requests": requests((7, 3, 5), (2, 1, 1)),
}
NAMES = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32"}


def trained() -> Iterator[Case]:
    for name, mask, kv_heads, dtype, layout in ROWS:
        scheme, mesh, tokens = TRAINED[name]
        more: dict[str, Any] = dict(MASKS[mask])
        if mask == "documents":
            more["cu_seqlens"] = (0, 5, 6, tokens)
        if scheme == "joint":
            more["text"] = (0, 1, 2)
        yield split(
            f"pair/{name}-{mask}",
            f"The scheme {name}: mask {mask}, {kv_heads} key heads, {NAMES[dtype]}, {layout}.",
            "CP-2 CP-3", by=scheme, mesh=mesh, H=4, Hkv=kv_heads, S=tokens, dtype=dtype, layout=layout, **more,
        )  # fmt: skip


def served() -> Iterator[Case]:
    for name, mask, kv_heads, dtype, interleave in SERVED_ROWS:
        more: dict[str, Any] = dict(SERVED_MASKS[mask])
        if (name, mask) == ("pcp", "requests"):
            more["layout"] = "zigzag_per_document"
        yield split(
            f"pair/{name}-{mask}",
            f"The scheme {name}: mask {mask}, {kv_heads} key heads, {NAMES[dtype]}, interleave {interleave}.",
            "CP-2 CP-3", by="pcp" if name == "pcp" else "dcp", mesh=SERVED[name], H=4, Hkv=kv_heads, dtype=dtype,
            interleave=interleave, **more,
        )  # fmt: skip


CASES = (*trained(), *served())
