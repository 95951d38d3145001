"""The name of a collective operation, derived from two shardings.

In a group along the axis, look at which rank gets which cells from which rank:

``local``           nobody gets anything from another rank
``permute``         each rank sends all that it has to one other rank, and keeps nothing
``all_gather``      each rank sends all that it has to all others
``all_to_all``      each rank sends different cells to different ranks
``reduce_scatter``  several ranks have a result for one cell; one rank gets the joined result
``all_reduce``      the same, and all ranks of the group get the joined result
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringspec.schemes.mesh import Mesh
from ringspec.schemes.parts import pieces_for
from ringspec.schemes.scheme import INPUTS, Transfer
from ringspec.schemes.sharding import Shard

# Pieces (source, target, cells) of one group.
Flow = list[tuple[int, int, Shard]]


def derived_kind(shards: Sequence[Shard], transfer: Transfer, mesh: Mesh) -> str:
    """CP-1: return the name of the operation that turns ``shards`` into ``transfer.to``.

    Tokens that end on one rank of a group, and tokens that end on several, are two operations, as for text beside sharded
    tokens: their names are joined by ' + '.
    """
    names: set[str] = set()
    for group in mesh.groups(transfer.axis):
        flow = [
            (source, target, moving(shard, transfer.tokens))
            for target in group
            for source, shard in pieces_for(target, shards, transfer, mesh)
        ]
        held = {r: moving(shards[r], transfer.tokens) for r in group}
        classes: dict[int, list[int]] = {}
        for token, count in Counter(
            t for r in group for t in moving(transfer.to.shards[r], transfer.tokens).real
        ).items():
            classes.setdefault(count, []).append(token)
        for tokens in classes.values():
            part = [(source, target, moving(shard, tokens)) for source, target, shard in flow]
            own = {r: moving(shard, tokens) for r, shard in held.items()}
            names.add(
                kind_of_flow([piece for piece in part if piece[2].cells], own, transfer.thing)
            )
    if len(names) > 1:
        names.discard("local")
    return " + ".join(sorted(names)) or "local"


def kind_of_flow(flow: Flow, held: dict[int, Shard], thing: str) -> str:
    """Return the name of what a group does with some tokens; ``held`` is what each rank of the group had of them."""
    if thing not in INPUTS:
        targets = targets_of_joined_cells(flow)
        if targets:
            return "all_reduce" if max(targets) == len(held) > 1 else "reduce_scatter"
    if all(source == target for source, target, _ in flow):
        return "local"
    everything = {cell for shard in held.values() for cell in shard.cells}
    got = {r: {cell for _, to, shard in flow if to == r for cell in shard.cells} for r in held}
    if all(cells == everything for cells in got.values()):
        return "all_gather"
    sources, arrivals = (Counter(piece[end] for piece in flow) for end in (0, 1))
    one_each = max(sources.values()) == max(arrivals.values()) == 1
    return "permute" if one_each else "all_to_all"


def moving(shard: Shard, tokens: Sequence[int] | None) -> Shard:
    """Return the part of a shard with these tokens; None: all of it."""
    if tokens is None:
        return shard
    part = set(tokens)
    return Shard(tuple(token for token in shard.tokens if token in part), shard.heads)


def targets_of_joined_cells(flow: Flow) -> set[int]:
    """Return how many ranks get a cell, for the cells of which a rank gets results from several ranks."""
    arrivals: Counter[tuple[int, tuple[int, int]]] = Counter()
    for _, target, shard in flow:
        arrivals.update((target, cell) for cell in shard.cells)
    joined = {cell for (_, cell), count in arrivals.items() if count > 1}
    targets = Counter(cell for _, cell in arrivals if cell in joined)
    return set(targets.values())
