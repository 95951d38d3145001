"""What the recipe of the kernels gives for a case: the specification's ring, pass by pass.

The forward is that of a KV ring, the backward that of a Q ring, from an o and lse that are given. Arrays
by rank are [ranks, b, h, s, ..] as in :mod:`reference`; global ones are [b, h, S, ..] of one ring.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.formats import load, round_to
from ringspec.problem.model import Problem
from ringspec.problem.options import check, check_gradients
from ringspec.recipes import Recipe, nki_impl
from ringspec.rings.layouts import make_layout, unshard
from ringspec.rings.ring import run_backward, run_forward
from ringspec.rings.run import WorkerResult
from ringspec.rings.schedules import backward_schedule, forward_schedule
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.layout import Layout

from .reference import Case, Inputs, rings

Array = NDArray[Any]
Named = dict[str, Array]
GRADIENTS = ("dq", "dk", "dv")


def recipe_for(dtype: str, mixed_precision: bool = True, lse: str = "float32") -> Recipe:
    """The kernels' recipe: ``dtype`` of the inputs, ``lse`` that of the forward's lse."""
    return nki_impl(f"nki_impl {dtype}", dtype, mixed_precision).replace(lse=lse)


def of_backward(recipe: Recipe) -> Recipe:
    """The recipe for a backward pass alone: dq is summed over 128 keys at a time.

    A recipe has one ``tile_k``, which in a forward pass moves the row maximum as well.
    """
    return recipe.replace(tile_k=128)


@dataclass(frozen=True)
class Ring:
    """One ring of a case in global order, as ringspec takes it."""

    ranks: tuple[int, ...]
    layout: Layout
    problem: Problem
    dy: Array


def rings_of(case: Case, given: Inputs) -> list[Ring]:
    """Every replica group."""
    made = []
    for ranks in rings(case):
        name = "striped" if case.striped else "zigzag" if case.zigzag else "contiguous"
        layout = make_layout(name, case.workers * case.length, case.workers)
        options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
        if given.bound_min is not None and given.bound_max is not None:
            # Local key j of a striped ring is token j W + r with r < W; documents are tokens already.
            factor = 1 if case.documents else case.workers
            for bound in ("bound_min", "bound_max"):
                rows = [getattr(given, bound)[rank] for rank in ranks]
                options[bound] = unshard(rows, layout, 1) * factor
        q, k, v, dy = (
            unshard([load(getattr(given, name)[rank]) for rank in ranks], layout)
            for name in ("q", "k", "v", "dy")
        )
        made.append(Ring(ranks, layout, check(q, k, v, options), dy))
    return made


def forward(ring: Ring, recipe: Recipe, block: Any = block_forward) -> list[WorkerResult]:
    """The KV ring under a recipe: o and lse of each worker."""
    schedule = forward_schedule("kv", ring.layout.workers, 1)
    layouts = ring.layout, ring.layout
    return run_forward(ring.problem, recipe, *layouts, schedule, block, lambda moment: None)


def backward(
    ring: Ring, recipe: Recipe, o: Array, lse: Array, block: Any = block_backward
) -> list[WorkerResult]:
    """The Q ring under a recipe, from o [ranks, b, h, s, d] and lse [ranks, b, h, s] as given."""
    table = ring.layout.table
    given = [
        WorkerResult(place, table[place], table[place], load(o[rank]), load(lse[rank]))
        for place, rank in enumerate(ring.ranks)
    ]
    schedule = backward_schedule("q", ring.layout.workers, 1)
    seeds = check_gradients(ring.problem, ring.dy, None)
    layouts = ring.layout, ring.layout
    return run_backward(
        ring.problem, seeds, recipe, *layouts, schedule, block, given, lambda moment: None
    )


def results(layout: Layout, workers: list[WorkerResult]) -> Named:
    """o and lse of all workers, in global order."""
    return {n: unshard([getattr(one, n) for one in workers], layout) for n in ("o", "lse")}


def gradients(layout: Layout, workers: list[WorkerResult]) -> Named:
    """dq, dk, dv of all workers, in global order."""
    return {n: unshard([getattr(one, n) for one in workers], layout) for n in GRADIENTS}


def predicted(ring: Ring, recipe: Recipe, o: Array, lse: Array) -> Named:
    """What the recipe gives for both passes, the backward from o and lse by rank as given."""
    used = of_backward(recipe)
    want = results(ring.layout, forward(ring, recipe))
    want |= gradients(ring.layout, backward(ring, used, o, lse))
    if recipe.carried_dkv != "float32" and ring.problem.terms.group > 1:
        want |= carried_by_heads(ring, used, o, lse)
    return want


def carried_by_heads(ring: Ring, recipe: Recipe, o: Array, lse: Array) -> Named:
    """dk and dv where each query head of a group adds to the carried sum by itself.

    The ring adds a group's heads first; so each head's shares are taken from a ring of its own, and
    added up here: by query owner r, r - 1, .. for key owner r, then by head.
    """
    group, table, at = ring.problem.terms.group, ring.layout.table, ring.problem
    shares: list[dict[tuple[int, int], Any]] = []
    for head in range(group):
        chosen = np.arange(head, at.q.shape[1], group)
        alone = check(
            at.q[:, chosen], at.k, at.v,
            {"causal": at.terms.causal, "scale": at.terms.scale}
            | {name: getattr(at.rows, name) for name in ("bound_min", "bound_max")},
        )  # fmt: skip
        made: dict[tuple[int, int], Any] = {}

        def noted(*given: Any, made: dict[tuple[int, int], Any] = made) -> Any:
            block = given[6]
            first_row, first_key = block.rows.index[0], block.columns.index[0]
            pair = tuple(int(np.argwhere(table == x)[0, 0]) for x in (first_row, first_key))
            made[pair[0], pair[1]] = block_backward(*given)
            return made[pair[0], pair[1]]

        one = dataclasses.replace(ring, problem=alone, dy=ring.dy[:, chosen])
        backward(one, recipe, o[:, :, chosen], lse[:, :, chosen], noted)
        shares.append(made)
    workers = range(ring.layout.workers)
    carried: dict[str, list[Array]] = {"dk": [], "dv": []}
    for name, sums in carried.items():
        for owner in workers:
            total = np.zeros(())
            for step in workers:
                for made in shares:
                    share = getattr(made[(owner - step) % len(workers), owner], name)
                    total = round_to(total + share, recipe.carried_dkv)
            sums.append(total)
    return {name: unshard(sums, ring.layout) for name, sums in carried.items()}
