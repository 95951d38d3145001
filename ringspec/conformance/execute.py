"""One case against a target: its calls, their answers, one outcome."""

from __future__ import annotations

import dataclasses
import time

from ringspec.compare.explain import explain_all
from ringspec.conformance.answers import Stop, ask, outputs_of
from ringspec.conformance.cases import Outputs, RunCase
from ringspec.conformance.conventions import as_seen
from ringspec.conformance.outcome import Record
from ringspec.conformance.target import Target


def run_case(target: Target, case: RunCase) -> Record:
    """One case against a target."""
    reason = case.why_not(target.capabilities)
    if reason is not None:
        return Record(case.id, "not claimed", case.needs, reason=reason, flags=case.flags)
    started = time.perf_counter()
    record = judged(target, case)
    return dataclasses.replace(record, seconds=time.perf_counter() - started)


def judged(target: Target, case: RunCase) -> Record:
    """The outcome of a case that the target claims."""
    claims = target.capabilities
    base = Record(case.id, "pass", case.needs, flags=case.flags, truth=case.truth)
    calls = list(case.make(claims))
    outputs: list[Outputs] = []
    try:
        for call in calls:
            result = ask(target, as_seen(call, claims))
            outputs.append(outputs_of(result, call, claims))
    except Stop as stop:
        return dataclasses.replace(
            base, outcome=stop.outcome, message=stop.message, findings=stop.findings
        )
    verdict = case.judge(claims, calls, outputs)
    return dataclasses.replace(
        base,
        outcome="pass" if verdict.passed else "mismatch",
        message=verdict.message or explain_all(verdict.findings),
        findings=verdict.findings,
        picture=verdict.picture,
    )
