"""Run a ring with a known bug, and record what each worker holds, computes, sends and receives.

A ring consists of functions (pieces), each of which does one part of the computation. A known bug replaces some of them
(:mod:`ringspec.conformance.diagnose.mutants`); without replacements, the ring computes what :func:`ringspec.ring`
computes. This module wraps the pieces to record their arguments and results.
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
    """What the pieces of one ring received and returned.

    These attributes have the key (pass, step, worker):

    ``met``      the block of queries and the block of keys that the worker holds
    ``used``     the two blocks with which the worker computes; missing if it does not compute
    ``allowed``  [n, n], True for the pairs that the mask of this computation makes visible
    ``running``  the softmax state after the step
    ``sums``     the accumulators after the step, by name

    These attributes have the key (pass, step):

    ``moved``    pairs [source, target] of workers, for each block that arrived
    ``arrived``  the block that each worker has after the transfer

    ``owners`` maps the id of an accumulator's array to the owner of the accumulator and to the array. A stored array is
    not freed, so its id stays unique. ``results``: the results of the ring.
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
        """Record, at the start of a pass, that the accumulators of a block have the same owner as the block."""
        for name in SUMS:
            if (value := getattr(side, name, None)) is not None:
                self.owners[id(value)] = side.owner, value


def recorded(call: Call, hooks: Hooks) -> Record:
    """Run the ring that ``call`` describes with the pieces in ``hooks``, and record the run."""
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
    """Return the workers [source, target] of each transferred block; blocks that stayed with their worker are left out.

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
