"""Shards: which cells each rank holds.

A *cell* is (token, head): of q with query heads, of k and v with key heads. All numbers are global. A *shard* is what one
rank holds of one side (queries or keys): some tokens times some heads. A *sharding* is one shard for each rank. A cell
that several ranks hold is *replicated*; a sharding with such cells must say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.errors import OptionError
from ringspec.problem.model import Integers
from ringspec.schemes.mesh import Mesh


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one side: ``tokens`` [n] (-1 = padding slot) times ``heads`` [h], as global numbers."""

    tokens: tuple[int, ...]
    heads: tuple[int, ...]

    @cached_property
    def real(self) -> tuple[int, ...]:
        """The tokens without padding slots."""
        return tuple(token for token in self.tokens if token >= 0)

    @property
    def index(self) -> Integers:
        """The tokens as an int64 array."""
        return np.array(self.tokens, dtype=np.int64)

    @cached_property
    def cells(self) -> list[tuple[int, int]]:
        """All (token, head), without padding slots."""
        return [(token, head) for token in self.real for head in self.heads]


@dataclass(frozen=True)
class Sharding:
    """The shards of all ranks; ``replicated`` declares that some cells are on several ranks.

    >>> Sharding((Shard((0, 1), (0,)), Shard((2, 3), (0,)))).ranks
    2
    """

    shards: tuple[Shard, ...]
    replicated: bool = False

    @property
    def ranks(self) -> int:
        """W, the number of ranks."""
        return len(self.shards)

    def copies(self) -> Counter[tuple[int, int]]:
        """Return the number of ranks that hold each cell."""
        return Counter(cell for shard in self.shards for cell in shard.cells)


def by_tables(tokens: Sequence[Sequence[int]], heads: Sequence[Sequence[int]]) -> Sharding:
    """Return the sharding in which rank r holds tokens[r] x heads[r]; it declares replicas if there are any.

    >>> by_tables([[0, 1], [0, 1]], [[0], [0]]).replicated
    True
    """
    shards = tuple(Shard(numbers(t), numbers(h)) for t, h in zip(tokens, heads, strict=True))
    once = Sharding(shards)
    return Sharding(shards, any(count > 1 for count in once.copies().values()))


def numbers(values: Sequence[int]) -> tuple[int, ...]:
    """Return integers of any kind as a tuple of ints."""
    return tuple(int(value) for value in values)


def shifted(sharding: Sharding, mesh: Mesh, axis: str, hops: int) -> Sharding:
    """Return the sharding after ``hops`` hops: rank r holds what the rank ``hops`` earlier along ``axis`` held."""
    shards = tuple(sharding.shards[mesh.moved(r, axis, -hops)] for r in range(mesh.ranks))
    return Sharding(shards, sharding.replicated)


def group_tokens(sharding: Sharding, mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
    """Return, for each rank, the tokens that its group along ``axis`` holds together, in order and without padding."""
    held = [
        {token for other in mesh.group(r, axis) for token in sharding.shards[other].real}
        for r in range(mesh.ranks)
    ]
    return [tuple(sorted(tokens)) for tokens in held]


def head_slice(heads: int, part: int, parts: int) -> tuple[int, ...]:
    """Return heads [part * H / parts, (part + 1) * H / parts).

    >>> head_slice(8, 1, 4)
    (2, 3)
    """
    size = heads // parts
    return tuple(range(part * size, (part + 1) * size))


def check_heads(heads: int, kv_heads: int, parts: int, axes: str) -> None:
    """Raise OptionError unless H is a multiple of ``parts``, the number of ranks among which ``axes`` divide the heads.

    >>> check_heads(6, 2, 4, "the axis 'ulysses'")
    Traceback (most recent call last):
    ringspec.errors.OptionError: expected H as a multiple of the axis 'ulysses' = 4; got H = 6, Hkv = 2. Fix: use 3 in place of 4, or pad q to 8 heads, 4 for each key head.
    """
    if heads % parts:
        raise OptionError(
            f"H as a multiple of {axes} = {parts}",
            f"H = {heads}, Hkv = {kv_heads}",
            f"use {fewer_parts(heads, parts)} in place of {parts}, or {padding(heads, kv_heads, parts)}",
        )


def fewer_parts(heads: int, parts: int) -> int:
    """Return the largest number below ``parts`` that divides the heads."""
    return max(x for x in range(1, parts) if heads % x == 0)


def padding(heads: int, kv_heads: int, parts: int) -> str:
    """Say to how many heads q, or q, k and v, must be padded so that ``parts`` divides H, whichever needs fewer.

    Either each key head gets more query heads, or there are more key heads with as many query heads each.

    >>> padding(8, 2, 16), padding(32, 8, 6)
    ('pad q to 16 heads, 8 for each key head', 'pad q to 36 heads, and k and v to 9')
    """
    group = heads // kv_heads
    wider = next(n for n in range(group, group + parts) if n * kv_heads % parts == 0)
    more = next(n for n in range(kv_heads, kv_heads + parts) if n * group % parts == 0)
    if wider * kv_heads <= more * group:
        return f"pad q to {wider * kv_heads} heads, {wider} for each key head"
    return f"pad q to {more * group} heads, and k and v to {more}"


def key_heads_of(query_heads: Sequence[int], group: int) -> tuple[int, ...]:
    """CP-4: return the key heads that some query heads use: h // G, each once and in order (FWD-10).

    >>> key_heads_of((2, 3), group=4)
    (0,)
    """
    return tuple(sorted({head // group for head in query_heads}))
