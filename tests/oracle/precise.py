"""The definition and the row scale in mpmath at 500 digits, one element at a time, each with an error bound.

A `Reference` evaluates rows when an element asks for them, and keeps them. Gradients come from the
backward formulas of section 2; `loss` and `block_loss`, which hold no such formula, are there so
that a test can measure some of them by finite differences. Nothing of ringspec is used.

Error bound: a sum, product, exp, tanh or log of mpmath is off by a few units of 2**-prec, relative
to the absolute sums of section 4, which are the row scales (they include kappa, by which an error
of a score is multiplied). `radius` is 2**40 such units, far more than the operations of a problem.
"""

from dataclasses import dataclass, field
from functools import cached_property

import mpmath
import numpy as np

DIGITS = 500
GUARD_BITS = 40


@dataclass(frozen=True)
class Problem:
    """Arrays of float64 taken exactly; the field names are those of the program under test.

    q [B,H,Sq,D], k [B,Hkv,Sk,D], v [B,Hkv,Sk,Dv], sinks [H,N]; visible, bias and keep of four axes
    that broadcast to [B,H,Sq,Sk].
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    visible: np.ndarray | None = None
    bias: np.ndarray | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    keep: np.ndarray | None = None
    dropout_p: float = 0.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return B, H, Sq, Sk."""
        return *self.q.shape[:3], self.k.shape[2]


@dataclass
class Row:
    """One query row; dictionaries have the visible keys as keys. `size_` are absolute sums."""

    lse: object
    kappa: object
    p: dict = field(default_factory=dict)
    kept: dict = field(default_factory=dict)  # p * keep / (1 - dropout_p)
    p_sinks: list = field(default_factory=list)
    upstream: object = 0  # dlse - delta
    size_upstream: object = 0
    dz: dict = field(default_factory=dict)
    size_dz: dict = field(default_factory=dict)  # kappa * a


