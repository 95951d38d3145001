"""The error of one rounding, of a sum, and of a number that is rounded again and again.

A value that is rounded to nearest in a format of spacing u (at the value's own binade, subnormals
included) gets an error that is uniform on [-u/2, u/2]: variance u^2 / 12, bound u / 2. Three things make
it smaller, and each is predictable:

- The value lies on a grid of spacing g already, because it is a rounded number, or a sum or product of
  such: for g >= u the rounding is exact; else the error takes u/g values, ties go to even, and its variance
  is u^2/12 (1 + 2 (g/u)^2) (half of u^2/4 when g = u/2).
- The true value x is known, and what came before has a standard deviation t far below u: then the result
  is x's own rounding, and the error |round(x) - x| is known but for its sign among kernels. In general the
  mean square of round(x + n) - x, n normal of variance t^2, is, by Poisson summation,
  t^2 + u^2/12 + sum_k (-1)^k cos(2 pi k x/u) exp(-2 pi^2 k^2 t^2/u^2) (u^2/(pi k)^2 + 4 t^2).
- It is 0.

**Sums** of n terms x_k with total T and sum of squares Q, in a format of unit roundoff r, order undeclared.
Each partial sum S is rounded: variance RELATIVE r^2 S^2, where RELATIVE = 1 / (8 ln 2) is the mean of
(u / (2 r S))^2 / 3 over mantissas with Benford's law. In a random order E S_k^2 = (k/n)^2 T^2 +
k (n - k) / (n (n - 1)) (Q - T^2/n), summed over k in closed form. The errors are treated as independent:
the random walk of Higham and Mary (2019, https://doi.org/10.1137/18M1226312). Matrix products are taken to
accumulate one term after the other in chunks of CHUNK terms; row sums, in LANES at once (some units do
that over the width of a head as well, which gives a tenth of the variance of one accumulator). Products of operands
with few digits are short: they are rounded only where their last digit lies below that of the sum. The
bound is the worst case of any order, n r sum |x_k| <= n r sqrt(n Q).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import format_of, round_to, unit_roundoff

Array = NDArray[np.float64]

# E over x of u(x)^2 / 12 in units of (r x)^2, x log-uniform in a binade: (4/12) * (3 / (8 ln 2)).
RELATIVE = 1.0 / (8.0 * math.log(2.0))
LANES = (
    16.0  # partial sums that a row sum keeps side by side (SIMD lanes, pairwise blocks, threads)
)
CHUNK = (
    320.0  # terms that a matrix product adds up before it adds to what was there (BLAS: 256 to 384)
)
HARMONICS = 4


@dataclass(frozen=True)
class Error:
    """What is known of an error: its ``variance`` and a ``bound`` of its absolute value."""

    variance: Array
    bound: Array

    def __add__(self, other: Error) -> Error:
        """Two independent errors, added."""
        return Error(self.variance + other.variance, self.bound + other.bound)

    def times(self, factor: Array | float) -> Error:
        return Error(self.variance * np.square(factor), self.bound * np.abs(factor))


def no_error(shape: tuple[int, ...]) -> Error:
    return Error(np.zeros(shape), np.zeros(shape))


def spacing(x: Array, name: str) -> Array:
    """The distance between neighbours of a format at |x|'s binade; of subnormals below it.

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
    """Rounded toward zero instead of to nearest.

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
    """Error of one rounding of values x that lie on multiples of ``grid`` (0: anywhere).

    ``upstream`` is the variance of x before it and ``reach`` a bound: where they are larger than x, they
    decide the binade.
    """
    known = isinstance(upstream, float) and upstream == 0
    u = spacing(x if known else np.sqrt(x * x + upstream), name)
    variance = u * u / 12
    if not (isinstance(grid, float) and grid == 0):
        steps = grid / u
        variance = np.where(steps >= 1, 0.0, variance * (1 + 2 * np.minimum(steps, 1) ** 2))
    nothing = (x == 0) if known else (x == 0) & (np.asarray(upstream) == 0)
    return Error(np.where(nothing, 0.0, variance), half_spacing(x, name, grid, reach))


def half_spacing(
    x: Array, name: str, grid: Array | float = 0.0, reach: Array | float = 0.0
) -> Array:
    """Bound of one rounding. Below the least normal number a kernel may flush to zero.

    No float16 unit is known to flush.
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


def known_rounding(
    x: Array, name: str, upstream: Array, grid: Array | float = 0.0, reach: Array | float = 0.0
) -> Error:
    """:func:`rounding`, where x is so well known that its place between two neighbours counts.

    The variance is what the rounding adds to ``upstream``.

    >>> x = np.array([1.0, 1.0 + 2.0**-9])
    >>> (known_rounding(x, "bfloat16", np.zeros(2)).variance ** 0.5 * 2**9).tolist()
    [0.0, 1.0]
    """
    plain = rounding(x, name, grid, upstream, reach)
    if name == "float64":
        return plain
    u = spacing(x, name)
    t2 = upstream / (u * u)
    sharp = ((round_to(x, name) - x) / u) ** 2 - t2
    added = np.where(t2 < 0.01, sharp, smooth(x / u, t2)) * u * u
    continuous = np.asarray(grid) * 16 < u
    variance = np.where(continuous & (t2 < 0.5), np.maximum(added, 0.0), plain.variance)
    return Error(variance, plain.bound)


