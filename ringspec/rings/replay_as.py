"""The bits of a ring of W workers with a merge recipe, on one machine and from dense inputs.

Each block is computed by the specification in float64 and rounded once, to the number format of the implementation. These
*frozen* partial results are then merged, and the gradients added, as the recipe says. A replay therefore shows what the
merge and the number of workers change. It does not reproduce the roundings inside a kernel.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import OptionError, ShapeError, shown
from ringspec.formats import bits, load, rounded_input, store
from ringspec.merges import Functions, MergeRecipe, Part, add_gradients, merge, merge_recipe, visits
from ringspec.problem.checks import check_workers
from ringspec.problem.model import Array, Problem, Tile
from ringspec.problem.options import Options, check, check_gradients, takes_options
from ringspec.recipes import RECIPES, Recipe
from ringspec.rings.layouts import shard, unshard
from ringspec.rings.ring import layouts_for
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.dense_backward import dy_o_sum
from ringspec.spec.layout import Layout
from ringspec.spec.masks import visible
from ringspec.spec.online_softmax import normalised

STORED = ("float32", "bfloat16", "float16")
FLOAT64 = RECIPES["float64"]


@dataclass(frozen=True)
class Changes:
    """The elements of one tensor that differ between two replays.

    ``changed`` is a bool array of the tensor's shape. ``steps`` (int64, the same shape) is the distance in numbers of the
    format, 0 where nothing changed; between a number and NaN it is -1.
    """

    changed: NDArray[np.bool_]
    steps: NDArray[np.int64]

    def __str__(self) -> str:
        share = self.changed.mean() if self.changed.size else 0.0
        return f"{self.changed.sum()} of {self.changed.size} elements ({share:.1%}), at most {self.steps.max(initial=0)} steps"


@dataclass(frozen=True)
class Replay:
    """The results of a ring in global order and in their formats; dq, dk, dv are None without dy or without a recipe for them.

    o [B, H, Sq, Dv]; lse [B, H, Sq] float32; dq [B, H, Sq, D], dk [B, Hkv, Sk, D], dv [B, Hkv, Sk, Dv]. ``parts[r]`` are the
    partial results of worker r in the order in which it merged them.
    """

    o: NDArray[Any]
    lse: NDArray[np.float32]
    dq: NDArray[Any] | None
    dk: NDArray[Any] | None
    dv: NDArray[Any] | None
    parts: tuple[tuple[Part, ...], ...]

    def changes(self, other: Replay) -> dict[str, Changes]:
        """Return the elements that differ in ``other``, for each tensor that both have; ShapeError for other shapes."""
        found = {}
        for name in ("o", "lse", "dq", "dk", "dv"):
            a, b = getattr(self, name), getattr(other, name)
            if a is not None and b is not None:
                found[name] = changes(a, b, name)
        return found


def changes(a: NDArray[Any], b: NDArray[Any], name: str) -> Changes:
    """Compare the bits of two arrays of one format; every NaN equals every NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        expected = f"{name} of shape {a.shape} and dtype {a.dtype}"
        raise ShapeError(expected, f"{b.shape}, {b.dtype}", "replay the same problem and format")
    one_nan = np.isnan(a.astype(np.float32)) ^ np.isnan(b.astype(np.float32))
    both_nan = np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    changed = (bits(a) != bits(b)) & ~both_nan
    distance = np.abs(ordered(a) - ordered(b))
    return Changes(changed, np.where(one_nan, -1, np.where(changed, distance, 0)))


