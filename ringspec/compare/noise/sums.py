"""Variance of a weighted sum of errors, including the errors that several elements share.

Let C be the weights of a tensor's elements. The weighted sum T of the errors is linear in the roundings eps_n, which
are independent: T = sum_n a_n eps_n and Var T = sum_n a_n^2 var eps_n. The coefficients a follow from C by
the adjoint of the linear map from roundings to results, which takes a few matrix products:

- o: P's errors have the coefficients A = C v^T, the error of l has <C_i, o_i>, and that of a rescaling factor has
  <C_i, u_i> (u of :class:`~ringspec.compare.noise.forward.Shared`).
- dq: dz's errors have the coefficients B = scale C k^T. The errors of a row's lse and delta have h_i = sum_j B dz and
  g_i = sum_j B y. They contribute g^2 var delta + h^2 var lse + 2 g h cov to the variance. A rounding that concerns a
  single pair contributes B^2 times its variance. A score's error sigma affects dz, lse and delta; it
  contributes var sigma (B x - p (g X + h))^2. (x, y and X: :mod:`~ringspec.compare.noise.backward`)
- dk: the same with B = scale q C^T. If several sums are computed over groups of keys, each group has its own h and
  g, because the error of a row's lse or delta changes the sum of every group.
- dv: the errors of P * keep have the coefficients B = dy C^T. Its rows share only the error of lse.

The last rounding of a result removes a part of the earlier errors. C therefore means C * gain in this list, where
gain is the part that remains; the other error of the last rounding affects one element only
(:func:`~ringspec.compare.noise.rounding.known_rounding`).

The statistical tests need about a hundred sums for one problem. Terms that do not depend on the weights (:class:`OfO`,
:class:`OfDz`, :class:`OfP`) are computed once for each tensor and kept (:class:`Held`). Computing them anew for every
sum took two fifths of the time of all tests at 512 tokens (``tests/benchmarks/bench_noise.py``).
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
    """Standard deviations of the independent errors of one head.

    Errors of pairs are float32 [G, Sq, Sk]: ``zeta``, ``sigma``, ``eta`` (:mod:`~ringspec.compare.noise.forward`),
    ``private``, ``of_ds``, ``kept`` (:class:`~ringspec.compare.noise.backward.PairNoise`). Errors of rows are
    [G, Sq]: ``lam``, ``lse`` as returned, ``lse_read`` and ``delta`` as the backward pass reads them, and
    ``covariance``, that of the last two. ``output``, ``dq``, ``dk`` and ``dv`` are errors of single elements of o and
    of the gradients. ``gain``, by tensor: the fraction of all earlier errors that remains after the last rounding.
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
    """Return standard deviations in float32, which is enough because only one or two of their digits are known.

    Values beyond float32's range become its largest number. They occur: the relative error of an exp that underflows
    can be that large.
    """
    return np.minimum(np.sqrt(variance), np.finfo(np.float32).max).astype(np.float32)


def root(variance: Array) -> Array:
    """Return the square root of a difference of variances; a negative difference counts as 0."""
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def squared(deviation: NDArray | None) -> Array:
    assert deviation is not None
    return np.square(deviation, dtype=np.float64)


