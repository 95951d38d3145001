"""Diagnose some of a run's failing cases, and report what most of these diagnoses say.

One bug can make hundreds of cases fail, and a diagnosis takes a second or two. So :data:`MOST` limits the number of
diagnosed cases of each kind. The limit is low for cases with very simple inputs, for which many bugs give the same
results. It is higher for rings with random inputs, for which different bugs give different results.

A readout is a case whose results show the attention weight of each query and key
(:mod:`ringspec.conformance.cases.readout`). All readouts together give an explanation: sentences that say what the
program under test does wrong.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from ringspec.conformance.cases.model import Outputs, RunCase
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.candidates import Suspect
from ringspec.conformance.diagnose.layouts import diagnosed_layout
from ringspec.conformance.diagnose.localise import ORDER, localise
from ringspec.conformance.diagnose.match import diagnose, pairs_of
from ringspec.conformance.diagnose.mutants import MUTANTS, run_mutant
from ringspec.conformance.diagnose.schemes import diagnosed_scheme
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.readout.conclusion import Conclusion, conclude
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.problem.settings import SETTINGS
from ringspec.conformance.readout.proof.read_proven import read_proven
from ringspec.conformance.readout.proof.replay import explains
from ringspec.conformance.readout.reading import Reading, reading_from
from ringspec.conformance.report.records import FAILURES, Finding, Record
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import due_of
from ringspec.formats import store

MOST = {
    "readout": 2, "probe": 2, "property": 2, "special": 1, "adversarial": 2, "attention": 3, "ring": 8, "noise": 2,
    "pairs": 2, "other": 3,
}  # fmt: skip
ENOUGH = 3  # a bug that this many cases name is not refuted by other cases
FEWEST = 0.4  # fraction of the diagnosed failures that a bug must explain to be named
MOST_PAIRS = 1 << 19  # B * H * Sq * Sk of a call; larger calls take too long


@dataclass
class Diagnoser:
    """Diagnoses failing cases.

    Call an instance with each failing case, from any thread. It diagnoses the first cases of each kind and skips the
    rest.

    ``taken``: number of cases diagnosed so far, by kind. ``readings``: what was read from failing readouts. ``conclusion``:
    the explanation by all readings, which is computed at the first failing case that is not a readout. ``known``: id,
    title and links of the known bug that gives the results of a readout; empty if no bug does, or several.
    ``ambiguous``: whether several do; only cases that are not readouts can then tell these bugs apart.
    """

    taken: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    readings: list[Reading] = field(default_factory=list)
    conclusion: Conclusion | None = None
    known: dict[str, Any] = field(default_factory=dict)
    ambiguous: bool = False

    def __call__(
        self,
        claims: Capabilities,
        case: RunCase,
        calls: Sequence[Call],
        outputs: Sequence[Outputs],
        findings: Sequence[Finding] = (),
    ) -> dict[str, Any] | None:
        """Return the diagnosis of a case as plain data, or None if none is made.

        ``findings``: the comparison of each tensor with the truth.
        """
        if calls[0].operation == "layout":
            return diagnosed_layout(calls, outputs)
        try:
            if calls[0].operation == "context_parallel":
                return diagnosed_scheme(calls, outputs)
            problem = readout_problem(case.id, claims)
            if problem is None:
                found = self.explained(calls, outputs)
            else:
                found = self.read(problem, outputs)
            if found.get("explained") and not self.ambiguous:
                return found
            data = self.compared(claims, case, calls, outputs, findings)
        except Exception as error:  # an error in ringspec must not end the run of a target
            text = f"none: the diagnosis failed because of an error in ringspec ({type(error).__name__}: {error})"
            return {"id": None, "title": "no known bug", "text": text}
        return self.combined(found, data)

    def learn(self, diagnoses: Sequence[dict[str, Any]]) -> None:
        """Take over the diagnoses of readouts that other processes judged."""
        if self.conclusion is None and diagnoses:
            self.readings = [reading_from(one["reading"]) for one in diagnoses]
            for one in diagnoses:
                self.name(one)

    def name(self, data: dict[str, Any]) -> None:
        """Remember the known bug that gives the results of a readout."""
        if data.get("id"):
            self.ambiguous = bool(data["alike"])
            self.known = {} if data["alike"] else {x: data[x] for x in ("id", "title", "links")}

    def read(self, problem: Problem, outputs: Sequence[Outputs]) -> dict[str, Any]:
        """Read the results of a readout, and return as a diagnosis what they show to be wrong."""
        # Not by faults of earlier readings: with several processes, these are others.
        reading = read_proven(problem, outputs)
        with self.lock:
            self.readings.append(reading)
        return {"reading": reading.as_dict(), "text": "\n".join(conclude([reading]).sentences)}

    def explained(self, calls: Sequence[Call], outputs: Sequence[Outputs]) -> dict[str, Any]:
        """Return the explanation by the readouts if it reproduces the outputs of a case; otherwise an empty dict."""
        with self.lock:
            if self.conclusion is None:
                self.conclusion = conclude(self.readings)
        if not explains(self.conclusion, calls, outputs):
            return {}
        return {"explained": True, "text": " ".join(self.conclusion.sentences)} | self.known

    def combined(self, found: dict[str, Any], data: dict[str, Any] | None) -> dict[str, Any] | None:
        """Join the explanation ``found`` of a case with ``data``, the diagnosis that compares it with known bugs."""
        if data is None or not found:
            return found or data
        if "reading" in found:
            self.name(data)
        return data | found | {"text": "\n".join(filter(None, (found["text"], data["text"])))}

    def compared(
        self,
        claims: Capabilities,
        case: RunCase,
        calls: Sequence[Call],
        outputs: Sequence[Outputs],
        findings: Sequence[Finding],
    ) -> dict[str, Any] | None:
        """Find the known bug that gives the outputs.

        Returns None if a call is too large or if :data:`MOST` cases of this kind have been diagnosed already.
        """
        kind = kind_of(case.id)
        if any(pairs_of(call) > MOST_PAIRS for call in calls):
            return None
        with self.lock:
            if self.taken[kind] >= MOST[kind]:
                return None
            self.taken[kind] += 1
        return diagnosed(claims, calls, outputs, findings)


def readout_problem(id: str, claims: Capabilities) -> Problem | None:
    """Return the problem that a target solves in a readout; None if the case is not a readout."""
    setting = next((one for one in SETTINGS if one.id == id), None)
    found = None if setting is None else problem_for(setting, claims)
    return found if isinstance(found, Problem) else None


def kind_of(id: str) -> str:
    """Return the kind of a case: the first part of its id, or 'other'.

    >>> kind_of("probe/pattern/full"), kind_of("block/plain")
    ('probe', 'other')
    """
    first = id.split("/", 1)[0]
    return first if first in MOST else "other"


def diagnosed(
    claims: Capabilities,
    calls: Sequence[Call],
    outputs: Sequence[Outputs],
    findings: Sequence[Finding] = (),
) -> dict[str, Any] | None:
    """Name the known bug that gives the outputs, or say where they are wrong; return plain data."""
    found = diagnose(claims, calls, outputs)
    data: dict[str, Any] = {"id": None, "title": "no known bug"}
    lines: list[str] = []
    if found is not None:
        data, lines = found.as_dict(), found.lines()
        data["must_fail"] = {
            one.id: must_fail(claims, calls, one.suspect)
            for one in (found.named, *found.alike)
            if one is not None and one.suspect is not None
        }
    if data["id"] is None:
        failing = {one.tensor for one in findings if one.kind != "ok"}
        data["where"] = where(claims, calls, outputs, failing or ORDER)
        lines += data["where"]
    return data | {"text": "\n".join(lines)}


def where(
    claims: Capabilities,
    calls: Sequence[Call],
    outputs: Sequence[Outputs],
    failing: Collection[str] = ORDER,
) -> list[str]:
    """Say where the results are wrong in the first ring call with an error in the ``failing`` tensors."""
    found = (localise(claims, *one, failing) for one in zip(calls, outputs, strict=True))
    return next(filter(None, found), [])


@lru_cache(maxsize=1)
def core_cases() -> dict[str, RunCase]:
    return {case.id: case for case in run_cases("core")}


def must_fail(claims: Capabilities, calls: Sequence[Call], suspect: Suspect) -> list[str]:
    """Return the ids of the cases that a target with these claims must fail if it has the suspect's bug.

    The target claims these cases, the bug is known to fail them, and the suspect's results are computed to confirm
    this. Only cases with the operation and circulation of ``calls`` count, because a kernel may have the bug in only
    one operation or circulation. Noise cases are left out, because their verdict depends on the rounding that the
    target declares.
    """
    found = []
    for id in sorted(set(suspect.mutant.kills.values())):
        case = core_cases().get(id)
        if case is None or id.startswith("noise/") or case.why_not(claims) is not None:
            continue
        asked = list(case.make(claims))
        if not {way_of(call) for call in asked} <= {way_of(call) for call in calls}:
            continue
        try:
            outputs = [given_by(claims, call, suspect) for call in asked]
        except Exception:  # the suspect cannot compute this case, so it cannot refute the bug
            continue
        if not case.judge(claims, asked, outputs).passed:
            found.append(id)
    return found


def way_of(call: Call) -> tuple[str, str]:
    """Return the operation and the circulation of a call; with one worker the circulation is ''."""
    return call.operation, call.circulation if call.workers > 1 else ""


def given_by(claims: Capabilities, call: Call, suspect: Suspect) -> Outputs:
    """Return the suspect's results for a call, in the form in which cases judge them."""
    recipe = recipe_for(claims, call.formats)
    results = run_mutant(suspect.program, call, recipe, suspect.way)
    return {
        name: tuple(store(np.asarray(x), due.format) for x in results[name])
        for name, due in due_of(call).items()
        if name != "lse" or claims.lse != "hidden"
    }


