"""Permute schedules as data, who holds what, the causal offset of a pair of blocks, the validator.

A schedule lists, for each ring step, which visiting block every worker computes with and what is
transferred afterwards. It moves nothing itself: the lockstep loop, and MPI, carry it out. The
validator follows every name that travels and proves coverage, ownership and that each permute is a
permutation, for any schedule that it is given (RING-1 to RING-5, RING-11).

Sources: Liu et al., https://arxiv.org/abs/2310.01889 (KV ring); the backward of AWS's NKI library
(Q ring); Llama 3 (gathered keys), https://arxiv.org/abs/2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ringspec.errors import OptionError, ScheduleError, UnknownNameError, nearest

KEY_INPUTS = ("k", "v", "columns")
QUERY_INPUTS = ("q", "dy", "lse", "delta", "rows")
KEY_ACCUMULATORS = ("dk", "dv")
QUERY_ACCUMULATORS = ("dq", "dbias")
SIDES = {
    "keys": (KEY_INPUTS, KEY_ACCUMULATORS),
    "queries": (QUERY_INPUTS, QUERY_ACCUMULATORS),
}
CIRCULATIONS = ("kv", "q", "gather")
KINDS = ("permute", "gather", "reduce_scatter")

Pair = tuple[int, int]


@dataclass(frozen=True)
class Transfer:
    """One collective: ``pairs`` (source, target) of a permute, and the names that it carries.

    A 'gather' copies every worker's own block to all; a 'reduce_scatter' sends each worker's
    accumulators for an owner to that owner, where they are added in the order of the senders.
    """

    kind: str
    pairs: tuple[Pair, ...]
    carries: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """``uses[r]``: owner of the visiting block that worker r computes with, None = none."""

    uses: tuple[int | None, ...]
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A whole pass. ``moves`` says which side visits: 'keys' or 'queries'; the other one stays.

    ``skipped`` lists (query owner, key owner) pairs that no step computes because the mask leaves
    them wholly invisible.
    """

    name: str
    workers: int
    moves: str
    inputs: tuple[str, ...]
    accumulators: tuple[str, ...]
    steps: tuple[Step, ...]
    skipped: frozenset[Pair] = frozenset()

    def pair(self, worker: int, visitor: int) -> Pair:
        """(query owner, key owner) when that worker computes with that visiting block."""
        return (worker, visitor) if self.moves == "keys" else (visitor, worker)

    def pairs(self, step: int) -> list[tuple[int, Pair]]:
        """(worker, (query owner, key owner)) of all that is computed in a step."""
        uses = self.steps[step].uses
        return [(r, self.pair(r, b)) for r, b in enumerate(uses) if b is not None]

    @property
    def hops(self) -> int:
        """Number of steps after which something travels."""
        return sum(1 for step in self.steps if step.transfers)


def ring_permute(workers: int, direction: int) -> tuple[Pair, ...]:
    """(source, target) of every worker to its neighbour r + direction (RING-3)."""
    return tuple((r, (r + direction) % workers) for r in range(workers))


def visitor(worker: int, step: int, workers: int, direction: int = 1) -> int:
    """RING-1: owner of the block that a worker holds after ``step`` hops of a ring.

    >>> [visitor(0, t, 4) for t in range(4)]
    [0, 3, 2, 1]
    """
    return (worker - direction * step) % workers


def check_direction(direction: object) -> int:
    if direction not in (1, -1) or isinstance(direction, bool):
        raise OptionError(
            "direction 1 (r to r + 1) or -1 (r to r - 1)", repr(direction), "pass direction=1"
        )
    return int(direction)


def ring_schedule(
    name: str,
    workers: int,
    moves: str,
    inputs: tuple[str, ...],
    accumulators: tuple[str, ...],
    direction: int = 1,
) -> Schedule:
    """A ring: inputs take W - 1 hops, accumulators W, the last of which brings them home (RING-4)."""
    check_direction(direction)
    pairs = ring_permute(workers, direction)
    steps = []
    for t in range(workers):
        uses = tuple(visitor(r, t, workers, direction) for r in range(workers))
        carries = inputs + accumulators if t < workers - 1 else accumulators
        worth = bool(carries) and workers > 1
        steps.append(Step(uses, (Transfer("permute", pairs, carries),) if worth else ()))
    return Schedule(name, workers, moves, inputs, accumulators, tuple(steps))


def gather_schedule(name: str, workers: int, accumulators: tuple[str, ...]) -> Schedule:
    """All keys are gathered first; gradients of keys are reduced and scattered last."""
    everybody = Transfer("gather", (), KEY_INPUTS)
    steps = [Step((None,) * workers, (everybody,))]
    for t in range(workers):
        uses = tuple(visitor(r, t, workers) for r in range(workers))
        last = t == workers - 1 and bool(accumulators)
        home = (Transfer("reduce_scatter", (), accumulators),) if last else ()
        steps.append(Step(uses, home))
    return Schedule(name, workers, "keys", KEY_INPUTS, accumulators, tuple(steps))


def forward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """The forward pass: a KV ring, or gathered keys.

    >>> schedule = forward_schedule("kv", 3)
    >>> schedule.steps[1].uses, schedule.hops
    ((2, 0, 1), 2)
    """
    check_circulation(circulation)
    if circulation == "gather":
        return gather_schedule("gathered keys, forward", workers, ())
    return ring_schedule("KV ring, forward", workers, "keys", KEY_INPUTS, (), direction)


