"""``ringspec.merges.certain``: elements that it certifies have the same bits with any functions of the stated accuracy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from merges.partials import Case
from merges.torch_side import one_thread, torch_functions

from ringspec.errors import OptionError
from ringspec.formats import store
from ringspec.merges import MERGES, NUMPY, Functions, Part, certain, merge
from ringspec.merges.enclosures import within
from ringspec.merges.intervals import Interval, same_bits
from ringspec.merges.merge import evaluate

ULPS = 4
DOUBLE = {
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "exp2": np.exp2,
    "log2": np.log2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "logsigmoid": lambda x: np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x))),
}


def in_double(name: str):
    return lambda x: DOUBLE[name](x.astype(np.float64)).astype(np.float32)


def perturbed(seed: int, ulps: int = ULPS) -> Functions:
    """Functions that miss the rounded result by up to ``ulps`` ulp; odd seeds compose sigmoid and logsigmoid of them."""
    random = np.random.default_rng(seed)

    def of(name: str):
        def function(x):
            right = in_double(name)(x)
            offset = random.choice([-ulps, ulps, 0, random.integers(-ulps, ulps + 1)], x.shape)
            unit = np.spacing(np.minimum(np.abs(right), np.float32(1e38))).astype(np.float64)
            found = (right + offset * unit).astype(np.float32)
            found = np.where(np.sign(found) * np.sign(right) < 0, np.float32(0), found)
            small = (np.abs(right) < np.finfo(np.float32).tiny) & (random.random(x.shape) < 0.5)
            found = np.where(small, np.float32(0), found)
            exact = ~np.isfinite(x) | ~np.isfinite(right)
            exact |= x == (1 if name in ("log", "log2") else 0) if name != "logsigmoid" else False
            if name == "logsigmoid":
                found = np.minimum(found, 0)
            elif name in ("exp", "exp2", "sigmoid"):
                found = np.maximum(found, 0)
            return np.where(exact, right, found).astype(np.float32)

        return function

    given = {name: of(name) for name in DOUBLE}
    if seed % 2:
        one, exp, log1p = np.float32(1), given["exp"], given["log1p"]
        given["sigmoid"] = lambda x: one / (one + exp(-x))
        given["logsigmoid"] = lambda x: np.minimum(x, np.float32(0)) - log1p(exp(-np.abs(x)))
    given["divide"] = quotient(random, ulps)
    return Functions(name=f"perturbed {seed}", **given)


def quotient(random: np.random.Generator, ulps: int):
    """A division that misses by up to ``ulps`` ulp, as a GPU's does, except by a power of two."""

    def divide(a, b):
        right = np.divide(a, b)
        unit = np.spacing(np.minimum(np.abs(right), np.float32(1e38))).astype(np.float64)
        found = (right + random.integers(-ulps, ulps + 1, right.shape) * unit).astype(np.float32)
        exact = (np.abs(np.frexp(b)[0]) == 0.5) | (right == 0) | ~np.isfinite(right)
        return np.where(exact, right, found).astype(np.float32)

    return divide


SETS = [NUMPY, Functions(name="double", **{name: in_double(name) for name in DOUBLE})]
SETS += [perturbed(seed) for seed in range(4)]


def problems(name: str) -> list[list[Part]]:
    """Parts that a recipe accepts: large lse, spreads, empty rows with each mark, rows of the second half, sums."""
    form, found = MERGES[name].form, []
    settings = [
        (2, "float32", 3.0),
        (2, "bfloat16", 1000.0),
        (4, "float32", 1000.0),
        (4, "bfloat16", 3.0),
    ]
    settings += itertools.product((8,), ("float32", "bfloat16"), (3.0, 1000.0))
    for number, (workers, fmt, level) in enumerate(settings):
        spread = (0.1, 1.0, 30.0)[number % 3]
        case = Case(workers, 0, form != "all_parts" and number % 3 == 2, fmt, 0.3, spread, level)
        parts = case.parts("BHS", seed=number)
        mark = (-np.inf, np.inf, np.nan)[number % 3]
        parts = [
            Part(p.o, np.where(np.isneginf(p.lse), np.float32(mark), p.lse), p.rows) for p in parts
        ]
        found.append(parts)
        if form == "state":
            random = np.random.default_rng(number)
            sums = [random.uniform(1, 9, p.lse.shape).astype(np.float32) for p in parts]
            found.append([Part(p.o, p.lse, p.rows, s) for p, s in zip(parts, sums, strict=True)])
    return found


