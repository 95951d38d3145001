"""The definition in mpmath, one query row at a time, and its gradients by finite differences.

Nothing here is shared with ringspec, and no gradient formula appears: the gradient of
L = sum dy * o + sum dlse * lse is measured, coordinate by coordinate, as
(L(x + h) - L(x - h)) / (2 h) with h = 1e-35 and 110 digits. The error of that quotient is of
order h^2 = 1e-70 and 1e-110 / h = 1e-75, so its first 50 digits are those of the derivative.

Only the row that a coordinate enters is evaluated again. Keys that a row may not see do not enter
it; a row without keys and without sinks has constant o = 0 and lse = -inf and is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mpmath
import numpy as np
from mpmath import mpf
from oracle.dual import exp, log, tanh
from oracle.problem import Problem, keeps, may_attend, scale_of

FORWARD_DIGITS = 60
GRADIENT_DIGITS = 110
STEP = "1e-35"


@dataclass(frozen=True)
class Forward:
    """o [B, H, Sq, Dv] and lse [B, H, Sq], object arrays of mpf (or float64 after `to_float64`)."""

    o: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True)
class Gradients:
    """Gradients in the shapes of q, k, v, sinks and bias; object arrays of mpf."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None
    dbias: np.ndarray | None


@dataclass
class Row:
    """All that one query row depends on: numbers as mpf, keys restricted to the visible ones."""

    q: list  # [D]
    k: list  # [visible][D]
    v: list  # [visible][Dv]
    bias: list  # [visible]
    factor: list  # [visible], keep / (1 - dropout_p)
    sinks: list  # [N]
    scale: mpf
    softcap: mpf | None
    Dv: int
    keys: list  # [visible], key indices


def exact(values) -> list:
    """Return float64 values as a list of mpf; every float64 is an mpf exactly."""
    return [mpf(float(value)) for value in values]


def read_row(problem: Problem, b: int, h: int, i: int) -> Row:
    """Collect the numbers that enter row i of head h in batch b."""
    _, H, Hkv, _, Sk, _, Dv = problem.sizes
    key_head = h // (H // Hkv)
    keys = [j for j in range(Sk) if may_attend(problem, b, h, i, j)]
    bias = [0.0] * len(keys)
    if problem.bias is not None:
        bias = np.broadcast_to(problem.bias, problem.scores_shape)[b, h, i, keys]
    sinks = [] if problem.sinks is None else np.asarray(problem.sinks)[h].reshape(-1)
    kept = 1 / (1 - mpf(float(problem.dropout_p)))
    return Row(
        q=exact(problem.q[b, h, i]),
        k=[exact(problem.k[b, key_head, j]) for j in keys],
        v=[exact(problem.v[b, key_head, j]) for j in keys],
        bias=exact(bias),
        factor=[kept if keeps(problem, b, h, i, j) else mpf(0) for j in keys],
        sinks=exact(sinks),
        scale=mpf(scale_of(problem)),
        softcap=None if problem.softcap is None else mpf(float(problem.softcap)),
        Dv=Dv,
        keys=keys,
    )


def score(row: Row, n: int):
    """Return s of visible key n: scaled dot product, bias, then the soft cap."""
    z = row.scale * dot(row.q, row.k[n]) + row.bias[n]
    if row.softcap is None:
        return z
    return row.softcap * tanh(z / row.softcap)


def evaluate(row: Row) -> tuple[list, object]:
    """Return (o, lse) of one row; the maximum is not subtracted, mpmath's exponents are unbounded."""
    weights = [exp(score(row, n)) for n in range(len(row.keys))]
    total = mpf(0)
    for weight in weights:
        total = total + weight
    for sink in row.sinks:
        total = total + exp(sink)
    o = [mpf(0)] * row.Dv
    for n, weight in enumerate(weights):
        if row.factor[n] == 0:
            continue
        p = weight / total * row.factor[n]
        for d in range(row.Dv):
            o[d] = o[d] + p * row.v[n][d]
    if not row.keys and not row.sinks:
        return o, mpf("-inf")
    return o, log(total)


