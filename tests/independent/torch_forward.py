"""The ring of ``torch_ring.py``: who meets whom, what is visible, scores, and the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from independent.torch_ring import Ring

INFINITY = float("inf")
TILES = {"forward": 48, "backward": 24}

# Who meets whom, and what moves


def owner(ring: Ring, worker: int, step: int) -> int:
    """Whose block worker ``worker`` has as its guest at ring step ``step``."""
    return (worker - ring.direction * step) % ring.workers


def steps(ring: Ring, what: str) -> int:
    """Ring steps of the pass ``what``, 'forward' or 'backward'."""
    return ring.workers


def travel(ring: Ring, what: str, held: list[Any], step: int) -> list[Any]:
    """What each worker holds after the permute behind ``step``.

    ``what``: 'kv' (forward), 'kv back', 'dkv', 'q' (with dy, lse and delta), 'dq'.
    """
    if ring.circulation == "gather" and what.startswith("kv"):
        home = list(zip(ring.k, ring.v, strict=True))
        return [home[ring.do.owner(ring, r, step + 1)] for r in range(ring.workers)]
    return [held[(r - ring.direction) % ring.workers] for r in range(ring.workers)]


def skip(ring: Ring, a: int, b: int, seen: Tensor) -> bool:
    """Whether queries of worker a see no key of worker b, so that their block is not computed."""
    return not bool(seen.any())


# Which pairs are visible: queries of worker a, keys of worker b


def places(ring: Ring, a: int, b: int) -> tuple[Tensor, Tensor]:
    """Positions of rows [1|B, 1, n, 1] and of columns [1|B, 1, 1, n]."""
    return ring.position_q[a][:, None, :, None], ring.position_k[b][:, None, None, :]


def causal(ring: Ring, a: int, b: int) -> Tensor:
    rows, columns = ring.do.places(ring, a, b)
    return columns <= rows


def window(ring: Ring, a: int, b: int) -> Tensor:
    rows, columns = ring.do.places(ring, a, b)
    left, right = ring.window
    seen = torch.ones_like(columns - rows, dtype=torch.bool)
    if left is not None:
        seen = seen & (columns >= rows - left)
    if right is not None:
        seen = seen & (columns <= rows + right)
    return seen


def segments(ring: Ring, a: int, b: int) -> Tensor:
    rows, columns = ring.segments_q[a][:, None, :, None], ring.segments_k[b][:, None, None, :]
    return (rows == columns) & (rows >= 0)


def bounds(ring: Ring, a: int, b: int) -> Tensor:
    _, columns = ring.do.places(ring, a, b)
    low, high = ring.bound_min[a][:, None, :, None], ring.bound_max[a][:, None, :, None]
    return (low <= columns) & (columns < high)


def of_keys(ring: Ring, pairs: list[Tensor], a: int, b: int) -> Tensor:
    """The columns of worker b's keys in what worker a has for pairs."""
    own = pairs[a]
    return own if own.shape[-1] == 1 else own[..., ring.token_k[b].clamp(min=0)]


def visible(ring: Ring, a: int, b: int) -> Tensor:
    """Bool [1|B, 1|H, n, n]."""
    real_q, real_k = ring.token_q[a] >= 0, ring.token_k[b] >= 0
    seen = (real_q[:, None] & real_k[None, :])[None, None]
    if ring.causal:
        seen = seen & ring.do.causal(ring, a, b)
    if ring.window is not None:
        seen = seen & ring.do.window(ring, a, b)
    if ring.segments_q is not None:
        seen = seen & ring.do.segments(ring, a, b)
    if ring.bound_min is not None:
        seen = seen & ring.do.bounds(ring, a, b)
    if ring.mask is not None:
        seen = seen & ring.do.of_keys(ring, ring.mask, a, b)
    if ring.bias is not None:
        seen = seen & (ring.do.of_keys(ring, ring.bias, a, b) > -INFINITY)
    return seen


# Scores