def contains(interval, value: np.ndarray) -> np.ndarray:
    if not isinstance(interval, Interval):
        return same_bits(interval, value)
    fixed = same_bits(interval.low, interval.high)
    inside = (interval.low <= value) & (value <= interval.high)
    return np.where(fixed, same_bits(interval.low, value), inside | interval.unknown)


@pytest.mark.parametrize("name", sorted(MERGES))
def test_certified_elements_do_not_depend_on_the_elementary_functions(name):
    for parts in problems(name):
        found = certain(parts, name, ULPS)
        o, lse, own = evaluate(parts, name, within(ULPS))
        for functions in SETS:
            wide_o, got_lse, _ = evaluate(parts, name, functions)
            got_o = store(wide_o, own)
            assert same_bits(got_o, found.o)[found.o_certain].all(), functions.name
            assert same_bits(got_lse, found.lse)[found.lse_certain].all(), functions.name
            # Stronger than the bits of certified elements: every result lies in its interval.
            assert contains(o, wide_o).all(), functions.name
            assert contains(lse, got_lse).all(), functions.name


@pytest.mark.parametrize("name", sorted(MERGES))
def test_most_elements_in_16_bits_and_most_lse_about_1000_are_certified(name):
    parts = Case(4, 0, False, "bfloat16", level=1000.0).parts("BHS")
    found = certain(parts, name)
    # At least 0.97 and 0.90 when written; the intervals of another NumPy hardly differ.
    assert found.o_certain.mean() >= 0.9
    if MERGES[name].natural_result:  # a quotient, which a GPU may round otherwise
        assert not found.lse_certain.any()
    else:
        assert found.lse_certain.mean() >= 0.8


@pytest.mark.parametrize("name", sorted(MERGES))
def test_less_accurate_functions_change_elements_that_a_smaller_distance_certifies(name):
    parts = Case(4, 0, False, "bfloat16", spread=0.3).parts("BHS")
    found = certain(parts, name, 1)
    got_o, got_lse = merge(parts, name, perturbed(1, ulps=4000))
    assert not same_bits(got_o, found.o)[found.o_certain].all()
    fewer = certain(parts, name, 256)
    assert fewer.o_certain.sum() < found.o_certain.sum()
    assert not (fewer.o_certain & ~found.o_certain).any()


def test_a_row_that_one_part_saw_is_certain_and_so_is_a_certain_nan():
    o = np.random.default_rng(0).normal(0, 1, (3, 1, 4, 5)).astype(np.float32)
    lse = np.full((3, 1, 4), -np.inf, np.float32)
    lse[0] = 2.5
    for name in MERGES:
        unit = certain(list(zip(o, lse, strict=True)), name)
        assert unit.o_certain.all(), name
        assert unit.lse_certain.all() or MERGES[name].natural_result, name
    found = certain(list(zip(o, lse[::-1], strict=True)), "torch_cp")
    assert np.isnan(found.o).all() and found.o_certain.all() and found.lse_certain.all()


SPECIAL = np.array(
    [-np.inf, -3e38, -1.5, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1e-30, 1.0, 1.0000001, 3e38, np.inf],
    np.float32,
)
OPERATIONS = [np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.__name__)
def test_an_operation_on_intervals_contains_the_results_on_their_numbers(operation):
    # Which zero NumPy returns as the larger one depends on the processor.
    zeros = operation in (np.maximum, np.minimum)
    numbers = SPECIAL[~np.signbit(SPECIAL) | (SPECIAL != 0)] if zeros else SPECIAL
    pairs = np.array([(a, b) for a in range(numbers.size) for b in range(a, numbers.size)])
    first, last = pairs.T
    a = Interval(numbers[first][:, None], numbers[last][:, None])
    found = operation(a, Interval(numbers[first], numbers[last]))
    with np.errstate(all="ignore"):
        for x, y in itertools.product(range(numbers.size), repeat=2):
            in_a, in_b = ((first <= one) & (one <= last) for one in (x, y))
            value = np.broadcast_to(operation(numbers[x], numbers[y]), found.shape)
            outside = in_a[:, None] & in_b & ~contains(found, value)
            assert not outside.any(), (numbers[x], numbers[y])


