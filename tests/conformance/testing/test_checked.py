"""The suite as one call: verdict, diagnosis and words of ``ringspec.testing.check``."""

import pytest

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.target.capabilities import Capabilities
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
    assert "[stale-keys]" in " ".join(text.split())
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


@pytest.mark.parametrize("timeout", [None, 100])
def test_a_target_that_ends_its_process_while_it_is_loaded_does_not_end_this_one(tmp_path, timeout):
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(OptionError, match="ends.py:target that can be loaded"):
        check(f"{tmp_path / 'ends.py'}:target", only=ONE, timeout=timeout)


def test_a_target_that_is_given_by_name_may_have_a_timeout():
    name = "ringspec.conformance.targets.reference:reference_float32"
    assert check(name, "core", only=ONE, timeout=100).passed
