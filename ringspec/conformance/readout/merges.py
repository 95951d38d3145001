"""Merge a block's result into the running one: correctly, or by one of the mistakes that a readout tries."""

from __future__ import annotations

import math

import numpy as np

from ringspec.problem.model import Array
from ringspec.spec.online_softmax import finite_shift

LN2 = math.log(2.0)
# Wrong merges by name, with the words that complete "In the forward pass, ...".
WRONG = {
    "running not rescaled": "the running o and l are not rescaled when the maximum rises",
    "o not rescaled": "the running o is not rescaled when the maximum rises (l is)",
    "l not rescaled": "the running l is not rescaled when the maximum rises (o is)",
    "block not rescaled": "the new block's o and l are not rescaled to the common maximum",
    "o of block not rescaled": "the new block's o is not rescaled to the common maximum (l is)",
    "l of block not rescaled": "the new block's l is not rescaled to the common maximum (o is)",
    "weights swapped": "the two weights of the merge are swapped",
    "o weights swapped": "the two weights of the merge are swapped for o (lse is correct)",
    "normalised o weights swapped": "the two weights are swapped in a merge of normalised o (lse is correct)",
    "last wins": "the new block's result replaces the running result",
    "first wins": "the new block is dropped in the merge",
    "o last wins": "the new block's o replaces the running o (l is correct)",
    "lse last wins": "the new block's l replaces the running l (o is accumulated)",
    "l not added": "the new block's l is not added to the running l (o is)",
    "o not added": "the new block's o is not added to the running o (l is)",
    "running rescaled twice": "the running o and l are rescaled twice when the maximum rises",
    "running rescaled inversely": "the running o and l are multiplied by exp(m_new - m_old), not exp(m_old - m_new)",
    "o rescaled inversely": "the running o is multiplied by exp(m_new - m_old), not exp(m_old - m_new) (l is correct)",
    "o rescaled twice": "the running o is rescaled twice when the maximum rises (l is once)",
    "block rescaled twice": "the new block's o and l are rescaled twice to the common maximum",
    "o of block rescaled twice": "the new block's o is rescaled twice to the common maximum (l is once)",
    "l overwritten, o kept": "the new block's l replaces the running l, and its o is dropped",
    "equal weights": "the merge averages all blocks so far with equal weights",
    "half and half": "the merge averages the running o and the new one with equal weights",
    "exp(lse ln 2)": "the merge weights blocks by 2**lse, where lse is natural",
    "exp(lse / ln 2)": "the merge weights blocks by exp(lse), where lse is in base 2",
    "added": "normalised results are added without weights",
    "lse added": "the lse values of the blocks are added",
    "rescaled by l too": "the running o is multiplied by its l once more",
    "normalised as sum": "the block's o, already divided by its l, is merged as if it were not",
    "block o with weight 1": "the new block's o is added with weight 1",
    "running o with weight 1": "the running o is not rescaled by exp(lse_old - lse_new); the new block is",
    "block weighed by the old lse": "the new block has the weight exp(lse_block - lse_old), not exp(lse_block - lse_new)",
    "sigmoid of the new lse": "the new block has the weight sigmoid(lse_block - lse_new), not sigmoid(lse_block - lse_old)",
    "larger lse, in the weights too": "lse becomes the larger of the two, and the weights are relative to it, so they add up to more than 1",
    "larger lse": "lse becomes the larger of the two, not their log-sum-exp",
    "divided at every merge": "o is divided by the running l at every merge, and again at the end",
}
MERGES = ("right", *WRONG)
# These are wrong from the first block on.
AT_FIRST = (
    "normalised as sum", "block not rescaled", "o of block not rescaled", "l of block not rescaled",
    "divided at every merge",
)  # fmt: skip

State = tuple[Array, Array, Array]


