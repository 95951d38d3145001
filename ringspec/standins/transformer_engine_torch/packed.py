"""Functions for packed tensors [T, H, D], whose sequences each have two halves on a worker.

The layout: every padded sequence is cut into 2 W chunks, and worker r holds chunks r and 2 W - 1 - r of each, one after the
other. ``cu_seqlens`` are the first rows of the sequences and the end, int32; a function that takes halves divides them
by 2. Rows of no sequence keep what they had; in new tensors they are NaN, except where the original writes zeros.

Sums and products are computed in float64 and rounded once. The original computes in float32 and rounds the product too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from ringspec.errors import RefusedError, shown
from ringspec.standins.rounding import rounded
from ringspec.standins.transformer_engine_torch.rows import (
    check_half,
    check_like,
    check_lse,
    check_width,
    every_rank,
    half_places,
    half_rows,
    not_modelled,
    span,
    starts,
    token_axis,
)

__all__ = ["FUNCTIONS"]

OPERATIONS = {
    ("add", "none"),
    ("copy", "none"),
    ("none", "add"),
    ("none", "copy"),
    ("add", "copy"),
    ("copy", "add"),
}


def thd_read_half_tensor(tensor: Any, cu_seqlens: Any, half_idx: Any) -> Any:
    """Return the first (0) or second (1) half of every sequence of [T, H, D] or [2, T, H, D], [.., T / 2, H, D]."""
    check_half(half_idx)
    axis = token_axis(tensor)
    check_width(tensor, axis + 1)
    rows = half_rows(starts(cu_seqlens), half_idx)
    shape = list(tensor.shape)
    shape[axis] //= 2
    half = tensor.new_full(shape, float("nan"))
    half.narrow(axis, 0, len(rows)).copy_(tensor.index_select(axis, rows))
    return half


def thd_second_half_lse_correction(
    lse: Any, lse_per_step: Any, cu_seqlens: Any, lse_packed: Any
) -> None:
    """Add a step's lse of the second halves to lse, in place.

    ``lse_packed``: lse is [H, T] and the step's [H, T / 2], otherwise [B, H, S] and [B, H, S / 2].
    """
    for name, x in (("lse", lse), ("lse_per_step", lse_per_step)):
        check_lse(name, x, lse_packed)
    for at, half in half_places(lse, cu_seqlens, lse_packed):
        old, step = lse[at].double(), lse_per_step[half].double()
        high, low = old.maximum(step), old.minimum(step)
        lse[at] = rounded(high + (low - high).exp().log1p(), lse.dtype)


def thd_read_second_half_lse(
    lse: Any, cu_seqlens: Any, lse_packed: Any, second_half_lse_seqlen: Any
) -> Any:
    """Return the lse of the second halves, [H, second_half_lse_seqlen] if packed; other numbers are 0."""
    check_lse("lse", lse, lse_packed)
    if second_half_lse_seqlen < lse.shape[-1] // 2:
        expected = f"second_half_lse_seqlen of at least {lse.shape[-1] // 2}"
        raise RefusedError(expected, shown(second_half_lse_seqlen), "pass the length of a half")
    found = lse.new_zeros((*lse.shape[:-1], second_half_lse_seqlen))
    for at, half in half_places(lse, cu_seqlens, lse_packed):
        found[half] = lse[at]
    return found


def thd_out_correction(
    out: Any,
    out_per_step: Any,
    old_lse: Any,
    lse: Any,
    lse_per_step: Any,
    cu_seqlens: Any,
    only_second_half: Any,
    lse_packed: Any,
) -> None:
    """Replace out by out * exp(old_lse - lse) + out_per_step * exp(lse_per_step - lse), in place.

    ``out``: [T, H, D]. ``only_second_half``: only the second halves change, and out_per_step is [T / 2, H, D]. A number of
    out_per_step that is 0 adds 0, whatever its lse.
    """
    if not lse_packed:
        expected = "lse_packed=True, as with flash-attn 2.6 or later"
        raise not_modelled(expected, lse_packed, "install the stand-in for flash_attn")
    check_like("out_per_step", out_per_step, out, out.shape[0] // (1 + bool(only_second_half)))
    for name, x in (("old_lse", old_lse), ("lse", lse), ("lse_per_step", lse_per_step)):
        check_lse(name, x, True)
    first = starts(cu_seqlens)
    rows = half_rows(first, 1) if only_second_half else span(0, first[-1])
    n = len(rows)
    old_scale = (old_lse[:, rows].double() - lse[:, rows].double()).exp().T[..., None]
    step_scale = (lse_per_step[:, :n].double() - lse[:, rows].double()).exp().T[..., None]
    step = out_per_step[:n].double()
    added = (step * step_scale).masked_fill(step == 0, 0.0)
    out[rows] = rounded(out[rows].double() * old_scale + added, out.dtype)


def thd_grad_correction(
    grad: Any, grad_per_step: Any, cu_seqlens: Any, first_half: Any, second_half: Any
) -> None:
    """Add a step's gradient to grad [T, H, D], or copy it, in place.

    ``first_half``, ``second_half``: 'add', 'copy' or 'none', for the halves of every sequence. With a 'none',
    grad_per_step is [T / 2, H, D].
    """
    if (first_half, second_half) not in OPERATIONS:
        expected = "two of 'add', 'copy' and 'none' that the original combines"
        raise RefusedError(expected, shown((first_half, second_half)), "pass 'add' and 'copy'")
    one_half = "none" in (first_half, second_half)
    check_like("grad_per_step", grad_per_step, grad, grad.shape[0] // (1 + one_half))
    check_width(grad, 1)
    first = starts(cu_seqlens)
    for number, operation in enumerate((first_half, second_half)):
        if operation == "none":
            continue
        rows = half_rows(first, number)
        step = grad_per_step[: len(rows)] if one_half else grad_per_step[rows]
        if operation == "add":
            step = rounded(grad[rows].double() + step.double(), grad.dtype)
        grad[rows] = step


def thd_get_partitioned_indices(
    cu_seqlens: Any, total_tokens: Any, world_size: Any, rank: Any
) -> Any:
    """Return the rows of the whole packed tensor that a worker holds, in its order, int32."""
    import torch

    if not 0 <= rank < world_size:
        raise RefusedError(f"0 <= rank < {world_size}", shown(rank), "pass the rank in the group")
    return every_rank(cu_seqlens, world_size, total_tokens)[rank].to(torch.int32)


def thd_sequence_order_to_cp_rank_order(
    x: Any, cu_seqlens: Any, cp_size: Any, total_tokens: Any
) -> Any:
    """Reorder the rows of x [T, ...] from the order of the sequences to worker after worker."""
    return x[all_rows(x, cu_seqlens, cp_size, total_tokens)]


def thd_cp_rank_order_to_sequence_order(
    x: Any, cu_seqlens: Any, cp_size: Any, total_tokens: Any
) -> Any:
    """Reorder the rows of x [T, ...] from worker after worker to the order of the sequences."""
    rows = all_rows(x, cu_seqlens, cp_size, total_tokens)
    found = x.new_empty(x.shape)
    found[rows] = x
    return found


def all_rows(x: Any, cu_seqlens: Any, cp_size: int, total_tokens: int) -> Any:
    """Return the rows of all workers, worker after worker."""
    import torch

    if x.shape[0] != total_tokens:
        raise RefusedError(f"x with {total_tokens} rows", str(tuple(x.shape)), "pass all tokens")
    check_width(x, 1)
    return torch.cat(every_rank(cu_seqlens, cp_size, total_tokens))


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Any, x: Any, cu_seqlens_padded: Any, cu_seqlens: Any
) -> None:
    """Copy rows of x to the same rows of out: of each sequence, as many as ``cu_seqlens`` says, from its padded start.

    Not beyond the padded start of the next sequence.
    """
    check_like("x", x, out, out.shape[0])
    check_width(x, 1)
    padded = starts(cu_seqlens_padded, "cu_seqlens_padded")
    valid = starts(cu_seqlens)
    if len(padded) != len(valid):
        got = f"{len(padded)} and {len(valid)} numbers"
        raise RefusedError("as many padded starts as starts", got, "pass lengths that agree")
    ends = [*padded[1:-1], out.shape[0]]
    for start, stop, (first, last) in zip(padded[:-1], ends, pairwise(valid), strict=True):
        rows = slice(start, min(stop, start + last - first))
        out[rows] = x[rows]


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    thd_cp_rank_order_to_sequence_order,
    thd_get_partitioned_indices,
    thd_grad_correction,
    thd_out_correction,
    thd_read_half_tensor,
    thd_read_second_half_lse,
    thd_second_half_lse_correction,
    thd_sequence_order_to_cp_rank_order,
)
