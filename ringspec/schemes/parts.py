"""Parts: the tensors that one rank holds for the cells of a shard, and how pieces of them are taken, placed and joined.

Every tensor of a part has the axes [batch, heads, tokens, ...]. The same functions serve numbers, and the multisets of
:mod:`~ringspec.schemes.multisets`, whose tensors hold Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.schemes.mesh import Mesh
from ringspec.schemes.scheme import INPUTS, Transfer
from ringspec.schemes.sharding import Shard

Tensors = dict[str, NDArray[Any]]
Join = Callable[[str, Tensors, Tensors], Tensors]


@dataclass(frozen=True)
class Part:
    """The tensors of one thing on one rank: ``tensors`` [batch, heads, tokens, ...] by name, for the cells of ``shard``."""

    shard: Shard
    tensors: Tensors


@dataclass(frozen=True)
class Message:
    """What one rank sends to another in a transfer: the cells of ``shard``; ``source`` = ``target`` is never listed."""

    source: int
    target: int
    shard: Shard


def slots(within: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """Return where each of ``wanted`` is in ``within``."""
    place = {number: slot for slot, number in enumerate(within)}
    return [place[number] for number in wanted]


def picked(part: Part, tokens: Sequence[int], heads: Sequence[int]) -> Part:
    """Return the cells tokens x heads of a part, in this order."""
    whole = tuple(tokens) == part.shard.tokens  # with its padding slots
    t = list(range(len(tokens))) if whole else slots(part.shard.tokens, tokens)
    h = slots(part.shard.heads, heads)
    # take, unlike an index, returns arrays in memory order, so that all ranks compute with the same matrix products.
    cut = {name: x.take(h, axis=1).take(t, axis=2) for name, x in part.tensors.items()}
    return Part(Shard(tuple(tokens), tuple(heads)), cut)


def placed(part: Part, piece: Part) -> Part:
    """Return a part in which the cells of ``piece`` have the tensors of ``piece``."""
    at = np.ix_(
        slots(part.shard.heads, piece.shard.heads), slots(part.shard.tokens, piece.shard.tokens)
    )
    tensors = {name: x.copy() for name, x in part.tensors.items()}
    for name, x in piece.tensors.items():
        tensors[name][:, at[0], at[1]] = x
    return Part(part.shard, tensors)


def joined(part: Part, piece: Part, thing: str, join: Join) -> Part:
    """Return a part in which the tensors of ``piece`` are joined to those of the same cells."""
    if piece.shard == part.shard:
        return Part(part.shard, join(thing, part.tensors, piece.tensors))
    old = picked(part, piece.shard.tokens, piece.shard.heads)
    return placed(part, Part(piece.shard, join(thing, old.tensors, piece.tensors)))


def common(source: Shard, target: Shard, tokens: Sequence[int] | None, here: bool) -> Shard:
    """Return the cells that a source has for a target; between ranks (not ``here``), only those of ``tokens``."""
    wanted, heads = set(target.real), set(target.heads)
    if tokens is not None and not here:
        wanted &= set(tokens)
    return Shard(
        tuple(token for token in source.real if token in wanted),
        tuple(head for head in source.heads if head in heads),
    )


def without_found(shard: Shard, found: set[tuple[int, int]]) -> Shard:
    """Return the tokens of ``shard`` for which a cell has not been found yet."""
    missing = {token for token, head in shard.cells if (token, head) not in found}
    return Shard(tuple(token for token in shard.tokens if token in missing), shard.heads)


def pieces_for(
    target: int, shards: Sequence[Shard], transfer: Transfer, mesh: Mesh
) -> list[tuple[int, Shard]]:
    """CP-1: return (source, cells) of everything that a target gets in a transfer, in the order of the sources.

    An input is taken from the target itself if it has the cell, otherwise from the first rank of the group that has it.
    Of a result, all ranks of the group contribute what they have.
    """
    group, wanted = mesh.group(target, transfer.axis), transfer.to.shards[target]
    copied = transfer.thing in INPUTS
    search = sorted(group, key=lambda source: source != target) if copied else group
    found: set[tuple[int, int]] = set()
    pieces = []
    for source in search:
        shard = common(shards[source], wanted, transfer.tokens, source == target)
        if copied:
            shard = without_found(shard, found)
        if shard.cells:
            found.update(shard.cells)
            pieces.append((source, shard))
    return sorted(pieces, key=lambda piece: group.index(piece[0]))
