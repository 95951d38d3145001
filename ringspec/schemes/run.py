"""Run a scheme with numbers: cut the problem into shards, execute both passes, put the results together.

o and lse of a row are finished at home, once per row, where sinks join the denominator (FWD-5). The backward pass takes o
and lse as the forward pass left them (RING-13); row_term = delta - dlse travels in place of both (RING-7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from ringspec.errors import ScheduleError
from ringspec.problem.model import Array, Problem
from ringspec.recipes import Recipe
from ringspec.rings.gradients import HasGradients, check_number, check_recorded, check_when
from ringspec.schemes.cost import SchemeCost, scheme_cost
from ringspec.schemes.defects import Defect
from ringspec.schemes.execute import Moment, Now, RankState, execute, one_step
from ringspec.schemes.multisets import mask_of
from ringspec.schemes.numbers import arithmetic, cells_of, forward_inputs, sinks_of, with_keep
from ringspec.schemes.parts import Part
from ringspec.schemes.scheme import Scheme
from ringspec.schemes.sharding import Shard, Sharding
from ringspec.schemes.show_run import run_as_summary, run_as_text
from ringspec.spec.dense_backward import Gradients, dy_o_sum, sink_gradient
from ringspec.spec.online_softmax import SoftmaxState, finish


@dataclass(frozen=True)
class RankResult:
    """The final results of one rank in float64, for the cells that it holds at home; padding slots are included.

    ``query`` and ``key`` are its shards: tokens x heads, as global numbers. ``o`` [B, h, n, Dv], ``lse`` [B, h, n], ``dq``
    [B, h, n, D], ``dk`` [B, hkv, n, D], ``dv`` [B, hkv, n, Dv]; gradients are None without dy. ``dbias`` is the part of the
    pairs that this rank computed, in the shape [B or 1, H or 1, Sq or 1, Sk or 1] of the bias; the sum over all ranks is
    that of the run.
    """

    rank: int
    query: Shard
    key: Shard
    o: Array
    lse: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dbias: Array | None = None


@dataclass(frozen=True, repr=False)
class SchemeRun(HasGradients):
    """The result of :func:`ringspec.context_parallel`.

    ``o`` [B, H, Sq, Dv], ``lse`` [B, H, Sq] and ``gradients`` are in global order, float64. Of a cell with several copies
    they hold the one of the lowest rank; ``ranks`` holds each rank's results, with all copies. ``scheme`` says what was
    run, ``problem`` and ``recipe`` with what. ``moments`` are the recorded steps of a run with ``record=True``.

    In the methods, ``phase`` is 'forward' or 'backward'. ``print(run)`` shows who holds what, and for each step what moves
    and how much is computed. ``print(run.text())`` shows every rank, as ``print(run.moment(0))`` does for one step.
    """

    problem: Problem
    recipe: Recipe
    scheme: Scheme
    ranks: tuple[RankResult, ...]
    o: Array
    lse: Array
    gradients: Gradients | None = None
    moments: tuple[Moment, ...] = ()

    def moment(self, step: int, phase: str = "forward") -> Moment:
        """Return the record of one step; raise NotRecordedError if it does not exist or was not recorded."""
        check_recorded(self.moments)
        self.check_phase(phase)
        steps = [moment for moment in self.moments if moment.phase == phase]
        check_number("step", step, len(steps))
        return steps[step]

    def replay(self) -> Iterator[Moment]:
        """Run every recorded step again, only from what its ranks held before it.

        Yields the moments in order; they equal the recorded ones bit for bit. Raises NotRecordedError without
        ``context_parallel(..., record=True)``.
        """
        check_recorded(self.moments)
        problem = with_keep(self.problem)
        for moment in self.moments:
            of_pass = arithmetic(problem, self.recipe, moment.phase)
            yield one_step(
                Now(self.scheme, moment.phase, moment.step, of_pass, refuse), moment.before
            )

    def state(self, rank: int, step: int, phase: str = "forward", when: str = "after") -> RankState:
        """Return what one rank holds in a step; ``when`` is 'before', 'computed' or 'after' (the transfers).

        Raises OptionError for another ``when``, NotRecordedError for a rank or step that does not exist.
        """
        check_when(when, WHEN)
        moment = self.moment(step, phase)
        check_number("rank", rank, len(self.ranks))
        state: RankState = getattr(moment, when)[rank]
        return state

    def cost(self, phase: str = "forward") -> SchemeCost:
        """Return what each rank sends and holds in a pass, in bytes of the recipe, and the visible pairs that it computes.

        Pairs are those of one batch entry; a pair that is hidden in some batch entries counts as visible. Raises
        NotRecordedError if the pass was not run.
        """
        self.check_phase(phase)
        q, v = self.problem.q, self.problem.v
        return scheme_cost(
            self.scheme,
            mask_of(self.problem),
            q.shape[3],
            v.shape[3],
            phase,
            recipe=self.recipe,
            batch=q.shape[0],
        )

    def __repr__(self) -> str:
        return f"<SchemeRun: {self.scheme.name}, mesh {self.scheme.mesh}>"

    def __str__(self) -> str:
        return run_as_summary(self.scheme, self.costs())

    def text(self) -> str:
        """Return the whole run as text: who computes what and what moves in each step, visible pairs, bytes.

        For a recorded run, it also says what each rank holds, sends, receives and merges.
        """
        return run_as_text(self.scheme, self.moments, self.costs())

    def costs(self) -> list[SchemeCost]:
        """Return the cost of each pass that was run."""
        phases = ("forward", "backward")[: 1 + (self.gradients is not None)]
        return [self.cost(phase) for phase in phases]


WHEN = ("before", "computed", "after")


def refuse(defect: Defect) -> NoReturn:
    """Raise ScheduleError: the scheme that is executed was not validated."""
    raise ScheduleError("a valid scheme", str(defect), "validate the scheme first", (defect,))


def run_scheme(
    problem: Problem,
    recipe: Recipe,
    scheme: Scheme,
    seeds: tuple[Array, Array] | None = None,
    record: bool = False,
) -> SchemeRun:
    """Run a validated scheme: the forward pass, and with ``seeds`` (dy, dlse) the backward pass."""
    problem = with_keep(problem)
    moments: list[Moment] = []
    observe = moments.append if record else None
    starts = [
        RankState(r, forward_inputs(problem, recipe, q, k))
        for r, (q, k) in enumerate(zip(scheme.home_q.shards, scheme.home_k.shards, strict=True))
    ]
    states = execute(
        scheme, "forward", starts, arithmetic(problem, recipe, "forward"), refuse, observe
    )
    results = tuple(forward_result(problem, recipe, scheme, state) for state in states)
    gradients = None
    if seeds is not None:
        starts = [
            backward_start(problem, recipe, start, result, seeds)
            for start, result in zip(starts, results, strict=True)
        ]
        dsinks = all_sink_gradients(problem, scheme.home_q, starts)
        bias = problem.rows.bias
        parts = None if bias is None else [np.zeros(bias.shape) for _ in starts]
        of_pass = arithmetic(problem, recipe, "backward", parts)
        states = execute(scheme, "backward", starts, of_pass, refuse, observe)
        results = tuple(
            backward_result(recipe, result, state, None if parts is None else parts[r])
            for r, (result, state) in enumerate(zip(results, states, strict=True))
        )
        dq = gathered([result.dq for result in results], scheme.home_q, problem.q.shape)
        dk = gathered([result.dk for result in results], scheme.home_k, problem.k.shape)
        dv = gathered([result.dv for result in results], scheme.home_k, problem.v.shape)
        dbias = None if parts is None else sum(parts, start=np.zeros(parts[0].shape))
        gradients = Gradients(dq, dk, dv, dsinks, dbias)
    shape = problem.q.shape[:3]
    o = gathered([r.o for r in results], scheme.home_o, (*shape, problem.v.shape[3]))
    lse = gathered([r.lse for r in results], scheme.home_o, shape)
    return SchemeRun(problem, recipe, scheme, results, o, lse, gradients, tuple(moments))


def forward_result(
    problem: Problem, recipe: Recipe, scheme: Scheme, state: RankState
) -> RankResult:
    """Return o and lse of a rank's rows, from its softmax state over all keys."""
    shard = scheme.home_o.shards[state.rank]
    running = SoftmaxState(**state.parts["state"].tensors)
    o, lse = finish(running, sinks_of(problem.terms, shard), recipe)
    return RankResult(state.rank, shard, scheme.home_k.shards[state.rank], o, lse)


