"""The arithmetic of numbers: what one rank computes, with the functions of the specification.

Queries of several key heads are computed one key head after another (FWD-10): which query heads a rank holds decides
which key heads it needs, so they need not be as regular as in the whole problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.model import Array, Problem, Terms, Tile, take
from ringspec.recipes import Recipe
from ringspec.schemes.execute import Arithmetic, Parts
from ringspec.schemes.parts import Part, Tensors
from ringspec.schemes.scheme import tensors_of
from ringspec.schemes.sharding import Shard
from ringspec.spec.block import block_backward, block_forward
from ringspec.spec.dropout import keep_mask
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.ring_backward import plus
from ringspec.spec.ring_forward import merge_states


def with_keep(problem: Problem) -> Problem:
    """Return a problem whose keep mask of dropout is explicit, so that each rank can take its heads from it (DROP-1)."""
    terms, rows = problem.terms, problem.rows
    if terms.dropout_p == 0 or rows.keep is not None:
        return problem
    keep = keep_mask(
        rows.position,
        problem.columns.position,
        heads=np.arange(terms.heads, dtype=np.int64),
        batches=np.arange(problem.q.shape[0], dtype=np.int64),
        dropout_p=terms.dropout_p,
        dropout_seed=terms.dropout_seed,
    )
    return replace(problem, rows=replace(rows, keep=keep))


def cells_of(x: NDArray, shard: Shard) -> NDArray:
    """Return the cells of a shard from a global tensor [B, heads, S, ...]; padding slots hold zeros."""
    return take(x[:, list(shard.heads)], shard.index, axis=2)


def tile_of(problem: Problem, recipe: Recipe, q: Shard, k: Shard, heads: list[int]) -> Tile:
    """Return the tile of some queries and keys, for query heads that share one key head."""
    rows = problem.rows.take(q.index)

    def cut(x: NDArray | None) -> NDArray | None:
        return x if x is None or x.shape[1] == 1 else x[:, heads]

    rows = replace(rows, bias=cut(rows.bias), mask=cut(rows.mask), keep=cut(rows.keep))
    terms = replace(problem.terms, heads=len(heads), kv_heads=1, sinks=None)
    return Tile(rows, problem.columns.take(k.index), terms, recipe)


def by_key_head(
    problem: Problem, recipe: Recipe, q: Part, k: Part, phase: str
) -> tuple[list[Any], tuple[int, ...], tuple[int, ...]]:
    """Compute one key head after another; return the results, and the query heads and key heads in their order."""
    names, block = BLOCKS[phase]
    results, order, key_order = [], [], []
    for slot, key_head in enumerate(k.shard.heads):
        heads = [head for head in q.shard.heads if head // problem.terms.group == key_head]
        if heads:
            rows = [q.shard.heads.index(head) for head in heads]
            x, *seeds = (q.tensors[name].take(rows, axis=1) for name in names)
            keys, values = (k.tensors[name].take([slot], axis=1) for name in ("k", "v"))
            tile = tile_of(problem, recipe, q.shard, k.shard, heads)
            results.append(block(x, keys, values, *seeds, tile))
            order += heads
            key_order.append(key_head)
    return results, tuple(order), tuple(key_order)


# The tensors of the queries that a block needs, and the function of the specification that computes it.
BLOCKS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "forward": (("q",), block_forward),
    "backward": (("q", "dy", "lse", "row_term"), block_backward),
}


def score(problem: Problem, recipe: Recipe, q: Part, k: Part) -> Parts:
    """Return the softmax state of some queries over some keys."""
    states, order, _ = by_key_head(problem, recipe, q, k, "forward")
    return {"state": Part(Shard(q.shard.tokens, order), side_by_side(states, "m", "l", "o"))}


def differentiate(
    problem: Problem, recipe: Recipe, q: Part, k: Part, dbias: Array | None = None
) -> Parts:
    """Return what some queries and some keys contribute to dq, dk and dv; add their dbias to ``dbias`` in place."""
    shares, order, key_order = by_key_head(problem, recipe, q, k, "backward")
    if dbias is not None:
        done = 0
        for share in shares:
            heads = order[done : done + share.dq.shape[1]]
            add_to_bias(dbias, share.dbias, q.shard.tokens, heads)
            done += len(heads)
    return {
        "dq": Part(Shard(q.shard.tokens, order), side_by_side(shares, "dq")),
        "dk": Part(Shard(k.shard.tokens, key_order), side_by_side(shares, "dk", "dv")),
    }


def add_to_bias(total: Array, share: Array, tokens: Sequence[int], heads: Sequence[int]) -> None:
    """RING-12: add the dbias of some queries and heads to that of all, in place; float64, never rounded."""
    at_heads = heads if total.shape[1] > 1 else (0,)
    if total.shape[2] == 1:
        total[:, list(at_heads)] += share
        return
    real = [slot for slot, token in enumerate(tokens) if token >= 0]
    at = np.ix_(at_heads, [tokens[slot] for slot in real])
    total[:, at[0], at[1]] += share[:, :, real]


def side_by_side(results: list[Any], *names: str) -> Tensors:
    """Return tensors by name, with the heads of all results one after another."""
    return {name: np.concatenate([getattr(x, name) for x in results], axis=1) for name in names}


def arithmetic(
    problem: Problem, recipe: Recipe, phase: str, dbias: Sequence[Array] | None = None
) -> Arithmetic:
    """Return the arithmetic of a pass for one problem; the bias gradients of each rank are added to ``dbias``."""

    def compute(step: int, rank: int, q: Part, k: Part) -> Parts:
        if phase == "forward":
            return score(problem, recipe, q, k)
        return differentiate(problem, recipe, q, k, None if dbias is None else dbias[rank])

    return Arithmetic(
        compute,
        lambda thing, shard: blank(problem, thing, shard, phase),
        lambda thing, a, b: join(recipe, thing, a, b),
    )


def blank(problem: Problem, thing: str, shard: Shard, phase: str) -> Part:
    """CP-6: return an empty part: no tensor holds anything yet, and no row of a state has seen a key."""
    rows = (problem.q.shape[0], len(shard.heads), len(shard.tokens))
    shapes = tensors_of(thing, phase, problem.q.shape[3], problem.v.shape[3])
    return Part(
        shard,
        {
            name: np.full(rows + last, -np.inf if name == "m" else 0.0)
            for name, last in shapes.items()
        },
    )


def join(recipe: Recipe, thing: str, a: Tensors, b: Tensors) -> Tensors:
    """CP-3: merge two states, or add two gradients with the rounding of the accumulators (SOFT-1, NUM-2)."""
    if thing == "state":
        state = merge_states(SoftmaxState(**a), SoftmaxState(**b), recipe)
        return {"m": state.m, "l": state.l, "o": state.o}
    carried = recipe.carried_dq if thing == "dq" else recipe.carried_dkv
    return {name: plus(a[name], b[name], carried) for name in a}


def forward_inputs(problem: Problem, recipe: Recipe, q: Shard, k: Shard) -> Parts:
    """Return what a rank holds before the forward pass, rounded to the recipe's input format."""
    queries = {"q": recipe.to_inputs(cells_of(problem.q, q), "q")}
    keys = {
        "k": recipe.to_inputs(cells_of(problem.k, k), "k"),
        "v": recipe.to_inputs(cells_of(problem.v, k), "v"),
    }
    return {"q": Part(q, queries), "k": Part(k, keys)}


def sinks_of(terms: Terms, shard: Shard) -> Array | None:
    """Return the sinks of a rank's query heads."""
    return None if terms.sinks is None else terms.sinks[list(shard.heads)]
