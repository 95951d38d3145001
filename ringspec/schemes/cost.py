"""What a scheme costs: the numbers that each rank sends and holds, and the visible pairs that it computes.

All counts are exact. They are array elements, or bytes in the number formats of a recipe. A message to another rank counts
once, as in a direct send; a ring or tree algorithm for a collective operation may send other amounts. A softmax state is
Dv + 2 numbers a row (o, m, l); many programs send Dv + 1 (o and lse). Positions and other data of a token do not count.

:mod:`ringspec.plan.moves` has formulas for the same counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ringspec.formats import format_of
from ringspec.recipes import Recipe
from ringspec.schemes.execute import Moment
from ringspec.schemes.multisets import Visible
from ringspec.schemes.scheme import SIDE_OF, Scheme, tensors_of
from ringspec.schemes.sharding import Shard
from ringspec.schemes.show import moments_of


@dataclass(frozen=True)
class SchemeCost:
    """The cost of one pass: ``sent`` and ``held`` (the most at any moment) are array elements, or bytes, of each rank.

    ``pairs`` [step][rank] are visible pairs of a query, a query head and a key; ``transfers`` is the number of collective
    operations, ``messages`` the number of messages that each rank sends to other ranks.
    """

    phase: str
    sent: tuple[int, ...]
    held: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
    transfers: int
    messages: tuple[int, ...]


# The number format of each tensor of a thing: a field of Recipe.
FORMAT_OF = {
    "q": "inputs", "k": "inputs", "v": "inputs", "dy": "inputs", "lse": "backward_lse", "row_term": "delta",
    "m": "statistics", "l": "statistics", "o": "carried_o", "dq": "carried_dq", "dk": "carried_dkv",
    "dv": "carried_dkv",
}  # fmt: skip


def cell_size(
    thing: str, phase: str, width: int, value_width: int, recipe: Recipe | None = None
) -> int:
    """Return the array elements of one cell (token, head) of a thing; with a recipe, the bytes in its formats.

    >>> from ringspec.recipes import recipe
    >>> cell_size("k", "forward", 8, 4), cell_size("k", "forward", 8, 4, recipe("bf16"))
    (12, 24)
    """
    total = 0
    for name, shape in tensors_of(thing, phase, width, value_width).items():
        size = 1
        if recipe is not None:
            size = format_of(getattr(recipe, FORMAT_OF[name])).dtype.itemsize
        total += math.prod(shape) * size
    return total


def scheme_cost(
    scheme: Scheme,
    visible: Visible,
    width: int,
    value_width: int,
    phase: str = "forward",
    *,
    recipe: Recipe | None = None,
    batch: int = 1,
) -> SchemeCost:
    """Return the cost of a pass for a mask [H or 1, Sq, Sk] and the widths D of keys and Dv of values.

    ``recipe`` None: count array elements; otherwise bytes in the formats of this recipe. ``batch`` multiplies what is sent
    and held; pairs are those of one batch entry.

    >>> import numpy as np
    >>> from ringspec.schemes.mesh import Mesh
    >>> from ringspec.schemes.rings import ring
    >>> scheme = ring(Mesh((("ring", 2),)), [[0, 3], [1, 2]], heads=1, kv_heads=1)
    >>> cost = scheme_cost(scheme, np.tril(np.ones((1, 4, 4), dtype=bool)), 8, 8)
    >>> cost.sent, cost.pairs
    ((32, 32), ((3, 3), (2, 2)))
    """
    each = {x: batch * cell_size(x, phase, width, value_width, recipe) for x in SIDE_OF}
    ranks = scheme.mesh.ranks
    moments = moments_of(scheme, phase)
    sent, held, count = [0] * ranks, [0] * ranks, [0] * ranks
    for moment, step in zip(moments, scheme.steps(phase), strict=True):
        for one, messages in zip(step.transfers, moment.messages, strict=True):
            for message in messages:
                sent[message.source] += size(message.shard) * each[one.thing]
                count[message.source] += 1
        for r in range(ranks):
            held[r] = max(
                held[r], *(held_by(moment, r, each, when) for when in ("computed", "after"))
            )
    pairs = tuple(
        tuple(count_pairs(used, visible, scheme.group) for used in moment.used)
        for moment in moments
    )
    return SchemeCost(
        phase,
        tuple(sent),
        tuple(held),
        pairs,
        sum(len(step.transfers) for step in scheme.steps(phase)),
        tuple(count),
    )


def size(shard: Shard) -> int:
    """Return the number of slots times heads of a shard."""
    return len(shard.tokens) * len(shard.heads)


def held_by(moment: Moment, rank: int, each: dict[str, int], when: str) -> int:
    """Return the array elements that a rank holds at one moment of a step."""
    parts = getattr(moment, when)[rank].parts
    return sum(size(part.shard) * each[thing] for thing, part in parts.items())


def count_pairs(used: tuple[Shard, Shard] | None, visible: Visible, group: int) -> int:
    """Return the visible pairs (query, query head, key) that a rank computes in a step."""
    if used is None:
        return 0
    q, k = used
    per_head = visible.shape[0] > 1
    heads = q.heads if per_head else (0,)
    count = int(np.count_nonzero(visible[np.ix_(heads, q.real, k.real)]))
    return count if per_head else count * len(q.heads)
