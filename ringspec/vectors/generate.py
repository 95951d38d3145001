"""Derive the tensors of a case from its case.json, and generate whole sets.

Each input is made from its recipe in case.json (``format.inputs``). :mod:`ringspec.truth` computes layouts, schedules
and the correctly rounded results. The bytes do not depend on the machine, BLAS or the number of processes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import OptionError, RingspecError, UndecidedError, nearest
from ringspec.formats import load
from ringspec.problem.model import Problem
from ringspec.problem.options import check
from ringspec.truth.exactly import Truth, Wanted, attention, block_gradients
from ringspec.truth.problem import Upstream
from ringspec.truth.schedule import schedule_of, targets, visitors
from ringspec.truth.sharded import Tables, layout_tensors, per_worker, tables_for
from ringspec.vectors.catalogue import SET_VERSIONS, catalogue
from ringspec.vectors.catalogue.flags import FLAGS
from ringspec.vectors.format.case import Case, Ring
from ringspec.vectors.format.digest import tensor_digest
from ringspec.vectors.format.inputs import BOOLEANS, INTEGERS, PARTS, inputs_of
from ringspec.vectors.format.requires import requires
from ringspec.vectors.format.sampling import sample
from ringspec.vectors.merge_bits import recipe_bits, truth_of_merge
from ringspec.vectors.processes import each
from ringspec.vectors.sets.stored import VectorSet, write_set

Tensors = dict[str, NDArray]
Progress = Callable[[int, int, str], None]
# Brings results into the form of a case; the number is the lse of slots that hold no token.
Arrange = Callable[[Tensors, float], Tensors]
NOT_OPTIONS = ("q", "k", "v", "dy", "dlse", "lse", "delta", *PARTS)


@dataclass(frozen=True)
class Derived:
    """A ``case`` with ``requires`` and ``digests`` filled in, and the tensors that a set stores for it.

    ``tensors`` is None if the storage is "digests".
    """

    case: Case
    tensors: Tensors | None


def derive(case: Case) -> Derived:
    """Derive everything that follows from a case: its tensors, and the fields ``requires`` and ``digests``.

    The values of these two fields in ``case`` are ignored. Raises :class:`~ringspec.errors.UndecidedError` if a result
    cannot be rounded with certainty, and other subclasses of RingspecError for invalid inputs or options.

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


def tensors_of_case(case: Case, *, scales: bool = True, truth: Truth | None = None) -> Tensors:
    """Return every tensor of a case in full, even if the set stores only a part of it.

    Names begin with ``in.``, ``out.``, ``scale.``, ``layout.``, ``position.``, ``bits.`` or ``certain.``. ``scales=False`` leaves out
    ``scale.*``, which saves a third of the time. ``truth``: results that are already known, in global order and in all
    formats of the case; None: compute the results.
    """
    if case.operation == "schedule":
        return schedule_tensors(case)
    inputs = inputs_of(case)
    tensors = {f"in.{name}": x for name, x in inputs.items()}
    if case.operation == "merge":
        truth = truth_of_merge(case, inputs, wanted_of(case, scales)) if truth is None else truth
        return tensors | expected_tensors(case, truth, by_worker(None)) | recipe_bits(case, inputs)
    problem, upstream, tables = arguments_of(case, inputs)
    if case.scheme is not None:
        return tensors | tensors_of_scheme(case, problem, upstream, wanted_of(case, scales), truth)
    if tables is not None:
        tensors |= layout_tensors(problem, tables)
    if truth is None and case.operation == "block":
        truth = truth_of_block(case, inputs, problem, upstream, wanted_of(case, scales))
    elif truth is None:
        truth = attention(problem, upstream, tables, wanted_of(case, scales))
    return tensors | expected_tensors(case, truth, by_worker(tables))


def tensors_of_scheme(
    case: Case, problem: Problem, upstream: Upstream, wanted: Wanted, truth: Truth | None
) -> Tensors:
    """Return the tables of a case that splits attention over ranks, and each rank's results."""
    # Here: other cases do not need ringspec.schemes, which takes time to import.
    from ringspec.vectors.scheme_tables import per_rank, shard_tensors, tables_of_scheme

    tables = tables_of_scheme(case)
    truth = attention(problem, upstream, None, wanted) if truth is None else truth
    values = expected_tensors(case, truth, lambda x, fill: per_rank(x, tables, fill))
    return shard_tensors(problem, tables) | values


def layouts_of_case(case: Case) -> Tensors:
    """Derive ``layout.*`` and ``position.*`` of a ring case, without its results; empty for other cases."""
    if case.operation != "ring":
        return {}
    problem, _, tables = arguments_of(case, inputs_of(case))
    return {} if tables is None else layout_tensors(problem, tables)


def arguments_of(case: Case, inputs: Tensors) -> tuple[Problem, Upstream, Tables | None]:
    """Return the checked arguments of a case for :mod:`ringspec.truth`; the layouts are None without a ring."""
    q, k, v = (load(inputs[name], name) for name in ("q", "k", "v"))
    problem = check(q, k, v, options_of(case, inputs))
    upstream = (load(inputs[name], name) if name in inputs else None for name in ("dy", "dlse"))
    tables = None
    if case.ring is not None:
        tables = tables_for(problem, layout_of(case.ring), case.ring.workers, case.terms)
    return problem, Upstream(*upstream), tables