def smooth(x: Array, t2: Array) -> Array:
    """The sum in the module's docstring, less t^2, in units of u^2; HARMONICS terms."""
    angle = np.cos(2 * np.pi * (x - np.floor(x)))
    q = np.exp(-2 * np.pi**2 * t2)
    total = np.full(x.shape, 1.0 / 12)
    before, cosine = np.ones(x.shape), angle
    for k in range(1, HARMONICS + 1):
        sign = -1.0 if k % 2 else 1.0
        total += sign * cosine * q ** (k * k) * (1 / (np.pi * k) ** 2 + 4 * t2)
        before, cosine = cosine, 2 * angle * cosine - before
    return total


def product_error(
    total: Array, squares: Array, count: Array | float, name: str, digits: int = 53
) -> Error:
    """Error of an accumulated sum: ``total`` T, ``squares`` Q, ``count`` n terms of so many digits.

    A term of size x has its last digit at x 2^(1 - digits); the chance that it lies below that of a sum
    S is taken as 2^digits r |S| / x with root mean squares for S and x, and at most 1.
    """
    n = np.maximum(np.asarray(count, dtype=np.float64), 1.0)
    r = unit_roundoff(name)
    chunks = np.maximum(n / CHUNK, 1.0)
    length = n / chunks
    # The closed form of the module's docstring for each chunk, and the chunks' own sum.
    of_total = (length + 1) / (3 * chunks) + (chunks - 1) / 3
    of_squares = (length + 1) / 6 - 1 / length + (chunks - 1) / 6
    squares = np.maximum(squares, total * total / n)  # Cauchy-Schwarz, which roundings may break
    walk = np.maximum(of_total * (total * total) + of_squares * squares, 0.0)
    if digits < 53:
        size = np.sqrt(walk / np.where(squares > 0, squares, 1.0))
        walk = walk * np.minimum(2.0**digits * r * size, 1.0)
    more = n > 1
    worst = more * n * r / (1 - np.minimum(n * r, 0.5)) * np.sqrt(n)
    return Error(more * (RELATIVE * r * r) * walk, worst * np.sqrt(squares))


def row_sum_error(total: Array, squares: Array, count: Array | float, name: str) -> Error:
    """The same for a row sum, which machines keep in LANES partial sums and join by a tree."""
    chain = product_error(total, squares, count, name)
    n = np.maximum(np.asarray(count, dtype=np.float64), 1.0)
    r = unit_roundoff(name)
    lanes = total**2 * n / (3 * LANES**2) + squares * n / (6 * LANES)
    tree = 2 * total**2 + 2 * squares
    variance = np.minimum(chain.variance, RELATIVE * r * r * (lanes + tree))
    return Error(variance, chain.bound)


@dataclass(frozen=True)
class Base:
    """Numbers on a ``grid`` near which values may lie; ``variance`` of the distance between the two."""

    value: Array
    grid: Array
    variance: Array | float = 0.0


@dataclass(frozen=True)
class Partial:
    """A partial result on its way: true ``value``, the ``grid`` that it lies on, all its error so far.

    ``local`` is the part of the error that its own roundings made, and ``drift`` what of that is known
    with its sign.
    """

    value: Array
    grid: Array
    error: Error
    local: Error
    drift: Array | float = 0.0

    def rounded(self, name: str, base: Base | None = None) -> Partial:
        """Rounded once more. Formats narrower than float32 look at where the value lies.

        Where the value is ``base``, a number of the format, plus less than a spacing u, the rounding
        is that of the difference: round(difference / u) u - difference. Small shares are lost so, all of
        them toward base: an error that adds up over a tensor.
        """
        upstream, reach = self.error.variance, self.error.bound
        grid = np.maximum(self.grid, spacing(self.value, name))
        if format_of(name).precision >= 24:
            made = rounding(self.value, name, self.grid, reach=reach)
            return Partial(self.value, grid, self.error + made, self.local + made, self.drift)
        made = known_rounding(self.value, name, upstream, self.grid, reach)
        drift = self.drift
        if base is not None:
            u = spacing(self.value, name)
            moved = self.value - base.value
            near = (np.abs(moved) < u) & (base.grid >= u) & (self.grid < u)
            near &= base.variance < u * u / 64
            lost = np.where(near, np.rint(moved / u) * u - moved, 0.0)
            made = Error(np.where(near, lost * lost, made.variance), made.bound)
            drift = drift + lost
        return Partial(self.value, grid, self.error + made, self.local + made, drift)

    def plus(self, other: Partial) -> Partial:
        """The exact sum of two; it lies on the finer grid."""
        return Partial(
            self.value + other.value,
            np.minimum(self.grid, other.grid),
            self.error + other.error,
            self.local + other.local,
            self.drift + other.drift,
        )

    def times(self, factor: Array) -> Partial:
        """The exact product with a factor [...] of each row; factors 1 and 0 keep the grid."""
        c = factor[..., None]
        grid = np.where(c == 1, self.grid, np.where(c == 0, np.inf, 0.0))
        error, local = self.error.times(c), self.local.times(c)
        return Partial(self.value * c, grid, error, local, self.drift * c)


def partial(value: Array, error: Error, grid: Array | float = 0.0) -> Partial:
    """A fresh partial result whose error so far was not made here; 0 lies on every grid."""
    lies_on = np.where(value == 0, np.inf, grid)
    return Partial(value, lies_on, error, no_error(value.shape))
