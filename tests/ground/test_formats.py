"""Rounding, storage and bit patterns against rational arithmetic (oracle/round_exact.py)."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.round_exact import LAYOUTS, decode, floor_log2, largest, round_exact
from refusals import refuses

from ringspec.errors import DtypeError, OptionError
from ringspec.formats import bits, format_of, load, name_of, round_to, store, unit_roundoff

NAMES = tuple(LAYOUTS)
NARROW = tuple(name for name in NAMES if name not in ("float64", "float32"))


def same(got: float, want: float) -> bool:
    """Equal as numbers with sign of zero, or both NaN."""
    if np.isnan(want):
        return bool(np.isnan(got))
    return got == want and bool(np.signbit(got) == np.signbit(want))


def disagreements(values, name: str) -> list[tuple[str, float, float]]:
    """The inputs (as hex) that round_to and the rational rounding round differently."""
    array = np.array(values, dtype=np.float64)
    got = round_to(array, name)
    assert got.dtype == np.float64 and got.shape == array.shape
    return [
        (float(x).hex(), float(y), round_exact(float(x), name))
        for x, y in zip(array, got, strict=True)
        if not same(float(y), round_exact(float(x), name))
    ]


def around(x: Fraction) -> list[float]:
    """The float64 nearest to x, its two neighbours, and all of them negated."""
    value = float(x)
    near = [float(np.nextafter(value, -np.inf)), value, float(np.nextafter(value, np.inf))]
    return near + [-y for y in near]


def finite_patterns(name: str) -> list[int]:
    width = LAYOUTS[name].width
    return [n for n in range(2**width) if not np.isnan(decode(n, name))]


def hard_values(name: str) -> list[float]:
    """Numbers of the format, midpoints between them and neighbours, in every kind of binade."""
    layout = LAYOUTS[name]
    least = 1 - layout.bias
    top = floor_log2(largest(name))
    values: list[float] = [0.0, -0.0, float("inf"), -float("inf"), float("nan")]
    for exponent in (least, least + 1, -2, -1, 0, 1, 3, top - 1, top):
        for significand in (0, 1, 2, 3, 2**layout.fraction_bits - 2, 2**layout.fraction_bits - 1):
            spacing = Fraction(2) ** (exponent - layout.fraction_bits)
            number = Fraction(2) ** exponent + significand * spacing
            values += around(number) + around(number + spacing / 2) + around(number + spacing / 4)
    return values


@pytest.mark.rule("NUM-1")
@pytest.mark.parametrize("name", NARROW)
def test_numbers_midpoints_and_their_neighbours_round_to_nearest_even(name):
    assert disagreements(hard_values(name), name) == []


@pytest.mark.parametrize("name", NARROW)
def test_subnormals_round_on_the_fixed_grid_of_the_least_exponent(name):
    layout = LAYOUTS[name]
    spacing = Fraction(2) ** (1 - layout.bias - layout.fraction_bits)
    values: list[float] = []
    for number in (0, 1, 2, 3, 2**layout.fraction_bits - 1, 2**layout.fraction_bits):
        for part in (Fraction(0), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)):
            values += around((number + part) * spacing)
    values += [5e-324, -5e-324, float(np.finfo(np.float64).tiny)]
    assert disagreements(values, name) == []


@pytest.mark.parametrize("name", NARROW)
def test_overflow_begins_at_half_a_step_above_the_largest_number(name):
    top = largest(name)
    step = Fraction(2) ** (floor_log2(top) - LAYOUTS[name].fraction_bits)
    values = around(top) + around(top + step / 4) + around(top + step / 2) + around(top + step)
    values += [1e300, -1e300, float(np.finfo(np.float64).max)]
    assert disagreements(values, name) == []


@pytest.mark.parametrize("name", NAMES)
def test_rounding_gives_no_floating_point_warning(name):
    """Overflow and underflow are results here, whatever the caller does with NumPy's warnings."""
    values = np.array(hard_values("float16") + [1e300, float(np.finfo(np.float64).max), 5e-324])
    with np.errstate(all="raise"):
        round_to(values, name)
        store(values, name)


