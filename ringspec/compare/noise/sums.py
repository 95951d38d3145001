"""Variance of a weighted sum of a tensor's rounding errors, including the errors that several elements share.

Let C be the weights of the elements. The weighted sum T of their errors is linear in the errors eps_n of single
roundings, which are independent: T = sum_n a_n eps_n, so Var T = sum_n a_n^2 var eps_n. The coefficients a_n follow
from C by the adjoint of the linear map from roundings to results, which takes a few matrix products. The errors and the
symbols x, y, X, dz and sigma are those of :mod:`~ringspec.compare.noise.forward` and
:mod:`~ringspec.compare.noise.backward`; i is a query, j a key:

- o: the error of P_ij has the coefficient A_ij with A = C v^T. The error of the softmax sum l has the coefficient
  <C_i, o_i>, and the error of a rescaling factor has <C_i, u_i> (u of
  :class:`~ringspec.compare.noise.worker.Shared`).
- dq: the error of dz_ij has the coefficient B_ij with B = scale C k^T. The errors of a row's lse and delta have the
  coefficients h_i = sum_j B dz and g_i = sum_j B y. They add g^2 var delta + h^2 var lse + 2 g h cov to the variance,
  where cov is their covariance. A rounding that concerns a single pair adds B^2 times its variance. The error sigma of
  a score affects dz, lse and delta; it adds var sigma (B x - p (g X + h))^2.
- dk: the same with B = scale q C^T. If separate sums are computed for several groups of keys, each group has its own h
  and g, because an error of a row's lse or delta changes every sum.
- dv: the error of P_ij keep_ij has the coefficient B_ij with B = dy C^T. The pairs of a row share only the error of
  lse.

The last rounding of a result removes a part of the earlier errors. C therefore means C * gain in this list, where
gain is the fraction that remains. The new error of the last rounding affects one element only
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
from ringspec.compare.noise.problem import Array, Head, Integers
from ringspec.compare.noise.worker import Shared

Small = NDArray[np.float32]
MOST_PAIRS = 1 << 24  # number of pairs whose terms are kept, 32 bytes each


@dataclass(frozen=True)
class Elementary:
    """The standard deviations of the independent errors of one key head with its G query heads.

    Errors of pairs are float32 [G, Sq, Sk]: ``zeta``, ``sigma``, ``eta`` (:mod:`~ringspec.compare.noise.forward`),
    ``private``, ``of_ds``, ``kept`` (:class:`~ringspec.compare.noise.backward.PairNoise`). Errors of rows are
    [G, Sq]: ``lam`` of the softmax sum; ``lse`` as returned; ``lse_read`` and ``delta`` as the backward pass reads lse
    and delta, and their ``covariance``. ``output``, ``dq``, ``dk`` and ``dv`` are errors of single elements of o and
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

    Values beyond float32's range become its largest number. This happens, for example, to the relative error of an exp
    that underflows.
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

    ``operand`` [G, Sq, Sk]: the variance of rounding P as an operand of P v. ``relative`` [G, Sq, Sk]: p^2 times the
    variance of the relative error of exp(s - m).
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

    ``dz`` and ``y`` [G, Sq, Sk]: the factors with which an error of lse and an error of delta enter dz. ``own``
    [G, Sq, Sk]: the variance of dz's error that a pair does not share with its row. ``direct`` and ``turned``
    [G, Sq, Sk]: covariances of the error that a score causes in dz, with the error of lse and with the error of delta.
    ``of_lse``, ``of_delta`` and ``covariance`` [G, Sq]: variances and covariance of the errors of lse and delta.
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
        """Compute the terms. ``rounded`` False omits the rounding of dz as an operand, which does not affect dbias."""
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

    All but ``of_lse`` are [G, Sq, Sk]. ``kept``: P times the dropout factor. ``own``: the variance of its error without
    the error of lse. ``direct``: the covariance of its error with the error of lse. ``of_lse`` [G, Sq]: the variance
    of the error of lse.
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
    """A cache of terms for the tensor that was used last, for as many heads as :data:`MOST_PAIRS` allows."""

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
    one group. ``single`` [n]: the only key of each group; None if a group has several keys.
    """

    present: Integers
    member: Array | None
    single: Integers | None = None

    @classmethod
    def of(cls, labels: Integers) -> Groups:
        """Group the keys with the same label; ``labels`` is [Sk], and keys with a negative label are in no group."""
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
    """Return, for each row, the variance [G, Sq] of the sum over d of weights * (error of o)."""
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
    """Return the variance [G, Sq, n] of sum_j b_ij * (error of dz_ij), for each row i and each group of keys."""
    g, h = groups.sums(b, of.y), groups.sums(b, of.dz)
    variance = g * g * of.of_delta[..., None] + h * h * of.of_lse[..., None]
    variance += 2 * g * h * of.covariance[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * (g * groups.sums(b, of.turned) + h * groups.sums(b, of.direct))
    return np.maximum(variance, 0.0)


def sum_of_p(of: OfP, b: Array, groups: Groups) -> Array:
    """Return the variance [G, Sq, n] of sum_j b_ij * (error of P_ij keep_ij), for each row i and each group of keys."""
    h = groups.sums(b, of.kept)
    variance = h * h * of.of_lse[..., None] + groups.sums(b * b, of.own)
    variance -= 2 * h * groups.sums(b, of.direct)
    return np.maximum(variance, 0.0)


def sum_of_dq(of: OfDz, weights: Array) -> Array:
    """Return, for each row, the variance [G, Sq] of the sum over d of weights * (error of dq)."""
    b = of.head.scale * ((weights * of.at.gain["dq"]) @ of.head.k.T)
    return sum_of_dz(of, b)[..., 0] + (weights**2 * squared(of.at.dq)).sum(axis=2)


def sum_of_keys(of: OfDz | OfP, weights: Array, labels: Integers, count: int) -> Array:
    """Return, for each label, the variance of the weighted sum of errors of dk or dv over its keys, [count].

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
    """Return what one key head adds to the variance of each label's sum, [count]; ``name``: the tensor."""
    if isinstance(of, OfO):
        return by_label(sum_of_o(of, weights), labels, count)
    if name == "dq":
        assert isinstance(of, OfDz)
        return by_label(sum_of_dq(of, weights), labels, count)
    of_keys = np.zeros(of.head.k.shape[0], np.int64) if labels is None else labels
    return sum_of_keys(of, weights, of_keys, count)


def sum_of_sinks(head: Head, at: Elementary, weights: Array) -> Array:
    """Return, for each row, the variance [G, Sq] of the weighted error that it adds to dsinks; ``weights``: [G, N]."""
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
