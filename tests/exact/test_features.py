"""What each feature promises of ringspec.exact, as equalities of bits between two ways to say it.

The values themselves are held to mpmath in test_against_mpmath.py.
"""

from dataclasses import replace

import mpmath
import numpy as np
import pytest
from oracle.exact_cases import Sizes as S
from oracle.exact_cases import causal, everything, make, plain, softcap
from oracle.hard_cases import constant_values

from ringspec import exact
from ringspec.formats import bits, format_of

FORMATS = ("float64", "float32", "bfloat16", "float16")
GRADIENTS = ("dq", "dk", "dv")


def problem_of(given, **changes) -> exact.Problem:
    return exact.Problem(**{**vars(given.problem), **changes})


def truth(problem: exact.Problem, given, formats=FORMATS, **options) -> exact.Truth:
    return exact.backward(problem, given.dy, given.dlse, formats, **options)


def drawn(maker, seed: int = 1, name: str = "float32"):
    return maker(np.random.default_rng(seed), name)


def same(a: exact.Truth, b: exact.Truth, names=None, scales=True) -> None:
    """Bit patterns of the named tensors (None: all) and of all scales that both have."""
    for name in a.tensors.keys() if names is None else names:
        assert a.tensors[name].keys() == b.tensors[name].keys()
        for format_name, array in a.tensors[name].items():
            other = b.tensors[name][format_name]
            assert array.dtype == other.dtype and array.shape == other.shape, name
            assert np.array_equal(bits(array), bits(other)), (name, format_name)
    for name in a.scales.keys() & b.scales.keys() if scales else ():
        assert np.array_equal(bits(a.scales[name]), bits(b.scales[name])), name


# What comes back --------------------------------------------------------------------------------------


def test_every_tensor_has_the_storage_dtype_and_the_shape_that_is_promised():
    given = drawn(everything)
    result = truth(problem_of(given), given, scales=True)
    shapes = {"o": (2, 4, 4, 2), "lse": (2, 4, 4), "dq": (2, 4, 4, 3), "dk": (2, 2, 5, 3)}
    shapes |= {"dv": (2, 2, 5, 2), "dsinks": (4, 2), "dbias": (1, 4, 1, 5)}
    assert {n: t["float64"].shape for n, t in result.tensors.items()} == shapes
    for arrays in result.tensors.values():
        assert {n: a.dtype for n, a in arrays.items()} == {n: format_of(n).dtype for n in FORMATS}
    by_row = {name: shape[:-1] for name, shape in shapes.items() if name in ("o", *GRADIENTS)}
    assert {n: x.shape for n, x in result.scales.items()} == shapes | by_row
    assert all(x.dtype == np.float64 for x in result.scales.values())


def test_a_format_has_the_same_bits_whatever_else_is_asked_for():
    given = drawn(constant_values)
    whole = truth(problem_of(given), given)
    for formats in (("bfloat16",), ("float16", "float64"), ["float32", "float32"]):
        part = truth(problem_of(given), given, formats, scales=True)
        for name, arrays in part.tensors.items():
            assert set(arrays) == set(formats)
            for format_name, array in arrays.items():
                assert np.array_equal(bits(array), bits(whole.tensors[name][format_name]))


def test_lse_and_dsinks_may_have_formats_of_their_own():
    given = drawn(everything)
    of_row = np.array([0, 0, 1, 1])
    whole = truth(problem_of(given), given, row_groups=of_row, groups=2)
    split = truth(
        problem_of(given),
        given,
        ("bfloat16",),
        statistics=("float32",),
        row_groups=of_row,
        groups=2,
    )
    assert set(split.tensors) == set(whole.tensors)
    for name, arrays in split.tensors.items():
        ((format_name, array),) = arrays.items()
        statistic = name in ("lse", "dsinks", "dsinks_parts")
        assert format_name == ("float32" if statistic else "bfloat16"), name
        assert np.array_equal(bits(array), bits(whole.tensors[name][format_name]))