@pytest.mark.rule("NUM-1")
@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("bfloat16", 1 + 2.0**-8 + 2.0**-40, 1.0078125),
        ("bfloat16", 1 + 2.0**-8 - 2.0**-40, 1.0),
        ("bfloat16", 1 + 3 * 2.0**-8 - 2.0**-40, 1.0078125),
        ("float16", 1 + 2.0**-11 + 2.0**-50, 1 + 2.0**-10),
        ("float8_e4m3fn", 1 + 2.0**-4 + 2.0**-30, 1.125),
        ("float8_e5m2", 1 + 2.0**-3 + 2.0**-30, 1.25),
        ("float8_e5m2", 2.0**-17 + 2.0**-60, 2.0**-16),
        ("float8_e4m3fn", 464.0, 448.0),
        ("float8_e4m3fn", 464.0 + 2.0**-40, np.nan),
        ("float8_e5m2", 61440.0 - 2.0**-30, 57344.0),
        ("float8_e5m2", -61440.0, -np.inf),
        ("float16", 65520.0, np.inf),
        ("float16", -65519.99999999999, -65504.0),
        ("float8_e4m3fn", -np.inf, np.nan),
        ("float8_e5m2", -np.inf, -np.inf),
    ],
)
def test_values_that_rounding_twice_or_past_the_range_gets_wrong(name, x, want):
    assert same(float(round_to(np.array(x), name)), want)
    assert same(float(store(np.array(x), name).astype(np.float64)), want)


@pytest.mark.parametrize("name", ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"))
def test_every_bit_pattern_round_trips_through_its_value(name):
    patterns = finite_patterns(name)
    values = np.array([decode(n, name) for n in patterns])
    unsigned = np.uint16 if LAYOUTS[name].width == 16 else np.uint8
    stored = store(values, name)
    assert bits(stored).dtype == unsigned
    assert np.array_equal(bits(stored), np.array(patterns, dtype=unsigned))
    assert np.array_equal(stored.astype(np.float64), values)
    assert np.array_equal(round_to(values, name), values)
    assert np.array_equal(np.signbit(round_to(values, name)), np.signbit(values))


@pytest.mark.parametrize("name", ("float8_e4m3fn", "float8_e5m2"))
def test_eight_bit_rounding_is_the_nearest_of_all_patterns(name):
    """A search over all numbers, independent of any exponent arithmetic; a tie takes the even one."""
    finite = [n for n in finite_patterns(name) if n < 128 and np.isfinite(decode(n, name))]
    numbers = np.array([decode(n, name) for n in finite])
    generator = np.random.default_rng(8)
    draws = np.exp(generator.uniform(np.log(2.0**-20), np.log(numbers[-1]), 2000))
    middles = (numbers[1:] + numbers[:-1]) / 2
    for x in np.concatenate([draws, middles]):
        distance = np.abs(numbers - x)
        nearest = np.flatnonzero(distance == distance.min())
        want = numbers[nearest[0]] if len(nearest) == 1 else numbers[nearest[nearest % 2 == 0][0]]
        assert float(round_to(x, name)) == want, float(x).hex()


@pytest.mark.parametrize("name", NARROW)
@given(x=st.floats(allow_nan=True, allow_infinity=True))
def test_any_float64_rounds_as_rational_arithmetic_says(name, x):
    assert disagreements([x], name) == []


@pytest.mark.parametrize("name", NARROW)
@given(
    significand=st.integers(2**52, 2**53 - 1),
    exponent=st.integers(-12, 12),
    place=st.integers(0, 2),
)
def test_a_float64_within_range_rounds_as_rational_arithmetic_says(
    name, significand, exponent, place
):
    """Numbers near 1, most of them within a few units of 2^-52 of a midpoint of the format."""
    cut = 53 - LAYOUTS[name].precision
    if place:
        low = significand & 0b111
        half = 1 << (cut - 1)
        significand = (significand >> cut << cut) + (half + low - 4 if place == 1 else low)
    assert disagreements([significand * 2.0 ** (exponent - 52)], name) == []


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=20))
def test_float32_rounds_as_numpy_and_as_rational_arithmetic(values):
    array = np.array(values, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore"):
        want = array.astype(np.float32).astype(np.float64)
    assert np.array_equal(round_to(array, "float32"), want)
    assert np.array_equal(np.signbit(round_to(array, "float32")), np.signbit(want))
    assert disagreements(values, "float32") == []


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=20))
def test_float64_is_left_as_it_is(values):
    array = np.array(values, dtype=np.float64)
    assert np.array_equal(bits(round_to(array, "float64")), bits(array))


