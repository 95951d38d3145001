"""Choose a larger noise case that a target can run in a given time, by timing the usual noise case.

A noise case tests the statistics of rounding errors; the target is the program under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringspec.conformance.cases import sharp
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.case import run_case
from ringspec.conformance.target.protocol import Target
from ringspec.errors import OptionError, shown

# The smallest error detected in N times as many elements, relative to the usual noise case, is
# FLOOR + (1 - FLOOR) / sqrt(N), fitted to the limits of o in bf16 at 0.05 to 0.5 million elements. FLOOR stands for the
# errors that correct kernels may have.
FLOOR = 0.27


@dataclass(frozen=True)
class Sharp:
    """The ``case`` to add to a run, or None, and a line that explains the choice in ``words``."""

    case: RunCase | None
    words: str


@dataclass(frozen=True)
class Estimate:
    """A larger noise case, with its estimated time and the estimated relative error of o that it detects."""

    case: RunCase
    seconds: float
    limit: float

    def words(self) -> str:
        return f"{self.case.id}, about {self.seconds:.0f} s, detects an error of about {self.limit:.1e} in o"


def chosen(target: Target, spec: str, seconds: float) -> Sharp:
    """Choose the largest case that can run in ``seconds``.

    The usual noise case runs once, to measure its time. Raises OptionError for a folder of results, which cannot be
    called.
    """
    if spec.startswith("dir:"):
        fix = "leave out --sharp, which calls the target with more inputs"
        raise OptionError("a target that can be called", shown(spec), fix)
    larger = claimed(target)
    if not larger:
        return Sharp(None, "sharp: the target claims no larger noise case in bfloat16")
    usual = next(case for case in run_cases("noise") if larger[0].id.startswith(f"{case.id}-"))
    record = run_case(target, usual)
    limit = (record.noise or {}).get("limits", {}).get("o", {}).get("factor")
    if record.outcome != "pass" or limit is None:
        return Sharp(
            None, f"sharp: no larger case, because {usual.id} gave no detection limit for o"
        )
    return fitting(estimates(larger, record.seconds, limit), seconds)


def claimed(target: Target) -> list[RunCase]:
    """Return the larger noise cases, of all sizes, in the first ring that the target claims to support."""
    of_size = len(sharp.SIZES)
    every = [case for case in run_cases("sharp") if case.why_not(target.capabilities) is None]
    return every[:of_size]


def estimates(cases: list[RunCase], seconds: float, limit: float) -> list[Estimate]:
    """Estimate time and detected error of each larger case, from those of the usual case."""
    return [
        Estimate(
            case,
            seconds * sharp.pairs_ratio(*size),
            limit * (FLOOR + (1 - FLOOR) / math.sqrt(sharp.elements_ratio(*size))),
        )
        for case, size in zip(cases, sharp.SIZES, strict=True)
    ]


def fitting(found: list[Estimate], seconds: float) -> Sharp:
    """Choose one of the estimates in ``found``, which must be in increasing order of size.

    >>> fitting([Estimate(None, 7.0, 2e-4)], 5).words
    'sharp: the smallest larger noise case would take about 7 s'
    """
    fit = [one for one in found if one.seconds <= seconds]
    if not fit:
        words = f"the smallest larger noise case would take about {found[0].seconds:.0f} s"
        return Sharp(None, f"sharp: {words}")
    return Sharp(fit[-1].case, f"sharp: {fit[-1].words()}")
