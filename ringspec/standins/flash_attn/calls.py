"""One call of a low-level function of the stand-in for flash_attn: check the arguments, compute, return the results.

:mod:`~ringspec.standins.flash_attn.version_2_6` and :mod:`~ringspec.standins.flash_attn.version_2_7` have the
signatures that rings call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ringspec.standins.flash_attn import aten, kernel
from ringspec.standins.flash_attn.arguments import (
    HEAD_DIM_MULTIPLE,
    check_head_dim,
    check_tensors,
    lengths,
    not_modelled,
    options,
)
from ringspec.standins.flash_attn.kernel import whole_tiles
from ringspec.standins.names import Standin

__all__ = [
    "NAMES",
    "backward",
    "eight",
    "forward",
    "kernel_of",
    "no_paging",
    "packed_backward",
    "packed_forward",
]

NAMES = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
"""The tensors of a backward pass, in the order of its arguments."""


def kernel_of(chosen: Standin) -> ModuleType:
    """Return the module whose functions compute for a stand-in."""
    return aten if chosen.cuda else kernel


def forward(chosen: Standin, q: Any, k: Any, v: Any, *given: Any) -> tuple[Any, Any, Any, Any]:
    """Return o, lse, the empty probabilities and the state of the random numbers."""
    checked = options(*given)
    check_tensors(chosen, 4, q=q, k=k, v=v)
    check_forward_head_dim(chosen, q)
    o, lse = kernel_of(chosen).dense_forward(q, k, v, checked)
    size = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    return o, lse, probabilities(q, given[-1], *size), random_state(q)


def backward(chosen: Standin, tensors: dict[str, Any], lse: Any, *given: Any) -> Any:
    """Return the sums of dout * out, and the buffers of dq, dk and dv, which are written."""
    checked = options(*given)
    named = with_buffers(tensors)
    check_tensors(chosen, 4, **named)
    check_head_dim(chosen, named["q"])
    given_tensors, buffers = split(named)
    return kernel_of(chosen).dense_backward(chosen, given_tensors, lse, buffers, checked), buffers


def packed_forward(
    chosen: Standin, q: Any, k: Any, v: Any, four: tuple[Any, ...], zero: bool, *given: Any
) -> tuple[Any, Any, Any, Any]:
    """Return the results of :func:`forward` for packed tensors.

    ``four``: cu_seqlens and max_seqlen of q and k. ``zero``: whether rows of no sequence become 0, with lse -inf.
    """
    checked = options(*given)
    check_tensors(chosen, 3, q=q, k=k, v=v)
    check_forward_head_dim(chosen, q)
    packed = lengths(four, q, k)
    o, lse = kernel_of(chosen).packed_forward(q, k, v, packed, checked)
    if zero:
        outside = rows_outside(packed.rows_q, q)
        o[outside], lse[:, outside] = 0.0, -float("inf")
    size = (len(packed.rows_q), q.shape[1], packed.longest_q, packed.longest_k)
    return o, lse, probabilities(q, given[-1], *size), random_state(q)


def packed_backward(
    chosen: Standin,
    tensors: dict[str, Any],
    lse: Any,
    four: tuple[Any, ...],
    zero: bool,
    *given: Any,
) -> Any:
    """Return the results of :func:`backward` for packed tensors; ``zero``: whether the buffers are zeroed first."""
    checked = options(*given)
    named = with_buffers(tensors)
    check_tensors(chosen, 3, **named)
    check_head_dim(chosen, named["q"])
    given_tensors, buffers = split(named)
    packed = lengths(four, named["q"], named["k"])
    if zero:
        for buffer in buffers:
            buffer.zero_()
    sums = kernel_of(chosen).packed_backward(chosen, given_tensors, lse, buffers, packed, checked)
    return sums, buffers


def check_forward_head_dim(chosen: Standin, q: Any) -> None:
    """Raise RefusedError for a head dimension that a version does not pad itself."""
    if chosen.version != "2.6":
        check_head_dim(chosen, q)


def with_buffers(tensors: dict[str, Any]) -> dict[str, Any]:
    """Allocate those of dq, dk and dv that are None, as the extension does."""
    import torch

    like = {"dq": tensors["q"], "dk": tensors["k"], "dv": tensors["v"]}
    new = {name: torch.empty_like(x) for name, x in like.items() if tensors[name] is None}
    return tensors | new


def split(named: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, Any, Any]]:
    """Return dout, q, k, v, out, and the buffers dq, dk, dv."""
    return tuple(named[name] for name in NAMES[:5]), (named["dq"], named["dk"], named["dv"])


def rows_outside(rows: tuple[tuple[int, int], ...], q: Any) -> Any:
    """Return which rows of q belong to no sequence."""
    import torch

    outside = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)
    for start, stop in rows:
        outside[start:stop] = False
    return outside


def probabilities(q: Any, wanted: bool, batch: int, heads: int, queries: int, keys: int) -> Any:
    """Return the third result: empty, or NaN in the shape of the original, whose values are for its tests only."""
    import torch

    if not wanted:
        return torch.empty(0, dtype=q.dtype, device=q.device)
    size = (batch, heads, whole_tiles(queries), whole_tiles(keys))
    return torch.full(size, torch.nan, dtype=q.dtype, device=q.device)


def random_state(q: Any) -> Any:
    import torch

    return torch.zeros(2, dtype=torch.int64, device=q.device)


def no_paging(**given: Any) -> None:
    """Raise RefusedError for an argument of caches, which the stand-in does not model."""
    for name, value in given.items():
        if value is not None:
            raise not_modelled(f"{name}=None", value, f"call it without {name}")


def eight(four: tuple[Any, Any, Any, Any], q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Return the eight results of 2.6, which pads a head dimension to a multiple of 8 itself."""
    import torch

    o, lse, probability, state = four
    short = -q.shape[-1] % HEAD_DIM_MULTIPLE
    padded = [torch.nn.functional.pad(x, (0, short)) if short else x for x in (q, k, v, o)]
    # The original returns no tensor where 2.7 and 2.8 return an empty one.
    return o, *padded, lse, probability if probability.numel() else None, state