@pytest.mark.parametrize("name", NAMES)
def test_rounding_twice_changes_nothing_more(name):
    once = round_to(np.array(hard_values("float16") + hard_values("bfloat16")), name)
    twice = round_to(once, name)
    assert np.array_equal(once, twice, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_argument_is_not_written_to(name):
    values = np.array([1 + 2.0**-30, -3.3, 1e39, 0.0])
    before = values.copy()
    round_to(values, name)
    store(values, name)
    assert np.array_equal(values, before)


@pytest.mark.parametrize("name", NAMES)
def test_unit_roundoff_is_two_to_the_minus_precision(name):
    u = unit_roundoff(name)
    assert u == float(Fraction(1, 2) ** LAYOUTS[name].precision)
    just_above = float(np.nextafter(1 + u, 2.0))
    if name != "float64":  # the float64 after 1 + u lies between 1 + u and 1 + 2u
        assert float(round_to(1 + u, name)) == 1.0
        assert float(round_to(just_above, name)) == 1 + 2 * u


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_unsigned_integers_of_the_storage_width(name):
    layout = LAYOUTS[name]
    stored = store(np.array([[1.0, -0.0], [0.0, -1.0]]), name)
    pattern = bits(stored)
    one = layout.bias << layout.fraction_bits
    sign = 1 << (layout.width - 1)
    assert stored.shape == pattern.shape == (2, 2)
    assert pattern.dtype == np.dtype(f"uint{layout.width}")
    assert [int(n) for n in pattern.ravel()] == [one, sign, 0, sign | one]


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_kept(name):
    for shape in ((), (0,), (3, 1, 2)):
        assert round_to(np.zeros(shape), name).shape == shape
        assert store(np.zeros(shape), name).shape == shape


@pytest.mark.parametrize("name", NARROW)
def test_infinities_and_nan_have_their_own_values(name):
    got = round_to(np.array([np.inf, -np.inf, np.nan]), name)
    if LAYOUTS[name].ieee:
        assert got[0] == np.inf and got[1] == -np.inf and np.isnan(got[2])
    else:
        assert np.isnan(got).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_formats_agrees_with_the_bit_layouts(name):
    layout, entry = LAYOUTS[name], format_of(name)
    assert entry.name == name
    assert entry.precision == layout.precision
    assert entry.min_exponent == 1 - layout.bias
    assert Fraction(entry.largest) == largest(name)
    assert entry.has_infinity == layout.ieee
    assert entry.smallest_subnormal == decode(1, name)
    assert entry.dtype.itemsize * 8 == layout.width
    assert name_of(entry.dtype) == name


@pytest.mark.parametrize("name", NAMES)
def test_loading_a_stored_array_is_exact(name):
    values = round_to(np.array(hard_values(name if name in NARROW else "float16")), name)
    loaded = load(store(values, name))
    assert loaded.dtype == np.float64
    assert np.array_equal(loaded, values, equal_nan=True)


@pytest.mark.parametrize("dtype", (np.int32, np.uint8, np.bool_, object, "U3", np.complex128))
def test_loading_another_dtype_is_refused_by_name(dtype):
    assert name_of(np.dtype(dtype)) is None
    with pytest.raises(DtypeError) as refusal:
        load(np.zeros(2, dtype=dtype), "q")
    assert "q" in str(refusal.value) and str(np.dtype(dtype)) in str(refusal.value)


def test_an_unknown_format_is_refused_with_the_nearest_name():
    for function in (unit_roundoff, format_of):
        with refuses((OptionError, "unknown-name"), match="bfloat16"):
            function("bfloat61")
    with refuses((OptionError, "unknown-name"), match="float16"):
        round_to(np.zeros(1), "floot16")
