"""The options that every function takes, under one name each, and their checks.

``attention``, ``attention_backward`` and ``ring`` accept exactly the keywords of :class:`Options`;
:func:`check` turns q, k, v and options into a :class:`~ringspec.spec.problem.Problem`, or raises an
error that says what was expected, what came and how to mend it. Everything behind this module may
assume that its arguments are right.
"""

from __future__ import annotations

import decimal
import inspect
import math
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import (
    BoundsError,
    DropoutError,
    DtypeError,
    HeadCountError,
    NonFiniteError,
    OptionError,
    PackingError,
    ShapeError,
    WindowError,
    refuse_unknown,
)
from ringspec.formats import load
from ringspec.spec.problem import Columns, Problem, Rows, Terms

Window = int | tuple[int | None, int | None] | None


class Options(TypedDict, total=False):
    """Keywords of every function, with their defaults (shapes in brackets, S = Sq or Sk).

    ``causal=False``          a key is visible when its position is not behind the query's
    ``window=None``           int w = (w, w), or (left, right); None on a side = unbounded there
    ``scale=None``            factor of <q, k>; default the float64 nearest to 1/sqrt(D)
    ``softcap=None``          s = softcap * tanh(z / softcap); a positive number
    ``bias=None``             float, broadcastable to [B, H, Sq, Sk]; -inf masks the pair
    ``mask=None``             bool, broadcastable to [B, H, Sq, Sk]; True = may attend
    ``segments_q=None``       int [Sq] or [B, Sq]; negative = padding
    ``segments_k=None``       int [Sk] or [B, Sk]; default segments_q, where Sq == Sk
    ``cu_seqlens=None``       int [N + 1]: starts of packed documents, and the last one's end
    ``cu_seqlens_k=None``     the same for the keys; default cu_seqlens
    ``bound_min=None``        int [Sq] or [B, Sq]: first key position that a query may see
    ``bound_max=None``        int [Sq] or [B, Sq]: the position behind the last
    ``sinks=None``            float [H] or [H, N]: logits in the denominator only
    ``dropout_p=0.0``         probability in [0, 1) of dropping an entry of P
    ``dropout_seed=0``        seed of the counter-based keep mask, 0 <= seed < 2**64
    ``keep=None``             bool, broadcastable to [B, H, Sq, Sk]: a keep mask of your own
    ``q_offset=0``            position of query 0 (Sk - Sq aligns the ends)
    ``positions_q=None``      int [Sq] or [B, Sq]: replaces 0, 1, 2, ... + q_offset
    ``positions_k=None``      int [Sk] or [B, Sk]: replaces 0, 1, 2, ...
    """

    causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    bias: ArrayLike | None
    mask: ArrayLike | None
    segments_q: ArrayLike | None
    segments_k: ArrayLike | None
    cu_seqlens: ArrayLike | None
    cu_seqlens_k: ArrayLike | None
    bound_min: ArrayLike | None
    bound_max: ArrayLike | None
    sinks: ArrayLike | None
    dropout_p: float
    dropout_seed: int
    keep: ArrayLike | None
    q_offset: int
    positions_q: ArrayLike | None
    positions_k: ArrayLike | None


