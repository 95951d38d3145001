"""Bits of ringspec.exact against mpmath at 500 digits (oracle/precise.py) and rational rounding.

Every element of small problems, and a random sample of larger ones, in all formats. A mismatch is
reported with its maker, seed, tensor and index.
"""

from collections import Counter

import numpy as np
import pytest
from oracle.decide import DIGITS, rounded
from oracle.exact_cases import FEATURES, INPUT_FORMATS, Given, Sizes, everything, make
from oracle.hard_cases import HARD
from oracle.precise import Problem, Reference, merge_row
from oracle.round_exact import decode

from ringspec import exact
from ringspec.errors import UndecidedError

FORMATS = ("float64", "float32", "bfloat16", "float16")
LEAST = 5000  # elements that the slow test must compare
BY_ROW = ("o", "dq", "dk", "dv")
MAKERS = (*FEATURES, *HARD)
# Uniform weights of float64 numbers: a scale may be a midpoint of float64, which is not proven.
TIES_OF_SCALES = ("uniform_rows", "equal_sinks_and_scores", "softcap_on_ties", "zero_scale")
# All features and every second hard case; the slow tests have them all.
FAST_MAKERS = (*FEATURES, *HARD[::2])
every_maker = pytest.mark.parametrize(
    "maker",
    [
        pytest.param(maker, marks=() if maker in FAST_MAKERS else pytest.mark.slow)
        for maker in MAKERS
    ],
    ids=lambda maker: maker.__name__,
)


def exact_problem(problem: Problem) -> exact.Problem:
    return exact.Problem(**vars(problem))


def same_bits(element: np.ndarray, want: float, name: str) -> bool:
    """A 0-d storage array has the bit pattern of `want`; zeros must be +0."""
    pattern = int(element.reshape(1).view(f"u{element.dtype.itemsize}")[0])
    got = decode(pattern, name)
    return got == want and not (got == 0 and pattern != 0)


