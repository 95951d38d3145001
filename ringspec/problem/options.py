"""The keywords that every function accepts, and their checks.

``attention``, ``attention_backward`` and ``ring`` accept exactly the keywords of :class:`Options`.
:func:`check` turns q, k, v and options into a :class:`~ringspec.problem.model.Problem`, or raises an
error that says what was expected, what was received and how to fix it. Code that runs after :func:`check` may
assume valid arguments.

:mod:`ringspec.spec.masks` and :mod:`ringspec.spec.dense_forward` define what each option does (MASK-9, FWD-1).
"""

from __future__ import annotations

import decimal
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import OptionError, ShapeError, refuse_unknown, shown
from ringspec.problem.checks import (
    LARGEST_POSITION,
    bool_pairs,
    check_bias,
    check_bounds,
    check_dropout,
    check_qkv,
    check_segments,
    check_sinks,
    check_softcap,
    check_window,
    finite_or_minus_infinity,
    flag,
    float_array,
    integer,
    number,
    position_rows,
)
from ringspec.problem.model import Columns, Problem, Rows, Terms

Window = int | tuple[int | None, int | None] | None


class Options(TypedDict, total=False):
    """The keywords of ``attention``, ``attention_backward`` and ``ring``, with defaults; shapes are in brackets.

    ``causal=False``          True: a key is visible if its position <= the query's position
    ``window=None``           (left, right): keys at most ``left`` positions earlier and ``right``
                          later are visible; None on a side: unbounded there; int w = (w, w)
    ``scale=None``            factor of the scores <q, k>; None: the float64 nearest to 1/sqrt(D)
    ``softcap=None``          number > 0: scores become softcap * tanh(z / softcap)
    ``bias=None``             float, broadcastable to [B, H, Sq, Sk], added to the scaled scores; -inf
                          masks the pair
    ``mask=None``             bool, broadcastable to [B, H, Sq, Sk]; True = may attend
    ``segments_q=None``       int [Sq] or [B, Sq]: document of each query, which attends only to keys of the
                          same document; negative = padding
    ``segments_k=None``       int [Sk] or [B, Sk]: document of each key; None: segments_q, if Sq == Sk
    ``cu_seqlens=None``       int [N + 1]: starts of N packed documents, and the end of the last one
    ``cu_seqlens_k=None``     the same for the keys; None: cu_seqlens
    ``bound_min=None``        int [Sq] or [B, Sq]: first key position that is visible to each query
    ``bound_max=None``        int [Sq] or [B, Sq]: one past the last visible key position
    ``sinks=None``            float [H] or [H, N]: logits that enter only the softmax denominator
    ``dropout_p=0.0``         probability of dropping an entry of P, 0 <= dropout_p < 1
    ``dropout_seed=0``        seed of the counter-based keep mask, 0 <= seed < 2**64
    ``keep=None``             bool, broadcastable to [B, H, Sq, Sk]: explicit keep mask, True = keep
    ``q_offset=0``            position of query 0; Sk - Sq aligns the last query with the last key
    ``positions_q=None``      int [Sq] or [B, Sq]: replaces the positions q_offset, q_offset + 1, ...
    ``positions_k=None``      int [Sk] or [B, Sk]: replaces the positions 0, 1, 2, ...
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

# Keywords of other libraries, where the nearest known name would mean something else.
INSTEAD = {
    "cp_offset": "leave it out: layout, worker and step decide it (ringspec.cp_offset shows it)",
    "softmax_scale": "write 'scale'",
    "cu_seqlens_q": "write 'cu_seqlens'",
    "seed": "write 'dropout_seed'",
    "recipe": "leave it out: ringspec.ring takes a recipe, dense attention rounds nothing",
    "workers": "leave it out: ringspec.ring takes it, dense attention has no workers",
    "layout": "leave it out: ringspec.ring takes it, dense attention has no workers",
    "dtype": "leave it out: ringspec.fast takes dtype, ringspec.exact takes formats=('float32',)",
}

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(function: Function) -> Function:
    """Decorate a function: refuse unknown keywords, suggest the nearest known one, and list the options in ``help``."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in DEFAULTS.items()
    ]
    known = {p.name for p in own + options}

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        refuse_unknown((name for name in keywords if name not in known), known, INSTEAD)
        return function(*arguments, **keywords)

    checked.__signature__ = signature.replace(parameters=own + options)  # type: ignore[attr-defined]
    return cast(Function, checked)


def default_scale(head_dim: int) -> float:
    """Return the float64 nearest to the real number 1/sqrt(D), where D is ``head_dim`` (FWD-2).

    >>> import math
    >>> default_scale(128) == 1 / math.sqrt(128)  # which rounds twice
    False
    """
    with decimal.localcontext(decimal.Context(prec=60)):
        return float(1 / decimal.Decimal(head_dim).sqrt())


def check(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Problem:
    """Check all arguments and return them as a Problem.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] of any float dtype; ``options``: a dict with the
    keywords of :class:`Options`. Raises OptionError, or another subclass of RingspecError.
    """
    refuse_unknown((name for name in options if name not in DEFAULTS), DEFAULTS, INSTEAD)
    values = DEFAULTS | options
    q, k, v = check_qkv(q, k, v)
    batch, heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    full = (batch, heads, n_q, n_k)
    q_offset = integer(values["q_offset"], "q_offset")
    if abs(q_offset) > LARGEST_POSITION:
        raise OptionError(
            "q_offset of at most 2**61 in magnitude",
            shown(q_offset),
            "subtract one number from all positions",
        )
    # MASK-8: positions, not indices, decide masks
    position_q = np.arange(n_q, dtype=np.int64)[None] + q_offset
    position_k = np.arange(n_k, dtype=np.int64)[None]
    if values["positions_q"] is not None:
        position_q = position_rows(values["positions_q"], "positions_q", batch, n_q)
    if values["positions_k"] is not None:
        position_k = position_rows(values["positions_k"], "positions_k", batch, n_k)
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
    problem: Problem, dy: Any, per_row: Any, what: str = "dlse"
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Validate dy [B, H, Sq, Dv] and ``per_row`` [B, H, Sq] (dlse or delta; None: zeros); return them as float64."""
    batch, heads, n_q, _ = problem.q.shape
    dy = float_array(dy, "dy", rank=4)
    if dy.shape != (batch, heads, n_q, problem.v.shape[3]):
        raise ShapeError(
            f"dy of o's shape {(batch, heads, n_q, problem.v.shape[3])}",
            f"shape {dy.shape}",
            "pass the gradient of the loss with respect to o, [B, H, Sq, Dv]",
        )
    if per_row is None:
        return dy, np.zeros((batch, heads, n_q))
    return dy, row_array(problem, float_array(per_row, what, rank=3), what)


def row_array(problem: Problem, x: NDArray[np.float64], what: str) -> NDArray[np.float64]:
    """Validate an array ``x`` with one number per query row, [B, H, Sq], and return it."""
    if x.shape != problem.q.shape[:3]:
        raise ShapeError(
            f"{what} of shape [B, H, Sq] = {problem.q.shape[:3]}",
            f"shape {x.shape}",
            f"pass one {what} per batch entry, query head and query",
        )
    return x


def check_lse(problem: Problem, lse: Any) -> NDArray[np.float64]:
    """Validate lse [B, H, Sq] and return it as float64; -inf marks an empty row."""
    return row_array(problem, finite_or_minus_infinity(lse, "lse", rank=3), "lse")
