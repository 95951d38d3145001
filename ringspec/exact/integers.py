"""Numbers as integers times a power of two, and exact matrix products of them.

Every finite float64 is an integer times 2**-bits. Sums and products of such numbers have the same form, so everything
in this module is exact. In ``ringspec.exact``, only :mod:`~ringspec.exact.elementary` and divisions are inexact, and
their errors are stated.

Why :func:`matmul` is exact: the operands are cut into digits of 16 bits, the low digits in [0, 2**16), the top digit in
[-2**15, 2**15). A float64 matrix product of two digit matrices sums k <= 2**20 products of magnitude < 2**32. Every
partial sum is an integer of magnitude < 2**52 in any order of summation, so float64 represents it exactly, and also the
sum or difference of two partial sums. The result therefore does not depend on the order of summation, blocking, fused
multiply-add or the number of threads. At most 2**9 such matrix products are added in int64, where the sum has a
magnitude <= 2**61. Python integers are assembled from these sums.

A BLAS that computes float64 products in lower precision would break this argument. Each product is therefore checked:
the sums of its columns are computed again from the digits, in int64 modulo 2**64. A product that fails the check is
computed again in int64, which is always exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import RingspecError, ShapeError

Units = NDArray[np.object_]
Array = NDArray[np.float64]
Digits = NDArray[np.uint16]

DIGIT_BITS = 16
MOST_TERMS = 1 << 20
MOST_DIGITS = 1 << 9


@dataclass(frozen=True)
class Fixed:
    """The numbers ``units * 2**-bits``; ``units`` is an object array of Python integers, bits >= 0."""

    units: Units
    bits: int

    def __getitem__(self, index: Any) -> Fixed:
        return Fixed(self.units[index], self.bits)


def fixed(x: Array) -> Fixed:
    """Convert finite float64 numbers to integers, exactly; the whole array shares the smallest possible ``bits``.

    Raises RingspecError ('arithmetic-mode') if this process treats subnormal numbers as zero.

    >>> fixed(np.array([0.75, -3.0])).units.tolist(), fixed(np.array([0.75, -3.0])).bits
    ([3, -12], 2)
    """
    check_subnormals()
    fraction, exponent = np.frexp(np.asarray(x, dtype=np.float64))
    whole = np.ldexp(fraction, 53).astype(np.int64)
    lowest_bit = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    nonzero = whole != 0
    place = exponent.astype(np.int64) - 53 + lowest_bit  # exponent of each lowest set bit
    lowest = int(place[nonzero].min()) if nonzero.any() else 0
    bits = max(0, -lowest)
    odd = np.where(nonzero, whole >> np.where(nonzero, lowest_bit, 0), 0)
    up = np.where(nonzero, place + bits, 0)
    if int(up.max(initial=0)) + 53 <= 62:
        return Fixed((odd << up).astype(object), bits)
    shifted = [a << b for a, b in zip(odd.ravel().tolist(), up.ravel().tolist(), strict=True)]
    return Fixed(objects(shifted, odd.shape), bits)


def check_subnormals() -> None:
    """Raise RingspecError if a library has switched this process to treating subnormal numbers as zero."""
    if not (np.array([5e-324]) * np.array([1.0]) > 0).all():
        raise RingspecError(
            "float64 arithmetic with subnormal numbers",
            "a process that flushes them to zero",
            "find the library that sets this mode (often built with -ffast-math); do not load it",
            code="arithmetic-mode",
        )


def objects(values: list[int], shape: tuple[int, ...]) -> Units:
    """Return Python integers as an object array."""
    flat = np.empty(len(values), dtype=object)
    flat[:] = values
    return flat.reshape(shape)


def zeros(shape: tuple[int, ...]) -> Units:
    return np.full(shape, 0, dtype=object)


def where(condition: NDArray, chosen: Units | int, otherwise: Units | int) -> Units:
    """Do what numpy.where does, for Python integers."""
    return np.asarray(np.where(condition, chosen, otherwise), dtype=object)


def at_bits(x: Fixed, bits: int) -> Units:
    """Return x as integers in units of 2**-bits; ``bits`` is at least that of x."""
    return x.units if bits == x.bits else x.units << (bits - x.bits)


def digits_of(x: Units) -> Digits:
    """Return the 16-bit digits of x as uint16 [L, *x.shape], lowest first; the top digit must be read as int16."""
    largest = max(int(x.max(initial=0)).bit_length(), int(x.min(initial=0)).bit_length())
    count = largest // DIGIT_BITS + 1  # includes one bit for the sign
    width = 2 * count
    raw = b"".join([value.to_bytes(width, "little", signed=True) for value in x.ravel().tolist()])
    pairs = np.frombuffer(raw, dtype="<u2").reshape(*x.shape, count)
    return np.ascontiguousarray(np.moveaxis(pairs, -1, 0))


def transposed(digits: Digits) -> Digits:
    """Transpose a matrix given by its digits. Computing new digits would take a third of a product's time."""
    return np.swapaxes(digits, 1, 2)


