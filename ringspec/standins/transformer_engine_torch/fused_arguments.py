"""What a call of FusedAttention computes: its arguments, checked, and the rows of each sequence.

Raises :class:`~ringspec.errors.RefusedError`; its ``code`` is 'not-modelled' where the original would accept the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ringspec.errors import RefusedError, shown
from ringspec.standins.transformer_engine_torch.names import ENUMERATIONS
from ringspec.standins.transformer_engine_torch.rows import not_modelled, starts

__all__ = ["Attention", "attention_of", "check", "lse_of", "none_of", "part", "statistics_shape"]

BATCH_AXIS = {"BSHD": 0, "SBHD": 1, "THD": None}
Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Attention:
    """What a call computes. ``q``, ``k``: first row, and one past the last used row, of each sequence."""

    form: str
    q: Spans
    k: Spans
    scale: float
    causal: bool
    window: tuple[int, int]
    bottom_right: bool

    def visible(self, queries: int, keys: int) -> Any:
        """Return which key each query sees: [queries, keys] bool."""
        import torch

        offset = keys - queries if self.bottom_right else 0
        distance = torch.arange(keys) - (torch.arange(queries)[:, None] + offset)
        left, right = self.window
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if left != -1:
            seen &= distance >= -left
        if right != -1 or self.causal:
            seen &= distance <= max(right, 0)
        return seen


def attention_of(
    given: dict[str, Any], layouts: tuple[Any, ...], formats: tuple[Any, ...]
) -> Attention:
    """Return what a call computes; raise RefusedError for what the stand-in does not model."""
    forms = {f"NVTE_{form}_{form}_{form}": form for form in BATCH_AXIS}
    form = forms.get(layouts[0].name)
    same = all(one == layouts[0] for one in layouts) and all(
        one.name == f"NVTE_{form}" for one in formats
    )
    check(
        form is not None and same,
        "q, k, v and results in one format: BSHD, SBHD or THD",
        (*layouts, *formats),
    )
    assert form is not None
    check(given["p_dropout"] == 0.0, "no dropout", given["p_dropout"])
    check(given["bias_type"].name == "NVTE_NO_BIAS", "no bias", given["bias_type"])
    check(
        given["softmax_type"].name == "NVTE_VANILLA_SOFTMAX",
        "vanilla softmax",
        given["softmax_type"],
    )
    tensors = [given[name] for name in "QKV"]
    check_tensors(form, *tensors)
    mask = given["attn_mask_type"]
    assert isinstance(mask, ENUMERATIONS["NVTE_Mask_Type"])
    padding, causal = "PADDING" in mask.name, "CAUSAL" in mask.name
    if form == "THD" and not padding:
        raise RefusedError(
            "a mask with padding for packed tensors",
            mask.name,
            "pass 'padding' or 'padding_causal'",
        )
    left, right = window = tuple(given["window_size"])
    check(not (causal and right > 0), "no tokens on the right with a causal mask", window)
    if left != -1 and given["max_seqlen_q"] > given["max_seqlen_kv"]:
        raise RefusedError(
            "at most as many queries as keys, with a window", shown(window), "pass no window"
        )
    spans = [
        spans_of(given, form, padding, side, x)
        for side, x in zip(("q", "kv"), tensors, strict=False)
    ]
    if len(spans[0]) != len(spans[1]):
        got = f"{len(spans[0])} and {len(spans[1])} sequences"
        raise RefusedError("as many sequences in q as in k", got, "pass lengths that agree")
    return Attention(
        form,
        spans[0],
        spans[1],
        float(given["attn_scale"]),
        causal,
        (left, right),
        given["bottom_right_diagonal"],
    )


def spans_of(given: dict[str, Any], form: str, padding: bool, side: str, x: Any) -> Spans:
    """Return the first row, and one past the last used row, of each sequence of q or k."""
    valid, longest = given[f"cu_seqlens_{side}"], given[f"max_seqlen_{side}"]
    lengths = [stop - start for start, stop in pairwise(starts(valid, f"cu_seqlens_{side}"))]
    axis = BATCH_AXIS[form]
    if axis is not None:
        batch, tokens = x.shape[axis], x.shape[1 - axis]
        if longest != tokens or len(lengths) != batch:
            expected = f"max_seqlen_{side}={tokens} and {batch} sequences, as in the tensor"
            raise RefusedError(
                expected, f"{longest} and {len(lengths)}", "pass those of the tensor"
            )
        used = lengths if padding else [tokens] * batch
        return [(0, min(one, tokens)) for one in used]
    name = f"cu_seqlens_{side}_padded"
    both = given["cu_seqlens_q_padded"] is not None and given["cu_seqlens_kv_padded"] is not None
    first = starts(given[name], name) if both else starts(valid)
    if len(first) != len(lengths) + 1 or max(lengths) > longest:
        expected = (
            f"as many padded starts as starts, and max_seqlen_{side} of at least {max(lengths)}"
        )
        raise RefusedError(expected, f"{shown(first)} and {longest}", "pass lengths that agree")
    found = [(start, start + length) for start, length in zip(first, lengths, strict=False)]
    if any(stop > x.shape[0] for _, stop in found):
        raise RefusedError(f"sequences within {x.shape[0]} rows", shown(found), f"check {name}")
    return found


def check_tensors(form: str, q: Any, k: Any, v: Any) -> None:
    """Raise RefusedError for dtypes and shapes that the original refuses."""
    import torch

    axes = 3 if form == "THD" else 4
    for name, x in (("Q", q), ("K", k), ("V", v)):
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
            got = str(getattr(x, "dtype", type(x).__name__))
            raise not_modelled(f"{name} in float16 or bfloat16", got, "pass 16-bit tensors")
        if x.dim() != axes or x.dtype != q.dtype or not x.is_contiguous():
            got = f"{tuple(x.shape)} in {x.dtype}, strides {x.stride()}"
            raise RefusedError(
                f"{name} with {axes} axes in {q.dtype}, contiguous", got, f"pass {name} so"
            )
        if x.shape[-1] % 8:
            raise RefusedError(
                "head dimensions that are multiples of 8", str(x.shape[-1]), f"pad {name}"
            )
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1] or q.shape[-2] % k.shape[-2]:
        got = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise RefusedError(
            "q, k and v that agree", got, "pass query heads as a multiple of the key heads"
        )


def check(holds: Any, expected: str, got: Any) -> None:
    if not holds:
        raise not_modelled(expected, got, "test without it")


def none_of(given: dict[str, Any], names: str) -> None:
    for name in names.split():
        check(given[name] is None, f"{name}=None", given[name])


def part(chosen: Attention, x: Any, number: int, rows: tuple[int, int]) -> Any:
    """Return the rows [rows, H, D] of one sequence, the same memory."""
    axis = BATCH_AXIS[chosen.form]
    return (x if axis is None else x.select(axis, number))[slice(*rows)]


def statistics_shape(chosen: Attention, q: Any) -> tuple[int, ...]:
    if chosen.form == "THD":
        return (*q.shape[:2], 1)
    axis = BATCH_AXIS[chosen.form]
    assert axis is not None
    return (q.shape[axis], q.shape[2], q.shape[1 - axis], 1)


def lse_of(chosen: Attention, statistics: Any, number: int, rows: tuple[int, int]) -> Any:
    """Return the lse [H, rows] of one sequence, the same memory."""
    if chosen.form == "THD":
        return statistics[slice(*rows), :, 0].T
    return statistics[number, :, slice(*rows), 0]
