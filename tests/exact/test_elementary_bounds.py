"""The claimed error bounds of exp, log and tanh hold, and a wrong digit inside them is seen.

The true values are mpmath's, at more than twice the digits. `error_of_` returns the largest error
in units of the claim, so 1 is the border.
"""

from dataclasses import replace

import mpmath
import numpy as np
import pytest

from ringspec.errors import OptionError
from ringspec.exact import elementary
from ringspec.exact.elementary import EXP_ERROR, LOG_ERROR, SLOPE_ERROR, TANH_ERROR, exp, log, tanh

every_precision = pytest.mark.parametrize("bits", (96, 256, 640))


def context(bits: int):
    mp = mpmath.MPContext()
    mp.prec = 2 * bits + 400
    return mp


def integers(bits: int, number: int, seed: int) -> list[int]:
    """Random integers of up to `bits` bits, of all sizes and both signs."""
    rng = np.random.default_rng(seed)
    words = [int.from_bytes(rng.bytes(bits // 8 + 1), "little") for _ in range(number)]
    lengths = rng.integers(0, bits + 1, number).tolist()
    signs = rng.choice((-1, 1), number).tolist()
    return [s * (w & ((1 << n) - 1)) for s, w, n in zip(signs, words, lengths, strict=True)]


def worst(got: list[int], want: list, bits: int, claim: int) -> float:
    return max(float(abs(x - y * 2**bits) / claim) for x, y in zip(got, want, strict=True))


def exponents(bits: int) -> list[int]:
    """x in units of 2**-bits: all sizes from 2**-bits to 100, multiples of ln 2, the lowest ones."""
    mp = context(bits)
    values = integers(bits, 100, 1) + [-abs(x) << 5 for x in integers(bits, 100, 2)]
    values += [int(mp.floor(k * mp.ln2 * 2**bits)) + e for k in (-60, -2, -1, 1, 2) for e in (0, 1)]
    values += [n << (bits - 8) for n in range(-180, 180, 7)] + [-1, 0, 1]
    values += [-(bits + 8) << bits, (-(bits + 8) << bits) - 1, -(bits << bits), 70 << bits]
    return values


def error_of_exp(bits: int) -> float:
    """Numbers above 0 are a list of their own: exp works with more digits for a list that has one."""
    mp, values, largest = context(bits), exponents(bits), 0.0
    for part in ([x for x in values if x <= 0], [x for x in values if x > 0]):
        want = [mp.exp(mp.mpf(x) / 2**bits) for x in part]
        largest = max(largest, worst(exp(part, bits, bits), want, bits, EXP_ERROR))
    return largest


def error_of_exp_of_short_numbers(bits: int) -> float:
    """The argument has fewer, or more, bits than the result."""
    mp, largest = context(bits), 0.0
    for value_bits in (0, 3, 40, 2 * bits + 5):
        values = [x >> max(0, bits - value_bits) for x in integers(bits, 60, 3)]
        values = [min(x, 0) for x in values]
        want = [mp.exp(mp.mpf(x) / 2**value_bits) for x in values]
        largest = max(largest, worst(exp(values, value_bits, bits), want, bits, EXP_ERROR))
    return largest


def error_of_log(bits: int) -> float:
    mp = context(bits)
    values = [max(abs(x), 1 << (bits - 1)) for x in integers(bits + 30, 200, 4)]
    one = 1 << bits
    values += [one - 1, one, one + 1, one // 2, 2 * one, 2 * one - 1, 3 * one, (one << 31) - 1]
    want = [mp.log(mp.mpf(x) / 2**bits) for x in values]
    return worst(log(values, bits), want, bits, LOG_ERROR)


def errors_of_tanh(bits: int) -> tuple[float, float]:
    mp, largest = context(bits), [0.0, 0.0]
    for value_bits, cap, cap_bits in ((bits, 1, 0), (20, 5, 1), (40, 1, 20), (3, 1 << 40, 0)):
        values = integers(value_bits + 6, 100, 5) + [0, 1, -1, 1000 << value_bits]
        got = tanh(values, value_bits, cap, cap_bits, bits)
        x = [mp.mpf(z) / 2**value_bits * 2**cap_bits / cap for z in values]
        t = worst(got.t, [mp.tanh(y) for y in x], bits, TANH_ERROR)
        slope = worst(got.slope, [1 / mp.cosh(y) ** 2 for y in x], bits, SLOPE_ERROR)
        largest = [max(largest[0], t), max(largest[1], slope)]
    return tuple(largest)


@every_precision
def test_exp_is_within_its_bound(bits):
    assert error_of_exp(bits) <= 1
    assert error_of_exp_of_short_numbers(bits) <= 1


@every_precision
def test_log_is_within_its_bound(bits):
    assert error_of_log(bits) <= 1


@every_precision
def test_tanh_and_its_slope_are_within_their_bounds(bits):
    t, slope = errors_of_tanh(bits)
    assert t <= 1 and slope <= 1


def test_exp_far_above_zero_is_within_the_same_absolute_bound():
    mp = context(6000)
    values = [400 << 20, (2000 << 20) + 12345, 2500 << 20]
    want = [mp.exp(mp.mpf(x) / 2**20) for x in values]
    assert worst(exp(values, 20, 96), want, 96, EXP_ERROR) <= 1


def test_values_at_zero_and_one_are_exact():
    for bits in (96, 256):
        one = 1 << bits
        assert exp([0], 7, bits) == [one] and log([one], bits) == [0]
        capped = tanh([0], 5, 3, 1, bits)
        assert capped.t == [0] and capped.slope == [one]
        assert tanh([9], 0, 2, 0, bits).t == [-x for x in tanh([-9], 0, 2, 0, bits).t]


def test_ln_2_is_within_its_bound():
    for bits in (8, 96, 256, 1408):
        assert worst([elementary.ln2(bits)], [context(bits).ln2], bits, 1) <= 1.01


@pytest.mark.parametrize("bits", (96, 1408))
def test_tables_are_within_their_bound(bits):
    mp, tables = context(bits), elementary.exp_tables(bits)
    for shift, table in ((8, tables.coarse), (16, tables.fine)):
        want = [mp.exp(mp.mpf(n) / 2**shift) for n in range(len(table))]
        assert worst(list(table), want, bits, 1) <= 1.01
    assert (len(tables.coarse) - 1) / 2**8 <= np.log(2) < len(tables.coarse) / 2**8


def test_what_is_beyond_the_proof_is_refused():
    with pytest.raises(OptionError):
        exp([1 << 20], 0, 96)
    with pytest.raises(OptionError):
        exp([0], 0, 5601)


# A bound that is broken is seen -------------------------------------------------------------------

WRONG = {
    "an entry of a table": lambda t: replace(t, coarse=off(t.coarse, 100, 40)),
    "an entry of the fine table": lambda t: replace(t, fine=off(t.fine, 17, 40)),
    "ln 2": lambda t: replace(t, ln2=t.ln2 + (1 << 36)),
    "a coefficient": lambda t: replace(t, inverse_factorials=off(t.inverse_factorials, -3, 70)),
    "terms too few": lambda t: replace(t, inverse_factorials=t.inverse_factorials[4:]),
}


def off(values: tuple[int, ...], index: int, log2: int) -> tuple[int, ...]:
    changed = list(values)
    changed[index] += 1 << log2
    return tuple(changed)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_constant_of_exp_breaks_its_bound(name, monkeypatch):
    right = elementary.exp_tables
    monkeypatch.setattr(elementary, "exp_tables", lambda bits: WRONG[name](right(bits)))
    mp = context(96)
    values = [-n << 88 for n in range(178)]  # an arithmetic progression by the step of each table
    values += [(-n << 80) - (1 << 79) for n in range(256)]
    want = [mp.exp(mp.mpf(x) / 2**96) for x in values]
    assert worst(exp(values, 96, 96), want, 96, EXP_ERROR) > 1


@every_precision
def test_a_few_units_more_break_the_bounds(bits, monkeypatch):
    """The measured errors lie within one claim of the true values, so two claims more are seen."""
    for name, error_of, claim in (
        ("exp", error_of_exp, EXP_ERROR),
        ("log", error_of_log, LOG_ERROR),
    ):
        right = getattr(elementary, name)

        def shifted(*arguments, right=right, claim=claim):
            return [x + 2 * claim + 1 for x in right(*arguments)]

        monkeypatch.setitem(globals(), name, shifted)
        assert error_of(bits) > 1
        monkeypatch.undo()
