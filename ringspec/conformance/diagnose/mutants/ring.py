"""A second implementation of the ring: one loop over steps and workers that calls replaceable functions.

These functions are called pieces; ``hooks`` holds them. With the default pieces every result equals that of
``ringspec.ring``, bit for bit, in every recipe, layout and circulation.

The specification gives each worker its own state and messages. Here lists hold the blocks of all workers, and a
transfer makes a new list. The circulation says what travels: keys, queries, or nothing if all keys are gathered.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.diagnose.mutants.block import block_backward, block_forward
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks, Hop, Results
from ringspec.conformance.diagnose.mutants.variants import USUAL, Part, Way, all_merged, meets
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.targets.reference import options_of, whole
from ringspec.formats import load, round_to
from ringspec.problem.model import Array, Terms
from ringspec.problem.options import check, check_gradients
from ringspec.recipes import Recipe
from ringspec.rings.layouts import shard
from ringspec.spec.block import BlockGradients
from ringspec.spec.layout import Layout
from ringspec.spec.online_softmax import SoftmaxState, start
from ringspec.spec.worker import KeySide, QuerySide


@dataclass(frozen=True)
class Blocks:
    """The blocks of all workers, with inputs rounded to the recipe's input format, and the options of the call."""

    queries: list[QuerySide]
    keys: list[KeySide]
    dlse: list[Array]
    terms: Terms
    circulation: str
    direction: int

    @property
    def workers(self) -> int:
        return len(self.queries)


Known = tuple[Call, dict[str, Blocks]]  # a call, and its blocks by the format of the inputs
LAST: dict[str, Known] = {}  # the last call: many mutants are run on one call, one after the other


def blocks_of(call: Call, recipe: Recipe) -> Blocks:
    """Return the blocks of a ring or block call; they must not be changed in place."""
    last = LAST.get("call")
    if last is None or last[0] is not call:
        last = LAST["call"] = (call, {})
    known = last[1]
    if recipe.inputs not in known:
        known[recipe.inputs] = made_blocks(call, recipe)
    return known[recipe.inputs]


def made_blocks(call: Call, recipe: Recipe) -> Blocks:
    """Return the blocks of a call that :func:`blocks_of` has not seen before."""
    assert call.index_q is not None and call.index_k is not None
    given = {
        name: whole(call, name) for name in ("q", "k", "v", "dy", "dlse") if name in call.tensors
    }
    problem = check(given["q"], given["k"], given["v"], options_of(call))
    on_q, on_k = Layout("table", call.index_q), Layout("table", call.index_k)
    q, k, v = (
        [round_to(x, recipe.inputs) for x in shard(whole_x, layout)]
        for whole_x, layout in ((problem.q, on_q), (problem.k, on_k), (problem.v, on_k))
    )
    queries = [QuerySide(r, q[r], problem.rows.take(call.index_q[r])) for r in range(call.workers)]
    dlse: list[Array] = [np.zeros(x.shape[:3]) for x in q]
    if "dy" in given:
        dy, dlse = (
            shard(x, on_q) for x in check_gradients(problem, given["dy"], given.get("dlse"))
        )
        queries = [
            dataclasses.replace(side, dy=round_to(x, recipe.inputs))
            for side, x in zip(queries, dy, strict=True)
        ]
    keys = [
        KeySide(r, k[r], v[r], problem.columns.take(call.index_k[r])) for r in range(call.workers)
    ]
    # Gathered keys are processed in the order of a ring with direction 1.
    direction = 1 if call.circulation == "gather" else call.direction
    return Blocks(queries, keys, dlse, problem.terms, call.circulation, direction)


def ring_results(call: Call, recipe: Recipe, hooks: Hooks, way: Way = USUAL) -> Results:
    """Compute the results of a 'ring' call: for each name, a list of one array per worker.

    ``way``: choices that the specification leaves to an implementation, such as the order of merging.
    """
    recipe = way.recipe(hooks.recipe(recipe))
    blocks = blocks_of(call, recipe)
    results: Results = {}
    if "forward" in call.passes:
        o, lse = forward(blocks, recipe, hooks, way)
    else:
        o, lse = ([load(x) for x in call.tensors[name]] for name in ("o", "lse"))
    results |= {"o": o, "lse": lse}
    if "backward" in call.passes:
        results |= backward(blocks, o, lse, recipe, hooks, way)
    return hooks.results(results)


