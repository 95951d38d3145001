"""Check the arguments of the ejkernel interface, and convert them to the layouts of the specification."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import DtypeError, OptionError, RefusedError, ShapeError
from ringspec.formats import load
from ringspec.interfaces.ranks import Ring, same_shape, tensor
from ringspec.problem.checks import (
    as_array,
    finite_or_minus_infinity,
    flag,
    float_array,
    is_integer,
)
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.problem.options import Options

LN2 = math.log(2.0)
M_MULTIPLE = 128
RING_AXES = "W batch seq heads head_dim"
PAIR_AXES = "W batch heads rows keys"
FLASH_AXES = "batch seq heads head_dim"

Window = int | tuple[int, int] | None


@dataclass(frozen=True)
class RingProblem:
    """One ring: its ranks, q [b, h, S, d], k and v [b, hkv, Sk, d] in global order, and its options."""

    ranks: Ring
    q: Array
    k: Array
    v: Array
    options: Options


@dataclass(frozen=True)
class Lengths:
    """Number of tokens in each row of a padded batch: ``q`` and ``k`` [b]."""

    q: Integers
    k: Integers
    inside: tuple[Booleans, Booleans]


def options_of(
    softmax_scale: float | None,
    dropout_prob: float,
    causal: bool,
    dropout_seed: int | None,
    sliding_window: Window,
    logits_soft_cap: float | None,
) -> Options:
    """Return the arguments that all functions of the interface share as options of the specification."""
    return {
        "scale": softmax_scale,
        "dropout_p": dropout_prob,
        "causal": flag(causal, "causal"),
        "dropout_seed": 0 if dropout_seed is None else dropout_seed,
        "window": window_of(sliding_window, causal),
        "softcap": logits_soft_cap,
    }


def window_of(sliding_window: Any, causal: bool) -> tuple[int, int] | None:
    """Return the window as (left, right), both inclusive, or None for no window.

    >>> window_of(3, True), window_of(3, False), window_of((2, 1), True), window_of((0, 0), False)
    ((3, 0), (3, 3), (2, 1), None)
    """
    if sliding_window is None:
        return None
    pair = isinstance(sliding_window, (tuple, list))
    sides = tuple(sliding_window) if pair else (sliding_window,)
    if not all(map(is_integer, sides)) or len(sides) != (2 if pair else 1) or min(sides) < 0:
        raise OptionError(
            "sliding_window as None, an int >= 0 or a pair (left, right) of ints >= 0",
            repr(sliding_window),
            "write sliding_window=None for no window",
            code="window",
        )
    left, right = (
        (int(x) for x in sides) if pair else (int(sides[0]), 0 if causal else int(sides[0]))
    )
    return None if (left, right) == (0, 0) else (left, right)


def ring_problems(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attention_mask: ArrayLike | None,
    bias: ArrayLike | None,
    options: Options,
    axis_name: str | None,
) -> list[RingProblem]:
    """Return the rings that the ranks form, each with tensors in global order.

    With an axis name, all ranks form one ring. Without it, each rank is a separate ring.
    """
    q, k, v = (
        tensor(x, name, RING_AXES) for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    check_heads(q.shape, k.shape, v.shape)
    refuse_bias_with_mask(bias, attention_mask)
    ranks, batch, n_q, heads, _ = q.shape
    n_k = k.shape[2]
    groups = rings_of_axis(axis_name, ranks)
    full = (ranks, batch, heads, n_q, len(groups[0]) * n_k)
    if bias is not None:
        bias = ring_pairs(tensor(bias, "bias", PAIR_AXES), "bias", full)
    if attention_mask is not None:
        attention_mask = ring_pairs(bool_array(attention_mask), "attention_mask", full)
    problems = []
    for group in groups:
        own: Options = {**options, "q_offset": len(group) * (n_k - n_q)}
        if bias is not None:
            own["bias"] = along_ring(np.asarray(bias), group)
        if attention_mask is not None:
            own["mask"] = along_ring(np.asarray(attention_mask), group)
        problems.append(
            RingProblem(
                group,
                along_ring(heads_first(q, "query"), group),
                along_ring(heads_first(k, "key"), group),
                along_ring(heads_first(v, "value"), group),
                own,
            )
        )
    return problems


def rings_of_axis(axis_name: Any, ranks: int) -> list[Ring]:
    """Return one ring of all ranks if there is an axis name; otherwise a separate ring for each rank.

    >>> rings_of_axis("ring", 2), rings_of_axis(None, 2)
    ([(0, 1)], [(0,), (1,)])
    """
    if axis_name is not None and not isinstance(axis_name, str):
        raise OptionError("axis_name as a str or None", repr(axis_name), "pass axis_name='ring'")
    if ranks < 1:
        raise ShapeError("a leading axis of W >= 1 ranks", "0 ranks", "stack one array per rank")
    return [(r,) for r in range(ranks)] if axis_name is None else [tuple(range(ranks))]


def heads_first(x: NDArray, what: str) -> Array:
    """Convert [..., s, h, d] to float64 [..., h, s, d]; all values must be finite."""
    return float_array(x.swapaxes(-3, -2), what)


def along_ring(x: NDArray, ranks: Ring) -> NDArray:
    """Join the parts [W, b, h, s, ...] of a ring's ranks to [b, h, W*s, ...], in rank order (rule LAYOUT-1)."""
    return np.concatenate([x[rank] for rank in ranks], axis=2)


