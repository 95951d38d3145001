"""Constructors with an exchange of tokens for heads: Ulysses, USP, and joint attention with replicated text.

Along the axis ``ulysses`` (degree P), an all-to-all gives each rank all tokens of its group and 1/P of the query heads,
with the key heads that these use. Along the axis ``ring``, the blocks of keys of these groups travel as in any ring.

======  ==========================================  =====================================  ===========================
step    transfers before it                         each rank computes                     transfers after it
======  ==========================================  =====================================  ===========================
first   q, k: ``all_to_all`` along ``ulysses``      its group's tokens x its own block     k: ``permute`` along ``ring``
t                                                   its group's tokens x the visitor       k: ``permute`` along ``ring``
last                                                                                       o: ``all_to_all`` back
======  ==========================================  =====================================  ===========================

After the exchange, rows lie rank by rank, which is not the order of tokens in a zigzag layout. These constructors put
them in the order of tokens, so without a ring the result equals that of one rank bit for bit. A key head that several
ranks need is copied to each of them (never tiled), and their dk and dv add up on the way home.

**Joint attention**: all ranks hold the *text* tokens, beside their share of the other tokens. Every copy of a text query
meets all keys. Text keys are used in one step of the ring alone, the first (``text_at`` 'front') or the last ('rear'); a
key that is used in every step would count R times. In the backward pass, the text queries are differentiated at one
coordinate of the ring, and the text gradients of all coordinates are added.

Sources: Jacobs et al., DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509; Fang and Zhao, USP,
https://arxiv.org/abs/2405.07719; joint attention: Fang et al., xDiT, https://arxiv.org/abs/2411.01738.
"""

from __future__ import annotations

from dataclasses import replace

from ringspec.schemes.mesh import Mesh
from ringspec.schemes.rings import Tables, home, ring_steps
from ringspec.schemes.scheme import Scheme, Step, Tokens, Transfer, idle
from ringspec.schemes.sharding import (
    Shard,
    Sharding,
    by_tables,
    check_heads,
    group_tokens,
    head_slice,
    key_heads_of,
    shifted,
)


def usp(
    mesh: Mesh,
    tables: Tables,
    tables_k: Tables | None = None,
    *,
    heads: int,
    kv_heads: int,
    text: Tokens = (),
    text_at: str = "front",
    name: str = "usp",
) -> Scheme:
    """Return the scheme of a mesh with the axes ``ulysses`` and ``ring``, in any order, or one of them.

    Rank r holds the tokens tables[r] of the queries and tables_k[r] of the keys (None: the same), with all heads, and the
    ``text`` tokens as well. ``text_at`` is 'front' or 'rear'. Raises OptionError if the query heads cannot be divided.

    >>> mesh = Mesh((("ring", 2), ("ulysses", 2)))
    >>> scheme = usp(mesh, [[0], [1], [2], [3]], heads=2, kv_heads=1)
    >>> [one.kind for one in scheme.forward[0].transfers], [one.kind for one in scheme.backward[-1].transfers]
    (['all_to_all', 'all_gather'], ['permute', 'all_to_all', 'reduce_scatter'])
    """
    parts = mesh.size("ulysses")
    check_heads(heads, kv_heads, parts, "the axis 'ulysses'")
    tables_k = tables if tables_k is None else tables_k
    home_q = home(mesh, tables, heads, text)
    home_k = home(mesh, tables_k, kv_heads, text)
    slices = [head_slice(heads, mesh.coordinate(r, "ulysses"), parts) for r in range(mesh.ranks)]
    wide_q = exchanged(mesh, home_q, slices, text)
    group = heads // kv_heads
    wide_k = exchanged(mesh, home_k, [key_heads_of(s, group) for s in slices], text)
    wide = Scheme(name, mesh, heads, kv_heads, home_q, home_k, home_q, (), ())
    return replace(
        wide,
        forward=usp_steps(wide, wide_q, wide_k, "forward", text, text_at),
        backward=usp_steps(wide, wide_q, wide_k, "backward", text, text_at),
    )


