"""The set merge: results by another road, bits that any exp and log give, and nothing that depends on a machine."""

import dataclasses
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from refusals import refuses
from vectors import small

import ringspec.vectors
from ringspec.errors import NonFiniteError, OptionError
from ringspec.formats import load
from ringspec.merges import MERGES, enclosures, merge
from ringspec.truth.partials import merge_parts
from ringspec.vectors import FORMAT_VERSION, generate, open_set, verify
from ringspec.vectors.catalogue import catalogue, merges
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.merge_bits import parts_of, recipe_bits

SET = open_set("merge")
CASES = {case.id: case for case in SET}
some = pytest.mark.parametrize("id", sorted(CASES)[::6])


def given(tensors):
    return {name[3:]: x for name, x in tensors.items() if name.startswith("in.")}


def rows_of(case, tensors):
    """(index of a row, the weights, sums, m and o of its parts that are not empty)."""
    x = {name: load(value, name) for name, value in given(tensors).items()}
    power = 2 if case.terms.get("lse_base") == 2 else mpmath.e
    mark = math.inf if "empty_lse" in case.terms else -math.inf
    for index in np.ndindex(x["parts_lse"].shape[1:]):
        have = [n for n, lse in enumerate(x["parts_lse"]) if lse[index] != mark]
        weights = [
            mpmath.power(power, mpmath.mpf(float(x["parts_lse"][(n, *index)]))) for n in have
        ]
        sums = [float(x["parts_sum"][(n, *index)]) if "parts_sum" in x else 1.0 for n in have]
        yield index, power, weights, sums, [x["parts_o"][(n, *index)] for n in have]


@pytest.mark.parametrize("id", sorted(CASES)[::2])
def test_the_results_of_a_case_are_those_of_mpmath_rounded_once(id):
    case, tensors = CASES[id], SET.tensors(id)
    with mpmath.workprec(2500):
        for index, power, weights, sums, o in rows_of(case, tensors):
            if not weights:
                assert tensors["out.lse.float64"][index] == -np.inf
                assert not tensors["out.o.float64"][index].any()
                continue
            total = mpmath.fsum(w * l for w, l in zip(weights, sums, strict=True))
            means = [mpmath.fsum(w * mpmath.mpf(float(v)) for w, v in zip(weights, column, strict=True)) / total
                     for column in zip(*o, strict=True)]  # fmt: skip
            assert tensors["out.lse.float64"][index] == float(mpmath.log(total) / mpmath.log(power))
            assert tensors["out.o.float64"][index].tolist() == [float(mean) for mean in means]


def test_bits_that_are_certain_are_those_that_numpys_functions_give():
    """NumPy's exp and log are not those of the derivation, which are computed in float64 and rounded."""
    seen = 0
    for id, case in sorted(CASES.items())[::2]:
        tensors = SET.tensors(id)
        for recipe in case.recipes:
            for name, got in zip(
                ("o", "lse"), merge(parts_of(given(tensors)), recipe), strict=True
            ):
                want, known = (tensors[f"{group}.{recipe}.{name}"] for group in ("bits", "certain"))
                assert got.dtype == want.dtype and got.shape == want.shape == known.shape
                got, want = (load(x[known]) for x in (got, want))
                same = (got == want) & (np.signbit(got) == np.signbit(want))
                assert (same | (np.isnan(got) & np.isnan(want))).all(), (id, recipe, name)
                seen += known.sum()
    assert seen > 20_000


def test_bits_that_are_not_certain_are_zero_and_every_nan_has_one_pattern():
    for id, case in CASES.items():
        tensors = SET.tensors(id)
        for recipe in case.recipes:
            for name in ("o", "lse"):
                x, known = (tensors[f"{group}.{recipe}.{name}"] for group in ("bits", "certain"))
                raw = x.view(f"u{x.itemsize}")
                assert not raw[~known].any()
                patterns = {int(pattern) for pattern in raw[np.isnan(load(x))]}
                assert patterns <= {0x7FC00000 if x.itemsize == 4 else 0x7FC0, 0x7E00}


def test_in_16_bit_formats_nearly_all_elements_of_o_are_certain():
    """docs/vectors/format.md says how many."""
    counts = {}
    for id, case in CASES.items():
        if case.formats.inputs != "float32":
            tensors = SET.tensors(id)
            for recipe in case.recipes:
                counts.setdefault(recipe, []).append(tensors[f"certain.{recipe}.o"])
    assert set(counts) == set(MERGES)
    assert all(np.mean(masks) >= 0.93 for masks in counts.values())


