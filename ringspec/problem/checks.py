"""Checks of single arguments. An error says what was expected, what was received and how to fix it.

Each function takes one argument, or a few that belong together, as the caller gave them. It returns them in the form
that the specification works with, or raises a subclass of RingspecError. ``what`` names the argument in the error.

Sizes: B batches, H query heads, Hkv key heads, Sq queries, Sk keys, D entries of a query or key, Dv of a value, N sinks
of a head, W workers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import (
    DtypeError,
    LayoutError,
    NonFiniteError,
    OptionError,
    ShapeError,
    described,
    shown,
)
from ringspec.formats import load

LARGEST_POSITION = 2**61
LARGEST_RING = 2**16


def as_array(x: Any, what: str) -> NDArray:
    """Return ``x`` as a plain NumPy array of numbers; DtypeError for anything else."""
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            f"{what} as a plain array", "a masked array", "pass .data, and the mask as mask="
        )
    try:
        values = np.asarray(x)
    except Exception as cause:  # ragged lists, tensors on a device, any object whose hooks raise
        raise DtypeError(
            f"{what} that NumPy can read as an array",
            described(x, cause),
            "pass a rectangular NumPy array",
        ) from None
    if values.dtype == object:
        raise DtypeError(
            f"{what} of numbers", "dtype object", "pass a rectangular array of one number type"
        )
    return values


def float_array(
    x: Any, what: str, rank: int | None = None, finite: bool = True
) -> NDArray[np.float64]:
    """Validate a float array of ``rank`` axes (None: any number) and return it as float64.

    If ``finite``, NaN and infinities are refused.
    """
    values = load(as_array(x, what), what)
    if rank is not None and values.ndim != rank:
        names = {3: "[B, H, S]", 4: "[B, H, S, D]"}
        raise ShapeError(
            f"{what} of rank {rank}" + (f" {names[rank]}" if rank in names else ""),
            f"shape {values.shape}",
            "add or drop axes with reshape",
        )
    if finite and not np.isfinite(values).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise NonFiniteError(
            f"finite values in {what}",
            f"{values[where]} at {where}",
            "mask padding instead of storing NaN or infinity in it",
        )
    return values


def int_array(x: Any, what: str) -> NDArray[np.int64]:
    """Validate an array of integers and return it as a new int64 array."""
    values = as_array(x, what)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"{what} of an integer dtype", f"dtype {values.dtype}", "use int64")
    if values.size and int(values.max()) >= 2**63:
        raise OptionError(f"{what} below 2**63", shown(int(values.max())), "use int64")
    return values.astype(np.int64, order="C")


def int_rows(x: Any, what: str, batch: int, length: int) -> NDArray[np.int64]:
    """Validate integers [S] or [B, S] and return them as int64 [1, S] or [B, S]."""
    values = int_array(x, what)
    if values.shape not in ((length,), (1, length), (batch, length)):
        raise ShapeError(
            f"{what} of shape ({length},) or ({batch}, {length})",
            f"shape {values.shape}",
            "pass one integer per token, for all batch entries or for each",
        )
    return values if values.ndim == 2 else values[None]


def position_rows(x: Any, what: str, batch: int, length: int) -> NDArray[np.int64]:
    """Validate positions as :func:`int_rows` does. Magnitudes are at most 2**61, so that no difference overflows."""
    values = int_rows(x, what, batch, length)
    if values.size and not (-LARGEST_POSITION <= values.min() and values.max() <= LARGEST_POSITION):
        raise OptionError(
            f"{what} of at most 2**61 in magnitude",
            "a larger position",
            "subtract one number from all positions",
        )
    return values


def pair_array(x: NDArray, what: str, full: tuple[int, int, int, int]) -> NDArray:
    """Validate an array that broadcasts to ``full`` = [B, H, Sq, Sk] and return it with four axes."""
    shape = (1,) * (4 - x.ndim) + x.shape
    fits = len(shape) == 4 and all(n in (1, m) for n, m in zip(shape, full, strict=True))
    if not fits:
        raise ShapeError(
            f"{what} broadcastable to [B, H, Sq, Sk] = {full}",
            f"shape {x.shape}",
            "give each axis its full length or 1",
        )
    return x.reshape(shape)


def bool_pairs(x: Any, what: str, full: tuple[int, int, int, int]) -> NDArray[np.bool_]:
    """Validate a bool array that broadcasts to the shape ``full`` (True = keep the pair); return a copy."""
    values = as_array(x, what)
    if values.dtype != np.bool_:
        raise DtypeError(
            f"{what} of dtype bool, True = keep the pair",
            f"dtype {values.dtype}",
            f"write {what} != 0, or pass additive values as bias",
        )
    return pair_array(values, what, full).copy()


def number(x: Any, what: str) -> float:
    """Validate a finite real number and return it as a float."""
    ok = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
    try:
        if ok and math.isfinite(float(x)):
            return float(x)
    except OverflowError:  # an int beyond float64
        pass
    raise OptionError(f"{what} as a finite number", shown(x), "pass a float")


def is_integer(x: Any) -> bool:
    """Return whether ``x`` is an int or a NumPy integer, and not a bool."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def integer(x: Any, what: str) -> int:
    """Validate an integer and return it as an int."""
    if not is_integer(x):
        raise OptionError(f"{what} as an integer", shown(x), "pass an int")
    return int(x)