def spread(ring: Ring, x: Tensor) -> Tensor:
    """Keys or values [B, Hkv, n, d] for each query head: head h reads h // G."""
    return x.repeat_interleave(ring.heads // ring.key_heads, dim=1)


def scaled(ring: Ring, what: str, x: Tensor) -> Tensor:
    """The factor of the scores ('s') and of the gradients 'dq' and 'dk'."""
    return x * ring.scale


def biased(ring: Ring, z: Tensor, a: int, b: int, tile: slice) -> Tensor:
    if ring.bias is None:
        return z
    bias = ring.do.of_keys(ring, ring.bias, a, b).to(ring.wide)
    return z + (bias if bias.shape[-1] == 1 else bias[..., tile])


def cap(ring: Ring, what: str, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """s, and t = tanh where there is a soft cap; ``what`` is the pass."""
    if ring.softcap is None:
        return z, None
    t = torch.tanh(z / ring.softcap)
    return t * ring.softcap, t


def tile_size(ring: Ring, what: str) -> int:
    """Keys that are read at a time in the pass ``what``."""
    return TILES[what]


def scores(
    ring: Ring, what: str, a: int, b: int, q: Tensor, k: Tensor, tile: slice, seen: Tensor
) -> tuple[Tensor, Tensor | None]:
    """s [B, H, n, tile] with -inf where nothing is seen; k is the tile's, for each query head."""
    z = ring.do.scaled(ring, "s", q @ k.transpose(-1, -2))
    s, t = ring.do.cap(ring, what, ring.do.biased(ring, z, a, b, tile))
    return s.masked_fill(~seen, -INFINITY), t


def factor(ring: Ring, a: int, b: int, what: str) -> Tensor | None:
    """keep / (1 - dropout_p) [1|B, 1|H, n, n] as the forward, dp or dv ('o', 'dp', 'dv') reads it."""
    if ring.keep is None:
        return None
    return ring.do.of_keys(ring, ring.keep, a, b).to(ring.wide) / (1.0 - ring.dropout_p)


def tiled(x: Tensor | None, tile: slice) -> Tensor | None:
    return x if x is None or x.shape[-1] == 1 else x[..., tile]


def operand(ring: Ring, what: str, x: Tensor) -> Tensor:
    """P ('p') or dZ ('ds') as a matrix unit reads it."""
    return x.to(ring.narrow).to(ring.wide)


# Forward: blocks, and their merge


def update(
    ring: Ring, state: tuple[Tensor, Tensor, Tensor], s: Tensor, keep: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(m, l, acc) after one more tile; m stays -inf while a row has seen nothing."""
    m, l, acc = state
    top = torch.maximum(m, s.amax(dim=-1))
    base = torch.where(top == -INFINITY, 0.0, top)
    p = torch.exp(s - base[..., None])
    shrink = torch.exp(m - base)
    used = p if keep is None else p * keep
    product = ring.do.operand(ring, "p", used) @ v
    return top, l * shrink + p.sum(dim=-1), acc * shrink[..., None] + product


def leave(ring: Ring, m: Tensor, l: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised (o, lse) with which a block is left."""
    some = l > 0
    o = torch.where(some[..., None], acc / torch.where(some, l, 1.0)[..., None], 0.0)
    return o, m + torch.log(l)


def block_forward(
    ring: Ring, a: int, b: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Queries of worker a against keys of worker b; None where nothing is seen."""
    seen = ring.do.visible(ring, a, b)
    if ring.do.skip(ring, a, b, seen):
        return None
    q, k, v = q.to(ring.wide), *(ring.do.spread(ring, x.to(ring.wide)) for x in (k, v))
    keep = ring.do.factor(ring, a, b, "o")
    state = (
        q.new_full(q.shape[:3], -INFINITY),
        q.new_zeros(q.shape[:3]),
        q.new_zeros(*q.shape[:3], v.shape[-1]),
    )
    size = ring.do.tile_size(ring, "forward")
    for start in range(0, k.shape[2], size):
        tile = slice(start, start + size)
        s, _ = ring.do.scores(ring, "forward", a, b, q, k[:, :, tile], tile, seen[..., tile])
        state = ring.do.update(ring, state, s, tiled(keep, tile), v[:, :, tile])
    return ring.do.leave(ring, *state)


def merge(
    ring: Ring, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Two normalised partial results of the same rows."""
    lse = torch.logaddexp(one[1], other[1])
    total = torch.zeros_like(one[0])
    for o, part in (one, other):
        weight = torch.where(part == -INFINITY, 0.0, torch.exp(part - lse))[..., None]
        total = total + torch.where(weight > 0, o * weight, 0.0)
    return total, lse


def merge_all(ring: Ring, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Neighbours first, then neighbours of what came of them: a tree over the ring steps."""
    while len(found) > 1:
        pairs = [found[i : i + 2] for i in range(0, len(found), 2)]
        found = [ring.do.merge(ring, *pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return found[0]


def add_sinks(ring: Ring, worker: int, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Sinks enlarge the denominator of a row, once."""
    if ring.sinks is None:
        return o, lse
    sink = torch.logsumexp(ring.sinks[worker].to(ring.wide), dim=-1)[None, :, None]
    whole = torch.logaddexp(lse, sink.expand_as(lse))
    return o * torch.exp(lse - whole)[..., None], whole


def finish(ring: Ring, worker: int, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Results as they leave the ring."""
    return o.to(ring.out), lse.to(ring.statistics)


def forward(ring: Ring) -> tuple[list[Tensor], list[Tensor]]:
    """o and lse of each worker."""
    held: list[Any] = list(zip(ring.k, ring.v, strict=True))
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(ring.workers)]
    for step in range(ring.do.steps(ring, "forward")):
        for r in range(ring.workers):
            part = ring.do.block_forward(ring, r, ring.do.owner(ring, r, step), ring.q[r], *held[r])
            if part is not None:
                found[r].append(part)
        held = ring.do.travel(ring, "kv", held, step)
    results = []
    for r, q in enumerate(ring.q):
        nothing = (
            torch.zeros(*q.shape[:3], ring.v[r].shape[-1], dtype=ring.wide),
            torch.full(q.shape[:3], -INFINITY, dtype=ring.wide),
        )
        o, lse = ring.do.merge_all(ring, found[r] or [nothing])
        results.append(ring.do.finish(ring, r, *ring.do.add_sinks(ring, r, o, lse)))
    return [o for o, _ in results], [lse for _, lse in results]