def assert_same_masks(cases, monkeypatch):
    """Masks are the same for float64 functions that are 4 ulp better or worse than they are taken to be.

    An interval only grows with the slack, so the masks are those of every library within 4 ulp of float64.
    """
    for case in cases:
        found = []
        for ulps in (12, 20):
            monkeypatch.setattr(enclosures, "SLACK", ulps * 2.0**-52)
            found.append(recipe_bits(case, inputs_of(case)))
        for name, x in found[0].items():
            assert x.tobytes() == found[1][name].tobytes(), (case.id, name)


@some
def test_no_mask_depends_on_the_last_bits_of_a_librarys_functions(id, monkeypatch):
    assert_same_masks([CASES[id]], monkeypatch)


@pytest.mark.slow
def test_no_mask_of_any_case_depends_on_the_last_bits(monkeypatch):
    assert_same_masks(CASES.values(), monkeypatch)


@some
def test_a_case_comes_out_as_it_is_stored(id):
    (report,) = verify.verify(SET, only=id)
    assert report.outcome == "ok"


@pytest.mark.slow
def test_every_case_comes_out_as_it_is_stored():
    assert all(report.outcome == "ok" for report in verify.verify(SET))


def test_one_changed_bit_or_mask_of_a_recipe_is_found(tmp_path):
    one = generate.derive(CASES["partials/one-part-float32"])
    for number, name in enumerate(("bits.fa3.o", "certain.te_thd.lse")):
        x = one.tensors[name].copy()
        x.view(np.uint8).reshape(-1)[0] ^= 1
        changed = dataclasses.replace(one, tensors=one.tensors | {name: x})
        vectors = ringspec.vectors.write_set(
            tmp_path / str(number), "spoilt", "1.0", [(changed.case, changed.tensors)], SET.flags
        )
        (report,) = verify.verify(vectors)
        assert report.outcome == "differs" and [t.name for t in report.tensors] == [name]


def test_every_merge_recipe_is_in_the_cases_whose_parts_it_takes():
    of_form = {"sums": set(), "base 2": set(), "natural": set()}
    for name, recipe in MERGES.items():
        kind = "sums" if recipe.form == "state" else "natural" if recipe.base == "e" else "base 2"
        of_form[kind].add(name)
    assert set(merges.NORMALISED) == of_form["natural"]
    assert set(merges.UNNORMALISED) == of_form["sums"]
    assert set(merges.OF_BASE_2) == of_form["base 2"]


def test_the_set_has_the_parts_formats_and_conventions_that_its_page_promises():
    needs = [case.requires for case in CASES.values()]
    assert {2, 4, 8} <= {need["parts"] for need in needs}
    assert {"bfloat16", "float16", "float32"} == {need["inputs"] for need in needs}
    for key in ("lse_base", "empty_lse", "unnormalised", "garbage"):
        assert sum(key in need for need in needs) >= 5, key
    folder = Path(ringspec.vectors.__file__).parent / "data" / "merge"
    assert sum(file.stat().st_size for file in folder.rglob("*.*")) <= 1.5 * 2**20
    assert (SET.format_version, open_set("core").format_version) == (FORMAT_VERSION, "1.0")


@pytest.mark.parametrize(
    "o, lse, sums, error",
    [
        (np.nan, 0.0, None, (NonFiniteError, "non-finite")),
        (1.0, np.inf, None, (NonFiniteError, "non-finite")),
        (1.0, 0.0, 1.5, (OptionError, "option")),
        (1.0, 0.0, 0.0, (OptionError, "option")),
    ],
)
def test_parts_that_have_no_merge_are_refused(o, lse, sums, error):
    shape = (2, 1, 1, 1)
    sums = None if sums is None else np.full(shape, sums)
    with refuses(error):
        merge_parts(np.full((*shape, 2), o), np.full(shape, lse), sums)


def test_cases_of_other_sets_have_no_recipes_in_their_text():
    assert not any(case.recipes for name in ("core", "kernel") for case in catalogue(name))
    assert small.named("merge/small").format_version == "1.0"


def test_a_case_that_uses_what_1_0_does_not_have_says_1_1():
    for need in ("lse_base", "empty_lse", "unnormalised", "garbage"):
        case = next(case for case in CASES.values() if need in case.requires)
        assert dataclasses.replace(case, recipes=()).format_version == "1.1", need
