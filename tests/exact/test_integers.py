"""Exact numbers and exact products: against fractions and Python's own integers."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from ringspec.errors import RingspecError, ShapeError
from ringspec.exact import integers
from ringspec.exact.integers import Fixed, at_bits, fixed, masked_sums, matmul

finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=1, max_size=6))
def test_fixed_holds_every_float64_exactly(numbers):
    x = fixed(np.array(numbers))
    assert [Fraction(units, 1 << x.bits) for units in x.units] == [Fraction(n) for n in numbers]


@given(st.lists(finite, min_size=1, max_size=4), st.integers(0, 80))
def test_a_finer_exponent_changes_no_number(numbers, more):
    x = fixed(np.array(numbers))
    finer = Fixed(at_bits(x, x.bits + more), x.bits + more)
    assert [Fraction(u, 1 << finer.bits) for u in finer.units] == [Fraction(n) for n in numbers]


def random_integers(generator, shape, bits):
    """Integers of up to that many bits, some 0 and some at the ends of the range."""
    flat = [
        int.from_bytes(generator.bytes(bits // 8 + 1), "little") % (1 << bits)
        for _ in range(np.prod(shape))
    ]
    flat = [(0, n, -n, (1 << bits) - 1, -(1 << bits))[generator.integers(5)] for n in flat]
    return integers.objects(flat, shape)


SIZES = list(
    itertools.product([(1, 1, 1), (3, 7, 2), (5, 64, 3)], [1, 15, 16, 17, 47, 300], [8, 31, 64])
)


@pytest.mark.parametrize(("shape", "left", "right"), SIZES)
def test_a_product_equals_that_of_python_integers(shape, left, right):
    n, k, m = shape
    generator = np.random.default_rng(n * 1000 + left * 10 + right)
    a, b = random_integers(generator, (n, k), left), random_integers(generator, (k, m), right)
    assert (matmul(a, b) == a.dot(b)).all()


WRONG_PRODUCTS = {
    "rounded to float32": lambda x: x.astype(np.float32).astype(np.float64),
    "of 48 bits": lambda x: np.where(abs(x) < 2.0**48, x, np.round(x / 32) * 32),
    "off by one in one element": lambda x: x + (np.arange(x.size).reshape(x.shape) == x.size // 2),
}


@pytest.mark.parametrize("wrong", WRONG_PRODUCTS)
def test_a_blas_that_rounds_is_noticed_and_changes_no_bit(monkeypatch, wrong):
    generator = np.random.default_rng(3)
    a, b = random_integers(generator, (20, 200), 270), random_integers(generator, (200, 9), 60)
    mask = generator.random((20, 200)) < 0.5
    want = a.dot(b), mask.astype(object).dot(b)
    used = []

    def blas(x, y):
        used.append(x.shape)
        return WRONG_PRODUCTS[wrong](x @ y)

    monkeypatch.setattr(integers, "blas_product", blas)
    assert (matmul(a, b) == want[0]).all()
    assert (masked_sums(mask, b) == want[1]).all()
    assert used


def test_a_process_that_flushes_subnormal_numbers_is_refused(monkeypatch):
    class Flushing(np.ndarray):
        def __gt__(self, other):
            return np.zeros(self.shape, dtype=bool)

    array = np.array
    monkeypatch.setattr(np, "array", lambda x: array(x).view(Flushing))
    with refuses((RingspecError, "arithmetic-mode"), match="subnormal"):
        integers.check_subnormals()


def test_masked_sums_equal_the_product_with_zeros_and_ones():
    generator = np.random.default_rng(4)
    x = random_integers(generator, (50, 4), 290)
    mask = generator.random((7, 50)) < 0.3
    mask[2] = False
    assert (masked_sums(mask, x) == mask.astype(object).dot(x)).all()


def test_the_largest_sums_that_the_argument_allows_are_exact():
    k = 4096
    a = integers.objects([(1 << 300) - 1] * k, (1, k))
    b = integers.objects([-(1 << 300)] * k, (k, 1))
    assert matmul(a, b).item() == -k * ((1 << 300) - 1) << 300


def test_more_digits_than_the_argument_allows_are_refused():
    huge = integers.objects([1 << 9000], (1, 1))
    with pytest.raises(ShapeError, match="terms"):
        matmul(huge, huge)


@pytest.mark.parametrize(("n", "k", "m"), [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_empty_operands_give_zeros(n, k, m):
    assert matmul(integers.zeros((n, k)), integers.zeros((k, m))).tolist() == [[0] * m] * n
