"""Verdicts: each kind of wrong value is found, named and placed; right ones pass."""

import dataclasses

import numpy as np
import pytest

from ringspec.compare.verdict import KINDS, SHAPELESS, TensorVerdict, judge, judge_tensor
from ringspec.errors import ShapeError
from ringspec.formats import round_to, store

SHAPE = (1, 2, 4, 3)


def tensor(seed=0):
    return np.random.default_rng(seed).normal(size=SHAPE)


def verdict_of(got, want, factor=1e-3, scale=None, format="float32", name="dk", **settings):
    scale = np.ones(want.shape[:-1]) if scale is None else scale
    return judge_tensor(name, got, want, store(want, format), scale, factor, **settings)


def changed(value, place=(0, 1, 2, 1)):
    got = tensor().astype(np.float32)
    got[place] = value
    return got


def test_values_within_their_bound_pass_with_the_worst_of_them():
    want = tensor()
    got = want.copy()
    got[0, 1, 2, 1] += 0.5e-3
    verdict = verdict_of(got, want)
    assert verdict.ok and verdict.kind == "ok" and verdict.where == (0, 1, 2, 1)
    assert abs(verdict.error - 0.5) <= 1e-9
    assert (verdict.rows, verdict.of) == (0, 8)


def test_one_element_beyond_its_bound_fails_with_its_place_and_values():
    want = tensor()
    verdict = verdict_of(changed(5.0), want, worker=3)
    assert (verdict.kind, verdict.worker, verdict.where) == ("beyond bound", 3, (0, 1, 2, 1))
    assert (verdict.got, verdict.want) == (5.0, want[0, 1, 2, 1])
    assert (verdict.rows, verdict.of) == (1, 8)
    assert verdict.error == pytest.approx(abs(5.0 - want[0, 1, 2, 1]) / 1e-3)


def test_the_bound_is_of_the_row_and_not_of_the_tensor():
    """An error of 1e-3 passes in a row of scale 1000 and fails in a row of scale 1."""
    want, scale = tensor(), np.ones(SHAPE[:3])
    scale[0, 0, 0] = 1000.0
    got = want.copy()
    got[0, 0, 0, 0] += 1e-3
    assert verdict_of(got, want, 1e-5, scale).ok
    got[0, 0, 1, 0] += 1e-3
    verdict = verdict_of(got, want, 1e-5, scale)
    assert (verdict.kind, verdict.where) == ("beyond bound", (0, 0, 1, 0))


def test_a_nan_fails_wherever_it_stands_and_however_wide_the_bound():
    want = tensor()
    for place in np.ndindex(*SHAPE):
        verdict = verdict_of(changed(np.nan, place), want, factor=1e300, floor=1e300)
        assert (verdict.kind, verdict.where, verdict.rows) == ("NaN", place, 1)
        assert not verdict.error <= 1.0


@pytest.mark.parametrize("factor, floor", [(np.nan, 0.0), (1.0, np.nan)])
def test_a_bound_that_is_nan_passes_nothing(factor, floor):
    got = tensor() + 1e-9
    assert not verdict_of(got, tensor(), factor, floor=floor).ok


def test_infinity_fails_in_either_sign_under_its_own_name():
    want = tensor()
    assert verdict_of(changed(np.inf), want).kind == "infinite"
    assert verdict_of(changed(-np.inf), want).kind == "-inf where finite is due"
    assert verdict_of(changed(np.inf), want, factor=1e30).kind == "infinite"


def lse(*values):
    return np.array(values, dtype=np.float64).reshape(1, 1, -1)


def judged_lse(got, want):
    scale = np.ones(want.shape)
    return judge_tensor("lse", np.float32(got), want, np.float32(want), scale, 1e-6, floor=1e-3)


