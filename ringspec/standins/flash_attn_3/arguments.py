"""Check the arguments of the stand-in for FlashAttention 3: what the kernel refuses, and what is not modelled.

Both raise :class:`~ringspec.errors.RefusedError`; its ``code`` is 'not-modelled' where the kernel would accept the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ringspec.errors import RefusedError, shown
from ringspec.standins.flash_attn.arguments import Options, not_modelled, sequences
from ringspec.standins.names import Standin

__all__ = [
    "Given",
    "Rows",
    "check_backward",
    "check_splits",
    "check_tensors",
    "options_of",
    "refused_package",
    "rows_of",
    "unused",
    "visible",
]

MOST_HEAD_DIM = 256
DETERMINISTIC_HEAD_DIM = 192


@dataclass(frozen=True)
class Given:
    """The arguments of a call that say which rows are a sequence, by the names of the original."""

    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_q: Any = None
    seqused_k: Any = None
    max_seqlen_q: Any = None
    max_seqlen_k: Any = None


@dataclass(frozen=True)
class Rows:
    """Each sequence's first row and the row after its last used one, of q and of k, in tensors [T, H, D]."""

    q: tuple[tuple[int, int], ...]
    k: tuple[tuple[int, int], ...]


def refused_package(what: str, got: Any, fix: str) -> RefusedError:
    return not_modelled(what, got, fix, package="flash_attn_interface")


def unused(**given: Any) -> None:
    """Raise RefusedError for arguments that are not modelled, unless they are None."""
    for name, value in given.items():
        if value is not None:
            raise refused_package(f"{name}=None", value, f"call it without {name}")


def check_splits(num_splits: Any) -> None:
    """Raise RefusedError for more than one split."""
    if num_splits > 1:
        raise refused_package("num_splits of at most 1", num_splits, "pass num_splits=1")


def options_of(
    softmax_scale: Any, causal: Any, window: Any, softcap: Any, q: Any, chunk: Any = 0
) -> Options:
    """Return the options of a call, checked; a scale of None is D**-0.5."""
    if chunk:
        raise refused_package("attention_chunk=0", chunk, "test without chunks")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if not isinstance(scale, (int, float)):
        fix = "pass the scale that multiplies the products of q and k, such as D**-0.5"
        raise RefusedError("softmax_scale as a number", shown(scale), fix)
    if not isinstance(causal, bool):
        raise RefusedError("causal as a bool", shown(causal), "pass causal=True or causal=False")
    pair = tuple(window)
    if len(pair) != 2 or not all(type(one) is int for one in pair):
        fix = "pass -1 for a side without a limit"
        raise RefusedError("a window of two integers", shown(window), fix)
    return Options(float(scale), causal, (max(pair[0], -1), max(pair[1], -1)), float(softcap))