def test_forward_is_the_forward_of_backward():
    given = drawn(everything)
    forward = exact.forward(problem_of(given), FORMATS, scales=True)
    assert set(forward.tensors) == set(forward.scales) == {"o", "lse"}
    same(forward, truth(problem_of(given), given, scales=True), ("o", "lse"))


def test_the_inputs_are_left_as_they_were_and_their_memory_layout_does_not_matter():
    given = drawn(everything)
    fields = vars(given.problem)
    copies = {n: x.copy() for n, x in fields.items() if isinstance(x, np.ndarray)}
    whole = truth(problem_of(given), given)
    for name, array in copies.items():
        assert np.array_equal(array, fields[name])
    turned = {n: np.asfortranarray(x) for n, x in copies.items()}
    same(whole, truth(problem_of(given, **turned), given))


# Masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("float32", "float64"))
def test_an_empty_row_is_zero_has_lse_minus_infinity_and_sends_nothing(name):
    given = make(np.random.default_rng(2), name, visible=causal(5, 6, -2))
    result = truth(problem_of(given), given, scales=True)
    for format_name in FORMATS:
        for tensor in ("o", "dq"):
            assert not bits(result.tensors[tensor][format_name][:, :, :2]).any()  # +0 alone
        lse = result.tensors["lse"][format_name].astype(np.float64)
        assert np.isneginf(lse[:, :, :2]).all() and np.isfinite(lse[:, :, 2:]).all()
    assert (result.scales["lse"][:, :, :2] == 1).all() and not result.scales["o"][:, :, :2].any()
    dy, dlse = given.dy.copy(), given.dlse.copy()
    dy[:, :, :2], dlse[:, :, :2] = 1e300, -1e300
    other = exact.backward(problem_of(given), dy, dlse, FORMATS, scales=True)
    same(result, other)


def test_a_row_of_sinks_alone_has_their_log_sum_exp_and_output_zero():
    sinks = np.array([[0.0, 0.0], [1.5, 1.5]])
    given = make(np.random.default_rng(3), "float32", visible=causal(5, 6, -2), sinks=sinks)
    result = truth(problem_of(given), given)
    lse = result.tensors["lse"]["float64"][0, :, :2]
    want = [float(shift + mpmath.log(2)) for shift in (0, 1.5)]
    assert lse.tolist() == [[want[0]] * 2, [want[1]] * 2]
    assert not bits(result.tensors["o"]["float64"][:, :, :2]).any()
    assert not bits(result.tensors["dq"]["float64"][:, :, :2]).any()


def test_a_bias_of_minus_infinity_is_a_mask_and_its_gradient_is_zero():
    given = drawn(plain)
    visible = np.random.default_rng(4).random((1, 2, 5, 6)) < 0.6
    bias = np.where(visible, 0.0, -np.inf)
    masked = truth(problem_of(given, visible=visible), given)
    biased = truth(problem_of(given, bias=bias), given)
    same(masked, biased)
    assert not bits(biased.tensors["dbias"]["float64"][~visible]).any()
    assert bits(biased.tensors["dbias"]["float64"][visible]).all()


def test_hidden_keys_and_values_change_no_bit():
    visible = causal(5, 6)
    given = make(np.random.default_rng(5), "float32", visible=visible)
    k, v = given.problem.k.copy(), given.problem.v.copy()
    k[:, :, 5], v[:, :, 5] = 1e300, -1e-300  # no query sees key 5
    before, after = (
        truth(problem_of(given, **changes), given, scales=True)
        for changes in ({}, {"k": k, "v": v})
    )
    same(before, after)
    assert not bits(before.tensors["dk"]["float64"][:, :, 5]).any()


def test_a_mask_may_be_broadcast_along_any_axis():
    given = drawn(plain)
    visible = causal(5, 6)
    whole = truth(problem_of(given, visible=np.broadcast_to(visible, (1, 2, 5, 6))), given)
    same(whole, truth(problem_of(given, visible=visible), given))
    nothing_hidden = np.ones((1, 1, 1, 1), dtype=bool)
    same(truth(problem_of(given), given), truth(problem_of(given, visible=nothing_hidden), given))