def exchanged(mesh: Mesh, start: Sharding, heads: list[Tokens], text: Tokens) -> Sharding:
    """Return the sharding after the exchange: the text and all tokens of the group, in order, with some heads."""
    if mesh.size("ulysses") == 1:
        return start
    held = group_tokens(start, mesh, "ulysses")
    tokens = [(*text, *(token for token in own if token not in set(text))) for own in held]
    return by_tables(tokens, heads)


def usp_steps(
    scheme: Scheme, wide_q: Sharding, wide_k: Sharding, phase: str, text: Tokens, text_at: str
) -> tuple[Step, ...]:
    """Return the steps of a pass: exchange, ring, exchange back."""
    mesh = scheme.mesh
    steps = list(ring_steps(mesh, "ring", wide_k, "k", phase))
    if text:
        steps = with_joint_text(mesh, steps, wide_q, wide_k, phase, text, text_at)
    if mesh.size("ulysses") > 1:
        into = (
            Transfer("q", "all_to_all", "ulysses", wide_q),
            Transfer("k", kind_of_keys(scheme, wide_k), "ulysses", wide_k),
        )
        steps = [idle(*into), *steps]
    last = steps[-1]
    back = way_home(scheme, wide_q, wide_k, phase, text)
    return (*steps[:-1], replace(last, transfers=(*last.transfers, *back)))


def kind_of_keys(scheme: Scheme, wide_k: Sharding) -> str:
    """Return the operation that brings keys to the ranks: an all_gather if each rank needs all key heads."""
    everything = all(len(shard.heads) == scheme.kv_heads for shard in wide_k.shards)
    return "all_gather" if everything else "all_to_all"


def way_home(
    scheme: Scheme, wide_q: Sharding, wide_k: Sharding, phase: str, text: Tokens
) -> tuple[Transfer, ...]:
    """Return the transfers that bring the results of a pass home: text to all ranks, everything else to its owner."""
    mesh = scheme.mesh
    transfers: tuple[Transfer, ...] = ()
    if text and phase == "backward" and mesh.size("ring") > 1:
        for thing, wide in (("dq", wide_q), ("dk", wide_k)):
            transfers += (Transfer(thing, "all_reduce", "ring", wide, text),)
    if mesh.size("ulysses") == 1:
        return transfers
    plain = "all_gather + all_to_all" if text else "all_to_all"
    if phase == "forward":
        return (*transfers, Transfer("state", plain, "ulysses", scheme.home_q))
    held = sum(len(shard.heads) for shard in wide_k.shards) * mesh.size("ulysses")
    copies = held > scheme.kv_heads * mesh.ranks
    summed = "all_reduce + reduce_scatter" if text else "reduce_scatter"
    return (
        *transfers,
        Transfer("dq", plain, "ulysses", scheme.home_q),
        Transfer("dk", summed if copies else plain, "ulysses", scheme.home_k),
    )


def with_joint_text(
    mesh: Mesh,
    steps: list[Step],
    wide_q: Sharding,
    wide_k: Sharding,
    phase: str,
    text: Tokens,
    text_at: str,
) -> list[Step]:
    """CP-5: return the steps of a ring that use text keys once, do not send them, and differentiate text rows once."""
    size = mesh.size("ring")
    once = 0 if text_at == "front" else size - 1
    rows = None
    if phase == "backward":
        rows = tuple(
            shard.tokens if mesh.coordinate(r, "ring") == 0 else others(shard, text)
            for r, shard in enumerate(wide_q.shards)
        )
    moving = tuple(sorted({token for shard in wide_k.shards for token in shard.real} - set(text)))
    joint, block = [], wide_k
    for t, step in enumerate(steps):
        keys = tuple(shard.tokens if t == once else others(shard, text) for shard in block.shards)
        transfers = tuple(replace(one, tokens=moving) for one in step.transfers)
        joint.append(Step(rows, keys, transfers))
        block = shifted(block, mesh, "ring", 1)
    return joint


def others(shard: Shard, text: Tokens) -> Tokens:
    """Return the tokens of a shard that are not text."""
    return tuple(token for token in shard.tokens if token not in text)
