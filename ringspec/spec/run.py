"""The result of a ring: every worker's numbers, the recorded states, and their replay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ringspec.errors import NotRecordedError, OptionError
from ringspec.recipes import Recipe
from ringspec.spec.attention import Gradients
from ringspec.spec.block_attention import (
    BlockBackward,
    BlockForward,
    block_backward,
    block_forward,
)
from ringspec.spec.layout import Layout
from ringspec.spec.problem import Array, Integers, Problem
from ringspec.spec.ring_backward import backward_step
from ringspec.spec.ring_forward import forward_step
from ringspec.spec.schedule import Schedule
from ringspec.spec.show import run_as_html, run_as_text, run_tensors
from ringspec.spec.worker import Moment, WorkerState
from ringspec.tensorfile import write_tensors


@dataclass(frozen=True)
class WorkerResult:
    """What one worker ends with, in its local order.

    ``index_q`` and ``index_k`` [n] name the global tokens of its slots, -1 for padding. ``dsinks``
    and ``dbias`` are partial sums over its own query rows (RING-12); dbias keeps local rows and
    global keys. Gradients are None without dy.
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


@dataclass(frozen=True)
class Run:
    """The result of :func:`ring`.

    ``o`` [B, H, Sq, Dv], ``lse`` [B, H, Sq], ``dq``, ``dk``, ``dv``, ``dsinks``, ``dbias`` are in
    global order; gradients are None without dy. Values are float64 arrays whose numbers are those of
    the recipe's output formats. ``print(run)`` shows who computes what in which step.
    """

    problem: Problem = field(repr=False)
    recipe: Recipe = field(repr=False)
    layout_q: Layout = field(repr=False)
    layout_k: Layout = field(repr=False)
    schedule: Schedule = field(repr=False)
    backward_schedule: Schedule | None = field(repr=False)
    workers: tuple[WorkerResult, ...] = field(repr=False)
    o: Array = field(repr=False)
    lse: Array = field(repr=False)
    gradients: Gradients | None = field(repr=False, default=None)
    moments: tuple[Moment, ...] = field(repr=False, default=())
    blocks: tuple[BlockForward, BlockBackward] = field(
        repr=False, default=(block_forward, block_backward)
    )

    @property
    def dq(self) -> Array | None:
        return None if self.gradients is None else self.gradients.dq

    @property
    def dk(self) -> Array | None:
        return None if self.gradients is None else self.gradients.dk

    @property
    def dv(self) -> Array | None:
        return None if self.gradients is None else self.gradients.dv

    @property
    def dsinks(self) -> Array | None:
        return None if self.gradients is None else self.gradients.dsinks

    @property
    def dbias(self) -> Array | None:
        return None if self.gradients is None else self.gradients.dbias

    def worker(self, worker: int) -> WorkerResult:
        """The local results of one worker."""
        if not isinstance(worker, (int, np.integer)) or not 0 <= worker < len(self.workers):
            raise NotRecordedError(
                f"a worker 0..{len(self.workers) - 1}", repr(worker), "workers count from 0"
            )
        return self.workers[worker]

    def moment(self, worker: int, step: int, phase: str = "forward") -> Moment:
        """The recorded step of one worker; needs ``ring(..., record=True)``."""
        for moment in self.moments:
            if (moment.phase, moment.step, moment.worker) == (phase, step, worker):
                return moment
        phases = sorted({moment.phase for moment in self.moments})
        raise NotRecordedError(
            "a recorded worker, step and phase",
            f"worker={worker}, step={step}, phase={phase!r}",
            f"recorded phases: {', '.join(phases)}" if phases else "call ring(..., record=True)",
        )

    def state(
        self, worker: int, step: int, phase: str = "forward", when: str = "after"
    ) -> WorkerState:
        """One worker's state after (or, with ``when='before'``, before) a step."""
        if when not in ("before", "after"):
            raise OptionError("when as 'before' or 'after'", repr(when), "pass when='after'")
        moment = self.moment(worker, step, phase)
        return moment.after if when == "after" else moment.before

    def replay(self) -> Iterator[Moment]:
        """Do every recorded step again, from the recorded state and messages alone.

        Yields the recomputed moments in order; they equal the recorded ones bit for bit.
        """
        if not self.moments:
            raise NotRecordedError("a recorded run", "none", "call ring(..., record=True)")
        for moment in self.moments:
            if moment.phase == "forward":
                after, sent = forward_step(
                    moment.before, self.schedule, moment.received, self.blocks[0]
                )
            else:
                assert self.backward_schedule is not None
                after, sent = backward_step(
                    moment.before, self.backward_schedule, moment.received, self.blocks[1]
                )
            yield replace(moment, after=after, sent=sent)

    def __str__(self) -> str:
        return run_as_text(self)

    def _repr_html_(self) -> str:
        return run_as_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write results and recorded states to one .safetensors file (see ``ringspec.tensorfile``)."""
        tensors, meaning = run_tensors(self)
        write_tensors(path, tensors, meaning)
