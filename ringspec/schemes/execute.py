"""The executor: loops over the steps and ranks of a scheme, with everything that a rank holds in the open.

It serves two purposes, which differ only in their :class:`Arithmetic`:

- with numbers (:mod:`~ringspec.schemes.numbers`), it computes attention;
- with multisets (:mod:`~ringspec.schemes.multisets`), it proves that the scheme is right, or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ringspec.schemes.defects import Defect
from ringspec.schemes.parts import Join, Message, Part, joined, picked, pieces_for, placed
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
    the messages of each of the ``transfers``. ``print(moment)`` shows what each rank holds, sends, receives and merges.
    """

    phase: str
    step: int
    before: tuple[RankState, ...]
    used: tuple[tuple[Shard, Shard] | None, ...]
    computed: tuple[RankState, ...]
    after: tuple[RankState, ...]
    messages: tuple[tuple[Message, ...], ...]
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Now:
    """The step that is being run: number ``number`` of a pass of a scheme."""

    scheme: Scheme
    phase: str
    number: int
    arithmetic: Arithmetic
    report: Report

    @property
    def step(self) -> Step:
        """The step as data."""
        return self.scheme.steps(self.phase)[self.number]

    def found(
        self, kind: str, text: str, cell: tuple[int | None, int | None] | None, rank: int | None
    ) -> None:
        """Report a defect of this step."""
        self.report(Defect(kind, self.phase, text, cell, rank, self.number))


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
    for number in range(len(scheme.steps(phase))):
        moment = one_step(Now(scheme, phase, number, arithmetic, report), tuple(states))
        states = moment.after
        if observe is not None:
            observe(moment)
    return list(states)


def one_step(now: Now, before: tuple[RankState, ...]) -> Moment:
    """Run one step of all ranks: each computes, then the transfers take place one after another."""
    states = list(before)
    used: list[tuple[Shard, Shard] | None] = [None] * len(before)
    if not now.step.idle:
        for r in range(now.scheme.mesh.ranks):
            rows, keys = usable(now, states[r])
            shares = now.arithmetic.compute(now.number, r, rows, keys)
            states[r] = added(now, states[r], shares)
            used[r] = (rows.shard, keys.shard)
    computed = tuple(states)
    messages = []
    for transfer in now.step.transfers:
        states, sent = transferred(now, transfer, states)
        messages.append(sent)
    return Moment(
        now.phase,
        now.number,
        before,
        tuple(used),
        computed,
        tuple(states),
        tuple(messages),
        now.step.transfers,
    )


def usable(now: Now, state: RankState) -> tuple[Part, Part]:
    """Return the queries and keys with which a rank computes in a step, out of those that it holds."""
    q, k, rank, group = state.parts["q"], state.parts["k"], state.rank, now.scheme.group
    rows = chosen(now, rank, "query", q.shard, now.step.rows)
    keys = chosen(now, rank, "key", k.shard, now.step.keys)
    for head in key_heads_of(q.shard.heads, group):
        if head not in k.shard.heads:
            text = f"rank {rank} computes query heads of key head {head}, which it does not hold"
            now.found("absent head", text, (None, head), rank)
    heads = tuple(head for head in q.shard.heads if head // group in k.shard.heads)
    return picked(q, rows, heads), picked(k, keys, key_heads_of(heads, group))


def chosen(
    now: Now, rank: int, what: str, shard: Shard, tables: tuple[Tokens, ...] | None
) -> Tokens:
    """Return the tokens with which a rank computes, out of its shard; all slots if ``tables`` is None."""
    tokens = shard.tokens if tables is None else tables[rank]
    for token in set(tokens) - set(shard.tokens):
        text = f"rank {rank} computes with {what} {token}, which it does not hold"
        now.found("absent", text, (token, None), rank)
    return tuple(token for token in tokens if token in shard.tokens)


def added(now: Now, state: RankState, shares: Parts) -> RankState:
    """Join the results of one step to those that the rank holds; in the first step, it holds none and starts empty."""
    parts, rank = dict(state.parts), state.rank
    for thing, share in shares.items():
        if thing not in parts:
            parts[thing] = now.arithmetic.blank(thing, parts[SIDE_OF[thing]].shard)
        held, shard = parts[thing].shard, share.shard
        lost = sorted(set(shard.real) - set(held.real))
        if lost:
            text = f"rank {rank} holds no {thing} of token {lost[0]}, to which it must add"
            now.found("lost", text, (lost[0], None), rank)
        heads = tuple(head for head in shard.heads if head in held.heads)
        if heads != shard.heads:
            text = f"rank {rank} holds {thing} of other heads than {shard.heads}"
            now.found("lost", text, (None, shard.heads[0]), rank)
        if lost or heads != shard.heads:
            share = picked(share, [token for token in shard.real if token not in lost], heads)
        parts[thing] = joined(parts[thing], share, thing, now.arithmetic.join)
    return replace(state, parts=parts)


def transferred(
    now: Now, transfer: Transfer, states: Sequence[RankState]
) -> tuple[list[RankState], tuple[Message, ...]]:
    """Do one transfer: return the states after it, and the messages between different ranks."""
    thing = transfer.thing
    if any(thing not in state.parts for state in states):
        now.found("absent", f"{thing} is transferred before anything was computed", None, None)
        return list(states), ()
    parts = [state.parts[thing] for state in states]
    shards = [part.shard for part in parts]
    after, messages = [], []
    for state, wanted in zip(states, transfer.to.shards, strict=True):
        pieces = pieces_for(state.rank, shards, transfer, now.scheme.mesh)
        found = {cell for _, shard in pieces for cell in shard.cells}
        missing = [cell for cell in wanted.cells if cell not in found][:1]
        for cell in missing:
            text = f"no rank of the group along {transfer.axis!r} has {thing} of token {cell[0]}, head {cell[1]}"
            now.found("absent", text, cell, state.rank)
        got = [picked(parts[source], shard.tokens, shard.heads) for source, shard in pieces]
        landing = wanted if transfer.order == "token" else as_sent(got)
        if (len(landing.tokens), len(landing.heads)) != (len(wanted.tokens), len(wanted.heads)):
            text = (
                f"rank {state.rank} gets {thing} of {len(landing.tokens)} tokens x "
                f"{len(landing.heads)} heads for {len(wanted.tokens)} x {len(wanted.heads)} slots"
            )
            now.found("malformed", text, None, state.rank)
            landing = wanted
        part = Part(wanted, assembled(thing, landing, got, now.arithmetic).tensors)
        after.append(replace(state, parts={**state.parts, thing: part}))
        messages += [Message(source, state.rank, s) for source, s in pieces if source != state.rank]
    return after, tuple(messages)


def assembled(thing: str, landing: Shard, pieces: list[Part], arithmetic: Arithmetic) -> Part:
    """Put the pieces that a rank got together: copy each new cell, and join further results for it."""
    part = arithmetic.blank(thing, landing)
    found: set[tuple[int, int]] = set()
    for piece in pieces:
        if thing in INPUTS or found.isdisjoint(piece.shard.cells):
            part = placed(part, piece)
        else:
            part = joined(part, piece, thing, arithmetic.join)
        found.update(piece.shard.cells)
    return part


def as_sent(pieces: list[Part]) -> Shard:
    """Return the shard of pieces that lie in the order of the ranks that sent them."""
    tokens = [token for piece in pieces for token in piece.shard.tokens]
    heads = [head for piece in pieces for head in piece.shard.heads]
    return Shard(tuple(dict.fromkeys(tokens)), tuple(dict.fromkeys(heads)))
