"""Run one case against a target (the program under test): make its calls, judge the results, and record the outcome."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ringspec.compare.explain import explain_all
from ringspec.conformance.cases.model import Outputs, RunCase
from ringspec.conformance.report.coverage import used_by
from ringspec.conformance.report.records import Record
from ringspec.conformance.run.call import Stop, ask, outputs_of, with_printed
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Target

# Makes a diagnosis, or None, from a failed case: claims, case, calls, outputs, findings.
Diagnose = Callable[..., dict[str, Any] | None]


def run_case(
    target: Target, case: RunCase, diagnose: Diagnose | None = None, capture: bool = True
) -> Record:
    """Run one case against a target. If results are wrong, ``diagnose`` is called to explain them.

    ``capture``: what the target prints goes into the record instead of stdout.
    """
    reason = case.why_not(target.capabilities)
    if reason is not None:
        return Record(case.id, "not claimed", case.needs, reason=reason, flags=case.flags)
    started = time.perf_counter()
    record = judged(target, case, diagnose, capture)
    return dataclasses.replace(record, seconds=time.perf_counter() - started)


def judged(target: Target, case: RunCase, diagnose: Diagnose | None, capture: bool) -> Record:
    """Return the record of a case that the target claims."""
    claims = target.capabilities
    calls = list(case.make(claims))
    needs = case.needs_of(claims)
    used = used_by(needs, calls)
    base = Record(case.id, "pass", needs, flags=case.flags, truth=case.truth, used=used)
    outputs: list[Outputs] = []
    printed = ""
    try:
        for call in calls:
            result, text = ask(target, as_seen(call, claims), capture)
            printed += text
            outputs.append(outputs_of(result, call, claims))
    except Stop as stop:
        return dataclasses.replace(
            base, outcome=stop.outcome, message=stop.message, findings=stop.findings
        )
    verdict = case.judge(claims, calls, outputs)
    message = verdict.message or explain_all(verdict.findings)
    diagnosis = None
    if diagnose is not None and not verdict.passed:
        diagnosis = diagnose(claims, case, calls, outputs, verdict.findings)
    return dataclasses.replace(
        base,
        outcome="pass" if verdict.passed else "mismatch",
        message=with_printed(message, printed) if verdict.passed else message,
        findings=verdict.findings,
        picture=verdict.picture,
        noise=verdict.noise,
        diagnosis=diagnosis,
    )
