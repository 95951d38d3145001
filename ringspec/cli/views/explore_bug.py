"""The data of a page that shows a ring with a known bug next to the correct ring, step by step.

:mod:`~ringspec.cli.views.bug_record` records the ring with the bug. This module converts the record to the form in
which :mod:`~ringspec.cli.views.explore_records` returns a correct ring. A *stop* is a position of the page's slider:
the end of a step, or the end of the pass. A *trace* is the list of a token's numbers at successive stops.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from ringspec.cli.shared.inputs import drawn
from ringspec.cli.views.bug_record import SUMS, Array, Record, Where, owner_of, recorded
from ringspec.cli.views.explore_records import (
    HEAD_DIM,
    LAYOUTS,
    PASSES,
    POOLS,
    Data,
    Pool,
    Row,
    Traces,
    add_run,
    check_numbers,
    empty_document,
    masks,
    one_run,
    pass_record,
    rows,
    shown_names,
    traces_of,
)
from ringspec.conformance.diagnose.mutants import MUTANTS, Mutant
from ringspec.conformance.diagnose.mutants.hooks import Hooks
from ringspec.conformance.diagnose.mutants.ring import ring_results
from ringspec.conformance.target.protocol import Call
from ringspec.errors import LayoutError, OptionError, nearest
from ringspec.recipes import RECIPES
from ringspec.rings.cost import Cost
from ringspec.rings.layouts import make_layout
from ringspec.spec.online_softmax import start
from ringspec.spec.worker import Side, names_of

# The page shows the first of these in which the bug changes a result. Gathered keys are not a ring.
MASKS = ("causal", "window", "documents", "none")
CIRCULATIONS = ("kv", "q")

Ring = tuple[str, str, str]  # layout, mask, circulation


def bug_records(name: str, workers: int, tokens: int, seed: int) -> Data:
    """Return everything that the page of the known bug ``name`` shows, as plain data.

    The keys are those of :func:`~ringspec.cli.views.explore_records.records`, which describe the correct ring, and:

    ``bug``    the description of the bug, and ``places``: where each pass first differs from the correct ring
    ``wrong``  each pass of the ring with the bug. It has the keys of a pass in ``runs`` (such as 'pairs' and 'traces')
               and in ``travels`` ('stops', 'meets', 'sends'), and 'seen': for each step and worker, the pairs that are
               visible under the mask, as rows of 0 and 1
    """
    if name not in MUTANTS:
        raise OptionError("the name of a known bug", repr(name), nearest(name, MUTANTS))
    bug = MUTANTS[name]
    check_numbers([workers], tokens)
    layout, mask, circulation = where_it_shows(bug, workers, tokens, seed)
    pools = {pool: Pool() for pool in POOLS}
    document = empty_document([workers], [layout], [mask], [circulation], tokens, seed)
    right = one_run(workers, layout, mask, circulation, tokens, seed)
    add_run(document, right, layout, mask, circulation, pools)
    call = call_of_ring(workers, layout, mask, circulation, tokens, seed)
    record = recorded(call, bug.hooks(call, RECIPES["float64"]))
    table = document["tables"][f"{workers}/{layout}"]
    traces = {phase: wrong_traces(record, phase, table) for phase in PASSES}
    document["choices"]["rings"] = ["wrong", "right"]
    document["wrong"] = {
        phase: pass_record(work(record, phase, workers), traces[phase], pools)
        | wrong_travel(record, phase, document["travels"][f"{workers}/{circulation}/{phase}"])
        for phase in PASSES
    }
    document["bug"] = {
        "id": bug.id,
        "title": bug.title,
        "what": bug.what,
        "places": [
            place
            for phase in PASSES
            if (place := first_difference(phase, traces_of(right)[phase], traces[phase]))
        ],
    }
    return document | {pool: values.values for pool, values in pools.items()}


def where_it_shows(bug: Mutant, workers: int, tokens: int, seed: int) -> Ring:
    """Return (layout, mask, circulation) of a ring in which the bug changes a number.

    Rings that fit the title of the bug are preferred.
    """
    first: Ring | None = None
    for circulation, mask, layout in product(CIRCULATIONS, MASKS, LAYOUTS):
        try:
            call = call_of_ring(workers, layout, mask, circulation, tokens, seed)
        except LayoutError:
            continue
        if not bug.applies(call):
            continue
        right = right_results(workers, layout, mask, circulation, tokens, seed)
        if shown_results(call, bug.hooks(call, RECIPES["float64"])) != right:
            if bug.supposes(call):
                return layout, mask, circulation
            first = first or (layout, mask, circulation)
    if first is None:
        raise OptionError(
            "a bug that changes a number in a small float64 ring",
            f"{bug.id}, which changes no number with W = {workers} and {tokens} tokens",
            "choose a bug whose page in the documentation links to the explorer",
        )
    return first


@functools.cache
def right_results(*ring: Any) -> dict[str, list[list[Row]]]:
    """Return the results of a correct ring."""
    return shown_results(call_of_ring(*ring), Hooks())


def shown_results(call: Call, hooks: Hooks) -> dict[str, list[list[Row]]]:
    """Return the results of a ring, rounded as on the page."""
    with np.errstate(all="ignore"):
        results = ring_results(call, RECIPES["float64"], hooks)
    return {name: [rows(x[0, 0]) for x in results[name]] for name in ("o", "lse", "dq", "dk")}


def call_of_ring(
    workers: int, layout: str, mask: str, circulation: str, tokens: int, seed: int
) -> Call:
    """Return a call of a target with the problem that :func:`~ringspec.cli.views.explore_records.one_run` runs."""
    index = make_layout(layout, tokens, workers).table
    shape = (1, 1, tokens, HEAD_DIM)
    tensors = {
        name: tuple(drawn(seed, name, shape)[:, :, slots] for slots in index)
        for name in ("q", "k", "v", "dy")
    }
    terms = {"scale": HEAD_DIM**-0.5, **masks(tokens)[mask][1]}
    formats = dict.fromkeys(("inputs", "outputs", "statistics"), "float64")
    at = (index, index, index[:, None], index[:, None])
    passes = ("forward", "backward")
    return Call(
        "explore", "ring", passes, workers, tensors, terms, formats, layout, circulation, 1, *at
    )


def work(record: Record, phase: str, workers: int) -> Cost:
    """Count the pairs that every worker computes in every step; bytes are not counted."""
    pairs = np.zeros((workers, workers), dtype=np.int64)
    for (of_phase, step, worker), allowed in record.allowed.items():
        if of_phase == phase:
            pairs[step, worker] = allowed.sum()
    return Cost(phase, pairs, np.zeros_like(pairs), 0)


def wrong_travel(record: Record, phase: str, right: Data) -> Data:
    """Return what each worker holds at every stop, which blocks and pairs it computes, and what the workers send."""
    steps = workers = range(len(right["meets"]))
    stops = [[used_blocks(record, (phase, t, r)) for r in workers] for t in steps]
    stops.append([blocks_at_the_end(record, phase, r, right["moves"]) for r in workers])
    sends = []
    for t, transfers in enumerate(right["sends"]):
        moved = record.moved.get((phase, t), [])
        sends.append([one | {"pairs": moved} for one in transfers])
    return {
        "stops": stops,
        "meets": [[owners_met(record, (phase, t, r)) for r in workers] for t in steps],
        "seen": [[seen(record, (phase, t, r)) for r in workers] for t in steps],
        "sends": sends,
    }


def owners_met(record: Record, where: Where) -> list[int]:
    """Return [owner of the queries, owner of the keys] with which a worker computes; [] if it does not compute."""
    if where not in record.used:
        return []
    at, (query, key) = record.met[where], record.used[where]
    return [origin("q", query, at.all_queries), origin("k", key, at.all_keys)]


def seen(record: Record, where: Where) -> list[str]:
    """Return the pairs that a worker's mask makes visible in a step: for each query slot a row of 0 and 1."""
    allowed = record.allowed.get(where, np.zeros((0, 0)))
    return ["".join("1" if entry else "0" for entry in row) for row in allowed]


