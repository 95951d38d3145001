"""Small problems for correctly rounded results: every feature, and inputs on which rounding is hard.

A maker takes a generator and the name of the input format and returns `Given`. Its tensors are
numbers of that format (`quantise`), because real inputs are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from oracle.decide import nearest
from oracle.precise import Problem
from oracle.round_exact import Fraction


@dataclass(frozen=True)
class Given:
    problem: Problem
    dy: np.ndarray
    dlse: np.ndarray | None = None


@dataclass(frozen=True)
class Sizes:
    B: int = 1
    H: int = 2
    Hkv: int = 2
    Sq: int = 5
    Sk: int = 6
    D: int = 3
    Dv: int = 4


Generator = np.random.Generator
INPUT_FORMATS = ("bfloat16", "float16", "float32", "float64")


def quantise(values, name: str) -> np.ndarray:
    """Finite values as float64 numbers of a format; infinities stay, too large becomes finite.

    >>> quantise([1 / 3, -np.inf, 1e9], "float16").tolist()
    [0.333251953125, -inf, 65504.0]
    """
    values = np.asarray(values, dtype=np.float64)
    if name == "float64":
        return values
    largest = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127}
    top = largest.get(name, float(np.finfo(np.float32).max))
    result = np.empty(values.shape)
    for index in np.ndindex(values.shape):
        x = float(values[index])
        result[index] = x if np.isinf(x) else min(max(nearest(Fraction(x), name), -top), top)
    return result


def normal(rng: Generator, shape, name: str, size: float = 1.0) -> np.ndarray:
    return quantise(size * rng.standard_normal(shape), name)


def make(rng: Generator, name: str, sizes: Sizes = Sizes(), logits: float = 1.5, **terms) -> Given:
    """A problem with normal inputs whose scores have about the standard deviation `logits`."""
    B, H, Hkv, Sq, Sk, D, Dv = (getattr(sizes, x) for x in ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv"))
    tensors = {
        "q": normal(rng, (B, H, Sq, D), name, logits),
        "k": normal(rng, (B, Hkv, Sk, D), name),
        "v": normal(rng, (B, Hkv, Sk, Dv), name, 2.0),
    }
    dy, dlse = normal(rng, (B, H, Sq, Dv), name), normal(rng, (B, H, Sq), name)
    dy, dlse = terms.pop("dy", dy), terms.pop("dlse", dlse)
    fields = {**tensors, "scale": float(max(D, 1) ** -0.5), **terms}
    return Given(Problem(**fields), dy, dlse)


def causal(Sq: int, Sk: int, offset: int = 0) -> np.ndarray:
    return (np.arange(Sk)[None, :] <= np.arange(Sq)[:, None] + offset)[None, None]


def some(rng: Generator, shape, share: float = 0.7) -> np.ndarray:
    return rng.random(shape) < share


# Features --------------------------------------------------------------------------------------------


def plain(rng, name):
    return make(rng, name)


def causal_with_empty_rows(rng, name):
    return make(rng, name, visible=causal(5, 6, -2))


def random_mask_per_head(rng, name):
    return make(rng, name, Sizes(B=2, Sq=4, Sk=4), visible=some(rng, (2, 2, 4, 4), 0.6))


def two_batches_grouped_heads(rng, name):
    sizes = Sizes(B=2, H=4, Hkv=2, Sq=3, Sk=4, D=2, Dv=3)
    return make(rng, name, sizes, visible=some(rng, (2, 1, 3, 4)))


def one_key_head(rng, name):
    return make(rng, name, Sizes(H=3, Hkv=1, Sq=4, Sk=4, D=4, Dv=2), dlse=None)


def one_key(rng, name):
    return make(rng, name, Sizes(Sk=1))


def one_query(rng, name):
    return make(rng, name, Sizes(Sq=1, D=1, Dv=1))


def bias_of_every_pair(rng, name):
    bias = normal(rng, (1, 2, 5, 6), name)
    bias[some(rng, bias.shape, 0.3)] = -np.inf
    return make(rng, name, bias=bias)


def bias_per_key(rng, name):
    return make(rng, name, Sizes(B=2, Sq=3), bias=normal(rng, (1, 2, 1, 6), name))


def bias_per_query_with_masked_rows(rng, name):
    bias = normal(rng, (1, 1, 5, 1), name)
    bias[0, 0, 2] = -np.inf
    return make(rng, name, bias=bias)


def sinks(rng, name):
    return make(rng, name, sinks=normal(rng, (2, 3), name), visible=causal(5, 6, -1))


def softcap(rng, name):
    return make(rng, name, softcap=2.5)


def dropout(rng, name):
    return make(rng, name, keep=some(rng, (1, 2, 5, 6)), dropout_p=0.1)


def dropout_of_a_whole_row(rng, name):
    keep = some(rng, (1, 1, 5, 6))
    keep[0, 0, 3] = False
    return make(rng, name, keep=keep, dropout_p=0.1, sinks=normal(rng, (2, 1), name))


def keep_without_a_probability(rng, name):
    return make(rng, name, keep=some(rng, (1, 1, 1, 6)), dlse=None)


def everything(rng, name):
    bias = normal(rng, (1, 4, 1, 5), name)
    bias[0, 1, 0, 2] = -np.inf
    return make(
        rng,
        name,
        Sizes(B=2, H=4, Hkv=2, Sq=4, Sk=5, D=3, Dv=2),
        visible=causal(4, 5, -1),
        bias=bias,
        softcap=1.75,
        sinks=normal(rng, (4, 2), name),
        keep=some(rng, (2, 4, 4, 5), 0.8),
        dropout_p=float(rng.choice([0.1, 0.25, 0.7])),
    )


FEATURES: tuple[Callable, ...] = (
    plain,
    causal_with_empty_rows,
    random_mask_per_head,
    two_batches_grouped_heads,
    one_key_head,
    one_key,
    one_query,
    bias_of_every_pair,
    bias_per_key,
    bias_per_query_with_masked_rows,
    sinks,
    softcap,
    dropout,
    dropout_of_a_whole_row,
    keep_without_a_probability,
    everything,
)


# Hard inputs -----------------------------------------------------------------------------------------


def peaked(rng, name):
    return make(rng, name, logits=64.0, dlse=None)


def peaked_with_everything(rng, name):
    given = everything(rng, name)
    fields = {**vars(given.problem), "softcap": 300.0, "q": given.problem.q * 32.0}
    return Given(Problem(**fields), given.dy, given.dlse)


def near_ties(rng, name):
    """o is about e**-gap beside a midpoint of a format: row i sees key 0 and one far below it."""
    gap = np.array([0.0, 20.0, 60.0, 150.0, 300.0, 400.0])
    bias = -gap[None, None, None, :] * np.array([1.0, 0.5])[None, :, None, None]
    midpoints = np.array([1 + 2.0**-8, 1 + 2.0**-11, 1 + 2.0**-24, 3 + 2.0**-52])
    v = np.tile(midpoints, (1, 2, 6, 1)) + rng.integers(-2, 3, (1, 2, 6, 4))
    seen = np.eye(5, 6, 1, dtype=bool)
    seen[:, 0] = True
    given = make(rng, name, logits=0.0, bias=bias, visible=seen[None, None])
    fields = {**vars(given.problem), "v": v}
    return Given(Problem(**fields), given.dy, given.dlse)


def constant_values(rng, name):
    """o is the constant, exactly; ds is p * dlse, and 0 without dlse."""
    row = np.array([1 + 2.0**-8, 1.0, 0.1, -(1 + 2.0**-24)])
    given = make(rng, name, dlse=None)
    return Given(Problem(**{**vars(given.problem), "v": np.tile(row, (1, 2, 6, 1))}), given.dy)


def uniform_rows(rng, name):
    """All scores equal: o is a mean, and often the midpoint of two numbers of a format."""
    midpoint = np.array([1 + 2.0**-8, 1 + 2.0**-11, 1 + 2.0**-24, 2.0**-24])
    three = midpoint + np.array([-0.25, 0.0, 0.25])[:, None] * rng.integers(0, 3, (1, 4))
    v = np.tile(np.tile(three, (2, 1)), (1, 2, 1, 1))
    given = make(rng, name, logits=0.0, visible=causal(5, 6, 1))
    return Given(Problem(**{**vars(given.problem), "v": v}), given.dy, given.dlse)


def duplicate_keys(rng, name):
    """Keys in equal pairs with a mean of values that is a midpoint: o is a mixture of ties."""
    given = make(rng, name, dlse=None)
    k = np.repeat(given.problem.k[:, :, :3], 2, axis=2)
    step = rng.integers(1, 4, (1, 2, 3, 4)) * 0.125
    v = np.empty((1, 2, 6, 4))
    v[:, :, 0::2], v[:, :, 1::2] = 1 + 2.0**-8 + step, 1 + 2.0**-8 - step
    return Given(Problem(**{**vars(given.problem), "k": k, "v": v}), given.dy)


def duplicate_queries_that_cancel(rng, name):
    """Rows in pairs with dy and -dy: dk and dv are exactly 0, though no term is."""
    given = make(rng, name, Sizes(Sq=4))
    q = np.repeat(given.problem.q[:, :, :2], 2, axis=2)
    sign = np.array([1.0, -1.0, 1.0, -1.0])
    dy = np.repeat(given.dy[:, :, :2], 2, axis=2) * sign[:, None]
    dlse = np.repeat(given.dlse[:, :, :2], 2, axis=2) * sign
    return Given(Problem(**{**vars(given.problem), "q": q}), dy, dlse)


def small_outputs(rng, name):
    """Results around the least subnormals of all formats."""
    exponents = np.array([-26, -135, -150, -1074])
    given = make(rng, "float64")
    v = np.ldexp(rng.standard_normal((1, 2, 6, 4)), exponents)
    dy = np.ldexp(rng.standard_normal((1, 2, 5, 4)), rng.permuted(exponents))
    return Given(Problem(**{**vars(given.problem), "v": v}), dy, np.ldexp(given.dlse, -1070))


def overflows(rng, name):
    """Results around the overflow thresholds of float16, bfloat16, float32 and float64."""
    tops = np.array([65520.0, 2.0**128 - 2.0**119, 2.0**128 - 2.0**103, np.finfo(float).max])
    given = make(rng, "float64", logits=0.1)
    v = tops * (1 - 2.0**-12 * rng.integers(0, 3, (1, 2, 6, 4)))
    dy = np.ldexp(given.dy, rng.integers(-10, 20, given.dy.shape))
    return Given(Problem(**{**vars(given.problem), "v": v}), dy, given.dlse)


def at_an_overflow_threshold(rng, name):
    """o is the midpoint behind the greatest number: the tie that goes to infinity."""
    tops = np.array([65520.0, 2.0**128 - 2.0**119, 2.0**128 - 2.0**103, np.finfo(float).max])
    given = make(rng, "float64", dlse=None)
    return Given(Problem(**{**vars(given.problem), "v": np.tile(tops, (1, 2, 6, 1))}), given.dy)


def wide_exponents(rng, name):
    """float64 inputs over 600 binades, with scores of moderate size."""

    def wide(shape, span):
        return np.ldexp(rng.standard_normal(shape), rng.integers(-span, span + 1, shape))

    given = make(rng, "float64", Sizes(Sq=4, Sk=4))
    fields = {**vars(given.problem), "v": wide((1, 2, 4, 4), 300)}
    return Given(Problem(**fields), wide((1, 2, 4, 4), 300), wide((1, 2, 4), 300))


def wide_scores(rng, name):
    """q tiny where k is huge: exact products over hundreds of binades, moderate scores."""
    given = make(rng, "float64", Sizes(Sq=4, Sk=4))
    exponents = rng.integers(-300, 301, 3)
    fields = {**vars(given.problem)}
    fields["q"] = np.ldexp(given.problem.q, exponents)
    fields["k"] = np.ldexp(given.problem.k, -exponents)
    return Given(Problem(**fields), given.dy, given.dlse)


def tiny_scores(rng, name):
    given = make(rng, "float64", Sizes(Sq=4, Sk=4))
    fields = {**vars(given.problem), "q": np.ldexp(given.problem.q, -90), "scale": 2.0**-60}
    return Given(Problem(**fields), given.dy, given.dlse)


def large_sinks(rng, name):
    sizes = rng.permuted(np.array([-1e4, -30.0, 30.0, 500.0]))
    return make(rng, name, sinks=quantise(sizes, name).reshape(2, 2), visible=causal(5, 6, -1))


def equal_sinks_and_scores(rng, name):
    """Zero queries and zero sinks: every weight is 1 / (n + 2)."""
    return make(rng, name, logits=0.0, sinks=np.zeros((2, 2)), visible=causal(5, 6, -1))


def equal_scores_and_other_equal_sinks(rng, name):
    """All scores -n/4, all sinks -n/32: the same integer n in units of different size."""
    n = 2 * int(rng.integers(1, 64)) + 1
    given = make(rng, name, Sizes(Sk=15, D=1), scale=1.0, sinks=np.full((2, 1), -n / 32))
    fields = {**vars(given.problem), "q": np.full((1, 2, 5, 1), -n / 4)}
    fields["k"] = np.ones((1, 2, 15, 1))
    return Given(Problem(**fields), given.dy, given.dlse)


def softcap_saturated(rng, name):
    return make(rng, name, logits=40.0, softcap=0.75)


def softcap_small(rng, name):
    """tanh within e**-500 of 1: nearly two groups of equal weights."""
    return make(rng, name, softcap=2.0**-6, dlse=None)


def softcap_huge(rng, name):
    return make(rng, name, softcap=2.0**40)


def softcap_on_ties(rng, name):
    """Equal z beside each other under a soft cap: uniform weights, a mean of values."""
    given = uniform_rows(rng, name)
    return Given(Problem(**{**vars(given.problem), "softcap": 3.0}), given.dy, given.dlse)


def negative_scale(rng, name):
    return make(rng, name, scale=-0.7)


def zero_scale(rng, name):
    return make(rng, name, scale=0.0)


def dropout_near_one(rng, name):
    return make(rng, name, keep=some(rng, (1, 2, 5, 6)), dropout_p=1 - 2.0**-40)


def zero_upstream(rng, name):
    return make(rng, name, dy=np.zeros((1, 2, 5, 4)), dlse=None, sinks=normal(rng, (2, 1), name))


HARD: tuple[Callable, ...] = (
    peaked,
    peaked_with_everything,
    near_ties,
    constant_values,
    uniform_rows,
    duplicate_keys,
    duplicate_queries_that_cancel,
    small_outputs,
    overflows,
    at_an_overflow_threshold,
    wide_exponents,
    wide_scores,
    tiny_scores,
    large_sinks,
    equal_sinks_and_scores,
    equal_scores_and_other_equal_sinks,
    softcap_saturated,
    softcap_small,
    softcap_huge,
    softcap_on_ties,
    negative_scale,
    zero_scale,
    dropout_near_one,
    zero_upstream,
)