class Check:
    """Compares tensors of a Truth element by element, and counts."""

    def __init__(self, label: str, rng: np.random.Generator, most: int | None = None) -> None:
        self.label, self.rng, self.most = label, rng, most
        self.mismatches: list[tuple] = []
        self.counts: Counter = Counter()

    def indices(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All indices, or a random sample of `most`."""
        every = list(np.ndindex(shape))
        if self.most is None or len(every) <= self.most:
            return every
        return [every[n] for n in self.rng.choice(len(every), self.most, replace=False)]

    def tensor(self, name: str, arrays: dict[str, np.ndarray], evaluate) -> None:
        """`evaluate(index, digits)` gives value and radius."""
        (shape,) = {array.shape for array in arrays.values()}
        for index in self.indices(shape):
            known = {}

            def at(digits, index=index, known=known):
                if digits not in known:
                    known[digits] = evaluate(index, digits)
                return known[digits]

            self.counts["elements"] += 1
            for format_name, array in arrays.items():
                want = rounded(at, format_name, self.counts)
                self.counts["roundings"] += 1
                if not same_bits(array[index], want, format_name):
                    got = float(array[index])
                    self.mismatches.append((self.label, name, index, format_name, got, want))

    def done(self) -> Counter:
        assert self.mismatches == [], self.mismatches[:10]
        return self.counts


def check_truth(check: Check, truth: exact.Truth, references: dict[int, Reference]) -> None:
    """Tensors and scales against references of both numbers of digits."""
    for name, arrays in truth.tensors.items():
        assert set(arrays) == set(FORMATS)
        check.tensor(
            name,
            arrays,
            lambda index, digits, name=name: (
                references[digits].value(name, index),
                references[digits].radius(name, index),
            ),
        )
    for name, array in truth.scales.items():
        assert array.dtype == np.float64

        def scale(index, digits, name=name):
            value = references[digits].scale(name, index)
            return value, value * references[digits].slack

        check.tensor(f"scale of {name}", {"float64": array}, scale)


def names_of(problem: Problem) -> set[str]:
    names = {"o", "lse", "dq", "dk", "dv"}
    names |= set() if problem.sinks is None else {"dsinks"}
    return names if problem.bias is None else names | {"dbias"}


def check_problem(given: Given, label: str, most: int | None = None) -> Counter:
    check = Check(label, np.random.default_rng(0), most)
    names, problem = names_of(given.problem), exact_problem(given.problem)
    truth = exact.backward(problem, given.dy, given.dlse, FORMATS)
    assert set(truth.tensors) == names and truth.scales == {}
    try:
        truth = exact.backward(problem, given.dy, given.dlse, FORMATS, scales=True)
        assert set(truth.tensors) == names == set(truth.scales)
    except UndecidedError:  # of a scale, as the results alone were decided
        assert label.startswith(TIES_OF_SCALES), label
        check.counts["scales refused"] += 1
    references = {n: Reference(given.problem, given.dy, given.dlse, digits=n) for n in DIGITS}
    check_truth(check, truth, references)
    return check.done()


@every_maker
def test_every_bit_of_small_problems_is_mpmaths(maker):
    seed = MAKERS.index(maker)
    name = INPUT_FORMATS[seed % 4]
    check_problem(maker(np.random.default_rng(seed), name), f"{maker.__name__}, {name}, {seed}")


@pytest.mark.slow
def test_many_thousand_elements_of_all_features_and_formats_are_mpmaths():
    counts: Counter = Counter()
    for seed in (101, 102):
        for maker in MAKERS:
            for name in INPUT_FORMATS:
                given = maker(np.random.default_rng(seed), name)
                counts += check_problem(given, f"{maker.__name__}, {name}, {seed}")
    print(dict(counts))
    assert counts["elements"] >= LEAST and counts["ties"] > 0
    assert counts["scales refused"] <= 12


@pytest.mark.slow
@pytest.mark.parametrize(("name", "logits"), (("bfloat16", 64.0), ("float64", 1.5)))
def test_a_sample_of_larger_problems_is_mpmaths(name, logits):
    rng = np.random.default_rng(int(logits))
    sizes = Sizes(B=1, H=2, Hkv=1, Sq=48, Sk=48, D=16, Dv=8)
    visible = np.tril(np.ones((48, 48), dtype=bool))[None, None]
    given = make(rng, name, sizes, logits, visible=visible, sinks=rng.integers(-3, 4, (2, 2)) / 2)
    check_problem(given, f"{name}, logits {logits}", most=60)


# Block backward, merge, sums over a worker's rows -----------------------------------------------------


def block_case(kind: str, rng: np.random.Generator) -> tuple[Given, np.ndarray, np.ndarray]:
    """A problem with lse and delta as given: nearly its own, far off, or from other rows."""
    given = everything(rng, "bfloat16") if kind != "plain" else make(rng, "float32")
    forward = exact.forward(exact_problem(given.problem), ("float32",)).tensors
    lse = forward["lse"]["float32"].astype(np.float64)
    delta = rng.standard_normal(lse.shape).astype(np.float32).astype(np.float64)
    if kind == "far":
        lse = lse + rng.choice((-40.0, -3.0, 0.5, 200.0), lse.shape)
    if kind == "empty":
        lse[rng.random(lse.shape) < 0.4] = -np.inf
    return given, lse, delta


@pytest.mark.parametrize("kind", ("plain", "everything", "far", "empty"))
def test_every_bit_of_a_block_backward_is_mpmaths(kind):
    given, lse, delta = block_case(kind, np.random.default_rng(5))
    truth = exact.block_backward(
        exact_problem(given.problem), given.dy, lse, delta, FORMATS, scales=True
    )
    assert set(truth.tensors) == set(truth.scales) == names_of(given.problem) - {"o", "lse"}
    references = {
        n: Reference(given.problem, given.dy, lse_given=lse, delta_given=delta, digits=n)
        for n in DIGITS
    }
    check = Check(kind, np.random.default_rng(0))
    check_truth(check, truth, references)
    assert check.done()["elements"] > 80


def merge_case(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    lse = 2.0 * rng.standard_normal((3, 1, 2, 5))
    o = rng.standard_normal((3, 1, 2, 5, 4))
    if kind == "some empty":
        lse[rng.random(lse.shape) < 0.4] = -np.inf
        lse[:, 0, 1, 2] = -np.inf
    if kind == "far apart":
        lse[1] -= 300.0
        o[0], o[2] = 1 + 2.0**-8, 1 + 2.0**-8  # a near tie of bfloat16
    if kind == "equal":
        lse[:] = rng.standard_normal((1, 2, 5))
        o = 1 + 2.0**-8 + np.array([-0.75, 0.5, 0.25]).reshape(3, 1, 1, 1, 1) * np.ones(o.shape)
    if kind == "out of range":
        o = np.ldexp(o, rng.choice((-1070, -140, -20, 15, 128), o.shape))
    return o, lse


@pytest.mark.parametrize("kind", ("plain", "some empty", "far apart", "equal", "out of range"))
def test_every_bit_of_a_merge_is_mpmaths(kind):
    o, lse = merge_case(kind, np.random.default_rng(6))
    truth = exact.merge(o, lse, FORMATS, scales=True)
    check = Check(kind, np.random.default_rng(0))

    def value(name):
        def at(index, digits):
            if name == "lse":
                row = merge_row(o, lse, index, digits)
                return row.lse, row.slack * row.scale_lse
            row = merge_row(o, lse, index[:-1], digits)
            return row.o[index[-1]], row.slack * row.scale_o[index[-1]]

        return at

    def scale(name):
        def at(index, digits):
            row = merge_row(o, lse, index, digits)
            result = row.scale_lse if name == "lse" else max(row.scale_o)
            return result, row.slack * result

        return at

    for name in ("o", "lse"):
        check.tensor(name, truth.tensors[name], value(name))
        check.tensor(f"scale of {name}", {"float64": truth.scales[name]}, scale(name))
    counts = check.done()
    assert counts["elements"] == 70 and (counts["ties"] > 0) == (kind == "equal")


@pytest.mark.parametrize("block", (False, True), ids=("backward", "block backward"))
def test_every_bit_of_the_sums_over_a_workers_rows_is_mpmaths(block):
    given, lse, delta = block_case("everything", np.random.default_rng(7))
    problem, of_row = exact_problem(given.problem), np.array([1, 0, -1, 1])
    if block:
        terms = {"lse_given": lse, "delta_given": delta}
        truth = exact.block_backward(
            problem, given.dy, lse, delta, FORMATS, scales=True, row_groups=of_row, groups=3
        )
    else:
        terms = {"dlse": given.dlse}
        truth = exact.backward(
            problem, given.dy, given.dlse, FORMATS, scales=True, row_groups=of_row, groups=3
        )
    references = {n: Reference(given.problem, given.dy, digits=n, **terms) for n in DIGITS}
    check = Check("groups", np.random.default_rng(0))
    for name in ("dsinks", "dbias"):

        def value(index, digits, name=name):
            rows, reference = np.flatnonzero(of_row == index[0]).tolist(), references[digits]
            radius = reference.radius(name, index[1:], rows)
            return reference.value(name, index[1:], rows), radius

        def scale(index, digits, name=name):
            rows = np.flatnonzero(of_row == index[0]).tolist()
            result = references[digits].scale(name, index[1:], rows)
            return result, result * references[digits].slack

        arrays = truth.tensors[f"{name}_parts"]
        assert arrays["float64"].shape == (3, *truth.tensors[name]["float64"].shape)
        check.tensor(name, arrays, value)
        assert not arrays["float64"][2].any()  # no row is worker 2's
        check.tensor(f"scale of {name}", {"float64": truth.scales[f"{name}_parts"]}, scale)
    check.done()


# The check itself ------------------------------------------------------------------------------------


def test_a_single_wrong_last_bit_is_seen():
    given = everything(np.random.default_rng(8), "bfloat16")
    truth = exact.backward(exact_problem(given.problem), given.dy, given.dlse, FORMATS)
    references = {n: Reference(given.problem, given.dy, given.dlse, digits=n) for n in DIGITS}
    for name, format_name in (("dq", "float64"), ("o", "bfloat16"), ("dbias", "float16")):
        array = truth.tensors[name][format_name]
        place = tuple(np.argwhere(array.astype(np.float64) != 0)[0])
        for flip in (1, 1 << (8 * array.dtype.itemsize - 1)):  # the last bit, and the sign
            view = array.view(f"u{array.dtype.itemsize}")
            view[place] ^= flip
            check = Check("flipped", np.random.default_rng(0))
            check_truth(check, exact.Truth({name: truth.tensors[name]}), references)
            assert [m[1:4] for m in check.mismatches] == [(name, place, format_name)]
            view[place] ^= flip
    zero = np.zeros((), dtype=np.float16)
    assert same_bits(zero, 0.0, "float16") and not same_bits(-zero, 0.0, "float16")
