"""Ring attention on many ranks: compare the arguments of all ranks, compute, and gather the results.

:func:`ring_over` is ``ringspec.ring`` for a program that runs on each rank.

Source: Liu, Zaharia, Abbeel, Ring Attention, https://arxiv.org/abs/2310.01889 (algorithm 1).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ringspec.comm.agreement import digests_of, meet
from ringspec.comm.links import Links
from ringspec.comm.part import Setup, joined_batch, share_of_batch, worker_result
from ringspec.comm.wire import Header, check_header, frame_of, pack, unpack
from ringspec.errors import CommunicationError, LostWorkerError, OptionError, RingspecError, shown
from ringspec.formats import check_results
from ringspec.problem.checks import flag, function
from ringspec.problem.model import Array, Problem
from ringspec.problem.options import Options, check, check_gradients, takes_options
from ringspec.recipes import Recipe
from ringspec.recipes import recipe as recipe_of
from ringspec.rings.attention import as_given
from ringspec.rings.layouts import unshard
from ringspec.rings.lockstep import Each, Moment, Observer
from ringspec.rings.ring import collect, layouts_for, schedules_for
from ringspec.rings.run import Run, WorkerResult
from ringspec.spec.block import (
    BlockBackward,
    BlockForward,
    block_backward,
    block_forward,
)
from ringspec.spec.ring_backward import Accumulate, plus
from ringspec.spec.ring_forward import Merge, merge_states
from ringspec.spec.schedule import (
    Schedule,
)

RESULTS = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
RESULT_TAG = 16 * 1024 + 8


def nothing(moment: Moment) -> None:
    """The default observer, which does nothing."""


PIECES = ("block_forward", "block_backward", "merge", "accumulate")


@takes_options
def ring_over(
    links: Links,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    dy: ArrayLike | None = None,
    *,
    ring: Links | None = None,
    root: int | None = None,
    dlse: ArrayLike | None = None,
    layout: Any = "contiguous",
    circulation: str = "kv",
    recipe: str | Recipe = "float64",
    direction: int = 1,
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
) -> Run | None:
    """Compute ring attention with this rank as one worker; every rank of ``links`` must call this function.

    Every rank passes the same whole tensors, in global order, and the same options, and computes with its own tokens. q
    [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], dy [B, H, Sq, Dv] and ``dlse`` [B, H, Sq] have any float
    dtype. If dy or dlse is given, the backward pass is computed as well. The number of workers W is the number of ranks
    in a ring. Keywords that are not listed here are as in :func:`ringspec.rings.ring.ring`; ``options`` are those of
    :class:`~ringspec.problem.options.Options`.

    ``ring``       links among the W ranks of this rank's ring, if the ranks of ``links`` form several rings. Each ring
                   computes an equal part of the batch, and rank r is worker r mod W of ring r div W. Default: one
                   ring of all ranks
    ``root``       the only rank that gets the :class:`~ringspec.rings.run.Run`; the others get None. Default:
                   every rank gets it
    ``each``       ignored, because a rank has one worker; accepted so that ``**fast.pieces()`` can be passed
    ``observer``   a function called with each :class:`~ringspec.rings.lockstep.Moment` of this rank's worker

    The result is bit-identical to that of ``ringspec.ring``, with two exceptions if there are several rings:
    ``dsinks``, and ``dbias`` if the bias has no batch axis. Both are sums over the batch. Each ring sums over its part
    of the batch, and the partial sums are then added, so the rounding differs.

    Raises the errors of ``ringspec.ring`` on every rank. Any other exception, for example in a rank's observer, is
    raised on this rank; the others raise CommunicationError ('failed-worker'), which names the rank and the exception.
    Also raises CommunicationError ('disagreement') if arguments differ between ranks, and LostWorkerError if a rank
    does not answer.
    """
    ring = links if ring is None else ring
    given: dict[str, Any] = {
        "dy": dy,
        "dlse": dlse,
        "layout": layout,
        "circulation": circulation,
        "recipe": recipe,
        "direction": direction,
        "skip_masked": skip_masked,
        "schedules": (schedule, schedule_backward),
        "blocks": (block_forward, block_backward, merge, accumulate),
    }
    setup, error = None, None
    try:
        if observer is not None:
            function(observer, "observer")
        function(each, "each")
        setup = set_up(ring.size, q, k, v, given, dict(options))
    except RingspecError as refused:
        error = refused
    except Exception as raised:  # for example from an input's __array__
        error = failure(links, raised)
        error.__cause__ = raised
    run = run_over(links, ring, setup, error, observer or nothing, root)
    if run is not None and run.gradients is not None:
        return dataclasses.replace(run, gradients=as_given(run.gradients, options))
    return run


def set_up(
    workers: int, q: Any, k: Any, v: Any, given: dict[str, Any], options: dict[str, Any]
) -> Setup:
    """Check the arguments as ``ringspec.ring`` does, and return them as the setup of a ring."""
    problem = check(q, k, v, options)
    used = recipe_of(given["recipe"])
    skip_masked = flag(given["skip_masked"], "skip_masked")
    for name, block in zip(PIECES, given["blocks"], strict=True):
        function(block, name)
    layouts = layouts_for(problem, given["layout"], workers, options)
    schedules = schedules_for(
        problem,
        layouts,
        given["circulation"],
        given["direction"],
        skip_masked,
        given["schedules"],
    )
    seeds = None
    if given["dy"] is not None or given["dlse"] is not None:
        seeds = seeds_of(problem, given["dy"], given["dlse"])
    return Setup(problem, seeds, used, *layouts, *schedules, given["blocks"])


def seeds_of(problem: Problem, dy: Any, dlse: Any) -> tuple[Array, Array]:
    """Return dy and dlse as float64, with zeros in place of None."""
    dy = np.zeros(problem.q.shape[:3] + problem.v.shape[3:]) if dy is None else dy
    return check_gradients(problem, dy, dlse)


def run_over(
    links: Links,
    ring: Links,
    setup: Setup | None,
    error: RingspecError | None = None,
    observe: Observer = nothing,
    root: int | None = None,
) -> Run | None:
    """Compare the setups of all ranks, compute this rank's part, and gather the results.

    ``error``: the error with which this rank's setup failed; every rank then raises it. ``root`` is that of
    :func:`ring_over`. Gradients have the specification's shapes: dsinks is [H, N] (see ``rings.attention.as_given``).
    """
    groups, rest = divmod(links.size, ring.size)
    if error is None and rest:
        error = OptionError(
            f"a number of ranks that rings of {ring.size} divide",
            str(links.size),
            "start W ranks for each ring",
        )
    if error is None and not (root is None or 0 <= root < links.size):
        error = OptionError(f"a root from 0 to {links.size - 1}", shown(root), "leave it out")
    parts: dict[str, bytes] = {}
    if setup is not None:
        batch = setup.problem.q.shape[0]
        if error is None and batch % groups:
            fix = f"give a batch that is a multiple of {groups}"
            error = OptionError(f"a batch that {groups} rings can share", f"B = {batch}", fix)
        parts = parts_of(setup, root)
    meet(links, "at the start", error, parts)
    assert setup is not None
    try:
        local = share_of_batch(setup, links.rank // ring.size, groups)
        results = gathered(links, worker_result(ring, local, observe), root)
        run = put_together(setup, results, ring.size) if results else None
    except LostWorkerError:
        raise
    except RingspecError as refused:
        links.stop(refused)
        raise
    except Exception as raised:
        links.stop(failure(links, raised))
        raise
    meet(links, "at the end")
    return run


def failure(links: Links, raised: Exception) -> CommunicationError:
    """Return the error for the other ranks if this rank has raised ``raised``, for example in a user's function."""
    return CommunicationError(
        "every rank to finish its pass",
        f"{type(raised).__name__} on {links.name(links.rank)}: {raised}",
        f"see the traceback of {links.name(links.rank)}",
        code="failed-worker",
    )


