"""Merging a block's result into the running state, in slices of rows and over threads.

In the spec a merge makes about eight arrays of the size of o; here it makes two, and half the time is the
page faults of the new o. Every value is
rounded at the same points as there (NUM-3): in float32 a product and a sum of two float32 numbers are
rounded once by the machine.
"""

from __future__ import annotations

import functools
from typing import Any, TypedDict

import numpy as np

from ringspec.fast.blocks import blocks, computed_in
from ringspec.fast.dense import SIZES
from ringspec.fast.plan import Sizes
from ringspec.fast.threads import SCRATCH, run_tasks, thread_count
from ringspec.recipes import Recipe
from ringspec.spec.block_attention import BlockBackward, BlockForward
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.problem import Array
from ringspec.spec.ring_forward import Absorb

ROWS = 2048  # of a slice; smaller ones cost two threads more than they save


def absorb(
    running: SoftmaxState, part: SoftmaxState, recipe: Recipe, *, threads: int | None = None
) -> SoftmaxState:
    """The state over the keys of both; ``absorb`` of ``ringspec.ring``.

    m and l [B, H, n], o [B, H, n, Dv] float64, as in ``spec.online_softmax.merge`` (SOFT-1, SOFT-2,
    SOFT-4), whose value it is. Raises :class:`~ringspec.errors.FastRecipeError` for a recipe that is not
    float64 or float32 throughout.

    >>> from ringspec.recipes import RECIPES
    >>> a = SoftmaxState(np.zeros((1, 1, 1)), np.ones((1, 1, 1)), np.ones((1, 1, 1, 1)))
    >>> absorb(a, a, RECIPES["float64"]).o.tolist()
    [[[[2.0]]]]
    """
    dtype = computed_in(recipe)
    if not running.l.any() and np.isneginf(running.m).all():
        return part
    width = part.o.shape[3]
    given = [flat(x) for x in (running.m, running.l, part.m, part.l)]
    from_o, to_o = (np.ascontiguousarray(x).reshape(-1, width) for x in (running.o, part.o))
    m, l, o = np.empty(given[0].shape), np.empty(given[0].shape), np.empty(to_o.shape)
    columns = (*given, from_o, to_o, m, l, o)
    tasks = [
        functools.partial(merge_rows, tuple(x[first : first + ROWS] for x in columns), dtype)
        for first in range(0, len(m), ROWS)
    ]
    run_tasks(tasks, thread_count(threads))
    shape = part.m.shape
    return SoftmaxState(m.reshape(shape), l.reshape(shape), o.reshape(part.o.shape))


class Pieces(TypedDict):
    """Keyword arguments of ``ringspec.ring``."""

    block_forward: BlockForward
    block_backward: BlockBackward
    absorb: Absorb


def pieces(*, threads: int | None = None, sizes: Sizes = SIZES) -> Pieces:
    """All that ``ringspec.ring`` takes from here, as its keyword arguments.

    ``threads``: None is one for each core; ``sizes``: rows and columns of a tile. Raises OptionError.

    >>> sorted(pieces(threads=2))
    ['absorb', 'block_backward', 'block_forward']
    """
    forward, backward = blocks(threads=threads, sizes=sizes)
    return {
        "block_forward": forward,
        "block_backward": backward,
        "absorb": functools.partial(absorb, threads=threads),
    }


def flat(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1)


def merge_rows(rows: tuple[Array, ...], dtype: str) -> None:
    """Some rows of a merge: (m, l) of a and of b, o of a and of b, into m, l, o."""
    m_a, l_a, m_b, l_b, o_a, o_b, m, l, o = rows
    np.maximum(m_a, m_b, out=m)
    shift = np.where(np.isneginf(m), 0.0, m)
    c_a, c_b = np.exp(m_a - shift), np.exp(m_b - shift)
    if dtype == "float64":
        l[...] = c_a * l_a + c_b * l_b
        np.multiply(o_a, c_a[:, None], out=o)
        other = SCRATCH.get("merge", o.shape, "float64")
        np.multiply(o_b, c_b[:, None], out=other)
        o += other
        return
    c_a, c_b = narrow(c_a), narrow(c_b)
    l[...] = (c_a.astype(np.float64) * l_a + c_b.astype(np.float64) * l_b).astype(np.float32)
    left, right = (SCRATCH.get(name, o.shape, "float32") for name in ("left", "right"))
    left[...], right[...] = o_a, o_b
    left *= c_a[:, None]
    right *= c_b[:, None]
    left += right
    o[...] = left


def narrow(x: Array) -> Any:
    return x.astype(np.float32)