def forward(
    blocks: Blocks, recipe: Recipe, hooks: Hooks, way: Way = USUAL
) -> tuple[list[Array], list[Array]]:
    """Compute o and lse of every worker. Keys travel; queries and their softmax state stay."""
    workers = blocks.workers
    terms = hooks.terms("forward", blocks.terms)
    queries = [hooks.queries("forward", side) for side in blocks.queries]
    keys = [hooks.keys("forward", side) for side in blocks.keys]
    parts: list[list[Part]] = [[] for _ in range(workers)]
    held = keys
    for step in range(workers):
        for r in range(workers):
            at = At(
                "forward", r, step, workers, blocks.direction, queries[r], held[r], queries, keys
            )
            if meets(hooks, way, at, terms):
                part = block_forward(hooks, at, *hooks.sees(at), terms, recipe)
                parts[r].append((at, hooks.part(at, part, recipe)))
        if step < workers - 1:
            held = hooks.hop(Hop("forward", step, workers, blocks.direction, False), held)
    done = []
    for r in range(workers):
        running = all_merged(hooks, way, parts[r], empty_state(queries[r], keys[r]), recipe)
        done.append(hooks.finish(r, running, terms.sinks, recipe))
    return [o for o, _ in done], [lse for _, lse in done]


def empty_state(query: QuerySide, key: KeySide) -> SoftmaxState:
    assert query.q is not None and key.v is not None
    batch, heads, n_q, _ = query.q.shape
    return start(batch, heads, n_q, key.v.shape[3])


def backward(
    blocks: Blocks,
    o: list[Array],
    lse: list[Array],
    recipe: Recipe,
    hooks: Hooks,
    way: Way = USUAL,
) -> Results:
    """Compute dq, dk, dv, dsinks and dbias of every worker, in the circulation of the call."""
    hooks = way.pieces(hooks)
    workers, terms = blocks.workers, hooks.terms("backward", blocks.terms)
    queries = [
        hooks.queries("backward", with_row_sums(side, o[r], lse[r], blocks.dlse[r], recipe, hooks))
        for r, side in enumerate(blocks.queries)
    ]
    keys = [hooks.keys("backward", with_accumulators(side)) for side in blocks.keys]
    dsinks = []
    if terms.sinks is not None:
        for r, side in enumerate(queries):
            assert side.lse is not None and side.row_term is not None
            dsinks.append(hooks.sink_share(r, terms.sinks, side.lse, side.row_term))
    upper, lower = list(queries), list(keys)
    gathered: list[list[KeySide]] = [[] for _ in range(workers)]
    for step in range(workers):
        for r in range(workers):
            at = At(
                "backward", r, step, workers, blocks.direction, upper[r], lower[r], queries, keys
            )
            if meets(hooks, way, at, terms):
                share = block_backward(hooks, at, *hooks.sees(at), terms, recipe)
                upper[r], lower[r] = added(hooks, at, hooks.share(at, share), recipe)
        hop = Hop("backward", step, workers, blocks.direction, step == workers - 1)
        if blocks.circulation == "kv":
            lower = hooks.hop(hop, lower)
        elif blocks.circulation == "q":
            upper = hooks.hop(hop, upper)
        else:
            lower = gathered_after(hooks, hop, lower, gathered)
    if blocks.circulation == "gather":
        lower = [reduced(hooks, owner, gathered[owner], recipe) for owner in range(workers)]
    results: Results = {
        name: [round_to(getattr(side, name), recipe.gradients) + 0.0 for side in sides]
        for name, sides in (("dq", upper), ("dk", lower), ("dv", lower))
    }
    results["dsinks"] = dsinks
    results["dbias"] = [side.dbias for side in upper if side.dbias is not None]
    return results


def with_row_sums(
    side: QuerySide, o: Array, lse: Array, dlse: Array, recipe: Recipe, hooks: Hooks
) -> QuerySide:
    """Prepare a block of queries for the backward pass: add dy, lse, delta and accumulators of 0."""
    assert side.q is not None and side.dy is not None and side.rows is not None
    dy, dlse = hooks.seeds(side.dy, dlse)
    return dataclasses.replace(
        side,
        dy=dy,
        lse=round_to(lse, recipe.backward_lse),
        row_term=round_to(hooks.delta(side.owner, dy, o, dlse, recipe), recipe.delta),
        dq=np.zeros(side.q.shape),
        dbias=None if side.rows.bias is None else np.zeros(side.rows.bias.shape),
    )


def with_accumulators(side: KeySide) -> KeySide:
    assert side.k is not None and side.v is not None
    return dataclasses.replace(side, dk=np.zeros(side.k.shape), dv=np.zeros(side.v.shape))


