"""Compute one block of a ring: functions for ``ringspec.ring(..., block_forward=, block_backward=)``.

In each step of a ring, a worker computes with its own queries and one block of keys, or the reverse. The signatures are
those of ``spec.block``, plus the keywords ``threads``, ``sizes`` and ``kept``.

Source: Dao, FlashAttention-2, https://arxiv.org/abs/2307.08691 (algorithms 1 and 2).

>>> import numpy as np, ringspec as rs
>>> q = k = v = np.ones((1, 2, 8, 4))
>>> run = rs.ring(q, k, v, workers=4, block_forward=block_forward, block_backward=block_backward)
>>> bool(abs(run.o - rs.attention(q, k, v).o).max() < 1e-15)
True
"""

from __future__ import annotations

import functools

import numpy as np

from ringspec.errors import OptionError
from ringspec.fast.backward import Seeds
from ringspec.fast.dense import refuse_overflow
from ringspec.fast.job import make_job
from ringspec.fast.kept import Kept
from ringspec.fast.passes import backward_result, forward_state
from ringspec.fast.plan import TileSizes
from ringspec.fast.team import thread_count
from ringspec.problem.model import Array, Tile
from ringspec.recipes import ROUNDING_POINTS, Recipe
from ringspec.spec.block import BlockBackward, BlockForward, BlockGradients
from ringspec.spec.online_softmax import SoftmaxState


def computed_in(recipe: Recipe) -> str:
    """Return 'float64' or 'float32' if the recipe uses this type at each of its rounding points.

    Any other recipe raises :class:`~ringspec.errors.OptionError` ('fast-recipe'), because BLAS products and elementwise
    operations cannot round to other types.
    """
    types = {getattr(recipe, point) for point in ROUNDING_POINTS}
    whole = recipe.tile_q is None and recipe.tile_k is None and recipe.merge_order == "state"
    if whole and types in ({"float64"}, {"float32"}):
        return str(types.pop())
    raise OptionError(
        "a recipe in float64 or float32 throughout, without tiles and merged by state",
        f"{recipe.name!r}, in {', '.join(sorted(types))}"
        + ("" if whole else f", tiles {(recipe.tile_q, recipe.tile_k)}, {recipe.merge_order}"),
        "leave out block_forward and block_backward: the specification follows every recipe",
        code="fast-recipe",
    )


def block_forward(
    q: Array,
    k: Array,
    v: Array,
    tile: Tile,
    *,
    threads: int | None = None,
    sizes: TileSizes | None = None,
    kept: Kept | None = None,
) -> SoftmaxState:
    """Return the softmax state (m, l, o) of queries q over one block of keys k and values v; o is not yet divided by l.

    q [B, H, n_q, D], k [B, Hkv, n_k, D], v [B, Hkv, n_k, Dv]; ``tile`` is as in
    :func:`ringspec.spec.block.block_forward`. ``tile.recipe`` must be float64 or float32 at every rounding point; the
    block is computed in that type. ``threads`` and ``sizes`` are as in :func:`blocks`; ``kept`` is a cache of values
    derived from read-only arrays.

    Returns m and l [B, H, n_q] in float64, and o [B, H, n_q, Dv] in the type of the computation. l and o are the sums
    of exp(s - m) and of exp(s - m) v. m is not always the maximum of a row's scores s, because (m, l, o) represent the
    same softmax for any m.

    Raises :class:`~ringspec.errors.OptionError`, with the code 'fast-recipe' if the recipe has another type.
    """
    dtype = computed_in(tile.recipe)
    job = make_job(q, k, v, tile.rows, tile.columns, tile.terms, dtype, sizes, kept=kept)
    m, l, o = forward_state(job, thread_count(threads))
    if dtype == "float32":
        l = l.astype(np.float32).astype(np.float64)
    return SoftmaxState(m, l, o)


def block_backward(
    q: Array,
    k: Array,
    v: Array,
    dy: Array,
    lse: Array,
    row_term: Array,
    tile: Tile,
    *,
    threads: int | None = None,
    sizes: TileSizes | None = None,
    kept: Kept | None = None,
) -> BlockGradients:
    """Compute what one block contributes to every gradient (rule BWD-11).

    dy [B, H, n_q, Dv]; lse (natural log) and row_term [B, H, n_q] in float64. lse and ``row_term`` = delta - dlse
    (RING-7) belong to whole rows, over all keys of the ring. q, k, v, ``tile``, ``threads``, ``sizes`` and ``kept`` are
    as in :func:`block_forward`.

    Returns :class:`~ringspec.spec.block.BlockGradients`: dq, dk, dv in the type of the
    computation, dbias in float64. Raises :class:`~ringspec.errors.OptionError` as :func:`block_forward` does,
    and NonFiniteError if a gradient overflows in float64.
    """
    dtype = computed_in(tile.recipe)
    job = make_job(
        q, k, v, tile.rows, tile.columns, tile.terms, dtype, sizes, kept=kept, backward=True
    )
    share = backward_result(job, Seeds(dy, lse, row_term), thread_count(threads))
    if dtype == "float64":
        refuse_overflow(share)
    return BlockGradients(share.dq, share.dk, share.dv, share.dbias)


def blocks(
    *, threads: int | None = None, sizes: TileSizes | None = None
) -> tuple[BlockForward, BlockBackward]:
    """Return :func:`block_forward` and :func:`block_backward` with a fixed number of threads and fixed tile sizes.

    ``threads``: number of threads; None: one for each core that the process may use. ``sizes``: lengths of tiles,
    see :class:`~ringspec.fast.TileSizes`; None: the sizes measured as fastest for the type and the mask. Raises
    OptionError if ``threads`` is not an integer >= 1.

    A ring calls the functions with the same arrays several times. Therefore the two functions cache values derived from
    read-only arrays, for as long as the arrays exist. Nothing is cached for writable arrays.

    >>> forward, backward = blocks(threads=2)
    """
    thread_count(threads)
    kept = Kept()
    return (
        functools.partial(block_forward, threads=threads, sizes=sizes, kept=kept),
        functools.partial(block_backward, threads=threads, sizes=sizes, kept=kept),
    )
