"""The running softmax of a block of query rows: start, absorb, merge, finish (SOFT-1 to SOFT-4).

A *softmax state* holds, per query row, the running maximum m, the sum l of exp(s - m) and the unnormalised o = sum of
exp(s - m) v, over all keys seen so far. A state *absorbs* a tile of scores. Two states over different keys *merge* into
the state over the keys of both; up to rounding, the order does not matter. The empty state has m = -inf, l = 0, o = 0,
and no operation here turns it into NaN (SOFT-2). Arrays are float64. ``recipe`` says where values are rounded;
``statistics``, ``p``, ``products``, ``merge`` and ``carried_o`` are the names of its number formats.

Sources: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Rabe and Staats, https://arxiv.org/abs/2112.05682;
Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.formats import row_sum
from ringspec.problem.model import Array
from ringspec.recipes import Recipe


@dataclass(frozen=True)
class SoftmaxState:
    """The running softmax of n query rows: ``m`` and ``l`` [B, H, n], ``o`` [B, H, n, Dv], float64.

    o is unnormalised, except after :func:`normalised`.
    """

    m: Array
    l: Array
    o: Array

    @property
    def lse(self) -> Array:
        """m + log(l), natural logarithm (FWD-4); -inf for an empty row (SOFT-2)."""
        empty = self.l == 0
        return np.where(empty, -np.inf, self.m + np.log(np.where(empty, 1.0, self.l)))


def start(batch: int, heads: int, length: int, width: int) -> SoftmaxState:
    """Return the empty state, which has seen no key, for B = ``batch``, H = ``heads``, n = ``length``, Dv = ``width``."""
    return SoftmaxState(
        np.full((batch, heads, length), -np.inf),
        np.zeros((batch, heads, length)),
        np.zeros((batch, heads, length, width)),
    )


def finite_shift(m: Array) -> Array:
    """Replace m by 0 where it is -inf: exp(-inf - 0) is 0, but exp(-inf + inf) would be NaN."""
    return np.where(np.isneginf(m), 0.0, m)


def absorb(
    state: SoftmaxState, s: Array, v: Array, keep: Array | float, recipe: Recipe
) -> SoftmaxState:
    """Return the state after one more tile of scores s [B, H, n, n_k] and values v [B, H, n_k, Dv] (SOFT-1)::

        m' = max(m, max_j s_j)    c = exp(m - m')    e_j = exp(s_j - m')
        l' = c l + sum_j e_j      o' = c o + sum_j e_j keep_j v_j

    ``keep`` is the dropout factor: it multiplies P in o, but not in l (FWD-7). ``recipe`` rounds c, e and l' to
    ``statistics``, P = e keep to ``p``, and o' once, to ``products``.
    """
    m = np.maximum(state.m, s.max(axis=3, initial=-np.inf))
    shift = finite_shift(m)
    c = recipe.to_statistics(np.exp(state.m - shift))
    e = recipe.to_statistics(np.exp(s - shift[..., None]))
    l = recipe.to_statistics(c * state.l + row_sum(e, recipe.statistics))
    p = recipe.to_p(e * keep)
    o = recipe.to_products(c[..., None] * state.o + recipe.matmul(p, v))
    return SoftmaxState(m, l, o)


def merge(a: SoftmaxState, b: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Return the state over the keys of both states (SOFT-1, SOFT-2, SOFT-4)::

        m' = max(m_a, m_b)    c_a = exp(m_a - m')    l' = c_a l_a + c_b l_b    o' = c_a o_a + c_b o_b

    The weights c_a and c_b are exp of a number <= 0, so nothing overflows. ``recipe`` rounds c_a, c_b and l' to
    ``statistics``.
    """
    m = np.maximum(a.m, b.m)
    shift = finite_shift(m)
    c_a = recipe.to_statistics(np.exp(a.m - shift))
    c_b = recipe.to_statistics(np.exp(b.m - shift))
    l = recipe.to_statistics(c_a * a.l + c_b * b.l)
    return SoftmaxState(m, l, weighted_sum(c_a, a.o, c_b, b.o, recipe))


def weighted_sum(c_a: Array, o_a: Array, c_b: Array, o_b: Array, recipe: Recipe) -> Array:
    """Return c_a o_a + c_b o_b: round products and sum to ``merge``, then round the result to ``carried_o`` (NUM-3)."""
    part_a = recipe.to_merge(c_a[..., None] * o_a)
    part_b = recipe.to_merge(c_b[..., None] * o_b)
    return recipe.to_carried_o(recipe.to_merge(part_a + part_b))


def normalised(state: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """Normalise a state: m becomes lse (rounded to ``statistics``), o becomes o / l (not rounded), l becomes 1 (0 if it was 0)."""
    lse = recipe.to_statistics(state.lse)
    empty = state.l == 0
    o = state.o / np.where(empty, 1.0, state.l)[..., None]
    return SoftmaxState(lse, np.where(empty, 0.0, 1.0), o)


def merge_normalised(a: SoftmaxState, b: SoftmaxState, recipe: Recipe) -> SoftmaxState:
    """SOFT-3: return the state over the keys of two normalised states, whose m is their lse.

    lse = log(exp(lse_a) + exp(lse_b)) and o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b.
    """
    m = np.maximum(a.m, b.m)
    shift = finite_shift(m)
    e_a, e_b = np.exp(a.m - shift), np.exp(b.m - shift)
    empty = e_a + e_b == 0
    total = np.where(empty, 1.0, e_a + e_b)
    lse = recipe.to_statistics(np.where(empty, -np.inf, shift + np.log(total)))
    # e_a / total is exp(lse_a - lse) without the rounding error of a large lse.
    c_a = recipe.to_statistics(e_a / total)
    c_b = recipe.to_statistics(e_b / total)
    return SoftmaxState(lse, np.where(empty, 0.0, 1.0), weighted_sum(c_a, a.o, c_b, b.o, recipe))


def merge_all(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """SOFT-3: merge any number of normalised partial results in float64, and return o and lse over all keys.

    ``parts`` are pairs (o [B, H, S, Dv], lse [B, H, S]); lse is -inf in a row where a part saw no key.
    """
    m = np.max([lse for _, lse in parts], axis=0)
    shift = finite_shift(m)
    total = np.sum([np.exp(lse - shift) for _, lse in parts], axis=0)
    empty = total == 0
    safe = np.where(empty, 1.0, total)
    o = np.zeros(parts[0][0].shape)
    for part, lse in parts:
        o = o + (np.exp(lse - shift) / safe)[..., None] * part
    return o, np.where(empty, -np.inf, shift + np.log(safe))


def finish(state: SoftmaxState, sinks: Array | None, recipe: Recipe) -> tuple[Array, Array]:
    """Return o / l [B, H, n, Dv] and lse [B, H, n] of a state that has seen all keys of its rows (FWD-6).

    Sinks [H, N] join the denominator here, once per row (FWD-5). ``recipe`` rounds o and lse to its output formats.
    A row with neither keys nor sinks gets o = 0 and lse = -inf (FWD-8). A row with sinks but no keys gets o = 0, and
    the log-sum-exp of its sinks as lse (FWD-9).
    """
    if sinks is not None:
        m = np.maximum(state.m, sinks.max(axis=1)[None, :, None])
        c = recipe.to_statistics(np.exp(state.m - m))
        sink_sum = np.exp(sinks[None, :, None, :] - m[..., None]).sum(axis=3)
        l = recipe.to_statistics(c * state.l + sink_sum)
        state = SoftmaxState(m, l, c[..., None] * state.o)
    o = state.o / np.where(state.l == 0, 1.0, state.l)[..., None]
    # + 0.0: zeros are +0
    return recipe.to_outputs(o) + 0.0, recipe.to_lse(state.lse) + 0.0
