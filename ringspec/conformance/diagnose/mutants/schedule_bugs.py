"""Ring steps that compute with stale or late blocks, are left out, or whose results are lost."""

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
    """Wherever keys travel."""
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
    """The last head of dk is copied before the share of the last step lands."""
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
        "backward differentiates every step against step-0 keys",
        "Each step reads what the attention of step 0 saved: keys, values, and the lse and o of "
        "that block. The forward is right. With two or more workers, dq, dk and dv are wrong.",
        "huggingface/diffusers/issues/14265", "huggingface/diffusers/pull/14274",
        flags=("stale-keys",),
        applies=when(ring(2), circulates("kv", "gather"), backward),
        sees=stale_keys,
        probabilities=block_probabilities,
        score_gradient=block_delta,
    ),
    mutant(
        "stale-keys-alone",
        "backward reads the keys of step 0 with the row sums of whole rows",
        "The backward rotates keys and values in local variables, but each step reads those that "
        "were saved at step 0. lse and dy_o_sum are right. With two or more workers, dq, dk and "
        "dv are wrong.",
        flags=("stale-keys",),
        applies=when(ring(2), circulates("kv", "gather"), backward),
        sees=stale_keys,
    ),
    mutant(
        "stale-keys-in-forward",
        "forward computes every step with step-0 keys",
        "Each step reads the worker's own keys and values instead of those that arrived. With one "
        "worker nothing shows.",
        flags=("stale-keys",),
        applies=when(ring(2), forward),
        sees=stale_keys_forward,
    ),
    mutant(
        "stale-queries",
        "backward of the Q ring computes every step with step-0 queries and dy",
        "lse and dy_o_sum travel; q and dy are read from the worker's own block.",
        flags=("stale-keys",),
        applies=QUERY_RING,
        sees=stale_queries,
    ),
    mutant(
        "row-sums-not-travelling",
        "lse and dy_o_sum do not travel with their queries in the Q ring",
        "Each step uses q and dy of the visiting block, but lse and dy_o_sum of the worker's own "
        "rows.",
        applies=QUERY_RING,
        sees=stale_row_sums,
    ),
    mutant(
        "key-positions-not-travelling",
        "positions and segment ids of keys do not travel with them",
        "Every visiting block is masked as if it were the worker's own. Without a mask nothing shows.",
        flags=("positions-not-sharded", "causal-on-every-step"),
        applies=ring(2),
        sees=stale_columns,
    ),
    mutant(
        "dq-not-home",
        "the last step's contribution to dq is lost in the Q ring",
        "dq returns to its owner before the last block is computed. The contribution of that "
        "block stays on the worker that computed it.",
        flags=("dq-not-home",),
        applies=QUERY_RING,
        add=without_last_share,
    ),
    mutant(
        "values-one-step-late",
        "values arrive one ring step later than their keys",
        "The step waits for the transfer of keys only; the values are still those of the previous "
        "step.",
        flags=("buffer-reuse",),
        applies=FORWARD_RING,
        sees=values_late,
        guises=(
            guise(
                "in both passes",
                when(ring(2), circulates("kv", "q")),
                sees=values_late_in_both,
            ),
        ),
    ),
    mutant(
        "blocks-one-step-late",
        "each step computes with the block of the previous step",
        "A step does not wait for its own transfer: the first block is counted twice and the last "
        "never.",
        flags=("buffer-reuse",),
        applies=FORWARD_RING,
        sees=one_block_late,
    ),
    mutant(
        "last-step-dropped",
        "the last ring step is not computed",
        "The loop ends one step early, so that each worker misses one block of keys.",
        applies=when(ring(2), forward),
        computes=forward_not_in_last_step,
        guises=(
            guise("in both passes", ring(2), computes=not_in_last_step),
            guise(
                "in both passes, and gradients end one hop short",
                when(ring(2), circulates("kv", "q")),
                computes=not_in_last_step,
                hop=not_home,
            ),
        ),
    ),
    mutant(
        "last-step-dropped-in-backward",
        "the last ring step of the backward is not computed",
        "The forward is right. dq, dk and dv lack the contribution of one pair of blocks for each "
        "worker.",
        applies=when(ring(2), backward),
        computes=backward_not_in_last_step,
        guises=(
            guise(
                "gradients end one hop short",
                when(ring(2), circulates("kv", "q"), backward),
                computes=backward_not_in_last_step,
                hop=not_home,
            ),
        ),
    ),
    mutant(
        "own-block-dropped",
        "the first ring step is not computed",
        "Each worker computes only after a transfer, and so never with its own keys.",
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
        "dk and dv are those of the last ring step only",
        "Each step overwrites the accumulator instead of adding to it.",
        applies=when(ring(2), circulates("kv", "q"), backward),
        add=overwritten("dk", "dv"),
    ),
    mutant(
        "dq-overwritten",
        "dq is that of the last ring step only",
        "Each step overwrites the accumulator instead of adding to it; dk and dv are right.",
        applies=when(ring(2), backward),
        add=overwritten("dq", "dbias"),
        guises=(guise("dbias is right", when(ring(2), backward), add=overwritten("dq")),),
    ),
    mutant(
        "first-share-twice",
        "the contribution of the first ring step is added twice",
        "The accumulators start with the first contribution, and it is added to them once more.",
        applies=when(ring(1), backward),
        add=first_share_twice,
    ),
    mutant(
        "dkv-cloned-early",
        "dk of the last head lacks the contribution that arrives last",
        "The buffer of a head is copied before its reduction has finished. Other heads, dv and "
        "the forward are right. With one worker nothing shows.",
        "cornstarch-org/Cornstarch/pull/70",
        applies=when(ring(2), backward),
        add=cloned_early,
    ),
    mutant(
        "other-workers-unwritten",
        "only the first worker's results are written",
        "The kernel is launched on the first device, whichever device holds the tensors. A test "
        "that checks only the first worker sees nothing.",
        "Dao-AILab/flash-attention/pull/1793",
        applies=ring(2),
        results=other_workers_unwritten,
        guises=(
            guise(
                "only o, which the backward reads", when(ring(2), forward), finish=o_of_first_worker
            ),
        ),
    ),
)  # fmt: skip
