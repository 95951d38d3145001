"""Which pairs of tokens a mask makes visible, from the positions of queries and keys.

A pair [a, b, h, i, j] is query i of worker a with key j of worker b in head h; i and j are slots, the places of tokens
on a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.problem.geometry import Geometry, Window, relations
from ringspec.problem.model import Booleans, Integers


@dataclass(frozen=True)
class Mask:
    """A pattern [a, b, 1, i, j] that is True for visible pairs, and ``words`` that describe the mistake.

    The correct pattern, and the one that hides every pair, have no words. ``cost`` is lower for more usual mistakes.
    ``of_tiles``: the mistake is a rule about tiles.
    """

    words: str
    pattern: Booleans
    cost: float = 1.0
    of_tiles: bool = False

    @cached_property
    def key(self) -> tuple[tuple[int, ...], bytes]:
        """What is equal for equal patterns."""
        return key_of(self.pattern)


def key_of(pattern: Booleans) -> tuple[tuple[int, ...], bytes]:
    return pattern.shape, pattern.tobytes()


def seen(
    query: Integers,
    key: Integers,
    causal: bool,
    window: Window | None,
    reach: int = 0,
    documents: Sequence[int] | None = None,
) -> Booleans:
    """Return which keys are visible to which queries, [a, b, 1, i, j], for positions ``query`` and ``key`` [a, b, n].

    ``reach``: how many keys after its own position a query sees under a causal mask; -1 hides its own position, too.
    """
    gap = key[:, :, None, None, :] - query[:, :, None, :, None]
    pattern = np.ones(gap.shape, bool)
    if causal:
        pattern &= gap <= reach
    if window is not None:
        pattern &= within(gap, window)
    if documents is not None:
        pattern &= same(document_of(query, documents), document_of(key, documents))
    return pattern


def within(gap: Integers, window: Window) -> Booleans:
    """Return which keys a window shows, where ``gap`` is how many tokens a key is after its query."""
    left, right = window
    shown = np.ones(gap.shape, bool)
    if left is not None:
        shown &= gap >= -left
    if right is not None:
        shown &= gap <= right
    return shown


def document_of(position: Integers, starts: Sequence[int]) -> Integers:
    """Return the number of the document of each position; ``starts``: the first position of each document."""
    return np.maximum(np.searchsorted(np.asarray(starts), position, "right") - 1, 0)


def same(of_q: Integers, of_k: Integers) -> Booleans:
    """Return the pairs [a, b, 1, i, j] of queries and keys, [a, b, n], with the same number."""
    return np.asarray(of_q[:, :, None, :, None] == of_k[:, :, None, None, :])


def within_documents(geometry: Geometry) -> Callable[..., Booleans]:
    """Return :func:`seen`, whose patterns show only pairs of tokens of one document of the ring."""
    real = geometry.real_pairs
    if geometry.documents is None:
        return lambda *positions: seen(*positions) & real
    of = document_of(geometry.position, geometry.documents)
    of_one = same(of[:, None], of[None, :]) & real
    return lambda *positions: seen(*positions) & of_one


def owners(geometry: Geometry, side: str) -> dict[str, Integers]:
    """Return the wrong owners that either pass may assume for the queries ('q') or keys ('k') of each block.

    The result maps a description of the owners to their worker numbers [a, b].
    """
    return relations(geometry, "forward", side, False) | relations(
        geometry, "backward", side, False
    )
