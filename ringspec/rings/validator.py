"""The validator of schedules: it proves that a schedule is correct, or lists what is missing, repeated or lost.

A *pair* is (query owner, key owner): the queries of one worker and the keys of one worker. *Accumulators* are gradients
that travel and are added to. The validator follows every tensor that travels, worker by worker and step by step. In a
valid schedule, every pair is computed once (RING-2, RING-11), all accumulators return to their owners (RING-4, RING-5),
and each permute is a permutation of all workers (RING-3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringspec.errors import ScheduleError
from ringspec.problem.checks import function
from ringspec.spec.schedule import (
    KEY_ACCUMULATORS,
    KEY_INPUTS,
    QUERY_ACCUMULATORS,
    QUERY_INPUTS,
    Pair,
    Schedule,
    Step,
    Transfer,
)

KINDS = ("permute", "gather", "reduce_scatter")
# The inputs and the accumulators that may travel in a schedule that moves keys, or queries.
SIDES = {
    "keys": (KEY_INPUTS, KEY_ACCUMULATORS),
    "queries": (QUERY_INPUTS, QUERY_ACCUMULATORS),
}


@dataclass(frozen=True)
class Defect:
    """One reason why a schedule is invalid; ``kind`` is one of DEFECTS.

    ``where`` says in words what is wrong. ``pair`` is the (query owner, key owner) for which it is wrong, or None.
    """

    kind: str
    where: str
    pair: Pair | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


DEFECTS = (
    "malformed",  # lengths, names or kinds that no schedule can have
    "not a permutation",  # a source or target of a permute is missing, repeated or out of range
    "absent block",  # a worker computes with a block that it does not hold
    "torn block",  # a worker holds only a part of the block that it computes with
    "missed pair",  # a pair of blocks that is neither computed nor skipped
    "doubled pair",  # a pair of blocks that is computed more than once
    "skipped pair is computed",
    "skipped pair is visible",
    "accumulator not at home",  # an accumulator that does not end at its owner
)


def validate(schedule: Schedule, visible: Callable[[int, int], bool] | None = None) -> None:
    """Prove that a schedule is valid, or raise ScheduleError with every defect found.

    ``visible(query_owner, key_owner)`` returns whether any query of the first worker attends to any key of the second.
    Without this function, a skipped pair is a defect, because nothing proves that the mask hides the pair (RING-11).

    >>> from ringspec.rings.schedules import forward_schedule
    >>> validate(forward_schedule("kv", 4))
    """
    defects = find_defects(schedule, visible)
    if defects:
        raise ScheduleError(
            "a schedule in which every pair of blocks is computed once and every accumulator returns to its owner",
            "; ".join(str(p) for p in defects[:8]) + (" ..." if len(defects) > 8 else ""),
            "correct the named steps; forward_schedule and backward_schedule make valid ones",
            tuple(defects),
        )


def find_defects(
    schedule: Schedule, visible: Callable[[int, int], bool] | None = None
) -> list[Defect]:
    """Return all defects of a schedule in the order of the steps; ``visible`` is as in :func:`validate`."""
    if visible is not None:
        function(visible, "visible")
    defects = malformed(schedule)
    if defects:
        return defects
    workers, names = schedule.workers, schedule.inputs + schedule.accumulators
    # held[name][worker]: owners of the blocks whose `name` that worker holds.
    held = {name: [{r} for r in range(workers)] for name in names}
    met: dict[Pair, int] = {}
    for t, step in enumerate(schedule.steps):
        for worker, pair in schedule.pairs(t):
            block = step.uses[worker]
            assert block is not None
            defects += check_holds(schedule, held, t, worker, block)
            met[pair] = met.get(pair, 0) + 1
        for transfer in step.transfers:
            defects += move(schedule, held, t, transfer)
    defects += coverage(schedule, met, visible)
    for name in schedule.accumulators:
        for r in range(workers):
            if held[name][r] != {r}:
                owners = ", ".join(map(str, sorted(held[name][r]))) or "nobody"
                defects.append(
                    Defect(
                        "accumulator not at home",
                        f"worker {r} ends with {name} of worker {owners}",
                    )
                )
    return defects


def malformed(schedule: Schedule) -> list[Defect]:
    """Find values that no schedule can have. This is checked first, so that the other checks can rely on it."""
    if not well_typed(schedule):
        return [Defect("malformed", "a Schedule of Steps of Transfers of (int, int) pairs needed")]
    defects = []
    workers, known = schedule.workers, schedule.inputs + schedule.accumulators
    if workers < 1 or schedule.moves not in ("keys", "queries") or not schedule.steps:
        defects.append(Defect("malformed", "W >= 1, moves 'keys' or 'queries', and steps needed"))
    inputs, accumulators = SIDES.get(schedule.moves, ((), ()))
    whole = schedule.accumulators == () or set(accumulators) == set(schedule.accumulators)
    if set(schedule.inputs) != set(inputs) or len(set(known)) != len(known) or not whole:
        what = f"inputs {schedule.inputs}, accumulators {schedule.accumulators}"
        defects.append(Defect("malformed", f"{what}, but {schedule.moves} move"))
    for pair in sorted(schedule.skipped):
        if not all(0 <= owner < workers for owner in pair):
            defects.append(Defect("malformed", f"skipped pair {pair} with W = {workers}", pair))
    for t, step in enumerate(schedule.steps):
        outside = any(b is not None and not 0 <= b < workers for b in step.uses)
        if len(step.uses) != workers or outside:
            defects.append(Defect("malformed", f"step {t}: uses {step.uses} with W = {workers}"))
        for transfer in step.transfers:
            unknown = [name for name in transfer.carries if name not in known]
            if transfer.kind not in KINDS or unknown or not transfer.carries:
                what = f"step {t}: a {transfer.kind!r} that carries {transfer.carries}"
                defects.append(Defect("malformed", what))
    return defects + misplaced(schedule)


def misplaced(schedule: Schedule) -> list[Defect]:
    """Find tensors that travel twice after one step, and each gather or reduce-scatter that is not in its right place.

    A gather is right only in an idle first step, and a reduce-scatter only in the last step.
    """
    defects, last = [], len(schedule.steps) - 1
    for t, step in enumerate(schedule.steps):
        carried = [name for transfer in step.transfers for name in transfer.carries]
        if len(set(carried)) != len(carried):
            defects.append(Defect("malformed", f"step {t}: a name travels twice, {tuple(carried)}"))
        for transfer in step.transfers:
            names, alone = set(transfer.carries), len(step.transfers) == 1
            idle = all(b is None for b in step.uses)
            if transfer.kind == "gather" and not (
                t == 0 and idle and alone and names == set(schedule.inputs)
            ):
                what = f"step {t}: a gather of {transfer.carries}; it must come first, alone, whole"
                defects.append(Defect("malformed", what))
            if transfer.kind == "reduce_scatter" and not (
                t == last and alone and names == set(schedule.accumulators)
            ):
                what = (
                    f"step {t}: a reduce_scatter of {transfer.carries}; it must be last and whole"
                )
                defects.append(Defect("malformed", what))
    return defects


def well_typed(schedule: object) -> bool:
    """Return whether ``schedule`` is a Schedule in which every field has its annotated type."""
    if not isinstance(schedule, Schedule):
        return False
    names = (schedule.inputs, schedule.accumulators)
    containers = [(schedule.moves, str), (schedule.steps, tuple), (schedule.skipped, frozenset)]
    if not all(isinstance(value, kind) for value, kind in containers):
        return False
    parts = [*map(is_pair, schedule.skipped), *map(is_step, schedule.steps)]
    return is_int(schedule.workers) and all(map(are_names, names)) and all(parts)


def is_int(x: object) -> bool:
    """Return whether ``x`` is an int; a bool is not."""
    return type(x) is int


def are_tuples(*values: object) -> bool:
    """Return whether all values are tuples."""
    return all(isinstance(value, tuple) for value in values)


def are_names(names: object) -> bool:
    """Return whether ``names`` is a tuple of strings."""
    return isinstance(names, tuple) and all(isinstance(name, str) for name in names)


def is_pair(pair: object) -> bool:
    """Return whether ``pair`` is a tuple of two ints."""
    return isinstance(pair, tuple) and len(pair) == 2 and all(map(is_int, pair))


def is_step(step: object) -> bool:
    """Return whether ``step`` is a :class:`Step` of well-formed parts."""
    if not isinstance(step, Step) or not are_tuples(step.uses, step.transfers):
        return False
    owners = all(b is None or is_int(b) for b in step.uses)
    return owners and all(map(is_transfer, step.transfers))


def is_transfer(transfer: object) -> bool:
    """Return whether ``transfer`` is a :class:`Transfer` of well-formed parts."""
    if not isinstance(transfer, Transfer) or not are_tuples(transfer.pairs):
        return False
    return (
        are_names((transfer.kind,))
        and all(map(is_pair, transfer.pairs))
        and (are_names(transfer.carries))
    )


def check_holds(
    schedule: Schedule, held: dict[str, list[set[int]]], t: int, worker: int, block: int
) -> list[Defect]:
    """Return a defect if a worker computes with a block but does not hold all its inputs and accumulators."""
    inputs = [name for name in schedule.inputs if block not in held[name][worker]]
    lost = [name for name in schedule.accumulators if block not in held[name][worker]]
    where = f"step {t}: worker {worker} computes with block {block} but does not hold its "
    if len(inputs) == len(schedule.inputs):
        return [Defect("absent block", where + "inputs")]
    if inputs or lost:
        return [Defect("torn block", where + ", ".join(inputs + lost))]
    return []


def move(
    schedule: Schedule, held: dict[str, list[set[int]]], t: int, transfer: Transfer
) -> list[Defect]:
    """Follow one transfer: update ``held``, which says who holds what, or return a defect if that is impossible."""
    workers = schedule.workers
    if transfer.kind == "permute":
        sources = sorted(source for source, _ in transfer.pairs)
        targets = sorted(target for _, target in transfer.pairs)
        if sources != list(range(workers)) or targets != list(range(workers)):
            where = f"step {t}: {transfer.pairs} with W = {workers}"
            return [Defect("not a permutation", where)]
        for name in transfer.carries:
            before = held[name]
            held[name] = [set() for _ in range(workers)]
            for source, target in transfer.pairs:
                held[name][target] = before[source]
    elif transfer.kind == "gather":
        for name in schedule.inputs:
            if name in transfer.carries:
                everything = set().union(*held[name])
                held[name] = [set(everything) for _ in range(workers)]
        # If inputs are gathered, every worker starts accumulators for all owners.
        for name in schedule.accumulators:
            held[name] = [set(range(workers)) for _ in range(workers)]
    else:
        for name in transfer.carries:
            held[name] = [{r} for r in range(workers)]
    return []


def coverage(
    schedule: Schedule, met: dict[Pair, int], visible: Callable[[int, int], bool] | None
) -> list[Defect]:
    """RING-2, RING-11: find pairs that are not computed exactly once, and skipped pairs that may not be skipped.

    A pair may be skipped if ``visible`` returns False for it.
    """
    defects = []
    for a in range(schedule.workers):
        for b in range(schedule.workers):
            times, pair = met.get((a, b), 0), (a, b)
            where = f"queries of worker {a} with keys of worker {b}"
            if pair in schedule.skipped:
                if times:
                    defects.append(Defect("skipped pair is computed", where, pair))
                elif visible is None or visible(a, b):
                    defects.append(Defect("skipped pair is visible", where, pair))
            elif times == 0:
                defects.append(Defect("missed pair", where, pair))
            elif times > 1:
                defects.append(Defect("doubled pair", f"{where}, {times} times", pair))
    return defects
