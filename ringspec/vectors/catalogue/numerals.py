"""Cases with results that are hard to round: ties, near ties, overflow, subnormal numbers, exact zeros.

In many of these cases the query is 0. All keys then have the same weight, and o is the mean of values with few bits.
"""

from __future__ import annotations

from typing import Any

from ringspec.vectors.catalogue.build import case, constant, put

FORWARD = ("forward",)
ALL = None


def means(*columns: tuple[float, ...]) -> dict[str, Any]:
    """Return inputs with one query, which is 0, so that o is the mean of each column of v (one value per key)."""
    rows = tuple(zip(*columns, strict=True))
    return {
        "H": 1, "Sq": 1, "Sk": len(rows), "D": 1, "Dv": len(columns), "scale": 1.0,
        "passes": FORWARD, "q": constant(0.0), "k": constant(1.0), "v": ((rows,),),
    }  # fmt: skip


def sums(dtype: str, *columns: tuple[float, ...]) -> dict[str, Any]:
    """Return inputs with one key, so that dv is the sum of each column of dy (one number per query)."""
    rows = tuple(zip(*columns, strict=True))
    return {
        "dtype": dtype, "H": 1, "Sq": len(rows), "Sk": 1, "D": 1, "Dv": len(columns), "scale": 1.0,
        "q": constant(1.0), "k": constant(1.0), "v": constant(0.0), "dy": ((rows,),),
    }  # fmt: skip


CASES = (
    case(
        "number/ties-to-even-bfloat16",
        "Means halfway between two bfloat16 numbers go to the even one, down and up.",
        "NUM-1", **means((1.0, 1.0078125), (1.0078125, 1.015625), (-1.0, -1.0078125)),
    ),
    case(
        "number/ties-to-even-float16",
        "Means halfway between two float16 numbers go to the even one, down and up.",
        "NUM-1", dtype="fp16", **means((1.0, 1.0009765625), (1.0009765625, 1.001953125)),
    ),
    case(
        "number/double-rounding-bfloat16",
        "1 + 2**-8 + 2**-25 is above the tie in bfloat16, which a rounding to float32 first makes it.",
        "NUM-1", "double-rounding", dtype="f32", outputs="bfloat16",
        **means(
            (1.0000001192092896, 1.015625, 1.0, 1.0), (-1.0000001192092896, -1.015625, -1.0, -1.0)
        ),
    ),
    case(
        "number/double-rounding-float16",
        "The same trap at the float16 tie 1 + 2**-11.",
        "NUM-1", "double-rounding", dtype="f32", outputs="float16",
        **means((1.0000001192092896, 1.001953125, 1.0, 1.0)),
    ),
    case(
        "number/near-a-tie",
        "A third key of weight e**-60 and e**-200 puts the mean beside the tie, on either side.",
        "NUM-1", H=1, Sq=2, Sk=3, D=1, Dv=2, scale=1.0, passes=FORWARD,
        q=((((60.0,), (200.0,)),),), k=((((0.0,), (0.0,), (-1.0,)),),),
        v=((((1.0, 1.0), (1.0078125, 1.0078125), (4.0, -4.0)),),),
    ),
    case(
        "number/overflow-float16",
        "Sums at the end of float16: 65519 stays 65504, 65520 is a tie and becomes infinity.",
        "NUM-1 BWD-7", "subnormal-flushed",
        **sums("fp16", (65504.0, 15.0), (65504.0, 16.0), (40000.0, 40000.0), (-65504.0, -32.0)),
    ),
    case(
        "number/overflow-bfloat16",
        "Sums of bfloat16's largest number with itself and with a half step, which is a tie.",
        "NUM-1 BWD-7", **sums(
            "bf16", (2.0**127 * 1.9921875, 2.0**127 * 1.9921875), (2.0**127 * 1.9921875, 2.0**119),
            (2.0**127 * 1.9921875, 2.0**118),
        ),
    ),
    case(
        "number/overflow-float32",
        "Sums that leave float32 in both directions, and one that a quarter of a step keeps in.",
        "NUM-1 BWD-7", **sums(
            "f32", (2.0**127, 2.0**127), (-(2.0**127), -(2.0**127)),
            (2.0**128 - 2.0**104, 2.0**102),
        ),
    ),
    case(
        "number/overflow-by-dropout",
        "Values within float16 times 1/(1 - p) = 4 are not: o is infinite where it is kept.",
        "NUM-1 FWD-6", dtype="fp16", dropout_p=0.75, keep=((((True, False),),),),
        **means((60000.0, 1.0), (100.0, 60000.0)),
    ),
    case(
        "number/subnormal-float16",
        "Means among float16's subnormal numbers: halves of the least one go to even.",
        "NUM-1", "subnormal-flushed", dtype="fp16",
        **means(
            (2.0**-24, 0.0), (3 * 2.0**-24, 0.0), (2.0**-14, 2.0**-24), (-(2.0**-20), 2.0**-24)
        ),
    ),
    case(
        "number/subnormal-float32",
        "Means among float32's subnormal numbers, where a program that flushes them gives 0.",
        "NUM-1", "subnormal-flushed", dtype="f32",
        **means((2.0**-140, 2.0**-141), (2.0**-149, 0.0), (3 * 2.0**-149, 0.0), (2.0**-126, 0.0)),
    ),
    case(
        "number/subnormal-bfloat16",
        "bfloat16 has float32's range with fewer bits: its least number is 2**-133.",
        "NUM-1", "subnormal-flushed",
        **means((2.0**-133, 0.0), (3 * 2.0**-133, 0.0), (2.0**-126, 0.0)),
    ),
    case(
        "number/zeros-are-positive",
        "Opposite values cancel to +0, and so do their gradients.",
        "NUM-1", H=1, Sq=2, Sk=2, D=2, scale=1.0, q=constant(0.0), k=constant(-1.0),
        v=((((1.5, -2.0), (-1.5, 2.0)),),), dy=((((1.0, 0.5), (-1.0, -0.5)),),),
    ),
    case(
        "number/lse-of-powers-of-two",
        "lse is the log of 1, 2, ... 8 in float32: a log2 times a rounded ln 2 is off by a step.",
        "FWD-4 NUM-1", "log2-lse", S=8, H=1, causal=True, passes=FORWARD, q=constant(0.0),
    ),
    case(
        "number/large-lse",
        "lse near 5000: float32 holds eleven bits of its fraction, and p is still exact.",
        "FWD-4 NUM-2", S=8, dtype="f32",
        patches={"q": (put(100.0, ALL, ALL, ALL, 0),), "k": (put(100.0, ALL, ALL, ALL, 0),)},
    ),
    case(
        "number/product-and-sum-of-a-merge",
        "Two keys of weights 3/4 and 1/4: o's parts have more bits than a 16-bit merge keeps.",
        "NUM-2 NUM-3", "partials-rounded-to-16-bit", H=1, Sq=1, Sk=2, D=1, Dv=4, scale=1.0,
        dtype="f32", passes=FORWARD, q=((((1.0,),),),), k=((((1.0986123085021973,), (0.0,)),),),
        v=((((1.0, 1.00390625, -3.0, 0.3333333432674408),
             (-3.0, 1.00390625, 1.0, -1.0)),),),
    ),
)  # fmt: skip
