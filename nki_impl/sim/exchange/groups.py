"""The ranks that take part in a collective: replica groups, rings, permutations.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.collectives.ReplicaGroup.html
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nki_impl.sim.errors import CollectiveError
from nki_impl.sim.tensor.objects import NKIObject

Rings = tuple[tuple[int, ...], ...]


@dataclass
class ReplicaGroup(NKIObject):
    """Disjoint lists of ranks. Each list is one group, and its order is the order of the ring.

    Every rank of the run belongs to one list. ``ReplicaGroup(())``, without lists, is one group of all ranks in order.

    >>> ReplicaGroup(((0, 1), (2, 3)))
    ReplicaGroup(_value=((0, 1), (2, 3)))
    """

    _value: Any = ()

    @staticmethod
    def from_partition_op(world_size: int, op: rg_partition_op, operand: int) -> ReplicaGroup:
        """Return the group of all ranks 0 .. world_size - 1 in which ranks with the same ``op(rank, operand)`` share a list.

        Source: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/_modules/nki/collectives.html

        >>> ReplicaGroup.from_partition_op(4, rg_partition_op.mod, 2)
        ReplicaGroup(_value=((0, 2), (1, 3)))
        """
        if not isinstance(op, rg_partition_op):
            raise _bad("a member of rg_partition_op", repr(op), "use ncc.rg_partition_op.mod", "op")
        if operand < (0 if op is rg_partition_op.bitwise_and else 1):
            raise _bad("a positive number", operand, "pass the number of ranks", "operand")
        lists: dict[int, list[int]] = {}
        for rank in range(world_size):
            lists.setdefault(_PARTITIONS[op](rank, operand), []).append(rank)
        return ReplicaGroup(tuple(map(tuple, lists.values())))


class rg_partition_op(Enum):
    """The operators of :meth:`ReplicaGroup.from_partition_op`. The documentation may have more than these three."""

    bitwise_and = "bitwise_and"
    div = "div"
    mod = "mod"


_PARTITIONS = {
    rg_partition_op.bitwise_and: operator.and_,
    rg_partition_op.div: operator.floordiv,
    rg_partition_op.mod: operator.mod,
}


def rings_of(group: object, world: int) -> Rings:
    """Return the groups as tuples.

    Raises :class:`CollectiveError` unless every rank 0 .. world-1 is in exactly one group.

    >>> rings_of(ReplicaGroup([[2, 0], [1]]), 3), rings_of(ReplicaGroup(()), 3)
    (((2, 0), (1,)), ((0, 1, 2),))
    """
    if not isinstance(group, ReplicaGroup):
        raise _bad(
            "a ReplicaGroup", repr(group), "wrap the lists: ncc.ReplicaGroup(((0, 1, 2, 3),))"
        )
    lists = group._value
    if not isinstance(lists, (list, tuple)) or not all(isinstance(g, (list, tuple)) for g in lists):
        raise _bad("a list or tuple of lists of ranks", repr(lists), "write ((0, 1), (2, 3))")
    if not lists:
        return (tuple(range(world)),)
    rings = tuple(tuple(ranks) for ranks in lists)
    flat = [rank for ring in rings for rank in ring]
    if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in flat):
        raise _bad("ranks as integers", rings, "list rank numbers")
    if len(set(flat)) != len(flat):
        raise _bad("groups that share no rank", rings, "list every rank once")
    if sorted(flat) != list(range(world)) or not all(rings):
        raise _bad(
            f"every rank of 0..{world - 1} in one group",
            rings,
            f"launch as many ranks as the groups list (run_ranks; nki.simulate has one rank), or list all {world}",
        )
    return rings


def ring_of(rings: Rings, rank: int) -> tuple[int, ...]:
    """Return the group that ``rank`` belongs to."""
    return next(ring for ring in rings if rank in ring)


def targets_of(pairs: object, world: int) -> dict[int, int]:
    """Return a dict from each source of a ``collective_permute`` to its target.

    ``pairs`` are (source, target). Raises :class:`CollectiveError` unless they form cycles; the device supports no
    other patterns.

    >>> targets_of([(0, 2), (2, 0)], 3)
    {0: 2, 2: 0}
    """
    if not isinstance(pairs, Sequence) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs
    ):
        raise _bad(
            "(source, target) pairs", repr(pairs), "write ((0, 1), (1, 0))", "source_target_pairs"
        )
    targets: dict[int, int] = dict(pairs)
    ranks = sorted(targets)
    if len(targets) != len(pairs) or sorted(targets.values()) != ranks:
        raise _bad(
            "cycles: each rank named once as source and once as target",
            repr(pairs),
            "close every cycle, such as ((0, 1), (1, 2), (2, 0))",
            "source_target_pairs",
        )
    if not ranks or ranks[0] < 0 or ranks[-1] >= world:
        raise _bad(
            f"ranks of 0..{world - 1}", repr(pairs), "name ranks of the run", "source_target_pairs"
        )
    return targets


def _bad(limit: str, got: object, fix: str, operand: str = "replica_group") -> CollectiveError:
    return CollectiveError(operand, limit, got, fix)
