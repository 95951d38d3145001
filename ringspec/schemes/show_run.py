"""Runs and their steps as text: what each rank holds, computes, sends, receives and merges, and what a pass costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from ringspec.schemes.cost import SchemeCost
from ringspec.schemes.execute import Moment
from ringspec.schemes.parts import Message, Part, common
from ringspec.schemes.scheme import RESULTS, SIDE_OF, Scheme, Step
from ringspec.schemes.sharding import Shard
from ringspec.schemes.show import NAMES, head_lines, moment_lines, moments_of, ranges


def run_as_summary(scheme: Scheme, costs: Sequence[SchemeCost]) -> str:
    """Return a run as a short text: homes, and one line for each step, or for successive steps that are alike."""
    lines = head_lines(scheme)
    for cost in costs:
        lines += [
            "",
            f"{cost.phase}: bytes sent by a rank {span(cost.sent)}, held at most {span(cost.held)}",
        ]
        texts = [
            step_summary(step, pairs)
            for step, pairs in zip(scheme.steps(cost.phase), cost.pairs, strict=True)
        ]
        first = 0
        for text, alike in groupby(texts):
            last = first + len(list(alike)) - 1
            which = f"step {first}" if first == last else f"steps {first} to {last}"
            lines.append(f"  {which}: {text}")
            first = last + 1
    return "\n".join([*lines, "", "print(run.text()) shows what each rank does in each step."])


def step_summary(step: Step, pairs: Sequence[int]) -> str:
    """Return what all ranks do in a step: visible pairs, then the collective operations."""
    done = "nobody computes" if step.idle else f"visible pairs on a rank {span(pairs)}"
    moved = [f"{NAMES[one.thing]}: {one.kind} along {one.axis}" for one in step.transfers]
    return "; ".join([done, *moved])


def span(counts: Sequence[int]) -> str:
    """Return the least and the largest of some counts.

    >>> span((3, 5, 3)), span((4, 4))
    ('3 to 5', '4')
    """
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def run_as_text(scheme: Scheme, moments: Sequence[Moment], costs: Sequence[SchemeCost]) -> str:
    """Return a run as text: homes, all steps of its passes (one cost for each), visible pairs, bytes."""
    lines = head_lines(scheme)
    for cost in costs:
        sent, held = (" ".join(map(str, of_rank)) for of_rank in (cost.sent, cost.held))
        lines += [*pass_lines(scheme, moments, cost, bool(moments)), ""]
        lines.append(f"{cost.phase}: bytes sent by each rank: {sent}; held at most: {held}")
    return "\n".join(lines)


def pass_lines(
    scheme: Scheme, moments: Sequence[Moment], cost: SchemeCost, by_rank: bool
) -> list[str]:
    """Return the steps of a pass as lines, each with the visible pairs of the ranks.

    ``moments`` are the recorded steps, if there are any. ``by_rank``: also what each rank holds, sends, receives and merges.
    """
    recorded = [moment for moment in moments if moment.phase == cost.phase]
    lines = []
    shown_moments = recorded or moments_of(scheme, cost.phase)
    for moment, pairs in zip(shown_moments, cost.pairs, strict=True):
        shown = moment_lines(scheme, moment)
        if any(moment.used):
            after = 1 + sum(used is not None for used in moment.used)
            shown.insert(after, f"  visible pairs on each rank: {' '.join(map(str, pairs))}")
        lines += ["", *shown, *(moment_as_text(moment).splitlines()[1:] if by_rank else ())]
    return lines


def moment_as_text(moment: Moment) -> str:
    """Return one step as text: what each rank holds, computes, sends, receives and merges."""
    lines = [f"{moment.phase}, step {moment.step}"]
    for rank, state in enumerate(moment.before):
        lines.append(f"  rank {rank} holds {parts_as_text(state.parts)}")
        lines += (f"    {line}" for line in rank_lines(moment, rank))
    return "\n".join(lines)


def parts_as_text(parts: dict[str, Part]) -> str:
    """Return what a rank holds, thing by thing."""
    return "; ".join(f"{NAMES[thing]} {cells_as_text(part.shard)}" for thing, part in parts.items())


def cells_as_text(shard: Shard) -> str:
    """Return the tokens and heads of a shard.

    >>> cells_as_text(Shard((0, 1, 7), (2, 3)))
    '0-1 7 [h 2-3]'
    """
    return f"{ranges(shard.tokens)} [h {ranges(shard.heads)}]"


def rank_lines(moment: Moment, rank: int) -> Iterator[str]:
    """Return what one rank does in a step: its computation, then one line for each kind of message and merge."""
    used = moment.used[rank]
    if used is not None:
        verb = {
            thing: ("starts" if thing not in moment.before[rank].parts else joins(thing))
            for thing in RESULTS[moment.phase]
        }
        words = ", ".join(f"{done} {NAMES[thing]}" for thing, done in verb.items())
        yield f"computes {cells_as_text(used[0])} x {cells_as_text(used[1])}: {words}"
    shards = {
        thing: [state.parts[thing].shard for state in moment.computed if thing in state.parts]
        for thing in SIDE_OF
    }
    for one, messages in zip(moment.transfers, moment.messages, strict=True):
        name, wanted = NAMES[one.thing], one.to.shards[rank]
        for message in messages:
            if message.source == rank:
                yield f"sends {name} {cells_as_text(message.shard)} to {message.target}"
        arriving = [message for message in messages if message.target == rank]
        for message in arriving:
            yield f"receives {name} {cells_as_text(message.shard)} from {message.source}"
        if one.thing in RESULTS[moment.phase]:
            own = common(shards[one.thing][rank], wanted, one.tokens, True)
            tokens = joined_tokens(own, arriving)
            if tokens:
                yield f"{joins(one.thing)} {name} of {ranges(tokens)}"
        shards[one.thing] = list(one.to.shards)


def joins(thing: str) -> str:
    """Return the verb for results that are joined: states are merged, gradients added."""
    return "merges" if thing == "state" else "adds to"


def joined_tokens(own: Shard, arriving: list[Message]) -> list[int]:
    """Return the tokens of which a rank gets a cell more than once."""
    count = Counter(cell for shard in (own, *(m.shard for m in arriving)) for cell in shard.cells)
    return sorted({token for (token, _), times in count.items() if times > 1})


# Printing is not part of the model, so this file gives the class its ``__str__``.
Moment.__str__ = moment_as_text  # type: ignore[assignment,method-assign]