def test_a_choice_on_an_unknown_condition_has_both_results():
    given = Interval(np.float32([0, 0, 1, -1, 0]), np.float32([0, 1, 2, 1, 1]))
    a, b = np.float32([5, 5, 5, 5, np.nan]), np.float32([7, 7, 7, 5, 7])
    found = np.where(given == 0, a, b)
    assert found.low.tolist() == [5, 5, 7, 5, -np.inf]
    assert found.high.tolist() == [5, 7, 7, 5, np.inf]
    assert found.unknown.tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("name", sorted(DOUBLE))
@pytest.mark.parametrize("ulps", [1, 4])
def test_an_enclosure_contains_perturbed_and_numpys_functions(name, ulps):
    random = np.random.default_rng(0)
    size = random.choice([1e-6, 1e-2, 1.0, 30.0, 110.0], 4000)
    x = (random.normal(0, 1, 4000) * size).astype(np.float32)
    x[:5] = -np.inf, np.inf, np.nan, 0, 1
    x = np.abs(x) if name.startswith("log") and name != "logsigmoid" else x
    wider = np.nextafter(x, np.float32(np.inf))
    sets = [perturbed(seed, ulps) for seed in range(8)] + ([NUMPY] if ulps == 4 else [])
    for functions in sets:
        for given, at in ((x, x), (Interval(x, wider), x), (Interval(x, wider), wider)):
            interval = getattr(within(ulps), name)(given)
            value = getattr(functions, name)(at)
            assert contains(interval, value).all(), functions.name


@pytest.mark.parametrize("name", ["exp", "exp2", "sigmoid", "log", "log1p", "logsigmoid"])
def test_an_enclosure_counts_the_larger_ulp_of_a_power_of_two_inside_an_interval(name):
    powers = 2.0 ** -np.arange(1, 12)
    inverse = {
        "exp": np.log(powers),
        "exp2": np.log2(powers),
        "sigmoid": np.log(powers) - np.log1p(-powers),
        "log": np.exp(-powers),
        "log1p": np.expm1(powers),
        "logsigmoid": -np.log(np.expm1(powers)),
    }
    middle = inverse[name].astype(np.float32)
    steps = [middle]
    for _ in range(6):
        below, above = (
            np.nextafter(steps[n], np.float32(to)) for n, to in ((0, -np.inf), (-1, np.inf))
        )
        steps = [below, *steps, above]
    for first, last in itertools.combinations(range(len(steps)), 2):
        found = getattr(within(ULPS), name)(Interval(steps[first], steps[last]))
        for x in steps[first : last + 1]:
            right = in_double(name)(x)
            for sign in (-ULPS, ULPS):
                assert contains(found, right + sign * np.spacing(np.abs(right))).all()


@pytest.mark.parametrize("ulps", [0, 1025, 2.0, True])
def test_another_accuracy_is_refused(ulps):
    with pytest.raises(OptionError, match=r"expected ulps as 1 to 1024; got .*\. Fix: "):
        certain(Case(2, 0, False, "float32").parts(), "te_p2p", ulps)


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(MERGES))
def test_certified_elements_have_the_bits_that_torchs_functions_give(name):
    pytest.importorskip("torch")
    with one_thread():
        for parts in problems(name)[:5]:
            found, (o, lse) = certain(parts, name), merge(parts, name, torch_functions())
            assert same_bits(o, found.o)[found.o_certain].all()
            assert same_bits(lse, found.lse)[found.lse_certain].all()
