"""The whole ring in one process: shard, run every worker in lockstep, gather the results.

:func:`ring` is the public entry. A :class:`Run` is its result, with every worker's numbers and, on
request, every worker's state before and after every step.

Source: Liu, Zaharia, Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ringspec.errors import LayoutError, OptionError, ScheduleError, shown
from ringspec.formats import check_results, round_to
from ringspec.problem.checks import check_workers, flag, function
from ringspec.problem.model import Array, Problem
from ringspec.problem.options import Options, check, check_gradients, takes_options
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.attention import as_given
from ringspec.rings.layouts import make_layout, shard, unshard
from ringspec.rings.lockstep import Each, Moment, Observer, lockstep, of_all, with_immutable_inputs
from ringspec.rings.run import Run, WorkerResult
from ringspec.rings.schedules import (
    backward_schedule,
    check_circulation,
    check_direction,
    forward_schedule,
    skip,
)
from ringspec.rings.validator import validate
from ringspec.spec.block import (
    BlockBackward,
    BlockForward,
    block_backward,
    block_forward,
)
from ringspec.spec.dense_backward import Gradients
from ringspec.spec.layout import Layout
from ringspec.spec.masks import visible
from ringspec.spec.ring_backward import (
    Accumulate,
    backward_finish,
    backward_start,
    backward_step,
    plus,
)
from ringspec.spec.ring_forward import (
    Merge,
    forward_finish,
    forward_start,
    forward_step,
    merge_states,
)
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import BackwardState, ForwardState


@takes_options
def ring(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike | None = None,
    *,
    dlse: ArrayLike | None = None,
    workers: int,
    layout: Any = "contiguous",
    circulation: str = "kv",
    recipe: str | Recipe = "float64",
    direction: int = 1,
    record: bool = False,
    observer: Observer | None = None,
    skip_masked: bool = False,
    schedule: Schedule | None = None,
    schedule_backward: Schedule | None = None,
    block_forward: BlockForward = block_forward,
    block_backward: BlockBackward = block_backward,
    merge: Merge = merge_states,
    accumulate: Accumulate = plus,
    each: Each = map,
    **options: Unpack[Options],
) -> Run:
    """Compute ring attention over ``workers`` workers; with dy (or dlse), its backward pass as well.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], dy [B, H, Sq, Dv], dlse [B, H, Sq] are of any
    float dtype, in global order. Keywords are those of :func:`~ringspec.rings.attention.attention`
    (:class:`~ringspec.problem.options.Options` lists them) and:

    ``workers``      W >= 1
    ``layout``       'contiguous', 'striped', 'zigzag', 'zigzag_per_document' (with cu_seqlens), a
                     table [W, n] of token indices (-1 = padding), or a pair of layouts, for q and for k
    ``circulation``  'kv' (backward: K, V, dK, dV travel), 'q' (backward: Q, dY, LSE, delta - dlse, dQ
                     travel), 'gather' (all keys are gathered first)
    ``recipe``       name or :class:`~ringspec.recipes.Recipe`: where values are rounded
    ``direction``    1: worker r sends to r + 1; -1: worker r sends to r - 1
    ``record``       keep every worker's state before and after every step
    ``observer``     a function that is called with each :class:`~ringspec.rings.lockstep.Moment`
    ``skip_masked``  do not compute pairs of blocks that the mask hides entirely
    ``schedule``, ``schedule_backward``    your own schedules, which are validated first
    ``block_forward``, ``block_backward``  functions that compute one block (see ``spec.block``)
    ``merge``, ``accumulate``  functions that merge a block's state into the running one, and add its
                     gradients to the accumulators (see ``spec.ring_forward``, ``spec.ring_backward``)
    ``each``         a function like ``map`` that runs the independent work of the W workers. The default
                     ``map`` runs one worker after another; ``map`` of an executor can run them in parallel

    Returns a :class:`Run`. Bad input raises a subclass of :class:`~ringspec.errors.RingspecError`.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 1, 4, 2)); v = np.arange(8.0).reshape(1, 1, 4, 2)
    >>> run = ring(q, k, v, workers=2, causal=True)
    >>> run.o[0, 0, :, 0].tolist(), run.worker(1).o[0, 0, :, 0].tolist()
    ([0.0, 1.0, 2.0, 3.0], [2.0, 3.0])
    """
    problem = check(q, k, v, dict(options))
    used, workers = recipe_of(recipe), check_workers(workers)
    record, skip_masked = flag(record, "record"), flag(skip_masked, "skip_masked")
    function(block_forward, "block_forward")
    function(block_backward, "block_backward")
    function(merge, "merge")
    function(accumulate, "accumulate")
    function(each, "each")
    if observer is not None:
        function(observer, "observer")
    layout_q, layout_k = layouts_for(problem, layout, workers, options)
    forward, backward = schedules_for(
        problem,
        (layout_q, layout_k),
        circulation,
        direction,
        skip_masked,
        (schedule, schedule_backward),
    )
    moments: list[Moment] = []

    def observe(moment: Moment) -> None:
        if record:
            moments.append(moment)
        if observer is not None:
            observer(moment)

    results = run_forward(
        problem, used, layout_q, layout_k, forward, block_forward, observe, merge, each
    )
    if used.products == "float64":
        for result in results:
            check_results(o=result.o)
    gradients, seeds = None, None
    if dy is not None or dlse is not None:
        dy = np.zeros(problem.q.shape[:3] + problem.v.shape[3:]) if dy is None else dy
        seeds = check_gradients(problem, dy, dlse)
        results = run_backward(
            problem,
            seeds,
            used,
            layout_q,
            layout_k,
            backward,
            block_backward,
            results,
            observe,
            accumulate,
            each,
        )
        gradients = as_given(collect(problem, results, layout_q, layout_k), options)
        if used.products == "float64":
            check_results(**dataclasses.asdict(gradients))
    return Run(
        problem,
        used,
        layout_q,
        layout_k,
        forward,
        backward if gradients is not None else None,
        tuple(results),
        unshard([w.o for w in results], layout_q),
        unshard([w.lse for w in results], layout_q),
        gradients,
        seeds,
        tuple(moments),
        (block_forward, block_backward, merge, accumulate),
    )


def schedules_for(
    problem: Problem,
    layouts: tuple[Layout, Layout],
    circulation: str,
    direction: int,
    skip_masked: bool,
    given: tuple[Schedule | None, Schedule | None],
) -> tuple[Schedule, Schedule]:
    """Return the validated schedules of the forward and backward pass.

    ``given`` are the caller's schedules. In place of None, a schedule is made from ``circulation`` and ``direction``.
    With ``skip_masked``, both schedules skip the pairs of blocks that the mask hides entirely.
    """
    check_circulation(circulation)
    direction = check_direction(direction)
    workers = layouts[0].workers
    forward, backward = given
    if forward is None:
        forward = forward_schedule(circulation, workers, direction)
    if backward is None:
        backward = backward_schedule(circulation, workers, direction)
    if skip_masked:
        check_schedule(forward, "forward", problem, *layouts)
        check_schedule(backward, "backward", problem, *layouts)
        invisible = invisible_pairs(problem, *layouts)
        forward, backward = skip(forward, invisible), skip(backward, invisible)
    check_schedule(forward, "forward", problem, *layouts)
    check_schedule(backward, "backward", problem, *layouts)
    return forward, backward


def layouts_for(problem: Problem, layout: Any, workers: Any, options: Any) -> tuple[Layout, Layout]:
    """Return the layout of the queries and the layout of the keys, as the argument ``layout`` of :func:`ring` says."""
    n_q, n_k = problem.q.shape[2], problem.k.shape[2]
    for_q, for_k = layout if isinstance(layout, tuple) and len(layout) == 2 else (layout, layout)
    one_table = not isinstance(for_k, str) and for_k is for_q
    if one_table and n_q != n_k:
        raise LayoutError(
            "a table for the queries and one for the keys, because Sq != Sk",
            f"one table, Sq = {n_q}, Sk = {n_k}",
            "pass layout=(table_q, table_k)",
        )
    cu_q = options.get("cu_seqlens")
    cu_k = cu_q if options.get("cu_seqlens_k") is None else options["cu_seqlens_k"]
    return make_layout(for_q, n_q, workers, cu_q), make_layout(for_k, n_k, workers, cu_k)


def block_visible(problem: Problem, layout_q: Layout, layout_k: Layout, a: int, b: int) -> bool:
    """Return whether any pair of queries of worker a and keys of worker b is visible."""
    rows, columns = problem.rows.take(layout_q.table[a]), problem.columns.take(layout_k.table[b])
    return bool(visible(rows, columns, problem.terms).any())


def invisible_pairs(problem: Problem, layout_q: Layout, layout_k: Layout) -> list[tuple[int, int]]:
    """Return (query owner, key owner) of each pair of blocks that the mask hides entirely."""
    workers = range(layout_q.workers)
    return [
        (a, b)
        for a in workers
        for b in workers
        if not block_visible(problem, layout_q, layout_k, a, b)
    ]


def check_schedule(
    schedule: Schedule, phase: str, problem: Problem, layout_q: Layout, layout_k: Layout
) -> None:
    """Raise an error unless a schedule is valid for a phase, the number of workers and the mask of the problem."""
    if not isinstance(schedule, Schedule):
        raise ScheduleError("a Schedule", shown(schedule), f"make it with {phase}_schedule")
    if (phase == "backward") != bool(schedule.accumulators):
        raise OptionError(
            f"a {phase} schedule (only a backward has accumulators)",
            f"{schedule.name!r} with accumulators {schedule.accumulators}",
            f"make it with {phase}_schedule",
        )
    if schedule.workers != layout_q.workers:
        raise OptionError(
            f"a schedule for W = {layout_q.workers}",
            f"a schedule for W = {schedule.workers}",
            "make the schedule with the same number of workers",
        )
    validate(schedule, lambda a, b: block_visible(problem, layout_q, layout_k, a, b))


def run_forward(
    problem: Problem,
    recipe: Recipe,
    layout_q: Layout,
    layout_k: Layout,
    schedule: Schedule,
    block: BlockForward,
    observe: Observer,
    merge: Merge = merge_states,
    each: Each = map,
) -> list[WorkerResult]:
    """Shard the problem, run all forward steps, and return o and lse of every worker."""

    def begin(r: int) -> ForwardState:
        own = problem.take(layout_q.table[r], layout_k.table[r])
        return with_immutable_inputs(forward_start(r, own, recipe))

    def end(r: int) -> WorkerResult:
        o, lse = forward_finish(states[r])
        return WorkerResult(r, layout_q.table[r], layout_k.table[r], o, lse)

    states = list(of_all(layout_q.workers, begin, each))
    one_step = functools.partial(forward_step, merge=merge)
    states, _ = lockstep("forward", one_step, states, schedule, block, observe, each)
    return list(of_all(layout_q.workers, end, each))


def run_backward(
    problem: Problem,
    seeds: tuple[Array, Array],
    recipe: Recipe,
    layout_q: Layout,
    layout_k: Layout,
    schedule: Schedule,
    block: BlockBackward,
    results: list[WorkerResult],
    observe: Observer,
    accumulate: Accumulate = plus,
    each: Each = map,
) -> list[WorkerResult]:
    """Run all backward steps and add the gradients to each worker's ``results``.

    ``seeds`` are dy and dlse. o and lse are taken from ``results``, with the rounding of the forward pass (RING-13).
    """
    dy, dlse = (shard(x, layout_q) for x in seeds)

    def begin(r: int) -> BackwardState:
        own = problem.take(layout_q.table[r], layout_k.table[r])
        o, lse = results[r].o, results[r].lse
        return with_immutable_inputs(backward_start(r, own, dy[r], dlse[r], o, lse, recipe))

    states = list(of_all(layout_q.workers, begin, each))
    one_step = functools.partial(backward_step, accumulate=accumulate)
    states, inboxes = lockstep("backward", one_step, states, schedule, block, observe, each)

    def end(r: int) -> WorkerResult:
        state = backward_finish(states[r], schedule, inboxes[r], accumulate)
        query, key = state.query, state.key
        return dataclasses.replace(
            results[r], dq=query.dq, dk=key.dk, dv=key.dv, dsinks=state.dsinks, dbias=query.dbias
        )

    return list(of_all(layout_q.workers, end, each))


def collect(
    problem: Problem, results: list[WorkerResult], layout_q: Layout, layout_k: Layout
) -> Gradients:
    """Return the global gradients: dq, dk, dv unsharded, and the workers' dsinks and dbias combined (RING-12)."""
    dq, dk, dv = [], [], []
    dsinks: Array | None = None
    for w in results:
        assert w.dq is not None and w.dk is not None and w.dv is not None
        dq.append(w.dq)
        dk.append(w.dk)
        dv.append(w.dv)
        if w.dsinks is not None:
            dsinks = w.dsinks if dsinks is None else dsinks + w.dsinks
    dbias = collect_bias(problem, results, layout_q)
    return Gradients(
        unshard(dq, layout_q), unshard(dk, layout_k), unshard(dv, layout_k), dsinks, dbias
    )


def collect_bias(problem: Problem, results: list[WorkerResult], layout_q: Layout) -> Array | None:
    """Return dbias with its rows in global order, or the sum over the workers if all rows share the bias."""
    if problem.rows.bias is None:
        return None
    parts = [w.dbias for w in results if w.dbias is not None]
    if problem.rows.bias.shape[2] != 1:
        return unshard(parts, layout_q)
    total = np.zeros(problem.rows.bias.shape)
    for part in parts:
        total = total + part
    return total


def rounded_inputs(problem: Problem, recipe: Recipe) -> Problem:
    """Return the problem with q, k, v rounded to the recipe's input format, as :func:`ring` rounds them."""
    q, k, v = (round_to(x, recipe.inputs) for x in (problem.q, problem.k, problem.v))
    return dataclasses.replace(problem, q=q, k=k, v=v)
