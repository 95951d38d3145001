"""Readouts: cases whose results show the weight of each query and key, so that a failure can be explained.

A readout makes two calls of the target, the program under test. The inputs of the first call are such that the weights
can be read from its results (:mod:`ringspec.conformance.readout.problem.pairs`). A second call with random inputs checks what
was read. If the target does not claim the number of workers, head ratio or format of a readout, a claimed one is used
instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ringspec.conformance.cases.calls import passes_for
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.problems import Seen, judged
from ringspec.conformance.readout.evidence import picture_of
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.problems import REASON, Problem
from ringspec.conformance.readout.problem.settings import (
    BANDED,
    CIRCULATIONS,
    FEATURES,
    SETTINGS,
    Setting,
)
from ringspec.conformance.readout.problem.shapes import names_of
from ringspec.conformance.target.capabilities import FORMATS, Capabilities, why_not
from ringspec.conformance.target.protocol import Call

SMOKE = SETTINGS[:3]
RULES = {
    "documents": ("MASK-5",),
    BANDED: ("MASK-5",),
    "softcap": ("FWD-3",),
    "dlse": ("BWD-3", "RING-7"),
    "bias": ("FWD-1", "BWD-8", "RING-6"),
    "dropout": ("FWD-6", "FWD-7", "DROP-1", "BWD-2", "BWD-7"),
    "padding": ("LAYOUT-5",),
    "sinks": ("FWD-5", "BWD-9", "RING-12"),
}


def cases(profile: str = "core") -> list[RunCase]:
    """Return the readouts; 'smoke' has only the first three."""
    return [case_of(setting) for setting in (SMOKE if profile == "smoke" else SETTINGS)]


def case_of(setting: Setting) -> RunCase:
    alone = Capabilities(
        layouts=(setting.layout,),
        circulations=(setting.circulation or CIRCULATIONS[0],),
        directions=(1, -1),
        masks=("causal", "window", "documents"),
        features=(*chain(*map(names_of, FEATURES)), "several-sinks", "scale"),
        formats=FORMATS,
    )

    def claimed(claims: Capabilities) -> str | None:
        found = problem_for(setting, claims)
        if isinstance(found, str):
            return found
        return why_not(claims, needs_of(found, claims))

    def needed(claims: Capabilities) -> dict[str, Any]:
        return needs_of(fitted(setting, claims), claims)

    def make(claims: Capabilities) -> list[Call]:
        problem = fitted(setting, claims)
        return list(problem.asked)

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        problem = fitted(setting, claims)
        read = problem.call, problem.proof
        found = judged(Seen(claims, problem.cases, read, tuple(problem.results(outputs))))
        if found.passed:
            return found
        return dataclasses.replace(found, picture=picture_of(problem, problem.results(outputs)[0]))

    return RunCase(
        setting.id,
        REASON,
        needed(alone),
        make,
        judge,
        rules=("RING-1", "FWD-4", "BWD-5", "MASK-9", *RULES.get(setting.mask, ())),
        claimed=claimed,
        narrowed=needed,
    )


def needs_of(problem: Problem, claims: Capabilities) -> dict[str, Any]:
    return dict(problem.requires) | {"passes": passes_for(problem.cases[0], claims)}


def fitted(setting: Setting, claims: Capabilities) -> Problem:
    found = problem_for(setting, claims)
    assert isinstance(found, Problem), found
    return found