def options_of(case: Case, inputs: Tensors) -> dict[str, Any]:
    """Return the keywords of ``ringspec.ring`` and ``ringspec.attention`` for a case."""
    tensors = {name: as_number(name, x) for name, x in inputs.items() if name not in NOT_OPTIONS}
    return dict(case.terms) | tensors


def as_number(name: str, x: NDArray) -> NDArray:
    return x if name in BOOLEANS or name in INTEGERS else load(x, name)


def layout_of(ring: Ring) -> Any:
    """Return the argument ``layout`` of ``ringspec.ring`` for the ring of a case."""
    if ring.layout != "table":
        return ring.layout
    table_q, table_k = ring.table_q, ring.table_k
    return np.array(table_q), np.array(table_q if table_k is None else table_k)


def truth_of_block(
    case: Case, inputs: Tensors, problem: Problem, upstream: Upstream, wanted: Wanted
) -> Truth:
    """Return the results of a case of a single block: its o and lse, and its contributions to the gradients."""
    ahead = Truth({})
    if "forward" in case.passes:
        ahead = attention(problem, Upstream(), None, wanted)
    if upstream.dy is None:
        return ahead
    lse, delta = (load(inputs[name], name) for name in ("lse", "delta"))
    shares = block_gradients(problem, upstream.dy, lse, delta, wanted)
    return Truth(ahead.tensors | shares.tensors, ahead.scales | shares.scales)


def by_worker(tables: Tables | None) -> Arrange:
    """Return the function that puts results into the slots of each worker; in a case without a ring they stay."""
    return lambda values, lse_of_padding: per_worker(values, tables, lse_of_padding)


def wanted_of(case: Case, scales: bool = True) -> Wanted:
    """Return the formats in which a case stores results: float64 and the formats of the case."""
    assert case.formats is not None
    outputs, statistics = case.formats.outputs, case.formats.statistics
    return Wanted(("float64", outputs), ("float64", statistics), scales)


def expected_tensors(case: Case, truth: Truth, arranged: Arrange) -> Tensors:
    """Make ``out.*`` and ``scale.*`` of a case from its results, which ``arranged`` brings into the form of the case."""
    wanted = wanted_of(case)
    dropped = () if "forward" in case.passes else ("o", "lse")
    results = {name: x for name, x in truth.tensors.items() if name not in dropped}
    tensors: Tensors = {}
    for format in {format for name in results for format in wanted.formats_of(name)}:
        values = {n: x[format] for n, x in results.items() if format in wanted.formats_of(n)}
        for name, x in arranged(values, -np.inf).items():
            tensors[f"out.{name}.{format}"] = x
    scales = {name: x for name, x in truth.scales.items() if name not in dropped}
    for name, x in arranged(scales, 0.0).items():
        tensors[f"scale.{name}"] = x
    return tensors


def schedule_tensors(case: Case) -> Tensors:
    """Derive the tensors of a schedule case, int64 [steps, W]: ``out.visitor.<pass>`` and ``out.target.<pass>``.

    They are computed by :func:`ringspec.truth.schedule.visitors` and :func:`ringspec.truth.schedule.targets`.
    """
    ring = case.ring
    assert ring is not None
    tensors = {}
    for one in case.passes:
        schedule = schedule_of(one, ring.circulation, ring.workers, ring.direction)
        tensors[f"out.visitor.{one}"] = visitors(schedule)
        tensors[f"out.target.{one}"] = targets(schedule)
    return tensors


def derive_named(case: Case) -> Derived:
    """Derive a case as :func:`derive` does, but name the case in any error."""
    try:
        return derive(case)
    except RingspecError as error:
        kind = UndecidedError if isinstance(error, UndecidedError) else OptionError
        raise kind(f"{error.expected} in {case.id}", error.got, error.fix) from None


def cases_of(name: str, only: str | None = None) -> tuple[Case, ...]:
    """Return the cases of a named set whose ids match a pattern such as 'ring/*' (None: all)."""
    if name not in SET_VERSIONS:
        raise OptionError(
            "the name of a set that can be generated",
            repr(name),
            nearest(name, SET_VERSIONS),
            code="unknown-name",
        )
    return matching(catalogue(name), only)


def matching(cases: tuple[Case, ...], only: str | None) -> tuple[Case, ...]:
    """Return the cases whose id matches a shell pattern; raise an error if none does."""
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
    """Derive the cases of the set ``name`` and write them to a new folder, completely or not at all.

    ``jobs`` processes work at the same time; the bytes do not depend on their number. ``only`` is a pattern
    of ids. ``progress(done, total, id)`` is called after each case. Raises :class:`~ringspec.errors.OptionError` if
    ``destination`` exists.
    """
    cases = cases_of(name, only)
    return write_derived(destination, name, SET_VERSIONS[name], cases, jobs, progress)


def write_derived(
    destination: str | os.PathLike[str],
    name: str,
    set_version: str,
    cases: Sequence[Case],
    jobs: int,
    progress: Progress | None,
) -> VectorSet:
    """Write ``cases`` with their derived tensors as the set ``name``; other arguments are as in :func:`generate`."""

    def entries() -> Iterator[tuple[Case, Tensors | None]]:
        for done, one in enumerate(each(derive_named, cases, jobs), start=1):
            if progress is not None:
                progress(done, len(cases), one.case.id)
            yield one.case, one.tensors

    return write_set(destination, name, set_version, entries(), FLAGS)
