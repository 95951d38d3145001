"""The possible outcomes of a case, and the record of one case.

A record holds plain data, so that ``ringspec.render`` can draw a report without importing this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringspec.compare.verdict import TensorVerdict

__all__ = ["Record"]

# The comparison of one tensor of one worker.
Finding = TensorVerdict
TENSORS = ("o", "lse", "dq", "dk", "dv")  # those that have limits
OUTCOMES = {
    "pass": "every compared value is within its bound",
    "mismatch": "a value is beyond its bound, or is NaN or infinite where it must not be",
    "wrong shape": "a tensor has the wrong shape, or the wrong number of workers",
    "wrong dtype": "a tensor has a different dtype from the one that the case requires",
    "missing": "a claimed tensor is not in the result",
    "mutated": "the target changed its inputs",
    "refused": "the target refused a case that it claims",
    "error": "the target raised an exception or reported a failure",
    "garbage": "the target's answer is not a valid result",
    "exit": "the target's process exited instead of answering",
    "crash": "a signal ended the target's process",
    "timeout": "no answer within the time limit",
    "not claimed": "the target's capabilities do not cover the case",
    "expected failure": "failed, as the list of expected failures says",
    "unexpected pass": "passed, although the list of expected failures says that it fails",
    "not run": "the run ended before this case",
}
NO_FAILURES = ("pass", "not claimed", "expected failure", "not run")
FAILURES = tuple(outcome for outcome in OUTCOMES if outcome not in NO_FAILURES)


@dataclass(frozen=True)
class Record:
    """The outcome of one case, as plain data.

    The target is the program under test. ``id``: the case. ``outcome``: one of :data:`OUTCOMES`. ``needs``: what the
    case requires of a target. ``reason``: why the case is not claimed, or why its failure is expected. ``message``:
    what is wrong; for a pass, what the target printed. ``findings``: the comparison of each worker's tensors with the
    correct values. ``truth``: what the results are compared with, such as 'exact'. ``seconds``: how long the case took.
    ``flags``: the known bugs that the case detects. ``used``: which of the values that the target claims its
    calls used, such as the layouts (:func:`ringspec.conformance.report.coverage.used_by`). ``picture``, ``noise``, ``diagnosis``: the attention
    pattern, the outcome of the statistical tests and the named bug as plain data, or None.
    """

    id: str
    outcome: str
    needs: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    message: str = ""
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    flags: tuple[str, ...] = ()
    truth: str = "exact"
    picture: dict[str, Any] | None = None
    noise: dict[str, Any] | None = None
    diagnosis: dict[str, Any] | None = None
    used: dict[str, Any] = field(default_factory=dict)
