"""Prove that an element of a result is a rational number, and compute its value.

If a value lies exactly on a midpoint between two numbers of a format, no interval decides its rounding, however narrow
it is. Such values are rational, and a result is rational only if the exponentials cancel. This module proves such
cases with exact fractions. Every proof uses only that the probabilities P of a row sum to 1, including those of the
sinks. Let A = 1 - dropout_p, ``keep`` the dropout mask, z a logit before the soft cap, and dz its gradient:

- o: if the mean of keep v/A is the same in every group of equal logits, o is that mean. Here a sink
  counts as a key with v = 0.
- P: if all n logits of a row (including its sinks) are equal, P = 1/n.
- dz without a soft cap is rational in two cases: every P of the row is 1/n, or all dp of the row are equal and every
  dp - delta + dlse is 0 (also for the sinks, if there are any). With a soft cap, it is also required that ds = 0 or
  z = 0.
- dbias that is summed over keys: it is the sum of dlse over rows with keys, without sinks and soft cap.
- dq: if all visible k have the same value, dq = scale k sum_j ds = scale k dlse, without sinks and soft cap.
- dq, dk, dv, dbias, dsinks: sums in which every term is rational or has a factor 0.
- The row scale of o, the unit of its errors: it is a rational factor times the largest of the sums of P keep |v| / A.
  This sum may be rational in the same way as o.

An element without a proof here may still be rational. If no precision decides its rounding, an error is raised.
(For o without a soft cap, the theorem of Lindemann and Weierstrass shows that there are no other rational values. In
the sums over rows of dk and dv, other cancellations are conceivable; they would raise the error.)
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringspec.exact.problem import Array, Problem

Numbers = list[Fraction]
MARGIN = 1e-6  # relative, of sums in float64
LARGEST_LOGIT = 1e6


@dataclass(frozen=True)
class Row:
    """One query row as exact fractions.

    ``j``: the visible keys. ``z``: their logits before the soft cap. ``factor``: their dropout factors. ``sinks``: the
    sinks. ``capped``: whether there is a soft cap.
    """

    j: list[int]
    z: Numbers
    factor: Numbers
    sinks: Numbers
    capped: bool

    @cached_property
    def terms_as_keys(self) -> list[object]:
        """A label for each term of the softmax, sinks last; terms with equal labels are provably equal.

        With a soft cap c, the logit is c tanh(z/c), which is provably equal to a sink only if both are 0.
        """
        sinks = [sink if not self.capped or sink == 0 else ("sink", sink) for sink in self.sinks]
        return [*self.z, *sinks]

    @cached_property
    def uniform(self) -> bool:
        """Tell whether all terms are provably equal."""
        return len(set(self.terms_as_keys)) <= 1

    @property
    def terms(self) -> int:
        return len(self.j) + len(self.sinks)


def fractions(x: NDArray) -> Numbers:
    return [Fraction(value) for value in np.asarray(x, dtype=np.float64).tolist()]


def dot(xs: Numbers, ys: Numbers) -> Fraction:
    return sum((x * y for x, y in zip(xs, ys, strict=True)), Fraction(0))


class Prover:
    """Computes an element of a result as a Fraction if it is provably rational, otherwise None.

    ``dy``, ``dlse``: None if only o and lse are needed. ``of_row`` [Sq]: the group of each row, for the partial sums
    ``dsinks_parts`` and ``dbias_parts``.
    """

    def __init__(
        self,
        problem: Problem,
        dy: Array | None = None,
        dlse: Array | None = None,
        of_row: NDArray | None = None,
    ) -> None:
        self.problem, self.dy, self.dlse, self.of_row = problem, dy, dlse, of_row
        self.rows: dict[tuple[int, int, int], Row] = {}
        self.gradients: dict[tuple[int, int, int], tuple[Numbers, Numbers] | None] = {}

    def __call__(self, tensor: str, index: tuple[int, ...]) -> Fraction | None:
        provers = {
            "o": self.output,
            "dq": self.dq,
            "dk": self.dk,
            "dv": self.dv,
            "dsinks": self.dsinks,
            "dbias": self.dbias,
        }
        if tensor.endswith("_parts"):
            assert self.of_row is not None
            rows = np.flatnonzero(self.of_row == index[0]).tolist()
            return self.sums(tensor.removesuffix("_parts"), index[1:], rows)
        return provers[tensor](index) if tensor in provers else None

    def row(self, b: int, h: int, i: int) -> Row:
        if (b, h, i) not in self.rows:
            self.rows[b, h, i] = self.read(b, h, i)
        return self.rows[b, h, i]

    def read(self, b: int, h: int, i: int) -> Row:
        """Return row i of query head h in batch b, as exact fractions."""
        problem, one = self.problem, slice(i, i + 1)
        j = np.flatnonzero(problem.mask(b, h, one)[0]).tolist()
        q, scale = fractions(problem.q[b, h, i]), Fraction(problem.scale)
        keys = problem.k[b, h // problem.group]
        z = [scale * dot(q, fractions(keys[key])) for key in j]
        if problem.bias is not None:
            bias = np.broadcast_to(problem.bias, problem.pairs)[b, h, i]
            z = [a + Fraction(float(bias[key])) for a, key in zip(z, j, strict=True)]
        kept = problem.kept(b, h, one)
        whole = 1 / (1 - Fraction(problem.dropout_p))
        factor = [whole if kept is None or kept[0, key] else Fraction(0) for key in j]
        sinks = [] if problem.sinks is None else fractions(problem.sinks[h])
        return Row(j, z, factor, sinks, problem.softcap is not None)

    def common_mean(self, row: Row, values: Numbers) -> Fraction | None:
        """Return the mean of ``values`` over the keys if every group of equal terms has the same mean, else None."""
        if not row.j and not row.sinks:
            return Fraction(0)
        groups: dict[object, Numbers] = {}
        padded = values + [Fraction(0)] * len(row.sinks)
        for key, value in zip(row.terms_as_keys, padded, strict=True):
            groups.setdefault(key, []).append(value)
        means = {sum(group, Fraction(0)) / len(group) for group in groups.values()}
        return means.pop() if len(means) == 1 else None

    def output(self, index: tuple[int, ...]) -> Fraction | None:
        b, h, i, d = index
        row = self.row(b, h, i)
        v = self.problem.v[b, h // self.problem.group, :, d]
        return self.common_mean(
            row, [f * Fraction(float(v[key])) for f, key in zip(row.factor, row.j, strict=True)]
        )

    def scale(self, tensor: str, index: tuple[int, ...]) -> Fraction | None:
        """Return the row scale of o if it is provably rational, else None; also None for other tensors.

        The row scale is kappa (:meth:`condition`) times the largest of the sums of P keep |v| / A, one for each d. The
        largest sum is found in float64, whose error is far below MARGIN.
        """
        if tensor != "o":
            return None
        b, h, i = index
        row, problem = self.row(b, h, i), self.problem
        logits = np.array([float(z) for z in (*row.z, *row.sinks)])
        if not row.j or np.abs(logits).max() > LARGEST_LOGIT:
            return None
        if problem.softcap is not None:
            of_keys = np.arange(len(logits)) < len(row.j)
            logits = np.where(of_keys, problem.softcap * np.tanh(logits / problem.softcap), logits)
        p = np.exp(logits - logits.max())
        p = p[: len(row.j)] * np.array([float(f) for f in row.factor]) / p.sum()
        sizes = np.abs(problem.v[b, h // problem.group, row.j])
        sums = p @ sizes
        largest = int(sums.argmax())
        kept = [f * Fraction(float(x)) for f, x in zip(row.factor, sizes[:, largest], strict=True)]
        mean = self.common_mean(row, kept)
        equal = (sizes == sizes[:, [largest]]).all(axis=0)
        if mean is None or (sums[~equal] > sums[largest] * (1 - MARGIN)).any():
            return None
        return self.condition(b, h, i) * mean

    def condition(self, b: int, h: int, i: int) -> Fraction:
        """Return kappa of a row: 1 + max(max_j(|scale| sum |q||k| + |bias|), max |sink|)."""
        row, problem = self.row(b, h, i), self.problem
        q, keys = fractions(np.abs(problem.q[b, h, i])), np.abs(problem.k[b, h // problem.group])
        sizes = [abs(Fraction(problem.scale)) * dot(q, fractions(keys[j])) for j in row.j]
        if problem.bias is not None:
            bias = np.broadcast_to(problem.bias, problem.pairs)[b, h, i]
            sizes = [x + abs(Fraction(float(bias[j]))) for x, j in zip(sizes, row.j, strict=True)]
        return 1 + max([*sizes, *map(abs, row.sinks)], default=Fraction(0))

    def score_gradients(self, b: int, h: int, i: int) -> tuple[Numbers, Numbers] | None:
        """Return dz of the visible keys of a row, and the number that the row adds to the gradient of each sink.

        The number is returned in a list, which is empty without sinks. None if dz is not provably rational.
        """
        if (b, h, i) not in self.gradients:
            self.gradients[b, h, i] = self.find_score_gradients(b, h, i)
        return self.gradients[b, h, i]

    def find_score_gradients(self, b: int, h: int, i: int) -> tuple[Numbers, Numbers] | None:
        assert self.dy is not None and self.dlse is not None
        row = self.row(b, h, i)
        dy = fractions(self.dy[b, h, i])
        v = self.problem.v[b, h // self.problem.group]
        dp = [f * dot(dy, fractions(v[key])) for f, key in zip(row.factor, row.j, strict=True)]
        delta = self.common_mean(row, dp)
        if delta is None and row.uniform:
            delta = sum(dp, Fraction(0)) / row.terms
        if delta is None:
            return None
        dlse = Fraction(float(self.dlse[b, h, i]))
        d = [value - delta + dlse for value in dp]
        sinks = [dlse - delta] if row.sinks else []
        if not row.uniform:
            return None if any(d) or any(sinks) else (d, sinks)
        share = Fraction(1, row.terms) if row.terms else Fraction(0)
        ds = [share * value for value in d]
        if row.capped and any(value != 0 and z != 0 for value, z in zip(ds, row.z, strict=True)):
            return None
        return ds, [share * value for value in sinks]

    def dq(self, index: tuple[int, ...]) -> Fraction | None:
        b, h, i, d = index
        row, scale = self.row(b, h, i), Fraction(self.problem.scale)
        k = fractions(self.problem.k[b, h // self.problem.group, row.j, d])
        if len(set(k)) == 1 and not row.sinks and not row.capped:
            assert self.dlse is not None
            return scale * k[0] * Fraction(float(self.dlse[b, h, i]))
        found = self.score_gradients(b, h, i)
        return None if found is None else scale * dot(found[0], k)

    def dk(self, index: tuple[int, ...]) -> Fraction | None:
        b, kv, j, d = index
        total = Fraction(0)
        for h, i in self.rows_of(b, kv, j):
            q = Fraction(float(self.problem.q[b, h, i, d]))
            if q == 0:
                continue
            found = self.score_gradients(b, h, i)
            if found is None:
                return None
            total += found[0][self.row(b, h, i).j.index(j)] * q
        return Fraction(self.problem.scale) * total

    def dv(self, index: tuple[int, ...]) -> Fraction | None:
        assert self.dy is not None
        b, kv, j, d = index
        total = Fraction(0)
        for h, i in self.rows_of(b, kv, j):
            row = self.row(b, h, i)
            factor = row.factor[row.j.index(j)] * Fraction(float(self.dy[b, h, i, d]))
            if factor == 0:
                continue
            if not row.uniform:
                return None
            total += factor / row.terms
        return total

    def dsinks(self, index: tuple[int, ...]) -> Fraction | None:
        return self.sums("dsinks", index, list(range(self.problem.pairs[2])))

    def dbias(self, index: tuple[int, ...]) -> Fraction | None:
        return self.sums("dbias", index, list(range(self.problem.pairs[2])))

    def sums(self, tensor: str, index: tuple[int, ...], rows: list[int]) -> Fraction | None:
        """Return the element ``index`` of dsinks or dbias, summed over ``rows`` only."""
        batch, heads, _, _ = self.problem.pairs
        bias = self.problem.bias
        if tensor == "dsinks":
            places = [(b, index[0], i) for b in range(batch) for i in rows]
        else:
            assert bias is not None
            over_b = range(batch) if bias.shape[0] == 1 else [index[0]]
            over_h = range(heads) if bias.shape[1] == 1 else [index[1]]
            over_i = rows if bias.shape[2] == 1 else [index[2]]
            places = [(b, h, i) for b in over_b for h in over_h for i in over_i]
        total = Fraction(0)
        for place in places:
            part = self.sink_part(place) if tensor == "dsinks" else self.bias_part(place, index[3])
            if part is None:
                return None
            total += part
        return total

    def sink_part(self, place: tuple[int, int, int]) -> Fraction | None:
        found = self.score_gradients(*place)
        return None if found is None else found[1][0]

    def bias_part(self, place: tuple[int, int, int], j: int) -> Fraction | None:
        """Return what one row adds to dbias: its dz at key j, or the sum over keys if the key axis is broadcast."""
        row = self.row(*place)
        assert self.problem.bias is not None and self.dlse is not None
        if self.problem.bias.shape[3] == 1 and not row.sinks and not row.capped:
            return Fraction(float(self.dlse[place])) if row.j else Fraction(0)
        if self.problem.bias.shape[3] != 1 and j not in row.j:
            return Fraction(0)
        found = self.score_gradients(*place)
        if found is None:
            return None
        return (
            sum(found[0], Fraction(0))
            if self.problem.bias.shape[3] == 1
            else found[0][row.j.index(j)]
        )

    def rows_of(self, b: int, kv: int, j: int) -> list[tuple[int, int]]:
        """Return (h, i) of the rows to which key j is visible."""
        group, everything = self.problem.group, slice(None)
        return [
            (h, int(i))
            for h in range(kv * group, (kv + 1) * group)
            for i in np.flatnonzero(self.problem.mask(b, h, everything)[:, j])
        ]
