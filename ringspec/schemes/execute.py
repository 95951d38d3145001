"""The executor: loops over the steps and ranks of a scheme, with everything that a rank holds in the open.

It serves two purposes, which differ only in their :class:`Arithmetic`:

- with numbers (:mod:`~ringspec.schemes.numbers`), it computes attention;
- with multisets (:mod:`~ringspec.schemes.multisets`), it proves that the scheme is right, or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringspec.schemes.defects import Defect
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.parts import (
    Join,
    Message,
    Part,
    joined,
    picked,
    pieces_for,
    placed,
)
from ringspec.schemes.scheme import INPUTS, SIDE_OF, Scheme, Step, Tokens, Transfer
from ringspec.schemes.sharding import Shard, key_heads_of

Parts = dict[str, Part]
Report = Callable[[Defect], None]


@dataclass(frozen=True)
class Arithmetic:
    """What the executor does with tensors.

    ``compute(step, rank, q, k)`` returns the results of some queries over some keys: 'state' in a forward pass, 'dq' and
    'dk' in a backward pass. ``blank(thing, shard)`` returns a part that is empty: zero, or the state of rows that have
    seen no key. ``join(thing, a, b)`` adds results, or merges states.
    """

    compute: Callable[[int, int, Part, Part], Parts]
    blank: Callable[[str, Shard], Part]
    join: Join


@dataclass(frozen=True)
class RankState:
    """Everything that one rank holds at one moment: the part of each thing, by name (see :mod:`ringspec.schemes.scheme`)."""

    rank: int
    parts: Parts


@dataclass(frozen=True)
class Moment:
    """The record of one step of all ranks.

    ``before``, ``computed`` and ``after`` are the states of all ranks: at the start of the step, after computing, and
    after all transfers. ``used`` holds, for each rank, the rows and the keys with which it computed. ``messages`` holds
    the messages of each transfer.
    """

    phase: str
    step: int
    before: tuple[RankState, ...]
    used: tuple[tuple[Shard, Shard] | None, ...]
    computed: tuple[RankState, ...]
    after: tuple[RankState, ...]
    messages: tuple[tuple[Message, ...], ...]


def execute(
    scheme: Scheme,
    phase: str,
    states: Sequence[RankState],
    arithmetic: Arithmetic,
    report: Report,
    observe: Callable[[Moment], None] | None = None,
) -> list[RankState]:
    """Run all steps of a pass and return the last states; ``states`` hold the inputs at home.

    ``report`` is called with each :class:`Defect` that makes a step impossible; the step then does what it can.
    ``observe`` is called with the record of each step.
    """
    states = list(states)
    for number in range(len(scheme.steps(phase))):
        moment = one_step(scheme, phase, number, tuple(states), arithmetic, report)
        states = list(moment.after)
        if observe is not None:
            observe(moment)
    return states


def one_step(
    scheme: Scheme,
    phase: str,
    number: int,
    before: tuple[RankState, ...],
    arithmetic: Arithmetic,
    report: Report,
) -> Moment:
    """Run one step of all ranks: each computes, then the transfers take place one after another."""
    step = scheme.steps(phase)[number]
    states = list(before)
    used: list[tuple[Shard, Shard] | None] = [None] * len(before)
    if not step.idle:
        for r in range(scheme.mesh.ranks):
            rows, keys = usable(scheme, phase, step, number, states[r], report)
            shares = arithmetic.compute(number, r, rows, keys)
            states[r] = added(states[r], shares, phase, number, arithmetic, report)
            used[r] = (rows.shard, keys.shard)
    computed = tuple(states)
    messages = []
    for transfer in step.transfers:
        states, sent = transferred(scheme.mesh, phase, number, transfer, states, arithmetic, report)
        messages.append(sent)
    return Moment(phase, number, before, tuple(used), computed, tuple(states), tuple(messages))


def usable(
    scheme: Scheme, phase: str, step: Step, number: int, state: RankState, report: Report
) -> tuple[Part, Part]:
    """Return the queries and keys with which a rank computes in a step, out of those that it holds."""
    q, k = state.parts["q"], state.parts["k"]
    rows = chosen(q.shard, None if step.rows is None else step.rows[state.rank])
    keys = chosen(k.shard, None if step.keys is None else step.keys[state.rank])
    for what, part, wanted in (("query", q, rows), ("key", k, keys)):
        for token in set(wanted) - set(part.shard.tokens):
            text = f"rank {state.rank} computes with {what} {token}, which it does not hold"
            report(Defect("absent", phase, text, (token, None), state.rank, number))
    rows = tuple(token for token in rows if token in q.shard.tokens)
    keys = tuple(token for token in keys if token in k.shard.tokens)
    heads = q.shard.heads
    for head in key_heads_of(heads, scheme.group):
        if head not in k.shard.heads:
            text = (
                f"rank {state.rank} computes query heads of key head {head}, which it does not hold"
            )
            report(Defect("absent head", phase, text, (None, head), state.rank, number))
    heads = tuple(head for head in heads if head // scheme.group in k.shard.heads)
    return picked(q, rows, heads), picked(k, keys, key_heads_of(heads, scheme.group))


def chosen(shard: Shard, tokens: Tokens | None) -> Tokens:
    """Return the tokens with which a rank computes; all slots of its shard if ``tokens`` is None."""
    return shard.tokens if tokens is None else tokens


def added(
    state: RankState,
    shares: Parts,
    phase: str,
    number: int,
    arithmetic: Arithmetic,
    report: Report,
) -> RankState:
    """Join the results of one step to those that the rank holds; in the first step, it holds none and starts empty."""
    parts = dict(state.parts)
    for thing, share in shares.items():
        if thing not in parts:
            parts[thing] = arithmetic.blank(thing, parts[SIDE_OF[thing]].shard)
        held = parts[thing].shard
        lost = sorted(set(share.shard.real) - set(held.real))
        if lost:
            text = f"rank {state.rank} holds no {thing} of token {lost[0]}, to which it must add"
            report(Defect("lost", phase, text, (lost[0], None), state.rank, number))
            kept = tuple(token for token in share.shard.tokens if token in held.real)
            share = picked(share, kept, share.shard.heads)
        heads = tuple(head for head in share.shard.heads if head in held.heads)
        if heads != share.shard.heads:
            text = f"rank {state.rank} holds {thing} of other heads than {share.shard.heads}"
            report(Defect("lost", phase, text, (None, share.shard.heads[0]), state.rank, number))
            share = picked(share, share.shard.tokens, heads)
        parts[thing] = joined(parts[thing], share, thing, arithmetic.join)
    return replace(state, parts=parts)


def transferred(
    mesh: Mesh,
    phase: str,
    number: int,
    transfer: Transfer,
    states: Sequence[RankState],
    arithmetic: Arithmetic,
    report: Report,
) -> tuple[list[RankState], tuple[Message, ...]]:
    """Do one transfer: return the states after it, and the messages between different ranks."""
    thing = transfer.thing
    if any(thing not in state.parts for state in states):
        text = f"{thing} is transferred before anything was computed"
        report(Defect("absent", phase, text, None, None, number))
        return list(states), ()
    parts = [state.parts[thing] for state in states]
    shards = [part.shard for part in parts]
    after, messages = [], []
    for state in states:
        pieces = pieces_for(state.rank, shards, transfer, mesh)
        for token, head in missing(transfer.to.shards[state.rank], pieces):
            text = f"no rank of the group along {transfer.axis!r} has {thing} of token {token}, head {head}"
            report(Defect("absent", phase, text, (token, head), state.rank, number))
            break
        got = [(source, picked(parts[source], s.tokens, s.heads)) for source, s in pieces]
        wanted = transfer.to.shards[state.rank]
        landing = wanted if transfer.order == "token" else as_sent(got)
        if (len(landing.tokens), len(landing.heads)) != (len(wanted.tokens), len(wanted.heads)):
            text = (
                f"rank {state.rank} gets {thing} of {len(landing.tokens)} tokens x "
                f"{len(landing.heads)} heads for {len(wanted.tokens)} x {len(wanted.heads)} slots"
            )
            report(Defect("malformed", phase, text, None, state.rank, number))
            landing = wanted
        part = Part(wanted, assembled(thing, landing, got, arithmetic).tensors)
        after.append(replace(state, parts={**state.parts, thing: part}))
        messages += [Message(source, state.rank, s) for source, s in pieces if source != state.rank]
    return after, tuple(messages)


def missing(wanted: Shard, pieces: list[tuple[int, Shard]]) -> list[tuple[int, int]]:
    """Return the cells that a rank wants and that no piece has."""
    found = {cell for _, shard in pieces for cell in shard.cells}
    return [cell for cell in wanted.cells if cell not in found]


def assembled(
    thing: str, landing: Shard, pieces: list[tuple[int, Part]], arithmetic: Arithmetic
) -> Part:
    """Put the pieces that a rank got together: copy each new cell, and join further results for it."""
    part = arithmetic.blank(thing, landing)
    found: set[tuple[int, int]] = set()
    for _, piece in pieces:
        if thing in INPUTS or found.isdisjoint(piece.shard.cells):
            part = placed(part, piece)
        else:
            part = joined(part, piece, thing, arithmetic.join)
        found.update(piece.shard.cells)
    return part


def as_sent(pieces: list[tuple[int, Part]]) -> Shard:
    """Return the shard of pieces that lie in the order of the ranks that sent them."""
    tokens = [token for _, piece in pieces for token in piece.shard.tokens]
    heads = [head for _, piece in pieces for head in piece.shard.heads]
    return Shard(tuple(dict.fromkeys(tokens)), tuple(dict.fromkeys(heads)))
