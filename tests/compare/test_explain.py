"""A verdict as a sentence: every fact that the verdict holds is in it."""

import dataclasses
import math

import numpy as np
import pytest

from ringspec.compare.explain import AXES, explain, explain_all
from ringspec.compare.verdict import KINDS, SHAPELESS, TensorVerdict, judge_tensor


def verdict(kind, **changes):
    fields = {"error": 412.3, "where": (0, 1, 5, 3), "got": 0.53, "want": 0.12} | changes
    return TensorVerdict("dk", 2, kind, rows=37, of=64, **fields)


def test_a_mismatch_is_one_sentence_with_worker_rows_place_values_and_size():
    assert explain(verdict("beyond bound")) == (
        "dk of worker 2: 37 of 64 rows beyond their bound; worst at batch 0, head 1, slot 5, d 3: "
        "got 0.53, want 0.12 (412 times the bound)"
    )


@pytest.mark.parametrize(
    "kind, words",
    [
        ("NaN", "with NaN or beyond their bound; first NaN at batch 0"),
        ("infinite", "wrong; infinite where it must not be at batch 0"),
        ("finite where -inf is due", "a finite number where -inf is expected at batch 0"),
        ("-inf where finite is due", "-inf where a finite number is expected at batch 0"),
        ("not zero", "not zero where nothing contributes, worst at batch 0"),
        ("beyond bound", "beyond their bound; worst at batch 0"),
    ],
)
def test_each_kind_has_words_of_its_own(kind, words):
    assert words in explain(verdict(kind, error=math.inf))


def test_no_kind_is_without_words():
    sentences = {explain(verdict(kind)) for kind in (*KINDS, *SHAPELESS)}
    assert len(sentences) == len(KINDS) + len(SHAPELESS)


def test_missing_wrong_shape_and_wrong_dtype_name_no_place():
    assert explain(TensorVerdict("lse", 1, "missing")) == "lse of worker 1: missing"
    assert explain(TensorVerdict("lse", 1, "wrong shape")) == "lse of worker 1: wrong shape"


def test_a_verdict_that_passes_says_how_close_it_came():
    passing = TensorVerdict("o", 0, "ok", 0.25, (0, 0, 0, 0), 1.0, 1.0, 0, 64)
    assert (
        explain(passing)
        == "o of worker 0: all 64 rows within their bound, at most 0.25 times its bound"
    )
    assert explain(TensorVerdict("o", 0, "ok")) == "o of worker 0: all 0 rows within their bound"


def test_places_have_the_axes_of_their_tensor():
    wrong = TensorVerdict("lse", 0, "beyond bound", 2.0, (1, 2, 3), 0.0, 1.0, 1, 1)
    assert "1 of 1 row beyond" in explain(wrong) and "batch 1, head 2, slot 3: got" in explain(
        wrong
    )
    sinks = TensorVerdict("dsinks", 0, "beyond bound", 2.0, (1, 2), 0.0, 1.0, 1, 1)
    assert "head 1, sink 2" in explain(sinks)
    other = TensorVerdict("state", 0, "beyond bound", 2.0, (1, 2), 0.0, 1.0, 1, 1)
    assert "index [1, 2]" in explain(other)
    assert set(AXES) == {"o", "lse", "dq", "dk", "dv", "dsinks", "dbias"}


def test_an_infinite_error_needs_no_figure():
    assert "infinitely many times the bound" in explain(verdict("beyond bound", error=math.inf))


def test_many_failures_are_cut_short_and_counted():
    one = verdict("beyond bound")
    wrong = [dataclasses.replace(one, worker=n) for n in range(11)] + [TensorVerdict("o", 0, "ok")]
    lines = explain_all(wrong, most=3).splitlines()
    assert len(lines) == 4 and lines[-1] == "and 8 more results, one for each tensor and worker"
    assert explain_all([TensorVerdict("o", 0, "ok")]) == ""
    assert len(explain_all(wrong[:2]).splitlines()) == 2


def test_a_tensor_of_a_worker_that_is_wrong_in_several_calls_is_told_once_and_nan_first():
    small, large = (dataclasses.replace(verdict("beyond bound"), error=x) for x in (3.0, 7.0))
    [line] = explain_all([small, large]).splitlines()
    assert "(7 times the bound)" in line and line.endswith("; wrong in 2 calls")
    [line] = explain_all([large, verdict("NaN")]).splitlines()
    assert "first NaN" in line


def test_a_real_verdict_reads_as_it_should():
    want = np.zeros((1, 1, 2, 2)) + 0.5
    got = np.float32(want)
    got[0, 0, 1, 0] = np.nan
    scale = np.ones((1, 1, 2))
    assert explain(judge_tensor("dv", got, want, want, scale, 1e-6, worker=1)) == (
        "dv of worker 1: 1 of 2 rows with NaN or beyond their bound; first NaN at batch 0, head 0, "
        "slot 1, d 0: got nan, want 0.5"
    )
