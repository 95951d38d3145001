"""The loop of one rank: what ``lockstep`` does for all workers, over links.

The inputs of a step never change in it. So a rank posts the receive of the next step's inputs and
sends its own visiting inputs on BEFORE it computes, and the transfer can go on while it does.
Accumulators are sent after the computation that adds to them (RING-4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringspec.comm.links import Links, Pending
from ringspec.comm.traffic import Crossing, traffic
from ringspec.comm.wire import Header, check_header, frame_of, pack, side_from
from ringspec.errors import MessageError
from ringspec.spec.ring_forward import Observer
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import (
    Message,
    Moment,
    Side,
    WorkerState,
    arrive,
    joined,
    met,
    names_of,
    send,
    visiting,
)

# Steps whose messages have tags of their own; order keeps later ones apart.
TAGGED_STEPS = 1024


def circulate(
    links: Links,
    phase: str,
    one_step: Callable[..., tuple[WorkerState, tuple[Message, ...]]],
    state: WorkerState,
    schedule: Schedule,
    block: Callable[..., Any],
    observer: Observer,
) -> tuple[WorkerState, tuple[Message, ...]]:
    """All steps of this rank's worker: its last state, and what is still to be received.

    ``one_step`` is ``forward_step`` or ``backward_step``, as for ``spec.ring_forward.lockstep``.
    """
    like = visiting(state, schedule)
    received: tuple[Message, ...] = ()
    unsent: list[Pending] = []
    for t, crossings in enumerate(traffic(schedule)):
        step = Exchange(links, phase, t, like, crossings)
        during = arrive(state, schedule, received)
        step.post_receives()
        before = send(during, schedule)[1]
        step.post_sends(before, early=True)
        after, sent = one_step(state, schedule, received, block)
        check_unchanged(before, sent, schedule.inputs)
        step.post_sends(sent, early=False)
        pair = met(schedule, t, state.worker)
        observer(Moment(phase, t, state.worker, pair, state, received, during, after, sent))
        received, state = step.complete(sent), after
        for pending in unsent:  # of the step before: their receivers have taken them by now
            links.wait(pending)
        unsent = step.sends
    for pending in unsent:
        links.wait(pending)
    return state, received


def check_unchanged(
    before: tuple[Message, ...], sent: tuple[Message, ...], inputs: tuple[str, ...]
) -> None:
    """Inputs that left before the computation are those that the step itself sends after it."""
    for early, late in zip(before, sent, strict=True):
        for name in names_of(late.side):
            if name in inputs and getattr(early.side, name) is not getattr(late.side, name):
                raise MessageError(
                    f"a step that leaves the input {name} as it is",
                    "another array after the step",
                    "send inputs after the computation, or do not replace them in it",
                )


class Exchange:
    """The messages of one step, as far as this rank sends or receives them."""

    def __init__(
        self, links: Links, phase: str, step: int, like: Side, crossings: list[Crossing]
    ) -> None:
        me = links.rank
        self.links, self.phase, self.step, self.like = links, phase, step, like
        self.outgoing = [c for c in crossings if c.source == me and c.target != me]
        self.incoming = [c for c in crossings if c.target == me]
        self.sends: list[Pending] = []
        self.receives: dict[Crossing, Pending] = {}

    def header(self, crossing: Crossing) -> Header:
        ends = crossing.source, crossing.target, crossing.owner
        return Header(self.phase, self.step, self.tag(crossing), *ends)

    def tag(self, crossing: Crossing) -> int:
        return 16 * (self.step % TAGGED_STEPS) + crossing.tag % 16

    def post_receives(self) -> None:
        for crossing in self.incoming:
            if crossing.source == self.links.rank:
                continue
            size = frame_of(self.like, crossing.names).size
            what = f"{self.where()} for {', '.join(crossing.names)} from {self.links.name(crossing.source)}"
            pending = self.links.receive(crossing.source, self.tag(crossing), size, what)
            self.receives[crossing] = pending

    def post_sends(self, messages: tuple[Message, ...], early: bool) -> None:
        for crossing in self.outgoing:
            if crossing.early != early:
                continue
            side = matching(messages, crossing).side
            buffer = pack(side, frame_of(self.like, crossing.names), self.header(crossing))
            names = ", ".join(crossing.names)
            what = f"{self.where()} until {self.links.name(crossing.target)} has taken {names}"
            self.sends.append(self.links.send(crossing.target, self.tag(crossing), buffer, what))

    def where(self) -> str:
        return f"waits after {self.phase} step {self.step}"

    def complete(self, sent: tuple[Message, ...]) -> tuple[Message, ...]:
        """Wait for everything that this rank receives; messages in the order of the senders."""
        whole: dict[tuple[int, int, int], Message] = {}
        for crossing in self.incoming:
            if crossing.source == self.links.rank:
                own = matching(sent, crossing)
                whole[crossing.source, crossing.transfer, crossing.owner] = own
                continue
            buffer = self.links.wait(self.receives[crossing])
            check_header(buffer, self.header(crossing))
            frame = frame_of(self.like, crossing.names)
            side = side_from(buffer, frame, self.like, crossing.owner)
            key = crossing.source, crossing.transfer, crossing.owner
            if key in whole:
                side = joined(whole[key].side, side)
            whole[key] = Message(crossing.source, crossing.target, crossing.kind, side)
        return tuple(whole.values())


def matching(messages: tuple[Message, ...], crossing: Crossing) -> Message:
    """The message of the step function that a crossing is, or is a part of."""
    for message in messages:
        same = (message.target, message.kind) == (crossing.target, crossing.kind)
        if same and set(crossing.names) & set(names_of(message.side)):
            return message
    raise MessageError(
        f"a {crossing.kind} of {crossing.names} to worker {crossing.target}",
        "no such message from the step",
        "report the schedule",
    )