def test_the_lse_of_an_empty_row_is_minus_infinity_and_nothing_else():
    want = lse(-np.inf, 1.0)
    assert judged_lse(want, want).ok
    for value in (-1e30, 0.0, np.finfo(np.float32).min):
        verdict = judged_lse(lse(value, 1.0), want)
        assert (verdict.kind, verdict.where) == ("finite where -inf is due", (0, 0, 0))
        assert (verdict.want, verdict.rows, verdict.of) == (-np.inf, 1, 2)
    assert judged_lse(lse(np.inf, 1.0), want).kind == "infinite"
    assert judged_lse(lse(np.nan, 1.0), want).kind == "NaN"


def test_minus_infinity_for_a_row_with_keys_is_a_kind_of_its_own():
    verdict = judged_lse(lse(-np.inf, -np.inf), lse(-np.inf, 1.0))
    assert (verdict.kind, verdict.where) == ("-inf where finite is due", (0, 0, 1))


def test_a_row_of_scale_zero_must_be_zero_of_either_sign():
    want, scale = tensor(), np.ones(SHAPE[:3])
    want[0, 0, 1], scale[0, 0, 1] = 0.0, 0.0
    got = want.copy()
    assert verdict_of(got, want, scale=scale).ok
    got[0, 0, 1] = -0.0
    assert verdict_of(got, want, scale=scale).ok
    got[0, 0, 1, 2] = 1e-30
    verdict = verdict_of(got, want, scale=scale, floor=1.0)
    assert (verdict.kind, verdict.where, verdict.got) == ("not zero", (0, 0, 1, 2), 1e-30)


def judged_number(got, want, factor, format="float16"):
    """One number against a truth, in a row of scale |truth|."""
    want = np.full((1, 1, 1, 1), want)
    given = np.full(want.shape, got).astype(store(0.0, format).dtype)
    return verdict_of(given, want, factor, np.abs(want[..., 0]), format)


def test_infinity_is_right_where_the_rounded_result_is_infinite():
    assert judged_number(np.inf, 70000.0, 1e-3).ok
    assert judged_number(np.inf, 1e6, 1e-3).ok
    assert judged_number(-np.inf, -70000.0, 1e-3).ok
    assert not judged_number(-np.inf, 70000.0, 1e-3).ok
    assert judged_number(np.inf, 1e39, 1e-6, "float32").ok


def test_a_finite_number_may_stand_for_infinity_within_the_bound_of_the_truth():
    assert judged_number(65504.0, 65600.0, 1e-2).ok
    assert judged_number(65504.0, 1e6, 1e-2).kind == "beyond bound"


def test_infinity_near_the_largest_number_counts_as_the_overflow_threshold():
    assert judged_number(np.inf, 65500.0, 1e-3).ok
    assert judged_number(np.inf, 60000.0, 1e-3).kind == "infinite"


def test_the_correctly_rounded_value_passes_under_any_factor():
    want = np.abs(tensor(5)) + 0.1
    for name in ("bfloat16", "float16", "float32"):
        got = store(want, name)
        assert verdict_of(got, want, 0.0, format=name).ok
        up = store(round_to(want, name) * (1 + 2.0**-6), name)
        assert verdict_of(up, want, 0.0, format=name).kind == "beyond bound"


def test_the_first_kind_of_the_list_is_told_with_all_rows_that_fail():
    want = tensor()
    got = changed(9.0, (0, 0, 0, 0))
    got[0, 0, 0, 1] = 9.0  # the same row once more
    got[0, 0, 1, 0], got[0, 1, 3, 2] = np.inf, np.nan
    verdict = verdict_of(got, want)
    assert (verdict.kind, verdict.where, verdict.rows) == ("NaN", (0, 1, 3, 2), 3)
    got[0, 1, 3, 2] = want[0, 1, 3, 2]
    assert (verdict_of(got, want).kind, verdict_of(got, want).rows) == ("infinite", 2)
    assert len(set(KINDS) | set(SHAPELESS)) == 9