def most_likely(records: Sequence[Record]) -> dict[str, Any] | None:
    """Combine the diagnoses of a run; return None if no case was diagnosed and no readout explains a failure.

    A diagnosis names one bug, and lists as possible the bugs that give the same results. ``id``, ``title``, ``links``:
    the bug that most diagnoses name or list; in a tie, the bug that is named more often. ``count``: the number of
    diagnoses that name or list it; ``of``: the number of all diagnoses. Expected failures are left out, because their
    reason is known. ``alike``: ids of bugs that no case distinguishes from that bug. ``also``: bugs that the remaining
    diagnoses name, as {id, title, count, refuted_by}. ``explanation``: the explanation by the readouts
    (:func:`explanation_of`), or None. ``explainable`` is False if only schemes fail, which no readout explains.

    ``id`` is None if no bug is in at least the fraction :data:`FEWEST` of the diagnoses. A bug in fewer than
    :data:`ENOUGH` diagnoses is ignored if other cases refute the bug (:func:`refuting`).
    """
    failed = [record for record in records if record.outcome != "expected failure"]
    diagnoses = [one.diagnosis for one in failed if one.diagnosis and "id" in one.diagnosis]
    explanation = explanation_of(failed)
    if not diagnoses and explanation is None:
        return None
    named, possible = Counter[str](), Counter[str]()
    for one in diagnoses:
        if one.get("id"):
            named[one["id"]] += 1
            possible.update({one["id"], *one.get("alike", [])})
    refuted = {id: refuting(id, records) for id, count in possible.items() if count < ENOUGH}
    left = Counter({id: count for id, count in possible.items() if not refuted.get(id)})
    explaining = [id for id, n in left.items() if named[id] or n == len(diagnoses)]
    best = max(explaining, key=lambda id: (left[id], named[id]), default=None)
    if best is not None and left[best] < FEWEST * len(diagnoses):
        best = None
    unexplained = [one for one in diagnoses if best not in (one.get("id"), *one.get("alike", []))]
    others = Counter(one["id"] for one in unexplained if one.get("id"))
    summary: dict[str, Any] = {
        "explanation": explanation,
        "id": None, "title": "no known bug", "count": 0, "of": len(diagnoses), "links": [], "alike": [],
        "also": [
            {"id": id, "title": title_of(id, diagnoses), "count": n, "refuted_by": refuted.get(id, [])}
            for id, n in others.most_common()
        ],
    }  # fmt: skip
    if all(one.id.startswith("scheme/") for one in failed if one.diagnosis):
        summary["explainable"] = False
    if best is None:
        return summary
    about = next((one for one in diagnoses if one.get("id") == best), {})
    return summary | {
        "id": best,
        "title": title_of(best, diagnoses),
        "links": about.get("links") or list(MUTANTS[best].links if best in MUTANTS else ()),
        "alike": [id for id, n in left.items() if n == left[best] and id != best],
        "count": left[best],
    }