def length_of(x: Any, what: str = "S") -> int:
    """Validate a number of tokens, an integer >= 0, and return it as an int."""
    if not is_integer(x) or not 0 <= x < 2**62:
        raise LayoutError(f"{what} as an integer >= 0", shown(x), "pass the number of tokens")
    return int(x)


def check_workers(workers: Any) -> int:
    """Validate W (1 to 65536) and return it as an int."""
    if not is_integer(workers) or not 1 <= workers <= LARGEST_RING:
        raise LayoutError(
            f"W >= 1 workers, and at most {LARGEST_RING}",
            shown(workers),
            "pass workers=1 or more",
            code="worker-count",
        )
    return int(workers)


def function(x: Any, what: str) -> Any:
    """Validate that ``x`` is callable and return it."""
    if not callable(x):
        raise OptionError(f"{what} as a function", shown(x), f"pass a function as {what}")
    return x


def flag(x: Any, what: str) -> bool:
    """Validate an argument that must be True or False, and return it as a bool."""
    if not isinstance(x, (bool, np.bool_)):
        raise OptionError(f"{what} as True or False", shown(x), f"write {what}=True")
    return bool(x)


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    """Validate a sliding window and return it as (left, right); None if no side is bounded (MASK-2)."""
    if window is None:
        return None
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    right_kind = all(side is None or is_integer(side) for side in sides)
    if len(sides) != 2 or not right_kind or any(side is not None and side < 0 for side in sides):
        raise OptionError(
            "window as None, an int >= 0 or a pair (left, right) of ints >= 0 or None",
            shown(window),
            "write window=(left, right), with None (not -1) for an unbounded side",
            code="window",
        )
    left, right = (None if side is None else int(side) for side in sides)
    return None if left is None and right is None else (left, right)


def segments_from_cu_seqlens(cu_seqlens: Any, length: int, what: str) -> NDArray[np.int64]:
    """Return the document number of each token, from the starts of the documents; -1 after the last document (MASK-5).

    >>> segments_from_cu_seqlens([0, 2, 3], 4, "cu_seqlens").tolist()
    [0, 0, 1, -1]
    """
    values = as_array(cu_seqlens, what)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise OptionError(
            f"{what} as a 1-D array of integers",
            f"dtype {values.dtype}, shape {values.shape}",
            "give the cumulative lengths, beginning with 0",
            code="packing",
        )
    starts = int_array(values, what)
    ordered = starts.size >= 1 and starts[0] == 0 and bool((starts[1:] >= starts[:-1]).all())
    if not ordered or starts[-1] > length:
        raise OptionError(
            f"{what} that begins with 0, never decreases and ends at most at {length}",
            shown(starts.tolist()),
            "give the cumulative lengths of the documents in order",
            code="packing",
        )
    segments = np.full(length, -1, dtype=np.int64)
    for document in range(starts.size - 1):
        segments[starts[document] : starts[document + 1]] = document
    return segments


