"""Inputs are made from their recipes exactly, by a rule that any language can follow."""

import dataclasses
import hashlib
import json
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from refusals import refuses

from ringspec.errors import NonFiniteError, OptionError, ShapeError
from ringspec.formats import load
from ringspec.vectors.catalogue import catalogue
from ringspec.vectors.catalogue.build import case, merge
from ringspec.vectors.format.case import Patch, TensorRecipe
from ringspec.vectors.format.case_json import case_to_json
from ringspec.vectors.format.inputs import draw, inputs_of

MINUS_INFINITY = float("-inf")


# The same rule written again, in Python's integers and fractions, from the text of case.json ------


def element(data, name, shape, index):
    """One element of an input of a case, as a Fraction, a bool, an int or -inf."""
    recipe = data["inputs"]["tensors"][name]
    value = drawn(data, name, recipe, shape, index)
    for patch in recipe.get("patches", []):
        if all(covers(entry, i) for entry, i in zip(patch["at"], index, strict=True)):
            value = plain(patch["set"]) if "set" in patch else value * Fraction(patch["multiply"])
    return value


def covers(entry, i):
    if isinstance(entry, list):
        return entry[0] <= i < entry[1]
    return entry is None or entry == i


def plain(value):
    if isinstance(value, bool):
        return value
    return MINUS_INFINITY if value == "-inf" else Fraction(value)


def drawn(data, name, recipe, shape, index):
    if recipe["kind"] == "constant":
        return plain(recipe["value"])
    if recipe["kind"] == "values":
        values = recipe["values"]
        for i in index:
            values = values[i]
        return plain(values)
    flat, count = 0, 1
    for length, i in zip(shape, index, strict=True):
        flat, count = flat * length + i, count * length
    text = "ringspec|vectors|" + data["inputs"]["seed"] + "|" + name
    stream = hashlib.shake_128(text.encode("ascii")).digest(8 * count)
    word = sum(byte << (8 * place) for place, byte in enumerate(stream[8 * flat : 8 * flat + 8]))
    if recipe["kind"] == "bernoulli":
        return word // 2**56 >= recipe["threshold"]
    bits = recipe["bits"]
    heads, tokens = {"parts_o": (2, 0), "parts_lse": (2, 0), "bias": (1, 3)}.get(name, (1, 2))
    n = word // 2 ** (64 - bits) - 2 ** (bits - 1) + recipe.get("head", 0) * index[heads]
    group = index[tokens] * recipe.get("shards", 1) // shape[tokens]
    n += recipe.get("shard", 0) * group
    return Fraction(n) * Fraction(2) ** recipe["exponent"]


def as_fraction(value):
    if value.dtype == bool:
        return bool(value)
    if value.dtype.kind == "i":
        return Fraction(int(value))
    number = float(load(np.asarray(value)))
    return MINUS_INFINITY if number == MINUS_INFINITY else Fraction(number)


