"""The mistakes of taking an input of a block, or rows and columns of a table over pairs, from a wrong source.

A *block* contains the pairs of one worker's queries with one worker's keys. Wrong sources are in
:mod:`ringspec.conformance.readout.faults.sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout.faults.choices import OPEN
from ringspec.conformance.readout.faults.kinds import Kind
from ringspec.conformance.readout.faults.masks import numbers_of
from ringspec.conformance.readout.faults.sources import Source, first_tiles, sources
from ringspec.conformance.readout.faults.visible import Mask
from ringspec.conformance.readout.problem.geometry import OPEN_CHAIN, Geometry
from ringspec.problem.model import Booleans


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
        return Kind(self.words_for(source), tables_at(self.of, source), self.cost + source.cost)

    def given(self, source: Source) -> Kind:
        """Return the mistake of adding what belongs to this operand to that of a wrong source."""
        words = f"{self.noun} are added {source.added or f'to those {source.words}'}"
        return Kind(words, tables_at(self.of, source), self.cost + source.cost)

    def words_for(self, source: Source) -> str:
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


ALL_OF = {"k": 0, "q": -1}  # the operand that consists of all inputs


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
            yield from with_positions(geometry, phase, side, source, masks[0], number_of, distinct)


def with_positions(
    geometry: Geometry,
    phase: str,
    side: str,
    source: Source,
    right: Mask,
    number_of: Callable[[Booleans], int | None],
    distinct: bool,
) -> Iterator[Kind]:
    """Yield the mistakes of taking all inputs of another worker's keys or queries, with their positions."""
    owners = dict(source.tables).get("worker")
    chain = phase == "backward" and OPEN_CHAIN in source.words
    if owners is None or source.added or (side == "q" and not chain):
        return
    operand = (FORWARD_OPERANDS if phase == "forward" else BACKWARD_OPERANDS)[side][ALL_OF[side]]
    there, every = owners[..., 0, 0, 0], np.arange(len(owners))
    number = number_of(right.pattern[(every[:, None], there) if side == "k" else (there, every)])
    words = f"{operand.noun.replace(' and', ',')} and their positions are those {source.words}"
    changes = (*operand.taken(source).changes, ("mask", number))
    if side == "k" and (number or not (distinct or number is None)):
        yield Kind(words, changes, 1.05)
    if chain and number is not None:
        names, travel = (("dq",), "travels") if side == "q" else (("dk", "dv"), "travel")
        words += f", and {' and '.join(names)} {travel} in this chain, too"
        yield Kind(words, (*changes, ("routed", (*names, OPEN))), 1.1)