def ordered(x: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers in the order of the numbers, with neighbours 1 apart, and -0 one below +0."""
    pattern = bits(x).astype(np.int64)
    sign = np.int64(1) << (8 * x.dtype.itemsize - 1)
    return np.where(pattern >= sign, sign - 1 - pattern, pattern)


@takes_options
def replay_as(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike | None = None,
    *,
    recipe: str | MergeRecipe,
    workers: int,
    layout: Any = "contiguous",
    format: str = "bfloat16",
    functions: Functions | None = None,
    **options: Unpack[Options],
) -> Replay:
    """Compute the bits of a ring of ``workers`` workers that merges with ``recipe``, from frozen partial results.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] and dy [B, H, Sq, Dv] are rounded to ``format``, 'float32', 'bfloat16'
    or 'float16'. Each worker's block results are those of the specification in float64, with o rounded once to ``format``
    and lse to float32; they are normalised, or (m, l, o) if the recipe carries these. lse is in the recipe's base. A block that the mask hides entirely is skipped; otherwise a part covers the rows from
    the first to the last that see one of its keys, except the first part and the parts of a recipe that needs all rows.

    ``recipe`` is the name of a merge recipe, or a :class:`~ringspec.merges.MergeRecipe`; ``functions`` are its elementary
    functions (None: NumPy's). ``layout`` is as in :func:`ringspec.ring`, and the other keywords as in
    :func:`ringspec.attention`; sinks are refused. With dy, the gradients of each block are computed from the merged o and
    lse, rounded to ``format`` and added as the recipe says. Returns a :class:`Replay`.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1, 16, 8))
    >>> one, four = (replay_as(q, k, v, recipe="te_p2p", workers=w, causal=True) for w in (1, 4))
    >>> bool(one.changes(four)["o"].changed[0, 0, :4].any())  # these rows see the keys of one worker only
    False
    """
    used, workers = merge_recipe(recipe), check_workers(workers)
    if format not in STORED:
        raise OptionError(f"format as one of {STORED}", shown(format), "pass format='bfloat16'")
    if options.get("sinks") is not None:
        fix = "leave out sinks: a ring adds them after the merge"
        raise OptionError("sinks=None in a replay", "sinks", fix)
    problem = rounded(check(q, k, v, dict(options)), format)
    layouts = layouts_for(problem, layout, workers, options)
    if dy is not None:
        dy = rounded_input(check_gradients(problem, dy, None)[0], format, "dy")
    return replayed(problem, layouts, dy, used, format, functions)


def replayed(
    problem: Problem,
    layouts: tuple[Layout, Layout],
    dy: Array | None,
    used: MergeRecipe,
    format: str,
    functions: Functions | None = None,
    blocks: Recipe = FLOAT64,
) -> Replay:
    """Replay a checked problem whose numbers are of the format ``format``; ``blocks`` says where blocks round.

    ``blocks`` is a recipe of rounding points, of which those of a block and of dy_o_sum are used.
    """
    workers = layouts[0].workers
    seen = {
        (a, b): rows_seen(problem, *layouts, a, b) for a in range(workers) for b in range(workers)
    }
    blocks = blocks.replace(merge_order="state", block_o="float64", block_gradients="float64")
    parts, o, lse = [], [], []
    for worker in range(workers):
        own = parts_of(problem, layouts, worker, used, format, seen, blocks)
        merged = merge(own, used, functions)
        parts.append(tuple(own))
        o.append(merged[0])
        lse.append(merged[1])
    gradients: list[NDArray[Any] | None] = [None, None, None]
    if dy is not None:
        gradients = gradients_of(problem, layouts, dy, o, lse, used, format, seen, blocks)
    whole_o, whole_lse = unshard(o, layouts[0]), unshard(lse, layouts[0])
    dq, dk, dv = gradients
    return Replay(whole_o, whole_lse, dq, dk, dv, tuple(parts))


def rounded(problem: Problem, format: str) -> Problem:
    """Return the problem with q, k, v rounded to ``format``."""
    q, k, v = (rounded_input(getattr(problem, name), format, name) for name in ("q", "k", "v"))
    return dataclasses.replace(problem, q=q, k=k, v=v)


def rows_seen(problem: Problem, layout_q: Layout, layout_k: Layout, a: int, b: int) -> slice | None:
    """Return the rows of worker a from the first to the last that see a key of worker b; None if there is none."""
    rows, columns = problem.rows.take(layout_q.table[a]), problem.columns.take(layout_k.table[b])
    pairs = visible(rows, columns, problem.terms)
    seen = np.flatnonzero(
        np.broadcast_to(pairs, (*pairs.shape[:2], layout_q.slots, pairs.shape[3])).any(
            axis=(0, 1, 3)
        )
    )
    return slice(int(seen[0]), int(seen[-1]) + 1) if seen.size else None


def tile_of(block: Problem, blocks: Recipe) -> Tile:
    """Return the tile of all queries and keys of a block, rounded as ``blocks`` says."""
    return dataclasses.replace(block.tile, recipe=blocks)


def frozen(block: Problem, recipe: MergeRecipe, format: str, blocks: Recipe) -> Part:
    """Return the result of a block, rounded once: normalised, or (m, l, o) if the recipe's form carries it."""
    state = block_forward(block.q, block.k, block.v, tile_of(block, blocks))
    if recipe.form == "state":
        m, l = (store(x, "float32") for x in (state.m, state.l))
        return Part(store(state.o, format), m, sums=l)
    state = normalised(state, blocks)
    return Part(store(state.o, format), store(state.m / recipe.unit, "float32"))


