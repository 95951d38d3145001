"""Variance of a weighted sum of errors, including what the errors share.

A sum T = sum c e over elements is linear in the elementary roundings eps_n, which are independent:
T = sum_n a_n eps_n and Var T = sum_n a_n^2 var eps_n. Here a is the weights c propagated back through the linear
map from roundings to results (by its adjoint), which takes a few matrix products. With C the weights:

- o: A = C v^T is the weight of P's errors, <C_i, o_i> that of l's, <C_i, u_i> that of a rescaling.
- dq: B = scale C k^T is the weight of dz's errors. A row's lse and delta have the weights h_i = sum_j B dz and
  g_i = sum_j B y. They contribute g^2 var delta + h^2 var lse + 2 g h cov, and private roundings contribute B^2. A
  score's error sigma is in all three: var sigma (B x - p (g X + h))^2.
- dk: the same with B = scale q C^T, and with h and g *per group*: the rows of P and dS extend over all groups of keys,
  so a row's delta changes each group's sum by the g of that group.
- dv: B = dy C^T is the weight of P * keep, whose rows share only lse.

The last rounding removes a part of the earlier errors: in all of these, C stands for C * gain, and the rest of that
rounding belongs to the element alone (:func:`~ringspec.compare.noise.rounding.known_rounding`).

The tests need about a hundred such sums of one problem. The terms that do not depend on the weights (:class:`OfO`,
:class:`OfDz`, :class:`OfP`) are computed once and kept while sums of that tensor are needed (:class:`Held`).
Without this, computing them took two fifths of the time of all tests at 512 tokens
(``tests/benchmarks/bench_noise.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.noise.backward import derivatives
from ringspec.compare.noise.forward import Shared
from ringspec.compare.noise.problem import Array, Head, Integers

Small = NDArray[np.float32]
MOST_PAIRS = 1 << 24  # number of pairs whose terms are kept, 32 bytes each


@dataclass(frozen=True)
class Elementary:
    """The independent roundings of one head, as standard deviations (those of pairs in float32).

    ``zeta``, ``sigma``, ``eta``, ``private``, ``of_ds``, ``kept`` [G, Sq, Sk]; ``lam``, ``lse`` (of the
    result), ``lse_read``, ``delta``, ``covariance`` [G, Sq]; ``output`` and ``dq``, ``dk``, ``dv``: of elements.
    ``gain`` by tensor: the fraction of all earlier errors that survives the last rounding.
    """

    zeta: Small
    sigma: Small
    same_scores: float
    eta: Small
    lam: Array
    lse: Array
    output: Array
    shared: tuple[Shared, ...]
    gain: Mapping[str, Array]
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


def deviation(variance: Array) -> Small:
    """Return standard deviations in float32; only one or two of their digits are known.

    They are cut to float32's range: the relative error of an exp far below the least number of its format is larger.
    """
    return np.minimum(np.sqrt(variance), np.finfo(np.float32).max).astype(np.float32)


def root(variance: Array) -> Array:
    """Return the square root of a difference of variances, which is taken as at least 0."""
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def squared(deviation: NDArray | None) -> Array:
    assert deviation is not None
    return np.square(deviation, dtype=np.float64)


@dataclass(frozen=True)
class OfO:
    """The terms of sums of o: variances of P as operand and of e, times p^2 [G, Sq, Sk], and variances of rows."""

    head: Head
    at: Elementary
    operand: Array
    relative: Array

    @classmethod
    def made(cls, head: Head, at: Elementary) -> OfO:
        relative = (squared(at.sigma) + squared(at.eta)) * head.p**2
        return cls(head, at, squared(at.zeta), relative)


@dataclass(frozen=True)
class OfDz:
    """The terms of sums of dq and dk, [G, Sq, Sk]: dz and y, the factors of lse's and delta's errors.

    ``own``: variance that a pair does not share with its row. ``direct``: covariance of a score's error
    with that of lse; ``turned``: with that of delta.
    """

    head: Head
    at: Elementary
    dz: Array
    y: Array
    own: Array
    direct: Array
    turned: Array
    of_lse: Array
    of_delta: Array
    covariance: Array

    @classmethod
    def made(cls, head: Head, at: Elementary, rounded: bool = True) -> OfDz:
        """Build the terms; ``rounded``: with the rounding of dz as operand, which does not affect dbias."""
        assert head.dz is not None and head.dp is not None and at.covariance is not None
        assert head.delta is not None and head.dlse is not None
        x, y = derivatives(head)
        sigma = squared(at.sigma)
        own = squared(at.private) + sigma * x * x
        own = own + squared(at.of_ds) if rounded else own
        direct = sigma * x * head.p * at.same_scores
        turned = direct * (head.dp - (head.delta + head.dlse)[..., None])
        of_lse, of_delta = squared(at.lse_read), squared(at.delta)
        return cls(head, at, head.dz, y, own, direct, turned, of_lse, of_delta, at.covariance)


@dataclass(frozen=True)
class OfP:
    """The terms of sums of dv, [G, Sq, Sk]: P * keep, its own variance, its covariance with lse's error."""

    head: Head
    at: Elementary
    kept: Array
    own: Array
    direct: Array
    of_lse: Array

    @classmethod
    def made(cls, head: Head, at: Elementary) -> OfP:
        kept = head.p if head.keep is None else head.p * head.keep
        sigma = squared(at.sigma)
        own = squared(at.kept) + sigma * kept**2
        direct = sigma * kept * head.p * at.same_scores
        return cls(head, at, kept, own, direct, squared(at.lse_read))