# Symmetries -----------------------------------------------------------------------------------------------


def test_the_order_of_keys_does_not_matter():
    given = drawn(everything)
    order = np.random.default_rng(6).permutation(5)
    fields = {n: vars(given.problem)[n] for n in ("k", "v", "visible", "bias", "keep")}
    turned = {n: x[:, :, order] if n in "kv" else x[..., order] for n, x in fields.items()}
    before = truth(problem_of(given), given, scales=True)
    after = truth(problem_of(given, **turned), given, scales=True)
    same(before, after, ("o", "lse", "dq", "dsinks"), scales=False)
    for name in ("dk", "dv"):
        for format_name, array in before.tensors[name].items():
            other = after.tensors[name][format_name]
            assert np.array_equal(bits(array[:, :, order]), bits(other)), name
        assert np.array_equal(before.scales[name][:, :, order], after.scales[name])
    dbias = before.tensors["dbias"]["float64"][..., order]
    assert np.array_equal(bits(dbias), bits(after.tensors["dbias"]["float64"]))


def test_grouped_heads_are_repeated_keys_of_their_own():
    sizes = S(B=2, H=4, Hkv=2, Sq=3, Sk=4)
    given = make(np.random.default_rng(7), "float32", sizes, softcap=3.0)
    k, v = (np.repeat(x, 2, axis=1) for x in (given.problem.k, given.problem.v))
    grouped = truth(problem_of(given), given, scales=True)
    repeated = truth(problem_of(given, k=k, v=v), given, scales=True)
    same(grouped, repeated, ("o", "lse", "dq"), scales=False)
    for name in ("o", "lse", "dq"):
        assert np.array_equal(grouped.scales[name], repeated.scales[name])
    assert grouped.tensors["dk"]["float64"].shape == (2, 2, 4, 3)


def test_one_more_constant_in_all_logits_moves_lse_alone():
    """The sinks move with the scores, as they are logits in the domain of s."""
    sinks = np.array([[0.25], [-1.0]])
    given = make(np.random.default_rng(8), "float32", sinks=sinks)
    for shift in (1.0, -700.0, 1e6):
        bias = np.full((1, 1, 1, 1), shift)
        moved = truth(problem_of(given, bias=bias, sinks=sinks + shift), given)
        same(truth(problem_of(given), given), moved, ("o", *GRADIENTS, "dsinks"))


def test_powers_of_two_in_values_go_through():
    given = drawn(plain)
    before = truth(problem_of(given), given, ("float64",))
    v, dy = given.problem.v * 2.0**40, given.dy * 2.0**-40
    after = exact.backward(problem_of(given, v=v), dy, given.dlse)
    assert np.array_equal(before.tensors["o"]["float64"] * 2.0**40, after.tensors["o"]["float64"])
    same(before, after, ("lse", "dq", "dk"))


def test_dropout_keeps_lse_and_scales_by_a_rational_number():
    given = make(np.random.default_rng(9), "float32", S(Sk=1))
    result = truth(problem_of(given, dropout_p=0.1), given, ("float64",))
    same(result, truth(problem_of(given), given, ("float64",)), ("lse",))
    # One key: o is v / (1 - p), whose nearest float64 is the quotient's: 1 - p is exact here.
    want = given.problem.v[:, :, 0:1] / (1 - 0.5)
    half = truth(problem_of(given, dropout_p=0.5), given, ("float64",))
    assert np.array_equal(half.tensors["o"]["float64"], np.broadcast_to(want, (1, 2, 5, 4)))
    everything_kept = np.ones((1, 1, 5, 1), dtype=bool)
    same(result, truth(problem_of(given, dropout_p=0.1, keep=everything_kept), given, ("float64",)))


def test_a_soft_cap_far_above_the_scores_is_none_and_zero_scores_are_not_capped():
    """z - c tanh(z / c) is about z**3 / (3 c**2)."""
    given = drawn(plain, name="bfloat16")
    same(truth(problem_of(given, softcap=2.0**400), given), truth(problem_of(given), given))
    flat = {"q": np.zeros_like(given.problem.q)}
    same(
        truth(problem_of(given, softcap=0.1, **flat), given),
        truth(problem_of(given, **flat), given),
    )


