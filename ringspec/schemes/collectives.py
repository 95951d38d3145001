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
    """Return the name of the operation that turns ``shards`` into ``transfer.to``; several names if groups differ."""
    kinds = {kind_of_group(shards, transfer, mesh, group) for group in mesh.groups(transfer.axis)}
    if len(kinds) > 1:
        kinds.discard("local")
    return " or ".join(sorted(kinds))


def kind_of_group(
    shards: Sequence[Shard], transfer: Transfer, mesh: Mesh, group: tuple[int, ...]
) -> str:
    """Return the name of what one group does in a transfer."""
    flow: Flow = [
        (source, target, moving(shard, transfer))
        for target in group
        for source, shard in pieces_for(target, shards, transfer, mesh)
    ]
    flow = [piece for piece in flow if piece[2].real]
    if transfer.thing not in INPUTS:
        targets = targets_of_joined_cells(flow)
        if targets:
            return "all_reduce" if max(targets) == len(group) > 1 else "reduce_scatter"
    if all(source == target for source, target, _ in flow):
        return "local"
    if all_get_everything(flow, shards, transfer, group):
        return "all_gather"
    sources, arrivals = (Counter(piece[end] for piece in flow) for end in (0, 1))
    one_each = max(sources.values()) == max(arrivals.values()) == 1
    return "permute" if one_each else "all_to_all"


def moving(shard: Shard, transfer: Transfer) -> Shard:
    """Return the part of a shard that takes part in a transfer."""
    if transfer.tokens is None:
        return shard
    part = set(transfer.tokens)
    return Shard(tuple(token for token in shard.tokens if token in part), shard.heads)


def targets_of_joined_cells(flow: Flow) -> set[int]:
    """Return how many ranks get a cell, for the cells of which a rank gets results from several ranks."""
    arrivals: Counter[tuple[int, tuple[int, int]]] = Counter()
    for _, target, shard in flow:
        arrivals.update((target, cell) for cell in shard.cells)
    joined = {cell for (_, cell), count in arrivals.items() if count > 1}
    targets = Counter(cell for _, cell in arrivals if cell in joined)
    return set(targets.values())


def all_get_everything(
    flow: Flow, shards: Sequence[Shard], transfer: Transfer, group: tuple[int, ...]
) -> bool:
    """Return whether every rank of a group has, afterwards, everything that all ranks of the group had."""
    everything = {cell for r in group for cell in moving(shards[r], transfer).cells}
    return all(
        everything == {cell for _, target, shard in flow if target == r for cell in shard.cells}
        for r in group
    )
