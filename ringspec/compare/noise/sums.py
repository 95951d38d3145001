"""Variance of a weighted sum of errors, including what the errors share.

A sum T = sum c e over elements is linear in the elementary roundings eps_n, which are independent:
T = sum_n a_n eps_n, Var T = sum_n a_n^2 var eps_n, where a is the weights c taken back through the linear
map from roundings to results (its adjoint): a few matrix products. With C the weights:

- o: A = C v^T is the weight of P's errors, <C_i, o_i> that of l's, <C_i, u_i> that of a rescaling.
- dq: B = scale C k^T is the weight of dz's errors. A row's lse and delta get h_i = sum_j B dz, g_i = sum_j B y:
  they count g^2 var delta + h^2 var lse + 2 g h cov, and private roundings B^2. A score's sigma is in all
  three: var sigma (B x - p (g X + h))^2.
- dk: the same with B = scale q C^T, and with h, g *per group*: the rows of P and dS cross the groups of keys,
  so a row's delta moves each group's sum by its own g.
- dv: B = dy C^T weights P * keep, whose rows share lse alone.

The last rounding removes part of the earlier errors: C is C * gain in all of these, and the rest of that rounding
belongs to the element alone (:func:`~ringspec.compare.noise.rounding.known_rounding`).

The tests need about a hundred such sums of one problem. The terms that do not depend on the weights (:class:`OfO`,
:class:`OfDz`, :class:`OfP`) are computed once and kept while sums of that tensor are needed (:class:`Held`).
Computing them for every sum took two fifths of the time of all tests at 512 tokens
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
MOST_PAIRS = 1 << 24  # of which terms are held, 32 bytes each


@dataclass(frozen=True)
class Elementary:
    """The independent roundings of one head, as standard deviations (pairs in float32).

    ``zeta``, ``sigma``, ``eta``, ``private``, ``of_ds``, ``kept`` [G, Sq, Sk]; ``lam``, ``lse`` (of the
    result), ``lse_read``, ``delta``, ``covariance`` [G, Sq]; ``output`` and ``dq``, ``dk``, ``dv``: of elements, and
    ``gain`` by tensor: the share of all earlier errors that survives the last rounding.
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
    """Standard deviations in float32; only one or two of their digits are known.

    The relative error of an exp far below the smallest number of its format is larger than float32 holds.
    """
    return np.minimum(np.sqrt(variance), np.finfo(np.float32).max).astype(np.float32)


def root(variance: Array) -> Array:
    """The square root of a difference of variances, at least 0."""
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def squared(deviation: NDArray | None) -> Array:
    assert deviation is not None
    return np.square(deviation, dtype=np.float64)


@dataclass(frozen=True)
class OfO:
    """The terms that enter sums of o: variances of P as operand and of e, times p^2 [G, Sq, Sk], and of rows."""

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
    """The terms that enter sums of dq and dk, [G, Sq, Sk]: dz and y, by which lse and delta move it.

    ``own``: variance that a pair does not share with its row. ``direct``: covariance of a score's error
    with that of lse, ``turned``: with that of delta.
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
        """``rounded``: with the rounding of dz as operand, which dbias does not see."""
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
    """The terms that enter sums of dv, [G, Sq, Sk]: P * keep, its own variance, covariance with lse's error."""

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
    """The terms of the tensor that was asked for last, of as many heads as :data:`MOST_PAIRS` allow."""

    made: Callable[[Head, Elementary], Terms] | None = None
    terms: dict[tuple[int, int], Terms] = field(default_factory=dict)

    def of(
        self, name: str, index: tuple[int, int], head: Callable[[], Head], at: Elementary
    ) -> Terms:
        """The terms of one head, held or made."""
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
    """Keys by label: ``present`` labels, and ``member`` [Sk, n] of 0 and 1; None: all keys in one."""

    present: Integers
    member: Array | None
    single: Integers | None = None

    @classmethod
    def of(cls, labels: Integers) -> Groups:
        """The groups of keys with the same label; ``single``: if no two keys share a label, the key of each label."""
        present = np.unique(labels[labels >= 0])
        if present.size == 1 and (labels >= 0).all():
            return cls(present, None)
        member = labels[:, None] == present[None, :]
        single = None
        if member.sum() == present.size:
            single = member.argmax(axis=0)
        return cls(present, member.astype(np.float64), single)

    def sums(self, a: Array, b: Array) -> Array:
        """[.., n]: sums of a * b over the keys of each group, which are along the last axis."""
        if self.member is None:
            return np.asarray(np.einsum("gij,gij->gi", a, b))[..., None]
        if self.single is not None:
            return a[..., self.single] * b[..., self.single]
        return np.asarray((a * b) @ self.member)

    def of_rows(self, values: Array) -> Array:
        """[n]: sums of one value for each key."""
        return np.array([values.sum()]) if self.member is None else values @ self.member


ALL = Groups(np.zeros(1, dtype=np.int64), None)


def sum_of_o(of: OfO, weights: Array) -> Array:
    """[G, Sq]: variance of sum_d weights * error of o, row by row (rows are independent)."""
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
    """[G, Sq, n]: of sum_j b_ij * error of dz_ij, row by row, over the keys of each group."""
    g, h = groups.sums(b, of.y), groups.sums(b, of.dz)
    variance = g * g * of.of_delta[..., None] + h * h * of.of_lse[..., None]
    variance += 2 * g * h * of.covariance[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * (g * groups.sums(b, of.turned) + h * groups.sums(b, of.direct))
    return np.maximum(variance, 0.0)


def sum_of_p(of: OfP, b: Array, groups: Groups) -> Array:
    """[G, Sq, n]: the same of sum_j b_ij * error of P_ij keep_ij as operand of dv."""
    h = groups.sums(b, of.kept)
    variance = h * h * of.of_lse[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * h * groups.sums(b, of.direct)
    return np.maximum(variance, 0.0)


def sum_of_dq(of: OfDz, weights: Array) -> Array:
    """[G, Sq]: variance of sum_d weights * error of dq, row by row."""
    b = of.head.scale * ((weights * of.at.gain["dq"]) @ of.head.k.T)
    return sum_of_dz(of, b)[..., 0] + (weights**2 * squared(of.at.dq)).sum(axis=2)


def sum_of_keys(of: OfDz | OfP, weights: Array, labels: Integers, count: int) -> Array:
    """[count]: variance of the sums of dk or dv over the keys of each label (negative: none)."""
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
    """One key head's share of the variance of sums of o, dq, dk or dv, by label."""
    if isinstance(of, OfO):
        return by_label(sum_of_o(of, weights), labels, count)
    if name == "dq":
        assert isinstance(of, OfDz)
        return by_label(sum_of_dq(of, weights), labels, count)
    of_keys = np.zeros(of.head.k.shape[0], np.int64) if labels is None else labels
    return sum_of_keys(of, weights, of_keys, count)


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
