"""The ring of ``torch_ring.py``: the backward pass, by hand.

In the KV ring keys, values and their gradients travel, and dq stays; in the Q ring queries, dy, lse,
delta and dq travel. The accumulators make one hop more than their blocks, and so end at home.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from independent.torch_forward import INFINITY, tiled
from torch import Tensor

if TYPE_CHECKING:
    from independent.torch_ring import Ring


@dataclass
class Share:
    """What one block gives: dq [B, H, n, D], dk, dv [B, Hkv, n, d], dz [B, H, n, n]."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dz: Tensor


def saved(ring: Ring, worker: int, lse: Tensor) -> Tensor:
    """The lse that the backward reads: inf in rows that see nothing, so that every p is exp(-inf)."""
    return torch.where(lse == -INFINITY, INFINITY, lse.to(ring.wide))


def delta(ring: Ring, worker: int, dy: Tensor, o: Tensor, dlse: Tensor | None) -> Tensor:
    """dy_o_sum, less dlse where there is one [B, H, n]; 0 in padding slots."""
    whole = (dy.to(ring.wide) * o.to(ring.wide)).sum(dim=-1)
    if dlse is not None:
        whole = whole - dlse.to(ring.wide)
    return torch.where(ring.token_q[worker] >= 0, whole, 0.0)


def block_operands(ring: Ring, worker: int, own: tuple, guest: tuple) -> tuple:
    """What a block is computed with: what the worker keeps, and what came by the ring."""
    return own, guest


def probabilities(ring: Ring, s: Tensor, lse: Tensor) -> Tensor:
    """P of the whole row, from the lse of the whole row."""
    return torch.exp(s - lse[..., None])


def ds_of(ring: Ring, p: Tensor, dp: Tensor, delta: Tensor, keep: Tensor | None) -> Tensor:
    """dS from p and dp = <dy, v>, to which the keep mask is applied here."""
    return p * ((dp if keep is None else dp * keep) - delta[..., None])


def through_cap(ring: Ring, ds: Tensor, s: Tensor, t: Tensor | None) -> Tensor:
    """dZ: dS times the derivative of the soft cap."""
    return ds if t is None else ds * (1.0 - t * t)


def gather_heads(ring: Ring, x: Tensor) -> Tensor:
    """Gradients of keys or values: the sum over the query heads of each group."""
    batch, _, *rest = x.shape
    return x.reshape(batch, ring.key_heads, -1, *rest).sum(dim=2)


def turned(ring: Ring, what: str, x: Tensor) -> Tensor:
    """P or dZ, transposed for its product with dy or q."""
    return x.transpose(-1, -2)


def block_backward(
    ring: Ring, a: int, b: int, own: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor
) -> Share | None:
    """The share of the gradients from queries of worker a (q, dy, lse, delta) and keys of worker b."""
    seen = ring.do.visible(ring, a, b)
    if ring.do.skip(ring, a, b, seen):
        return None
    q, dy, lse, whole = (x.to(ring.wide) for x in own)
    k, v = (ring.do.spread(ring, x.to(ring.wide)) for x in (k, v))
    keep_dp, keep_dv = (ring.do.factor(ring, a, b, what) for what in ("dp", "dv"))
    dq, dk, dv, dz = torch.zeros_like(q), [], [], []
    size = ring.do.tile_size(ring, "backward")
    for start in range(0, k.shape[2], size):
        tile = slice(start, start + size)
        keys, values, see = k[:, :, tile], v[:, :, tile], seen[..., tile]
        s, t = ring.do.scores(ring, "backward", a, b, q, keys, tile, see)
        p = ring.do.probabilities(ring, s, lse).masked_fill(~see, 0.0)
        ds = ring.do.ds_of(ring, p, dy @ values.transpose(-1, -2), whole, tiled(keep_dp, tile))
        dz.append(ring.do.through_cap(ring, ds, s, t).masked_fill(~see, 0.0))
        dz_operand = ring.do.operand(ring, "ds", dz[-1])
        used = p if keep_dv is None else p * tiled(keep_dv, tile)
        dq += dz_operand @ keys
        dk.append(ring.do.turned(ring, "ds", dz_operand) @ q)
        dv.append(ring.do.turned(ring, "p", ring.do.operand(ring, "p", used)) @ dy)
    return Share(
        ring.do.scaled(ring, "dq", dq),
        ring.do.scaled(ring, "dk", ring.do.gather_heads(ring, torch.cat(dk, dim=2))),
        ring.do.gather_heads(ring, torch.cat(dv, dim=2)),
        torch.cat(dz, dim=3),
    )


def add(ring: Ring, what: str, worker: int, total: Tensor, share: Tensor) -> Tensor:
    """An accumulator ('dq', 'dk', 'dv') on ``worker``, with one more share."""
    return total + share


def add_dbias(ring: Ring, a: int, b: int, total: Tensor, dz: Tensor) -> Tensor:
    """dz of one block, put under the tokens of its keys: ``total`` is [B, H, n, S]."""
    real = ring.token_k[b] >= 0
    return total.index_add(3, ring.token_k[b][real], dz[..., real])


