"""The problem of a model ring, and what it has computed so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import is_
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.choices import OF_KEYS, Choices, components, right_choices
from ringspec.conformance.readout.faults.tile_rules import needs_mask
from ringspec.conformance.readout.problem.pairs import Pairs, kept
from ringspec.problem.model import Array, Booleans, Integers


class Model:
    """The model of the ring of one problem.

    ``masks`` are the patterns [a, b, 1, i, j] from which the choice ``mask`` selects by number, the correct one first.
    ``tokens`` are the orders of tokens from which ``o_tokens`` selects
    (:func:`ringspec.conformance.readout.problem.geometry.dealt_otherwise`).
    """

    def __init__(self, pairs: Pairs, masks: Sequence[Booleans], tokens: Sequence[Integers]) -> None:
        self.pairs, self.masks = pairs, np.stack(masks)
        self.geometry = geometry = pairs.geometry
        self.workers, self.heads, self.group = geometry.workers, geometry.heads, geometry.group
        self.slots, self.key_heads = geometry.slots, geometry.heads // geometry.group
        self.shape = (self.workers, self.workers, self.heads, self.slots, self.slots)
        self.order = np.argsort(geometry.steps("forward"), axis=1)
        self.rows = np.arange(self.workers)
        self.s, self.g = (by_token(x) for x in (pairs.s, pairs.g))
        self.dy_k = self.g if pairs.dy_k is None else by_token(pairs.dy_k)
        # [c, (b, j), (g, x, y)]: G of query y of worker x in head g, with key j of worker b in key head c
        self.columns = pairs.g.transpose(0, 2, 5, 3, 1, 4).reshape(
            self.key_heads, geometry.tokens, -1
        )
        self.tokens, self.sinks = list(tokens), pairs.sinks
        self.next_keep = kept(self.geometry, 1)
        self.kept: dict[str, tuple[tuple[Any, ...], Any]] = {}
        # What this model has computed so far, in tables over all pairs. It bounds a search in place of a time, which
        # would let an explanation depend on the machine.
        self.evaluations, self.most = 0, math.inf

    def may_go_on(self, kind: object = None) -> bool:
        """Return whether the search may still compute something; ``kind`` is not used."""
        return self.evaluations <= self.most

    @cached_property
    def right(self) -> Choices:
        return right_choices(self.geometry)

    @cached_property
    def computed_rows(self) -> Booleans:
        """Which rows of each block a ring computes: those that see a key if no window hides it, [a, b, 1, i]."""
        at = self.geometry.position
        before = at.min(axis=1)[None, :, None, None] <= at[:, None, None, :]
        return np.asarray(before | (not self.geometry.causal))

    def once(self, name: str, given: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Return the value kept under ``name`` if it was computed from the same objects, else ``compute()``.

        ``given`` has the objects that the value depends on.
        """
        kept = self.kept.get(name)
        if kept is not None and all(map(is_, kept[0], given)):
            return kept[1]
        self.evaluations += 1
        return compute()

    def part(self, name: str, given: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Return a part of a table as :meth:`once` does, without counting it.

        The first value is kept until :func:`~ringspec.conformance.readout.model.keeping.keep`.
        """
        kept = self.kept.get(name)
        if kept is not None and all(map(is_, kept[0], given)):
            return kept[1]
        value = compute()
        self.kept.setdefault(name, (tuple(given), value))
        return value

    def index(self, c: Choices, name: str) -> Integers:
        """Return the index, over workers, heads and slots, of the token that the choice ``name`` selects for each pair."""

        def compute() -> Integers:
            heads = self.key_heads if name in OF_KEYS else self.heads
            return np.asarray((given[0] * heads + given[1]) * self.slots + given[2])

        given = c.several(components(name))
        found: Integers = self.part(f"index of {name}", given, compute)
        return found

    def row_index(self, c: Choices, name: str) -> Integers:
        """Return the index of the row that the choice ``name`` gives each row, [a, h, i]."""
        at = np.broadcast_to(self.index(c, name), (self.workers, 1, *self.shape[2:4], 1))
        return at[:, 0, :, :, 0]

    def correct(self, c: Choices, *names: str) -> bool:
        of, right = c.of, self.right.of
        return all(of[x] is right[x] for name in names for x in components(name))

    def of_heads(self, name: str) -> Array:
        """Return S ('s') or G ('g') as [a, b, h, i, j], for each query head with its key head."""
        table = self.s if name == "s" else self.g
        return table[self.index(self.right, "q"), self.index(self.right, "k")]

    def entries(self, table: Array, c: Choices, name: str) -> Array:
        """Return the entries of ``table`` [a, h, i, (b, j)] in the rows and columns that the choices of ``name`` give."""
        column = c[f"{name}_k.worker"] * self.slots + c[f"{name}_k.slot"]
        rows = table.reshape(-1, self.geometry.tokens)
        return np.asarray(rows[self.index(c, f"{name}_q"), column])

    def blocks_with(self, mask: str) -> Booleans:
        """Return the blocks [a, b, 1, 1] that a mask hides in part ('masked'), or the others ('whole').

        A block of which only whole rows or whole columns are hidden is computed without a mask.
        """
        masked = needs_mask(self.masks[0])[..., 0]
        return masked if mask == "masked" else ~masked

    def without_padding(self, x: Array) -> Array:
        """Return [a, b, h, i, j] with 0 in the rows and columns of padding slots, which results do not show."""
        return x * self.geometry.real_pairs if self.geometry.padding else x


def by_token(x: Array) -> Array:
    """Rearrange [c, a, b, h, i, j] to [(a, h, i), (b, c, j)], where c is a key head."""
    c, a, b, h, i, j = x.shape
    return x.transpose(1, 3, 4, 2, 0, 5).reshape(a * h * i, b * c * j)