Seen = dict[tuple[int, int], slice | None]


def parts_of(
    problem: Problem,
    layouts: tuple[Layout, Layout],
    worker: int,
    recipe: MergeRecipe,
    format: str,
    seen: Seen,
    blocks: Recipe,
) -> list[Part]:
    """Return the frozen partial results of a worker, in the recipe's order."""
    parts: list[Part] = []
    owners = visits(recipe.order, worker, layouts[0].workers)
    # A worker that sees no key at all still has a result: the empty one of its own block.
    for owner in [owner for owner in owners if seen[worker, owner] is not None] or [worker]:
        block = problem.take(layouts[0].table[worker], layouts[1].table[owner])
        part, covered = frozen(block, recipe, format, blocks), seen[worker, owner]
        if parts and recipe.form != "all_parts" and covered != slice(0, part.lse.shape[2]):
            part = part.of_rows((slice(None), slice(None), covered))
        parts.append(part)
    return parts


def gradients_of(
    problem: Problem,
    layouts: tuple[Layout, Layout],
    dy: Array,
    o: list[NDArray[Any]],
    lse: list[NDArray[np.float32]],
    recipe: MergeRecipe,
    format: str,
    seen: Seen,
    blocks: Recipe,
) -> list[NDArray[Any] | None]:
    """Return dq, dk, dv in global order; None where the recipe has no sum."""
    workers = layouts[0].workers
    own_dy, contributions = shard(dy, layouts[0]), {}
    for a in range(workers):
        row_term = dy_o_sum(own_dy[a], load(o[a]), blocks)
        natural = load(lse[a]) * recipe.result_unit
        for b in range(workers):
            if seen[a, b] is None and a != b:
                continue
            block = problem.take(layouts[0].table[a], layouts[1].table[b])
            share = block_backward(
                block.q, block.k, block.v, own_dy[a], natural, row_term, tile_of(block, blocks)
            )
            contributions[a, b] = [store(x, format) for x in (share.dq, share.dk, share.dv)]
    found: list[NDArray[Any] | None] = []
    for number, (how, layout) in enumerate(
        [(recipe.dq, layouts[0]), (recipe.dkv, layouts[1]), (recipe.dkv, layouts[1])]
    ):
        if how is None:
            found.append(None)
            continue
        sums = []
        for worker in range(workers):
            others = visits(how.order, worker, workers)
            pairs = [(worker, b) if number == 0 else (b, worker) for b in others]
            shares = [contributions[pair][number] for pair in pairs if pair in contributions]
            sums.append(add_gradients(shares, how, shares[0].shape))
        found.append(unshard(sums, layout))
    return found