@dataclass(frozen=True)
class OfO:
    """The terms of sums over o that do not depend on the weights.

    ``operand`` [G, Sq, Sk]: variance of rounding P as operand. ``relative`` [G, Sq, Sk]: p^2 times the variance of the
    relative error of e = exp(s - m).
    """

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
    """The terms of sums over dq and dk that do not depend on the weights.

    ``dz`` and ``y`` [G, Sq, Sk]: the factors by which an error of lse and of delta changes dz. ``own`` [G, Sq, Sk]: the
    variance of dz that a pair does not share with its row. ``direct`` and ``turned`` [G, Sq, Sk]: covariance of the
    error that a score causes in dz with the error of lse and with that of delta. ``of_lse``, ``of_delta`` and
    ``covariance`` [G, Sq]: variances and covariance of lse and delta.
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
        """Build the terms. ``rounded`` False leaves out the rounding of dz as operand, which does not affect dbias."""
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
    """The terms of sums over dv that do not depend on the weights.

    ``kept`` = P * keep, ``own``: its variance without lse's error, ``direct``: its covariance with lse's error, all
    [G, Sq, Sk]. ``of_lse`` [G, Sq]: the variance of lse.
    """

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
    """A cache of the terms of the last tensor, for as many heads as :data:`MOST_PAIRS` allows."""

    made: Callable[[Head, Elementary], Terms] | None = None
    terms: dict[tuple[int, int], Terms] = field(default_factory=dict)

    def of(
        self, name: str, index: tuple[int, int], head: Callable[[], Head], at: Elementary
    ) -> Terms:
        """Return the terms of the head ``index`` (b, h) for sums over the tensor ``name``; compute them if necessary."""
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
    """Keys grouped by label.

    ``present`` [n]: the labels. ``member`` [Sk, n]: 1 if the key is in the group, otherwise 0; None if all keys are in
    one group. ``single`` [n]: the key of each group, if every group has exactly one; otherwise None.
    """

    present: Integers
    member: Array | None
    single: Integers | None = None

    @classmethod
    def of(cls, labels: Integers) -> Groups:
        """Group the keys that have the same label [Sk]; keys with a negative label are in no group."""
        present = np.unique(labels[labels >= 0])
        if present.size == 1 and (labels >= 0).all():
            return cls(present, None)
        member = labels[:, None] == present[None, :]
        single = None
        if member.sum() == present.size:
            single = member.argmax(axis=0)
        return cls(present, member.astype(np.float64), single)

    def sums(self, a: Array, b: Array) -> Array:
        """Sum a * b [.., Sk] over the keys of each group; return [.., n]."""
        if self.member is None:
            return np.asarray(np.einsum("gij,gij->gi", a, b))[..., None]
        if self.single is not None:
            return a[..., self.single] * b[..., self.single]
        return np.asarray((a * b) @ self.member)

    def of_rows(self, values: Array) -> Array:
        """Sum ``values`` [Sk] over the keys of each group; return [n]."""
        return np.array([values.sum()]) if self.member is None else values @ self.member


ALL = Groups(np.zeros(1, dtype=np.int64), None)


def sum_of_o(of: OfO, weights: Array) -> Array:
    """Return the variance [G, Sq] of each row's sum over d of weights * error of o (rows are independent)."""
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
    """Return the variance [G, Sq, n] of sum_j b_ij * (error of dz_ij), for each row i and each of n groups of keys j."""
    g, h = groups.sums(b, of.y), groups.sums(b, of.dz)
    variance = g * g * of.of_delta[..., None] + h * h * of.of_lse[..., None]
    variance += 2 * g * h * of.covariance[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * (g * groups.sums(b, of.turned) + h * groups.sums(b, of.direct))
    return np.maximum(variance, 0.0)


def sum_of_p(of: OfP, b: Array, groups: Groups) -> Array:
    """Return the variance [G, Sq, n] of sum_j b_ij * (error of P_ij keep_ij), for each row i and group of keys j."""
    h = groups.sums(b, of.kept)
    variance = h * h * of.of_lse[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * h * groups.sums(b, of.direct)
    return np.maximum(variance, 0.0)


def sum_of_dq(of: OfDz, weights: Array) -> Array:
    """Return the variance [G, Sq] of each row's sum over d of weights * error of dq."""
    b = of.head.scale * ((weights * of.at.gain["dq"]) @ of.head.k.T)
    return sum_of_dz(of, b)[..., 0] + (weights**2 * squared(of.at.dq)).sum(axis=2)


def sum_of_keys(of: OfDz | OfP, weights: Array, labels: Integers, count: int) -> Array:
    """Return the variance [count] of the weighted sum of errors of dk or dv over the keys of each label.

    Keys with a negative label are ignored.
    """
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
    """Return what one key head contributes to the variance of the sum of each label, [count]; ``name``: the tensor."""
    if isinstance(of, OfO):
        return by_label(sum_of_o(of, weights), labels, count)
    if name == "dq":
        assert isinstance(of, OfDz)
        return by_label(sum_of_dq(of, weights), labels, count)
    of_keys = np.zeros(of.head.k.shape[0], np.int64) if labels is None else labels
    return sum_of_keys(of, weights, of_keys, count)


def sum_of_sinks(head: Head, at: Elementary, weights: Array) -> Array:
    """Return the variance [G, Sq] of the weighted error of each row's contribution to dsinks; weights [G, N]."""
    assert head.sinks is not None and head.delta is not None and at.covariance is not None
    p = np.exp(head.sinks[:, None, :] - head.lse[..., None])
    t = (p * weights[:, None, :]).sum(axis=2)
    moved = head.delta**2 * squared(at.lse_read) + squared(at.delta)
    return t * t * np.maximum(moved - 2 * head.delta * at.covariance, 0.0)


def by_label(values: Array, labels: Integers | None, count: int) -> Array:
    """Sum ``values`` over the rows of each label; return [count]. Rows with a negative label are ignored."""
    if labels is None:
        return np.array([values.sum()])
    chosen = labels >= 0
    weighted = np.bincount(labels[chosen].ravel(), values[chosen].ravel(), minlength=count)
    return weighted.astype(np.float64)
