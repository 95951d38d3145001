"""Results of a program of context parallelism, right or with one change, from the dense matrices of :mod:`.scheme_world`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.diagnose.scheme_world import Answer, Block, Floats, Partial, World

Merge = Callable[[list[Partial]], Partial]
Weights = Callable[[int], Floats]


def partial(world: World, block: Block, scale: float) -> Partial:
    """Return o and lse of all rows over one block; 0 and -inf where nothing is visible."""
    heads = list(block.key_head)
    s = products(world, heads, scale)
    counts = np.broadcast_to(block.counts, s.shape)
    top = np.where(counts > 0, s, -np.inf).max(axis=3, initial=-np.inf)
    base = np.where(np.isfinite(top), top, 0.0)
    w = counts * np.exp(np.where(counts > 0, s - base[..., None], 0.0))
    total = w.sum(axis=3)
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    kept = w if world.factor is None else w * world.factor
    return kept @ world.v[:, heads] / np.where(total > 0, total, 1.0)[..., None], lse


def products(world: World, heads: Sequence[int], scale: float) -> Floats:
    """Return the scores [B, H, Sq, K] before masks."""
    s = world.q @ world.k[:, list(heads)].swapaxes(2, 3) * scale
    return s if world.bias is None else s + world.bias


def with_sinks(world: World, part: Partial) -> Partial:
    """Return o and lse with the sinks in the denominator."""
    if world.sinks is None:
        return part
    o, lse = part
    together = np.logaddexp(lse, np.logaddexp.reduce(world.sinks, axis=1)[None, :, None])
    return o * np.exp(lse - together)[..., None], together


def merged(parts: list[Partial], base: float = 1.0) -> Partial:
    """Merge partial results; with ``base``, by exp(base * lse) in place of exp(lse)."""
    lse = np.stack([one for _, one in parts]) * base
    together = np.logaddexp.reduce(lse)
    finite = np.where(np.isfinite(together), together, 0.0)
    weights = np.exp(lse - finite)
    o = sum(w[..., None] * one for w, (one, _) in zip(weights, parts, strict=True))
    return np.asarray(o), together / base


@dataclass(frozen=True)
class Change:
    """What a program does otherwise; a field that is left out is as in a correct program.

    ``blocks``: the blocks of each rank. ``take``: a function of the rank that holds dk and dv, which returns how often
    each (head, query, key) counts in them. ``own_lse``: the backward pass uses o and lse of the block. ``local_keys``: it
    uses the rank's own keys in place of each visitor. ``home_k``: the rank whose dk and dv a rank returns.
    """

    blocks: Sequence[Sequence[Block]] | None = None
    merge: Merge = merged
    scale: float | None = None
    take: Weights | None = None
    own_lse: bool = False
    local_keys: bool = False
    home_k: Callable[[int], int] | None = None


def answer(world: World, change: Change) -> Answer:
    """Return the results of all ranks."""
    scale = world.scale if change.scale is None else change.scale
    blocks = world.all_blocks if change.blocks is None else change.blocks
    parts = [[partial(world, block, scale) for block in own] for own in blocks]
    results = [with_sinks(world, change.merge(own)) for own in parts]
    found = {
        "o": world.cut("o", [o for o, _ in results]),
        "lse": world.cut("lse", [lse for _, lse in results]),
    }
    if world.dy is not None:
        found |= gradients(world, change, blocks, parts, results, scale)
    return found


def gradients(
    world: World,
    change: Change,
    blocks: Sequence[Sequence[Block]],
    parts: Sequence[Sequence[Partial]],
    results: Sequence[Partial],
    scale: float,
) -> Answer:
    """Return dq, dk and dv of all ranks, each row differentiated on the rank that owns it."""
    assert world.dy is not None
    shape = (*world.q.shape[:3], world.k.shape[2])
    p_all, ds_all = np.zeros(shape), np.zeros(shape)
    dq = np.zeros_like(world.q)
    heads = list(blocks[0][0].key_head)
    for rank in sorted(set(world.owner.tolist())):
        rows = np.flatnonzero(world.owner == rank)
        for number, met in enumerate(blocks[rank]):
            block = local(rank, blocks[rank], met) if change.local_keys else met
            o, lse = parts[rank][number] if change.own_lse else results[rank]
            p, ds = scores(world, block, o, lse, scale)
            dq[:, :, rows] += (ds @ world.k[:, heads])[:, :, rows]
            if (
                change.local_keys and block is not met
            ):  # gradients of own keys, in the visitor's slots
                p, ds = (moved(x, block.columns, met.columns) for x in (p, ds))
            p_all[:, :, rows] += p[:, :, rows]
            ds_all[:, :, rows] += ds[:, :, rows]
    found = {"dq": world.cut("dq", [dq] * len(world.ranks)), "dk": [], "dv": []}
    for name, x, y in (("dk", ds_all, world.q), ("dv", p_all, world.dy)):
        wholes = []
        for rank in world.ranks:
            weighted = x if change.take is None else x * change.take(rank)
            wholes.append(by_key_head(weighted.swapaxes(2, 3) @ y, heads, world.kv_heads))
        homes = [rank if change.home_k is None else change.home_k(rank) for rank in world.ranks]
        every = [world.cut(name, [whole] * len(world.ranks)) for whole in wholes]
        found[name] = [every[rank][home] for rank, home in zip(world.ranks, homes, strict=True)]
    return found


def scores(
    world: World, block: Block, o: Floats, lse: Floats, scale: float
) -> tuple[Floats, Floats]:
    """Return P after dropout, and the gradient of q k^T, of all rows over one block."""
    assert world.dy is not None
    heads = list(block.key_head)
    s = products(world, heads, scale)
    counts = np.broadcast_to(block.counts, s.shape) * np.isfinite(lse)[..., None]
    least = np.where(np.isfinite(lse), lse, 0.0)[..., None]
    p = counts * np.exp(np.where(counts > 0, np.minimum(s - least, 700.0), 0.0))
    delta = (world.dy * o).sum(axis=3, keepdims=True)
    if world.dlse is not None:
        delta = delta - world.dlse[..., None]
    factor = 1.0 if world.factor is None else world.factor
    dp = world.dy @ world.v[:, heads].swapaxes(2, 3) * factor
    return p * factor, p * (dp - delta) * scale


def local(rank: int, own: Sequence[Block], met: Block) -> Block:
    """Return a rank's own block in place of a visitor; a block of text stays."""
    return met if met.owner < 0 else next(one for one in own if one.owner == rank)


def moved(x: Floats, source: Floats, target: Floats) -> Floats:
    """Return x with the columns ``source`` moved to ``target``."""
    y = np.zeros_like(x)
    y[..., target] = x[..., source]
    return y


def by_key_head(x: Floats, heads: Sequence[int], kv_heads: int) -> Floats:
    """Add what the query heads [B, H, ...] contribute to each key head."""
    found = np.zeros((x.shape[0], kv_heads, *x.shape[2:]))
    for head, key_head in enumerate(heads):
        found[:, key_head] += x[:, head]
    return found
