"""What was found out from the results of one problem, as plain data that a report can hold.

A *problem* is a call whose results show what the kernel computed for each pair of tokens. A *fault* is a mistake of a
kernel at some place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.readout.faults.hints import hint_for
from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.conformance.readout.faults.places import PAIRS

# What a backward pass may compute instead of the gradient of attention.
SAME = "The backward pass does the same."
GRADIENT = "The backward pass is the gradient of this wrong forward pass."
SAVED = "The backward pass uses o and lse from before this mistake."
# Words that describe a mistake in blocks, and the words for the same mistake in single pairs.
OF_PAIRS = {
    "the block is not computed": "the scores are not computed",
    "the block is counted": "a pair is counted",
    "no pair is masked": "the mask does not hide what it should hide",
}
BY_ROUNDING = (
    "each pair has the correct weight to within 5 %, but the numbers differ by more than rounding allows. "
    "The readout does not see why; ringspec check measures it."
)


@dataclass(frozen=True)
class Named:
    """A fault in words: its ``kind``, its ``place`` ('' is everywhere), and a ``hint`` at the code to look at."""

    phase: str
    kind: str
    place: str
    cost: float
    hint: str

    @property
    def name(self) -> tuple[str, str, str]:
        """What identifies the same fault in another problem."""
        return self.phase, self.kind, self.place

    def sentence(self) -> str:
        """Return one sentence that describes the fault."""
        where = f", {self.place}" if self.place else ""
        if PAIRS not in self.place:
            return f"In the {self.phase} pass{where}, {self.kind}."
        kind = self.kind
        for of_blocks, of_pairs in OF_PAIRS.items():
            kind = kind.replace(of_blocks, of_pairs)
        return f"In the {self.phase} pass{where} (slots of a worker, from 0), {kind}."


@dataclass(frozen=True)
class PassRead:
    """What was found out about one pass. ``sets``: sets of faults that each give every number, the simplest set first.

    If no set does, ``sets`` is empty, and ``left`` says which matrices and blocks are not explained. ``base``: what the backward pass computes apart from the faults; '' if it is the
    gradient.
    """

    sets: tuple[tuple[Named, ...], ...] = ()
    left: str = ""
    base: str = ""

    @property
    def whole(self) -> bool:
        return not self.left


@dataclass(frozen=True)
class Reading:
    """What was found out from the results of one problem.

    ``right``: the results are correct to within the tolerance. A pass is None if it was not run, or if there is nothing
    to explain: the results are correct, or so close that the faults cannot be told from rounding. ``evaluations``: the
    work of the search, in tables over all pairs; not part of the plain data.
    """

    problem: str
    right: bool
    forward: PassRead | None = None
    backward: PassRead | None = None
    evaluations: int = 0

    @property
    def passes(self) -> tuple[PassRead, ...]:
        return tuple(one for one in (self.forward, self.backward) if one is not None)

    @property
    def explained(self) -> bool:
        """Whether the results are wrong and every wrong number is explained."""
        wrong = any(one.sets or one.base for one in self.passes)
        return not self.right and wrong and all(one.whole for one in self.passes)

    def as_dict(self) -> dict[str, Any]:
        """Return the reading as a dict of plain data."""
        return {
            "problem": self.problem,
            "right": self.right,
            "forward": self.forward and dataclasses.asdict(self.forward),
            "backward": self.backward and dataclasses.asdict(self.backward),
        }


def reading_from(data: Mapping[str, Any]) -> Reading:
    """Return the reading in ``data``, which must satisfy :func:`ringspec.conformance.report.lines.check_reading`."""
    return Reading(
        data["problem"], data["right"], pass_from(data["forward"]), pass_from(data["backward"])
    )


def pass_from(data: Mapping[str, Any] | None) -> PassRead | None:
    if data is None:
        return None
    sets = tuple(tuple(Named(**fault) for fault in one) for one in data["sets"])
    return PassRead(sets, data["left"], data["base"])


def in_words(fault: Fault) -> Named:
    """Return a fault of the search in the form that a reading holds."""
    return Named(*fault.name, round(fault.cost, 3), hint_for(fault.kind))
