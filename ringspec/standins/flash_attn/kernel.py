"""Forward and backward of the stand-in for flash_attn, on dense [B, S, H, D] and packed [T, H, D] tensors.

Results have the dtypes and layouts of the CUDA extension: o in the dtype of q, lse in float32 as [B, H, S] or [H, T],
+inf in rows without keys, where o is 0. dq, dk and dv are written into the buffers given. Whatever the extension leaves
undefined is NaN in new tensors and unchanged in buffers.
"""

from __future__ import annotations

from typing import Any

from ringspec.errors import RefusedError
from ringspec.standins import attention
from ringspec.standins.flash_attn.arguments import Lengths, Options, visible
from ringspec.standins.names import Standin
from ringspec.standins.rounding import rounded

__all__ = [
    "block",
    "check_keys",
    "dense_backward",
    "dense_forward",
    "dense_sums",
    "lse_memory",
    "packed_backward",
    "packed_forward",
    "packed_sums",
    "read_lse",
    "statistics",
]

TILE = 128  # rows; the third result of a backward pass has room for whole tiles


def dense_forward(q: Any, k: Any, v: Any, chosen: Options) -> tuple[Any, Any]:
    """Return o [B, Sq, H, D] and lse [B, H, Sq] of q [B, Sq, H, D] and k, v [B, Sk, Hkv, D]."""
    import torch

    queries, keys = q.shape[1], k.shape[1]
    seen = visible(queries, keys, keys, chosen)
    with torch.no_grad():
        o, lse = attention.forward(q, k, v, seen, chosen.scale, chosen.softcap)
    return new_output(q).copy_(rounded(o, q.dtype)), stored_lse(lse, q)


def dense_backward(
    standin: Standin,
    given: tuple[Any, ...],
    lse: Any,
    buffers: tuple[Any, Any, Any],
    chosen: Options,
) -> Any:
    """Write dq, dk and dv into the buffers, from ``given``: dout, q, k, v, out.

    Returns the sums of dout * out [B, H, Sq rounded up to whole tiles].
    """
    import torch

    dout, q, k, v, out = given
    batch, queries, heads, _ = q.shape
    check_keys(k.shape[1])
    seen = visible(queries, k.shape[1], k.shape[1], chosen)
    sums = dense_sums(q)
    with torch.no_grad():
        read = read_lse(standin, lse, (batch, heads, queries), q)
        found = attention.backward(dout, q, k, v, out, read, seen, chosen.scale, chosen.softcap)
        for buffer, gradient in zip(buffers, found, strict=False):
            buffer.copy_(rounded(gradient, buffer.dtype))
        sums[:, :, :queries] = found.delta
    return sums


def packed_forward(q: Any, k: Any, v: Any, lengths: Lengths, chosen: Options) -> tuple[Any, Any]:
    """Return o [Tq, H, D] and lse [H, Tq] of q [Tq, H, D] and k, v [Tk, Hkv, D]."""
    import torch

    o = new_output(q)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=statistics(q))
    with torch.no_grad():
        for rows, columns in zip(lengths.rows_q, lengths.rows_k, strict=True):
            one, keys, values = block(q, rows), block(k, columns), block(v, columns)
            seen = visible(one.shape[1], keys.shape[1], lengths.longest_k, chosen)
            block_o, block_lse = attention.forward(
                one, keys, values, seen, chosen.scale, chosen.softcap
            )
            o[slice(*rows)] = rounded(block_o[0], q.dtype)
            lse[:, slice(*rows)] = stored_lse(block_lse[0], q)
        if lengths.longest_k == 0:  # without a kernel, and so also in rows of no sequence
            o.zero_()
            lse.fill_(torch.inf)
    return o, lse


