"""The data of a page that steps through rings: every number on the page is from a recorded run.

:func:`ringspec.ring` runs one small problem (B = H = 1, float64) for every number of workers W, layout, mask and
circulation, and records its states. The recording shows what each worker holds, the softmax state of each row, and what
is sent; ``ringspec.rings.cost`` counts pairs and bytes. A *stop* is a position of the page's slider. With T steps, stop
t < T shows step t after its computation, and stop T shows the end of the pass, after the last transfer. A *trace* is
the list of a token's numbers at successive stops.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringspec
from ringspec.cli.shared.inputs import drawn
from ringspec.errors import LayoutError, OptionError
from ringspec.rings.cost import Cost
from ringspec.rings.layouts import make_layout
from ringspec.rings.lockstep import Moment
from ringspec.rings.ring import ring
from ringspec.rings.run import Run
from ringspec.spec.masks import visible
from ringspec.spec.schedule import CIRCULATIONS, Schedule
from ringspec.spec.worker import ForwardState, KeySide, Side, WorkerState, names_of

Data = dict[str, Any]
Array = NDArray[np.float64]
Row = list[int | str | None]
# The traces of all tokens, by name; a trace has a row of numbers for each stop.
Traces = dict[str, list[list[Row | None]]]

HEAD_DIM = 4
DECIMALS = 4
WORKERS = (2, 3, 4, 8)
# The shortest length that every layout can distribute over each of these numbers of workers.
TOKENS = 48
BUG_WORKERS, BUG_TOKENS = 4, 24  # of a ring with a known bug
MOST_WORKERS, MOST_TOKENS = 8, 48
LAYOUTS = ("contiguous", "striped", "zigzag")
PASSES = ("forward", "backward")
POOLS = ("traces", "numbers")
# Names that the page omits: they are the same for every slot of a block, or only label it.
UNSHOWN = ("rows", "columns", "dbias")


def masks(tokens: int) -> dict[str, tuple[str, Data]]:
    """Return the masks of the page by name, each as a description and keywords of :func:`ringspec.ring`.

    >>> masks(24)["window"]
    ('causal, the last 7 tokens', {'causal': True, 'window': (6, 0)})
    >>> masks(24)["documents"][1]["cu_seqlens"]
    [0, 9, 15, 24]
    """
    left = max(1, tokens // 4)
    starts = sorted({0, 3 * tokens // 8, 5 * tokens // 8, tokens})
    many = "1 document" if len(starts) == 2 else f"{len(starts) - 1} documents"
    return {
        "none": ("no mask", {}),
        "causal": ("causal", {"causal": True}),
        "window": (
            f"causal, the last {left + 1} tokens",
            {"causal": True, "window": (left, 0)},
        ),
        "documents": (f"causal in {many}", {"causal": True, "cu_seqlens": starts}),
    }


class Pool:
    """A list of distinct values; elsewhere in the data of the page, the index in this list stands for the value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        text = json.dumps(value)
        if text not in self.places:
            self.places[text] = len(self.values)
            self.values.append(value)
        return self.places[text]


