"""Small problems for correctly rounded results: every feature. hard_cases.py has hard inputs.

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
