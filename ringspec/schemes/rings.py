"""Constructors of rings: the blocks of keys (or, in a backward pass, of queries) travel from rank to rank.

``ring``         W - 1 hops along the axis ``ring``
``double_ring``  a ring of rings: all blocks of an inner ring first, then one hop along the outer ring

In every step t of a ring, rank r computes with the block of rank r - t. Results travel with their block and make one hop
more, to their home.

Sources: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; double ring: Gu et al., LoongTrain,
https://arxiv.org/abs/2406.18485.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringspec.schemes.mesh import Mesh
from ringspec.schemes.scheme import RESULTS, Scheme, Step, Tokens, Transfer
from ringspec.schemes.sharding import Sharding, by_tables, shifted

Tables = Sequence[Sequence[int]]


def home(mesh: Mesh, tables: Tables, heads: int, text: Tokens = ()) -> Sharding:
    """Return the sharding in which rank r holds the text, if there is any, and the tokens tables[r], with all heads."""
    return by_tables([(*text, *table) for table in tables], [range(heads)] * mesh.ranks)


def hop(things: Sequence[str], axis: str, to: Sharding) -> tuple[Transfer, ...]:
    """Return one hop of some things to the next rank of a ring."""
    return tuple(Transfer(thing, "permute", axis, to) for thing in things)


def ring_steps(
    mesh: Mesh, axis: str, block: Sharding, moves: str, phase: str, direction: int = 1
) -> tuple[Step, ...]:
    """Return the steps of a ring along ``axis``, in which ``block``, the sharding of the thing ``moves``, travels.

    ``moves`` is 'k' or 'q'. The results that belong to this side travel, too, and return to where they began.
    """
    size = mesh.size(axis)
    results = tuple("d" + moves for thing in RESULTS[phase] if thing == "d" + moves)
    steps = []
    for t in range(size):
        to = shifted(block, mesh, axis, (t + 1) * direction)
        things = (moves, *results) if t < size - 1 else results
        steps.append(Step(transfers=hop(things, axis, to) if size > 1 else ()))
    return tuple(steps)


def ring(
    mesh: Mesh,
    tables: Tables,
    tables_k: Tables | None = None,
    *,
    heads: int,
    kv_heads: int,
    circulation: str = "kv",
    direction: int = 1,
) -> Scheme:
    """Return the scheme of a ring along the axis ``ring``.

    Rank r holds queries tables[r] and keys tables_k[r] (None: the same tokens). In the backward pass of circulation 'q',
    queries travel with dq; in that of 'kv', keys travel with dk and dv. ``direction`` is 1 or -1.

    >>> scheme = ring(Mesh((("ring", 3),)), [[0], [1], [2]], heads=1, kv_heads=1)
    >>> [len(step.transfers) for step in scheme.forward], [len(step.transfers) for step in scheme.backward]
    ([1, 1, 0], [2, 2, 1])
    """
    home_q = home(mesh, tables, heads)
    home_k = home(mesh, tables if tables_k is None else tables_k, kv_heads)
    moves, block = ("k", home_k) if circulation == "kv" else ("q", home_q)
    forward = ring_steps(mesh, "ring", home_k, "k", "forward", direction)
    backward = ring_steps(mesh, "ring", block, moves, "backward", direction)
    return Scheme("ring", mesh, heads, kv_heads, home_q, home_k, home_q, forward, backward)


def double_ring(
    mesh: Mesh, tables: Tables, tables_k: Tables | None = None, *, heads: int, kv_heads: int
) -> Scheme:
    """Return the scheme of a double ring along the axes ``outer`` and ``inner``.

    In step (a, b), rank (o, i) computes with the block of rank (o - a, i - b). The last hop of an inner ring brings each
    block back to where this inner ring began; the outer hop follows. (Programs that send a copy along the outer ring
    while the inner ring turns save this hop of k and v.)

    >>> len(double_ring(Mesh((("outer", 2), ("inner", 2))), [[0], [1], [2], [3]], heads=1, kv_heads=1).forward)
    4
    """
    home_q = home(mesh, tables, heads)
    home_k = home(mesh, tables if tables_k is None else tables_k, kv_heads)
    passes = [double_ring_steps(mesh, home_k, phase) for phase in ("forward", "backward")]
    return Scheme("double_ring", mesh, heads, kv_heads, home_q, home_k, home_q, *passes)


def double_ring_steps(mesh: Mesh, block: Sharding, phase: str) -> tuple[Step, ...]:
    """Return the steps of a double ring in which keys travel."""
    outer, inner = mesh.size("outer"), mesh.size("inner")
    results = ("dk",) if phase == "backward" else ()
    steps = []
    for a in range(outer):
        window = shifted(block, mesh, "outer", a)
        for b in range(inner):
            last = (a, b) == (outer - 1, inner - 1)
            transfers: tuple[Transfer, ...] = ()
            things = results if last else ("k", *results)
            if inner > 1:
                transfers = hop(things, "inner", shifted(window, mesh, "inner", b + 1))
            if b == inner - 1 and outer > 1:
                transfers += hop(things, "outer", shifted(window, mesh, "outer", 1))
            steps.append(Step(transfers=transfers))
    return tuple(steps)
