"""Each bug of bugs.py shows on the problem that it names, where the right ring shows nothing."""

import importlib.util

import pytest

pytestmark = pytest.mark.torch
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch
    from independent.bugs import BUGS, WHAT
    from independent.noise import measured, seen
    from independent.problems import PROBLEMS
    from independent.reports import REPORTS
    from independent.torch_ring import PARTS

NAMES = list(BUGS) if HAS_TORCH else ["any"]


@pytest.mark.parametrize("name", NAMES)
def test_a_bug_shows_where_the_right_ring_does_not(name):
    bug = BUGS[name]
    dtype = getattr(torch, bug.dtype)
    assert seen(bug.shown_by, dtype, bug.parts)
    assert seen(bug.shown_by, dtype) == []


def test_every_bug_says_what_is_wrong_and_whose_report_it_is_like():
    assert len(BUGS) >= 36
    assert len(set(WHAT.values())) == len(BUGS)
    for bug in BUGS.values():
        assert bug.what.endswith(".")
        assert bug.shown_by in PROBLEMS
        assert set(bug.ids) <= set(REPORTS)
        assert set(bug.parts) <= set(PARTS)
    assert {one for bug in BUGS.values() for one in bug.ids} == set(REPORTS)


def test_the_direction_of_a_ring_of_two_cannot_be_wrong():
    """Two workers are blind to it: a check that these bugs are bugs of direction and of nothing else."""
    for name in ("dkv_against_kv", "kv_turns_round_in_backward", "owner_with_the_wrong_sign"):
        assert seen("striped-long", torch.float64, BUGS[name].parts) == []
        assert seen("causal", torch.float64, BUGS[name].parts)


def test_bugs_of_the_reported_lse_leave_everything_else_as_it_was():
    for name in ("lse_reported_in_base_2", "lse_rebased_twice"):
        wrong = measured("plain", torch.float32, 0, BUGS[name].parts)
        right = measured("plain", torch.float32, 0)
        for tensor in ("o", "dq", "dk", "dv"):
            assert torch.equal(wrong[tensor][0], right[tensor][0])