def packed_backward(
    standin: Standin,
    given: tuple[Any, ...],
    lse: Any,
    buffers: tuple[Any, Any, Any],
    lengths: Lengths,
    chosen: Options,
) -> Any:
    """Write dq, dk and dv into the buffers, from ``given``: dout, q, k, v, out.

    Returns the sums of dout * out [H, Tq + a tile for each sequence].
    """
    import torch

    dout, q, k, v, out = given
    total, heads, _ = q.shape
    check_keys(lengths.longest_k)
    sums = packed_sums(q, lengths)
    with torch.no_grad():
        wide = read_lse(standin, lse, (heads, total), q)
        pairs = zip(lengths.rows_q, lengths.rows_k, strict=True)
        for number, (rows, columns) in enumerate(pairs):
            one, keys, values = block(q, rows), block(k, columns), block(v, columns)
            seen = visible(one.shape[1], keys.shape[1], lengths.longest_k, chosen)
            found = attention.backward(
                block(dout, rows),
                one,
                keys,
                values,
                block(out, rows),
                wide[None, :, slice(*rows)],
                seen,
                chosen.scale,
                chosen.softcap,
            )
            places = (rows, columns, columns)
            for buffer, place, gradient in zip(buffers, places, found, strict=False):
                buffer[slice(*place)] = rounded(gradient[0], buffer.dtype)
            first = rows[0] + TILE * number
            sums[:, first : first + one.shape[1]] = found.delta[0]
    return sums


def new_output(q: Any) -> Any:
    """Allocate o, as NaN, with the strides that the original gives it: those of q if its last axis is contiguous."""
    import torch

    return torch.full_like(q if q.stride(-1) == 1 else q.contiguous(), torch.nan)


def dense_sums(q: Any) -> Any:
    """Allocate the sums of dout * out [B, H, Sq rounded up to whole tiles], as NaN."""
    import torch

    size = (q.shape[0], q.shape[2], whole_tiles(q.shape[1]))
    return torch.full(size, torch.nan, dtype=statistics(q), device=q.device)


def packed_sums(q: Any, lengths: Lengths) -> Any:
    """Allocate the sums of dout * out [H, Tq + a tile for each sequence], as NaN."""
    import torch

    size = (q.shape[1], q.shape[0] + TILE * len(lengths.rows_q))
    return torch.full(size, torch.nan, dtype=statistics(q), device=q.device)


def check_keys(keys: int) -> None:
    """Raise RefusedError for a backward pass without keys."""
    if keys == 0:
        expected = "at least one key in a backward pass, without which the kernel does not start"
        raise RefusedError(expected, "0 keys", "do not call it for an empty block")


def block(x: Any, rows: tuple[int, int]) -> Any:
    """Return the rows of one sequence as a batch of one."""
    return x[slice(*rows)][None]


def statistics(q: Any) -> Any:
    """Return the dtype of lse: float32, or float64 for float64 inputs, which only an exact stand-in accepts."""
    import torch

    return torch.promote_types(q.dtype, torch.float32)


def stored_lse(lse: Any, q: Any) -> Any:
    """Return lse as flash_attn stores it, with +inf in rows without keys and in rows with NaN."""
    import torch

    return rounded(lse.masked_fill((lse == -torch.inf) | lse.isnan(), torch.inf), statistics(q))


def read_lse(standin: Standin, lse: Any, shape: tuple[int, ...], q: Any) -> Any:
    """Return lse as the kernel takes it: memory in this shape, in which -inf counts as 0."""
    import torch

    read = lse_memory(standin, lse, shape, q)
    return read.masked_fill(read == -torch.inf, 0.0)


def lse_memory(standin: Standin, lse: Any, shape: tuple[int, ...], q: Any) -> Any:
    """Return lse as the CUDA extension reads it: contiguous memory in this shape, whatever the view.

    The extension checks neither shape, dtype nor strides. A wrong dtype or too little memory raises RefusedError here.
    """
    import torch

    allowed = {statistics(q)} | ({torch.float64} if standin.exact else set())
    if not isinstance(lse, torch.Tensor) or lse.dtype not in allowed:
        expected = f"softmax_lse in {statistics(q)}, in which the kernel reads it"
        got = str(getattr(lse, "dtype", type(lse).__name__))
        raise RefusedError(expected, got, "pass the lse that the forward pass returned")
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    needed, has = torch.Size(shape).numel(), lse.untyped_storage().nbytes() // lse.element_size()
    if has - lse.storage_offset() < needed:
        expected = f"softmax_lse with the {needed} numbers that the kernel reads, {list(shape)}"
        raise RefusedError(expected, str(tuple(lse.shape)), "pass one lse for each head and query")
    return lse.as_strided(shape, tuple(strides), lse.storage_offset())


def whole_tiles(rows: int) -> int:
    return -(-rows // TILE) * TILE
