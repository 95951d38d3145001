"""The tensors of a case, derived from its case.json; and whole sets of them.

Inputs are drawn as the recipes say, the specification gives masks, keep masks, layouts and
schedules, and :mod:`ringspec.exact` the correctly rounded results. Nothing else decides a byte: not
the machine, nor BLAS, nor the number of processes. This is the only module of ``vectors`` that
imports ``ringspec.exact`` and ``ringspec.spec``.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import OptionError, RingspecError, UndecidedError, UnknownNameError, nearest
from ringspec.exact import Problem, Truth, backward, block_backward, forward, merge
from ringspec.formats import load
from ringspec.problem.model import Problem as SpecProblem
from ringspec.problem.options import check
from ringspec.rings.ring import layouts_for
from ringspec.rings.schedules import backward_schedule, forward_schedule
from ringspec.spec.dropout import keep_mask
from ringspec.spec.masks import visible
from ringspec.spec.schedule import Schedule
from ringspec.vectors.catalogue import SET_VERSIONS, catalogue
from ringspec.vectors.catalogue.flags import FLAGS
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.digest import tensor_digest
from ringspec.vectors.format.inputs import BOOLEANS, INTEGERS, inputs_of
from ringspec.vectors.format.requires import requires
from ringspec.vectors.format.sampling import sample
from ringspec.vectors.format.sharded import Tables, per_worker, slots_of
from ringspec.vectors.processes import each
from ringspec.vectors.sets.stored import VectorSet, write_set

Tensors = dict[str, NDArray]
Progress = Callable[[int, int, str], None]
NOT_OPTIONS = ("q", "k", "v", "dy", "dlse", "lse", "delta", "parts_o", "parts_lse")
NOBODY, EVERYBODY = -1, -2


@dataclass(frozen=True)
class Derived:
    """``case`` with ``requires`` and ``digests`` filled in, and the tensors that a set stores of it.

    ``tensors`` is None where the storage is "digests".
    """

    case: Case
    tensors: Tensors | None


def derive(case: Case) -> Derived:
    """All that follows from a case. Its own ``requires`` and ``digests`` are not read.

    Raises :class:`~ringspec.errors.UndecidedError` where a result cannot be rounded with certainty,
    and what drawing the inputs and checking the options raise.

    >>> [first] = [case for case in catalogue("core") if case.id == "attention/bias"]
    >>> derived = derive(first)
    >>> derived.tensors["out.o.bfloat16"].shape, derived.tensors["scale.dq"].shape
    ((1, 2, 12, 4), (1, 2, 12))
    """
    whole = tensors_of_case(case, scales=case.storage != "digests")
    filled = dataclasses.replace(case, requires=requires(case), digests={})
    if case.storage == "full":
        return Derived(filled, whole)
    pinned = {
        name: tensor_digest(whole[name])
        for name in sorted(whole)
        if name.startswith(("in.", "out.", "scale."))
    }
    filled = dataclasses.replace(filled, digests=pinned)
    return Derived(filled, sample(case.id, whole) if case.storage == "sampled" else None)


def tensors_of_case(case: Case, *, scales: bool = True) -> Tensors:
    """Every tensor of a case, whole, whatever its storage: in, out, scale, layout and position.

    Without ``scales`` there is no ``scale.*``, which saves a third of the time.
    """
    if case.operation == "schedule":
        return schedule_tensors(case)
    inputs = inputs_of(case)
    tensors = {f"in.{name}": x for name, x in inputs.items()}
    if case.operation == "merge":
        truth, tables = merged(case, inputs, scales), None
    else:
        problem = spec_problem(case, inputs)
        tables = None if case.ring is None else tables_of(case, problem)
        truth = attention(case, inputs, problem, tables, scales)
        if tables is not None:
            tensors |= layout_tensors(problem, tables)
    return tensors | expected_tensors(case, truth, tables)


def layouts_of_case(case: Case) -> Tensors:
    """``layout.*`` and ``position.*`` of a ring case, which need no evaluation; else nothing."""
    if case.operation != "ring":
        return {}
    problem = spec_problem(case, inputs_of(case))
    return layout_tensors(problem, tables_of(case, problem))


def spec_problem(case: Case, inputs: Tensors) -> SpecProblem:
    """The case as the specification takes it: positions, segments, mask terms, all checked."""
    exact = {name: as_number(name, x) for name, x in inputs.items()}
    return check(exact["q"], exact["k"], exact["v"], options_of(case, inputs))


def options_of(case: Case, inputs: Tensors) -> dict[str, Any]:
    """The keywords of ``ringspec.ring`` and ``ringspec.attention`` that a case stands for."""
    tensors = {name: as_number(name, x) for name, x in inputs.items() if name not in NOT_OPTIONS}
    return dict(case.terms) | tensors


def as_number(name: str, x: NDArray) -> NDArray:
    return x if name in BOOLEANS or name in INTEGERS else load(x, name)


def layout_of(case: Case) -> Any:
    """The argument ``layout`` of ``ringspec.ring`` for a ring case."""
    assert case.ring is not None
    if case.ring.layout != "table":
        return case.ring.layout
    table_q, table_k = case.ring.table_q, case.ring.table_k
    return np.array(table_q), np.array(table_q if table_k is None else table_k)


def tables_of(case: Case, problem: SpecProblem) -> Tables:
    assert case.ring is not None
    for_q, for_k = layouts_for(problem, layout_of(case), case.ring.workers, case.terms)
    return Tables(for_q.table, for_k.table)


def exact_problem(problem: SpecProblem) -> Problem:
    """The same problem for :mod:`ringspec.exact`: one mask, one keep mask."""
    rows, columns, terms = problem.rows, problem.columns, problem.terms
    keep = rows.keep
    if keep is None and terms.dropout_p > 0:
        keep = keep_mask(
            rows.position,
            columns.position,
            heads=np.arange(terms.heads, dtype=np.int64),
            batches=np.arange(problem.q.shape[0], dtype=np.int64),
            dropout_p=terms.dropout_p,
            dropout_seed=terms.dropout_seed,
        )
    return Problem(
        problem.q,
        problem.k,
        problem.v,
        terms.scale,
        visible=visible(rows, columns, terms),
        bias=rows.bias,
        softcap=terms.softcap,
        sinks=terms.sinks,
        keep=keep,
        dropout_p=terms.dropout_p,
    )


def attention(
    case: Case, inputs: Tensors, problem: SpecProblem, tables: Tables | None, scales: bool
) -> Truth:
    """Correctly rounded results of attention, ring and block cases, in global order."""
    exact, wanted = exact_problem(problem), formats_of(case) | {"scales": scales}
    given = {n: load(inputs[n], n) for n in ("dy", "dlse", "lse", "delta") if n in inputs}
    if "backward" not in case.passes:
        return forward(exact, **wanted)
    if case.operation != "block":
        if tables is not None:
            wanted |= {"row_groups": tables.worker_of_query(), "groups": tables.workers}
        return backward(exact, given["dy"], given.get("dlse"), **wanted)
    truth = block_backward(exact, given["dy"], given["lse"], given["delta"], **wanted)
    if "forward" not in case.passes:
        return truth
    ahead = forward(exact, **wanted)
    return Truth(ahead.tensors | truth.tensors, ahead.scales | truth.scales)


def merged(case: Case, inputs: Tensors, scales: bool) -> Truth:
    parts = load(inputs["parts_o"], "parts_o"), load(inputs["parts_lse"], "parts_lse")
    return merge(*parts, **formats_of(case), scales=scales)


def formats_of(case: Case) -> dict[str, Any]:
    """float64 and the case's own formats, as ``ringspec.exact`` takes them."""
    assert case.formats is not None
    return {
        "formats": ("float64", case.formats.outputs),
        "statistics": ("float64", case.formats.statistics),
    }