def backward_schedule(circulation: str, workers: int, direction: int = 1) -> Schedule:
    """The backward pass: 'kv' (dk, dv travel), 'q' (dq travels, RING-5) or 'gather'."""
    check_circulation(circulation)
    if circulation == "gather":
        return gather_schedule("gathered keys, backward", workers, KEY_ACCUMULATORS)
    if circulation == "kv":
        return ring_schedule(
            "KV ring, backward", workers, "keys", KEY_INPUTS, KEY_ACCUMULATORS, direction
        )
    return ring_schedule(
        "Q ring, backward", workers, "queries", QUERY_INPUTS, QUERY_ACCUMULATORS, direction
    )


def check_circulation(circulation: str) -> None:
    if circulation not in CIRCULATIONS:
        raise UnknownNameError(
            "a circulation ('kv', 'q' or 'gather')",
            repr(circulation),
            nearest(str(circulation), CIRCULATIONS),
        )


def skip(schedule: Schedule, invisible: Iterable[Pair]) -> Schedule:
    """The same schedule with these (query owner, key owner) pairs declared as skipped."""
    skipped = frozenset(invisible)
    steps = []
    for step in schedule.steps:
        uses = tuple(
            None if b is None or schedule.pair(r, b) in skipped else b
            for r, b in enumerate(step.uses)
        )
        steps.append(replace(step, uses=uses))
    return replace(schedule, steps=tuple(steps), skipped=skipped)


def cp_offset(
    layout: str, a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> int:
    """Offset of the causal diagonal between queries of worker a and keys of worker b.

    With local indices i and j the pair is visible iff j <= i + offset. RING-8 for 'contiguous',
    RING-9 for 'striped'; 'zigzag' has four offsets, see :func:`zigzag_offsets`.

    >>> cp_offset("contiguous", 2, 1, workers=4, n_q=8, n_k=8)
    8
    >>> [cp_offset("striped", a, 1, workers=4, n_q=8, n_k=8) for a in range(4)]
    [-1, 0, 0, 0]
    """
    if layout == "contiguous":
        return a * n_q - b * n_k + q_offset
    if layout == "striped":
        return (a + q_offset - b) // workers
    raise UnknownNameError(
        "a layout with one offset per pair of workers: 'contiguous' or 'striped'",
        repr(layout),
        "use zigzag_offsets for 'zigzag', and positions for any other layout",
    )


def zigzag_offsets(
    a: int, b: int, *, workers: int, n_q: int, n_k: int, q_offset: int = 0
) -> tuple[tuple[int, int], tuple[int, int]]:
    """RING-10: offsets [query chunk][key chunk] of the two chunks that each worker holds.

    Local indices count from the start of each chunk, which is n/2 long.
    """
    chunk_q, chunk_k = n_q // 2, n_k // 2
    low, high = (
        tuple(c * chunk_q - d * chunk_k + q_offset for d in (b, 2 * workers - 1 - b))
        for c in (a, 2 * workers - 1 - a)
    )
    return (low[0], low[1]), (high[0], high[1])


@dataclass(frozen=True)
class Defect:
    """One reason why a schedule is invalid; ``kind`` is one of DEFECTS."""

    kind: str
    where: str
    pair: Pair | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}"


DEFECTS = (
    "malformed",  # lengths, names or kinds that no schedule can have
    "not a permutation",  # a permute with a source or target missing, doubled or out of range
    "absent block",  # a worker computes with a block that it does not hold
    "torn block",  # inputs of different owners, or accumulators apart from their block
    "missed pair",
    "doubled pair",
    "skipped pair is computed",
    "skipped pair is visible",
    "accumulator not at home",
)


def validate(schedule: Schedule, visible: Callable[[int, int], bool] | None = None) -> None:
    """Prove a schedule, or raise ScheduleError with every defect found.

    ``visible(query_owner, key_owner)`` says whether the mask lets any pair of the two blocks
    through; without it every declared skip is refused, because nothing proves it (RING-11).

    >>> validate(forward_schedule("kv", 4))
    """
    defects = find_defects(schedule, visible)
    if defects:
        raise ScheduleError(
            "a schedule in which every pair of blocks meets once and every accumulator comes home",
            "; ".join(str(p) for p in defects[:8]) + (" ..." if len(defects) > 8 else ""),
            "mend the named steps; forward_schedule and backward_schedule make valid ones",
            tuple(defects),
        )


def find_defects(
    schedule: Schedule, visible: Callable[[int, int], bool] | None = None
) -> list[Defect]:
    """All defects of a schedule in the order of the steps; empty for a valid one."""
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
            defects += whereabouts(schedule, held, t, worker, block)
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
    """Data that no schedule can have; checked first so that the rest may rely on it."""
    defects = []
    workers, known = schedule.workers, schedule.inputs + schedule.accumulators
    if workers < 1 or schedule.moves not in ("keys", "queries") or not schedule.steps:
        defects.append(Defect("malformed", "W >= 1, moves 'keys' or 'queries', and steps needed"))
    inputs, accumulators = SIDES.get(schedule.moves, ((), ()))
    if set(schedule.inputs) != set(inputs) or set(schedule.accumulators) - set(accumulators):
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
    return defects


def whereabouts(
    schedule: Schedule, held: dict[str, list[set[int]]], t: int, worker: int, block: int
) -> list[Defect]:
    """Does the worker hold all inputs of the block, and its accumulators with them?"""
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
    """Follow one transfer: update who holds what, or say why it cannot be carried out."""
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
        # With gathered inputs every worker opens accumulators for all owners.
        for name in schedule.accumulators:
            held[name] = [set(range(workers)) for _ in range(workers)]
    else:
        for name in transfer.carries:
            held[name] = [{r} for r in range(workers)]
    return []


def coverage(
    schedule: Schedule, met: dict[Pair, int], visible: Callable[[int, int], bool] | None
) -> list[Defect]:
    """RING-2, RING-11: every pair exactly once, or skipped and wholly invisible."""
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
