"""The row scale: the unit in which the errors of one row are measured.

To compute the row scale, take the sum that defines the row's result, and replace every term by its absolute value.
Multiply this sum by a factor ``kappa``, which says how sensitive the row's exponentials are to rounding. A float64
computation then has errors of a few 1e-16 row scales, in flat rows as well as in very peaked rows. Each row has its
own scale, because one scale for the whole tensor would hide errors in rows with small values.

The sums, for query i, key j, sink n, element d and probability p_ij, are as follows. For o, dq, dk and dv, the row
scale is the largest of the sums over all d::

    kappa_i = 1 + max( max_j(scale * sum_d |q||k| + |bias|), max_n |sink_hn| )
    a_ij    = p_ij * (sum_d |dy||v| + sum_d |dy| sum_j p|v| + |dlse_i|)

    o: kappa_i sum_j p|v|       lse: kappa_i + |lse_i|         dv: sum_i kappa_i p|dy|
    dq: scale kappa_i sum_j a|k|                               dk: scale sum_i kappa_i a|q|

``scale`` is the absolute value of the softmax scale. In kappa_i, j runs over the visible keys and n over the sinks of
the head; a maximum over nothing is 0. Sinks count because a sink far above the scores removes digits of p, as a large
score does. With dropout, p|v|, p|dy| and ``sum_d |dy||v|`` are multiplied by keep_ij / (1 - dropout_p). The factor p_ij
in front of the brackets of a_ij is not.

Source: docs/spec/numbers.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["AbsoluteSums", "RowScale", "absolute_sums", "row_errors", "row_scale"]

Array = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class AbsoluteSums:
    """The sums from which row scales are computed, for each element: before the maximum over d.

    ``o`` [B, H, Sq, Dv], ``lse`` [B, H, Sq], ``dq`` [B, H, Sq, D], ``dk`` [B, Hkv, Sk, D],
    ``dv`` [B, Hkv, Sk, Dv], ``dsinks`` [H, N] or None without sinks, ``dbias`` in the bias's shape or
    None. All are float64.
    """

    o: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None = None
    dbias: Array | None = None


@dataclass(frozen=True)
class RowScale:
    """One number >= 0 for each row: ``o``, ``lse``, ``dq`` [B, H, Sq]; ``dk``, ``dv`` [B, Hkv, Sk].

    All are float64. A scale of 0 means that the row is an empty sum, so its result must be exactly 0. ``dsinks`` [H, N]
    and ``dbias`` have a scale for each element.
    """

    o: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsinks: Array | None = None
    dbias: Array | None = None


def absolute_sums(
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    dlse: Array,
    p: Array,
    lse: Array,
    visible: Booleans,
    scale: float,
    bias: Array | None = None,
    keep: Array | float = 1.0,
    sinks: Array | None = None,
) -> AbsoluteSums:
    """Compute the sums of absolute values for q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], dy [B, H, Sq, Dv].

    ``dlse`` and ``lse`` are [B, H, Sq]; lse is -inf in empty rows. ``p`` [B, H, Sq, Sk]: the probabilities before
    dropout. ``scale``: the factor of <q, k>. ``visible`` is the mask, ``bias`` is added to the scores, and ``keep`` is
    the dropout factor, 0 or 1 / (1 - dropout_p); all three are broadcastable to p's shape. ``sinks`` is [H, N]. All
    but ``visible`` are float64.

    The largest logit in ``kappa`` is taken over the visible keys and the sinks.
    """
    group = q.shape[1] // k.shape[1]
    size = abs(scale)
    q, dy, dlse = np.abs(q), np.abs(dy), np.abs(dlse)
    k, v = (np.repeat(np.abs(x), group, axis=1) for x in (k, v))
    logits = size * (q @ k.swapaxes(2, 3))
    if bias is not None:
        logits = logits + np.where(np.isneginf(bias), 0.0, np.abs(bias))
    # initial=0 gives the largest logit of a row without keys.
    largest = np.where(visible, logits, 0.0).max(axis=3, initial=0.0)
    if sinks is not None:
        largest = np.maximum(largest, np.abs(sinks).max(axis=1)[None, :, None])
    kappa = 1.0 + largest
    kept = p * keep
    values = kept @ v
    dp = (dy @ v.swapaxes(2, 3)) * keep
    dy_o_sum = (dy * values).sum(axis=3)
    a = p * (dp + dy_o_sum[..., None] + dlse[..., None])
    weighted = kappa[..., None] * a
    dsinks = None
    if sinks is not None:
        p_sink = np.exp(sinks[None, :, None, :] - lse[..., None])
        dsinks = (p_sink * (kappa * (dy_o_sum + dlse))[..., None]).sum(axis=(0, 2))
    return AbsoluteSums(
        o=kappa[..., None] * values,
        lse=kappa + np.where(np.isneginf(lse), 0.0, np.abs(lse)),
        dq=size * (weighted @ k),
        dk=over_group(size * (weighted.swapaxes(2, 3) @ q), group),
        dv=over_group((kappa[..., None] * kept).swapaxes(2, 3) @ dy, group),
        dsinks=dsinks,
        dbias=None if bias is None else over_broadcast(weighted, bias.shape),
    )


def over_broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Sum [B, H, Sq, Sk] over the axes along which a tensor of ``shape`` is broadcast."""
    axes = tuple(n for n in range(x.ndim) if shape[n] == 1 and x.shape[n] != 1)
    return x.sum(axis=axes, keepdims=True)


def over_group(x: Array, group: int) -> Array:
    """Sum [B, H, S, D] over the query heads of each key head: [B, Hkv, S, D]."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, heads // group, group, length, width).sum(axis=2)


def row_scale(sums: AbsoluteSums) -> RowScale:
    """Return the row scales: the maximum over d of each sum.

    >>> one = np.ones((1, 1, 1, 1))
    >>> sums = absolute_sums(one, one, 3 * one, one, one[0], one, one[0], one > 0, scale=1.0)
    >>> scale = row_scale(sums)
    >>> scale.o.item(), scale.lse.item(), scale.dq.item(), scale.dv.item()
    (6.0, 3.0, 14.0, 2.0)
    """
    largest = {
        name: getattr(sums, name).max(axis=3, initial=0.0) for name in ("o", "dq", "dk", "dv")
    }
    return RowScale(lse=sums.lse, dsinks=sums.dsinks, dbias=sums.dbias, **largest)


def row_errors(got: Array, want: Array) -> Array:
    """Return the largest absolute error of each row, over d; equal infinities have error 0, and NaN stays NaN.

    ``got`` and ``want`` are [B, H, S, d], or [B, H, S] (lse). The result is [B, H, S]. All are float64.

    >>> row_errors(np.array([[[-np.inf, 1.0]]]), np.array([[[-np.inf, 1.5]]])).tolist()
    [[[0.0, 0.5]]]
    """
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0.0, np.abs(got - want))
    return error if error.ndim == 3 else error.max(axis=3, initial=0.0)


def relative_errors(errors: Array, scale: Array) -> Array:
    """Divide errors by the row scale. Where the scale is 0, an error of 0 gives 0, and any other error infinity.

    >>> relative_errors(np.array([0.0, 1.0, 1.0]), np.array([0.0, 0.0, 4.0])).tolist()
    [0.0, inf, 0.25]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(errors == 0, 0.0, errors / scale)
