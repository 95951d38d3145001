"""A scheme for a few tokens and heads in place of many, for the validator.

Tokens that are always on the same ranks, and are always used together, form an *atom*; so do heads. One token and one
head stand for each atom: a pair of atoms is visible if any of their pairs is. What a scheme does to these few cells, it
does to all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from ringspec.schemes.multisets import Visible
from ringspec.schemes.scheme import SIDE_OF, Scheme, Step, Tokens, Transfer
from ringspec.schemes.sharding import Shard, Sharding

Atoms = dict[int, list[int]]  # the members of each atom, by the member that stands for it


def grouped(keys: dict[int, object]) -> Atoms:
    """Return the numbers that have equal keys, by the first of them."""
    first: dict[object, int] = {}
    atoms: Atoms = {}
    for number in sorted(keys):
        leader = first.setdefault(keys[number], number)
        atoms.setdefault(leader, []).append(number)
    return atoms


def sets_of(scheme: Scheme, phase: str, side: str, what: str) -> list[tuple[int, ...]]:
    """Return every set of ``what``, 'tokens' or 'heads', of a side that a pass names."""
    shardings = [scheme.home_q, scheme.home_o] if side == "q" else [scheme.home_k]
    sets: list[tuple[int, ...]] = []
    for step in scheme.steps(phase):
        moved = [one for one in step.transfers if SIDE_OF[one.thing] == side]
        shardings += [one.to for one in moved]
        if what == "tokens":
            sets += (step.rows if side == "q" else step.keys) or ()
            sets += [one.tokens for one in moved if one.tokens is not None]
    return sets + [getattr(shard, what) for sharding in shardings for shard in sharding.shards]


def memberships(count: int, sets: Iterable[tuple[int, ...]]) -> dict[int, object]:
    """Return, for each number below ``count``, in which of the sets it is."""
    found: list[list[int]] = [[] for _ in range(count)]
    for place, members in enumerate(sets):
        for member in members:
            if 0 <= member < count:
                found[member].append(place)
    return {number: tuple(places) for number, places in enumerate(found)}


def compressed(scheme: Scheme, phase: str, visible: Visible) -> tuple[Scheme, Visible]:
    """Return a scheme with one token and one head for each atom of a pass, and the mask of the atoms.

    If pieces stay in the order of the ranks that sent them, every token counts, and the scheme is returned unchanged.
    """
    steps = scheme.steps(phase)
    if any(one.order == "rank" for step in steps for one in step.transfers):
        return scheme, visible
    queries = grouped(memberships(visible.shape[1], sets_of(scheme, phase, "q", "tokens")))
    keys = grouped(memberships(visible.shape[2], sets_of(scheme, phase, "k", "tokens")))
    of_key = memberships(scheme.kv_heads, sets_of(scheme, phase, "k", "heads"))
    of_query = memberships(scheme.heads, sets_of(scheme, phase, "q", "heads"))
    heads = grouped({h: (of_query[h], of_key[h // scheme.group]) for h in range(scheme.heads)})
    kept = {
        "q": (set(queries), set(heads)),
        "k": (set(keys), {head // scheme.group for head in heads}),
    }
    shorter = tuple(only_step(step, kept) for step in steps)
    small = replace(
        scheme,
        home_q=only(scheme.home_q, *kept["q"]),
        home_k=only(scheme.home_k, *kept["k"]),
        home_o=only(scheme.home_o, *kept["q"]),
        forward=shorter if phase == "forward" else (),
        backward=shorter if phase == "backward" else None,
    )
    return small, visible_atoms(visible, heads, queries, keys)


def only(sharding: Sharding, tokens: set[int], heads: set[int]) -> Sharding:
    """Return a sharding without all other tokens and heads, and without padding slots."""
    shards = tuple(
        Shard(
            tuple(token for token in shard.tokens if token in tokens),
            tuple(head for head in shard.heads if head in heads),
        )
        for shard in sharding.shards
    )
    return replace(sharding, shards=shards)


def only_step(step: Step, kept: dict[str, tuple[set[int], set[int]]]) -> Step:
    """Return a step without all other tokens and heads."""

    def tables(sets: tuple[Tokens, ...] | None, side: str) -> tuple[Tokens, ...] | None:
        if sets is None:
            return None
        return tuple(tuple(t for t in tokens if t in kept[side][0]) for tokens in sets)

    def transfer(one: Transfer) -> Transfer:
        tokens, heads = kept[SIDE_OF[one.thing]]
        part = None if one.tokens is None else tuple(t for t in one.tokens if t in tokens)
        return replace(one, to=only(one.to, tokens, heads), tokens=part)

    return replace(
        step,
        rows=tables(step.rows, "q"),
        keys=tables(step.keys, "k"),
        transfers=tuple(transfer(one) for one in step.transfers),
    )


def visible_atoms(visible: Visible, heads: Atoms, queries: Atoms, keys: Atoms) -> Visible:
    """Return the mask of the atoms: True at the members that stand for them, if any pair of their members is visible."""
    small = np.zeros_like(visible)
    per_head = visible.shape[0] > 1
    for head, others in heads.items() if per_head else ((0, [0]),):
        for query, rows in queries.items():
            for key, columns in keys.items():
                small[head, query, key] = visible[np.ix_(others, rows, columns)].any()
    return small
