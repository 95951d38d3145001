"""Variance of a weighted sum of errors, with what the errors share.

A sum T = sum c e over elements is linear in the elementary roundings eps_n, which are independent:
T = sum_n a_n eps_n, Var T = sum_n a_n^2 var eps_n, where a is the weights c taken back through the linear
map from roundings to results (its adjoint): a few matrix products. With C the weights:

- o: A = C v^T is the weight of P's errors, <C_i, o_i> that of l's, <C_i, u_i> that of a rescaling.
- dq: B = scale C k^T is the weight of dz's errors. A row's lse and delta get h_i = sum_j B dz, g_i = sum_j B y:
  they count g^2 var delta + h^2 var lse + 2 g h cov, and private roundings B^2. A score's sigma is in all
  three: var sigma (B x - p (g X + h))^2.
- dk: the same with B = scale q C^T, and with h, g *per group*: the rows of P and dS cross the groups of keys,
  so a row's delta moves each group's sum by its own g.
- dv: B = dy C^T weighs P * keep, whose rows share lse alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise_backward import derivatives
from ringspec.compare.noise_forward import Shared
from ringspec.compare.noise_problem import Array, Head, Integers

Small = NDArray[np.float32]


@dataclass(frozen=True)
class Elementary:
    """The independent roundings of one head, as standard deviations (pairs in float32).

    ``zeta``, ``sigma``, ``eta``, ``private``, ``of_ds``, ``kept`` [G, Sq, Sk]; ``lam``, ``lse`` (of the
    result), ``lse_read``, ``delta``, ``covariance`` [G, Sq]; ``output`` and ``dq``, ``dk``, ``dv``: of elements.
    """

    zeta: Small
    sigma: Small
    same_scores: float
    eta: Small
    lam: Array
    lse: Array
    output: Array
    shared: tuple[Shared, ...]
    private: Small | None = None
    of_ds: Small | None = None
    kept: Small | None = None
    lse_read: Array | None = None
    delta: Array | None = None
    covariance: Array | None = None
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dsinks: Array | None = None


def squared(deviation: NDArray | None) -> Array:
    assert deviation is not None
    return np.square(deviation, dtype=np.float64)


def sum_of_o(head: Head, at: Elementary, weights: Array) -> Array:
    """[G, Sq]: variance of sum_d weights * error of o, row by row (rows are independent)."""
    a = weights @ head.v.T
    along = (weights * head.o).sum(axis=2)
    kept = a if head.keep is None else a * head.keep
    variance = (squared(at.zeta) * a * a).sum(axis=2)
    relative = (squared(at.sigma) + squared(at.eta)) * head.p**2
    variance += (relative * (kept - along[..., None]) ** 2).sum(axis=2)
    variance += along**2 * at.lam**2 + (weights**2 * at.output**2).sum(axis=2)
    for one in at.shared:
        variance += one.variance * (weights * one.u).sum(axis=2) ** 2
    return np.asarray(variance)


def sum_of_dz(head: Head, at: Elementary, b: Array, groups: Array, rounded: bool = True) -> Array:
    """[G, Sq, n]: of sum_j b_ij * error of dz_ij, row by row, for each column of groups [Sk, n] of 0, 1."""
    assert head.dz is not None and head.dp is not None and at.covariance is not None
    assert head.delta is not None and head.dlse is not None
    x, y = derivatives(head)
    sigma = squared(at.sigma)
    g, h = (b * y) @ groups, (b * head.dz) @ groups
    row_delta, row_lse = squared(at.delta)[..., None], squared(at.lse_read)[..., None]
    variance = g * g * row_delta + h * h * row_lse + 2 * g * h * at.covariance[..., None]
    own = squared(at.private) + sigma * x * x
    own = own + squared(at.of_ds) if rounded else own
    variance += (b * b * own) @ groups
    direct = sigma * b * x * head.p * at.same_scores
    total = (head.delta + head.dlse)[..., None]
    variance -= 2 * (g * ((direct * (head.dp - total)) @ groups) + h * (direct @ groups))
    return np.maximum(variance, 0.0)


def sum_of_p(head: Head, at: Elementary, b: Array, groups: Array) -> Array:
    """[G, Sq, n]: the same of sum_j b_ij * error of P_ij keep_ij as operand of dv."""
    kept = head.p if head.keep is None else head.p * head.keep
    sigma = squared(at.sigma)
    h = (b * kept) @ groups
    variance = h * h * squared(at.lse_read)[..., None]
    variance += (b * b * (squared(at.kept) + sigma * kept**2)) @ groups
    variance -= 2 * h * ((sigma * b * kept * head.p * at.same_scores) @ groups)
    return np.maximum(variance, 0.0)


def sum_of_dq(head: Head, at: Elementary, weights: Array) -> Array:
    """[G, Sq]: variance of sum_d weights * error of dq, row by row."""
    b = head.scale * (weights @ head.k.T)
    everything = np.ones((head.k.shape[0], 1))
    own = (weights**2 * squared(at.dq)).sum(axis=2)
    return sum_of_dz(head, at, b, everything)[..., 0] + own


def sum_of_keys(
    head: Head, at: Elementary, name: str, weights: Array, labels: Integers, count: int
) -> Array:
    """[count]: variance of the sums of dk or dv over the keys of each label (negative: none)."""
    present = np.unique(labels[labels >= 0])
    groups = (labels[:, None] == present[None, :]).astype(np.float64)
    if name == "dk":
        rows = sum_of_dz(head, at, head.scale * (head.q @ weights.T), groups)
        local = squared(at.dk)
    else:
        assert head.dy is not None
        rows = sum_of_p(head, at, head.dy @ weights.T, groups)
        local = squared(at.dv)
    variance = np.zeros(count)
    variance[present] = rows.sum(axis=(0, 1)) + (weights**2 * local).sum(axis=1) @ groups
    return variance


def sum_of_sinks(head: Head, at: Elementary, weights: Array) -> Array:
    """[G, Sq]: of sum_n weights_n * error of this row's share of dsinks; weights [G, N]."""
    assert head.sinks is not None and head.delta is not None and at.covariance is not None
    p = np.exp(head.sinks[:, None, :] - head.lse[..., None])
    t = (p * weights[:, None, :]).sum(axis=2)
    moved = head.delta**2 * squared(at.lse_read) + squared(at.delta)
    return t * t * np.maximum(moved - 2 * head.delta * at.covariance, 0.0)


def by_label(values: Array, labels: Integers | None, count: int) -> Array:
    """Sums of values over the rows of each label; negative labels are left out."""
    if labels is None:
        return np.array([values.sum()])
    chosen = labels >= 0
    weighted = np.bincount(labels[chosen].ravel(), values[chosen].ravel(), minlength=count)
    return weighted.astype(np.float64)
