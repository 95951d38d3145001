"""ringspec.exact.rounding against rational arithmetic on the bit layouts (oracle/round_exact.py)."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.decide import nearest, rounded, to_odd
from oracle.round_exact import LAYOUTS, floor_log2, largest

from ringspec.exact.rounding import Ball, leading, nearest_even, objects_of, round_ball
from ringspec.formats import format_of

NAMES = ("float64", "float32", "bfloat16", "float16")
BITS = 1500  # all numbers and midpoints of all formats are multiples of 2**-1500
every_format = pytest.mark.parametrize("name", NAMES)


def units(x: Fraction, bits: int = BITS) -> int:
    scaled = x * 2**bits
    assert scaled.denominator == 1
    return scaled.numerator


def ours(values: list[Fraction], name: str) -> list[float]:
    integers = objects_of(*(units(x) for x in values))
    return nearest_even(leading(integers, BITS), format_of(name)).tolist()


def same(got: float, want: float) -> bool:
    return got == want and bool(np.signbit(got)) == bool(np.signbit(want))


def wrong(values: list[Fraction], name: str) -> list[tuple]:
    """What is rounded otherwise than by the oracle: value, got, want."""
    pairs = zip(values, ours(values, name), strict=True)
    return [(x, got, nearest(x, name)) for x, got in pairs if not same(got, nearest(x, name))]


def spacing(name: str, exponent: int) -> Fraction:
    layout = LAYOUTS[name]
    return Fraction(2) ** (max(exponent, 1 - layout.bias) - layout.fraction_bits)


def around(x: Fraction, name: str) -> list[Fraction]:
    """x and what lies just beside it, at every distance at which a bit may get lost; and negated."""
    unit = spacing(name, floor_log2(x))
    beside = [unit / 2**n for n in (1, 2, 10, 11, 12, 30, 52, 60, 62, 63, 64, 65, 200, 400)]
    values = [x, *(x + d for d in beside), *(x - d for d in beside)]
    return values + [-y for y in values]


def hard_numbers(name: str) -> list[Fraction]:
    """Numbers and midpoints in every kind of binade, subnormal ones among them."""
    layout = LAYOUTS[name]
    least, top = 1 - layout.bias, floor_log2(largest(name))
    significands = (0, 1, 2, 3, 2**layout.fraction_bits - 2, 2**layout.fraction_bits - 1)
    numbers = []
    for exponent in (least, least + 1, -3, -1, 0, 1, 5, top - 1, top):
        unit = spacing(name, exponent)
        for n in significands:
            number = Fraction(2) ** exponent + n * unit
            numbers += [number, number + unit / 2]
    unit = spacing(name, least)
    return numbers + [n * unit / 2 for n in range(1, 12)]


@every_format
def test_numbers_midpoints_and_what_lies_just_beside_them_round_to_nearest_even(name):
    values = [y for x in hard_numbers(name) for y in around(x, name)]
    assert wrong(values, name) == []


@every_format
def test_half_of_the_least_subnormal_is_the_border_to_zero(name):
    layout = LAYOUTS[name]
    least = spacing(name, 1 - layout.bias)
    tiny = Fraction(1, 2**BITS)
    assert ours([least / 2, least / 2 + tiny, least / 2 - tiny], name) == [0.0, float(least), 0.0]
    assert ours([3 * least / 2, 3 * least / 2 - tiny], name) == [float(2 * least), float(least)]


@every_format
def test_the_midpoint_behind_the_greatest_number_is_the_border_to_infinity(name):
    top = largest(name)
    border = top + spacing(name, floor_log2(top)) / 2
    tiny = Fraction(1, 2**BITS)
    assert ours([border - tiny, border, border + tiny], name) == [float(top), np.inf, np.inf]
    assert ours([-border + tiny, -border], name) == [-float(top), -np.inf]
    assert ours([Fraction(2) ** 5000, -(Fraction(2) ** 1024)], name) == [np.inf, -np.inf]


@every_format
def test_every_zero_is_positive(name):
    values = [Fraction(0), Fraction(-1, 2**BITS), -spacing(name, -5000) / 2]
    assert [float(x).hex() for x in ours(values, name)] == ["0x0.0p+0"] * 3


PAIRS = [(wide, narrow) for wide in NAMES[:2] for narrow in NAMES[1:] if wide != narrow]


@pytest.mark.parametrize(("wide", "narrow"), PAIRS)
def test_a_value_is_not_rounded_through_a_wider_format(wide, narrow):
    """Just beside a midpoint of the narrow format, the wide one rounds onto the midpoint."""
    unit = spacing(narrow, 0)
    beyond = spacing(wide, 0) / 2**3
    for n in (0, 1, 2, 5):
        midpoint = 1 + n * unit + unit / 2
        for x in (midpoint + beyond, midpoint - beyond):
            assert wrong([x, -x], narrow) == []
        # The trap is real: one of the two goes wrong by way of the wide format.
        twice = [nearest(Fraction(nearest(x, wide)), narrow) for x in (x, midpoint + beyond)]
        assert twice != [nearest(x, narrow) for x in (x, midpoint + beyond)]


def test_the_known_trap_of_bfloat16():
    assert ours([1 + Fraction(1, 2**8) + Fraction(1, 2**40)], "bfloat16") == [1.0078125]


# A leading part of any length, then a long gap, then one bit more, somewhere in the exponent range.
numbers = st.builds(
    lambda sign, head, gap, tail, place: (
        sign * Fraction((head << gap) + tail) * Fraction(2) ** place
    ),
    st.sampled_from((1, -1)),
    st.integers(0, 2**70),
    st.integers(0, 120),
    st.integers(-1, 1),
    st.integers(-1200, 1000),
)


@given(st.lists(numbers, min_size=1, max_size=20))
def test_any_number_is_rounded_as_by_rational_arithmetic(values):
    for name in NAMES:
        assert wrong(values, name) == []


@given(numbers, st.integers(1, 70), st.integers(-1, 1))
def test_numbers_near_a_midpoint_of_a_format_are_rounded_as_by_rational_arithmetic(x, gap, tail):
    for name in NAMES:
        number = Fraction(min(abs(nearest(x, name)), float(largest(name))))
        unit = spacing(name, floor_log2(number) if number else -5000)
        value = number + unit / 2 + tail * unit / 2**gap
        assert wrong([value, -value], name) == []


@given(
    st.integers(-(2**80), 2**80),
    st.one_of(st.just(0), st.integers(0, 2**10), st.integers(0, 2**75)),
    st.integers(0, 1300),
)
def test_a_ball_is_decided_where_and_only_where_both_ends_round_alike(middle, radius, bits):
    rounded_to = round_ball(Ball(objects_of(middle), objects_of(radius), bits), NAMES)
    for name in NAMES:
        ends = [nearest(Fraction(x, 2**bits), name) for x in (middle - radius, middle + radius)]
        (got,), (decided,) = rounded_to[name].values.tolist(), rounded_to[name].decided.tolist()
        assert decided == (ends[0] == ends[1])
        assert same(got, ends[0]) if decided else np.isnan(got)


@every_format
def test_a_ball_that_touches_a_midpoint_is_undecided_unless_the_midpoint_rounds_alike(name):
    unit = spacing(name, 0)
    even, odd = units(1 + unit / 2), units(1 + 3 * unit / 2)  # ties that go down, and up
    middles = objects_of(even - 5, even + 5, odd - 5, odd + 5, even, odd)
    radii = objects_of(5, 5, 5, 5, 0, 0)
    result = round_ball(Ball(middles, radii, BITS), (name,))[name]
    assert result.decided.tolist() == [True, False, False, True, True, True]
    one, two = 1.0, float(1 + 2 * unit)
    assert result.values[result.decided].tolist() == [one, two, one, two]


@every_format
def test_a_ball_around_zero_is_decided_within_half_the_least_subnormal(name):
    half = units(spacing(name, -5000) / 2)
    middles, radii = objects_of(0, 0, -3, 0), objects_of(half, half + 1, 7, 2 * half)
    result = round_ball(Ball(middles, radii, BITS), (name,))[name]
    assert result.decided.tolist() == [True, False, True, False]
    assert not np.signbit(result.values[result.decided]).any()


@given(numbers)
def test_oracle_cutting_to_66_bits_with_a_sticky_one_rounds_like_the_whole_number(x):
    with mpmath.workprec(400):
        value = mpmath.mpf(x.numerator) / x.denominator  # the denominator is a power of two
        for name in NAMES:
            assert same(nearest(to_odd(value), name), nearest(x, name))


def test_oracle_takes_more_digits_and_then_the_tie():
    seen = []

    def number(digits, beside=0):
        seen.append(digits)
        context = mpmath.MPContext()
        context.dps = digits
        radius = context.mpf(10) ** (9 - digits)
        return 1 + context.mpf(2) ** -8 + beside * context.mpf(10) ** -600, radius

    assert rounded(number, "bfloat16") == 1.0 and seen == [500, 1100]
    assert rounded(lambda digits: number(digits, 1), "bfloat16") == 1.0078125
