"""Forward and backward of the stand-in for FlashAttention 3, on dense [B, S, H, D] and packed [T, H, D] tensors.

o has the dtype of q, lse is float32 as [B, H, S] or [H, T]. In rows without keys o is 0 and lse -inf; if there are no
keys at all, lse is +inf. dq, dk and dv are written into the buffers given. Whatever the extension leaves undefined, such
as rows of no sequence, is NaN in new tensors and unchanged in buffers.
"""

from __future__ import annotations

from typing import Any

from ringspec.standins import attention
from ringspec.standins.flash_attn.arguments import Options
from ringspec.standins.flash_attn.kernel import block, read_lse, statistics
from ringspec.standins.flash_attn_3.arguments import Rows, visible
from ringspec.standins.names import Standin
from ringspec.standins.rounding import rounded

__all__ = ["backward", "forward"]


def forward(q: Any, k: Any, v: Any, rows: Rows, chosen: Options) -> tuple[Any, Any]:
    """Return o and lse."""
    import torch

    o = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full(lse_shape(q), torch.nan, dtype=statistics(q))
    flat_q, flat_k, flat_v, flat_o = (flat(x) for x in (q, k, v, o))
    with torch.no_grad():
        for number, (queries, keys) in enumerate(zip(rows.q, rows.k, strict=True)):
            one, few, values = block(flat_q, queries), block(flat_k, keys), block(flat_v, keys)
            seen = visible(one.shape[1], few.shape[1], chosen)
            found, sums = attention.forward(one, few, values, seen, chosen.scale, chosen.softcap)
            flat_o[slice(*queries)] = rounded(found[0], q.dtype)
            stored = rounded(sums[0].masked_fill(sums[0].isnan(), -torch.inf), lse.dtype)
            lse_of(lse, q, number, queries).copy_(stored)
        if flat_k.shape[0] == 0:  # without a kernel, and so also in rows of no sequence
            o.zero_()
            lse.fill_(torch.inf)
    return o, lse


def backward(
    standin: Standin,
    given: tuple[Any, ...],
    lse: Any,
    buffers: tuple[Any, Any, Any],
    rows: Rows,
    chosen: Options,
) -> None:
    """Write dq, dk and dv into the buffers, from ``given``: dout, q, k, v, out."""
    import torch

    q = given[1]
    flat_dout, flat_q, flat_k, flat_v, flat_out = (flat(x) for x in given)
    if not (
        flat_q.shape[0] and flat_k.shape[0]
    ):  # without a kernel, and so also in rows of no sequence
        for buffer in buffers:
            buffer.zero_()
        return
    with torch.no_grad():
        wide = read_lse(standin, lse, lse_shape(q), q)
        for number, (queries, keys) in enumerate(zip(rows.q, rows.k, strict=True)):
            found = attention.backward(
                block(flat_dout, queries),
                block(flat_q, queries),
                block(flat_k, keys),
                block(flat_v, keys),
                block(flat_out, queries),
                lse_of(wide, q, number, queries)[None],
                visible(queries[1] - queries[0], keys[1] - keys[0], chosen),
                chosen.scale,
                chosen.softcap,
            )
            for buffer, place, x in zip(buffers, (queries, keys, keys), found, strict=False):
                part(buffer, number, place).copy_(rounded(x[0], buffer.dtype))


def lse_shape(q: Any) -> tuple[int, ...]:
    """Return the shape of lse: [B, H, S] of dense q, [H, T] of packed q."""
    return (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])


def lse_of(lse: Any, q: Any, number: int, rows: tuple[int, int]) -> Any:
    """Return the lse [H, rows] of one sequence, the same memory."""
    if q.dim() == 3:
        return lse[:, slice(*rows)]
    first = q.shape[1] * number
    return lse[number, :, rows[0] - first : rows[1] - first]


def part(x: Any, number: int, rows: tuple[int, int]) -> Any:
    """Return the rows [rows, H, D] of one sequence, the same memory whatever the strides."""
    if x.dim() == 3:
        return x[slice(*rows)]
    first = x.shape[1] * number
    return x[number, rows[0] - first : rows[1] - first]


def flat(x: Any) -> Any:
    """Return [T, H, D] of dense or packed tensors; of new tensors the same memory."""
    return x if x.dim() == 3 else x.reshape(-1, *x.shape[2:])
