"""Code that all interfaces share: ranks and rings, storage dtypes, and a backward pass from given o and lse."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import DtypeError, RefusedError, ShapeError
from ringspec.formats import name_of, store
from ringspec.problem.checks import as_array, check_workers
from ringspec.problem.model import Array, Problem
from ringspec.problem.options import check_gradients
from ringspec.recipes import Recipe
from ringspec.rings.layouts import unshard
from ringspec.rings.lockstep import Moment
from ringspec.rings.ring import run_backward
from ringspec.rings.run import WorkerResult
from ringspec.rings.schedules import backward_schedule
from ringspec.spec.block import block_backward
from ringspec.spec.layout import Layout

Ring = tuple[int, ...]

STORAGE = ("bfloat16", "float16", "float32", "float64")


def format_name(dtype: Any, what: str) -> str:
    """Return the name of the number format of a dtype, given as a NumPy dtype, a scalar type or a name.

    >>> format_name("bfloat16", "lse_dtype"), format_name(np.float32, "lse_dtype")
    ('bfloat16', 'float32')
    """
    if isinstance(dtype, str) and dtype in STORAGE:
        return dtype
    try:
        if dtype is None:  # NumPy would read None as float64
            raise TypeError
        name = name_of(np.dtype(dtype).newbyteorder("="))
    except TypeError:
        name = None
    if name not in STORAGE:
        raise DtypeError(
            f"{what} as one of {', '.join(STORAGE)}",
            str(dtype),
            f"pass {what} as a NumPy or ml_dtypes dtype, or one of these names",
        )
    return name


def tensor(x: Any, what: str, axes: str) -> NDArray:
    """Validate a floating-point array with the named axes and return it in its own dtype.

    >>> tensor(np.zeros((2, 3), np.float32), "lse", "ranks s").dtype
    dtype('float32')
    """
    values = as_array(x, what)
    format_name(values.dtype, f"the dtype of {what}")
    if values.ndim != len(axes.split()):
        raise ShapeError(
            f"{what} with axes [{axes.replace(' ', ', ')}]",
            f"shape {values.shape}",
            "add or drop axes with reshape; ring functions take one leading axis of ranks",
        )
    return values


def same_shape(what: str, x: NDArray, expected: tuple[int, ...], axes: str) -> None:
    """Raise ShapeError unless x has the shape ``expected``; ``axes`` names the axes in the message."""
    if x.shape != expected:
        raise ShapeError(
            f"{what} of shape [{axes.replace(' ', ', ')}] = {expected}",
            f"shape {x.shape}",
            "compare the order of the axes and the leading axis of ranks",
        )


def rings_of(replica_groups: Any, num_workers: Any, ranks: int) -> list[Ring]:
    """Return all rings, each a tuple of rank ids in the order of their ring positions.

    If ``replica_groups`` is None or empty, there is one ring of ranks 0..num_workers-1. Otherwise the groups must be
    disjoint, each must have ``num_workers`` ranks, and together they must contain the ranks 0..ranks-1.

    >>> rings_of(((0, 2), (3, 1)), 2, 4)
    [(0, 2), (3, 1)]
    >>> rings_of(None, 3, 3)
    [(0, 1, 2)]
    """
    workers = check_workers(num_workers)
    groups = [tuple(range(workers))] if replica_groups is None else list_of_groups(replica_groups)
    groups = groups if groups else [tuple(range(workers))]
    for group in groups:
        if len(group) != workers:
            raise RefusedError(
                f"replica groups of num_workers = {workers} ranks each",
                f"{group} with {len(group)}",
                "make num_workers the length of a group",
            )
    members = [rank for group in groups for rank in group]
    if len(set(members)) != len(members):
        raise RefusedError(
            "disjoint replica groups", str(tuple(groups)), "list every rank exactly once"
        )
    if sorted(members) != list(range(ranks)):
        raise ShapeError(
            f"a leading axis of ranks for the replica groups {tuple(groups)}",
            f"{ranks} ranks",
            "stack one local array per rank on axis 0, in the order of the rank ids",
        )
    return groups


def list_of_groups(replica_groups: Any) -> list[Ring]:
    """Return replica groups as tuples of ints, or raise RefusedError."""
    try:
        groups = [tuple(group) for group in replica_groups]
        whole = all(type(rank) is int or isinstance(rank, np.integer) for g in groups for rank in g)
    except TypeError:
        whole = False
    if not whole:
        raise RefusedError(
            "replica_groups as tuples of rank ids",
            repr(replica_groups),
            "write replica_groups=((0, 1), (2, 3))",
        )
    return [tuple(int(rank) for rank in group) for group in groups]


def ring_array(x: NDArray, ring: Ring, layout: Layout, axis: int) -> NDArray:
    """Join the arrays of a ring's ranks along ``axis``, with tokens in global order."""
    return unshard([x[rank] for rank in ring], layout, axis)


def rounded(x: Array, like: NDArray) -> NDArray:
    """Round float64 values once to the dtype of ``like``."""
    return store(x, format_name(like.dtype, "dtype"))


def backward_as_given(
    problem: Problem,
    dy: Array,
    o: Array,
    lse: Array,
    layout_q: Layout,
    layout_k: Layout,
    circulation: str,
    recipe: Recipe,
) -> list[WorkerResult]:
    """Compute the backward pass of a ring from given o [B, H, Sq, Dv] and lse [B, H, Sq], which are not recomputed.

    Arguments are in global order; each result holds the gradients of one worker's tokens (rules BWD-11 and RING-13). A
    row with lse = -inf contributes no gradient (rule BWD-10).
    """
    seeds = check_gradients(problem, dy, None)
    forward = [
        WorkerResult(r, index_q, index_k, o[:, :, index_q], lse[:, :, index_q])
        for r, (index_q, index_k) in enumerate(zip(layout_q.table, layout_k.table, strict=True))
    ]
    schedule = backward_schedule(circulation, layout_q.workers)
    return run_backward(
        problem, seeds, recipe, layout_q, layout_k, schedule, block_backward, forward, unobserved
    )


def unobserved(moment: Moment) -> None:
    """The observer of a pass of which nothing is recorded."""


def gradients_of(result: WorkerResult) -> tuple[Array, Array, Array]:
    """Return dq, dk, dv of one worker after a backward pass."""
    assert result.dq is not None and result.dk is not None and result.dv is not None
    return result.dq, result.dk, result.dv