def expected_tensors(case: Case, truth: Truth, tables: Tables | None) -> Tensors:
    """``out.*`` and ``scale.*`` of the passes of a case, per worker in a ring."""
    dropped = () if "forward" in case.passes else ("o", "lse")
    results = {name: x for name, x in truth.tensors.items() if name not in dropped}
    tensors: Tensors = {}
    for format in {format for formats in results.values() for format in formats}:
        values = {name: x[format] for name, x in results.items() if format in x}
        for name, x in per_worker(values, tables, -np.inf).items():
            tensors[f"out.{name}.{format}"] = x
    scales = {name: x for name, x in truth.scales.items() if name not in dropped}
    for name, x in per_worker(scales, tables, 0.0).items():
        tensors[f"scale.{name}"] = x
    return tensors


def layout_tensors(problem: SpecProblem, tables: Tables) -> Tensors:
    """Token of each slot [W, n], and its position [W, 1|B, n]; -1 in padding slots."""
    position_q, position_k = problem.rows.position, problem.columns.position
    return {
        "layout.q": tables.q,
        "layout.k": tables.k,
        "position.q": slots_of(position_q, tables.q, 1, -1),
        "position.k": slots_of(position_k, tables.k, 1, -1),
    }


def schedule_tensors(case: Case) -> Tensors:
    """What each worker computes with, and where it sends, of each pass of a schedule case.

    ``out.visitor.<pass>`` int64 [steps, W]: owner of the visiting block, -1 for none.
    ``out.target.<pass>`` int64 [steps, W]: to whom each worker sends after the step; -1: nothing is
    sent; -2: to everybody (a gather), or to each owner its own (a reduce-scatter).
    """
    assert case.ring is not None
    circulation, workers, direction = case.ring.circulation, case.ring.workers, case.ring.direction
    tensors = {}
    for one in case.passes:
        made = forward_schedule if one == "forward" else backward_schedule
        # The forward pass of a Q ring is a KV ring (RING-5): "q" changes the backward alone.
        schedule = made(circulation, workers, direction)
        tensors[f"out.visitor.{one}"] = visitors(schedule)
        tensors[f"out.target.{one}"] = targets(schedule)
    return tensors


