"""The tokens of a conformance call in an order in which every mask that the kernels know is a range of keys.

A query sees a range of local keys if the keys of each worker are sorted by segment and token. Layouts keep the tokens
of a worker in this order as a rule; otherwise its rows are sorted for the call, and the results sorted back. Padding
comes last. A call is a ``ringspec.conformance.target.protocol.Call``; this module only reads its attributes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.packing import both, bounds_by_position, document_ranges, position_ranges

__all__ = ["Orders", "bounds_of", "orders_of", "sorted_call", "taken"]

Array = NDArray[Any]
SPAN = 2**32
"""More than the number of tokens: a place is segment * SPAN + token."""
HIDDEN = 2**62
"""The place of the first slot that sees nothing and is not seen: padding, and tokens in no segment or document."""
OF_KEYS = ("k", "v", "segments_k")
NUMBERS = ("segments_q", "segments_k", "bound_min", "bound_max")
"""Tensors [1 or B, n]; in the others the slots are along axis 2."""


@dataclasses.dataclass(frozen=True)
class Orders:
    """For each worker the order of its slots, [1 or B, n], of the queries and of the keys."""

    q: list[Array]
    k: list[Array]


def places(call: Any, side: str) -> Array:
    """Return the place of each slot, [W, 1 or B, n], of the queries (``side`` "q") or the keys ("k")."""
    token = getattr(call, f"index_{side}")[:, None, :]
    segment = np.zeros_like(token)
    if "segments_q" in call.tensors:
        names = ("segments_q",) if side == "q" else ("segments_k", "segments_q")
        name = next(name for name in names if name in call.tensors)
        segment = np.stack(call.tensors[name]).astype(np.int64)
    hidden = (token < 0) | (segment < 0)
    if "cu_seqlens" in call.terms:
        edges = call.terms["cu_seqlens"]
        if side == "k":
            edges = call.terms.get("cu_seqlens_k", edges)
        hidden = hidden | (token < edges[0]) | (token >= edges[-1])
    slots = np.arange(token.shape[-1])
    return np.where(hidden, HIDDEN + slots, segment * SPAN + token)


def orders_of(call: Any) -> Orders:
    """Return the orders in which the places ascend."""
    return Orders(*(list(np.argsort(places(call, side), axis=-1)) for side in ("q", "k")))


def taken(x: Array, order: Array, axis: int) -> Array:
    """Return x with its slots, which are along ``axis``, in the order [1 or B, n] of each batch entry."""
    if len(order) == 1:
        return np.take(x, order[0], axis)
    entries = np.broadcast_to(x, (len(order), *x.shape[1:]))
    pairs = zip(entries, order, strict=True)
    return np.stack([np.take(entry, slots, axis - 1) for entry, slots in pairs])


def sorted_call(call: Any, orders: Orders) -> Any:
    """Return the call with the slots of each worker in these orders, and 0 in hidden slots.

    Bounds hide these slots, but a hidden value is multiplied by 0, which gives NaN if it is not finite.
    """
    hidden = {side: places(call, side) >= HIDDEN for side in ("q", "k")}
    tensors = {}
    for name, arrays in call.tensors.items():
        side = "k" if name in OF_KEYS else "q"
        axis = 1 if name in NUMBERS else 2
        tensors[name] = tuple(
            taken(zeroed(x, of_worker, axis), order, axis)
            for x, of_worker, order in zip(arrays, hidden[side], getattr(orders, side), strict=True)
        )
    return dataclasses.replace(call, tensors=tensors)


def zeroed(x: Array, hidden: Array, axis: int) -> Array:
    """Return x with 0 in the hidden slots, [1 or B, n], which are along ``axis``."""
    if not hidden.any():
        return x
    aligned = hidden.reshape(len(hidden), *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1))
    return np.where(aligned, np.zeros((), x.dtype), x)


def bounds_of(call: Any, orders: Orders, rank: int) -> tuple[Array, Array]:
    """Return the bounds [W, B, n, 1] of the sorted rows of one rank for the sorted keys of every rank."""
    terms, batch = call.terms, call.worker("q", rank).shape[0]
    window = terms.get("window") or (None, None)
    ranges = position_ranges(call.position_q[rank], bool(terms.get("causal", False)), window)
    if "cu_seqlens" in terms:
        edges = terms["cu_seqlens"], terms.get("cu_seqlens_k")
        ranges = both(ranges, document_ranges(call.index_q[rank], *edges))
    if "bound_min" in call.tensors:
        ranges = both(ranges, (call.worker("bound_min", rank), call.worker("bound_max", rank)))
    first, last = ranges
    place = places(call, "q")[rank]
    segment = place // SPAN * SPAN
    first, last = segment + np.clip(first, 0, SPAN), segment + np.clip(last, 0, SPAN)
    last = np.where(place >= HIDDEN, first, last)
    shape = (batch, place.shape[-1])
    order = np.broadcast_to(orders.q[rank], shape)
    low, high = (np.take_along_axis(np.broadcast_to(x, shape), order, 1) for x in (first, last))
    keys = np.sort(places(call, "k"), axis=-1)
    entries = [
        bounds_by_position(low[i : i + 1], high[i : i + 1], keys[:, min(i, keys.shape[1] - 1)])
        for i in range(batch)
    ]
    return tuple(np.concatenate(x, axis=1) for x in zip(*entries, strict=True))  # type: ignore[return-value]
