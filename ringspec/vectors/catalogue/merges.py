"""The set merge: partial results, their correctly rounded merge, and the bits that the recipes of public merges give.

Parts have two heads, four rows and six columns. o has eight bits in bfloat16, eleven in float16 and 22 in float32, and each part
has another mean, so that a part that is lost, doubled or given another's weight changes every result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringspec.vectors.catalogue.build import constant, merge, numbers, put, spread
from ringspec.vectors.format.case import Case, Patch, TensorRecipe

# Recipes of normalised parts with natural lse, and those of parts (m, l, o). A set that is published does not change when
# a recipe is added to ringspec.merges, so they are listed here.
NORMALISED = (
    "torch_cp", "torch_cp_narrow", "ring_flash_attn", "ring_flash_attn_zigzag", "yunchang", "diffusers",
    "te_p2p", "te_p2p_2_20", "te_p2p_2_20_compiled", "te_thd", "sglang_merge", "vllm_merge", "vllm_merge_0_33", "vllm_merge_cuda", "vllm_dcp_ag_rs",
    "vllm_dcp_a2a", "sglang_dcp_a2a", "flash_decoding_fa2", "fa3", "helix",
)  # fmt: skip
UNNORMALISED = ("nki_ring", "tokamax")
OF_BASE_2 = ("flashinfer_merge", "flashmla")

ROWS, WIDTH = 4, 6
ALL = None
# Bits and exponent of o, and the unit of its offsets per head and part.
VALUES = {"bf16": (8, -6, 1), "fp16": (11, -9, 8), "f32": (22, -20, 1 << 14)}
NAMES = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32"}
# (name, bits and exponent of the random part, offset per head, per part)
SPREADS = {"narrow": (20, -20, 3 << 18, 5 << 16), "usual": (22, -19, 3 << 17, 5 << 17), "wide": (22, -15, 5 << 14, 3 << 16)}  # fmt: skip


def parts(
    id: str, reason: str, rules: str, flags: str = "", *, N: int, dtype: str = "f32", **data: Any
) -> Case:
    """Make a case of N parts with lse of the usual spread, and the recipes that take such parts."""
    bits, exponent, unit = VALUES[dtype]
    given = {
        "parts_o": numbers(bits, exponent, head=20 * unit, shard=9 * unit, shards=N),
        "parts_lse": lse_of("usual", N),
        "recipes": UNNORMALISED if "parts_sum" in data else NORMALISED,
    } | data
    return merge(
        f"partials/{id}", reason, rules, flags, N=N, S=ROWS, Dv=WIDTH, dtype=dtype, **given
    )


def lse_of(name: str, N: int) -> TensorRecipe:
    bits, exponent, head, shard = SPREADS[name]
    return numbers(bits, exponent, head=head, shard=shard, shards=N)


def near(center: float, N: int, step: float = 2**-12, stride: int = 3001) -> TensorRecipe:
    """Return lse within about 2 of ``center``, with many bits after the point."""
    return spread(center - 2, step, 16381, N, 1, 2, ROWS, stride=stride)


def hide(mark: str, *where: Any) -> dict[str, tuple[Patch, ...]]:
    """Return patches that mark parts as empty: each of ``where`` is a part, or a part and its rows."""
    places = [
        one if isinstance(one, tuple) and len(one) == 3 else (one, None, None) for one in where
    ]
    return {"parts_lse": tuple(put(mark, n, ALL, h, rows) for n, h, rows in places)}


def by_spread() -> Iterator[Case]:
    """Yield W = 2, 4, 8 parts in two formats, with lse that differ little, as usual, and much."""
    for name, words in (("narrow", "within 2"), ("usual", "within 8"), ("wide", "within 70")):
        for N in (2, 4, 8):
            for dtype in ("bf16", "f32") if name != "wide" or N != 4 else ("bf16", "fp16"):
                yield parts(
                    f"{name}-w{N}-{NAMES[dtype]}",
                    f"{N} parts in {NAMES[dtype]} whose lse lie {words} of each other.",
                    "SOFT-3 NUM-3", N=N, dtype=dtype, parts_lse=lse_of(name, N),
                )  # fmt: skip


# Where parts have no key: (name, sentence, N, format, places)
LACUNAE = (
    ("first-empty-w2-float32", "The first of two parts has no key", 2, "f32", (0,)),
    ("last-empty-w2-float32", "The second of two parts has no key", 2, "f32", (1,)),
    ("first-empty-w4-float32", "The first of four parts has no key", 4, "f32", (0,)),
    ("first-empty-w4-bfloat16", "The first of four parts, in bfloat16, has no key", 4, "bf16", (0,)),
    ("middle-empty-w4-bfloat16", "The second of four parts, in bfloat16, has no key", 4, "bf16", (1,)),
    ("last-empty-w4-bfloat16", "The last of four parts, in bfloat16, has no key", 4, "bf16", (3,)),
    ("two-first-empty-w4-float32", "Two empty parts come first, then two with keys", 4, "f32", (0, 1)),
    ("two-first-empty-w4-bfloat16", "Two empty parts in bfloat16 come first, then two with keys", 4, "bf16", (0, 1)),
    ("only-the-last-w4-float32", "The last of four parts alone has keys: it is the result, bit for bit", 4, "f32", (0, 1, 2)),
    ("only-the-first-w4-float32", "The first of four parts alone has keys: it is the result, bit for bit", 4, "f32", (1, 2, 3)),
    ("all-empty-w2-float32", "No part of two has a key: o = 0 and lse = -inf", 2, "f32", (0, 1)),
    ("all-empty-w4-bfloat16", "No part of four has a key: o = 0 and lse = -inf", 4, "bf16", (0, 1, 2, 3)),
    ("every-second-empty-w8-bfloat16", "Parts 0, 2, 4 and 6 of eight have no key", 8, "bf16", (0, 2, 4, 6)),
    ("here-and-there-w4-float32", "Each row and head lacks other parts of four", 4, "f32",
     ((0, 0, (0, 2)), (1, 0, (1, 3)), (3, 1, 0), (2, 1, (0, 3)), (0, 1, 3), (1, 1, 3))),
    ("here-and-there-w4-bfloat16", "Each row and head lacks other parts of four, in bfloat16", 4, "bf16",
     ((0, 0, (0, 2)), (1, 0, (1, 3)), (3, 1, 0), (2, 1, (0, 3)), (0, 1, 3), (1, 1, 3))),
    ("one-row-all-empty-w4-bfloat16", "One row of one head is empty in all parts, its neighbours in none", 4, "bf16",
     ((0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 2))),
)  # fmt: skip


def empty_parts() -> Iterator[Case]:
    for name, sentence, N, dtype, places in LACUNAE:
        flags = "empty-merge-nan" if "all" in name or "two-first" in name else "masked-block-nan"
        yield parts(
            name, f"{sentence}.", "SOFT-2", flags, N=N, dtype=dtype, patches=hide("-inf", *places)
        )


def garbage() -> Iterator[Case]:
    """Yield empty parts whose o was never written and holds NaN."""
    for name, sentence, N, dtype, places in (
        ("nan-first-w2-float32", "The first part is empty and its o is NaN", 2, "f32", (0,)),
        ("nan-first-w4-bfloat16", "The first of four parts is empty, and its o is NaN in bfloat16", 4, "bf16", (0,)),
        ("nan-middle-w4-float32", "An empty part in the middle holds NaN, which 0 times is not 0", 4, "f32", (2,)),
        ("nan-last-w4-bfloat16", "The last of four parts is empty and holds NaN in bfloat16", 4, "bf16", (3,)),
        ("nan-two-first-w4-float32", "Two empty parts that hold NaN come before two with keys", 4, "f32", (0, 1)),
        ("nan-all-w4-bfloat16", "All four parts are empty and hold NaN: o = 0 and lse = -inf", 4, "bf16", (0, 1, 2, 3)),
    ):  # fmt: skip
        patches = hide("-inf", *places) | {
            "parts_o": tuple(put("nan", n, ALL, ALL, ALL, ALL) for n in places)
        }
        yield parts(
            name, f"{sentence}.", "SOFT-2", "empty-merge-nan", N=N, dtype=dtype, patches=patches
        )


def marked_plus_inf() -> Iterator[Case]:
    """Yield empty parts that lse = +inf marks, as FlashAttention 2 does."""
    for name, sentence, N, dtype, places in (
        ("plus-inf-first-w2-float32", "lse = +inf marks the first of two parts as empty", 2, "f32", (0,)),
        ("plus-inf-first-w4-bfloat16", "lse = +inf marks the first of four parts as empty, in bfloat16", 4, "bf16", (0,)),
        ("plus-inf-middle-w4-float32", "lse = +inf marks the third of four parts as empty", 4, "f32", (2,)),
        ("plus-inf-last-w4-bfloat16", "lse = +inf marks the last of four parts as empty", 4, "bf16", (3,)),
        ("plus-inf-all-w4-float32", "lse = +inf marks all four parts as empty: o = 0 and lse = -inf", 4, "f32", (0, 1, 2, 3)),
        ("plus-inf-rows-w4-bfloat16", "lse = +inf marks some rows of some parts as empty", 4, "bf16",
         ((0, 0, (0, 2)), (2, 1, (1, 3)), (3, 0, 3))),
    ):  # fmt: skip
        patches = hide("inf", *places)
        patches["parts_o"] = tuple(
            put(0.0, n, ALL, h, rows, ALL)
            for n, _, h, rows in (patch.at for patch in patches["parts_lse"])
        )
        yield parts(
            name, f"{sentence}.", "SOFT-2", "plus-inf-lse-of-empty", N=N, dtype=dtype,
            patches=patches, empty_lse="+inf",
        )  # fmt: skip


def large() -> Iterator[Case]:
    """Yield lse of large magnitude, whose rounding to float32 changes the weights exp(l - L)."""
    for center, N, dtype in (
        (1000.0, 2, "f32"), (1000.0, 8, "bf16"), (-1000.0, 4, "bf16"), (-998.0, 2, "f32"), (100.0, 4, "bf16"),
        (100.0, 2, "fp16"),
    ):  # fmt: skip
        sign = "minus-" if center < 0 else ""
        yield parts(
            f"lse-{sign}{abs(center):.0f}-w{N}-{NAMES[dtype]}",
            f"{N} parts in {NAMES[dtype]} with lse near {center:.0f}: exp(lse) overflows or is 0.",
            "SOFT-4", "merge-overflow", N=N, dtype=dtype, parts_lse=near(center, N),
        )  # fmt: skip
    for N, dtype in ((2, "f32"), (8, "bf16")):
        yield parts(
            f"ones-at-1000-w{N}-{NAMES[dtype]}",
            f"All {N} parts are 1 and lse lies near 1000: weights that sum to 1 give 1, in {NAMES[dtype]}.",
            "SOFT-3 SOFT-4", N=N, dtype=dtype, parts_o=constant(1.0), parts_lse=near(1000.0, N, stride=5003),
        )  # fmt: skip


SPECIAL = (
    parts(
        "equal-lse-w2-float32", "Two parts of equal lse: weights of exactly one half.", "SOFT-3", N=2,
        parts_lse=constant(1.5),
    ),
    parts(
        "equal-lse-w8-bfloat16", "Eight parts of equal lse: their mean, and lse + log 8.", "SOFT-3", N=8,
        dtype="bf16", parts_lse=constant(-2.25),
    ),
    parts(
        "first-dominates-w2-float32", "The first lse is 120 above the second: its weight is no normal number.",
        "SOFT-4", "merge-overflow", N=2, patches={"parts_lse": (put(120.0, 0, ALL, ALL, ALL),)},
    ),
    parts(
        "last-dominates-w4-float32", "The last lse is 200 above the others, whose weights are 0 in float32.",
        "SOFT-4", "merge-overflow", N=4, patches={"parts_lse": (put(200.0, 3, ALL, ALL, ALL),)},
    ),
    parts(
        "rising-w8-bfloat16", "Each lse is 3 above the one before: the running maximum moves at every step.",
        "SOFT-1 SOFT-3", N=8, dtype="bf16", parts_lse=numbers(16, -16, shard=3 << 16, shards=8),
    ),
    parts(
        "falling-w8-bfloat16", "Each lse is 3 below the one before: later parts count for less and less.",
        "SOFT-1 SOFT-3", N=8, dtype="bf16", parts_lse=numbers(16, -16, shard=-(3 << 16), shards=8),
    ),
    parts(
        "far-pair-w4-float32", "Two parts of equal lse, and two that lie 300 below and count for nothing.",
        "SOFT-3 SOFT-4", N=4, parts_lse=constant(2.0, None, put(-298.0, (2, 4), ALL, ALL, ALL)),
    ),
    parts(
        "opposite-w2-bfloat16", "Two parts of opposite sign and nearly equal weight: o is small beside them.",
        "SOFT-3", N=2, dtype="bf16", parts_lse=numbers(8, -16),
        parts_o=constant(1.375, None, put(-1.375, 1, ALL, ALL, ALL, ALL)),
    ),
    parts(
        "one-part-float32", "One part is itself, bit for bit, in every recipe.", "SOFT-3", N=1,
    ),
)  # fmt: skip


def unnormalised() -> Iterator[Case]:
    """Yield parts (m, l, o): the maximum, the sum of exponentials, and o that is not divided by it."""
    for N, dtype in ((2, "f32"), (2, "bf16"), (4, "bf16"), (8, "bf16")):
        yield parts(
            f"sums-w{N}-{NAMES[dtype]}", f"{N} parts (m, l, o) in {NAMES[dtype]} that are not normalised.",
            "SOFT-1 SOFT-3", N=N, dtype=dtype, parts_sum=sums(N),
        )  # fmt: skip
    for name, sentence, places in (
        ("first", "The first of four parts (m, l, o) has no key: m = -inf, l = 0", (0,)),
        ("two-first", "Two parts (m, l, o) without keys come before two with keys", (0, 1)),
        ("all", "No part (m, l, o) of four has a key", (0, 1, 2, 3)),
    ):
        patches = hide("-inf", *places)
        patches["parts_sum"] = tuple(put(0.0, n, ALL, ALL, ALL) for n in places)
        patches["parts_o"] = tuple(put(0.0, n, ALL, ALL, ALL, ALL) for n in places)
        yield parts(
            f"sums-{name}-empty-w4-bfloat16", f"{sentence}.", "SOFT-2", "empty-merge-nan", N=4, dtype="bf16",
            parts_sum=sums(4), patches=patches,
        )  # fmt: skip
    yield parts(
        "sums-at-1000-w4-bfloat16", "Parts (m, l, o) whose maxima lie near 1000: no lse is rounded on the way.",
        "SOFT-4", "merge-overflow", N=4, dtype="bf16", parts_sum=sums(4), parts_lse=near(1000.0, 4),
    )  # fmt: skip


def base_2() -> Iterator[Case]:
    """Yield parts whose lse are logarithms to base 2."""
    more: dict[str, Any] = {"lse_base": 2, "recipes": OF_BASE_2}
    for N, dtype in ((2, "f32"), (2, "bf16"), (4, "bf16"), (8, "bf16")):
        yield parts(
            f"base-2-w{N}-{NAMES[dtype]}",
            f"{N} parts in {NAMES[dtype]} with lse to base 2: read as natural, they give another mixture.",
            "SOFT-3", "natural-lse-as-log2 log2-lse", N=N, dtype=dtype, **more,
        )  # fmt: skip
    for name, places in (("first", (0,)), ("two-first", (0, 1)), ("all", (0, 1, 2, 3))):
        yield parts(
            f"base-2-{name}-empty-w4-bfloat16",
            f"Of four parts with lse to base 2 these have no key: {name.replace('-', ' ')}.",
            "SOFT-2", "empty-merge-nan", N=4, dtype="bf16", patches=hide("-inf", *places), **more,
        )  # fmt: skip
    yield parts(
        "base-2-at-1000-w4-bfloat16", "lse to base 2 near 1000, where 2**lse is no float32 number.",
        "SOFT-4", "merge-overflow", N=4, dtype="bf16", parts_lse=near(1000.0, 4), **more,
    )  # fmt: skip
    yield parts(
        "base-2-two-and-eight-w2-float32",
        "lse 1 and 3 to base 2 are the weights 2 and 8: outputs 0 and 10 give 8, and lse log2(10).",
        "SOFT-3", "natural-lse-as-log2 log2-lse", N=2, parts_o=constant(0.0, None, put(10.0, 1, *4 * (ALL,))),
        parts_lse=constant(1.0, None, put(3.0, 1, ALL, ALL, ALL)), **more,
    )  # fmt: skip


def sums(N: int) -> TensorRecipe:
    """Return sums of exponentials from 1 to 13, which are those of up to 13 keys or more."""
    return spread(1.0, 1.0, 13, N, 1, 2, ROWS, stride=5)


CASES = (
    *by_spread(), *empty_parts(), *garbage(), *marked_plus_inf(), *large(), *SPECIAL, *unnormalised(), *base_2(),
)  # fmt: skip
