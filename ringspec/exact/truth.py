"""Correctly rounded results of a problem, in every requested format.

Each result is the real number that the definition (docs/spec/index.md) gives, rounded once. The functions can also
return *row scales*: for each row, the unit in which its errors are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import NonFiniteError, OptionError, ShapeError, shown
from ringspec.exact.evaluate import (
    Groups,
    Seeds,
    backward_balls,
    block_backward_balls,
    forward_balls,
    given,
)
from ringspec.exact.integers import fixed
from ringspec.exact.logits import prepare
from ringspec.exact.merge_base2 import merge_balls, merge_scale_balls
from ringspec.exact.problem import Array, Problem, check_array
from ringspec.exact.rational import Prover
from ringspec.exact.rounding import Ball
from ringspec.exact.row_scale import scale_balls
from ringspec.exact.ziv import LADDER, SCALE_LADDER, Names, Tensors, ladder_for, settle
from ringspec.formats import format_of


@dataclass(frozen=True)
class Truth:
    """The correctly rounded results of one problem.

    ``tensors[name][format]``: each tensor in the storage dtype of each format. ``scales[name]``: row scales in float64.
    """

    tensors: Tensors
    scales: dict[str, NDArray] = field(default_factory=dict)


def forward(
    problem: Problem,
    formats: Sequence[str] = ("float64",),
    *,
    statistics: Sequence[str] | None = None,
    scales: bool = False,
) -> Truth:
    """Compute o [B, H, Sq, Dv] and lse [B, H, Sq], each correctly rounded to each format.

    ``formats``: names of :data:`ringspec.formats.FORMATS`. ``statistics``: formats of lse and dsinks, if they differ
    from ``formats``. ``scales``: whether to return the row scales [B, H, Sq] of o and lse as well. An empty row has
    o = 0 and lse = -inf. Raises UndecidedError if the rounding of an element cannot be decided.

    >>> q = np.zeros((1, 1, 1, 2)); v = np.array([[[[1.0], [2.0], [4.0]]]])
    >>> truth = forward(Problem(q, np.ones((1, 1, 3, 2)), v, 1.0), ("float64", "bfloat16"))
    >>> truth.tensors["o"]["float64"].item(), float(truth.tensors["o"]["bfloat16"].item())
    (2.3333333333333335, 2.328125)
    """
    names = check_formats(formats, statistics)
    prepared = prepare(problem)
    ladder = ladder_for(LADDER, problem.v)
    tensors = settle(lambda bits: forward_balls(prepared, bits), names, ladder, Prover(problem))
    result = Truth(with_empty_rows(tensors, problem))
    if not scales:
        return result
    return replace(
        result,
        scales=settled_scales(
            lambda bits: scale_balls(prepared, None, bits), Prover(problem).scale, problem.v
        ),
    )


def backward(
    problem: Problem,
    dy: Array,
    dlse: Array | None = None,
    formats: Sequence[str] = ("float64",),
    *,
    statistics: Sequence[str] | None = None,
    scales: bool = False,
    row_groups: NDArray | None = None,
    groups: int = 0,
) -> Truth:
    """Compute o, lse and dq, dk, dv, dsinks [H, N], dbias (in the bias's shape), each correctly rounded.

    dy [B, H, Sq, Dv] and dlse [B, H, Sq] are float64. ``problem``, ``formats``, ``statistics``, ``scales`` and errors
    are those of :func:`forward`. ``row_groups`` [Sq]: the worker of each query row (-1: none); ``groups``: the number W
    of workers. If both are given, the result also has ``dsinks_parts`` [W, H, N] and, if the bias is broadcast over
    rows, ``dbias_parts`` [W, ...]: the sums over the rows of each worker.

    >>> q = k = np.zeros((1, 1, 2, 1)); v = np.array([[[[1.0], [3.0]]]])
    >>> truth = backward(Problem(q, k, v, 1.0), np.ones((1, 1, 2, 1)))
    >>> truth.tensors["dv"]["float64"].ravel().tolist(), truth.tensors["dq"]["float64"].max().item()
    ([1.0, 1.0], 0.0)
    """
    names = check_formats(formats, statistics)
    dlse = check_seeds(problem, dy, dlse, "dlse")
    split = check_groups(problem, row_groups, groups)
    prepared, seeds = prepare(problem), Seeds(fixed(dy), fixed(dlse))
    prover = Prover(problem, dy, dlse, row_groups)
    tensors = settle(
        lambda bits: backward_balls(prepared, seeds, bits, split),
        names,
        ladder_for(LADDER, *factors(problem), dy, dlse),
        prover,
    )
    result = Truth(with_empty_rows(tensors, problem))
    if not scales:
        return result
    return replace(
        result,
        scales=settled_scales(
            lambda bits: scale_balls(prepared, seeds, bits, split),
            prover.scale,
            *factors(problem),
            dy,
            dlse,
        ),
    )


def block_backward(
    problem: Problem,
    dy: Array,
    lse: Array,
    delta: Array,
    formats: Sequence[str] = ("float64",),
    *,
    statistics: Sequence[str] | None = None,
    scales: bool = False,
    row_groups: NDArray | None = None,
    groups: int = 0,
) -> Truth:
    """Compute the gradients from given lse and delta [B, H, Sq] of the whole rows, with p = exp(s - lse).

    lse may be -inf (an empty row). A logit that exceeds lse by more than about 5400 raises OptionError. ``problem``,
    ``formats``, ``statistics``, ``scales``, ``row_groups`` and ``groups`` are as in :func:`backward`; the result has
    no o and lse.

    >>> q = k = np.zeros((1, 1, 1, 1)); v = dy = np.ones((1, 1, 1, 1))
    >>> truth = block_backward(Problem(q, k, v, 1.0), dy, np.ones((1, 1, 1)), np.zeros((1, 1, 1)))
    >>> truth.tensors["dv"]["float64"].item()  # 1/e
    0.36787944117144233
    """
    names = check_formats(formats, statistics)
    finite = np.where(np.isneginf(lse), 0.0, lse) if isinstance(lse, np.ndarray) else lse
    check_array(finite, "lse", problem.q.shape[:3])
    delta = check_seeds(problem, dy, delta, "delta")
    split = check_groups(problem, row_groups, groups)
    prepared, seed, by = prepare(problem), fixed(dy), given(lse, delta)
    tensors = settle(
        lambda bits: block_backward_balls(prepared, seed, by, bits, split),
        names,
        ladder_for(LADDER, *factors(problem), dy, delta),
        unproven,
    )
    if not scales:
        return Truth(tensors)
    seeds = Seeds(seed, fixed(np.zeros_like(delta)))
    return Truth(
        tensors,
        settled_scales(
            lambda bits: scale_balls(prepared, seeds, bits, split, by),
            unproven,
            *factors(problem),
            dy,
            delta,
        ),
    )


def merge(
    o: Array,
    lse: Array,
    formats: Sequence[str] = ("float64",),
    *,
    statistics: Sequence[str] | None = None,
    scales: bool = False,
    base: int | None = None,
) -> Truth:
    """Merge normalised partial results o [N, B, H, S, Dv], lse [N, B, H, S] (-inf: a part without keys).

    The merged results are lse = log sum_n exp(lse_n) and o = sum_n exp(lse_n - lse) o_n. For each row this is the same
    as attention of one query to N keys with the logits lse_n and the values o_n, so it is computed as such.
    ``formats``, ``statistics`` and ``scales`` are those of :func:`forward`. ``base``: 2 if the lse, given and returned, are
    logarithms to base 2; None: natural. Raises ShapeError, NonFiniteError, and OptionError for another base.

    >>> truth = merge(np.array([1.0, 3.0]).reshape(2, 1, 1, 1, 1), np.zeros((2, 1, 1, 1)))
    >>> truth.tensors["o"]["float64"].item()
    2.0
    """
    if o.ndim != 5 or lse.shape != o.shape[:4]:
        raise ShapeError(
            "o [N, B, H, S, Dv] and lse [N, B, H, S]",
            f"shapes {o.shape} and {lse.shape}",
            "stack the parts along a first axis",
        )
    if np.isnan(lse).any() or np.isposinf(lse).any():
        raise NonFiniteError(
            "an lse that is finite or -inf", "NaN or +inf", "write -inf for an empty row"
        )
    if base not in (None, 2):
        raise OptionError("base None or 2", shown(base), "convert the lse to natural logarithms")
    parts, batch, heads, length, width = o.shape
    shape = (batch, heads, length)
    rows = batch * heads * length  # each row becomes one batch entry
    values = np.moveaxis(o, 0, 3).reshape(rows, parts, width)
    weights = np.moveaxis(lse, 0, 3).reshape(rows, parts)
    names = check_formats(formats, statistics)
    if base == 2:
        truth = merge_in_base_2(values, weights, names, scales)
    else:
        nothing = np.zeros((rows, 1, 1, 1))
        bias = weights[:, None, None]
        keys = np.zeros((rows, 1, parts, 1))
        problem = Problem(nothing, keys, values[:, None], 1.0, bias=bias)
        truth = forward(problem, formats, statistics=statistics, scales=scales)
    return Truth(
        {
            "o": {name: x.reshape(*shape, width) for name, x in truth.tensors["o"].items()},
            "lse": {name: x.reshape(shape) for name, x in truth.tensors["lse"].items()},
        },
        {name: x.reshape(shape) for name, x in truth.scales.items()},
    )


def merge_in_base_2(o: Array, lse: Array, names: Names, scales: bool) -> Truth:
    """Return o [R, D], lse [R] and, if wanted, their row scales, of R rows with parts o [R, N, D] and lse [R, N]."""
    there = ~np.isneginf(lse)
    given = fixed(np.where(there[..., None], o, 0.0)), fixed(np.where(there, lse, 0.0)), there
    tensors = settle(
        lambda bits: merge_balls(*given, bits), names, ladder_for(LADDER, o, lse), unproven
    )
    for values in tensors["lse"].values():
        values[~there.any(axis=1)] = -np.inf
    if not scales:
        return Truth(tensors)
    return Truth(
        tensors,
        settled_scales(lambda bits: merge_scale_balls(*given, bits), unproven, o, lse),
    )


def unproven(tensor: str, index: tuple[int, ...]) -> Fraction | None:
    """Return None: if lse is an input, P is an exponential of inputs, so no element is provably rational."""
    return None


def factors(problem: Problem) -> tuple[NDArray | float, ...]:
    """Return the inputs by which P is multiplied in the gradients."""
    return problem.q, problem.k, problem.v, problem.scale


def settled_scales(
    evaluate: Callable[[int], dict[str, Ball]],
    prove: Callable[[str, tuple[int, ...]], Fraction | None],
    *by: NDArray | float,
) -> dict[str, NDArray]:
    tensors = settle(evaluate, lambda tensor: ("float64",), ladder_for(SCALE_LADDER, *by), prove)
    return {name: values["float64"] for name, values in tensors.items()}


def with_empty_rows(tensors: Tensors, problem: Problem) -> Tensors:
    """Set lse = -inf in rows that have no visible key and no sink."""
    if problem.sinks is not None and problem.sinks.shape[1] > 0:
        return tensors
    batch, heads = problem.q.shape[:2]
    for b in range(batch):
        for h in range(heads):
            empty = ~problem.mask(b, h, slice(None)).any(axis=1)
            for values in tensors["lse"].values():
                values[b, h, empty] = -np.inf
    return tensors


def check_formats(formats: Sequence[str], statistics: Sequence[str] | None) -> Names:
    """Check the names of formats; return a function from a tensor's name to its formats."""
    outputs = check_names(formats)
    others = outputs if statistics is None else check_names(statistics)
    return lambda tensor: others if tensor in ("lse", "dsinks", "dsinks_parts") else outputs


def check_names(formats: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(formats))
    if isinstance(formats, str) or not names:
        raise OptionError("a list of formats", shown(formats), "pass ('float64', 'bfloat16')")
    for name in names:
        if not format_of(name).has_infinity:
            raise OptionError("formats with an infinity", name, "choose bfloat16 or float16")
    return names


def check_seeds(problem: Problem, dy: Array, per_row: Array | None, what: str) -> Array:
    """Check that dy has the shape of o, and ``per_row`` one finite number for each query row; None means zeros."""
    check_array(dy, "dy", (*problem.q.shape[:3], problem.v.shape[3]))
    if per_row is None:
        return np.zeros(problem.q.shape[:3])
    check_array(per_row, what, problem.q.shape[:3])
    return per_row


def check_groups(problem: Problem, of_row: NDArray | None, count: int) -> Groups | None:
    if of_row is None:
        return None
    if (
        of_row.shape != problem.q.shape[2:3]
        or of_row.dtype.kind != "i"
        or of_row.max(initial=-1) >= count
    ):
        raise ShapeError(
            f"one group below {count} for each query row",
            f"{of_row.dtype} of shape {of_row.shape}",
            "pass integers [Sq] and groups=W",
        )
    return Groups(of_row, count)
