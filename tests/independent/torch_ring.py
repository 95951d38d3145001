"""Ring attention in PyTorch, forward and backward, that shares nothing with ringspec.

W workers live in one process: what worker r holds is entry r of a list, and what it sends is an entry
that moves (``travel``). Each decision that an author can get wrong is a small function of
``torch_forward.py`` or ``torch_backward.py``, called by its name in ``ring.do``; a ring may be given
others in their place, and ``bugs.py`` does.

Arithmetic: operands of the matrix products in the type of q, products and everything else in float32
(in float64 for float64 inputs). A block of keys is read in tiles, online, and leaves as normalised
(o, lse); the blocks of a row are merged at the end, as a tree.

Formulas: Dao, FlashAttention-2 (https://arxiv.org/abs/2307.08691); Liu, Zaharia and Abbeel, Ring
Attention with Blockwise Transformers (https://arxiv.org/abs/2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from independent import torch_backward, torch_forward
from torch import Tensor

# The functions that a ring can be given another one for.
PARTS: dict[str, Callable[..., Any]] = {
    name: part
    for module in (torch_forward, torch_backward)
    for name, part in vars(module).items()
    if callable(part) and getattr(part, "__module__", "") == module.__name__ and name[0].islower()
}


@dataclass
class Ring:
    """What the workers are given; a list has one entry for each.

    q [B, H, n, D], k [B, Hkv, n, D], v [B, Hkv, n, Dv]; ``token_q``, ``token_k`` [n]: token of each
    slot, -1 for padding; ``position_q``, ``position_k``, ``segments_q``, ``segments_k``, ``bound_min``,
    ``bound_max`` [1|B, n]; ``bias``, ``mask``, ``keep`` [1|B, 1|H, n|1, S|1]: own rows, keys by token;
    ``sinks`` [H, N]; ``tokens``: S. ``out``: type of o and the gradients; ``statistics``: of lse and
    dsinks. ``parts`` replaces functions of ``PARTS``.
    """

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    token_q: list[Tensor]
    token_k: list[Tensor]
    position_q: list[Tensor]
    position_k: list[Tensor]
    tokens: int
    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    segments_q: list[Tensor] | None = None
    segments_k: list[Tensor] | None = None
    bound_min: list[Tensor] | None = None
    bound_max: list[Tensor] | None = None
    bias: list[Tensor] | None = None
    mask: list[Tensor] | None = None
    keep: list[Tensor] | None = None
    sinks: list[Tensor] | None = None
    circulation: str = "kv"
    direction: int = 1
    out: torch.dtype = torch.float32
    statistics: torch.dtype = torch.float32
    parts: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert set(self.parts) <= set(PARTS)
        self.do = SimpleNamespace(**{**PARTS, **self.parts})
        self.workers = len(self.q)
        self.narrow = self.q[0].dtype
        self.wide = torch.float64 if self.narrow == torch.float64 else torch.float32
        self.heads, self.key_heads = self.q[0].shape[1], self.k[0].shape[1]


class RingAttention(torch.autograd.Function):
    """``apply(ring, *inputs_of(ring))`` gives o of each worker, then lse of each worker."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, *inputs: Tensor) -> tuple[Tensor, ...]:
        o, lse = torch_forward.forward(ring)
        ctx.ring = ring
        ctx.save_for_backward(*o, *lse)
        return (*o, *lse)

    @staticmethod
    def backward(ctx: Any, *seeds: Tensor) -> Any:
        ring, saved, workers = ctx.ring, ctx.saved_tensors, ctx.ring.workers
        o, lse = list(saved[:workers]), list(saved[workers:])
        found = torch_backward.backward(ring, list(seeds[:workers]), list(seeds[workers:]), o, lse)
        gradients = [x for name in ("dq", "dk", "dv", "dbias", "dsinks") for x in found[name]]
        return (None, *(g.to(x.dtype) for g, x in zip(gradients, inputs_of(ring), strict=True)))


def inputs_of(ring: Ring) -> list[Tensor]:
    """What a ring is differentiated by: q, k, v, bias and sinks of each worker."""
    return [*ring.q, *ring.k, *ring.v, *(ring.bias or ()), *(ring.sinks or ())]


def attention(ring: Ring) -> tuple[list[Tensor], list[Tensor]]:
    """o and lse of each worker, which autograd can differentiate."""
    found = RingAttention.apply(ring, *inputs_of(ring))
    return list(found[: ring.workers]), list(found[ring.workers :])