DEFAULTS: dict[str, Any] = dict.fromkeys(Options.__annotations__) | {
    "causal": False,
    "dropout_p": 0.0,
    "dropout_seed": 0,
    "q_offset": 0,
}

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(function: Function) -> Function:
    """Show the options in the signature that ``help`` and notebooks display."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in DEFAULTS.items()
    ]
    function.__signature__ = signature.replace(parameters=own + options)  # type: ignore[attr-defined]
    return function


def default_scale(head_dim: int) -> float:
    """The float64 nearest to the real number 1/sqrt(D) (rule FWD-2).

    >>> default_scale(128) == 1 / math.sqrt(128)  # two roundings miss it
    False
    """
    with decimal.localcontext(decimal.Context(prec=60)):
        return float(1 / decimal.Decimal(head_dim).sqrt())


def as_array(x: Any, what: str) -> NDArray:
    """``x`` as a NumPy array of a plain dtype, or a DtypeError."""
    try:
        values = x if isinstance(x, np.ndarray) else np.asarray(x)
    except Exception as cause:  # ragged lists, tensors on a device, anything with a hostile hook
        raise DtypeError(
            f"{what} that NumPy can read as an array",
            f"{type(x).__name__} ({cause})",
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
    """Float input as a float64 array of that rank, without NaN and (if asked) infinities."""
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


def int_rows(x: Any, what: str, batch: int, length: int) -> NDArray[np.int64]:
    """Integers [S] or [B, S] as an int64 array [1, S] or [B, S]."""
    values = as_array(x, what)
    if values.dtype.kind not in "iu":
        raise DtypeError(f"{what} of an integer dtype", f"dtype {values.dtype}", "use int64")
    if values.dtype == np.uint64 and (values > np.uint64(2**63 - 1)).any():
        raise OptionError(f"{what} below 2**63", "a larger value", "use int64")
    if values.shape not in ((length,), (1, length), (batch, length)):
        raise ShapeError(
            f"{what} of shape ({length},) or ({batch}, {length})",
            f"shape {values.shape}",
            "give one integer per token, for all batches or for each",
        )
    return values.astype(np.int64).reshape(-1, length)


def pair_array(x: NDArray, what: str, full: tuple[int, int, int, int]) -> NDArray:
    """An array that broadcasts to [B, H, Sq, Sk], with leading axes of 1 added."""
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
    values = as_array(x, what)
    if values.dtype != np.bool_:
        raise DtypeError(
            f"{what} of dtype bool, True = keep the pair",
            f"dtype {values.dtype}",
            f"write {what} != 0, or pass additive values as bias",
        )
    return pair_array(values, what, full)


def number(x: Any, what: str) -> float:
    """A finite real number as float."""
    ok = isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)
    if not ok or not math.isfinite(float(x)):
        raise OptionError(f"{what} as a finite number", repr(x), "pass a float")
    return float(x)


def integer(x: Any, what: str) -> int:
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool):
        raise OptionError(f"{what} as an integer", repr(x), "pass an int")
    return int(x)


def flag(x: Any, what: str) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise OptionError(f"{what} as True or False", repr(x), f"write {what}=True")
    return bool(x)


def check_window(window: Any) -> tuple[int | None, int | None] | None:
    """(left, right) of a sliding window; None when no side is bounded (MASK-2)."""
    if window is None:
        return None
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    right_kind = all(
        side is None or (isinstance(side, (int, np.integer)) and not isinstance(side, bool))
        for side in sides
    )
    if len(sides) != 2 or not right_kind or any(side is not None and side < 0 for side in sides):
        raise WindowError(
            "window as None, an int >= 0 or a pair (left, right) of such, None = unbounded side",
            repr(window),
            "write window=(left, right); -1 for 'unbounded' is written None here",
        )
    left, right = (None if side is None else int(side) for side in sides)
    return None if left is None and right is None else (left, right)


def segments_from_cu_seqlens(cu_seqlens: Any, length: int, what: str) -> NDArray[np.int64]:
    """Document number of each token; -1 behind the last document (MASK-5).

    >>> segments_from_cu_seqlens([0, 2, 3], 4, "cu_seqlens").tolist()
    [0, 0, 1, -1]
    """
    starts = as_array(cu_seqlens, what)
    if starts.dtype.kind not in "iu" or starts.ndim != 1:
        raise PackingError(
            f"{what} as a 1-D array of integers",
            f"dtype {starts.dtype}, shape {starts.shape}",
            "give the cumulative lengths, beginning with 0",
        )
    starts = starts.astype(np.int64)
    ordered = starts.size >= 1 and starts[0] == 0 and bool((np.diff(starts) >= 0).all())
    if not ordered or starts[-1] > length:
        raise PackingError(
            f"{what} that begins with 0, never falls and ends at most at {length}",
            str(starts.tolist()),
            "give the cumulative lengths of the documents in order",
        )
    segments = np.full(length, -1, dtype=np.int64)
    for document in range(starts.size - 1):
        segments[starts[document] : starts[document + 1]] = document
    return segments


def check_segments(
    values: dict[str, Any], batch: int, n_q: int, n_k: int
) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Segment ids of queries and keys from segments_* or cu_seqlens*."""
    by_segments = values["segments_q"] is not None or values["segments_k"] is not None
    by_packing = values["cu_seqlens"] is not None or values["cu_seqlens_k"] is not None
    if by_segments and by_packing:
        raise OptionError(
            "segments_q/segments_k or cu_seqlens, not both",
            "both",
            "drop one: cu_seqlens is a way to write segments",
        )
    if by_packing:
        if values["cu_seqlens"] is None:
            raise PackingError(
                "cu_seqlens with cu_seqlens_k", "cu_seqlens_k alone", "pass cu_seqlens as well"
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
    low, high = values["bound_min"], values["bound_max"]
    if low is None and high is None:
        return None, None
    if low is None or high is None:
        raise BoundsError(
            "bound_min and bound_max together",
            "only " + ("bound_max" if low is None else "bound_min"),
            "pass both: bound_min <= key position < bound_max",
        )
    return int_rows(low, "bound_min", batch, n_q), int_rows(high, "bound_max", batch, n_q)


def check_bias(x: Any, full: tuple[int, int, int, int]) -> NDArray[np.float64] | None:
    if x is None:
        return None
    values = float_array(x, "bias", finite=False)
    if np.isnan(values).any() or np.isposinf(values).any():
        raise NonFiniteError(
            "bias of finite values or -inf", "NaN or +inf", "write -inf for a masked pair"
        )
    return pair_array(values, "bias", full)


def check_sinks(x: Any, heads: int) -> NDArray[np.float64] | None:
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
    p = number(values["dropout_p"], "dropout_p")
    seed = integer(values["dropout_seed"], "dropout_seed")
    if not 0 <= p < 1:
        raise DropoutError("0 <= dropout_p < 1", str(p), "dropout_p is the share that is dropped")
    if not 0 <= seed < 2**64:
        raise DropoutError("0 <= dropout_seed < 2**64", str(seed), "take the seed modulo 2**64")
    return p, seed


def check_softcap(x: Any) -> float | None:
    if x is None:
        return None
    softcap = number(x, "softcap")
    if not softcap > 0:
        raise OptionError("softcap > 0", str(softcap), "pass softcap=None for no soft cap")
    return softcap


def check_qkv(q: Any, k: Any, v: Any) -> tuple[NDArray[np.float64], ...]:
    """q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] as float64."""
    q, k, v = (float_array(x, what, rank=4) for x, what in ((q, "q"), (k, "k"), (v, "v")))
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(
            "k and v with the same [B, Hkv, Sk]",
            f"k {k.shape} and v {v.shape}",
            "the order of axes is [B, H, S, D] for both",
        )
    if q.shape[0] != k.shape[0]:
        raise ShapeError("q and k with the same B", f"q {q.shape}, k {k.shape}", "axis 0 is B")
    if q.shape[3] != k.shape[3]:
        raise ShapeError("q and k with the same D", f"q {q.shape}, k {k.shape}", "axis 3 is D")
    if min(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3]) < 1:
        raise ShapeError(
            "B, H, D >= 1", f"q {q.shape}, k {k.shape}, v {v.shape}", "S alone may be 0"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise HeadCountError(
            "query heads H as a multiple of key/value heads Hkv",
            f"H = {q.shape[1]}, Hkv = {k.shape[1]}",
            "axis 1 is H; query head h uses key head h // (H // Hkv)",
        )
    return q, k, v


def check(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Problem:
    """Check everything and return the problem as the specification sees it."""
    refuse_unknown((name for name in options if name not in DEFAULTS), DEFAULTS)
    values = DEFAULTS | options
    q, k, v = check_qkv(q, k, v)
    batch, heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    full = (batch, heads, n_q, n_k)
    q_offset = integer(values["q_offset"], "q_offset")
    # MASK-8: positions, not indices, decide masks
    position_q = np.arange(n_q, dtype=np.int64)[None] + q_offset
    position_k = np.arange(n_k, dtype=np.int64)[None]
    if values["positions_q"] is not None:
        position_q = int_rows(values["positions_q"], "positions_q", batch, n_q)
    if values["positions_k"] is not None:
        position_k = int_rows(values["positions_k"], "positions_k", batch, n_k)
    segment_q, segment_k = check_segments(values, batch, n_q, n_k)
    bound_min, bound_max = check_bounds(values, batch, n_q)
    bias = check_bias(values["bias"], full)
    dropout_p, dropout_seed = check_dropout(values)
    scale = default_scale(head_dim) if values["scale"] is None else number(values["scale"], "scale")
    terms = Terms(
        heads=heads,
        kv_heads=k.shape[1],
        scale=scale,
        causal=flag(values["causal"], "causal"),
        window=check_window(values["window"]),
        softcap=check_softcap(values["softcap"]),
        sinks=check_sinks(values["sinks"], heads),
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )
    mask, keep = (
        None if values[name] is None else bool_pairs(values[name], name, full)
        for name in ("mask", "keep")
    )
    rows = Rows(
        np.arange(n_q, dtype=np.int64),
        position_q,
        segment_q,
        bound_min,
        bound_max,
        bias,
        mask,
        keep,
    )
    columns = Columns(np.arange(n_k, dtype=np.int64), position_k, segment_k)
    return Problem(q, k, v, rows, columns, terms)


def check_gradients(
    problem: Problem, dy: Any, dlse: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """dy [B, H, Sq, Dv] and dlse [B, H, Sq] (None = zeros) as float64."""
    batch, heads, n_q, _ = problem.q.shape
    dy = float_array(dy, "dy", rank=4)
    if dy.shape != (batch, heads, n_q, problem.v.shape[3]):
        raise ShapeError(
            f"dy of o's shape {(batch, heads, n_q, problem.v.shape[3])}",
            f"shape {dy.shape}",
            "dy is the gradient of the loss with respect to o, [B, H, Sq, Dv]",
        )
    if dlse is None:
        return dy, np.zeros((batch, heads, n_q))
    dlse = float_array(dlse, "dlse", rank=3)
    if dlse.shape != (batch, heads, n_q):
        raise ShapeError(
            f"dlse of lse's shape {(batch, heads, n_q)}",
            f"shape {dlse.shape}",
            "dlse is the gradient of the loss with respect to lse, [B, H, Sq]",
        )
    return dy, dlse
