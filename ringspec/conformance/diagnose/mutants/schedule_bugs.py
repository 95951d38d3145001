"""Ring steps that use stale or late blocks, steps that are left out, and results that are lost.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringspec.conformance.diagnose.mutants.backward_bugs import block_delta, block_probabilities
from ringspec.conformance.diagnose.mutants.conditions import (
    backward,
    circulates,
    forward,
    ring,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At, Results, add, finished
from ringspec.conformance.diagnose.mutants.mutant import guise, mutant
from ringspec.conformance.diagnose.mutants.travel_bugs import QUERY_RING, not_home, with_inputs_of
from ringspec.problem.model import Array
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState
from ringspec.spec.worker import KeySide, QuerySide


def not_in_last_step(at: At) -> bool:
    return at.step < at.workers - 1


def not_first(at: At) -> bool:
    return at.step > 0


def forward_not_in_last_step(at: At) -> bool:
    return at.phase == "backward" or not_in_last_step(at)


def backward_not_in_last_step(at: At) -> bool:
    return at.phase == "forward" or not_in_last_step(at)


def last_step_alone(
    at: At, running: SoftmaxState, part: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    return part


def one_block_late(at: At) -> tuple[QuerySide, KeySide]:
    if at.phase == "backward":
        return at.query, at.key
    late = at.all_keys[at.visitor(max(at.step - 1, 0))]
    return at.query, with_inputs_of(at.key, late)


def values_late(at: At) -> tuple[QuerySide, KeySide]:
    if at.phase == "backward":
        return at.query, at.key
    late = at.all_keys[at.visitor(max(at.step - 1, 0))]
    return at.query, with_inputs_of(at.key, late, "v")


def values_late_in_both(at: At) -> tuple[QuerySide, KeySide]:
    """Use the values of the previous ring step, in the forward pass and in a backward pass in which keys travel."""
    if at.key.owner != at.visitor(at.step):
        return at.query, at.key
    late = at.all_keys[at.visitor(max(at.step - 1, 0))]
    return at.query, with_inputs_of(at.key, late, "v")


def stale_keys(at: At) -> tuple[QuerySide, KeySide]:
    if at.phase == "forward":
        return at.query, at.key
    return at.query, with_inputs_of(at.key, at.all_keys[at.worker])


def stale_keys_forward(at: At) -> tuple[QuerySide, KeySide]:
    if at.phase == "backward":
        return at.query, at.key
    return at.query, with_inputs_of(at.key, at.all_keys[at.worker])


def stale_queries(at: At) -> tuple[QuerySide, KeySide]:
    if at.phase == "forward":
        return at.query, at.key
    return with_inputs_of(at.query, at.all_queries[at.worker], "q", "dy"), at.key


def stale_row_sums(at: At) -> tuple[QuerySide, KeySide]:
    if at.phase == "forward":
        return at.query, at.key
    return with_inputs_of(at.query, at.all_queries[at.worker], "lse", "row_term"), at.key


def stale_columns(at: At) -> tuple[QuerySide, KeySide]:
    return at.query, with_inputs_of(at.key, at.all_keys[at.worker], "columns")


def without_last_share(at: At, name: str, total: Array, share: Array, format: str) -> Array:
    if name in ("dq", "dbias") and at.step == at.workers - 1:
        return total
    return add(at, name, total, share, format)


def overwritten(*names: str) -> Callable[[At, str, Array, Array, str], Array]:
    def put(at: At, name: str, total: Array, share: Array, format: str) -> Array:
        return add(at, name, 0.0 * total if name in names else total, share, format)

    return put


def first_share_twice(at: At, name: str, total: Array, share: Array, format: str) -> Array:
    total = add(at, name, total, share, format)
    return add(at, name, total, share, format) if at.step == 0 else total


def cloned_early(at: At, name: str, total: Array, share: Array, format: str) -> Array:
    """Add a block's gradients, but leave out what the last ring step adds to dk of the last head."""
    after = add(at, name, total, share, format)
    if name == "dk" and at.step == at.workers - 1:
        after[:, -1] = total[:, -1]
    return after


def o_of_first_worker(
    worker: int, running: SoftmaxState, sinks: Array | None, recipe: Recipe
) -> tuple[Array, Array]:
    o, lse = finished(worker, running, sinks, recipe)
    return (o if worker == 0 else np.zeros(o.shape)), lse


def other_workers_unwritten(results: Results) -> Results:
    return results | {
        name: [x if r == 0 else np.zeros_like(x) for r, x in enumerate(arrays)]
        for name, arrays in results.items()
        if name in ("o", "dq", "dk", "dv")
    }


FORWARD_RING = when(ring(2), circulates("kv", "q"), forward)

