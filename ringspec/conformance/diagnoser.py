"""The diagnoses of a run: a few failing cases are looked at closely, and what most of them say is the verdict.

One bug fails hundreds of cases, and a diagnosis takes a second or two; so a run diagnoses at most
:data:`MOST` of them: few probes and extreme inputs, on which many bugs look alike, and more rings of random
inputs, which tell bugs apart.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringspec.compare.noise import predict
from ringspec.conformance.capabilities import Capabilities
from ringspec.conformance.cases import Outputs, RunCase
from ringspec.conformance.diagnose import diagnose, pairs_of
from ringspec.conformance.localise import localise
from ringspec.conformance.mutants import MUTANTS
from ringspec.conformance.noise_of import geometry_of, in_order, question_of
from ringspec.conformance.outcome import FAILURES, Record
from ringspec.conformance.precision import recipe_for
from ringspec.conformance.target import Call
from ringspec.errors import RingspecError

MOST = {
    "probe": 2, "property": 2, "special": 1, "adversarial": 2, "attention": 3, "ring": 8, "noise": 2,
    "pairs": 2, "other": 3,
}  # fmt: skip
ENOUGH = 3  # cases that name a bug, from which on no other case refutes them
FEWEST = 0.4  # part of the diagnosed failures that a name must explain
MOST_PAIRS = 1 << 19  # B * H * Sq * Sk of a call; larger ones take too long


@dataclass
class Diagnoser:
    """Called with each failing case; counts how many it has taken. Safe to call from threads."""

    taken: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self,
        claims: Capabilities,
        case: RunCase,
        calls: Sequence[Call],
        outputs: Sequence[Outputs],
    ) -> dict[str, Any] | None:
        """The diagnosis as plain data; None where none is made."""
        kind = kind_of(case.id)
        if any(pairs_of(call) > MOST_PAIRS for call in calls):
            return None
        with self.lock:
            if self.taken[kind] >= MOST[kind]:
                return None
            self.taken[kind] += 1
        return diagnosed(claims, calls, outputs)


def kind_of(id: str) -> str:
    """
    >>> kind_of("probe/pattern/full"), kind_of("block/plain")
    ('probe', 'other')
    """
    first = id.split("/", 1)[0]
    return first if first in MOST else "other"


def diagnosed(
    claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]
) -> dict[str, Any] | None:
    """The bug by name, or where the answer is wrong."""
    found = diagnose(claims, calls, outputs)
    data: dict[str, Any] = {"id": None, "title": "no known bug"}
    lines: list[str] = []
    if found is not None:
        data, lines = found.as_dict(), found.lines()
    if data["id"] is None:
        data["where"] = where(claims, calls, outputs)
        lines += data["where"]
    return data | {"text": "\n".join(lines)}


def where(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> list[str]:
    """Localisation of the first ring call that is wrong."""
    for call, got in zip(calls, outputs, strict=True):
        if call.operation != "ring":
            continue
        try:
            question, geometry = question_of(call), geometry_of(call)
            noise = predict(question.attention, recipe_for(claims, call.formats), geometry)
        except RingspecError:  # inputs at the edge of what float64 holds
            continue
        lines = localise(question, geometry, in_order(call, got), noise.sd)
        if lines:
            return lines
    return []


def most_likely(records: Sequence[Record]) -> dict[str, Any] | None:
    """What the diagnosed failures of a run say together.

    ``title``, ``id``, ``links`` of the bug that most of them name, or may be, ``count`` of them and of how
    many (expected failures have their reason already and are left out); ``alike``: ids that no case tells from it; None where no case was diagnosed. Ties go to the bug
    that was named outright more often. A bug that explains fewer than :data:`FEWEST` of them is none, and
    so is one that few of them name while the case that it must fail passes (:func:`refuted`).
    """
    failed = [record for record in records if record.outcome != "expected failure"]
    diagnoses = [record.diagnosis for record in failed if record.diagnosis]
    if not diagnoses:
        return None
    named, possible = Counter[str](), Counter[str]()
    in_other_forms: set[str] = set()
    for one in diagnoses:
        if one.get("id"):
            named[one["id"]] += 1
            possible.update({one["id"], *one.get("alike", [])})
            in_other_forms.update(one.get("forms", {}))
    passed = {record.id for record in records if record.outcome == "pass"}
    for id in [id for id, count in possible.items() if count < ENOUGH and id not in in_other_forms]:
        if refuted(id, passed, records):
            del possible[id]
    explaining = [id for id, n in possible.items() if named[id] or n == len(diagnoses)]
    best = max(explaining, key=lambda id: (possible[id], named[id]), default=None)
    if best is None or possible[best] < FEWEST * len(diagnoses):
        return {
            "id": None,
            "title": "no known bug",
            "count": 0,
            "of": len(diagnoses),
            "links": [],
            "alike": [],
        }
    about = next((one for one in diagnoses if one.get("id") == best), None)
    about = about or {"title": MUTANTS[best].title, "links": list(MUTANTS[best].links)}
    return {
        "id": best,
        "title": about["title"],
        "links": about.get("links", []),
        "alike": [id for id, n in possible.items() if n == possible[best] and id != best],
        "count": possible[best],
        "of": len(diagnoses),
    }


def refuted(id: str, passed: set[str], records: Sequence[Record]) -> bool:
    """Whether the cases that a mutant is known to fail were run, and all of them passed.

    That a few cases look like the mutant is then chance: a tiny case in which every row is empty looks
    like any bug that hides all keys.
    """
    known = set(MUTANTS[id].kills.values()) if id in MUTANTS else set()
    ran = known & {record.id for record in records if record.outcome in ("pass", *FAILURES)}
    return bool(ran) and ran <= passed
