"""exp, log, tanh in fixed point, each with a proven bound on its error.

A number is an integer ``units`` times 2**-bits. A result has F bits, and "one unit at F" means 2**-F. Every function
computes with at least w = F + 32 bits, and rounds its result down to F bits. ``//`` and ``>>`` round down, so the
result of each of these operations is too small by less than one unit.

**exp.** Claim: exp(x) is off by at most 2 units at F, and is exactly 2**F units at x = 0. Proof: let k = floor(x / ln
2) and r = x - k ln 2 in [0, ln 2). Errors are given in units at w.

1. Argument. x is cut to w bits, so it is off by < 1. ln 2 is off by <= 1.01, so r is off by < 1.01 |k| + 1. For
   x < -(F + 8), 0 is returned, because exp(x) < 2**-F. Otherwise |k| <= (F + 8) / ln 2 + 1 < 2**13 for F <= 5600.
   For k > 0, w is increased by k, and |k| < 2**13 is required.
2. Tables. r = a/2**8 + b/2**16 + f exactly, with f < 2**-16. The tables of exp(a/2**8) < 2.01 and
   exp(b/2**16) < 1.004 are computed with 64 more bits, so they are off by <= 1.01 each.
3. Series. exp(f) is computed by Horner's rule over C_i = floor(2**w / i!). The errors e_i satisfy
   e_i <= e_{i+1} * 2**-16 + 2, so they are < 2.001. The series is cut where its tail is < 1. Together: off by < 3.001.
4. Products. The product of both table entries is off by 1.01 * 1.004 + 1.01 * 2.01 + 1 < 4.1. The product with exp(f)
   is off by 4.1 * 1.0001 + 3.001 * 2.02 + 1 < 11.2. The argument's error times exp(r) <= 2 adds 2.02 |k| + 2.
   Together: < 2.02 * 2**13 + 14 < 2**15 units at w, before the factor 2**k.
5. Exponent. The factor 2**k only changes the exponent: the error becomes 2**15 * 2**(k - w) <= 2**-17 units at F (for
   k > 0 because w = F + 32 + k). The last cut to F bits adds < 1. Together: < 1.01.

**log.** Claim: log(z) is off by at most 2 units at F, and exactly 0 at z = 1. Proof: let z = 2**k * y with y in
[1/2, 1). Then log z = k ln 2 + 2 atanh(t) with t = (y - 1)/(y + 1) in [-1/3, 0]. In units at w, t is off by < 1 and
t**2 by < 2. Each power in the series of atanh is off by e_i <= e_{i-1}/9 + 2/3 + 1 < 2, each quotient by < 3. The
series has at most w/3 + 2 terms and a tail < 1. Twice its error and 1.01 |k| <= 34 add up to < 2 w + 60 < 2**14,
which is 2**-18 units at F. The last cut adds < 1.

**tanh** and its derivative 1 - tanh**2, for x = z / c. By symmetry let x >= 0, and let e = exp(-2x). The quotient 2x
is off by < 1 unit at w, so e is off by <= 3. tanh = (1 - e)/(1 + e) has a slope <= 2 in e, so it is off by <= 7.
1 - tanh**2 = 4e/(1 + e)**2 has a slope <= 4, so it is off by <= 13. Both are units at w.

The methods follow R. P. Brent and P. Zimmermann, Modern Computer Arithmetic, chapter 4,
https://members.loria.fr/PZimmermann/mca/pub226.html.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from ringspec.errors import OptionError

GUARD = 32
EXP_ERROR = 2  # units at F
LOG_ERROR = 2
TANH_ERROR = 7  # units at w
SLOPE_ERROR = 13
MOST_BITS = 5600
MOST_DOUBLINGS = 1 << 13


@dataclass(frozen=True)
class ExpTables:
    """The constants of exp with ``bits`` bits.

    ``ln2``; ``coarse``: exp(a/2**8); ``fine``: exp(b/2**16); ``inverse_factorials``: 1/i!, the largest i first.
    """

    bits: int
    ln2: int
    coarse: tuple[int, ...]
    fine: tuple[int, ...]
    inverse_factorials: tuple[int, ...]


@functools.lru_cache(maxsize=32)
def ln2(bits: int) -> int:
    """Compute ln 2 = 2 atanh(1/3), off by less than 1.01 units.

    >>> ln2(8) / 2**8
    0.69140625
    """
    power = (2 << (bits + 64)) // 3
    total, n = 0, 1
    while power:
        total += power // n
        power //= 9
        n += 2
    return total >> 64


def powers_of_exp(log2_step: int, count: int, bits: int) -> tuple[int, ...]:
    """Compute exp(n * 2**-log2_step) for n < count, each off by less than 1.01 units."""
    work = bits + 64
    term = step = one = 1 << work
    n = 1
    while term:
        term = (term >> log2_step) // n
        step += term
        n += 1
    values = [one]
    for _ in range(count - 1):
        values.append((values[-1] * step) >> work)
    return tuple(value >> 64 for value in values)


@functools.lru_cache(maxsize=32)
def exp_tables(bits: int) -> ExpTables:
    factorials, size = [1], 0
    # The tail after n terms is below 2 * 2**(-16 n) / n!.
    while size < bits + 2:
        n = len(factorials)
        factorials.append(factorials[-1] * n)
        size = 16 * n + factorials[-1].bit_length() - 1
    one = 1 << bits
    return ExpTables(
        bits,
        ln2(bits),
        powers_of_exp(8, 178, bits),
        powers_of_exp(16, 256, bits),
        tuple(one // f for f in reversed(factorials)),
    )


def exp(values: Iterable[int], bits: int, out_bits: int) -> list[int]:
    """Compute e**(x * 2**-bits) for each integer x, in units of 2**-out_bits, off by at most EXP_ERROR.

    >>> [value / 2**64 for value in exp([0, -1, 1], 0, 64)]
    [1.0, 0.36787944117144233, 2.718281828459045]
    """
    values = list(values)
    if out_bits > MOST_BITS:
        raise OptionError(f"at most {MOST_BITS} bits", str(out_bits), "request fewer bits")
    lowest = -(out_bits + 8) << bits
    doublings = max(0, (3 * max(values, default=0) >> (bits + 1)) + 1)  # x / ln 2 < 3 x / 2
    if doublings > MOST_DOUBLINGS:
        raise OptionError(
            f"exponents below {MOST_DOUBLINGS // 2}",
            f"an exponent of about 2**{doublings.bit_length()}",
            "give an lse that is closer to the scores",
        )
    tables = exp_tables(out_bits + GUARD + doublings)
    work, ln_2 = tables.bits, tables.ln2
    coarse, fine, inverse = tables.coarse, tables.fine, tables.inverse_factorials
    up, down = max(0, work - bits), max(0, bits - work)
    below_fine, below_coarse = work - 16, work - 8
    mask = (1 << below_fine) - 1
    last = 2 * work + work - out_bits
    result = []
    for x in values:
        if x == 0:
            result.append(1 << out_bits)
            continue
        if x < lowest:
            result.append(0)
            continue
        k, r = divmod((x << up) >> down, ln_2)
        f = r & mask
        series = 0
        for coefficient in inverse:
            series = ((series * f) >> work) + coefficient
        table = coarse[r >> below_coarse] * fine[(r >> below_fine) & 255]
        # One cut instead of several: the error is smaller than the bound of step 4 allows.
        result.append((table * series) >> (last - k))
    return result


def log(values: Iterable[int], bits: int) -> list[int]:
    """Compute the natural logarithm of each z * 2**-bits, in units of 2**-bits, off by at most LOG_ERROR.

    Each z is an integer with 1/2 <= z * 2**-bits < 2**31.

    >>> log([1 << 64, 3 << 64], 64)[0], log([3 << 64], 64)[0] / 2**64
    (0, 1.0986122886681098)
    """
    work = bits + GUARD
    one = 1 << work
    ln_2 = ln2(work)
    result = []
    for z in values:
        k = z.bit_length() - bits
        # For a power of two use y = 1 rather than 1/2, so that log 1 is exactly 0.
        if z == 1 << (bits + k - 1):
            k -= 1
        y = (z << GUARD) >> k if k >= 0 else (z << GUARD) << -k
        t = ((y - one) << work) // (y + one)
        square = (t * t) >> work
        total, power, n = 0, t, 1
        while power not in (0, -1):
            total += power // n
            power = (power * square) >> work
            n += 2
        result.append((k * ln_2 + 2 * total) >> GUARD)
    return result


@dataclass(frozen=True)
class Capped:
    """t = tanh(z / c) and 1 - t**2 of many z, in units of 2**-bits."""

    t: list[int]
    slope: list[int]
    bits: int


def tanh(values: list[int], value_bits: int, cap: int, cap_bits: int, bits: int) -> Capped:
    """Compute the hyperbolic tangent t of z / c for each z = value * 2**-value_bits, and 1 - t**2.

    c = cap * 2**-cap_bits > 0. t is off by at most TANH_ERROR units of 2**-bits, and 1 - t**2 by at most SLOPE_ERROR
    units. At z = 0 they are exactly 0 and 1.

    >>> capped = tanh([1, -2], 0, 2, 0, 64)
    >>> [t / 2**64 for t in capped.t]
    [0.46211715726000974, -0.7615941559557649]
    """
    one = 1 << bits
    up = bits + cap_bits - value_bits + 1
    numerator, denominator = (up, 0) if up >= 0 else (0, -up)
    twice = [-((abs(z) << numerator) // (cap << denominator)) for z in values]
    t, slope = [], []
    for z, e in zip(values, exp(twice, bits, bits), strict=True):
        size = ((one - e) << bits) // (one + e)
        t.append(size if z >= 0 else -size)
        slope.append((e << (2 * bits + 2)) // (one + e) ** 2)
    return Capped(t, slope, bits)