def broadcast_sum(ring: Ring, x: Tensor, shape: torch.Size) -> Tensor:
    """Summed over the axes along which the bias was one."""
    axes = [axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1]
    return x.sum(dim=axes, keepdim=True) if axes else x


def sink_gradient(ring: Ring, worker: int, lse: Tensor, whole: Tensor) -> Tensor:
    """dsinks [H, N] from the worker's own rows; ``lse`` and ``whole`` (delta) [B, H, n]."""
    real = (ring.token_q[worker] >= 0)[:, None]
    p = torch.exp(ring.sinks[worker].to(ring.wide)[None, :, None, :] - lse[..., None])
    return (p * -whole[..., None]).masked_fill(~real, 0.0).sum(dim=(0, 2))


def backward(
    ring: Ring,
    dy: list[Tensor],
    dlse: list[Tensor] | None,
    o: list[Tensor],
    lse: list[Tensor],
    whole: list[Tensor] | None = None,
) -> dict[str, list[Tensor]]:
    """dq, dk, dv of each worker as results; dbias, dsinks in the type of accumulators.

    ``whole``: delta, where it is given and o is not.
    """
    dlses = dlse or [None] * ring.workers
    own = []
    for r in range(ring.workers):
        d = ring.do.delta(ring, r, dy[r], o[r], dlses[r]) if whole is None else whole[r]
        own.append((ring.q[r], dy[r], ring.do.saved(ring, r, lse[r]), d))
    pairs = [q.new_zeros(*q.shape[:3], ring.tokens, dtype=ring.wide) for q in ring.q]
    circulate = backward_q if ring.circulation == "q" else backward_kv
    found = circulate(ring, own, pairs if ring.bias is not None else [])
    for name, gradients in found.items():
        found[name] = [ring.do.gradient(ring, name, r, x) for r, x in enumerate(gradients)]
    found["dbias"] = [
        ring.do.broadcast_sum(ring, x, bias.shape)
        for x, bias in zip(pairs, ring.bias or (), strict=False)
    ]
    found["dsinks"] = [
        ring.do.sink_gradient(ring, r, own[r][2], own[r][3]) for r in range(len(ring.sinks or ()))
    ]
    return found


def gradient(ring: Ring, what: str, worker: int, x: Tensor) -> Tensor:
    """'dq', 'dk' or 'dv' of a worker as it leaves the ring."""
    return x.to(ring.out)


def zeros(ring: Ring, like: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(x, dtype=ring.wide) for x in like]


def backward_kv(ring: Ring, own: list[tuple], pairs: list[Tensor]) -> dict[str, list[Tensor]]:
    """Keys, values, dk and dv travel. ``pairs``: accumulators of dbias, written in place."""
    blocks: list[Any] = list(zip(ring.k, ring.v, strict=True))
    carried: list[Any] = list(zip(zeros(ring, ring.k), zeros(ring, ring.v), strict=True))
    dq = zeros(ring, ring.q)
    for step in range(ring.do.steps(ring, "backward")):
        for r in range(ring.workers):
            b = ring.do.owner(ring, r, step)
            rows, block = ring.do.block_operands(ring, r, own[r], blocks[r])
            share = ring.do.block_backward(ring, r, b, rows, *block)
            if share is None:
                continue
            dq[r] = ring.do.add(ring, "dq", r, dq[r], share.dq)
            dk, dv = carried[r]
            carried[r] = (
                ring.do.add(ring, "dk", r, dk, share.dk),
                ring.do.add(ring, "dv", r, dv, share.dv),
            )
            if pairs:
                pairs[r] = ring.do.add_dbias(ring, r, b, pairs[r], share.dz)
        blocks = ring.do.travel(ring, "kv back", blocks, step)
        carried = ring.do.travel(ring, "dkv", carried, step)
    return {"dq": dq, "dk": [dk for dk, _ in carried], "dv": [dv for _, dv in carried]}


def backward_q(ring: Ring, own: list[tuple], pairs: list[Tensor]) -> dict[str, list[Tensor]]:
    """Queries, dy, lse, delta and dq travel; dk and dv stay."""
    guests, carried = list(own), zeros(ring, ring.q)
    dk, dv = zeros(ring, ring.k), zeros(ring, ring.v)
    for step in range(ring.do.steps(ring, "backward")):
        for r in range(ring.workers):
            a = ring.do.owner(ring, r, step)
            block, rows = ring.do.block_operands(ring, r, (ring.k[r], ring.v[r]), guests[r])
            share = ring.do.block_backward(ring, a, r, rows, *block)
            if share is None:
                continue
            carried[r] = ring.do.add(ring, "dq", r, carried[r], share.dq)
            dk[r] = ring.do.add(ring, "dk", r, dk[r], share.dk)
            dv[r] = ring.do.add(ring, "dv", r, dv[r], share.dv)
            if pairs:
                pairs[a] = ring.do.add_dbias(ring, a, r, pairs[a], share.dz)
        guests = ring.do.travel(ring, "q", guests, step)
        carried = ring.do.travel(ring, "dq", carried, step)
    return {"dq": carried, "dk": dk, "dv": dv}
