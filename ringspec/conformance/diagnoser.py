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
from ringspec.conformance.noise_of import geometry_of, in_order, question_of
from ringspec.conformance.outcome import Record
from ringspec.conformance.precision import recipe_for
from ringspec.conformance.target import Call
from ringspec.errors import RingspecError

MOST = {
    "probe": 2, "property": 2, "special": 1, "adversarial": 2, "attention": 3, "ring": 8, "noise": 2,
    "other": 3,
}  # fmt: skip
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
    many; ``alike``: ids that no case tells from it; None where no case was diagnosed. Ties go to the bug that was named outright
    more often. A bug that explains fewer than :data:`FEWEST` of them is none.
    """
    diagnoses = [record.diagnosis for record in records if record.diagnosis]
    if not diagnoses:
        return None
    named, possible = Counter[str](), Counter[str]()
    about: dict[str, dict[str, Any]] = {}
    for one in diagnoses:
        if one.get("id"):
            about.setdefault(one["id"], one)
            named[one["id"]] += 1
            possible.update({one["id"], *one.get("alike", [])})
    best = max(about, key=lambda id: (possible[id], named[id]), default=None)
    if best is None or possible[best] < FEWEST * len(diagnoses):
        return {
            "id": None,
            "title": "no known bug",
            "count": 0,
            "of": len(diagnoses),
            "links": [],
            "alike": [],
        }
    return {
        "id": best,
        "title": about[best]["title"],
        "links": about[best].get("links", []),
        "alike": [id for id, n in possible.items() if n == possible[best] and id != best],
        "count": possible[best],
        "of": len(diagnoses),
    }
