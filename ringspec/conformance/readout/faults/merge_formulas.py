"""Wrong formulas for merging two normalised results by their lse: of the merged lse, and of the weights of the two o."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ringspec.problem.model import Array


def softplus(x: Array) -> Array:
    """Return log(1 + exp(x))."""
    return np.logaddexp(0.0, x)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


LN2 = math.log(2.0)
TOO = ", in the weights too"
# Wrong formulas of the merged lse: by name, the words that follow "lse becomes", and the value from the running lse x and the
# block's lse y. A kernel may also take the weights relative to this lse (:data:`TOO`).
LSES_MERGED: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "larger lse": ("the larger of the two, not their log-sum-exp", np.maximum),
    "smaller lse": ("the smaller of the two, not their log-sum-exp", np.minimum),
    "lse not updated": ("what it was before the merge", lambda x, y: x),
    "lse of block": ("that of the new block", lambda x, y: y),
    "lse added": ("the sum of the two", lambda x, y: x + y),
    "mean lse": ("the mean of the two", lambda x, y: (x + y) / 2),
    "log of mean": ("the logarithm of the mean, not of the sum", lambda x, y: np.logaddexp(x, y) - LN2),
    "softplus swapped": ("lse_old + log(1 + exp(lse_old - lse_block)), with the two exchanged", lambda x, y: x + softplus(x - y)),
    "softplus of block swapped": ("lse_block + log(1 + exp(lse_block - lse_old)), with the two exchanged", lambda x, y: y + softplus(y - x)),
    "softplus of old difference": ("the larger of the two + log(1 + exp(lse_old - lse_block)), not log(1 + exp(-abs(lse_old - lse_block)))", lambda x, y: np.maximum(x, y) + softplus(x - y)),
    "softplus of new difference": ("the larger of the two + log(1 + exp(lse_block - lse_old)), not log(1 + exp(-abs(lse_block - lse_old)))", lambda x, y: np.maximum(x, y) + softplus(y - x)),
    "softplus of distance": ("the larger of the two + log(1 + exp(abs(lse_block - lse_old))), without the minus sign", lambda x, y: np.maximum(x, y) + softplus(abs(x - y))),
    "softplus from old": ("lse_old + log(1 + exp(-abs(lse_block - lse_old))), not relative to the larger one", lambda x, y: x + softplus(-abs(x - y))),
    "softplus from block": ("lse_block + log(1 + exp(-abs(lse_block - lse_old))), not relative to the larger one", lambda x, y: y + softplus(-abs(x - y))),
    "softplus from smaller": ("the smaller of the two + log(1 + exp(-abs(lse_block - lse_old))), not relative to the larger one", lambda x, y: np.minimum(x, y) + softplus(-abs(x - y))),
    "softplus subtracted": ("lse_old - log(1 + exp(lse_block - lse_old)), with a minus sign", lambda x, y: x - softplus(y - x)),
    "without softplus": ("the larger of the two + exp(-abs(lse_block - lse_old)), without the logarithm", lambda x, y: np.maximum(x, y) + np.exp(-abs(x - y))),
    "without larger lse": ("log(exp(lse_old - larger) + exp(lse_block - larger)), without the larger of the two", lambda x, y: np.logaddexp(x, y) - np.maximum(x, y)),
    "ln 2 of sum": ("the larger of the two + ln 2 log(1 + exp(-abs(lse_block - lse_old))): a natural logarithm where lse is in base 2", lambda x, y: np.maximum(x, y) + softplus(-abs(x - y)) * LN2),
    "log2 of sum": ("the larger of the two + log2(1 + exp(-abs(lse_block - lse_old)))", lambda x, y: np.maximum(x, y) + softplus(-abs(x - y)) / LN2),
}  # fmt: skip
# Wrong weights of the running o and of the block's o in a merge of normalised results, from the running lse x, the block's
# lse y and the merged lse z; with the words that complete "In the forward pass, ...".
WEIGHTS: dict[str, tuple[str, Callable[[Array, Array, Array], tuple[Array, Array]]]] = {
    "normalised o weights swapped": ("the two weights are swapped in a merge of normalised o (lse is correct)", lambda x, y, z: (np.exp(y - z), np.exp(x - z))),
    "o kept": ("the new block's lse is merged, but not its o: the running o stays as it was", lambda x, y, z: (np.ones_like(x), np.zeros_like(x))),
    "half and half": ("the merge averages the running o and the new one with equal weights", lambda x, y, z: (np.full_like(x, 0.5), np.full_like(x, 0.5))),
    "added": ("normalised results are added without weights", lambda x, y, z: (np.ones_like(x), np.ones_like(x))),
    "running o with weight 1": ("the running o is not rescaled by exp(lse_old - lse_new); the new block is", lambda x, y, z: (np.ones_like(x), np.exp(y - z))),
    "block o with weight 1": ("the new block's o is added with weight 1", lambda x, y, z: (np.exp(x - z), np.ones_like(x))),
    "block weighed by the old lse": ("the new block has the weight exp(lse_block - lse_old), not exp(lse_block - lse_new)", lambda x, y, z: (np.exp(x - z), np.exp(y - x))),
    "running weighed by the block's lse": ("the running o has the weight exp(lse_old - lse_block), not exp(lse_old - lse_new)", lambda x, y, z: (np.exp(x - y), np.exp(y - z))),
    "sigmoid of the new lse": ("the new block has the weight sigmoid(lse_block - lse_new), not sigmoid(lse_block - lse_old)", lambda x, y, z: (sigmoid(z - y), sigmoid(y - z))),
    "sigmoid of the difference of new": ("the running o has the weight sigmoid(lse_old - lse_new), not sigmoid(lse_old - lse_block)", lambda x, y, z: (sigmoid(x - z), sigmoid(z - x))),
    "difference added": ("the difference of the two o is added with the wrong sign: o_old + w (o_old - o_block), with the block's weight w", lambda x, y, z: (1 + np.exp(y - z), -np.exp(y - z))),
    "both with the block's weight": ("both o have the weight of the new block (lse is correct)", lambda x, y, z: (np.exp(y - z), np.exp(y - z))),
    "both with the running weight": ("both o have the weight of the running one (lse is correct)", lambda x, y, z: (np.exp(x - z), np.exp(x - z))),
    "relative to the larger lse": ("both o are weighed relative to the larger lse, and not divided by the sum of the weights (lse is correct)", lambda x, y, z: (np.exp(x - np.maximum(x, y)), np.exp(y - np.maximum(x, y)))),
    "relative to 0": ("both o are weighed by exp(lse), and not divided by the sum of the weights (lse is correct)", lambda x, y, z: (np.exp(x), np.exp(y))),
    "weighed by lse": ("both o are weighed by lse, not by exp(lse)", lambda x, y, z: (x / (x + y), y / (x + y))),
    "powers of 2": ("the merge weights blocks by 2**lse, where lse is natural (the merged lse is correct)", lambda x, y, z: (sigmoid(LN2 * (x - y)), sigmoid(LN2 * (y - x)))),
    "powers of e": ("the merge weights blocks by exp(lse), where lse is in base 2 (the merged lse is correct)", lambda x, y, z: (sigmoid((x - y) / LN2), sigmoid((y - x) / LN2))),
    "base 2 of the difference": ("both o are weighed by 2**(lse - lse_new), where lse is natural, and lse is correct", lambda x, y, z: (np.exp2(x - z), np.exp2(y - z))),
}  # fmt: skip
