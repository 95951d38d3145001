"""Schemes as text: who holds what, who computes what, what moves.

This needs no numbers, because a scheme says where every cell is. :mod:`~ringspec.schemes.show_run` adds what a run knows:
visible pairs, bytes, and what each rank did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringspec.schemes.execute import Moment, execute
from ringspec.schemes.multisets import multiset_arithmetic, multiset_inputs
from ringspec.schemes.parts import Message
from ringspec.schemes.scheme import Scheme, Transfer
from ringspec.schemes.sharding import Shard, Sharding

NAMES = {"q": "q", "k": "k v", "state": "m l o", "dq": "dq", "dk": "dk dv"}


def moments_of(scheme: Scheme, phase: str) -> tuple[Moment, ...]:
    """Return the record of a pass in which no query attends to any key: it shows where everything is."""
    tokens = [1 + max(shard.tokens, default=-1) for shard in scheme.home_q.shards]
    keys = [1 + max(shard.tokens, default=-1) for shard in scheme.home_k.shards]
    hidden = np.zeros((1, max(tokens), max(keys)), dtype=np.bool_)
    moments: list[Moment] = []
    arithmetic = multiset_arithmetic(scheme, phase, hidden)
    execute(scheme, phase, multiset_inputs(scheme), arithmetic, lambda _: None, moments.append)
    return tuple(moments)


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text, with runs of successive numbers as ranges; '.' is a padding slot.

    >>> ranges((0, 1, 2, 7, -1))
    '0-2 7 .'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and number > 0:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [
        "." if run == [-1] else f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs
    ]
    return " ".join(texts) or "none"


def shard_as_text(shard: Shard, all_heads: int) -> str:
    """Return the tokens of a shard, and its heads in brackets unless it has all."""
    if len(shard.heads) == all_heads:
        return ranges(shard.tokens)
    return f"{ranges(shard.tokens)} [h {ranges(shard.heads)}]"


def scheme_as_text(scheme: Scheme) -> str:
    """Return a scheme as text: the home of every token, then all steps of each pass."""
    lines = head_lines(scheme)
    for phase in ("forward", "backward"):
        for moment in moments_of(scheme, phase):
            lines += ["", *moment_lines(scheme, moment)]
    return "\n".join(lines)


def head_lines(scheme: Scheme) -> list[str]:
    """Return the scheme, its mesh and heads, then what each rank holds."""
    head = f"{scheme.name} on the mesh {scheme.mesh}, H = {scheme.heads}, Hkv = {scheme.kv_heads}"
    return [head, "", *home_lines(scheme)]


def home_lines(scheme: Scheme) -> list[str]:
    """Return one line for each rank with its coordinates, and its tokens and heads at home."""
    rows = [["rank", *scheme.mesh.names, "queries", "keys"]]
    for r in range(scheme.mesh.ranks):
        coordinates = [str(scheme.mesh.coordinate(r, axis)) for axis in scheme.mesh.names]
        q, k = scheme.home_q.shards[r], scheme.home_k.shards[r]
        texts = [shard_as_text(q, scheme.heads), shard_as_text(k, scheme.kv_heads)]
        rows.append([str(r), *coordinates, *texts])
    return aligned(rows)


def moment_lines(scheme: Scheme, moment: Moment) -> list[str]:
    """Return a step as text: what each rank computes, then what moves."""
    lines = [f"{moment.phase}, step {moment.step}"]
    rows = []
    for r, used in enumerate(moment.used):
        if used is not None:
            q, k = used
            texts = [shard_as_text(q, scheme.heads), "x", shard_as_text(k, scheme.kv_heads)]
            rows.append([f"  rank {r}", *texts])
    lines += aligned(rows) or ["  nobody computes"]
    before = {thing: part.shard for thing, part in moment.computed[0].parts.items()}
    for one, messages in zip(moment.transfers, moment.messages, strict=True):
        lines.append(f"  {NAMES[one.thing]}: {one.kind} along {one.axis}{routes(messages)}")
        old = before.get(one.thing)
        if one.kind != "permute" and old is not None:
            now = cells(scheme, one, one.to.shards[0])
            lines.append(f"    rank 0 holds {cells(scheme, one, old)}, then {now}")
        before[one.thing] = one.to.shards[0]
    return lines


def cells(scheme: Scheme, transfer: Transfer, shard: Shard) -> str:
    """Return the shard of a thing that is transferred as text."""
    return shard_as_text(shard, scheme.kv_heads if transfer.thing in ("k", "dk") else scheme.heads)


def routes(messages: Sequence[Message]) -> str:
    """Return who sends to whom, if each rank sends to one other rank alone."""
    pairs = {(message.source, message.target) for message in messages}
    if len({source for source, _ in pairs}) != len(pairs):
        return ""
    return ": " + ", ".join(f"{source} to {target}" for source, target in sorted(pairs))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def sharding_as_text(sharding: Sharding) -> str:
    """Return one line for each rank: its tokens and heads."""
    return "\n".join(
        f"rank {r}: tokens {ranges(shard.tokens)}, heads {ranges(shard.heads)}"
        for r, shard in enumerate(sharding.shards)
    )


# Printing is not part of the model, so this file gives its classes their ``__str__``.
Scheme.__str__ = scheme_as_text  # type: ignore[assignment,method-assign]
Sharding.__str__ = sharding_as_text  # type: ignore[assignment,method-assign]