def ring_pairs(x: NDArray, what: str, full: tuple[int, int, int, int, int]) -> NDArray:
    """Validate a bias or a mask [W, b|1, h|1, s, keys of the whole ring], or raise ShapeError."""
    ranks, batch, heads, n_q, n_k = full
    fits = (
        x.ndim == 5
        and x.shape[0] == ranks
        and x.shape[1] in (1, batch)
        and x.shape[2] in (1, heads)
        and x.shape[3:] == (n_q, n_k)
    )
    if not fits:
        raise ShapeError(
            f"{what} of shape [W, b|1, h|1, s, keys of the ring] = "
            f"[{ranks}, {batch}|1, {heads}|1, {n_q}, {n_k}]",
            f"shape {x.shape}",
            "give local rows and global keys; without axis_name the ring is one rank",
        )
    return x


def bool_array(attention_mask: Any) -> Booleans:
    values = as_array(attention_mask, "attention_mask")
    if values.dtype != np.bool_:
        raise DtypeError(
            "attention_mask of dtype bool, True = may attend",
            f"dtype {values.dtype}",
            "write attention_mask != 0, or pass additive values as bias",
        )
    return values


def refuse_bias_with_mask(bias: Any, attention_mask: Any) -> None:
    if bias is not None and attention_mask is not None:
        raise RefusedError(
            "bias or attention_mask, not both",
            "both",
            "write the mask into the bias as -inf",
        )


def check_heads(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    """Check that the shapes [..., batch, seq, heads, head_dim] of q, k, v are consistent."""
    if k != v:
        raise ShapeError("k and v of one shape", f"k {k}, v {v}", "axes are [batch, seq, heads, d]")
    if q[:-3] != k[:-3] or q[-1] != k[-1]:
        raise ShapeError(
            "q and k with the same ranks, batch and head_dim",
            f"q {q}, k {k}",
            "axes are [batch, seq, heads, head_dim]; ring functions have ranks before them",
        )
    if min(*q, *k) < 1:
        raise ShapeError("no empty axis", f"q {q}, k {k}", "give at least one token and one head")
    if q[-2] % k[-2] != 0:
        raise ShapeError(
            "query heads as a multiple of key/value heads",
            f"{q[-2]} and {k[-2]}",
            "axis 2 of [batch, seq, heads, head_dim] is heads",
            code="head-count",
        )


def check_flash_shapes(stored: dict[str, NDArray]) -> None:
    check_heads(stored["q"].shape, stored["k"].shape, stored["v"].shape)
    for name in ("dO", "o"):
        same_shape(name, stored[name], stored["q"].shape, FLASH_AXES)


def check_sinks_only(softmax_aux: Any, heads: int) -> None:
    """Validate sink logits [n] or [h, n], which must be finite.

    They have no other effect, because the lse that the caller passes as M already includes them.
    """
    if softmax_aux is None:
        return
    values = float_array(softmax_aux, "softmax_aux")
    if values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[0] != heads):
        raise ShapeError(
            f"softmax_aux of shape [n] or [{heads}, n]",
            f"shape {values.shape}",
            "give the sink logits for all heads, or one row per query head",
        )


