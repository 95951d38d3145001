"""What a fault is: a kind of mistake at a place; and the factors that a kernel may apply by mistake.

A *kind* is a mistake, expressed as wrong values of a ring's choices. A *fault* is a kind at a place, which is a set of
pairs of tokens (:mod:`ringspec.conformance.readout.faults.places`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ringspec.conformance.readout.faults.choices import (
    Choices,
)
from ringspec.conformance.readout.faults.merge_formulas import LN2
from ringspec.conformance.readout.faults.places import Place
from ringspec.conformance.readout.problem.geometry import Geometry


@dataclass(frozen=True)
class Kind:
    """A mistake: ``changes`` are names of choices in :class:`Choices` with their wrong values.

    ``words`` complete 'In the forward pass, ...'. ``cost`` is lower for more usual mistakes. ``of_workers``: the choice
    is made for whole workers or their queries, not for blocks. ``only``: the one of KERNELS that makes the mistake;
    '' if both do. ``of_tiles``: the mistake is a rule about tiles, which says nothing of some queries or keys alone.
    """

    words: str
    changes: tuple[tuple[str, object], ...]
    cost: float = 1.0
    of_workers: bool = False
    only: str = ""
    of_tiles: bool = False

    @cached_property
    def slots(self) -> frozenset[str]:
        """The names of the choices that it changes."""
        return frozenset(slot for slot, _ in self.changes)

    @cached_property
    def names(self) -> frozenset[str]:
        """The same without the ending 'worker', 'head' or 'slot'."""
        return frozenset(slot.split(".")[0] for slot in self.slots)


Name = tuple[str, str, str]  # of a fault: the pass, the words of its kind and those of its place


@dataclass(frozen=True)
class Fault:
    """A mistake (``kind``) at a ``place`` in one pass: ``phase`` is 'forward' or 'backward'."""

    phase: str
    kind: Kind
    place: Place

    @property
    def cost(self) -> float:
        return self.kind.cost + self.place.cost

    @property
    def name(self) -> Name:
        """The name by which the same fault is recognised in another problem."""
        return self.phase, self.kind.words, self.place.words

    def applied(self, choices: Choices) -> Choices:
        for slot, value in self.kind.changes:
            choices = choices.with_value(slot, self.place.table, value, self.kind.only)
        return choices


# Many kernels compute blocks that a mask hides in part by other code than the others: which of them, and the words that
# follow 'a block'.
WITH_A_MASK = {"masked": "that is masked in part", "whole": "that needs no mask"}
OWN_SCALE = "multiplied by 1/sqrt(D), not by the scale that is given"


def factors(geometry: Geometry, distinct: bool) -> list[tuple[str, float]]:
    """Return the factors that a kernel may apply by mistake, with words that follow 'is' or 'are'."""
    scale, W, group = geometry.scale, geometry.workers, geometry.group
    usual = (geometry.usual_scale or scale) / scale
    numbers = {3, W, W + 1, group} if distinct else set(range(3, max(W + 2, group + 1, 9)))
    return [
        ("too large by a factor of 2", 2.0),
        ("too small by a factor of 2", 0.5),
        ("negated", -1.0),
        ("multiplied by ln 2", LN2),
        ("divided by ln 2", 1 / LN2),
        ("not multiplied by the scale", 1 / scale),
        ("multiplied by the scale twice", scale),
        ("multiplied by the square root of the scale, not by the scale", scale**-0.5),
        ("multiplied by the scale and divided by ln 2", scale / LN2),
        *(((OWN_SCALE, usual),) if usual != 1 or not distinct else ()),
        *((f"too large by a factor of {x}", float(x)) for x in sorted(numbers - {1, 2})),
        *((f"divided by {x}", 1.0 / x) for x in sorted(numbers - {1, 2})),
    ]


def factors_beside_scores(geometry: Geometry, distinct: bool) -> list[tuple[str, float]]:
    """Return the factors on what is correct without a factor, with words that follow 'is' or 'are'."""
    scale = geometry.scale
    usual = [(words, x) for words, x in factors(geometry, distinct) if "scale" not in words]
    return [("multiplied by the scale", scale), ("divided by the scale", 1 / scale), *usual]


def factors_on(names: Sequence[str], geometry: Geometry, distinct: bool) -> list[tuple[str, float]]:
    """Return the factors on gradients: dq and dk contain the scale once, and dv does not contain it."""
    if "dv" not in names:
        return factors(geometry, distinct)
    by_scale, *others = factors_beside_scores(geometry, distinct)
    words = by_scale[0] if len(names) == 1 else f"{by_scale[0]} once more"
    return [(words, by_scale[1]), *others]


GRADIENTS = (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk"), ("dq", "dk", "dv"))


def listing(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def at_counts(names: Sequence[str], value: object) -> tuple[tuple[str, object], ...]:
    return tuple((f"{name}_count", value) for name in names)
