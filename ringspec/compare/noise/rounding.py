"""The error of one rounding, of a sum, and of a number that is rounded several times.

When a value is rounded to nearest, let u be the spacing of the format near the value. The error is taken as uniform on
[-u/2, u/2], so it has the variance u^2 / 12 and the bound u / 2. There are three exceptions:

- The value is already a multiple of some spacing g, because it is a rounded number, or a sum or product of rounded
  numbers. For g >= u the rounding is exact. Otherwise the error has u/g possible values, ties go to even, and the
  variance is u^2/12 (1 + 2 (g/u)^2). For example, g = u/2 gives u^2/8: half of the roundings are exact.
- The true value x is known, and earlier errors have a standard deviation t far below u. Then the result
  is the rounding of x, and the error round(x) - x is known. In general, let the earlier error n be normal with
  variance t^2. By Poisson summation, the mean square of round(x + n) - x is
  t^2 + u^2/12 + sum_k (-1)^k cos(2 pi k x/u) exp(-2 pi^2 k^2 t^2/u^2) (u^2/(pi k)^2 + 4 t^2).
- The value is 0, so the rounding is exact.

**Sums.** Let n terms x_k have the total T and the sum of squares Q, and let r be the unit roundoff of the accumulator.
Rounding a partial sum S has the variance RELATIVE r^2 S^2, where RELATIVE = 1 / (8 ln 2) is the mean of
(u / (2 r S))^2 / 3 over mantissas that follow Benford's law. The order of the terms is not known. In a random order,
the partial sum S_k of k terms has the mean square E S_k^2 = (k/n)^2 T^2 + k (n - k) / (n (n - 1)) (Q - T^2/n), which is
summed over k in closed form. The errors are treated as independent, as in the random walk of Higham and Mary (2019,
https://doi.org/10.1137/18M1226312).

Matrix products are assumed to be accumulated sequentially in chunks of CHUNK terms, and row sums in LANES parallel
partial sums. (Some hardware also uses parallel partial sums for <q, k>; the variance is then a tenth.) The product of
two operands with few digits has few digits; adding it is inexact only if its last digit lies below the last digit of
the sum. The bound is the worst case over all orders, n r sum |x_k| <= n r sqrt(n Q).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.normal import below
from ringspec.formats import format_of, round_to, unit_roundoff

Array = NDArray[np.float64]

# The mean of u(x)^2 / 12 in units of (r x)^2, for x log-uniform in a binade: (4/12) * (3 / (8 ln 2)).
RELATIVE = 1.0 / (8.0 * math.log(2.0))
# Partial sums that a row sum uses in parallel (SIMD lanes, pairwise blocks, threads).
LANES = 16.0
# Terms that a matrix product sums before it adds them to the earlier ones (BLAS: 256 to 384).
CHUNK = 320.0
LEAST = 1e-150  # its square is still a normal number
HARMONICS = 4
# Variances in squared spacings: below the first, the rounding of the true value decides the error; from
# the second on, the place between two neighbours says little about it.
SHARP = 0.01
BLURRED = 1.0 / 16.0


@dataclass(frozen=True)
class Error:
    """The ``variance`` of an error, and a ``bound`` on its absolute value."""

    variance: Array
    bound: Array

    def __add__(self, other: Error) -> Error:
        """Add two independent errors."""
        return Error(self.variance + other.variance, self.bound + other.bound)

    def times(self, factor: Array | float) -> Error:
        return Error(self.variance * np.square(factor), self.bound * np.abs(factor))

    def relative_to(self, size: Array) -> Error:
        """Return the error divided by ``size`` >= 0, or unchanged where ``size`` is 0."""
        bottom = np.where(size > 0, size, 1.0)
        return Error(self.variance / np.maximum(bottom, LEAST) ** 2, self.bound / bottom)


def no_error(shape: tuple[int, ...]) -> Error:
    return Error(np.zeros(shape), np.zeros(shape))


def spacing(x: Array, name: str) -> Array:
    """Return the distance between neighbouring numbers of the format ``name`` near each x.

    >>> spacing(np.array([1.0, 1.5, 0.99, 0.0]), "bfloat16").tolist() == [
    ...     2.0**-7, 2.0**-7, 2.0**-8, 2.0**-133]
    True
    """
    target = format_of(name)
    values = np.ascontiguousarray(x, dtype=np.float64)
    exponent_bits = values.view(np.uint64) & np.uint64(0x7FF0000000000000)
    binade = np.maximum(exponent_bits.view(np.float64), 2.0**target.min_exponent)
    return (binade * 2.0 ** (1 - target.precision)).reshape(np.shape(x))


def truncated_to(x: Array, name: str) -> Array:
    """Round toward zero instead of to nearest.

    >>> truncated_to(np.array([1.999, -1.999]), "float8_e5m2").tolist()
    [1.75, -1.75]
    """
    nearest = round_to(x, name)
    return np.where(
        np.abs(nearest) > np.abs(x), nearest - np.copysign(spacing(x, name), x), nearest
    )


def rounding(
    x: Array,
    name: str,
    grid: Array | float = 0.0,
    upstream: Array | float = 0.0,
    reach: Array | float = 0.0,
) -> Error:
    """Return the error of rounding ``x`` once to the format ``name``.

    ``grid``: a number of which x is a multiple; 0 if there is none. ``upstream`` and ``reach``: the variance and a
    bound of the earlier errors of x. If they exceed x, they determine the binade.
    """
    known = isinstance(upstream, float) and upstream == 0
    u = spacing(x if known else np.sqrt(x * x + upstream), name)
    variance = u * u / 12
    if not (isinstance(grid, float) and grid == 0):
        steps = grid / u
        variance = np.where(steps >= 1, 0.0, variance * (1 + 2 * np.minimum(steps, 1) ** 2))
    nothing = (x == 0) if known else (x == 0) & (np.asarray(upstream) == 0)
    return Error(np.where(nothing, 0.0, variance), half_spacing(x, name, grid, reach))


def sum_rounding(a: Array, b: Array, name: str) -> Error:
    """Return the error of rounding a + b to the format ``name``, of which a and b are numbers themselves.

    Their sum is a multiple of the smaller spacing. A lse = m + log(l), with log(l) one binade below the sum, has 1.5 times
    the variance u^2 / 12. A score m of few digits, such as a product of bfloat16 numbers, is a multiple of its last digit.
    The bound allows that a and b lie in a lower binade than their true values.
    """
    grids = [np.maximum(spacing(x, name), last_digit(x)) for x in (a, b)]
    made = rounding(a + b, name, np.minimum(*grids))
    exact = np.where((a == 0) | (b == 0), np.inf, 0.0)
    return Error(made.variance, rounding(a + b, name, exact).bound)


def last_digit(x: Array) -> Array:
    """Return the largest power of two of which each float64 x is a multiple; infinity for 0.

    >>> last_digit(np.array([2.5, 12.0, 0.1, 0.0])).tolist() == [0.5, 4.0, 2.0**-55, np.inf]
    True
    """
    fraction, exponent = np.frexp(x)
    digits = (fraction * 2.0**53).astype(np.int64)
    lowest = np.ldexp((digits & -digits).astype(np.float64), exponent - 53)
    return np.where(digits == 0, np.inf, lowest)


def half_spacing(
    x: Array, name: str, grid: Array | float = 0.0, reach: Array | float = 0.0
) -> Array:
    """Return the bound of the error of one rounding; the parameters are those of :func:`rounding`.

    A kernel may flush numbers below the least normal one to zero, except in float16, where no hardware is known to
    do so.
    """
    size = np.abs(x) + reach
    u = spacing(size, name)
    bound = np.where(np.asarray(grid) >= u, 0.0, u / 2)
    least = 2.0 ** format_of(name).min_exponent
    small = size < least
    if small.any():
        flushed = np.minimum(size, least) + u / 2 if name != "float16" else bound
        bound = np.where(size == 0, 0.0, np.where(small, flushed, bound))
    return bound


def truncation(x: Array, name: str, grid: Array | float) -> tuple[Error, Array]:
    """Return the error of rounding toward zero (its variance about the mean, and its bound), and the mean of the error.

    The mean is half a spacing toward zero, or 0 for values that the format represents exactly.
    """
    u = spacing(x, name)
    lost = (np.asarray(grid) < u) & (x != 0)
    spread = np.where(lost, u * u / 12, 0.0)
    return Error(spread, np.where(lost, u, 0.0)), np.where(lost, -np.copysign(u, x) / 2, 0.0)


def known_rounding(
    x: Array,
    name: str,
    upstream: Array,
    grid: Array | float = 0.0,
    reach: Array | float = 0.0,
    base: Base | None = None,
) -> tuple[Error, Array, Array, Array]:
    """Return the error of one rounding of a value x that is known well enough to tell which way it is rounded.

    ``base``: if x is the sum of a number of the format and a known difference, that number; otherwise None. The other
    parameters are those of :func:`rounding`. Returns four values:

    - The error. Its variance is the variance that the rounding adds to ``upstream``, at least 0.
    - The known part of the error, with its sign: the mean of the rounding error over the earlier errors.
    - The variance that the known part explains.
    - The fraction of the earlier error that remains after the rounding (a regression coefficient): 0 if all values
      are rounded to the same number, and at most 1.

    >>> x = np.array([1.0, 1.0 + 2.0**-9])
    >>> error, known, _, gain = known_rounding(x, "bfloat16", np.full(2, 1e-12))
    >>> (error.variance**0.5 * 2**9).round(3).tolist(), (known * 2**9).tolist(), gain.tolist()
    ([0.0, 1.0], [0.0, -1.0], [0.0, 0.0])
    """
    plain = rounding(x, name, grid, upstream, reach)
    if name == "float64":
        return plain, np.zeros(x.shape), np.zeros(x.shape), np.ones(x.shape)
    u = spacing(x, name)
    moved, before = x / u, upstream / (u * u)
    t2 = common = before
    if base is not None:
        distance = base.variance / (u * u)
        nearer = (base.grid >= u) & (distance < t2)
        moved = np.where(nearer, (x - base.value) / u, moved)
        common = np.where(nearer, base.covariance / (u * u), common)
        t2 = np.where(nearer, distance, t2)
    mean, square, kept = between_neighbours(moved, t2)
    added = square + 2 * common * (kept - 1)
    # On a coarse grid the earlier error is not normal but takes the steps of that grid.
    known = (np.asarray(grid) * 16 < u) & (t2 < 0.5)
    variance = np.where(known, np.maximum(added, 0.0) * u * u, plain.variance)
    less = np.where(known, np.maximum(-added, 0.0) * u * u, 0.0)
    share = np.where(before > 0, common / np.where(before > 0, before, 1.0), 1.0)
    gain = np.where(known, np.clip(1 + share * (kept - 1), 0.0, 1.0), 1.0)
    lost = np.where(known & (t2 < BLURRED), mean * u, 0.0)
    return Error(variance, plain.bound), lost, lost * lost + less, gain


def between_neighbours(x: Array, t2: Array) -> tuple[Array, Array, Array]:
    """Return the mean and mean square of r = round(x + n) - (x + n), and 1 + cov(r, n) / t2, the fraction of n left.

    The error n is normal with variance ``t2``; round is to the nearest integer. For t2 below :data:`SHARP`, only the
    two nearest integers are considered; otherwise the series of the module's docstring is summed to HARMONICS terms.

    >>> [[round(float(y), 2) for y in between_neighbours(*np.array([0.25, t2]))] for t2 in (0.0, 0.06, 1.0)]
    [[-0.25, 0.06, 0.0], [-0.1, 0.08, 0.98], [-0.0, 0.08, 1.0]]
    """
    # The sums were float32 before. Close to the middle of two numbers they may lie on either side of it, or on it.
    single = x.astype(np.float32).astype(np.float64)
    own = unit_roundoff("float32") * np.abs(x)
    nearest = np.where(np.abs(single - x) < own / 4, np.rint(single), np.rint(x)) - x
    other = nearest - np.copysign(1.0, nearest)
    distance, t = 0.5 - np.abs(nearest), np.sqrt(np.minimum(t2, SHARP) + own * own)
    sure = (t == 0) | ((t2 == 0) & (np.abs(distance) < own / 4))
    far = distance / np.where(t > 0, t, 1.0)
    chance = np.where(sure, 0.0, below(-far))
    density = np.exp(-0.5 * far * far) / (math.sqrt(2 * math.pi) * np.where(t > 0, t, 1.0))
    kept = np.where(sure, 0.0, density)
    mean = nearest + chance * (other - nearest)
    square = nearest**2 + chance * (other**2 - nearest**2) + t2 * (1 - 2 * kept)
    if (t2 < SHARP).all():
        return mean, square, kept
    angle, q = 2 * np.pi * (x - np.floor(x)), np.exp(-2 * np.pi**2 * t2)
    series = [np.zeros(x.shape), np.full(x.shape, 1.0 / 12), np.ones(x.shape)]
    for k in range(1, HARMONICS + 1):
        term = (-1.0) ** k * q ** (k * k)
        series[0] += term * np.sin(k * angle) / (np.pi * k)
        series[1] += term * np.cos(k * angle) / (np.pi * k) ** 2
        series[2] += 2 * term * np.cos(k * angle)
    few = t2 < SHARP
    return (
        np.where(few, mean, series[0]),
        np.where(few, square, series[1]),
        np.where(few, kept, series[2]),
    )


def product_error(
    total: Array, squares: Array, count: Array | float, name: str, digits: int = 53
) -> Error:
    """Return the error of accumulating a sum in the format ``name``.

    ``total``, ``squares`` and ``count`` are T, Q and n of the module's docstring. ``digits``: binary digits of each
    term. The probability that adding a term x to a sum S is inexact is taken as 2^digits r |S| / |x|, at most 1; for
    |S| and |x|, their root mean squares are used.
    """
    n = np.maximum(np.asarray(count, dtype=np.float64), 1.0)
    r = unit_roundoff(name)
    chunks = np.maximum(n / CHUNK, 1.0)
    length = n / chunks
    # The closed form in the module's docstring for each chunk, and for the sum of the chunks.
    of_total = (length + 1) / (3 * chunks) + (chunks - 1) / 3
    of_squares = (length + 1) / 6 - 1 / length + (chunks - 1) / 6
    squares = np.maximum(squares, total * total / n)  # Cauchy-Schwarz, which roundings may violate
    walk = np.maximum(of_total * (total * total) + of_squares * squares, 0.0)
    if digits < 53:
        size = np.sqrt(walk / np.where(squares > 0, squares, 1.0))
        walk = walk * np.minimum(2.0**digits * r * size, 1.0)
    more = n > 1
    worst = more * n * r / (1 - np.minimum(n * r, 0.5)) * np.sqrt(n)
    return Error(more * (RELATIVE * r * r) * walk, worst * np.sqrt(squares))


def row_sum_error(total: Array, squares: Array, count: Array | float, name: str) -> Error:
    """Return the error of a row sum: LANES partial sums, added in a tree. Parameters as in :func:`product_error`."""
    chain = product_error(total, squares, count, name)
    n = np.maximum(np.asarray(count, dtype=np.float64), 1.0)
    r = unit_roundoff(name)
    lanes = total**2 * n / (3 * LANES**2) + squares * n / (6 * LANES)
    tree = 2 * total**2 + 2 * squares
    variance = np.minimum(chain.variance, RELATIVE * r * r * (lanes + tree))
    return Error(variance, chain.bound)


@dataclass(frozen=True)
class Base:
    """Numbers ``value``, multiples of ``grid``, from which a partial result differs by an almost known amount.

    ``variance``: the variance of the error of this difference. ``covariance``: the covariance of that error with the
    whole error of the partial result.
    """

    value: Array
    grid: Array
    variance: Array
    covariance: Array


@dataclass(frozen=True)
class Partial:
    """A partial result, such as a running sum, and its errors.

    ``value``: the true value. ``grid``: a number of which the result is a multiple, 0 if there is none. ``error``: the
    whole error so far. ``local``: the error from roundings of this result itself, not of its operands. ``drift``: the
    part of the local error whose value and sign are known; ``explained``: the variance that ``drift`` explains.
    ``gain``: the fraction of the earlier error that remained after the last rounding.
    """

    value: Array
    grid: Array
    error: Error
    local: Error
    drift: Array | float = 0.0
    explained: Array | float = 0.0
    gain: Array | float = 1.0

    def unknown(self) -> Array:
        """Return the variance of the error without the part that ``drift`` explains."""
        return np.maximum(self.error.variance - self.explained, 0.0)

    def rounded(self, name: str, base: Base | None = None) -> Partial:
        """Return the partial result after one more rounding, to the format ``name``.

        In formats narrower than float32, the rounding error is known in two cases. First, the earlier error may be far
        below a spacing u, as in peaked rows. Second, the value may be the sum of ``base``, a number of the format, and
        a known difference; the error is then round(difference / u) u - difference. A small difference is lost in this
        case: all these errors point toward ``base``, so they add up over a tensor.
        """
        reach = self.error.bound
        grid = np.maximum(self.grid, spacing(self.value, name))
        if format_of(name).precision >= 24:
            made = rounding(self.value, name, self.grid, reach=reach)
            return dataclasses.replace(
                self, grid=grid, error=self.error + made, local=self.local + made
            )
        x = self.value + self.drift
        made, lost, less, gain = known_rounding(x, name, self.unknown(), self.grid, reach, base)
        drift, explained = self.drift + lost, self.explained + less
        error, local = self.error + made, self.local + made
        return Partial(self.value, grid, error, local, drift, explained, gain)

    def unshared(self, before: Partial, own: Array) -> Array:
        """Return the variance of each element's error that no other element shares, after the last rounding.

        ``before``: the partial result before that rounding. ``own``: the unshared variance before that rounding.
        """
        square = np.square(self.gain)
        return np.asarray(square * own + self.unknown() - square * before.unknown())

    def plus(self, other: Partial) -> Partial:
        """Return the sum of two partial results, without rounding; it is a multiple of the smaller grid."""
        return Partial(
            self.value + other.value,
            np.minimum(self.grid, other.grid),
            self.error + other.error,
            self.local + other.local,
            self.drift + other.drift,
            self.explained + other.explained,
        )

    def times(self, factor: Array) -> Partial:
        """Multiply each row by its ``factor``, without rounding."""
        c = factor[..., None]
        grid = np.where(c == 1, self.grid, np.where(c == 0, np.inf, 0.0))
        error, local = self.error.times(c), self.local.times(c)
        drift, explained = self.drift * c, self.explained * np.square(c)
        return Partial(self.value * c, grid, error, local, drift, explained)


@dataclass(frozen=True)
class Merged:
    """A partial result in a merge: ``part``, its rescaling ``factor`` for each row, and their rounded ``product``."""

    part: Partial
    factor: Array
    product: Partial

    @classmethod
    def of(cls, part: Partial, factor: Array, name: str) -> Merged:
        return cls(part, factor, part.times(factor).rounded(name))


def partial(value: Array, error: Error, grid: Array | float = 0.0) -> Partial:
    """Return a partial result that has not been rounded itself; its ``error`` is that of its operands."""
    lies_on = np.where(value == 0, np.inf, grid)
    return Partial(value, lies_on, error, no_error(value.shape))


def larger_part(a: Merged, b: Merged, larger_a: NDArray[np.bool_] | None = None) -> Base:
    """Return x of a merge round(c x) + round(d y) with c >= d; the sum differs from x by an almost known amount.

    ``larger_a``: where a has the larger weight in the result; None: where its factor c is the larger one.
    """
    larger = (a.factor >= b.factor if larger_a is None else larger_a)[..., None]

    def chosen(of_a: Array, of_b: Array) -> Array:
        return np.where(larger, of_a, of_b)

    c = chosen(a.factor[..., None], b.factor[..., None])
    of_x = chosen(a.part.unknown(), b.part.unknown())
    of_product = chosen(a.product.unknown(), b.product.unknown())
    of_rounding = np.maximum(of_product - c * c * of_x, 0.0)
    of_other = chosen(b.product.unknown(), a.product.unknown()) + of_rounding
    return Base(
        chosen(a.part.value + a.part.drift, b.part.value + b.part.drift),
        chosen(a.part.grid, b.part.grid),
        (1 - c) ** 2 * of_x + of_other,
        of_other - c * (1 - c) * of_x,
    )
