"""The reasons for which a scheme is refused."""

from __future__ import annotations

from dataclasses import dataclass

DEFECTS = (
    "malformed",  # shapes, names or numbers that no scheme can have
    "undeclared replica",  # a cell is on several ranks of a sharding that does not say `replicated`
    "no home",  # a cell that no rank holds at home
    "collective",  # the declared name of a transfer is not the one that follows from its shardings
    "absent",  # a token that a rank needs and nobody of its group, or the rank itself, does not hold
    "absent head",  # a key head that a rank needs and does not hold
    "missed",  # a visible triple (query, query head, key) that no rank computes
    "lost",  # a triple that is computed, but whose result does not reach a copy of a home cell
    "doubled",  # a triple that a copy of a home cell has more than once
    "foreign",  # a result of other queries, keys or heads, or of a hidden pair
    "not at home",  # a result that does not end in its home sharding
)


@dataclass(frozen=True)
class Defect:
    """One reason why a scheme is invalid; ``kind`` is one of DEFECTS, and ``where`` says in words what is wrong.

    ``phase`` is 'forward' or 'backward'; ``cell`` is (token, head), with None for an unknown number; ``rank`` and
    ``step`` say where. Each is None if the defect has no such place.
    """

    kind: str
    phase: str | None
    where: str
    cell: tuple[int | None, int | None] | None = None
    rank: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        phase = "" if self.phase is None else f" ({self.phase}{step})"
        return f"{self.kind}{phase}: {self.where}"
