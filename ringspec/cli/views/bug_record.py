"""Run a ring with a known bug, and record the arguments and results of the functions of which the ring consists.

A known bug is a ring in which some of these functions (pieces) are replaced
(:mod:`ringspec.conformance.diagnose.mutants`). This module wraps the pieces to record them. If no piece is replaced, the
record is that of the correct ring, :func:`ringspec.ring`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, Hop, Results
from ringspec.conformance.diagnose.mutants.ring import ring_results
from ringspec.conformance.target.protocol import Call
from ringspec.recipes import RECIPES
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.worker import KeySide, QuerySide, Side

SUMS = ("dq", "dk", "dv")

Array = NDArray[np.float64]
Where = tuple[str, int, int]  # pass, step, worker


@dataclasses.dataclass
class Record:
    """The arguments and results of the pieces of one ring.

    By (pass, step, worker):

    ``met``      the blocks of queries and of keys that the worker holds
    ``used``     the blocks with which the worker computes; missing if it does not compute
    ``allowed``  [n, n], True for the pairs that the mask of this computation makes visible
    ``running``  the softmax state after the step
    ``sums``     the accumulators after the step, by name

    By (pass, step): ``moved``, pairs [source, target] for each block that arrived, and ``arrived``, the block that each
    worker has after the transfer. ``owners``: the owner of each accumulator, by the id of its array; the array is stored
    as well, so that the id stays valid. ``results``: the results of the ring.
    """

    met: dict[Where, At] = dataclasses.field(default_factory=dict)
    used: dict[Where, tuple[QuerySide, KeySide]] = dataclasses.field(default_factory=dict)
    allowed: dict[Where, Any] = dataclasses.field(default_factory=dict)
    running: dict[Where, SoftmaxState] = dataclasses.field(default_factory=dict)
    sums: dict[Where, dict[str, Array]] = dataclasses.field(default_factory=dict)
    moved: dict[tuple[str, int], list[list[int]]] = dataclasses.field(default_factory=dict)
    arrived: dict[tuple[str, int], list[Any]] = dataclasses.field(default_factory=dict)
    owners: dict[int, tuple[int, Array]] = dataclasses.field(default_factory=dict)
    results: Results = dataclasses.field(default_factory=dict)

    def owner(self, sums: Array, otherwise: int) -> int:
        """Return the owner of the accumulator ``sums``, or ``otherwise`` if it is not recorded."""
        return self.owners.get(id(sums), (otherwise, sums))[0]

    def own(self, side: Side) -> None:
        """Record the owner of a block as the owner of its accumulators; called at the start of a pass."""
        for name in SUMS:
            if (value := getattr(side, name, None)) is not None:
                self.owners[id(value)] = side.owner, value


def recorded(call: Call, hooks: Hooks) -> Record:
    """Run the ring of ``call`` with the pieces in ``hooks``; record their arguments and results."""
    record = Record()
    with np.errstate(all="ignore"):
        record.results = ring_results(call, RECIPES["float64"], watched(hooks, record))
    return record


def watched(hooks: Hooks, record: Record) -> Hooks:
    """Wrap the pieces so that each writes its arguments or results into the record."""

    def start_of(piece: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        def wrapped(phase: str, side: Any) -> Any:
            changed = piece(phase, side)
            record.own(changed)
            return changed

        return wrapped

    def computes(at: At) -> bool:
        record.met[place_of(at)] = at
        return hooks.computes(at)

    def sees(at: At) -> tuple[QuerySide, KeySide]:
        record.used[place_of(at)] = hooks.sees(at)
        return record.used[place_of(at)]

    def mask(at: At, *of_tile: Any) -> Any:
        allowed = hooks.mask(at, *of_tile)
        record.allowed[place_of(at)] = np.broadcast_to(allowed, (1, 1, *allowed.shape[2:]))[0, 0]
        return allowed

    def merge(at: At, *parts: Any) -> SoftmaxState:
        record.running[place_of(at)] = hooks.merge(at, *parts)
        return record.running[place_of(at)]

    def add(at: At, name: str, total: Array, share: Array, format: str) -> Array:
        after = hooks.add(at, name, total, share, format)
        record.owners[id(after)] = record.owner(total, owner_of(at, name)), after
        record.sums.setdefault(place_of(at), {})[name] = after
        return after

    def hop(where: Hop, sides: Sequence[Side]) -> list[Any]:
        arrived = hooks.hop(where, sides)
        record.moved[where.phase, where.step] = movements(where, sides, arrived)
        record.arrived[where.phase, where.step] = arrived
        return arrived

    return dataclasses.replace(
        hooks,
        queries=start_of(hooks.queries),
        keys=start_of(hooks.keys),
        computes=computes,
        sees=sees,
        mask=mask,
        merge=merge,
        add=add,
        hop=hop,
    )


def place_of(at: At) -> Where:
    return at.phase, at.step, at.worker


def owner_of(at: At, name: str) -> int:
    return at.query.owner if name == "dq" else at.key.owner


def movements(where: Hop, sides: Sequence[Side], arrived: Sequence[Side]) -> list[list[int]]:
    """Return [source, target] for each block that arrived; blocks that stayed with their worker are left out.

    Blocks are recognised by the identity of their arrays.
    """
    of_queries = isinstance(sides[0], QuerySide)
    name = ("dq" if of_queries else "dk") if where.last else ("q" if of_queries else "k")
    moves = []
    for target, side in enumerate(arrived):
        sources = [
            worker for worker, one in enumerate(sides) if getattr(one, name) is getattr(side, name)
        ]
        usual = (target - where.direction) % where.workers
        if sources and target not in sources:
            moves.append([usual if usual in sources else sources[0], target])
    return moves