def forward(problem: Problem, digits: int = FORWARD_DIGITS) -> Forward:
    """Return o and lse of the whole problem as object arrays of mpf.

    >>> q = np.zeros((1, 1, 1, 2)); v = np.array([[[[1.0], [4.0]]]])
    >>> result = forward(Problem(q, np.ones((1, 1, 2, 2)), v))
    >>> float(result.o[0, 0, 0, 0]), float(result.lse[0, 0, 0])   # the mean, log 2
    (2.5, 0.6931471805599453)
    """
    B, H, _, Sq, _, _, Dv = problem.sizes
    o = np.empty((B, H, Sq, Dv), dtype=object)
    lse = np.empty((B, H, Sq), dtype=object)
    with mpmath.workdps(digits):
        for b, h, i in np.ndindex(B, H, Sq):
            o[b, h, i], lse[b, h, i] = evaluate(read_row(problem, b, h, i))
    return Forward(o, lse)


def dot(xs: list, ys: list):
    """Return the sum of products of two lists of numbers."""
    total = mpf(0)
    for x, y in zip(xs, ys, strict=True):
        total = total + x * y
    return total


def loss_of_row(dy: list, dlse: mpf) -> Callable:
    """Return the function row -> <dy, o> + dlse * lse."""

    def loss(row: Row):
        o, lse = evaluate(row)
        return dot(dy, o) + dlse * lse

    return loss


def loss_of_block(dy: list, lse: mpf, delta: mpf) -> Callable:
    """Return a function of a row whose gradient is the block backward.

    With lse and delta as constants, p = exp(s - lse) has dp/ds = p, so the gradient of
    <dy, sum_j p~ v> - delta * (sum_j p + sum_n exp(sink_n - lse)) has ds = p * (dp - delta).
    """

    def loss(row: Row):
        total = mpf(0)
        for n in range(len(row.keys)):
            p = exp(score(row, n) - lse)
            total = total + p * (row.factor[n] * dot(dy, row.v[n]) - delta)
        for sink in row.sinks:
            total = total - delta * exp(sink - lse)
        return total

    return loss


def difference(row: Row, loss: Callable, values: list, index: int, step: mpf) -> mpf:
    """Return d loss / d values[index] by a central difference; `values` is a list inside `row`."""
    x = values[index]
    values[index] = x + step
    above = loss(row)
    values[index] = x - step
    below = loss(row)
    values[index] = x
    return (above - below) / (2 * step)


def zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Return an object array of mpf zeros."""
    return np.full(shape, mpf(0), dtype=object)


def gradients(
    problem: Problem, dy: np.ndarray, dlse: np.ndarray | None = None, derivative=difference
) -> Gradients:
    """Return dL/dq, dL/dk, dL/dv, dL/dsinks, dL/dbias for dy [B,H,Sq,Dv] and dlse [B,H,Sq].

    `derivative` may be replaced (the tests put forward-mode dual numbers there).

    >>> q = np.zeros((1, 1, 1, 1)); k = np.array([[[[1.0], [3.0]]]]); v = np.array([[[[0.0], [8.0]]]])
    >>> g = gradients(Problem(q, k, v), dy=np.ones((1, 1, 1, 1)))
    >>> float(g.dq[0, 0, 0, 0])   # sum_j p (v - o) k = 0.5 * -4 * 1 + 0.5 * 4 * 3
    4.0
    """

    def loss_at(b: int, h: int, i: int) -> Callable:
        seed = mpf(0) if dlse is None else mpf(float(dlse[b, h, i]))
        return loss_of_row(exact(dy[b, h, i]), seed)

    return sweep(problem, loss_at, derivative)


def block_gradients(
    problem: Problem, dy: np.ndarray, lse: np.ndarray, delta: np.ndarray
) -> Gradients:
    """Return the block backward for lse and delta [B,H,Sq] as given; rows with lse = -inf give 0.

    >>> zero, one = np.zeros((1, 1, 1, 1)), np.ones((1, 1, 1, 1))
    >>> g = block_gradients(Problem(zero, one, one), one, lse=zero[0], delta=one[0] / 2)
    >>> float(g.dq[0, 0, 0, 0]), float(g.dv[0, 0, 0, 0])   # p = exp(0 - 0), ds = 1 - 1/2
    (0.5, 1.0)
    """

    def loss_at(b: int, h: int, i: int) -> Callable | None:
        if np.isneginf(lse[b, h, i]):
            return None
        return loss_of_block(exact(dy[b, h, i]), *exact([lse[b, h, i], delta[b, h, i]]))

    return sweep(problem, loss_at, difference)


def sweep(problem: Problem, loss_at: Callable, derivative: Callable) -> Gradients:
    """Differentiate the loss of every row by everything that enters it, and add up.

    `loss_at(b, h, i)` gives the loss of one row as a function of a `Row`, or None for no loss.
    """
    B, H, Hkv, Sq, _, D, Dv = problem.sizes
    sinks = None if problem.sinks is None else np.asarray(problem.sinks)
    dq, dk, dv = zeros(problem.q.shape), zeros(problem.k.shape), zeros(problem.v.shape)
    dsinks = None if sinks is None else zeros((H, sinks.size // H))
    dbias = None if problem.bias is None else zeros(np.shape(problem.bias))
    with mpmath.workdps(GRADIENT_DIGITS):
        step = mpf(STEP)
        for b, h, i in np.ndindex(B, H, Sq):
            row = read_row(problem, b, h, i)
            loss = loss_at(b, h, i)
            if loss is None or (not row.keys and not row.sinks):
                continue
            key_head = h // (H // Hkv)
            if row.keys:
                for d in range(D):
                    dq[b, h, i, d] += derivative(row, loss, row.q, d, step)
            for n, j in enumerate(row.keys):
                for d in range(D):
                    dk[b, key_head, j, d] += derivative(row, loss, row.k[n], d, step)
                for d in range(Dv):
                    dv[b, key_head, j, d] += derivative(row, loss, row.v[n], d, step)
                if dbias is not None:
                    where = broadcast_index(dbias.shape, (b, h, i, j))
                    dbias[where] += derivative(row, loss, row.bias, n, step)
            for n in range(len(row.sinks)):
                dsinks[h, n] += derivative(row, loss, row.sinks, n, step)
    if dsinks is not None:
        dsinks = dsinks.reshape(sinks.shape)
    return Gradients(dq, dk, dv, dsinks, dbias)


def merge(parts: list) -> Forward:
    """Return lse = log sum exp lse_n and o = sum exp(lse_n - lse) o_n of float64 pairs (o_n, lse_n).

    >>> o, lse = np.ones((1, 1, 1, 1)), np.zeros((1, 1, 1))
    >>> float(merge([(o, lse), (3 * o, lse)]).o[0, 0, 0, 0])
    2.0
    """
    o, lse = zeros(parts[0][0].shape), zeros(parts[0][1].shape)
    with mpmath.workdps(FORWARD_DIGITS):
        for index in np.ndindex(lse.shape):
            weights = [exp(mpf(float(part[index]))) for _, part in parts]
            total = sum(weights, mpf(0))
            lse[index] = log(total) if total > 0 else mpf("-inf")
            for (part, _), weight in zip(parts, weights, strict=True):
                if weight > 0:
                    for d in range(o.shape[-1]):
                        o[*index, d] += weight / total * mpf(float(part[*index, d]))
    return Forward(o, lse)


def broadcast_index(shape: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, ...]:
    """Return where `index` of the broadcast result lies in an array of `shape`.

    >>> broadcast_index((1, 5), (1, 0, 3, 4))
    (0, 4)
    """
    tail = index[len(index) - len(shape) :]
    return tuple(0 if size == 1 else at for size, at in zip(shape, tail, strict=True))


def to_float64(values: np.ndarray) -> np.ndarray:
    """Return an object array of mpf as float64, each rounded once to nearest even.

    >>> to_float64(np.array([mpf("-inf"), mpf(1) / 3], dtype=object))
    array([      -inf, 0.33333333])
    """
    result = np.empty(values.shape)
    with mpmath.workprec(53):  # float() of a longer mpf would truncate in some mpmath versions
        for index in np.ndindex(values.shape):
            result[index] = float(+values[index])
    return result
