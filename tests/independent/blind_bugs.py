"""Twelve bugs of the ring of ``torch_ring.py``, invented without sight of any list of bugs.

Their author knew the ring and its problems, and none of ringspec's checks, vectors, mutants or other
bugs: they measure what the checks see of errors that nobody wrote them for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from independent import torch_backward, torch_forward
from independent.catalogue import Bug, Part
from independent.torch_forward import INFINITY
from torch import Tensor

if TYPE_CHECKING:
    from independent.target import Independent
    from independent.torch_ring import Ring

BLIND: dict[str, Bug] = {}
FORMATS = ("bfloat16", "float32")
# The cubic through 2**x at the four Chebyshev nodes of [0, 1].
CUBIC = (0.99990029, 0.69632477, 0.22469316, 0.07896726)


def blind(part: str, what: str, shown_by: str, **more: Part) -> Callable[[Part], Part]:
    """The function takes the place of ``part``, and its name is the bug's; ``more``: other parts."""

    def enter(function: Part) -> Part:
        name = function.__name__
        assert name not in BLIND and part not in more
        BLIND[name] = Bug(name, what, shown_by, parts={part: function, **more})
        return function

    return enter


def blind_target(name: str, formats: tuple[str, ...] = FORMATS) -> Independent:
    """The target of ``target.py`` with the bug ``name``, for ``formats``; the first gives the recipe."""
    from independent.target import independent

    target, bug = independent(formats=formats), BLIND[name]
    target.parts, target.notes = bug.parts, (bug.what,)
    target.name = f"{target.name} with {name}"
    return target


# Forward


def tiles_of_8(ring: Ring, what: str) -> int:
    return 8


