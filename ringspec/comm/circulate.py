"""The loop of one rank over the steps of a pass; ``rings.lockstep`` does the same for all workers in one process.

In each step a rank computes with a visiting block and then passes the block on. A block has inputs, such as k and v,
and in the backward pass also accumulators, such as dk and dv. Transfers overlap with computation in two ways. The
inputs do not change, so a rank starts to send them, and to receive the inputs of the next block, before it computes.
What a rank adds to the accumulators, its contribution, does not depend on their values. So a rank computes the
contribution first; then it waits for the accumulators, adds the contribution and sends them on (rule RING-4 of the
specification).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from ringspec.comm.links import Links, Pending
from ringspec.comm.traffic import Crossing, traffic
from ringspec.comm.wire import Header, check_header, frame_of, pack, side_from
from ringspec.rings.lockstep import Moment, Observer
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import (
    Message,
    Side,
    State,
    WorkerState,
    arrive,
    joined,
    messages,
    send,
    visiting,
)

# Number of steps with different tags; messages of later steps are distinguished by their order.
TAGGED_STEPS = 1024


@dataclass(frozen=True)
class Halves(Generic[State]):
    """The computation of one step, in two halves, between which a rank waits for the accumulators.

    ``compute(state, schedule, block)`` is ``score_block`` or ``differentiate_block``. It needs only the inputs of the
    visiting block, and returns the contribution, or None if the worker is idle.
    ``combine(state, share)`` is ``merge_block`` or ``add_block``. It adds the contribution ``share`` to the worker's
    state, and needs the accumulators.
    """

    compute: Callable[[State, Schedule, Any], Any]
    combine: Callable[[State, Any], State]


def circulate(
    links: Links,
    phase: str,
    halves: Halves[State],
    state: State,
    schedule: Schedule,
    block: Callable[..., Any],
    observer: Observer,
) -> tuple[State, tuple[Message, ...]]:
    """Run all steps of this rank's worker; return its last state, and the messages received after the last step.

    ``state`` is the worker's state before the first step. ``phase``, ``schedule``, ``block`` and ``observer`` are as in
    ``rings.lockstep.lockstep``.
    """
    like = visiting(state, schedule)
    previous = Exchange(links, phase, -1, like, [])
    for t, crossings in enumerate(traffic(schedule)):
        final = t == len(schedule.steps) - 1
        step = Exchange(links, phase, t, like, crossings, final)
        step.post_receives()
        previous.wait_for(early=True)
        ready = arrive(state, schedule, previous.messages())
        step.post_sends(outbox(ready, schedule), early=True)
        share = halves.compute(ready, schedule, block)
        previous.wait_for(early=False)
        received = previous.messages()
        during = arrive(state, schedule, received)
        combined = during if share is None else halves.combine(during, share)
        step.post_sends(outbox(combined, schedule), early=False)
        after, sent = send(combined, schedule)
        pair = schedule.pair(t, state.worker)
        states = state, received, during, combined, after
        observer(Moment(phase, t, state.worker, pair, *states, sent))
        previous.wait_for_sends()  # the receivers already have these messages
        previous, state = step, after
    previous.wait_for(early=True)
    previous.wait_for(early=False)
    previous.wait_for_sends()
    return state, previous.messages()


def outbox(state: WorkerState, schedule: Schedule) -> dict[tuple[int, int], Side]:
    """Return the blocks that a worker sends after its current step, by (number of the transfer in the step, target)."""
    return {
        (n, message.target): message.side
        for n, transfer in enumerate(schedule.steps[state.step].transfers)
        for message in messages(state, schedule, transfer)
    }


class Exchange:
    """The messages that this rank sends and receives after one step.

    Each message of the schedule is sent in up to two parts: the inputs (``early``) and the accumulators.
    """

    def __init__(
        self,
        links: Links,
        phase: str,
        step: int,
        like: Side,
        crossings: list[Crossing],
        final: bool = False,
    ) -> None:
        me = links.rank
        self.final = final
        self.links, self.phase, self.step, self.like = links, phase, step, like
        self.outgoing = [c for c in crossings if c.source == me]
        self.incoming = [c for c in crossings if c.target == me]
        self.sends: list[Pending] = []
        self.receives: dict[Crossing, Pending] = {}
        self.here: dict[Crossing, Side] = {}

    def header(self, crossing: Crossing) -> Header:
        ends = crossing.source, crossing.target, crossing.owner
        return Header(self.phase, self.step, self.tag(crossing), *ends)

    def tag(self, crossing: Crossing) -> int:
        return 16 * (self.step % TAGGED_STEPS) + crossing.tag % 16

    def post_receives(self) -> None:
        for crossing in self.incoming:
            if crossing.source == self.links.rank:
                continue
            # Accumulators are needed in the next step, after its block has been computed.
            used = f"after {self.phase} step {self.step}"
            if not crossing.early and not self.final:
                used = f"in {self.phase} step {self.step + 1}"
            names, source = ", ".join(crossing.names), self.links.name(crossing.source)
            what = f"waits {used} for {names} from {source}"
            size = frame_of(self.like, crossing.names).size
            pending = self.links.receive(crossing.source, self.tag(crossing), size, what)
            self.receives[crossing] = pending

    def post_sends(self, sides: dict[tuple[int, int], Side], early: bool) -> None:
        """Start to send the inputs (``early``) or the accumulators; keep a message to this rank itself."""
        for crossing in self.outgoing:
            if crossing.early != early:
                continue
            side = sides[crossing.transfer, crossing.target]
            if crossing.target == self.links.rank:
                self.here[crossing] = dataclasses.replace(side, owner=crossing.owner)
                continue
            buffer = pack(side, frame_of(self.like, crossing.names), self.header(crossing))
            names, target = ", ".join(crossing.names), self.links.name(crossing.target)
            what = f"waits after {self.phase} step {self.step} until {target} has taken {names}"
            self.sends.append(self.links.send(crossing.target, self.tag(crossing), buffer, what))

    def wait_for(self, early: bool) -> None:
        """Wait until all inputs (``early``) or accumulators for this rank have arrived."""
        for crossing, pending in self.receives.items():
            if crossing.early == early:
                buffer = self.links.wait(pending)
                check_header(buffer, self.header(crossing))
                frame = frame_of(self.like, crossing.names)
                self.here[crossing] = side_from(buffer, frame, self.like, crossing.owner)

    def wait_for_sends(self) -> None:
        for pending in self.sends:
            self.links.wait(pending)

    def messages(self) -> tuple[Message, ...]:
        """Return the messages that have arrived, ordered by sender."""
        whole: dict[tuple[int, int, int], Message] = {}
        for crossing in self.incoming:
            if crossing not in self.here:
                continue
            key, side = (crossing.source, crossing.transfer, crossing.owner), self.here[crossing]
            if key in whole:
                side = joined(whole[key].side, side)
            whole[key] = Message(crossing.source, crossing.target, crossing.kind, side)
        return tuple(whole.values())