def visitors(schedule: Schedule) -> NDArray[np.int64]:
    rows = [[NOBODY if owner is None else owner for owner in step.uses] for step in schedule.steps]
    return np.array(rows, dtype=np.int64)


def targets(schedule: Schedule) -> NDArray[np.int64]:
    table = np.full((len(schedule.steps), schedule.workers), NOBODY, dtype=np.int64)
    for row, step in zip(table, schedule.steps, strict=True):
        for transfer in step.transfers:
            if transfer.kind != "permute":
                row[:] = EVERYBODY
            for source, target in transfer.pairs:
                row[source] = target
    return table


def derive_named(case: Case) -> Derived:
    """:func:`derive`; an error that comes out names the case."""
    try:
        return derive(case)
    except RingspecError as error:
        kind = UndecidedError if isinstance(error, UndecidedError) else OptionError
        raise kind(f"{error.expected} in {case.id}", error.got, error.mend) from None


def cases_of(name: str, only: str | None = None) -> tuple[Case, ...]:
    """The cases of a named set whose ids match a pattern such as 'ring/*' (None: all)."""
    if name not in SET_VERSIONS:
        raise UnknownNameError(
            "the name of a set that can be generated", repr(name), nearest(name, SET_VERSIONS)
        )
    return matching(catalogue(name), only)


def matching(cases: tuple[Case, ...], only: str | None) -> tuple[Case, ...]:
    """Cases whose id matches a shell pattern; an error if none does."""
    chosen = tuple(case for case in cases if only is None or fnmatch.fnmatchcase(case.id, only))
    if cases and not chosen:
        ids = [case.id for case in cases]
        raise OptionError("a pattern that some id matches", repr(only), nearest(only, ids))
    return chosen


def generate(
    name: str,
    destination: str | os.PathLike[str],
    *,
    jobs: int = 1,
    progress: Progress | None = None,
    only: str | None = None,
) -> VectorSet:
    """Derive the cases of the set ``name`` and write them to a new folder, whole or not at all.

    ``jobs`` processes work at the same time; the bytes do not depend on it. ``only`` is a pattern of
    ids. ``progress(done, total, id)`` is called after each case. Refuses a destination at which
    something lies (:class:`~ringspec.errors.DestinationError`): generate proposes, it never
    overwrites.
    """
    cases = cases_of(name, only)

    def entries() -> Iterator[tuple[Case, Tensors | None]]:
        for done, one in enumerate(each(derive_named, cases, jobs), start=1):
            if progress is not None:
                progress(done, len(cases), one.case.id)
            yield one.case, one.tensors

    return write_set(destination, name, SET_VERSIONS[name], entries(), FLAGS)