def added(hooks: Hooks, at: At, share: BlockGradients, recipe: Recipe) -> tuple[QuerySide, KeySide]:
    """Add the gradients ``share`` of a pair of blocks to the accumulators of the two blocks; return the blocks."""
    query, key = at.query, at.key
    assert query.dq is not None and key.dk is not None and key.dv is not None
    dq = hooks.add(at, "dq", query.dq, share.dq, recipe.carried_dq)
    dk = hooks.add(at, "dk", key.dk, share.dk, recipe.carried_dkv)
    dv = hooks.add(at, "dv", key.dv, share.dv, recipe.carried_dkv)
    dbias = query.dbias
    if share.dbias is not None and dbias is not None:
        dbias = hooks.add(at, "dbias", dbias, share.dbias, "float64")
    return dataclasses.replace(query, dq=dq, dbias=dbias), dataclasses.replace(key, dk=dk, dv=dv)


def gathered_after(
    hooks: Hooks, hop: Hop, lower: list[KeySide], gathered: list[list[KeySide]]
) -> list[KeySide]:
    """Store the dk and dv that each worker computed for the current owner, and go on to the next owner's keys."""
    for side in lower:
        gathered[side.owner].append(side)
    moved: list[KeySide] = hooks.hop(hop, lower)
    return [with_accumulators(side) for side in moved]


def reduced(hooks: Hooks, owner: int, parts: list[KeySide], recipe: Recipe) -> KeySide:
    """Sum what the workers contribute to one owner's dk and dv, in worker order."""
    workers = len(parts)
    # In step t the worker owner + t had this owner's keys.
    in_order = [parts[(worker - owner) % workers] for worker in range(workers)]
    first, *rest = hooks.reduced(owner, in_order)
    dk, dv = first.dk, first.dv
    for part in rest:
        assert dk is not None and part.dk is not None and dv is not None and part.dv is not None
        dk = round_to(dk + part.dk, recipe.carried_dkv)
        dv = round_to(dv + part.dv, recipe.carried_dkv)
    return dataclasses.replace(first, dk=dk, dv=dv)


def block_results(call: Call, recipe: Recipe, hooks: Hooks, way: Way = USUAL) -> Results:
    """Compute the results of a 'block' call: o and lse of one block, or what the block adds to the gradients."""
    recipe = way.recipe(hooks.recipe(recipe))
    blocks = blocks_of(call, recipe)
    [query], [key] = blocks.queries, blocks.keys
    results: Results = {}
    if "forward" in call.passes:
        terms = hooks.terms("forward", blocks.terms)
        query, key = hooks.queries("forward", query), hooks.keys("forward", key)
        at = At("forward", 0, 0, 1, 1, query, key, [query], [key])
        part = hooks.part(at, block_forward(hooks, at, *hooks.sees(at), terms, recipe), recipe)
        o, lse = hooks.finish(0, part, None, recipe)
        results |= {"o": [o], "lse": [lse]}
    if "backward" in call.passes:
        terms = hooks.terms("backward", blocks.terms)
        query = dataclasses.replace(
            query,
            # A block call does not round dy.
            dy=hooks.seeds(whole(call, "dy"), blocks.dlse[0])[0],
            lse=round_to(whole(call, "lse"), recipe.backward_lse),
            row_term=round_to(whole(call, "delta"), recipe.delta),
        )
        query = hooks.queries("backward", query)
        key = hooks.keys("backward", key)
        at = At("backward", 0, 0, 1, 1, query, key, [query], [key])
        share = hooks.share(at, block_backward(hooks, at, *hooks.sees(at), terms, recipe))
        for name in ("dq", "dk", "dv"):
            results[name] = [round_to(getattr(share, name), recipe.gradients) + 0.0]
        if share.dbias is not None:
            results["dbias"] = [share.dbias]
    return hooks.results(results)


def merge_results(call: Call, recipe: Recipe, hooks: Hooks, way: Way = USUAL) -> Results:
    """Compute the results of a 'merge' call, which merges normalised partial results (o, lse) one by one."""
    recipe = way.recipe(hooks.recipe(recipe))
    states = []
    for o, lse in zip(
        load(call.worker("parts_o", 0)), load(call.worker("parts_lse", 0)), strict=True
    ):
        weight = np.where(np.isneginf(lse), 0.0, 1.0)
        states.append(SoftmaxState(lse, weight, np.where(weight[..., None] > 0, o, 0.0)))
    query, key = QuerySide(0), KeySide(0)
    parts = [
        (At("merge", 0, step, len(states), 1, query, key, [query], [key]), state)
        for step, state in enumerate(states)
    ]
    # A merge call has no empty state before the first part.
    way = dataclasses.replace(way, first_as_is=True)
    state = all_merged(hooks, way, parts, states[0], recipe)
    o, lse = hooks.finish(0, state, None, recipe)
    return hooks.results({"o": [o], "lse": [lse]})


RESULTS = {"ring": ring_results, "block": block_results, "merge": merge_results}