Terms = OfO | OfDz | OfP
KINDS: dict[str, Callable[[Head, Elementary], Terms]] = {
    "o": OfO.made,
    "dq": OfDz.made,
    "dk": OfDz.made,
    "dv": OfP.made,
}


@dataclass
class Held:
    """The terms of the tensor requested last, for as many heads as :data:`MOST_PAIRS` allows."""

    made: Callable[[Head, Elementary], Terms] | None = None
    terms: dict[tuple[int, int], Terms] = field(default_factory=dict)

    def of(
        self, name: str, index: tuple[int, int], head: Callable[[], Head], at: Elementary
    ) -> Terms:
        """Return the terms of one head, kept or newly computed."""
        made = KINDS[name]
        if made is not self.made:
            self.made, self.terms = made, {}
        if index in self.terms:
            return self.terms[index]
        terms = made(head(), at)
        if (len(self.terms) + 1) * at.zeta.size <= MOST_PAIRS:
            self.terms[index] = terms
        return terms


@dataclass(frozen=True)
class Groups:
    """Keys by label: the labels ``present``, and ``member`` [Sk, n] of 0 and 1; None: all keys in one group."""

    present: Integers
    member: Array | None
    single: Integers | None = None

    @classmethod
    def of(cls, labels: Integers) -> Groups:
        """Group the keys with the same label; ``single``: if no two keys share a label, the key of each label."""
        present = np.unique(labels[labels >= 0])
        if present.size == 1 and (labels >= 0).all():
            return cls(present, None)
        member = labels[:, None] == present[None, :]
        single = None
        if member.sum() == present.size:
            single = member.argmax(axis=0)
        return cls(present, member.astype(np.float64), single)

    def sums(self, a: Array, b: Array) -> Array:
        """Return [.., n]: sums of a * b over the keys of each group; the last axis is that of the keys."""
        if self.member is None:
            return np.asarray(np.einsum("gij,gij->gi", a, b))[..., None]
        if self.single is not None:
            return a[..., self.single] * b[..., self.single]
        return np.asarray((a * b) @ self.member)

    def of_rows(self, values: Array) -> Array:
        """Return [n]: sums of one value for each key."""
        return np.array([values.sum()]) if self.member is None else values @ self.member


ALL = Groups(np.zeros(1, dtype=np.int64), None)


