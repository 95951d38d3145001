"""Compute which errors a run will detect, by running a correct program with the claims of the target.

The target is the program under test; its claims say what it supports and how it rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.report.limits import FORMATS, FormatLimits, limits_of
from ringspec.conformance.run.suite import Progress, run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import Reference
from ringspec.recipes import recipe


def power_of(
    claims: Capabilities, cases: Sequence[RunCase], progress: Progress | None = None
) -> tuple[FormatLimits, ...]:
    """Return the limits that a correct target with these claims has in a run of ``cases``.

    A limit is the smallest error that the cases detect. If an input format has noise cases, which test the statistics
    of rounding errors, only these run, because they detect the smallest errors. For any other format, all cases run.
    The correct program rounds as the target declares, or by default as usual for the input format.
    """
    program = Reference(recipe("float64"))
    program.capabilities = dataclasses.replace(
        claims,
        axes="BHSD",
        lse="hidden" if claims.lse == "hidden" else "natural",
        lse_of_empty_rows="minus-infinity",
        repeats_bitwise=True,
    )
    return limits_of(run(program, deciding(claims, cases), progress=progress).records)


def deciding(claims: Capabilities, cases: Sequence[RunCase]) -> list[RunCase]:
    """Return the claimed cases that determine the limits."""
    claimed = [case for case in cases if case.why_not(claims) is None]
    chosen: list[RunCase] = []
    for name in FORMATS:
        same = [case for case in claimed if case.needs_of(claims).get("inputs") == name]
        chosen += [case for case in same if case.id.startswith("noise/")] or same
    return chosen