def some_indices(shape):
    """First, last and a few elements between them."""
    count = int(np.prod(shape))
    picked = {0, count - 1, count // 2, count // 3, (5 * count) // 7}
    return [tuple(int(i) for i in np.unravel_index(n, shape)) for n in sorted(picked)]


@pytest.mark.parametrize("name", ["core", "kernel"])
def test_an_independent_program_makes_the_same_elements(name):
    checked = 0
    for one in catalogue(name)[:: 1 if name == "core" else 5]:
        data = json.loads(case_to_json(one))
        for tensor, values in inputs_of(one).items():
            for index in some_indices(values.shape):
                want = element(data, tensor, values.shape, index)
                assert as_fraction(values[index]) == want, (one.id, tensor, index)
                checked += 1
    assert checked >= 200


def test_known_elements_of_a_case_never_change():
    one = next(c for c in catalogue("core") if c.id == "ring/zigzag-causal-w4")
    x = inputs_of(one)
    assert load(x["q"])[0, 1, 15].tolist() == PINNED_Q
    assert load(x["dy"])[0, 0, 0].tolist() == PINNED_DY


PINNED_Q = [0.5625, -0.5625, -1.5625, 0.4375]
PINNED_DY = [-1.75, -0.375, -1.25, 0.8125]


# Storage ----------------------------------------------------------------------------------------


def test_tensors_have_the_dtypes_of_the_format():
    bf16 = np.dtype(ml_dtypes.bfloat16)
    x = inputs_of(next(c for c in catalogue("core") if c.id == "ring/everything-striped-w3"))
    assert {x[n].dtype for n in ("q", "k", "v", "dy")} == {bf16}
    assert {x[n].dtype for n in ("dlse", "bias", "sinks")} == {np.dtype("float32")}
    assert x["segments_q"].dtype == np.int64
    x = inputs_of(next(c for c in catalogue("core") if c.id == "attention/keep-given"))
    assert x["keep"].dtype == np.bool_
    x = inputs_of(next(c for c in catalogue("core") if c.id == "merge/float64"))
    assert {x[n].dtype for n in x} == {np.dtype("float64")}
    x = inputs_of(next(c for c in catalogue("core") if c.id == "merge/float16"))
    assert x["parts_o"].dtype == np.float16 and x["parts_lse"].dtype == np.float32


def test_minus_infinity_is_kept_where_it_has_a_meaning():
    x = inputs_of(next(c for c in catalogue("core") if c.id == "merge/first-part-empty"))
    assert np.isneginf(x["parts_lse"][0]).all() and np.isfinite(x["parts_lse"][1]).all()


# Refusals ---------------------------------------------------------------------------------------

GOOD = case("attention/good", "A good one.", "FWD-1", S=4, mask=TensorRecipe(
    "bernoulli", shape=(1, 1, 4, 4), threshold=9))  # fmt: skip


def changed(name, recipe, base=GOOD):
    tensors = dict(base.inputs.tensors) | {name: recipe}
    return dataclasses.replace(base, inputs=dataclasses.replace(base.inputs, tensors=tensors))


def uniform(**changes):
    return TensorRecipe("uniform", **({"bits": 6, "exponent": -4} | changes))


def patched(**patch):
    return uniform(patches=(Patch(**patch),))


ALL = (None, None, None, None)
REFUSED = {
    "nine bits in bfloat16": ("q", uniform(bits=10), OptionError),
    "an offset beyond bfloat16": ("k", uniform(head=257), OptionError),
    "a number beyond bfloat16's range": ("q", patched(at=ALL, set=2.0**128), OptionError),
    "a third": ("q", TensorRecipe("constant", value=1 / 3), OptionError),
    "more bits than float64 has": ("q", uniform(bits=54), OptionError),
    "no bits": ("q", uniform(bits=0), OptionError),
    "bits as a float": ("q", uniform(bits=6.0), OptionError),
    "bits as a bool": ("q", uniform(bits=True), OptionError),
    "an exponent out of range": ("q", uniform(exponent=2000), OptionError),
    "an exponent below every number": ("q", uniform(exponent=-1190), OptionError),
    "an exponent above every number": ("q", uniform(exponent=1020), OptionError),
    "no exponent": ("q", uniform(exponent=None), OptionError),
    "an offset that leaves int64": ("q", uniform(head=2**62), OptionError),
    "no shards": ("k", uniform(shards=0), OptionError),
    "an unknown kind": ("q", TensorRecipe("normal"), (OptionError, "unknown-name")),
    "coins for q": ("q", TensorRecipe("bernoulli", threshold=9), OptionError),
    "numbers for a mask": ("mask", uniform(shape=(1, 1, 4, 4)), OptionError),
    "numbers for segments": ("segments_q", uniform(shape=(4,)), OptionError),
    "a threshold beyond a byte": (
        "mask", TensorRecipe("bernoulli", shape=(1, 1, 4, 4), threshold=257), OptionError,
    ),
    "an unknown input": ("query", uniform(), (OptionError, "unknown-name")),
    "an input of another operation": ("parts_lse", uniform(), (OptionError, "unknown-name")),
    "lse given to a whole backward": ("lse", uniform(), (OptionError, "unknown-name")),
    "another shape than the case's": ("q", uniform(shape=(1, 2, 4, 5)), ShapeError),
    "a mask of three axes": (
        "mask", TensorRecipe("bernoulli", shape=(1, 4, 4), threshold=9), ShapeError,
    ),
    "a mask that does not broadcast": (
        "mask", TensorRecipe("bernoulli", shape=(1, 1, 2, 4), threshold=9), ShapeError,
    ),
    "sinks of one axis": ("sinks", TensorRecipe("values", values=(1.0, 2.0)), ShapeError),
    "too few segments": ("segments_q", TensorRecipe("values", values=(0, 0, 1)), ShapeError),
    "segments of floats": ("segments_q", TensorRecipe("values", values=(0.0,) * 4), OptionError),
    "positions of bools": ("positions_k", TensorRecipe("values", values=(True,) * 4), OptionError),
    "a mask of numbers": ("mask", TensorRecipe("values", values=((((1,),),),)), OptionError),
    "q of bools": ("q", TensorRecipe("constant", value=True), OptionError),
    "q without a value": ("q", TensorRecipe("constant"), OptionError),
    "q of text": ("q", TensorRecipe("constant", value="1.0"), OptionError),
    "values of another shape": ("q", TensorRecipe("values", values=(1.0,)), ShapeError),
    "an integer beyond float64": ("q", TensorRecipe("constant", value=10**400), ShapeError),
    "a position beyond int64": (
        "positions_q", TensorRecipe("values", values=(0, 1, 2, 2**70)), ShapeError,
    ),
    "minus infinity in q": ("q", patched(at=ALL, set=MINUS_INFINITY), NonFiniteError),
    "NaN in q": ("q", TensorRecipe("constant", value=float("nan")), NonFiniteError),
    "infinity in a bias": (
        "bias", TensorRecipe("constant", shape=(1, 1, 1, 1), value=float("inf")), NonFiniteError,
    ),
    "a patch of three axes": ("q", patched(at=ALL[:3], set=1.0), OptionError),
    "a patch of five axes": ("q", patched(at=(*ALL, None), set=1.0), OptionError),
    "a patch that does nothing": ("q", patched(at=ALL), OptionError),
    "a patch that does two things": ("q", patched(at=ALL, set=1.0, multiply=2.0), OptionError),
    "an index behind the end": ("q", patched(at=(None, None, 4, None), set=1.0), OptionError),
    "a negative index": ("q", patched(at=(None, None, -1, None), set=1.0), OptionError),
    "a range behind the end": ("q", patched(at=(None, None, (2, 5), None), set=1.0), OptionError),
    "an empty range": ("q", patched(at=(None, None, (2, 2), None), set=1.0), OptionError),
    "times three": ("q", patched(at=ALL, multiply=3.0), OptionError),
    "times zero": ("q", patched(at=ALL, multiply=0.0), OptionError),
    "times an integer beyond float64": ("q", patched(at=ALL, multiply=10**400), OptionError),
    "times a power that underflows": ("q", patched(at=ALL, multiply=2.0**-1074), OptionError),
    "times two in a mask": (
        "mask", TensorRecipe("bernoulli", shape=(1, 1, 4, 4), threshold=9,
                             patches=(Patch(ALL, multiply=2.0),)), OptionError,
    ),
    "a number in a mask": (
        "mask", TensorRecipe("bernoulli", shape=(1, 1, 4, 4), threshold=9,
                             patches=(Patch(ALL, set=1.0),)), OptionError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_recipe_that_is_not_exact_or_does_not_fit_is_refused(what):
    name, recipe, error = REFUSED[what]
    inputs_of(GOOD)
    with refuses(error):
        inputs_of(changed(name, recipe))


def test_a_missing_input_is_refused():
    tensors = {n: r for n, r in GOOD.inputs.tensors.items() if n != "dy"}
    with pytest.raises(OptionError, match="dy"):
        inputs_of(
            dataclasses.replace(GOOD, inputs=dataclasses.replace(GOOD.inputs, tensors=tensors))
        )


def test_a_tensor_of_too_many_elements_is_refused_before_it_is_made():
    with pytest.raises(ShapeError, match="elements"):
        draw("q", (1, 2**10, 2**20, 2**10), uniform(), "large")


def test_a_merge_takes_no_mask():
    with refuses((OptionError, "unknown-name")):
        inputs_of(
            changed("mask", GOOD.inputs.tensors["mask"], merge("merge/x", "x", "SOFT-3", N=2))
        )


def test_a_patch_multiplies_by_a_negative_power_of_two_exactly():
    recipe = uniform(patches=(Patch((None, None, (1, 3), 0), multiply=-0.5),))
    before = draw("q", (1, 2, 4, 4), uniform(), "s")
    after = draw("q", (1, 2, 4, 4), recipe, "s")
    want = before.copy()
    want[:, :, 1:3, 0] *= -0.5
    assert np.array_equal(after, want)