def records(
    workers: Sequence[int] = WORKERS,
    tokens: int = TOKENS,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Data:
    """Return everything that the page shows, as plain data; ``tick`` is called after each ring.

    ``tables``   for each 'W/layout': the tokens of each worker
    ``missing``  for each 'W/layout' that is not possible: the reason
    ``visible``  for each mask: the visible pairs, as rows of 0 and 1
    ``runs``     for each 'W/layout/mask/circulation': both passes of the ring. The forward pass has a trace 'softmax'
                 (m, l, lse, o ...) for each token, and the backward pass has the traces 'dq' and 'dk'. A trace is given
                 as an index into ``traces``
    ``traces``   the distinct traces; each is a list of indices into ``numbers``, one for each stop
    ``numbers``  the distinct rows of numbers, as integers in units of 0.0001; -inf is None
    ``travels``  for each 'W/circulation/pass': what each worker holds at every stop

    Lists of indices are stored as :func:`differences`.

    >>> document = records(workers=(2,), tokens=8)
    >>> document["tables"]["2/zigzag"], document["missing"]
    ([[0, 1, 6, 7], [2, 3, 4, 5]], {})
    >>> document["runs"]["2/zigzag/causal/kv"]["forward"]["pairs"]
    [[10, 10], [8, 8]]
    """
    chosen = list(dict.fromkeys(workers))
    check_numbers(chosen, tokens)
    pools = {name: Pool() for name in POOLS}
    document = empty_document(chosen, LAYOUTS, list(masks(tokens)), CIRCULATIONS, tokens, seed)
    for count in chosen:
        for layout in LAYOUTS:
            try:
                make_layout(layout, tokens, count)
            except LayoutError as error:
                document["missing"][f"{count}/{layout}"] = str(error)
                continue
            for mask in document["choices"]["masks"]:
                for circulation in CIRCULATIONS:
                    run = one_run(count, layout, mask, circulation, tokens, seed)
                    add_run(document, run, layout, mask, circulation, pools)
                    tick()
    if not document["runs"]:
        raise OptionError(
            "a sequence length that at least one layout can distribute",
            f"--tokens {tokens} with --workers {', '.join(str(one) for one in chosen)}",
            "choose a multiple of 2W",
        )
    return document | {name: pool.values for name, pool in pools.items()}


def empty_document(
    workers: Sequence[int],
    layouts: Sequence[str],
    mask_names: Sequence[str],
    circulations: Sequence[str],
    tokens: int,
    seed: int,
) -> Data:
    """Return the data of a page that offers these choices, as yet without any ring."""
    return {
        "command": "explore",
        "version": ringspec.__version__,
        "specification": ringspec.SPEC_VERSION,
        "problem": {
            "tokens": tokens,
            "heads": 1,
            "head_dim": HEAD_DIM,
            "seed": seed,
            "recipe": "float64",
            "decimals": DECIMALS,
        },
        "choices": {
            "workers": list(workers),
            "layouts": list(layouts),
            "masks": {name: masks(tokens)[name][0] for name in mask_names},
            "circulations": list(circulations),
            "passes": list(PASSES),
        },
        "visible": {},
        "tables": {},
        "missing": {},
        "travels": {},
        "runs": {},
    }


def add_run(
    document: Data, run: Run, layout: str, mask: str, circulation: str, pools: dict[str, Pool]
) -> None:
    """Add the data of one ring to those of the page."""
    count = len(run.workers)
    document["tables"][f"{count}/{layout}"] = run.layout_q.table.tolist()
    document["visible"][mask] = visible_rows(run)
    document["runs"][f"{count}/{layout}/{mask}/{circulation}"] = run_record(run, pools)
    # Neither the layout nor the mask changes who holds which block.
    for phase in PASSES:
        where = f"{count}/{circulation}/{phase}"
        if where not in document["travels"]:
            document["travels"][where] = travel(run, phase)


def check_numbers(workers: Sequence[int], tokens: int) -> None:
    """Raise OptionError if the page cannot be drawn for these numbers of workers and tokens."""
    if not workers or not all(1 <= one <= MOST_WORKERS for one in workers):
        raise OptionError(
            f"--workers from 1 to {MOST_WORKERS}",
            ", ".join(str(one) for one in workers) or "none",
            "choose a ring that can be drawn; ringspec schedule shows larger ones",
        )
    if not 1 <= tokens <= MOST_TOKENS:
        raise OptionError(
            f"--tokens from 1 to {MOST_TOKENS}",
            str(tokens),
            "choose a length in this range; 48 suits every layout with 2, 3, 4 and 8 workers",
        )


def how_many(workers: Sequence[int]) -> int:
    """Return the largest number of rings that :func:`records` may run."""
    return len(set(workers)) * len(LAYOUTS) * len(masks(1)) * len(CIRCULATIONS)


def one_run(workers: int, layout: str, mask: str, circulation: str, tokens: int, seed: int) -> Run:
    """Run both passes of one ring, and record the state of every worker in every step."""
    shape = (1, 1, tokens, HEAD_DIM)
    q, k, v, dy = (drawn(seed, name, shape) for name in ("q", "k", "v", "dy"))
    options = masks(tokens)[mask][1]
    return ring(
        q,
        k,
        v,
        dy,
        workers=workers,
        layout=layout,
        circulation=circulation,
        record=True,
        **options,
    )


def visible_rows(run: Run) -> list[str]:
    """Return which pairs are visible: a row for each query, with 0 or 1 for each key."""
    problem = run.problem
    allowed = visible(problem.rows, problem.columns, problem.terms)[0, 0]
    return ["".join("1" if entry else "0" for entry in row) for row in allowed]


def run_record(run: Run, pools: dict[str, Pool]) -> Data:
    """Return the entry of one ring in ``runs``."""
    traces = traces_of(run)
    return {
        phase: pass_record(run.cost(phase), traces[phase], pools)
        | {"sent": run.cost(phase).sent.tolist()}
        for phase in PASSES
    }


def traces_of(run: Run) -> dict[str, Traces]:
    """Return the traces of both passes of a run."""
    return {"forward": {"softmax": forward_traces(run)}, "backward": backward_traces(run)}


def pass_record(counted: Cost, traces: Traces, pools: dict[str, Pool]) -> Data:
    """Return the counted pairs and the imbalance of one pass, and its traces, whose values are stored in ``pools``."""
    return {
        "pairs": counted.pairs.tolist(),
        "imbalance": round(counted.imbalance, DECIMALS),
        "lockstep_imbalance": round(counted.lockstep_imbalance, DECIMALS),
        "traces": {
            name: differences([placed_trace(trace, pools) for trace in of_tokens])
            for name, of_tokens in traces.items()
        },
    }


def placed_trace(trace: Sequence[Row | None], pools: dict[str, Pool]) -> int:
    """Store a trace and its rows in ``pools``; return the index of the trace."""
    places = [pools["numbers"].place(row) for row in trace]
    return pools["traces"].place(differences(places))


def differences(places: Sequence[int]) -> list[int]:
    """Return the first index, followed by the difference between each index and the previous one.

    As text, the differences are shorter than the indices.

    >>> differences([1000, 1001, 1001, 999])
    [1000, 1, 0, -2]
    """
    return [place - before for before, place in pairwise((0, *places))]


def travel(run: Run, phase: str) -> Data:
    """Return what each worker holds at every stop, which blocks it computes with, and what is sent after each step."""
    schedule = run.schedule if phase == "forward" else run.backward_schedule
    assert schedule is not None
    workers, steps = range(schedule.workers), range(len(schedule.steps))
    stops = [[held(run.state(r, t, phase, "during")) for r in workers] for t in steps]
    stops.append([held_at_the_end(run, phase, schedule, r) for r in workers])
    return {
        "name": schedule.name,
        "moves": schedule.moves,
        "stops": stops,
        "meets": [[list(run.moment(r, t, phase).pair or ()) for r in workers] for t in steps],
        "sends": [
            [
                {
                    "kind": one.kind,
                    "pairs": [list(pair) for pair in one.pairs],
                    "carries": shown_names(one.carries),
                }
                for one in step.transfers
            ]
            for step in schedule.steps
        ],
    }


def held(state: WorkerState) -> list[list[Any]]:
    """Return what one worker holds: [owner, name, name ...] for each block of queries and of keys."""
    keys: tuple[Side, ...] = state.gathered or (state.key,)
    blocks = [block_of(side) for side in (state.query, *keys)]
    if isinstance(state, ForwardState):
        blocks[0] += ["m", "l", "o"]
    return [block for block in blocks if len(block) > 1]


def shown_names(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name not in UNSHOWN]


def block_of(side: Side) -> list[Any]:
    return [side.owner, *shown_names(names_of(side))]


def held_at_the_end(run: Run, phase: str, schedule: Schedule, worker: int) -> list[list[Any]]:
    """Return what a worker still holds after the last step, and what arrived with the last transfer."""
    last = len(schedule.steps) - 1
    blocks = held(run.state(worker, last, phase))
    if phase == "forward":  # m, l and the unnormalised o became o and lse
        blocks[0] = [name for name in blocks[0] if name not in ("m", "l", "o")] + ["o", "lse"]
    came: list[list[Any]] = []
    for sender in range(schedule.workers):
        for message in run.moment(sender, last, phase).sent:
            if message.target != worker:
                continue
            # What a reduce-scatter brings is added at its owner; the partial sums are no longer needed.
            if message.kind == "reduce_scatter":
                sums = block_of(message.side)[1:]
                blocks = [[one for one in block if one not in sums] for block in blocks]
            if (block := block_of(message.side)) not in came:
                came.append(block)
    return [block for block in blocks if len(block) > 1] + came


def forward_traces(run: Run) -> list[list[Row | None]]:
    """Return a trace of each query: [m, l, lse, o ...] after each step (o is not divided by l), then [lse, o ...]."""
    traces: list[list[Row | None]] = [[] for _ in range(run.layout_q.length)]
    for t in range(len(run.schedule.steps)):
        for worker, tokens in enumerate(run.layout_q.table):
            state = run.state(worker, t)
            assert isinstance(state, ForwardState)
            running = state.running
            row_state = [running.m[0, 0], running.l[0, 0], running.lse[0, 0], running.o[0, 0]]
            for token, row in zip(tokens, rows(*row_state), strict=True):
                traces[token].append(row)
    for trace, row in zip(traces, rows(run.lse[0, 0], run.o[0, 0]), strict=True):
        trace.append(row)
    return traces


def backward_traces(run: Run) -> Traces:
    """Return traces of dq and of dk for each token: the values after each step, and finally the result.

    An accumulator is read from whichever worker holds it. If every worker gathers all keys, dk is None in every step,
    because each worker has its own partial sum.
    """
    assert run.backward_schedule is not None and run.dq is not None and run.dk is not None
    of_step = [by_owner(run.moments, t) for t in range(len(run.backward_schedule.steps))]
    traces: Traces = {}
    for name, result in (("dq", run.dq), ("dk", run.dk)):
        traces[name] = [[] for _ in range(run.layout_q.length)]
        for found in of_step:
            for owner, tokens in enumerate(run.layout_q.table):
                block = found[name].get(owner)
                there = [None] * len(tokens) if block is None else rows(block[0, 0])
                for token, row in zip(tokens, there, strict=True):
                    traces[name][token].append(row)
        for trace, row in zip(traces[name], rows(result[0, 0]), strict=True):
            trace.append(row)
    return traces


def by_owner(moments: Sequence[Moment], step: int) -> dict[str, dict[int, Array]]:
    """Return the accumulators dq and dk of each owner after one backward step."""
    found: dict[str, dict[int, Array]] = {"dq": {}, "dk": {}}
    for moment in moments:
        if (moment.phase, moment.step) != ("backward", step):
            continue
        # What was sent is no longer in the state after the step, but in the message.
        sides: list[Side] = [message.side for message in moment.sent]
        sides += [moment.after.query, moment.after.key]
        for side in sides:
            for name in ("dq", "dk"):
                value = getattr(side, name, None)
                if value is not None and not (isinstance(side, KeySide) and moment.after.gathered):
                    found[name][side.owner] = value
    return found


def rows(*columns: Array) -> list[Row]:
    """Join columns [n] or [n, d] to a table, rounded to :data:`DECIMALS` decimals and given as integers.

    -inf (m and lse of a row that has not yet met a visible key) becomes None. inf and NaN, which only a bug causes,
    become the texts 'inf' and 'nan'.

    >>> rows(np.array([-math.inf, 1 / 3]), np.array([[1.0, -0.0], [3.0, math.nan]]))
    [[None, 10000, 0], [3333, 30000, 'nan']]
    """
    table = np.concatenate([x.reshape(len(x), -1) for x in columns], axis=1)
    return [[integer(x) for x in row] for row in np.round(table * 10.0**DECIMALS).tolist()]


def integer(x: float) -> int | str | None:
    if math.isfinite(x):
        return int(x)
    return None if x == -math.inf else str(x)