def merge(kind: str, m: Array, l: Array, omega: Array, m_b: Array, l_b: Array, t: int) -> State:
    """Return the running m, l and weights [step, a, h, i] after block t, with m_b and l_b, is merged into them."""
    new_m = np.maximum(m, m_b)
    shift = finite_shift(new_m)
    c, e = np.exp(m - shift), np.exp(m_b - shift)
    one = np.ones_like(c)
    inverse = np.where(c > 0, 1 / np.where(c > 0, c, 1.0), 0.0)
    omega = omega.copy()

    def weighed(c_o: Array, e_o: Array, c_l: Array, e_l: Array) -> State:
        omega[:t] *= c_o
        omega[t] = e_o * l_b
        return new_m, c_l * l + e_l * l_b, omega

    if kind == "right":
        return weighed(c, e, c, e)
    simple = {
        "running not rescaled": (one, e, one, e),
        "o not rescaled": (one, e, c, e),
        "l not rescaled": (c, e, one, e),
        "block not rescaled": (c, one, c, one),
        "o of block not rescaled": (c, one, c, e),
        "l of block not rescaled": (c, e, c, one),
        "weights swapped": (e, c, e, c),
        "o weights swapped": (e, c, c, e),
        "last wins": (0 * one, one, 0 * one, one),
        "first wins": (c, 0 * e, c, 0 * e),
        "o last wins": (0 * one, e, c, e),
        "lse last wins": (c, e, 0 * c, e),
        "l not added": (c, e, c, 0 * e),
        "o not added": (c, 0 * e, c, e),
        "running rescaled twice": (c * c, e, c * c, e),
        "running rescaled inversely": (inverse, e, inverse, e),
        "o rescaled inversely": (inverse, e, c, e),
        "o rescaled twice": (c * c, e, c, e),
        "block rescaled twice": (c, e * e, c, e * e),
        "o of block rescaled twice": (c, e * e, c, e),
        "l overwritten, o kept": (c, 0 * e, 0 * c, e),
    }
    if kind in simple:
        return weighed(*simple[kind])
    if kind == "divided at every merge":
        new_l = c * l + e * l_b
        omega[:t] *= c
        omega[t] = e * l_b
        return new_m, new_l, omega / np.where(new_l == 0, 1.0, new_l)
    safe_l, safe_b = np.where(l == 0, 1.0, l), np.where(l_b == 0, 1.0, l_b)
    with np.errstate(divide="ignore"):
        lse, lse_b = m + np.log(safe_l), m_b + np.log(safe_b)
    new = np.logaddexp(lse, lse_b)
    omega[:t] /= safe_l

    def mixed(w: Array, w_b: Array, value: Array = new) -> State:
        omega[:t] *= w
        omega[t] = w_b
        return value, np.ones_like(l), omega

    if kind == "equal weights":
        return mixed(t * one / (t + 1), one / (t + 1))
    if kind == "normalised o weights swapped":
        return mixed(np.exp(lse_b - new), np.exp(lse - new))
    if kind == "half and half":
        return mixed(one / 2, one / 2)
    if kind == "added":
        return mixed(one, one)
    if kind == "running o with weight 1":
        return mixed(one, np.exp(lse_b - new))
    if kind == "block weighed by the old lse":
        return mixed(np.exp(lse - new), np.exp(lse_b - lse))
    if kind == "sigmoid of the new lse":
        weight = 1 / (1 + np.exp(new - lse_b))
        return mixed(1 - weight, weight)
    if kind == "larger lse, in the weights too":
        larger = np.maximum(lse, lse_b)
        return mixed(np.exp(lse - larger), np.exp(lse_b - larger), larger)
    if kind == "larger lse":
        return mixed(np.exp(lse - new), np.exp(lse_b - new), np.maximum(lse, lse_b))
    if kind == "lse added":
        return mixed(np.exp(lse - new), np.exp(lse_b - new), lse + lse_b)
    if kind in ("exp(lse ln 2)", "exp(lse / ln 2)"):
        power = LN2 if kind == "exp(lse ln 2)" else 1 / LN2
        wrong = np.logaddexp(power * lse, power * lse_b)
        return mixed(np.exp(power * lse - wrong), np.exp(power * lse_b - wrong), wrong / power)
    if kind == "rescaled by l too":
        return mixed(np.exp(lse - new) * l, np.exp(lse_b - new))
    if kind == "block o with weight 1":
        return mixed(np.exp(lse - new), one)
    assert kind == "normalised as sum", kind
    omega[:t] *= safe_l * c
    omega[t] = e
    return new_m, c * l + e * l_b, omega