# Sums over a worker's rows, merge, block backward -----------------------------------------------------------


def test_one_group_of_all_rows_is_the_whole_sum():
    given = drawn(everything)
    of_row = np.zeros(4, dtype=np.int64)
    result = truth(problem_of(given), given, scales=True, row_groups=of_row, groups=1)
    for name in ("dsinks", "dbias"):
        for format_name, array in result.tensors[name].items():
            part = result.tensors[f"{name}_parts"][format_name]
            assert np.array_equal(bits(part[0]), bits(array))
        assert np.array_equal(result.scales[f"{name}_parts"][0], result.scales[name])


def test_a_bias_of_every_row_has_no_parts():
    given = make(np.random.default_rng(10), "float32", bias=np.zeros((1, 2, 5, 6)))
    result = truth(problem_of(given), given, row_groups=np.zeros(5, dtype=np.int64), groups=1)
    assert "dbias_parts" not in result.tensors and "dsinks_parts" not in result.tensors


def test_a_merge_of_one_part_is_that_part_and_of_none_is_empty():
    rng = np.random.default_rng(11)
    o, lse = rng.standard_normal((1, 2, 1, 3, 4)), rng.standard_normal((1, 2, 1, 3))
    lse[0, 0, 0, 1] = -np.inf
    merged = exact.merge(o, lse).tensors
    o[0, 0, 0, 1] = 0.0
    assert np.array_equal(merged["o"]["float64"], o[0])
    assert np.array_equal(merged["lse"]["float64"], lse[0])
    order = exact.merge(np.concatenate([o, 2 * o]), np.concatenate([lse, lse + 1]), FORMATS)
    back = exact.merge(np.concatenate([2 * o, o]), np.concatenate([lse + 1, lse]), FORMATS)
    same(order, back)


def test_a_block_backward_with_lse_minus_infinity_sends_nothing():
    given = drawn(everything)
    shape = given.dy.shape[:3]
    result = exact.block_backward(
        problem_of(given), given.dy, np.full(shape, -np.inf), np.ones(shape), FORMATS, scales=True
    )
    for arrays in result.tensors.values():
        assert not any(bits(array).any() for array in arrays.values())
    assert not any(scale.any() for scale in result.scales.values())


def test_a_block_backward_of_one_key_with_its_own_lse_is_the_backward():
    """With one key lse is the score, exactly, and delta can be given exactly as well."""
    given = make(np.random.default_rng(12), "bfloat16", S(Sk=1, D=2, Dv=2), scale=0.5)
    whole = exact.backward(problem_of(given), given.dy, given.dlse)
    lse = whole.tensors["lse"]["float64"]
    delta = np.einsum("bhid,bhjd->bhi", given.dy, given.problem.v) - given.dlse
    block = exact.block_backward(problem_of(given), given.dy, lse, delta)
    same(whole, block, GRADIENTS)


# Axes of length zero ---------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ("B", "Sq", "Sk", "D", "Dv"))
def test_an_axis_of_length_zero_is_a_sum_over_nothing(axis):
    given = make(np.random.default_rng(13), "float32", replace(S(H=1, Hkv=1), **{axis: 0}))
    result = truth(problem_of(given), given, scales=True)
    assert result.tensors["o"]["float64"].shape == given.dy.shape
    if axis == "Sk":
        assert np.isneginf(result.tensors["lse"]["float64"]).all()
    if axis == "D":
        assert (result.tensors["lse"]["float64"] == float(mpmath.log(6))).all()


def test_no_sinks_in_the_axis_of_sinks_are_no_sinks():
    given = drawn(softcap)
    none = truth(problem_of(given), given, scales=True)
    empty = truth(problem_of(given, sinks=np.zeros((2, 0))), given, scales=True)
    same(none, empty)
    assert empty.tensors["dsinks"]["float64"].shape == (2, 0)
