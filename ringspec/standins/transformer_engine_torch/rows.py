"""Rows of packed tensors, and checks of the arguments of :mod:`~ringspec.standins.transformer_engine_torch.packed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ringspec.errors import RefusedError, shown

__all__ = [
    "check_half",
    "check_like",
    "check_lse",
    "check_width",
    "every_rank",
    "half_places",
    "half_rows",
    "not_modelled",
    "rank_rows",
    "span",
    "starts",
    "token_axis",
]

WIDTH_BYTES = 16  # the original reads and writes this many bytes at once


def not_modelled(expected: str, got: Any, fix: str) -> RefusedError:
    why = "because the stand-in for transformer_engine_torch does not model anything else"
    return RefusedError(f"{expected}, {why}", shown(got), fix, code="not-modelled")


def starts(cu_seqlens: Any, name: str = "cu_seqlens") -> list[int]:
    """Return the first row of each sequence, and the end."""
    import torch

    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        got = str(getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__))
        raise RefusedError(f"{name} as an int32 tensor", got, f"convert {name}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        got = str(tuple(cu_seqlens.shape))
        raise RefusedError(f"{name} [sequences + 1]", got, "pass the cumulative lengths")
    found = [int(one) for one in cu_seqlens]
    if found[0] < 0 or found != sorted(found):
        raise RefusedError(f"{name} in ascending order", shown(found), "pass cumulative lengths")
    return found


def span(start: int, stop: int) -> Any:
    import torch

    return torch.arange(start, stop)


def half_rows(first: Sequence[int], half: int) -> Any:
    """Return the rows of the first (0) or second (1) halves of all sequences.

    ``first``: the first row of each sequence and the end; they are divided by 2 as integers, like by the original.
    """
    import torch

    halves = [one // 2 for one in first]
    return torch.cat([span(a, b) + (b if half else a) for a, b in pairwise(halves)] or [span(0, 0)])


def half_places(lse: Any, cu_seqlens: Any, packed: bool) -> Iterator[tuple[Any, Any]]:
    """Yield where second halves are in lse, and where in an lse of halves: indices of the tensors.

    ``packed``: [H, T] and [H, T / 2]; otherwise [B, H, S] and [B, H, S / 2], in which each sequence begins at 0.
    """
    first = starts(cu_seqlens)
    if packed:
        rows = half_rows(first, 1)
        yield (slice(None), rows), (slice(None), slice(0, len(rows)))
        return
    if len(first) != lse.shape[0] + 1:
        expected = f"cu_seqlens of {lse.shape[0]} sequences, as in lse"
        raise RefusedError(expected, shown(first), "pass the lengths of these sequences")
    for sequence, (start, stop) in enumerate(pairwise(one // 2 for one in first)):
        n = stop - start
        yield (sequence, slice(None), slice(n, 2 * n)), (sequence, slice(None), slice(0, n))


def rank_rows(first: Sequence[int], world_size: int, rank: int) -> Any:
    """Return the rows of the whole tensor that a worker holds: chunks r and 2 W - 1 - r of each sequence."""
    import torch

    found = []
    for start, stop in pairwise(first):
        chunk = (stop - start) // (2 * world_size)
        for number in (rank, 2 * world_size - 1 - rank):
            found.append(span(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(found)


def every_rank(cu_seqlens: Any, world_size: int, total: int) -> list[Any]:
    """Return the rows of each worker; raise RefusedError for sequences that 2 W does not divide."""
    first = starts(cu_seqlens)
    chunks = 2 * world_size
    if first[0] != 0 or first[-1] != total or any(one % chunks for one in first):
        expected = f"cu_seqlens from 0 to {total} in multiples of {chunks}"
        raise not_modelled(expected, first, "pad every sequence")
    return [rank_rows(first, world_size, rank) for rank in range(world_size)]


def token_axis(tensor: Any) -> int:
    """Return the axis of the tokens: 0 of [T, H, D], 1 of [2, T, H, D]."""
    if tensor.dim() not in (3, 4):
        got = str(tuple(tensor.shape))
        raise RefusedError("a tensor [T, H, D] or [2, T, H, D]", got, "pass packed tensors")
    return int(tensor.dim() - 3)


def check_width(tensor: Any, heads_axis: int) -> None:
    """Raise RefusedError if the numbers of one token are not a multiple of 16 bytes."""
    size = tensor.element_size()
    for length in tensor.shape[heads_axis:]:
        size *= length
    if size % WIDTH_BYTES:
        expected = f"a multiple of {WIDTH_BYTES} bytes for each token"
        raise RefusedError(expected, f"{size} bytes", "use more or larger heads")


def check_half(half: Any) -> None:
    if half not in (0, 1):
        raise RefusedError("half_idx 0 or 1", shown(half), "pass 0 for the first half")


def check_lse(name: str, lse: Any, packed: Any) -> None:
    """Raise RefusedError for another dtype than float32 or another number of axes."""
    import torch

    axes = 2 if packed else 3
    if lse.dtype not in (torch.float32, torch.float64) or lse.dim() != axes:
        expected = f"{name} in float32 with {axes} axes"
        got = f"{lse.dtype}, {tuple(lse.shape)}"
        raise RefusedError(expected, got, "pass the lse that flash-attn returned")


def check_like(name: str, x: Any, like: Any, rows: int) -> None:
    """Raise RefusedError if x is not [rows, H, D] in the dtype and sizes of ``like`` [T, H, D]."""
    size = (rows, *like.shape[1:])
    if x.dtype != like.dtype or tuple(x.shape) != size:
        expected = f"{name} {size} in {like.dtype}"
        raise RefusedError(expected, f"{tuple(x.shape)} in {x.dtype}", f"pass {name} so")
