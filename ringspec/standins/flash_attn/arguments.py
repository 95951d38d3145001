"""Check the arguments of the stand-in for flash_attn: what the kernel refuses, and what the stand-in does not model.

Both raise :class:`~ringspec.errors.RefusedError`; its ``code`` is 'not-modelled' where the kernel would accept the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringspec.errors import RefusedError, shown
from ringspec.standins.names import Standin

__all__ = [
    "Lengths",
    "Options",
    "check_tensors",
    "lengths",
    "not_modelled",
    "options",
    "sequences",
    "visible",
]

MOST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


@dataclass(frozen=True)
class Options:
    """The options of one call, checked: scale, causal, window (left, right), softcap (0: none)."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float


@dataclass(frozen=True)
class Lengths:
    """The sequences of packed tensors: each sequence's first row and the row after its last, of q and of k.

    ``longest_q`` and ``longest_k`` are the given max_seqlen, ``ends_q`` and ``ends_k`` the given cu_seqlens.
    """

    rows_q: tuple[tuple[int, int], ...]
    rows_k: tuple[tuple[int, int], ...]
    longest_q: int
    longest_k: int
    ends_q: Any
    ends_k: Any


def not_modelled(what: str, got: Any, fix: str, package: str = "flash_attn") -> RefusedError:
    expected = f"{what}, because the stand-in for {package} does not model anything else"
    return RefusedError(expected, shown(got), fix, code="not-modelled")


def options(
    softmax_scale: Any,
    causal: Any,
    window: Any,
    softcap: Any,
    dropout_p: Any,
    alibi_slopes: Any,
    return_softmax: Any = False,
) -> Options:
    """Return the options of a call; raise RefusedError for those that are invalid or not modelled."""
    if not 0.0 <= dropout_p < 1.0:
        raise RefusedError("0 <= dropout_p < 1", shown(dropout_p), "pass dropout_p=0.0")
    if dropout_p > NO_DROPOUT:
        raise not_modelled("dropout_p=0.0", dropout_p, "test without dropout")
    if alibi_slopes is not None:
        raise not_modelled("alibi_slopes=None", alibi_slopes, "test without ALiBi")
    if return_softmax and not dropout_p > 0.0:
        fix = "pass return_softmax=False, or return_attn_probs to a public function"
        raise RefusedError("return_softmax only with dropout", "dropout_p=0.0", fix)
    if not isinstance(softmax_scale, (int, float)):
        fix = "pass the scale that multiplies the products of q and k, such as D**-0.5"
        raise RefusedError("softmax_scale as a number", shown(softmax_scale), fix)
    if not isinstance(causal, bool):
        raise RefusedError("causal as a bool", shown(causal), "pass causal=True or causal=False")
    pair = tuple(window)
    if len(pair) != 2 or not all(type(one) is int and one >= -1 for one in pair):
        fix = "pass window_size=(-1, -1) for no window"
        raise RefusedError("a window of two integers >= -1", shown(window), fix)
    return Options(float(softmax_scale), causal, pair, float(softcap or 0.0))


# The largest dropout probability that keeps everything: 1 - 2**-25 rounds to 1 in float32. A caller passes such a
# number to be given the lse by a version that returns it only with dropout.
NO_DROPOUT = 2.0**-25


def check_tensors(chosen: Standin, axes: int, **tensors: Any) -> None:
    """Raise RefusedError for dtypes and shapes that the kernel refuses.

    ``tensors``: q, k, v, and in a backward pass out, dout, dq, dk and dv. ``axes``: 4 for [B, S, H, D], 3 for packed
    tensors [T, H, D].
    """
    import torch

    q, k = tensors["q"], tensors["k"]
    of_q = {"out", "dout", "dq"}
    allowed = [torch.float16, torch.bfloat16]
    if chosen.exact:
        allowed += [torch.float32, torch.float64]
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise RefusedError(f"{name} as a torch tensor", shown(x), f"pass {name}")
        if x.dtype not in allowed:
            fix = "pass 16-bit tensors, or install the stand-in 'flash_attn[exact]'"
            expected = f"{name} in float16 or bfloat16, as the kernel needs"
            raise RefusedError(expected, str(x.dtype), fix)
        if x.is_cuda != chosen.cuda:
            expected = f"{name} on a {'CUDA device' if chosen.cuda else 'CPU'}, where the stand-in computes"
            fix = f"move it, or install {'flash_attn' if chosen.cuda else 'flash_attn[cuda]'}"
            raise RefusedError(expected, str(x.device), fix)
        if x.dtype != q.dtype:
            expected = f"{name} in the dtype of q, {q.dtype}"
            raise RefusedError(expected, str(x.dtype), f"convert {name}")
        if x.dim() != axes:
            expected = f"{name} with {axes} axes"
            raise RefusedError(expected, str(tuple(x.shape)), "use the function for this layout")
        like = q if name in of_q | {"q"} else k
        if x.shape != like.shape:
            expected = f"{name} in the shape of {'q' if like is q else 'k'}, {tuple(like.shape)}"
            raise RefusedError(expected, str(tuple(x.shape)), f"pass {name} in this shape")
        if name in ("dq", "dk", "dv") and x.numel() and x.stride(-1) != 1:
            expected = f"{name} with its last axis contiguous"
            raise RefusedError(expected, f"strides {x.stride()}", "allocate it in this order")
    check_sizes(q, k, axes)