def sum_of_o(of: OfO, weights: Array) -> Array:
    """Return [G, Sq]: the variance of sum_d weights * error of o, row by row (rows are independent)."""
    head, at = of.head, of.at
    own = (weights**2 * squared(at.output)).sum(axis=2)
    weights = weights * at.gain["o"]
    a = weights @ head.v.T
    along = (weights * head.o).sum(axis=2)
    variance = ALL.sums(of.operand, a * a)[..., 0]
    moved = (a if head.keep is None else a * head.keep) - along[..., None]
    variance += ALL.sums(of.relative, moved * moved)[..., 0]
    variance += along**2 * at.lam**2 + own
    for one in at.shared:
        variance += one.variance * (weights * one.u).sum(axis=2) ** 2
    return np.asarray(variance)


def sum_of_dz(of: OfDz, b: Array, groups: Groups = ALL) -> Array:
    """Return [G, Sq, n]: the variance of sum_j b_ij * error of dz_ij, row by row, over the keys of each group."""
    g, h = groups.sums(b, of.y), groups.sums(b, of.dz)
    variance = g * g * of.of_delta[..., None] + h * h * of.of_lse[..., None]
    variance += 2 * g * h * of.covariance[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * (g * groups.sums(b, of.turned) + h * groups.sums(b, of.direct))
    return np.maximum(variance, 0.0)


def sum_of_p(of: OfP, b: Array, groups: Groups) -> Array:
    """Return [G, Sq, n]: the variance of sum_j b_ij * error of P_ij keep_ij as operand of dv."""
    h = groups.sums(b, of.kept)
    variance = h * h * of.of_lse[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * h * groups.sums(b, of.direct)
    return np.maximum(variance, 0.0)


def sum_of_dq(of: OfDz, weights: Array) -> Array:
    """Return [G, Sq]: the variance of sum_d weights * error of dq, row by row."""
    b = of.head.scale * ((weights * of.at.gain["dq"]) @ of.head.k.T)
    return sum_of_dz(of, b)[..., 0] + (weights**2 * squared(of.at.dq)).sum(axis=2)


def sum_of_keys(of: OfDz | OfP, weights: Array, labels: Integers, count: int) -> Array:
    """Return [count]: the variance of the sums of dk or dv over the keys of each label (negative: none)."""
    groups, head = Groups.of(labels), of.head
    if isinstance(of, OfDz):
        let_through = weights * of.at.gain["dk"]
        rows = sum_of_dz(of, head.scale * (head.q @ let_through.T), groups)
        local = squared(of.at.dk)
    else:
        assert head.dy is not None
        rows = sum_of_p(of, head.dy @ (weights * of.at.gain["dv"]).T, groups)
        local = squared(of.at.dv)
    variance = np.zeros(count)
    own = groups.of_rows((weights**2 * local).sum(axis=1))
    variance[groups.present] = rows.sum(axis=(0, 1)) + own
    return variance


def sum_of_rows(name: str, of: Terms, weights: Array, labels: Integers | None, count: int) -> Array:
    """Return one key head's contribution to the variance of sums of o, dq, dk or dv, by label."""
    if isinstance(of, OfO):
        return by_label(sum_of_o(of, weights), labels, count)
    if name == "dq":
        assert isinstance(of, OfDz)
        return by_label(sum_of_dq(of, weights), labels, count)
    of_keys = np.zeros(of.head.k.shape[0], np.int64) if labels is None else labels
    return sum_of_keys(of, weights, of_keys, count)


def sum_of_sinks(head: Head, at: Elementary, weights: Array) -> Array:
    """Return [G, Sq]: the variance of sum_n weights_n * error of the row's contribution to dsinks; weights [G, N]."""
    assert head.sinks is not None and head.delta is not None and at.covariance is not None
    p = np.exp(head.sinks[:, None, :] - head.lse[..., None])
    t = (p * weights[:, None, :]).sum(axis=2)
    moved = head.delta**2 * squared(at.lse_read) + squared(at.delta)
    return t * t * np.maximum(moved - 2 * head.delta * at.covariance, 0.0)


def by_label(values: Array, labels: Integers | None, count: int) -> Array:
    """Sum values over the rows of each label; negative labels are ignored."""
    if labels is None:
        return np.array([values.sum()])
    chosen = labels >= 0
    weighted = np.bincount(labels[chosen].ravel(), values[chosen].ravel(), minlength=count)
    return weighted.astype(np.float64)