def check_tensors(chosen: Standin, given: Given, **tensors: Any) -> None:
    """Raise RefusedError for dtypes and shapes that the kernel refuses.

    ``tensors``: q, k, v, and in a backward pass out, dout, dq, dk and dv. q has 3 axes [T, H, D] with cu_seqlens_q and
    otherwise 4, [B, S, H, D]; likewise k and v with cu_seqlens_k.
    """
    import torch

    allowed = [torch.float16, torch.bfloat16]
    if chosen.exact:
        allowed += [torch.float32, torch.float64]
    q, k, v = (tensors[name] for name in "qkv")
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise RefusedError(f"{name} as a torch tensor", shown(x), f"pass {name}")
        if x.is_cuda:
            expected = f"{name} on a CPU, where the stand-in computes"
            raise RefusedError(expected, str(x.device), f"move {name}")
        if x.dtype not in allowed:
            fix = "pass 16-bit tensors, or install the stand-in 'flash_attn_interface[exact]'"
            expected = f"{name} in float16 or bfloat16, which the stand-in models"
            raise RefusedError(expected, str(x.dtype), fix)
        if x.dtype != q.dtype:
            expected = f"{name} in the dtype of q, {q.dtype}"
            raise RefusedError(expected, str(x.dtype), f"convert {name}")
        if name in ("dq", "dk", "dv") and x.numel() and x.stride(-1) != 1:
            expected = f"{name} with its last axis contiguous"
            raise RefusedError(expected, f"strides {x.stride()}", "allocate it in this order")
    for name, x, ends in (("q", q, given.cu_seqlens_q), ("k", k, given.cu_seqlens_k)):
        axes = 4 if ends is None else 3
        if x.dim() != axes:
            expected = f"{name} with {axes} axes {'without' if ends is None else 'with'} cu_seqlens"
            raise RefusedError(expected, str(tuple(x.shape)), "pass cu_seqlens for packed tensors")
    check_sizes(q, k, v)
    of_o = (*q.shape[:-1], v.shape[-1])
    shapes = {"v": (*k.shape[:-1], v.shape[-1]), "out": of_o, "dout": of_o}
    shapes |= {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != torch.Size(shape):
            got = str(tuple(tensors[name].shape))
            raise RefusedError(f"{name} in the shape {tuple(shape)}", got, f"pass {name} so")


def check_sizes(q: Any, k: Any, v: Any) -> None:
    """Raise RefusedError for numbers of heads and head dimensions that the kernel refuses."""
    heads, kv_heads, width, value = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    if not (heads and kv_heads and heads % kv_heads == 0):
        got = f"{heads} query heads and {kv_heads} key heads"
        raise RefusedError("query heads as a multiple of the key heads", got, "pass k and v so")
    if k.shape[-1] != width:
        got = f"{width} and {k.shape[-1]}"
        raise RefusedError("the same D in q and k", got, "pass tensors that agree")
    if width % 8 or value % 8 or not 0 < width <= MOST_HEAD_DIM:
        expected = f"head dimensions that are multiples of 8, at most {MOST_HEAD_DIM}"
        raise RefusedError(expected, f"{width} and {value} (v)", "pad q, k and v with zeros")
    wide = 128 < width <= 192 and 96 < value <= 128
    if value != width and not wide and not (width <= 64 and value <= 512):
        expected = (
            "v with the D of q, or 97 to 128 for a D of 129 to 192, or at most 512 for a D to 64"
        )
        raise RefusedError(expected, f"{value} with {width}", "pad v with zeros")


def check_backward(q: Any, v: Any, deterministic: Any) -> None:
    """Raise RefusedError for head dimensions that the backward pass refuses."""
    most = max(q.shape[-1], v.shape[-1])
    limit = DETERMINISTIC_HEAD_DIM if deterministic else MOST_HEAD_DIM
    if most > limit:
        way = "deterministic " if deterministic else ""
        expected = f"a head dimension of at most {limit} in a {way}backward pass"
        raise RefusedError(expected, str(most), "use smaller heads")


def rows_of(given: Given, q: Any, k: Any) -> Rows:
    """Return the rows of each sequence; raise RefusedError for lengths that do not fit."""
    found = []
    for name, x, ends, used, most in (
        ("q", q, given.cu_seqlens_q, given.seqused_q, given.max_seqlen_q),
        ("k", k, given.cu_seqlens_k, given.seqused_k, given.max_seqlen_k),
    ):
        if ends is None:
            rows = tuple((x.shape[1] * b, x.shape[1] * (b + 1)) for b in range(x.shape[0]))
        else:
            rows = sequences(ends, f"cu_seqlens_{name}", x.shape[0])
        if used is not None:
            rows = shortened(rows, used, f"seqused_{name}")
        if ends is not None:
            longest = max(stop - start for start, stop in rows)
            if most is None or most < longest:
                expected = f"max_seqlen_{name} of at least the longest sequence, {longest}"
                raise RefusedError(expected, shown(most), f"pass max_seqlen_{name}={longest}")
        found.append(rows)
    if len(found[0]) != len(found[1]):
        got = f"{len(found[0])} and {len(found[1])} sequences"
        raise RefusedError("as many sequences in q as in k", got, "pass lengths that agree")
    return Rows(*found)


def shortened(rows: tuple[tuple[int, int], ...], used: Any, name: str) -> Any:
    """Return the rows of each sequence of which only the first ``used`` ones count."""
    import torch

    if not isinstance(used, torch.Tensor) or used.dtype != torch.int32:
        got = str(getattr(used, "dtype", type(used).__name__))
        raise RefusedError(f"{name} as an int32 tensor", got, f"convert {name}")
    counts = used.tolist()
    sizes = [stop - start for start, stop in rows]
    if used.shape != (len(rows),) or any(
        not 0 <= count <= size for count, size in zip(counts, sizes, strict=True)
    ):
        expected = f"{name} with a number from 0 to its length, {shown(sizes)}, for each sequence"
        raise RefusedError(expected, shown(counts), "pass the rows used of each sequence")
    return tuple((start, start + count) for (start, _), count in zip(rows, counts, strict=True))


def visible(queries: int, keys: int, chosen: Options) -> Any:
    """Return which key each query sees: [queries, keys] bool; the last query is aligned with the last key.

    A side of a window with -1 has no limit.
    """
    import torch

    left, right = chosen.window
    right = 0 if chosen.causal else right
    position = torch.arange(queries)[:, None] + (keys - queries)
    key = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    return seen