def backward_start(
    problem: Problem,
    recipe: Recipe,
    start: RankState,
    result: RankResult,
    seeds: tuple[Array, Array],
) -> RankState:
    """Return what a rank holds before the backward pass: its inputs, and of its rows dy, lse and delta - dlse."""
    q = start.parts["q"]
    dy, dlse = (cells_of(x, q.shard) for x in seeds)
    dy = recipe.to_inputs(dy, "dy")
    row_term = recipe.to_delta(dy_o_sum(dy, result.o, recipe) - dlse)
    lse = recipe.to_backward_lse(result.lse)
    part = Part(q.shard, {**q.tensors, "dy": dy, "lse": lse, "row_term": row_term})
    return replace(start, parts={**start.parts, "q": part})


def backward_result(
    recipe: Recipe, result: RankResult, state: RankState, dbias: Array | None
) -> RankResult:
    """Return a rank's results with its gradients, rounded to the recipe's format; dbias is not rounded."""
    dq = state.parts["dq"].tensors["dq"]
    keys = state.parts["dk"].tensors
    # + 0.0: zeros are +0
    dq, dk, dv = (recipe.to_gradients(x) + 0.0 for x in (dq, keys["dk"], keys["dv"]))
    return replace(result, dq=dq, dk=dk, dv=dv, dbias=dbias)


def gathered(shards: Sequence[Array | None], sharding: Sharding, shape: tuple[int, ...]) -> Array:
    """Put local tensors in global order; of several copies of a cell, the one of the lowest rank."""
    x = np.zeros(shape)
    for local, shard in reversed(list(zip(shards, sharding.shards, strict=True))):
        assert local is not None
        real = [slot for slot, token in enumerate(shard.tokens) if token >= 0]
        at = np.ix_(shard.heads, shard.real)
        x[:, at[0], at[1]] = local[:, :, real]
    return x


def all_sink_gradients(
    problem: Problem, home: Sharding, starts: Sequence[RankState]
) -> Array | None:
    """Return dsinks [H, N]: each rank's sum over its own rows, added; of rows with several copies, one counts (RING-12)."""
    sinks = problem.terms.sinks
    if sinks is None:
        return None
    total = np.zeros(sinks.shape)
    counted: set[tuple[int, int]] = set()
    for start, shard in zip(starts, home.shards, strict=True):
        tensors = start.parts["q"].tensors
        heads = list(shard.heads)
        new = np.array([[(t, h) not in counted and t >= 0 for t in shard.tokens] for h in heads])
        counted.update(shard.cells)
        row_term = np.where(new, tensors["row_term"], 0.0)
        total[heads] += sink_gradient(sinks[heads], tensors["lse"], row_term)
    return total + 0.0
