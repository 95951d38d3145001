"""A case of a run as data: what is called, and how the answer is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call, PerWorker

__all__ = ["Judgement", "RunCase"]

PROFILES = ("smoke", "core", "full", "seeds", "noise")
Outputs = Mapping[str, PerWorker]


@dataclass(frozen=True)
class Judgement:
    """What a case says of the answers to its calls.

    ``passed`` decides; ``findings`` are the tensors that were compared, ``message`` says what is
    wrong in one or two sentences (empty: the worst finding is told), ``picture`` is the attention
    pattern where a probe read it, {"expected": 2-D list, "got": 2-D list}; ``noise`` what the
    statistical tests saw (:class:`ringspec.conformance.cases.noise.Examined`), as plain data.
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

    ``reason`` says why it is there, ``truth`` what it is compared with ('exact' or otherwise); ``flags``
    and ``rules`` are known bugs that it would find, and rules that it shows. ``make(claims)`` gives the calls, which are made one after the other. ``judge(claims, calls,
    outputs)`` sees their answers in the same order: for each tensor of ``calls.due_of(call)`` one
    array a worker, of the due shape in axis order [B, H, n, d] and in its storage dtype (a hidden
    lse is left out; a base-2 lse has become natural, float64). Missing tensors, wrong shapes and
    dtypes, exceptions and changed inputs never reach a judge. ``claimed(claims)`` is the reason why
    the case is not claimed, None if it is; by default it follows from ``needs``. ``narrowed(claims)``: what
    the case needs as that target is given it, where this is less than ``needs``.
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
        """The first reason why a target does not claim this case; None: it does."""
        return why_not(claims, self.needs) if self.claimed is None else self.claimed(claims)

    def needs_of(self, claims: Capabilities) -> dict[str, Any]:
        """What the case requires as a target with these claims is given it."""
        return self.needs if self.narrowed is None else self.narrowed(claims)