def check_sizes(q: Any, k: Any, axes: int) -> None:
    """Raise RefusedError for sizes of q and k that do not fit each other or the kernel."""
    names = ("B", "D") if axes == 4 else ("D",)
    for name, axis in zip(names, (0, 3) if axes == 4 else (2,), strict=True):
        if q.shape[axis] != k.shape[axis]:
            got = f"{q.shape[axis]} and {k.shape[axis]}"
            raise RefusedError(f"the same {name} in q and k", got, "pass tensors that agree")
    heads, kv_heads, width = q.shape[-2], k.shape[-2], q.shape[-1]
    if not (heads and kv_heads and heads % kv_heads == 0):
        got = f"{heads} query heads and {kv_heads} key heads"
        raise RefusedError("query heads as a multiple of the key heads", got, "pass k and v so")
    if not 0 < width <= MOST_HEAD_DIM:
        expected = f"a head dimension from 1 to {MOST_HEAD_DIM}"
        raise RefusedError(expected, str(width), "use smaller heads")
    if axes == 4 and not (q.shape[0] and q.shape[1]):
        expected = "at least one sequence and one query, without which the kernel does not start"
        raise RefusedError(expected, f"q {tuple(q.shape)}", "do not call it for an empty block")


def check_head_dim(chosen: Standin, q: Any) -> None:
    """Raise RefusedError for a head dimension that the CUDA functions do not take without padding."""
    if not chosen.exact and q.shape[-1] % HEAD_DIM_MULTIPLE:
        expected = f"a head dimension that is a multiple of {HEAD_DIM_MULTIPLE}"
        fix = "pad q, k and v with zeros, or install the stand-in 'flash_attn[exact]'"
        raise RefusedError(expected, str(q.shape[-1]), fix)


def lengths(four: tuple[Any, ...], q: Any, k: Any) -> Lengths:
    """Return the sequences of packed q [T, H, D] and k; raise RefusedError for lengths that do not fit.

    ``four``: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = four
    rows_q = sequences(cu_seqlens_q, "cu_seqlens_q", q.shape[0])
    rows_k = sequences(cu_seqlens_k, "cu_seqlens_k", k.shape[0])
    if len(rows_q) != len(rows_k):
        got = f"{len(rows_q)} and {len(rows_k)} sequences"
        raise RefusedError("as many sequences in q as in k", got, "pass lengths that agree")
    for name, given, rows in (
        ("max_seqlen_q", max_seqlen_q, rows_q),
        ("max_seqlen_k", max_seqlen_k, rows_k),
    ):
        longest = max(stop - start for start, stop in rows)
        # The kernel leaves out rows beyond it without an error.
        if given < longest:
            expected = f"{name} of at least the longest sequence, {longest}"
            raise RefusedError(expected, shown(given), f"pass {name}={longest}")
    if max_seqlen_q < 1:
        expected = "max_seqlen_q >= 1, without which the kernel does not start"
        raise RefusedError(expected, shown(max_seqlen_q), "do not call it for an empty block")
    return Lengths(rows_q, rows_k, int(max_seqlen_q), int(max_seqlen_k), cu_seqlens_q, cu_seqlens_k)


def sequences(cu_seqlens: Any, name: str, total: int) -> tuple[tuple[int, int], ...]:
    """Return the first row and the row after the last of each sequence."""
    import torch

    if not isinstance(cu_seqlens, torch.Tensor) or cu_seqlens.dtype != torch.int32:
        got = str(getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__))
        raise RefusedError(f"{name} as an int32 tensor", got, f"convert {name}")
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] < 0 or ends != sorted(ends) or ends[-1] > total:
        expected = (
            f"{name} as ascending row numbers from 0 to at most {total}, one more than sequences"
        )
        raise RefusedError(expected, shown(ends), "pass the cumulative lengths")
    return tuple(zip(ends[:-1], ends[1:], strict=True))


def visible(queries: int, keys: int, longest_keys: int, chosen: Options) -> Any:
    """Return which key each query sees: [queries, keys] bool; the last query is aligned with the last key.

    ``longest_keys``: the number of keys of the longest sequence; a side of a window that is at least as long counts as
    no limit. If only one side has no limit, it gets this length as its limit, which matters for rows before the first
    key: there are such rows if there are more queries than keys.
    """
    import torch

    left, right = (-1 if side >= longest_keys else side for side in chosen.window)
    if chosen.causal:
        right = 0
    if left < 0 and right < 0:
        return torch.ones(queries, keys, dtype=torch.bool)
    left, right = (longest_keys if side < 0 else side for side in (left, right))
    position = torch.arange(queries)[:, None] + (keys - queries)
    key = torch.arange(keys)
    return (key >= position - left) & (key <= position + right)