@dataclass(frozen=True, eq=False)
class Reference:
    """All results of one problem; with lse and delta [B,H,Sq] given they are the block backward's.

    >>> one = np.ones((1, 1, 1, 1)); k = np.array([[[[1.0], [3.0]]]]); v = np.array([[[[0.0], [8.0]]]])
    >>> r = Reference(Problem(0 * one, k, v, scale=1.0), dy=one)
    >>> float(r.value("o", (0, 0, 0, 0))), float(r.value("dq", (0, 0, 0, 0)))
    (4.0, 4.0)
    """

    problem: Problem
    dy: np.ndarray | None = None
    dlse: np.ndarray | None = None
    lse_given: np.ndarray | None = None
    delta_given: np.ndarray | None = None
    digits: int = DIGITS
    rows: dict = field(default_factory=dict)

    @cached_property
    def mp(self):
        context = mpmath.MPContext()
        context.dps = self.digits
        return context

    @cached_property
    def factor(self):
        """1 / (1 - dropout_p), the real quotient."""
        return 1 / (1 - self.mp.mpf(float(self.problem.dropout_p)))

    @cached_property
    def slack(self):
        """Error of a result in units of its row scale; the given lse takes part in exp(s - lse)."""
        given = 0.0 if self.lse_given is None else np.abs(finite(self.lse_given)).max(initial=0.0)
        return self.mp.ldexp(1 + self.mp.mpf(float(given)), GUARD_BITS - self.mp.prec)

    def exact(self, values) -> list:
        """Numbers as mpf: float64 exactly, mpf as they are."""
        mpf = self.mp.mpf
        return [mpf(x) if isinstance(x, float) else x for x in values]

    # Rows ----------------------------------------------------------------------------------------

    def row(self, b: int, h: int, i: int) -> Row:
        if (b, h, i) not in self.rows:
            row, s = self.weights(b, h, i)
            if self.dy is not None:
                self.differentiate(row, s, b, h, i)
            self.rows[b, h, i] = row
        return self.rows[b, h, i]

    def key_head(self, h: int) -> int:
        return h // (self.problem.q.shape[1] // self.problem.k.shape[1])

    def pair(self, array, default, b: int, h: int, i: int, j: int):
        """An array that broadcasts to [B, H, Sq, Sk], at one pair."""
        if array is None:
            return default
        index = (b, h, i, j)
        return array[tuple(0 if n == 1 else x for n, x in zip(array.shape, index, strict=True))]

    def scores(self, b: int, h: int, i: int) -> tuple[dict, dict]:
        """s and |scale| sum |q||k| + |bias| of the visible keys of a row."""
        mp, problem = self.mp, self.problem
        q = self.exact(problem.q[b, h, i])
        scale = mp.mpf(float(problem.scale))
        s, size = {}, {}
        for j in range(problem.k.shape[2]):
            (bias,) = self.exact([self.pair(problem.bias, 0.0, b, h, i, j)])
            if bias == mp.mpf("-inf") or not self.pair(problem.visible, True, b, h, i, j):
                continue
            products = [x * y for x, y in zip(q, self.exact(self.key(b, h, j)), strict=True)]
            z = scale * mp.fsum(products) + bias
            size[j] = abs(scale) * mp.fsum(products, absolute=True) + abs(bias)
            if problem.softcap is not None:
                cap = mp.mpf(float(problem.softcap))
                z = cap * mp.tanh(z / cap)
            s[j] = z
        return s, size

    def key(self, b: int, h: int, j: int):
        return self.problem.k[b, self.key_head(h), j]

    def values(self, b: int, h: int, j: int) -> list:
        return self.exact(self.problem.v[b, self.key_head(h), j])

    def weights(self, b: int, h: int, i: int) -> tuple[Row, dict]:
        """The forward part of a row, and its scores."""
        mp = self.mp
        s, size = self.scores(b, h, i)
        sinks = [] if self.problem.sinks is None else self.exact(self.problem.sinks[h])
        logits = [*s.values(), *sinks]
        kappa = 1 + max([*size.values(), *(abs(x) for x in sinks)], default=mp.mpf(0))
        lse = mp.mpf("-inf")
        if self.lse_given is not None:
            (lse,) = self.exact([self.lse_given[b, h, i]])
        elif logits:
            m = max(logits)
            lse = m + mp.log(mp.fsum(mp.exp(x - m) for x in logits))
        row = Row(lse, kappa)
        if lse == mp.mpf("-inf"):
            return row, {}
        row.p = {j: mp.exp(x - lse) for j, x in s.items()}
        for j, p in row.p.items():
            kept = self.pair(self.problem.keep, True, b, h, i, j)
            row.kept[j] = p * self.factor if kept else mp.mpf(0)
        row.p_sinks = [mp.exp(x - lse) for x in sinks]
        return row, s

    def differentiate(self, row: Row, s: dict, b: int, h: int, i: int) -> None:
        """The backward part of a row."""
        mp, problem = self.mp, self.problem
        dy = self.exact(self.dy[b, h, i])
        inner, size_inner = {}, {}  # <dy, v> and <|dy|, |v|>
        for j in row.p:
            products = [x * y for x, y in zip(dy, self.values(b, h, j), strict=True)]
            inner[j], size_inner[j] = mp.fsum(products), mp.fsum(products, absolute=True)
        if self.delta_given is not None:
            (delta,) = self.exact([self.delta_given[b, h, i]])
            row.upstream, row.size_upstream = -delta, abs(delta)
        else:
            (dlse,) = self.exact([0.0 if self.dlse is None else self.dlse[b, h, i]])
            row.upstream = dlse - mp.fsum(row.kept[j] * inner[j] for j in row.p)
            delta = mp.fsum(row.kept[j] * size_inner[j] for j in row.p)
            row.size_upstream = abs(dlse) + delta
        for j, p in row.p.items():
            kept = self.pair(problem.keep, True, b, h, i, j)
            factor = self.factor if kept else mp.mpf(0)
            ds = p * (inner[j] * factor + row.upstream)
            row.dz[j] = ds * self.slope(s[j], b, h, i, j)
            row.size_dz[j] = row.kappa * p * (size_inner[j] * factor + row.size_upstream)

    def slope(self, s, b: int, h: int, i: int, j: int):
        """1 - t**2 as 1 / cosh(z / softcap)**2, of z computed anew: t may be 1 to all digits."""
        mp, problem = self.mp, self.problem
        if problem.softcap is None:
            return mp.mpf(1)
        (bias,) = self.exact([self.pair(problem.bias, 0.0, b, h, i, j)])
        q, k = self.exact(problem.q[b, h, i]), self.exact(self.key(b, h, j))
        z = mp.mpf(float(problem.scale)) * mp.fdot(q, k) + bias
        return 1 / mp.cosh(z / mp.mpf(float(problem.softcap))) ** 2

    # Elements ------------------------------------------------------------------------------------

    def value(self, name: str, index: tuple[int, ...], rows=None):
        """One element of o, lse, dq, dk, dv, dsinks or dbias; sums over `rows` of the queries alone."""
        return self.absolute_or_signed(name, index, rows, signed=True)

    def scale(self, name: str, index: tuple[int, ...], rows=None):
        """The row scale of section 4; `index` is that of the tensor without its last axis (lse,
        dsinks, dbias: with it)."""
        widths = {"o": self.problem.v, "dq": self.problem.k, "dk": self.problem.k}
        widths["dv"] = self.problem.v
        if name not in widths:
            return self.absolute_or_signed(name, index, rows, signed=False)
        every = range(widths[name].shape[3])
        return max(
            (self.absolute_or_signed(name, (*index, d), rows, signed=False) for d in every),
            default=self.mp.mpf(0),
        )

    def absolute_or_signed(self, name: str, index, rows, signed: bool):
        mp = self.mp
        terms = getattr(self, f"terms_of_{name}")(*index, rows, signed)
        return mp.fsum(terms) if signed else mp.fsum(terms, absolute=True)

    def terms_of_o(self, b, h, i, d, rows, signed):
        row = self.row(b, h, i)
        weight = 1 if signed else row.kappa
        v = self.problem.v[b, self.key_head(h), :, d]
        return [weight * kept * self.exact([v[j]])[0] for j, kept in row.kept.items()]

    def terms_of_lse(self, b, h, i, rows, signed):
        row = self.row(b, h, i)
        if signed:
            return [row.lse]
        return [row.kappa, row.lse if self.mp.isfinite(row.lse) else 0]

    def terms_of_dq(self, b, h, i, d, rows, signed):
        row = self.row(b, h, i)
        scale = self.mp.mpf(float(self.problem.scale))
        dz = row.dz if signed else row.size_dz
        return [scale * x * self.exact([self.key(b, h, j)[d]])[0] for j, x in dz.items()]

    def heads_and_rows(self, key_head: int, rows) -> list[tuple[int, int]]:
        _, H, Sq, _ = self.problem.shape
        rows = range(Sq) if rows is None else rows
        return [(h, i) for h in range(H) if self.key_head(h) == key_head for i in rows]

    def terms_of_dk(self, b, key_head, j, d, rows, signed):
        scale = self.mp.mpf(float(self.problem.scale))
        terms = []
        for h, i in self.heads_and_rows(key_head, rows):
            row = self.row(b, h, i)
            dz = row.dz if signed else row.size_dz
            if j in dz:
                terms.append(scale * dz[j] * self.exact([self.problem.q[b, h, i, d]])[0])
        return terms

    def terms_of_dv(self, b, key_head, j, d, rows, signed):
        terms = []
        for h, i in self.heads_and_rows(key_head, rows):
            row = self.row(b, h, i)
            if j in row.kept:
                weight = row.kept[j] if signed else row.kappa * row.kept[j]
                terms.append(weight * self.exact([self.dy[b, h, i, d]])[0])
        return terms

    def terms_of_dsinks(self, h, n, rows, signed):
        B, _, Sq, _ = self.problem.shape
        terms = []
        for b in range(B):
            for i in range(Sq) if rows is None else rows:
                row = self.row(b, h, i)
                if row.p_sinks:
                    upstream = row.upstream if signed else row.kappa * row.size_upstream
                    terms.append(row.p_sinks[n] * upstream)
        return terms

    def terms_of_dbias(self, b, h, i, j, rows, signed):
        """`rows` are the queries to sum over where the bias has one row for all of them."""
        B, H, Sq, Sk = self.problem.shape
        shape = self.problem.bias.shape
        axes = [
            range(full) if size == 1 else (at,)
            for at, size, full in zip((b, h, i, j), shape, (B, H, Sq, Sk), strict=True)
        ]
        if rows is not None and shape[2] == 1:
            axes[2] = rows
        terms = []
        for b_, h_, i_ in ((x, y, z) for x in axes[0] for y in axes[1] for z in axes[2]):
            row = self.row(b_, h_, i_)
            dz = row.dz if signed else row.size_dz
            terms += [dz[j_] for j_ in axes[3] if j_ in dz]
        return terms

    def radius(self, name: str, index: tuple[int, ...], rows=None):
        """A bound on the error of `value(name, index)`."""
        by_row = name in ("o", "dq", "dk", "dv")
        return self.slack * self.scale(name, index[:-1] if by_row else index, rows)


def finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, 0.0)


# Losses whose derivatives are the gradients, for finite differences --------------------------------


def loss(reference: Reference, dy: np.ndarray, dlse: np.ndarray):
    """sum dy * o + sum dlse * lse over all rows; `reference` has no dy, rows with lse = -inf give 0."""
    mp, total = reference.mp, reference.mp.mpf(0)
    B, H, Sq, _ = reference.problem.shape
    for b, h, i in np.ndindex(B, H, Sq):
        lse = reference.value("lse", (b, h, i))
        if mp.isfinite(lse):
            total += mp.mpf(dlse[b, h, i]) * lse
        for d in range(dy.shape[3]):
            total += mp.mpf(dy[b, h, i, d]) * reference.value("o", (b, h, i, d))
    return total


def block_loss(reference: Reference, dy: np.ndarray, delta: np.ndarray):
    """sum_j p~ <dy, v> - delta * (sum_j p + sum_n exp(sink_n - lse)): p has dp/ds = p there."""
    mp, total = reference.mp, reference.mp.mpf(0)
    B, H, Sq, _ = reference.problem.shape
    for b, h, i in np.ndindex(B, H, Sq):
        row = reference.row(b, h, i)
        total -= mp.mpf(delta[b, h, i]) * mp.fsum([*row.p.values(), *row.p_sinks])
        for d in range(dy.shape[3]):
            total += mp.mpf(dy[b, h, i, d]) * reference.value("o", (b, h, i, d))
    return total


