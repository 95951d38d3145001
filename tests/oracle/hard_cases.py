"""Small problems whose correct rounding is hard: ties, near ties, cancellation, the ends of formats.

Makers as in exact_cases.py.
"""

from collections.abc import Callable

import numpy as np
from oracle.exact_cases import Given, Sizes, causal, everything, make, normal, quantise, some
from oracle.precise import Problem


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


def ties_beside_a_sink(rng, name):
    """Two equal keys and an equal sink: P = 1/3, and o, dz, dbias and dsinks are midpoints."""
    midpoint = 1 + 2.0**-8
    part = rng.integers(1, 9, (1, 2, 2, 4)) * 0.125
    v = 1.5 * midpoint + np.concatenate([part[:, :, :1], -part[:, :, :1]], axis=2)
    v[..., 3] = 4.5 * midpoint
    given = make(rng, name, Sizes(Sk=2), logits=0.0, sinks=np.zeros((2, 1)))
    dy = np.zeros((1, 2, 5, 4))
    dy[:, :, 2, 3] = 1.0
    fields = {**vars(given.problem), "v": v, "bias": np.zeros((1, 2, 1, 2))}
    return Given(Problem(**fields), dy)


def softcap_of_one_key(rng, name):
    """P = 1 exactly, and a large ds = dlse: the error of 1 - tanh**2 alone is left."""
    given = make(rng, name, Sizes(Sk=1), softcap=1.0, bias=np.zeros((1, 1, 5, 1)))
    return Given(given.problem, given.dy, given.dlse * 2.0**40)


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
    ties_beside_a_sink,
    softcap_of_one_key,
    softcap_saturated,
    softcap_small,
    softcap_huge,
    softcap_on_ties,
    negative_scale,
    zero_scale,
    dropout_near_one,
    zero_upstream,
)
