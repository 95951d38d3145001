"""The messages between workers in each step of a schedule, and which of them can be sent before the computation.

A block that is sent has inputs, such as k and v, and in the backward pass also accumulators, such as dk and dv. Every
rank derives the same list of messages from the schedule, so a receiver knows the sender, content and length of each
message in advance.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.spec.schedule import Schedule, Transfer


@dataclass(frozen=True)
class Crossing:
    """One message: the tensors ``names`` of the block that belongs to ``owner`` go from ``source`` to ``target``.

    ``transfer``: the number of the transfer within the step. ``early``: True for inputs, which are sent before the
    computation of the step; False for accumulators, which are sent after it.
    """

    transfer: int
    kind: str
    source: int
    target: int
    owner: int
    names: tuple[str, ...]
    early: bool

    @property
    def tag(self) -> int:
        """A number that distinguishes the messages of one step between the same two ranks."""
        return 2 * self.transfer + (not self.early)


def traffic(schedule: Schedule) -> list[list[Crossing]]:
    """Return the messages of each step, ordered by sender as in ``rings.lockstep``.

    >>> from ringspec.rings.schedules import backward_schedule
    >>> for crossing in traffic(backward_schedule("kv", 3))[0][:2]:
    ...     print(crossing.source, crossing.target, crossing.names, crossing.early)
    0 1 ('k', 'v', 'columns') True
    0 1 ('dk', 'dv') False
    """
    holds = list(range(schedule.workers))  # owner of the visiting block at each worker
    gathered = False
    steps = []
    for step in schedule.steps:
        crossings: list[Crossing] = []
        for source in range(schedule.workers):
            for n, transfer in enumerate(step.transfers):
                if transfer.kind == "permute":
                    ends = [(dict(transfer.pairs)[source], holds[source])]
                elif transfer.kind == "gather":
                    ends = [(target, holds[source]) for target in range(schedule.workers)]
                else:
                    owners = range(schedule.workers) if gathered else [holds[source]]
                    ends = [(owner, owner) for owner in owners]
                for target, owner in ends:
                    crossings += parts(schedule, n, transfer, source, target, owner)
        for crossing in crossings:
            if crossing.kind == "permute":
                holds[crossing.target] = crossing.owner
            gathered = gathered or crossing.kind == "gather"
        steps.append(crossings)
    return steps


def parts(
    schedule: Schedule, n: int, transfer: Transfer, source: int, target: int, owner: int
) -> list[Crossing]:
    """Split a message into a message with its inputs and a message with its accumulators; omit empty ones."""
    found = []
    for early, group in ((True, schedule.inputs), (False, schedule.accumulators)):
        names = tuple(name for name in transfer.carries if name in group)
        if names:
            found.append(Crossing(n, transfer.kind, source, target, owner, names, early))
    return found