# Merge -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Merged:
    """One merged row: lse, o [Dv], their row scales (that of o for each d), and the radius of each in
    units of its scale."""

    lse: object
    o: list
    scale_lse: object
    scale_o: list
    slack: object


def merge_row(o_parts: np.ndarray, lse_parts: np.ndarray, index, digits: int = DIGITS) -> Merged:
    """Row `index` (b, h, i) of the merge of parts o [N,B,H,S,Dv], lse [N,B,H,S].

    The row scale is that of section 4 with lse_n in the place of the scores and o_n in that of v.

    >>> o = np.array([1.0, -3.0]).reshape(2, 1, 1, 1, 1)
    >>> row = merge_row(o, np.zeros((2, 1, 1, 1)), (0, 0, 0))
    >>> float(row.lse), float(row.o[0]), float(row.scale_o[0])
    (0.6931471805599453, -1.0, 2.0)
    """
    mp = mpmath.MPContext()
    mp.dps = digits
    parts = [n for n in range(len(lse_parts)) if np.isfinite(lse_parts[n][index])]
    logits = [mp.mpf(float(lse_parts[n][index])) for n in parts]
    kappa = 1 + max((abs(x) for x in logits), default=mp.mpf(0))
    slack = mp.ldexp(1, GUARD_BITS - mp.prec)
    if not parts:
        zeros = [mp.mpf(0)] * o_parts.shape[-1]
        return Merged(mp.mpf("-inf"), zeros, kappa, zeros, slack)
    m = max(logits)
    lse = m + mp.log(mp.fsum(mp.exp(x - m) for x in logits))
    weights = [mp.exp(x - lse) for x in logits]
    terms = [
        [w * mp.mpf(float(o_parts[n][index][d])) for n, w in zip(parts, weights, strict=True)]
        for d in range(o_parts.shape[-1])
    ]
    return Merged(
        lse,
        [mp.fsum(column) for column in terms],
        kappa + abs(lse),
        [kappa * mp.fsum(column, absolute=True) for column in terms],
        slack,
    )
