"""The work of one rank, which is one worker of a ring of W workers.

The ranks may form several rings, each of which computes a part of the batch (data parallelism). Rank r of all ranks is
worker r mod W of ring r div W.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringspec.comm.circulate import Halves, circulate
from ringspec.comm.links import Links
from ringspec.formats import check_results
from ringspec.problem.model import Array, Columns, Problem, Rows, take
from ringspec.recipes import Recipe
from ringspec.rings.lockstep import Observer, with_immutable_inputs
from ringspec.rings.run import WorkerResult
from ringspec.spec.block import BlockBackward, BlockForward
from ringspec.spec.dropout import keep_mask
from ringspec.spec.layout import Layout
from ringspec.spec.ring_backward import (
    Accumulate,
    add_block,
    backward_finish,
    backward_start,
    differentiate_block,
)
from ringspec.spec.ring_forward import (
    Merge,
    forward_finish,
    forward_start,
    merge_block,
    score_block,
)
from ringspec.spec.schedule import Schedule

Side = TypeVar("Side", Rows, Columns)


@dataclass(frozen=True)
class Setup:
    """A checked problem and everything that determines how it is computed. The setup is the same on every rank.

    ``seeds``: the upstream gradients dy and dlse; None without a backward pass. ``blocks``: the functions that compute
    and merge blocks. ``given``: if only the backward pass is run, the forward results of every worker.
    """

    problem: Problem
    seeds: tuple[Array, Array] | None
    recipe: Recipe
    layout_q: Layout
    layout_k: Layout
    forward: Schedule
    backward: Schedule
    blocks: tuple[BlockForward, BlockBackward, Merge, Accumulate]
    given: tuple[WorkerResult, ...] | None = None


def worker_result(links: Links, setup: Setup, observe: Observer) -> WorkerResult:
    """Run the forward pass of this rank's worker and, if there is an upstream gradient, the backward pass."""
    result = run_forward(links, setup, observe) if setup.given is None else setup.given[links.rank]
    if setup.seeds is None:
        return result
    return run_backward(links, setup, setup.seeds, result, observe)


def run_forward(links: Links, setup: Setup, observe: Observer) -> WorkerResult:
    """Run the forward pass of this rank's worker; ``rings.ring.run_forward`` does so for all workers."""
    r, recipe = links.rank, setup.recipe
    index_q, index_k = setup.layout_q.table[r], setup.layout_k.table[r]
    own = setup.problem.take(index_q, index_k)
    state = with_immutable_inputs(forward_start(r, own, recipe))
    halves = Halves(score_block, functools.partial(merge_block, merge=setup.blocks[2]))
    forward = "forward", halves, state, setup.forward, setup.blocks[0], observe
    state, _ = circulate(links, *forward)
    o, lse = forward_finish(state)
    if recipe.products == "float64":
        check_results(o=o)
    return WorkerResult(r, index_q, index_k, o, lse)


def run_backward(
    links: Links,
    setup: Setup,
    seeds: tuple[Array, Array],
    result: WorkerResult,
    observe: Observer,
) -> WorkerResult:
    """Run the backward pass of this rank's worker; ``rings.ring.run_backward`` does so for all workers."""
    own = setup.problem.take(result.index_q, result.index_k)
    dy, dlse = (take(x, result.index_q, axis=2) for x in seeds)
    state = backward_start(links.rank, own, dy, dlse, result.o, result.lse, setup.recipe)
    state = with_immutable_inputs(state)
    halves = Halves(differentiate_block, functools.partial(add_block, accumulate=setup.blocks[3]))
    backward = "backward", halves, state, setup.backward, setup.blocks[1], observe
    state, inbox = circulate(links, *backward)
    state = backward_finish(state, setup.backward, inbox, setup.blocks[3])
    return dataclasses.replace(
        result,
        dq=state.query.dq,
        dk=state.key.dk,
        dv=state.key.dv,
        dsinks=state.dsinks,
        dbias=state.query.dbias,
    )


def share_of_batch(setup: Setup, group: int, groups: int) -> Setup:
    """Return the setup of ring number ``group`` of ``groups``; its tensors are only this ring's part of the batch."""
    if groups == 1:
        return setup
    batch = setup.problem.q.shape[0]
    part = slice(group * batch // groups, (group + 1) * batch // groups)
    problem = with_keep(setup.problem, part)
    q, k, v = problem.q[part], problem.k[part], problem.v[part]
    rows, columns = cut(problem.rows, batch, part), cut(problem.columns, batch, part)
    problem = dataclasses.replace(problem, q=q, k=k, v=v, rows=rows, columns=columns)
    seeds = None if setup.seeds is None else (setup.seeds[0][part], setup.seeds[1][part])
    return dataclasses.replace(setup, problem=problem, seeds=seeds)


def with_keep(problem: Problem, part: slice) -> Problem:
    """Compute the dropout mask for the indices in the whole batch, before the batch is split (rule DROP-2)."""
    rows, columns, terms = problem.rows, problem.columns, problem.terms
    if terms.dropout_p == 0 or rows.keep is not None:
        return problem
    batch = problem.q.shape[0]
    keep = np.ones((batch, terms.heads, rows.index.size, columns.index.size), dtype=bool)
    keep[part] = keep_mask(
        cut(rows, batch, part).position,
        cut(columns, batch, part).position,
        heads=np.arange(terms.heads, dtype=np.int64),
        batches=np.arange(batch, dtype=np.int64)[part],
        dropout_p=terms.dropout_p,
        dropout_seed=terms.dropout_seed,
    )
    return dataclasses.replace(problem, rows=dataclasses.replace(rows, keep=keep))


def cut(side: Side, batch: int, part: slice) -> Side:
    """Return the data of queries or keys for a part of the batch; arrays without a batch axis are unchanged."""
    changed: dict[str, NDArray] = {}
    for field in dataclasses.fields(side):
        value = getattr(side, field.name)
        if field.name != "index" and value is not None and value.shape[0] == batch:
            changed[field.name] = value[part]
    return dataclasses.replace(side, **changed)


def joined_batch(parts: list[WorkerResult], per_batch_bias: bool) -> WorkerResult:
    """Combine one worker's results from all rings: concatenate along the batch axis, or add sums over the batch."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, NDArray | None] = {}
    for name in ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias"):
        arrays = [getattr(part, name) for part in parts]
        if arrays[0] is None:
            continue
        if name == "dsinks" or (name == "dbias" and not per_batch_bias):
            total = arrays[0]
            for array in arrays[1:]:
                total = total + array
            values[name] = total
        else:
            values[name] = np.concatenate(arrays)
    return dataclasses.replace(parts[0], **values)  # type: ignore[arg-type]
