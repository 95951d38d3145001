"""Seven ways to be wrong, and the name that each must get, whatever adapter the target is behind.

A test file of an adapter maps these to targets of its own; what has no meaning there it says.
"""

import pytest

ID = "ring/float32-zigzag-w4"
WORKERS = 4
# fault: (outcome, words of the message)
NAMED = {
    "segfault": ("crash", "SIGSEGV"),
    "hang": ("timeout", "no answer"),
    "print": ("pass", "it printed:"),
    "float16": ("wrong dtype", "is float16, expected float32"),
    "wrong worker": ("mismatch", "o of worker 0: 8 of 8 rows beyond their bound"),
    "mutate": ("mutated", "input"),
    "NaN": ("mismatch", "with NaN"),
}
each_fault = pytest.mark.parametrize("fault", NAMED)


def wrong_in(record):
    return [(one.tensor, one.worker, one.kind) for one in record.findings if one.kind != "ok"]


def assert_named(record, fault, words=None):
    """The record says what is wrong, where, and nothing else."""
    outcome, usual = NAMED[fault]
    assert record.outcome == outcome, (record.outcome, record.message)
    assert (words or usual) in record.message, record.message
    wrong = wrong_in(record)
    if fault == "NaN":
        [(_, worker, kind)] = wrong
        assert kind == "NaN" and worker > 0
        [finding] = [one for one in record.findings if one.kind != "ok"]
        assert finding.rows == 1 and len(finding.where) == 4
    if fault == "wrong worker":
        assert wrong == [("o", worker, "beyond bound") for worker in range(WORKERS)]
    if fault == "float16":
        assert {(tensor, kind) for tensor, _, kind in wrong} == {("o", "wrong dtype")}