def origin(name: str, side: Side, starts: Sequence[Side]) -> int:
    """Return the worker that had the tensor ``name`` of this block at the start of the pass.

    The values are compared, because a bug may give a block the wrong owner.
    """
    value = getattr(side, name)
    order = [side.owner, *range(len(starts))]
    same = (r for r in order if np.array_equal(getattr(starts[r], name), value, equal_nan=True))
    return next(same, side.owner)


def used_blocks(record: Record, where: Where) -> list[list[Any]]:
    """Return the blocks with which a worker computes in one step, each as [owner, name, name ...].

    If the worker does not compute, return the blocks that it holds.
    """
    at = record.met[where]
    query, key = record.used.get(where, (at.query, at.key))
    sums = [["m", where[2]], ["l", where[2]], ["o", where[2]]] if where[0] == "forward" else []
    of_query = inputs(query, at.all_queries) + sums + accumulators(record, at.query)
    if where[0] == "forward":  # the forward pass does not use dy
        of_query = [one for one in of_query if one[0] != "dy"]
    return by_owner(of_query) + by_owner(inputs(key, at.all_keys) + accumulators(record, at.key))


def blocks_at_the_end(record: Record, phase: str, worker: int, moves: str) -> list[list[Any]]:
    """Return what a worker still holds after the last step, and what arrived with the last transfer."""
    last = len({step for of_phase, step, _ in record.met if of_phase == phase}) - 1
    blocks = used_blocks(record, (phase, last, worker))
    if phase == "forward":  # m, l and the unnormalised o became o and lse
        done = [[name, worker] for name in ("o", "lse")]
        kept = [
            [name, of] for of, *names in blocks for name in names if name not in ("m", "l", "o")
        ]
        of_query = [one for one in kept if one[0] == "q"]
        return by_owner(of_query + done) + by_owner(kept[len(of_query) :])
    travelling = ("dk", "dv") if moves == "keys" else ("dq",)
    blocks = [[of, *(n for n in names if n not in travelling)] for of, *names in blocks]
    came = accumulators(record, record.arrived[phase, last][worker])
    return [block for block in blocks if len(block) > 1] + by_owner(came)