BUGS = (
    mutant(
        "stale-keys",
        "every backward step uses the keys of step 0",
        "Each step reads the tensors that step 0 saved: keys, values, and the lse and o of that "
        "block. The forward pass is correct. With two or more workers, dq, dk and dv are wrong.",
        "huggingface/diffusers/issues/14265", "huggingface/diffusers/pull/14274",
        flags=("stale-keys",),
        applies=when(ring(2), circulates("kv", "gather"), backward),
        sees=stale_keys,
        probabilities=block_probabilities,
        score_gradient=block_delta,
    ),
    mutant(
        "stale-keys-alone",
        "every backward step uses the keys of step 0, with the correct lse and delta",
        "The backward pass rotates keys and values in local variables, but each step reads the "
        "ones that were saved at step 0. With two or more workers, dq, dk and dv are wrong.",
        flags=("stale-keys",),
        applies=when(ring(2), circulates("kv", "gather"), backward),
        sees=stale_keys,
    ),
    mutant(
        "stale-keys-in-forward",
        "every forward step uses the keys of step 0",
        "Each step reads the worker's own keys and values instead of the ones that arrived. With "
        "one worker the bug has no effect.",
        flags=("stale-keys",),
        applies=when(ring(2), forward),
        sees=stale_keys_forward,
    ),
    mutant(
        "stale-queries",
        "every backward step of the Q ring uses the queries and dy of step 0",
        "lse and delta are those of the visiting block; q and dy are read from the worker's own "
        "block.",
        flags=("stale-keys",),
        applies=QUERY_RING,
        sees=stale_queries,
    ),
    mutant(
        "row-sums-not-travelling",
        "lse and delta do not travel with their queries in the Q ring",
        "Each step uses q and dy of the visiting block, but lse and delta of the worker's own "
        "rows.",
        applies=QUERY_RING,
        sees=stale_row_sums,
    ),
    mutant(
        "key-positions-not-travelling",
        "keys travel without their positions and segment ids",
        "Every visiting block is masked as if it were the worker's own. Without a mask the bug "
        "has no effect.",
        flags=("positions-not-sharded", "causal-on-every-step"),
        applies=ring(2),
        sees=stale_columns,
    ),
    mutant(
        "dq-not-home",
        "the last step's contribution to dq is lost in the Q ring",
        "dq returns to its owner before the last block has been computed, so the contribution of "
        "that block never arrives.",
        flags=("dq-not-home",),
        applies=QUERY_RING,
        add=without_last_share,
    ),
    mutant(
        "values-one-step-late",
        "values arrive one ring step later than their keys",
        "Each step waits only for the transfer of the keys; its values are still those of the "
        "previous step.",
        flags=("buffer-reuse",),
        applies=FORWARD_RING,
        sees=values_late,
        guises=(
            guise(
                "in the backward pass as well",
                when(ring(2), circulates("kv", "q")),
                sees=values_late_in_both,
            ),
        ),
    ),
    mutant(
        "blocks-one-step-late",
        "each step computes with the block of the previous step",
        "No step waits for its transfer, so the first block is counted twice and the last one "
        "never.",
        flags=("buffer-reuse",),
        applies=FORWARD_RING,
        sees=one_block_late,
    ),
    mutant(
        "last-step-dropped",
        "the last ring step is not computed",
        "The loop ends one step early, so each worker misses one block of keys.",
        applies=when(ring(2), forward),
        computes=forward_not_in_last_step,
        guises=(
            guise("in the backward pass as well", ring(2), computes=not_in_last_step),
            guise(
                "in the backward pass as well, and gradients stop one hop short of their owner",
                when(ring(2), circulates("kv", "q")),
                computes=not_in_last_step,
                hop=not_home,
            ),
        ),
    ),
    mutant(
        "last-step-dropped-in-backward",
        "the last ring step of the backward pass is not computed",
        "The forward pass is correct. dq, dk and dv of each worker lack the contribution of one "
        "block.",
        applies=when(ring(2), backward),
        computes=backward_not_in_last_step,
        guises=(
            guise(
                "gradients also stop one hop short of their owner",
                when(ring(2), circulates("kv", "q"), backward),
                computes=backward_not_in_last_step,
                hop=not_home,
            ),
        ),
    ),
    mutant(
        "own-block-dropped",
        "the first ring step is not computed",
        "Each worker computes only after a transfer, and therefore never with its own keys.",
        applies=ring(2),
        computes=not_first,
    ),
    mutant(
        "last-step-alone",
        "o is the result of the last ring step only",
        "Each step overwrites the result of the previous steps instead of merging with it.",
        applies=when(ring(2), forward),
        merge=last_step_alone,
    ),
    mutant(
        "dkv-overwritten",
        "dk and dv contain only the contribution of the last ring step",
        "Each step overwrites the accumulator instead of adding to it.",
        applies=when(ring(2), circulates("kv", "q"), backward),
        add=overwritten("dk", "dv"),
    ),
    mutant(
        "dq-overwritten",
        "dq contains only the contribution of the last ring step",
        "Each step overwrites the accumulator instead of adding to it; dk and dv are correct.",
        applies=when(ring(2), backward),
        add=overwritten("dq", "dbias"),
        guises=(guise("dbias is correct", when(ring(2), backward), add=overwritten("dq")),),
    ),
    mutant(
        "first-share-twice",
        "the contribution of the first ring step is added twice",
        "The accumulators are initialised with the first contribution, which is then added again.",
        applies=when(ring(1), backward),
        add=first_share_twice,
    ),
    mutant(
        "dkv-cloned-early",
        "dk of the last head lacks the contribution that arrives last",
        "The buffer of a head is copied before its reduction has finished. Other heads, dv and "
        "the forward pass are correct. With one worker the bug has no effect.",
        "cornstarch-org/Cornstarch/pull/70",
        applies=when(ring(2), backward),
        add=cloned_early,
    ),
    mutant(
        "other-workers-unwritten",
        "only the first worker's results are written",
        "The kernel is always launched on the first device, whichever device holds the tensors. "
        "A test that checks only the first worker passes.",
        "Dao-AILab/flash-attention/pull/1793",
        applies=ring(2),
        results=other_workers_unwritten,
        guises=(
            guise(
                "only o is affected, and the backward pass reads the unwritten o",
                when(ring(2), forward),
                finish=o_of_first_worker,
            ),
        ),
    ),
)  # fmt: skip
