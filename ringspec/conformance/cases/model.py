"""A case of a run: the calls to make, and the function that judges their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call, PerWorker

__all__ = ["Judgement", "RunCase"]

# The cases of these are added to a run if the target claims them.
IF_CLAIMED = ("layouts", "schemes", "worker-bits")
PROFILES = ("smoke", "core", "full", "seeds", "noise", "sharp", *IF_CLAIMED)
Outputs = Mapping[str, PerWorker]


@dataclass(frozen=True)
class Judgement:
    """The verdict of a case on the results of its calls, with the reasons for it.

    ``passed``: the verdict. ``findings``: the comparison of each tensor with the correct values. ``message``: what is
    wrong, in one or two sentences; if empty, the report describes the findings. ``picture``: the attention pattern, if
    the case reads it from the results: {"expected": 2-D list, "got": 2-D list}. ``noise``: the outcome of the
    statistical tests (:class:`ringspec.conformance.judge.noise.Examined`) as plain data.
    """

    passed: bool
    findings: tuple[Finding, ...] = ()
    message: str = ""
    picture: dict[str, Any] | None = None
    noise: dict[str, Any] | None = None


Make = Callable[[Capabilities], Sequence[Call]]
Judge = Callable[[Capabilities, Sequence[Call], Sequence[Outputs]], Judgement]


@dataclass(frozen=True)
class RunCase:
    """One case. Its id never changes and its inputs are fixed.

    The target is the program under test, and its claims say what it supports. ``reason``: the purpose of the case.
    ``needs``: the claims that it requires of a target. ``truth``: what its results are compared with, such as 'exact'.
    ``flags``: the known bugs that it detects. ``rules``: the rules of the specification that it tests.

    ``make(claims)`` returns the calls, which run in this order. ``judge(claims, calls, outputs)`` gets the results in
    the same order: for each expected tensor one array per worker, in axis order [B, H, n, d] and in its storage dtype.
    The lse is left out if the target does not return it, and converted to float64 and base e if the target returns it
    in base 2. Missing tensors, wrong shapes and dtypes, exceptions and changed inputs end the case before ``judge`` is
    called.

    ``claimed(claims)`` returns the reason why the case is not claimed, or None if it is; the default compares ``needs``
    with the claims. ``narrowed(claims)`` returns what the case needs if the target runs only a part of it; the default
    is ``needs``.
    """

    id: str
    reason: str
    needs: dict[str, Any]
    make: Make
    judge: Judge
    flags: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    truth: str = "exact"
    claimed: Callable[[Capabilities], str | None] | None = None
    narrowed: Callable[[Capabilities], dict[str, Any]] | None = None

    def why_not(self, claims: Capabilities) -> str | None:
        """Return the first reason why a target does not claim this case; None if it claims the case."""
        return why_not(claims, self.needs) if self.claimed is None else self.claimed(claims)

    def needs_of(self, claims: Capabilities) -> dict[str, Any]:
        """Return what the case requires of a target with these claims."""
        return self.needs if self.narrowed is None else self.narrowed(claims)