def inputs(side: Side, starts: Sequence[Side]) -> list[list[Any]]:
    """Return [name, worker] for every input of a block, where the worker is that of :func:`origin`."""
    names = [name for name in shown_names(names_of(side)) if name not in SUMS]
    return [[name, origin(name, side, starts)] for name in names]


def accumulators(record: Record, side: Side) -> list[list[Any]]:
    """Return [name, owner] for every accumulator of a block."""
    names = [name for name in names_of(side) if name in SUMS]
    return [[name, record.owner(getattr(side, name), side.owner)] for name in names]


def by_owner(named: list[list[Any]]) -> list[list[Any]]:
    """Group pairs [name, owner] by owner; return [owner, name, name ...] for each owner.

    >>> by_owner([["k", 2], ["v", 1], ["dk", 2]])
    [[2, 'k', 'dk'], [1, 'v']]
    """
    blocks: dict[int, list[Any]] = {}
    for name, owner in named:
        blocks.setdefault(owner, [owner]).append(name)
    return list(blocks.values())


def wrong_traces(record: Record, phase: str, table: list[list[int]]) -> Traces:
    """Return the traces of one pass of the ring with the bug."""
    with np.errstate(all="ignore"):
        if phase == "forward":
            return {"softmax": softmax_traces(record, table)}
        return {name: gradient_traces(record, name, table) for name in ("dq", "dk")}


def softmax_traces(record: Record, table: list[list[int]]) -> list[list[Row | None]]:
    """Return a trace of each query: [m, l, lse, o ...] after each step, and finally [lse, o ...]."""
    traces: list[list[Row | None]] = [[] for slots in table for _ in slots]
    for worker, tokens in enumerate(table):
        state = start(1, 1, len(tokens), HEAD_DIM)
        for step in range(len(table)):
            state = record.running.get(("forward", step, worker), state)
            of_rows = rows(state.m[0, 0], state.l[0, 0], state.lse[0, 0], state.o[0, 0])
            put(traces, tokens, of_rows)
        o, lse = (record.results[name][worker][0, 0] for name in ("o", "lse"))
        put(traces, tokens, rows(lse, o))
    return traces


def gradient_traces(record: Record, name: str, table: list[list[int]]) -> list[list[Row | None]]:
    """Return a trace of dq or dk for each token: the value after each step (None if lost), and finally the result."""
    traces: list[list[Row | None]] = [[] for slots in table for _ in slots]
    for step in range(len(table)):
        found: dict[int, Array] = {}
        for worker in range(len(table)):
            at = record.met["backward", step, worker]
            before = getattr(at.query if name == "dq" else at.key, name)
            after = record.sums.get(("backward", step, worker), {}).get(name, before)
            found.setdefault(record.owner(before, owner_of(at, name)), after)
        for owner, tokens in enumerate(table):
            lost: list[None] = [None] * len(tokens)
            put(traces, tokens, rows(found[owner][0, 0]) if owner in found else lost)
    for owner, tokens in enumerate(table):
        put(traces, tokens, rows(record.results[name][owner][0, 0]))
    return traces


def put(traces: list[list[Row | None]], tokens: list[int], numbers: Sequence[Row | None]) -> None:
    for token, row in zip(tokens, numbers, strict=True):
        traces[token].append(row)


def first_difference(phase: str, right: Traces, wrong: Traces) -> Data | None:
    """Return the first stop at which a token's numbers differ, and one such token; None without a difference."""
    stops = len(next(iter(right.values()))[0])
    for stop in range(stops):
        differing = [
            token
            for name in right
            for token, trace in enumerate(right[name])
            if trace[stop] != wrong[name][token][stop]
        ]
        if differing:
            return {"pass": phase, "step": stop, "row": differing[len(differing) // 2]}
    return None