def digit(digits: Digits, place: int) -> NDArray[np.int64]:
    """Return the digit number ``place`` of every element, as signed integers."""
    top = place == len(digits) - 1
    return (digits[place].view("<i2") if top else digits[place]).astype(np.int64)


def blas_product(a: Array, b: Array) -> Array:
    """Multiply by BLAS; this is the only product in ``ringspec.exact`` that uses float64 arithmetic."""
    return a @ b


def times(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the exact product of digit matrices [n, k] and [k, m], by BLAS if that is exact."""
    fast = blas_product(a.astype(np.float64), b.astype(np.float64)).astype(np.int64)
    if (fast.sum(axis=0) == a.sum(axis=0) @ b).all():
        return fast
    return np.asarray(a @ b)


def matmul(a: Units, b: Units) -> Units:
    """Return the exact product of integer matrices [n, k] and [k, m].

    >>> matmul(np.array([[2**70, -1]], object), np.array([[3], [2**70]], object)).item() == 2**71
    True
    """
    return multiply(digits_of(a), digits_of(b))


def multiply(left: Digits, right: Digits) -> Units:
    """Return the exact product of matrices given by their digits, [L, n, k] and [M, k, m]."""
    _, n, k = left.shape
    m = right.shape[2]
    if 0 in (n, k, m):
        return zeros((n, m))
    if k > MOST_TERMS or min(len(left), len(right)) > MOST_DIGITS:
        raise ShapeError(
            f"at most {MOST_TERMS} terms of at most {MOST_DIGITS * DIGIT_BITS} bits",
            f"{k} terms of {len(left) * DIGIT_BITS} and {len(right) * DIGIT_BITS} bits",
            "use fewer keys, or numbers with a smaller range of magnitudes",
        )
    sums = np.zeros((len(left) + len(right) - 1, n, m), dtype=np.int64)
    side_by_side = np.concatenate([digit(right, place) for place in range(len(right))], axis=1)
    for place in range(len(left)):
        row = digit(left, place)
        if not row.any():
            continue
        product = times(row, side_by_side).reshape(n, len(right), m)
        sums[place : place + len(right)] += np.moveaxis(product, 1, 0)
    return joined(sums)


def masked_sums(mask: NDArray[np.bool_], x: Units) -> Units:
    """Return, for each row of the mask [n, k], the exact sum of the rows of x [k, m] that it selects.

    >>> masked_sums(np.array([[True, False, True]]), np.array([[1], [2], [2**80]], object)).item()
    1208925819614629174706177
    """
    n, k = mask.shape
    if 0 in (n, k, x.shape[1]):
        return zeros((n, x.shape[1]))
    digits = digits_of(x)
    selects = mask.astype(np.int64)
    return joined(np.stack([times(selects, digit(digits, n)) for n in range(len(digits))]))


def joined(sums: NDArray[np.int64]) -> Units:
    """Return the sum over l of sums[l] * 2**(16 l) as Python integers; |sums| < 2**62."""
    count = len(sums) + 4  # the last carry has 62 bits
    digits = np.empty((*sums.shape[1:], count), dtype="<u2")
    carry = np.zeros(sums.shape[1:], dtype=np.int64)
    for place in range(count):
        total = carry + sums[place] if place < len(sums) else carry
        digits[..., place] = total & 0xFFFF
        carry = total >> DIGIT_BITS  # rounds down, so digits are never negative
    raw = digits.tobytes()
    width = 2 * count
    values = [
        int.from_bytes(raw[at : at + width], "little", signed=True)
        for at in range(0, len(raw), width)
    ]
    return objects(values, sums.shape[1:])
