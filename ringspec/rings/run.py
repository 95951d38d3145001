"""The result of a ring: every worker's numbers and recorded states, and a method that computes each step again.

:mod:`ringspec.spec.worker` says what a worker holds at each step (RING-6).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ringspec.problem.model import Array, Integers, Problem
from ringspec.recipes import Recipe
from ringspec.rings.cost import Cost, cost
from ringspec.rings.gradients import HasGradients, check_number, check_recorded, check_when
from ringspec.rings.lockstep import WHEN, Moment
from ringspec.rings.show import heading, run_as_html, run_as_text, run_tensors
from ringspec.spec.block import (
    BlockBackward,
    BlockForward,
    block_backward,
    block_forward,
)
from ringspec.spec.dense_backward import Gradients
from ringspec.spec.layout import Layout
from ringspec.spec.ring_backward import Accumulate, backward_step, plus
from ringspec.spec.ring_forward import Merge, forward_step, merge_states
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import ForwardState, WorkerState, arrive, send
from ringspec.tensorfile import write_tensors


@dataclass(frozen=True)
class WorkerResult:
    """The final results of one worker in float64, in the order of the worker's n slots.

    ``o`` [B, H, n, Dv], ``lse`` [B, H, n], ``dq`` [B, H, n, D], ``dk`` [B, Hkv, n, D], ``dv`` [B, Hkv, n, Dv].
    ``index_q`` and ``index_k`` [n] are the global tokens in the slots, -1 for padding. ``dsinks`` is a partial sum over
    the worker's own query rows. If all rows share the bias, ``dbias`` is also a partial sum; otherwise it has local
    rows and global keys (RING-12). Gradients are None without dy.
    """

    worker: int
    index_q: Integers
    index_k: Integers
    o: Array
    lse: Array
    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dsinks: Array | None = None
    dbias: Array | None = None


@dataclass(frozen=True, repr=False)
class Run(HasGradients):
    """The result of :func:`ring`.

    ``o`` [B, H, Sq, Dv], ``lse`` [B, H, Sq], ``dq``, ``dk``, ``dv``, ``dsinks``, ``dbias`` are in global order;
    gradients are None without dy. Arrays are float64, and their values are numbers of the recipe's output formats.
    ``gradients`` holds all gradients; ``seeds`` are dy and dlse in float64. ``workers`` holds each worker's results,
    and ``moments`` the recorded steps. The other fields say what was run: ``problem``, ``recipe``, ``layout_q``,
    ``layout_k``, ``schedule``, ``backward_schedule``, and ``blocks`` (the functions that compute, merge and add
    blocks).

    In the methods, ``phase`` is 'forward' or 'backward'. ``print(run)`` shows which worker computes what in which step.
    """

    problem: Problem
    recipe: Recipe
    layout_q: Layout
    layout_k: Layout
    schedule: Schedule
    backward_schedule: Schedule | None
    workers: tuple[WorkerResult, ...]
    o: Array
    lse: Array
    gradients: Gradients | None = None
    seeds: tuple[Array, Array] | None = None
    moments: tuple[Moment, ...] = ()
    blocks: tuple[BlockForward, BlockBackward, Merge, Accumulate] = (
        block_forward,
        block_backward,
        merge_states,
        plus,
    )

    def worker(self, worker: int) -> WorkerResult:
        """Return the local results of one worker; raise NotRecordedError if there is no such worker."""
        check_number("worker", worker, len(self.workers))
        return self.workers[worker]

    def moment(self, worker: int, step: int, phase: str = "forward") -> Moment:
        """Return the recorded step of one worker; raise NotRecordedError without ``ring(..., record=True)``."""
        check_recorded(self.moments)
        self.check_phase(phase)
        steps = [moment for moment in self.moments if moment.phase == phase]
        check_number("worker", worker, len(self.workers))
        check_number("step", step, len(steps) // len(self.workers))
        return next(one for one in steps if (one.step, one.worker) == (step, worker))

    def state(
        self, worker: int, step: int, phase: str = "forward", when: str = "after"
    ) -> WorkerState:
        """Return one worker's recorded state in a step, at the moment ``when``.

        'before': nothing has arrived. 'during': everything has arrived, and nothing is computed. 'computed': the worker
        has computed with the visiting keys (or queries), and has not sent them. 'after': the worker has sent them.
        ``phase`` is 'forward' or 'backward'. Raises OptionError for another ``when``, NotRecordedError for another
        phase or a step that was not recorded.

        A tensor that the worker does not hold is None. After a step of a KV ring, k and v are None, because the worker
        has sent them. The message to the next worker and the state 'computed' have them.

        >>> import numpy as np
        >>> from ringspec import ring
        >>> x = np.ones((1, 1, 4, 2))
        >>> run = ring(x, x, x, workers=2, record=True)
        >>> run.state(worker=0, step=0).k is None
        True
        >>> [(message.target, message.side.k.shape) for message in run.moment(worker=0, step=0).sent]
        [(1, (1, 1, 2, 2))]
        >>> run.state(worker=0, step=0, when="computed").k.shape
        (1, 1, 2, 2)
        """
        check_when(when, WHEN)
        state: WorkerState = getattr(self.moment(worker, step, phase), when)
        return state

    def cost(self, phase: str = "forward") -> Cost:
        """Return hops, bytes and visible pairs of a phase; raise NotRecordedError if the phase was not run."""
        self.check_phase(phase)
        schedule = self.schedule if phase == "forward" else self.backward_schedule
        assert schedule is not None
        return cost(self.problem, schedule, self.layout_q, self.layout_k, self.recipe)

    def replay(self) -> Iterator[Moment]:
        """Compute every recorded step again, only from the recorded state and messages.

        Yields the recomputed moments in order; they equal the recorded ones bit for bit. Raises NotRecordedError
        without ``ring(..., record=True)``.
        """
        check_recorded(self.moments)
        for moment in self.moments:
            before, received = moment.before, moment.received
            during: WorkerState
            computed: WorkerState
            after: WorkerState
            if isinstance(before, ForwardState):
                block, _, merged, _ = self.blocks
                during = arrive(before, self.schedule, received)
                computed = forward_step(before, self.schedule, received, block, merged)
                after, sent = send(computed, self.schedule)
            else:
                assert self.backward_schedule is not None
                _, differentiated, _, added = self.blocks
                during = arrive(before, self.backward_schedule, received)
                computed = backward_step(
                    before, self.backward_schedule, received, differentiated, added
                )
                after, sent = send(computed, self.backward_schedule)
            yield replace(moment, during=during, computed=computed, after=after, sent=sent)

    def __repr__(self) -> str:
        return f"<Run: {heading(self)}>"

    def __str__(self) -> str:
        return run_as_text(self)

    def _repr_html_(self) -> str:
        return run_as_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write results and recorded states to one .safetensors file at ``path``."""
        tensors, meaning = run_tensors(self)
        write_tensors(path, tensors, meaning)
