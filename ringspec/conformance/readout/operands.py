"""The mistakes of taking an input of a block, or rows and columns of a table over pairs, from a wrong source.

A *block* contains the pairs of one worker's queries with one worker's keys. Wrong sources are in
:mod:`ringspec.conformance.readout.sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout.geometry import Geometry
from ringspec.conformance.readout.kinds import Kind
from ringspec.conformance.readout.masks import Mask, numbers_of
from ringspec.conformance.readout.sources import Source, first_tiles, sources


def of_tables(
    geometry: Geometry,
    phase: str,
    distinct: bool,
    names: tuple[str, str],
    noun: str,
    made: Callable[[Operand, Source], Kind],
) -> Iterator[Kind]:
    """Yield the faults of wrong rows or columns of a table over pairs, as ``made`` describes them.

    ``names``: the choices of its rows and columns.
    """
    the = "" if noun == "dbias" else "the "
    for side, which, of in (("k", "columns", names[1]), ("q", "rows", names[0])):
        for source in sources(geometry, phase, side, distinct):
            if side == "q" or "head" not in dict(source.tables):
                yield made(Operand(f"the {which} of {the}{noun}", (of,)), source)


@dataclass(frozen=True)
class Operand:
    """An input of a block, with the ``noun`` that sentences use for it.

    ``of`` has the names of the choices that say from which token the input is taken.
    """

    noun: str
    of: tuple[str, ...]
    cost: float = 1.0

    def taken(self, source: Source) -> Kind:
        """Return the mistake of taking this input from a wrong source."""
        return Kind(self.told(source), tables_at(self.of, source), self.cost + source.cost)

    def given(self, source: Source) -> Kind:
        """Return the mistake of adding what belongs to this operand to that of a wrong source."""
        words = f"{self.noun} are added {source.added or f'to those {source.words}'}"
        return Kind(words, tables_at(self.of, source), self.cost + source.cost)

    def told(self, source: Source) -> str:
        many = self.noun.startswith(
            (
                "keys",
                "values",
                "queries",
                "the keys",
                "the queries",
                "the rows",
                "the columns",
                "lse and",
            )
        )
        if source.added:
            return f"{self.noun} {'are' if many else 'is'} taken {source.words}"
        if "head" in dict(source.tables) and not {"k", "v", "dq_k"}.isdisjoint(self.of):
            what = "" if self.noun == "keys and values" else f"{self.noun} of "
            return f"query head h reads {what}{source.words.removeprefix('of ')}"
        return f"{self.noun} {'are those' if many else 'is that'} {source.words}"


def tables_at(names: Sequence[str], source: Source) -> tuple[tuple[str, object], ...]:
    return tuple((f"{name}.{one}", table) for name in names for one, table in source.tables)


FORWARD_OPERANDS = {
    "k": (
        Operand("keys and values", ("k", "v")), Operand("keys", ("k",), 1.1), Operand("values", ("v",), 1.1),
    ),
    "q": (Operand("queries", ("q",), 1.1),),
}  # fmt: skip

BACKWARD_OPERANDS = {
    "k": (
        Operand("keys and values", ("k", "v", "dq_k")), Operand("keys", ("k", "dq_k"), 1.1),
        Operand("values", ("v",), 1.1), Operand("the keys in the scores", ("k",), 1.2),
        Operand("the keys in the product for dq", ("dq_k",), 1.05),
    ),
    "q": (
        Operand("lse", ("lse_of",)), Operand("delta", ("delta_dy", "delta_o")),
        Operand("lse and delta", ("lse_of", "delta_dy", "delta_o"), 1.02),
        Operand("queries and dy", ("q", "dk_q", "dy", "dv_dy")), Operand("dy", ("dy", "dv_dy"), 1.1),
        Operand("queries", ("q", "dk_q"), 1.1), Operand("the dy in the product for dv", ("dv_dy",), 1.05),
        Operand("the queries in the product for dk", ("dk_q",), 1.05), Operand("the dy in dp", ("dy",), 1.12),
        Operand("the queries in the scores", ("q",), 1.2), Operand("the o in delta", ("delta_o",), 1.1),
        Operand("the dy in delta", ("delta_dy",), 1.15),
        Operand("dy (also in delta)", ("dy", "dv_dy", "delta_dy"), 1.13),
        Operand("queries, dy, lse and delta", ("q", "dk_q", "dy", "dv_dy", "lse_of", "delta_dy", "delta_o"), 1.3),
    ),
}  # fmt: skip


def operand_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """Yield the mistakes of taking an input of a block from a wrong source."""
    number_of = numbers_of(masks)
    operands = FORWARD_OPERANDS if phase == "forward" else BACKWARD_OPERANDS
    for source in first_tiles(geometry) if phase == "backward" else ():
        for operand in operands["q"]:
            if operand.noun in ("lse", "delta", "lse and delta"):
                yield operand.taken(source)
    for side in ("k", "q"):
        for source in sources(geometry, phase, side, distinct):
            for operand in operands[side]:
                of_rows = "lse" in operand.noun or "delta" in operand.noun
                if side == "k" or of_rows or not source.words.startswith("as if"):
                    yield operand.taken(source)
            owners = dict(source.tables).get("worker")
            if side == "k" and owners is not None and not source.added:
                with_mask = masks[0].pattern[np.arange(len(owners))[:, None], owners[..., 0, 0, 0]]
                number = number_of(with_mask)
                if number or not (distinct or number is None):
                    both = operands["k"][0].taken(source)
                    words = f"keys, values and their positions are those {source.words}"
                    yield Kind(words, (*both.changes, ("mask", number)), 1.05)