def test_padding_slots_are_not_compared_and_not_counted():
    want, padding = tensor(), np.array([False, False, False, True])
    got = changed(np.nan, (0, 0, 3, 0))
    got[0, 1, 3] = 7.0
    verdict = verdict_of(got, want, padding=padding)
    assert verdict.ok and verdict.of == 6
    got[0, 0, 2, 0] = 7.0
    assert verdict_of(got, want, padding=padding).where == (0, 0, 2, 0)
    everything = verdict_of(got, want, padding=np.ones(4, dtype=bool))
    assert everything.ok and everything.of == 0
    with pytest.raises(ShapeError, match="slots of axis 2"):
        verdict_of(got, want, padding=np.ones(3, dtype=bool))


def test_missing_shape_and_dtype_are_told_before_any_value():
    want = tensor()
    assert verdict_of(None, want).kind == "missing"
    assert verdict_of(want[:, :, :3], want).kind == "wrong shape"
    assert verdict_of(want[0], want).kind == "wrong shape"
    named = judge_tensor("o", np.float16(want), want, want, np.ones(SHAPE), 1.0, format="float32")
    assert named.kind == "wrong dtype"
    for other in (want.astype(np.int64), want.astype(np.complex128), want.astype(object)):
        assert verdict_of(other, want, 1e300).kind == "wrong dtype"


def test_a_scale_of_another_tensor_is_refused():
    with pytest.raises(ShapeError, match="row scale"):
        verdict_of(tensor(), tensor(), scale=np.ones((1, 2, 3)))


def test_every_worker_is_judged_and_the_wrong_one_is_named():
    want = [tensor(seed) for seed in range(4)]
    scale = [np.ones(SHAPE[:3])] * 4
    for wrong in range(4):
        got = [x.copy() for x in want]
        got[wrong][0, 0, 3, 2] += 1.0
        verdicts = judge("o", got, want, want, scale, 1e-6)
        assert [v.worker for v in verdicts if not v.ok] == [wrong]
        assert [v.worker for v in verdicts] == [0, 1, 2, 3]


def test_too_few_and_too_many_workers_and_no_tensor_at_all_fail():
    want = [tensor(seed) for seed in range(2)]
    scale = [np.ones(SHAPE[:3])] * 2
    assert [v.kind for v in judge("o", None, want, want, scale, 1.0)] == ["missing"] * 2
    assert [v.kind for v in judge("o", want[:1], want, want, scale, 1.0)] == ["ok", "missing"]
    more = judge("o", [*want, want[0]], want, want, scale, 1.0)
    assert [v.kind for v in more] == ["ok", "ok", "wrong shape"]


def test_each_worker_has_its_own_padding_and_scale():
    want = [np.ones((1, 1, 2))] * 2
    got = [np.array([[[1.0, 5.0]]]), np.array([[[5.0, 1.0]]])]
    first, last = np.array([True, False]), np.array([False, True])
    for padding, kinds in (
        ([last, first], ["ok", "ok"]),
        ([last, last], ["ok", "beyond bound"]),
        ([first, first], ["beyond bound", "ok"]),
    ):
        assert [v.kind for v in judge("lse", got, want, want, want, 1e-6, padding)] == kinds
    for scale, kinds in (
        ([10.0, 0.1], ["ok", "beyond bound"]),
        ([0.1, 10.0], ["beyond bound", "ok"]),
    ):
        scales = [x * np.ones((1, 1, 2)) for x in scale]
        assert [v.kind for v in judge("lse", got, want, want, scales, 0.5)] == kinds


def test_an_empty_tensor_passes_and_counts_nothing():
    nothing = np.zeros((1, 1, 0, 4))
    assert verdict_of(nothing, nothing) == TensorVerdict("dk", 0, "ok")


def test_a_verdict_is_plain_data():
    verdict = verdict_of(changed(5.0), tensor())
    values = dataclasses.asdict(verdict)
    assert all(isinstance(values[name], float) for name in ("error", "got", "want"))
    assert all(type(i) is int for i in (*verdict.where, verdict.rows, verdict.of))