def check_segments(
    values: dict[str, Any], batch: int, n_q: int, n_k: int
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Validate the segments or cu_seqlens in ``values``, and return the segment ids of queries and keys, or None.

    A segment id is the document number of a token; a negative id is padding.
    """
    by_segments = values["segments_q"] is not None or values["segments_k"] is not None
    by_packing = values["cu_seqlens"] is not None or values["cu_seqlens_k"] is not None
    if by_segments and by_packing:
        raise OptionError(
            "segments_q/segments_k or cu_seqlens, not both",
            "both",
            "leave one out: cu_seqlens is another form of segments",
        )
    if by_packing:
        if values["cu_seqlens"] is None:
            raise OptionError(
                "cu_seqlens with cu_seqlens_k",
                "cu_seqlens_k alone",
                "pass cu_seqlens as well",
                code="packing",
            )
        for_k = values["cu_seqlens"] if values["cu_seqlens_k"] is None else values["cu_seqlens_k"]
        segments_q = segments_from_cu_seqlens(values["cu_seqlens"], n_q, "cu_seqlens")
        segments_k = segments_from_cu_seqlens(for_k, n_k, "cu_seqlens_k")
        return segments_q[None], segments_k[None]
    if not by_segments:
        return None, None
    given_k = values["segments_q"] if values["segments_k"] is None else values["segments_k"]
    if values["segments_q"] is None:
        raise OptionError("segments_q with segments_k", "segments_k alone", "pass segments_q")
    return (
        int_rows(values["segments_q"], "segments_q", batch, n_q),
        int_rows(given_k, "segments_k", batch, n_k),
    )


def check_bounds(
    values: dict[str, Any], batch: int, n_q: int
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Validate bound_min and bound_max and return them as int64 rows; None for both if neither is given."""
    low, high = values["bound_min"], values["bound_max"]
    if low is None and high is None:
        return None, None
    if low is None or high is None:
        raise OptionError(
            "bound_min and bound_max together",
            "only " + ("bound_max" if low is None else "bound_min"),
            "pass both: bound_min <= key position < bound_max",
            code="bounds",
        )
    return int_rows(low, "bound_min", batch, n_q), int_rows(high, "bound_max", batch, n_q)


def finite_or_minus_infinity(x: Any, what: str, rank: int | None = None) -> NDArray[np.float64]:
    """Validate a float array that may contain -inf, but not NaN or +inf, and return it as float64."""
    values = float_array(x, what, rank, finite=False)
    if np.isnan(values).any() or np.isposinf(values).any():
        raise NonFiniteError(
            f"{what} of finite values or -inf",
            "NaN or +inf",
            "write -inf for a masked pair or an empty row",
        )
    return values


def check_bias(x: Any, full: tuple[int, int, int, int]) -> NDArray[np.float64] | None:
    """Validate a bias and return it as float64; -inf hides a pair, None stays None."""
    return None if x is None else pair_array(finite_or_minus_infinity(x, "bias"), "bias", full)


def check_partial(o: Any, lse: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Validate o [B, H, S, Dv] and lse [B, H, S] of one partial result and return them as float64."""
    o = float_array(o, "o", rank=4)
    lse = finite_or_minus_infinity(lse, "lse", rank=3)
    if o.shape[:3] != lse.shape:
        raise ShapeError(
            "lse of o's shape without the last axis",
            f"o {o.shape}, lse {lse.shape}",
            "pass o [B, H, Sq, Dv] and lse [B, H, Sq] of one call",
        )
    return o, lse


def check_partials(parts: Any) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Validate a list of partial results (o, lse) and return their arrays as float64."""
    pairs = isinstance(parts, (list, tuple)) and all(
        isinstance(part, (list, tuple)) and len(part) == 2 for part in parts
    )
    if not pairs:
        raise ShapeError("a list of pairs (o, lse)", shown(parts), "pass [(o_0, lse_0), ...]")
    return [check_partial(o, lse) for o, lse in parts]


def check_sinks(x: Any, heads: int) -> NDArray[np.float64] | None:
    """Validate sinks and return them as float64 [H, N]; None stays None."""
    if x is None:
        return None
    values = float_array(x, "sinks")
    if values.ndim not in (1, 2) or values.shape[0] != heads or values.size == 0:
        raise ShapeError(
            f"sinks of shape ({heads},) or ({heads}, N)",
            f"shape {values.shape}",
            "give one or several logits per query head",
        )
    return values.reshape(heads, -1)


def check_dropout(values: dict[str, Any]) -> tuple[float, int]:
    """Validate dropout_p and dropout_seed and return them as a float and an int."""
    p = number(values["dropout_p"], "dropout_p")
    seed = integer(values["dropout_seed"], "dropout_seed")
    if not 0 <= p < 1:
        raise OptionError(
            "0 <= dropout_p < 1",
            str(p),
            "pass the probability that an entry is dropped",
            code="dropout",
        )
    if not 0 <= seed < 2**64:
        raise OptionError(
            "0 <= dropout_seed < 2**64", shown(seed), "take the seed modulo 2**64", code="dropout"
        )
    return p, seed


def check_softcap(x: Any) -> float | None:
    """Validate a soft cap > 0 and return it as a float; None stays None."""
    if x is None:
        return None
    softcap = number(x, "softcap")
    if not softcap > 0:
        raise OptionError("softcap > 0", str(softcap), "pass softcap=None for no soft cap")
    return softcap


def check_qkv(q: Any, k: Any, v: Any) -> tuple[NDArray[np.float64], ...]:
    """Validate q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] and return them as float64."""
    q, k, v = (float_array(x, what, rank=4) for x, what in ((q, "q"), (k, "k"), (v, "v")))
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            "k and v with the same [B, Hkv, Sk]",
            f"k {k.shape} and v {v.shape}",
            "pass both as [B, Hkv, S, D or Dv]",
        )
    if q.shape[0] != k.shape[0]:
        raise ShapeError(
            "q and k with the same B",
            f"q {q.shape}, k {k.shape}",
            "pass the same batch size; axis 0 is B",
        )
    if q.shape[3] != k.shape[3]:
        raise ShapeError(
            "q and k with the same D",
            f"q {q.shape}, k {k.shape}",
            "pass the same head dimension; axis 3 is D",
        )
    if min(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3]) < 1:
        raise ShapeError(
            "B, H, D >= 1",
            f"q {q.shape}, k {k.shape}, v {v.shape}",
            "pass nonempty axes; only S may be 0",
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ShapeError(
            "query heads H as a multiple of key/value heads Hkv",
            f"H = {q.shape[1]}, Hkv = {k.shape[1]}",
            "axis 1 is H; query head h uses key head h // (H // Hkv)",
            code="head-count",
        )
    return q, k, v