def segment_ids(
    q_segment_ids: Any, kv_segment_ids: Any, batch: int, n_q: int, n_k: int
) -> tuple[NDArray, ...] | None:
    """Return segment ids [b, sq] and [b, sk]; if only one of the two is given, it is used for queries and keys."""
    if q_segment_ids is None and kv_segment_ids is None:
        return None
    for_q = kv_segment_ids if q_segment_ids is None else q_segment_ids
    for_k = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    checked = []
    for x, what, length in ((for_q, "q_segment_ids", n_q), (for_k, "kv_segment_ids", n_k)):
        values = as_array(x, what)
        if values.dtype.kind not in "iu":
            raise DtypeError(f"{what} of an integer dtype", f"dtype {values.dtype}", "use int32")
        same_shape(what, values, (batch, length), "batch seq")
        checked.append(values)
    return tuple(checked)


def whole_lengths(batch: int, n_q: int, n_k: int) -> Lengths:
    """Return the lengths of a batch whose rows have no padding."""
    return lengths_of(np.full(batch, n_q), np.full(batch, n_k), n_q, n_k)


def lengths_of(for_q: Integers, for_k: Integers, n_q: int, n_k: int) -> Lengths:
    inside_q, inside_k = np.arange(n_q) < for_q[:, None], np.arange(n_k) < for_k[:, None]
    return Lengths(for_q, for_k, (inside_q, inside_k))


def packed_lengths(
    cum_seqlens_q: Any, cum_seqlens_k: Any, batch: int, n_q: int, n_k: int
) -> Lengths | None:
    """Return the length of each row from cumulative lengths; None if there are no cumulative lengths."""
    if cum_seqlens_q is None and cum_seqlens_k is None:
        return None
    if cum_seqlens_q is None or cum_seqlens_k is None:
        raise RefusedError(
            "cum_seqlens_q and cum_seqlens_k together",
            "only " + ("cum_seqlens_k" if cum_seqlens_q is None else "cum_seqlens_q"),
            "pass both; the public kernel ignores one without the other",
        )
    return lengths_of(
        differences(cum_seqlens_q, "cum_seqlens_q", batch, n_q),
        differences(cum_seqlens_k, "cum_seqlens_k", batch, n_k),
        n_q,
        n_k,
    )


def differences(cum_seqlens: Any, what: str, batch: int, longest: int) -> Integers:
    """Return the differences of ``cum_seqlens`` [b + 1], which begins with 0; each must be from 0 to ``longest``."""
    values = as_array(cum_seqlens, what)
    if values.dtype.kind not in "iu" or values.shape != (batch + 1,):
        raise OptionError(
            f"{what} as integers of shape ({batch + 1},)",
            f"dtype {values.dtype}, shape {values.shape}",
            "give 0 and the cumulative length after each row of the padded batch",
            code="packing",
        )
    values = values.astype(np.int64)
    lengths = values[1:] - values[:-1]
    if values[0] != 0 or (lengths < 0).any() or (lengths > longest).any():
        raise OptionError(
            f"{what} that begins with 0, never decreases and grows by at most {longest} per row",
            str(values.tolist()),
            "row b of the padded batch holds cum[b + 1] - cum[b] tokens",
            code="packing",
        )
    return lengths


def refuse_with_packing(bias: Any, attention_mask: Any, segments: Any) -> None:
    for x, what in ((bias, "bias"), (attention_mask, "attention_mask"), (segments, "segment ids")):
        if x is not None:
            raise RefusedError(
                f"cum_seqlens without {what}", "both", f"drop {what}, or drop cum_seqlens"
            )


def read(x: NDArray, what: str, inside: Booleans) -> Array:
    """Convert [b, s, h, d] to float64 [b, h, s, d], with 0 for tokens that are not ``inside`` their row."""
    return heads_first(np.where(inside[:, :, None, None], load(x, what), 0.0), what)


def natural_lse(M: ArrayLike, inside: Booleans, shape: tuple[int, int, int]) -> Array:
    """Return the natural lse [b, h, sq] from the lse to base 2, whose length is sq rounded up to a multiple of 128."""
    batch, heads, length = shape
    stats = tensor(M, "M", "batch heads ceil128(seq)")
    padded = -(-length // M_MULTIPLE) * M_MULTIPLE
    same_shape("M", stats, (batch, heads, padded), "batch heads ceil128(seq)")
    rows = np.where(inside[:, None, :], load(stats, "M")[:, :, :length], 0.0)
    return finite_or_minus_infinity(rows, "M") * LN2
