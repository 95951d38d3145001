"""Merge partial results of a ring, in slices of rows and with threads.

A merge in ``ringspec.spec`` creates about eight arrays of the size of o; this module creates two. Its results are
rounded at the same points (rule NUM-3), because the machine rounds each float32 product and each float32 sum once.

Sources: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867; Liu et al., Ring Attention,
https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypedDict

import numpy as np

from ringspec.fast.blocks import blocks, computed_in
from ringspec.fast.plan import TileSizes
from ringspec.fast.team import each, run_tasks, thread_count
from ringspec.fast.threads import SCRATCH
from ringspec.problem.model import Array
from ringspec.recipes import Recipe
from ringspec.rings.lockstep import Each
from ringspec.spec.block import BlockBackward, BlockForward
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.ring_backward import Accumulate, plus
from ringspec.spec.ring_forward import Merge

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
# Elements of one task, and of a slice that fits a core's cache. For less than one task, waking a thread takes
# longer than the thread saves.
TASK, SLICE = 1 << 20, 1 << 17


def merge_states(
    running: SoftmaxState, part: SoftmaxState, recipe: Recipe, *, threads: int | None = None
) -> SoftmaxState:
    """Merge two softmax states into one over all their keys; usable as the ``merge`` argument of ``ringspec.ring``.

    ``running`` is the state over the keys seen so far, ``part`` the state over one block of keys. Each has m and l
    [B, H, n] in float64, and o [B, H, n, Dv] in float64 or float32, not yet divided by l. Results are those of
    ``spec.online_softmax.merge`` (SOFT-1, SOFT-2, SOFT-4). The merged o has the type in which ``recipe`` computes. If
    ``running`` has seen no key, ``part`` itself is returned. ``threads``: number of threads; None: one for each core
    that the process may use. The results are bit-identical for any number of threads.

    Raises :class:`~ringspec.errors.OptionError` ('fast-recipe') unless ``recipe`` is float64 or float32 at every
    rounding point, and OptionError if ``threads`` is not an integer >= 1.

    >>> from ringspec.recipes import RECIPES
    >>> a = SoftmaxState(np.zeros((1, 1, 1)), np.ones((1, 1, 1)), np.ones((1, 1, 1, 1)))
    >>> merge_states(a, a, RECIPES["float64"]).o.tolist()
    [[[[2.0]]]]
    """
    dtype = computed_in(recipe)
    if not running.l.any() and np.isneginf(running.m).all():
        return part
    width = part.o.shape[3]
    given = [flat(x) for x in (running.m, running.l, part.m, part.l)]
    from_o, to_o = (np.ascontiguousarray(x, dtype).reshape(-1, width) for x in (running.o, part.o))
    m, l = np.empty(given[0].shape), np.empty(given[0].shape)
    o = np.empty(to_o.shape, dtype)
    columns = (*given, from_o, to_o, m, l, o)
    in_slices(merge_rows, columns, max(width, 1), thread_count(threads))
    shape = part.m.shape
    return SoftmaxState(m.reshape(shape), l.reshape(shape), o.reshape(part.o.shape))


def accumulate(
    total: Array, share: Array, accumulator: str, *, threads: int | None = None
) -> Array:
    """Return ``total + share``, rounded to the format ``accumulator``; usable as ``accumulate`` of ``ringspec.ring``.

    ``total`` and ``share``: float64 or float32 arrays of the same shape, [B, H, n, D] or the shape of a bias. The
    result is that of ``spec.ring_backward.plus`` (NUM-2); if ``accumulator`` is float32 or float64, it has that type.
    ``threads`` is as in :func:`merge_states`. Raises OptionError if ``threads`` is not an integer >= 1.

    >>> accumulate(np.ones((1, 1, 2, 1)), np.ones((1, 1, 2, 1)), "float32").ravel().tolist()
    [2.0, 2.0]
    """
    if accumulator not in ("float32", "float64"):
        return plus(total, share, accumulator)
    result = np.empty(total.shape, accumulator)
    given = [np.ascontiguousarray(x).reshape(-1) for x in (total, share)]
    in_slices(add_numbers, (*given, result.reshape(-1)), 1, thread_count(threads))
    return result


def in_slices(
    work: Callable[..., None], columns: tuple[Array, ...], width: int, threads: int
) -> None:
    """Cut the n rows of all arrays in ``columns`` [n, ...] into slices, and call ``work`` with each slice, on threads.

    A row has ``width`` elements.
    """
    size = max(SLICE // width, 1)
    several = TASK // SLICE * size

    def task(first: int, stop: int) -> None:
        for start in range(first, stop, size):
            work(*(x[start : min(start + size, stop)] for x in columns))

    n = len(columns[0])
    firsts = range(0, n, several)
    run_tasks(
        [functools.partial(task, first, min(first + several, n)) for first in firsts], threads
    )


def add_numbers(total: Array, share: Array, result: Array) -> None:
    """Write ``total + share`` to ``result``.

    A float64 sum of two float32 numbers, rounded to float32, equals their float32 sum, because the float64 precision
    is large enough: 53 >= 2 * 24 + 2 (Figueroa, https://doi.org/10.1145/221332.221334).
    """
    if result.dtype == total.dtype == share.dtype:
        np.add(total, share, out=result)
    else:
        result[...] = np.add(total, share, out=SCRATCH.get("sum", result.shape, FLOAT64))


class Pieces(TypedDict):
    """Functions of this package as keyword arguments for ``ringspec.ring``."""

    block_forward: BlockForward
    block_backward: BlockBackward
    merge: Merge
    accumulate: Accumulate
    each: Each


def pieces(*, threads: int | None = None, sizes: TileSizes | None = None) -> Pieces:
    """Return all functions of this package that ``ringspec.ring`` accepts, as its keyword arguments.

    ``threads``: number of threads; None: one for each core that the process may use. ``sizes``: lengths of tiles; None:
    the sizes measured as fastest. Raises OptionError if ``threads`` is not an integer >= 1.

    >>> sorted(pieces(threads=2))
    ['accumulate', 'block_backward', 'block_forward', 'each', 'merge']
    """
    forward, backward = blocks(threads=threads, sizes=sizes)
    return {
        "block_forward": forward,
        "block_backward": backward,
        "merge": functools.partial(merge_states, threads=threads),
        "accumulate": functools.partial(accumulate, threads=threads),
        "each": functools.partial(each, threads=thread_count(threads)),
    }


def flat(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1)


def merge_rows(
    m_a: Array,
    l_a: Array,
    m_b: Array,
    l_b: Array,
    o_a: Array,
    o_b: Array,
    m: Array,
    l: Array,
    o: Array,
) -> None:
    """Merge the states (m_a, l_a, o_a) and (m_b, l_b, o_b) of some rows into the arrays m, l and o."""
    np.maximum(m_a, m_b, out=m)
    shift = np.where(np.isneginf(m), 0.0, m)
    c_a, c_b = np.exp(m_a - shift), np.exp(m_b - shift)
    if o.dtype == FLOAT32:
        c_a, c_b = c_a.astype(FLOAT32), c_b.astype(FLOAT32)
        l[...] = (c_a.astype(FLOAT64) * l_a + c_b.astype(FLOAT64) * l_b).astype(FLOAT32)
    else:
        l[...] = c_a * l_a + c_b * l_b
    if c_a.min() == 1 and c_b.min() == 1:  # with small scores both shifts are 0
        np.add(o_a, o_b, out=o)
        return
    np.multiply(o_a, c_a[:, None], out=o)
    other = SCRATCH.get("merge", o.shape, o.dtype)
    np.multiply(o_b, c_b[:, None], out=other)
    o += other
