"""The suite as one call: verdict, diagnosis and words of ``ringspec.testing.check``."""

import pytest

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.capabilities import Capabilities
from ringspec.conformance.mutants import MUTANTS, MutantTarget
from ringspec.conformance.targets.reference import reference_float32
from ringspec.errors import OptionError
from ringspec.testing import check

ONE = "ring/float32-zigzag-w4"


def test_a_right_target_passes_and_nothing_is_diagnosed():
    checked = check(reference_float32, "core", only=ONE)
    assert (checked.passed, checked.failures, checked.diagnosis, checked.wrong) == (
        True,
        (),
        None,
        (),
    )
    assert str(checked) == checked.headline == "passed 1 of 1 claimed, 0 not claimed"


def test_a_wrong_target_fails_and_its_bug_is_named():
    checked = check(MutantTarget(MUTANTS["stale-keys"], "float32"), "core", only=ONE)
    assert not checked.passed and checked.diagnosis["id"] == "stale-keys"
    assert checked.wrong == ("dq", "dk", "dv")
    text = str(checked)
    assert "[stale-keys], in 1 of the 1 failures" in " ".join(text.split())
    assert text.endswith(checked.headline)
    assert all(len(line) <= 86 or " " not in line.strip() for line in text.splitlines())


def test_a_run_that_executes_nothing_is_no_pass():
    target = NumPyTarget(lambda q, k, v: {}, Capabilities(workers=(7,)), name="none")
    checked = check(target, only=ONE)
    assert not checked.passed and checked.headline.endswith("no case was executed")


def test_progress_is_told_after_each_case_and_an_unknown_pattern_is_refused():
    seen = []
    check(reference_float32, "core", only=ONE, progress=lambda *at: seen.append(at))
    assert seen == [(1, 1, ONE)]
    with pytest.raises(OptionError):
        check(reference_float32, only="no/such/*")