def explanation_of(records: Sequence[Record]) -> dict[str, Any] | None:
    """Return the explanation by the readouts of a run; None if they explain nothing.

    ``sentences``, ``alternatives``, ``hint`` and ``shown_by`` are those of
    :class:`~ringspec.conformance.readout.conclusion.Conclusion`. ``explained``: ids of the failing cases whose results
    ``sentences`` reproduce. ``failures``: number of failing cases. ``wrong``: ids of the readouts that failed.
    ``right``: number of readouts that passed.
    """
    failed = [one for one in records if one.outcome in FAILURES]
    readings = {
        one.id: reading_from(one.diagnosis["reading"])
        for one in failed
        if one.diagnosis and "reading" in one.diagnosis
    }
    found = conclude(list(readings.values()))
    if not found.sentences:
        return None
    others = [one.id for one in failed if (one.diagnosis or {}).get("explained")]
    passed = [one for one in records if one.id.startswith("readout/") and one.outcome == "pass"]
    return {
        "sentences": list(found.sentences),
        "alternatives": [one.words for one in found.alternatives],
        "explained": [*found.explained, *others],
        "failures": len(failed),
        "hint": found.hint,
        "shown_by": found.shown_by,
        "wrong": list(readings),
        "right": len(passed),
    }


def title_of(id: str, diagnoses: Sequence[dict[str, Any]]) -> str:
    """Return the title of a bug, from a diagnosis that names the bug or else from the list of known bugs."""
    titles = (str(one["title"]) for one in diagnoses if one.get("id") == id)
    return next(titles, MUTANTS[id].title if id in MUTANTS else id)


def refuting(id: str, records: Sequence[Record]) -> list[str]:
    """Return the cases that refute a bug: cases that it must fail, if at least one ran and all that ran passed.

    The result is [] if the bug is not refuted. A refuted bug is named by chance: for example, a tiny case in which
    every row is empty looks like any bug that hides all keys.
    """
    known = {
        case
        for record in records
        for case in (record.diagnosis or {}).get("must_fail", {}).get(id, ())
    }
    ran = {one.id: one.outcome for one in records if one.outcome in ("pass", *FAILURES)}
    ours = sorted(known & ran.keys())
    return ours if all(ran[case] == "pass" for case in ours) else []