def parts_of(setup: Setup, root: int | None) -> dict[str, bytes]:
    """Return digests of everything that must be equal on all ranks, by the name that messages use."""
    schedules = [
        (repr(dataclasses.replace(schedule, skipped=frozenset())), sorted(schedule.skipped))
        for schedule in (setup.forward, setup.backward)
    ]
    blocks = [
        f"{getattr(block, '__module__', '')}.{getattr(block, '__qualname__', type(block).__name__)}"
        for block in setup.blocks
    ]
    others = [
        ("root", (root,)),
        ("recipe", (repr(setup.recipe),)),
        ("layout", (setup.layout_q.table, setup.layout_k.table)),
        ("circulation, direction or schedule", schedules),
        ("block computation", blocks),
    ]
    return digests_of(setup.problem, setup.seeds, others)


def gathered(links: Links, mine: WorkerResult, root: int | None) -> list[WorkerResult]:
    """Return the results of all ranks, in the order of the ranks.

    If ``root`` is a rank, only this rank gets the results, and the others get an empty list. None: every rank gets
    them.
    """
    names = tuple(name for name in RESULTS if getattr(mine, name) is not None)
    frame = frame_of(mine, names)

    def header(source: int, target: int) -> Header:
        return Header("gather of the results", 0, RESULT_TAG, source, target, source)

    targets = range(links.size) if root is None else [root]
    sources = range(links.size) if root in (None, links.rank) else range(0)
    posted = {}
    for source in sources:
        if source != links.rank:
            what = f"waits at the end for the results of {links.name(source)}"
            posted[source] = links.receive(source, RESULT_TAG, frame.size, what)
    sends = []
    for target in targets:
        if target != links.rank:
            what = f"waits at the end until {links.name(target)} has taken its results"
            buffer = pack(mine, frame, header(links.rank, target))
            sends.append(links.send(target, RESULT_TAG, buffer, what))
    results = []
    for source in sources:
        if source == links.rank:
            results.append(mine)
            continue
        buffer = links.wait(posted[source])
        check_header(buffer, header(source, links.rank))
        results.append(dataclasses.replace(mine, **unpack(buffer, frame, mine)))  # type: ignore[arg-type]
    for pending in sends:
        links.wait(pending)
    return results


def put_together(setup: Setup, results: list[WorkerResult], workers: int) -> Run:
    """Build the :class:`~ringspec.rings.run.Run` from the results of all ranks."""
    problem, layout_q, layout_k = setup.problem, setup.layout_q, setup.layout_k
    bias = problem.rows.bias
    per_batch = bias is not None and bias.shape[0] != 1
    joined = [
        dataclasses.replace(
            joined_batch(results[r::workers], per_batch),
            worker=r,
            index_q=layout_q.table[r],
            index_k=layout_k.table[r],
        )
        for r in range(workers)
    ]
    gradients = None
    if setup.seeds is not None:
        gradients = collect(problem, joined, layout_q, layout_k)
        if setup.recipe.products == "float64" and setup.given is None:
            check_results(**dataclasses.asdict(gradients))
    return Run(
        problem,
        setup.recipe,
        layout_q,
        layout_k,
        setup.forward,
        None if gradients is None else setup.backward,
        tuple(joined),
        unshard([w.o for w in joined], layout_q),
        unshard([w.lse for w in joined], layout_q),
        gradients,
        setup.seeds,
        (),
        setup.blocks,
    )