@blind(
    "update",
    "a small rise of the row maximum leaves the reference of p and acc alone, but still shrinks l",
    "causal",
    tile_size=tiles_of_8,
)
def lazy_rescale_shrinks_l(
    ring: Ring, state: tuple[Tensor, Tensor, Tensor], s: Tensor, keep: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    m, l, acc = state
    top = torch.maximum(m, s.amax(dim=-1))
    small = (m > -INFINITY) & (top - m <= 5.5)
    reference = torch.where(small, m, top)
    base = torch.where(reference == -INFINITY, 0.0, reference)
    p = torch.exp(s - base[..., None])
    used = p if keep is None else p * keep
    product = ring.do.operand(ring, "p", used) @ v
    l = l * torch.exp(m - torch.where(top == -INFINITY, 0.0, top)) + p.sum(dim=-1)
    return reference, l, acc * torch.exp(m - base)[..., None] + product


def cubic_exp2(x: Tensor) -> Tensor:
    """2**x with a relative error of at most 1.0e-4 for x in [0, 1], of 0.10 for x in [-1, 0]."""
    c0, c1, c2, c3 = CUBIC
    return c0 + x * (c1 + x * (c2 + x * c3))


@blind(
    "update",
    "exp of every fourth key is 2**whole times a cubic made for fractions in [0, 1), but the fraction "
    "is cut towards zero and so is in (-1, 0]",
    "causal",
)
def exp2_fraction_truncated(
    ring: Ring, state: tuple[Tensor, Tensor, Tensor], s: Tensor, keep: Tensor | None, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    m, l, acc = state
    top = torch.maximum(m, s.amax(dim=-1))
    base = torch.where(top == -INFINITY, 0.0, top)
    p = torch.exp(s - base[..., None])
    x = ((s - base[..., None]) * 1.4426950408889634)[..., ::4].clamp(min=-120.0)
    emulated = torch.exp2(x.trunc()) * cubic_exp2(x - x.trunc())
    p[..., ::4] = torch.where(p[..., ::4] > 0, emulated, 0.0)
    shrink = torch.exp(m - base)
    used = p if keep is None else p * keep
    product = ring.do.operand(ring, "p", used) @ v
    return top, l * shrink + p.sum(dim=-1), acc * shrink[..., None] + product


@blind(
    "skip",
    "under a causal mask another worker's block is skipped where the last row lies before its first "
    "key, as if slots were in the order of their positions",
    "table",
)
def skip_by_last_slot(ring: Ring, a: int, b: int, seen: Tensor) -> bool:
    rows, keys = (
        position[worker][:, token[worker] >= 0]
        for position, token, worker in (
            (ring.position_q, ring.token_q, a),
            (ring.position_k, ring.token_k, b),
        )
    )
    before = rows.numel() > 0 and keys.numel() > 0 and bool((rows[:, -1] < keys[:, 0]).all())
    return (ring.causal and a != b and before) or not bool(seen.any())


@blind(
    "merge",
    "log(1 + x) is taken as x where the smaller partial result has less than 0.3 of the larger one's "
    "weight",
    "zigzag",
)
def first_order_log1p(
    ring: Ring, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    high, low = torch.maximum(one[1], other[1]), torch.minimum(one[1], other[1])
    x = torch.where(low == -INFINITY, 0.0, torch.exp(low - high))
    lse = high + torch.where(x < 0.3, x, torch.log1p(x))
    weights = [torch.where(y == -INFINITY, 0.0, torch.exp(y - lse)) for _, y in (one, other)]
    return one[0] * weights[0][..., None] + other[0] * weights[1][..., None], lse


@blind(
    "block_forward",
    "the last worker reads the first worker's values one head too far, and those of head 0 for the "
    "last head",
    "causal",
)
def last_worker_next_value_head(
    ring: Ring, a: int, b: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    if a == ring.workers - 1 and b == 0 and a != b:
        v = v.roll(-1, dims=1)
    return torch_forward.block_forward(ring, a, b, q, k, v)


def tiles_of_12(ring: Ring, what: str) -> int:
    return 12


@blind(
    "block_forward",
    "the load of a last tile of fewer keys starts early enough to be a whole one, for values alone, "
    "and its first rows are used",
    "causal",
    tile_size=tiles_of_12,
)
def short_tile_reads_early_values(
    ring: Ring, a: int, b: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor] | None:
    n, size = v.shape[2], tiles_of_12(ring, "forward")
    rest = n % size
    if n > size and rest:
        v = torch.cat([v[:, :, : n - rest], v[:, :, n - size : n - size + rest]], dim=2)
    return torch_forward.block_forward(ring, a, b, q, k, v)


# Backward


@blind(
    "saved",
    "the lse that the backward reads is no less than 0, so that p is too small in rows of few keys",
    "causal",
)
def saved_lse_floored_at_zero(ring: Ring, worker: int, lse: Tensor) -> Tensor:
    return torch_backward.saved(ring, worker, lse).clamp(min=0.0)


@blind(
    "travel",
    "dv is read from the first of its two receive buffers at the end, which is the last one written "
    "for even numbers of workers alone",
    "striped",
)
def dv_from_first_buffer(ring: Ring, what: str, held: list[Any], step: int) -> list[Any]:
    moved = torch_forward.travel(ring, what, held, step)
    if what == "dkv" and step == ring.workers - 1 and ring.workers % 2 == 1:
        return [(dk, dv) for (dk, _), (_, dv) in zip(moved, held, strict=True)]
    return moved


@blind(
    "block_backward",
    "the share of dq from a worker's own keys is scaled where it is computed and once more",
    "causal",
)
def own_dq_scaled_twice(
    ring: Ring, a: int, b: int, own: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor
) -> torch_backward.Share | None:
    share = torch_backward.block_backward(ring, a, b, own, k, v)
    if share is None or a != b:
        return share
    return dataclasses.replace(share, dq=share.dq * ring.scale)


@blind(
    "turned",
    "in tiles of 16 keys or more the transposed dZ has keys 8 to 11 and 12 to 15 in each other's place",
    "causal",
)
def dz_quads_exchanged(ring: Ring, what: str, x: Tensor) -> Tensor:
    x = x.transpose(-1, -2)
    if what != "ds" or x.shape[2] < 16:
        return x
    return torch.cat([x[:, :, :8], x[:, :, 12:16], x[:, :, 8:12], x[:, :, 16:]], dim=2)


@blind(
    "block_backward",
    "worker 0 sends dk and dv home from the last step before its own share is in them",
    "striped",
)
def worker_zero_sends_early(
    ring: Ring, a: int, b: int, own: tuple[Tensor, Tensor, Tensor, Tensor], k: Tensor, v: Tensor
) -> torch_backward.Share | None:
    share = torch_backward.block_backward(ring, a, b, own, k, v)
    last = ring.do.owner(ring, 0, ring.workers - 1)
    if share is None or ring.circulation == "q" or a != 0 or b != last or b == 0:
        return share
    return dataclasses.replace(share, dk=torch.zeros_like(share.dk), dv=torch.zeros_like(share.dv))


def saved_and_noted(ring: Ring, worker: int, lse: Tensor) -> Tensor:
    ring.in_backward = True  # type: ignore[attr-defined]
    return torch_backward.saved(ring, worker, lse)


@blind(
    "visible",
    "a worker keeps the forward's mask of each step for the backward, where in the Q ring the guests "
    "are queries and not keys",
    "q-ring",
    saved=saved_and_noted,
)
def q_ring_keeps_forward_masks(ring: Ring, a: int, b: int) -> Tensor:
    # In the backward worker b has the queries of a; in the forward's step it had the keys of a.
    if ring.circulation == "q" and getattr(ring, "in_backward", False):
        a, b = b, a
    return torch_forward.visible(ring, a, b)
