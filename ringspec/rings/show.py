"""Convert runs, schedules, states and moments to text, and runs also to HTML tables and to named tensors.

A *moment* is the record of one worker's step. ``print`` shows the texts, notebooks show the tables, and ``run.save``
writes the tensors.
"""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringspec.rings.cost import Cost, cost, pairs_text
from ringspec.rings.lockstep import WHEN, Moment
from ringspec.spec.schedule import Schedule
from ringspec.spec.worker import BackwardState, ForwardState, Message, WorkerState, names_of

if TYPE_CHECKING:
    from ringspec.rings.run import Run

STATE_NAMES = ("q", "k", "v", "dy", "row_term", "m", "l", "o", "lse", "dq", "dk", "dv")
ROW_NAMES = ("position", "segment", "bound_min", "bound_max", "bias", "mask", "keep")
COLUMN_NAMES = ("position", "segment")
TERM_NAMES = ("scale", "causal", "window", "softcap", "dropout_p", "dropout_seed")
RESULT_NAMES = ("index_q", "index_k", "o", "lse", "dq", "dk", "dv", "dsinks", "dbias")


def travelling(schedule: Schedule, step: int, absent: tuple[str, ...] = ()) -> str:
    """Say what travels after a step and where to, as in 'k v columns: r -> r+1 mod 4'.

    ``absent`` are names to leave out.
    """
    parts = []
    for transfer in schedule.steps[step].transfers:
        where = {"gather": "to all", "reduce_scatter": "to owners"}.get(transfer.kind)
        if where is None:
            shift = (transfer.pairs[0][1] - transfer.pairs[0][0]) % schedule.workers
            ring = all((a + shift) % schedule.workers == b for a, b in transfer.pairs)
            hop = "r-1" if 1 < shift == schedule.workers - 1 else f"r+{shift}"
            where = f"r -> {hop} mod {schedule.workers}" if ring else str(transfer.pairs)
        carried = " ".join(name for name in transfer.carries if name not in absent)
        parts.append(f"{carried}: {where}")
    return "; ".join(parts) or "nothing"


def schedule_as_text(schedule: Schedule) -> str:
    """Return one line per step: the owner of the block that each worker computes with, and what travels afterwards."""
    lines = [f"{schedule.name}, {schedule.workers} workers, {schedule.moves} move"]
    for t, step in enumerate(schedule.steps):
        owners = " ".join("-" if b is None else str(b) for b in step.uses)
        lines.append(f"step {t}: visitors {owners}; then {travelling(schedule, t)}")
    return "\n".join(lines)


def state_as_text(state: WorkerState) -> str:
    """Say whose queries and keys a worker holds."""
    held = [
        f"{name} of {side.owner}" if here else f"no {name} (those of {side.owner} were sent on)"
        for name, side, here in (
            ("queries", state.query, state.query.q is not None),
            ("keys", state.key, state.key.k is not None),
        )
    ]
    if state.gathered:
        held.append(f"gathered keys of {len(state.gathered)} workers")
    return f"worker {state.worker} after {state.step} steps holds " + ", ".join(held)


def moment_as_text(moment: Moment) -> str:
    """Say what one worker computed, received and sent in one step."""
    what = "idle" if moment.pair is None else f"q of {moment.pair[0]} x k of {moment.pair[1]}"
    target = ", ".join(map(message_as_text, moment.sent)) or "nothing"
    source = ", ".join(sorted({str(m.source) for m in moment.received})) or "nobody"
    return (
        f"{moment.phase} step {moment.step}, worker {moment.worker}: {what}; "
        f"received from {source}; sent {target}"
    )


def message_as_text(message: Message) -> str:
    """Say what a message holds and which worker it goes to."""
    return f"{'+'.join(names_of(message.side))} to {message.target}"


# Printing is not part of the specification, so this file gives its classes their ``__str__``.
Schedule.__str__ = schedule_as_text  # type: ignore[assignment,method-assign]
ForwardState.__str__ = state_as_text  # type: ignore[assignment,method-assign]
BackwardState.__str__ = state_as_text  # type: ignore[assignment,method-assign]
Moment.__str__ = moment_as_text  # type: ignore[assignment,method-assign]


def schedules(run: Run) -> list[Schedule]:
    """Return the schedules of the passes that were run."""
    return [s for s in (run.schedule, run.backward_schedule) if s is not None]


def absent_names(run: Run) -> tuple[str, ...]:
    """Return the names of tensors in the run's schedules that the run does not have, such as dbias without a bias."""
    return ("dbias",) if run.problem.rows.bias is None else ()


def step_cells(schedule: Schedule, counted: Cost) -> list[list[str]]:
    """Return one row of text cells per worker, with one cell per step, such as 'q2 x k1 (16)'.

    A cell names the owners of queries and keys, and the number of visible pairs.
    """
    table = []
    for r in range(schedule.workers):
        row = []
        for step in range(len(schedule.steps)):
            pair = schedule.pair(step, r)
            count = counted.pairs[step, r] // counted.copies
            row.append("-" if pair is None else f"q{pair[0]} x k{pair[1]} ({count})")
        table.append(row)
    return table


def heading(run: Run) -> str:
    """Return sizes, layout and recipe of a run in one line."""
    batch, heads, n_q, width = run.problem.q.shape
    what = f"B={batch} H={heads} Sq={n_q} Sk={run.problem.k.shape[2]} D={width}"
    return (
        f"ring of {run.layout_q.workers} workers, layout {run.layout_q.name}, "
        f"recipe {run.recipe.name}, {what}"
    )


def summary(counted: Cost) -> str:
    """Return hops, bytes and balance in one line."""
    return (
        f"{counted.hops} hops, {int(counted.sent.sum())} bytes sent in all, "
        f"imbalance {counted.imbalance:.2f} (lockstep {counted.lockstep_imbalance:.2f})"
    )


def run_as_text(run: Run) -> str:
    """Return text that says who computes what in which step, what travels, and how evenly work is divided."""
    lines = [heading(run)]
    for schedule in schedules(run):
        counted = cost(run.problem, schedule, run.layout_q, run.layout_k, run.recipe)
        cells = step_cells(schedule, counted)
        width = max([len("step 00")] + [len(c) for row in cells for c in row])
        steps = "  ".join(f"step {t}".ljust(width) for t in range(len(schedule.steps)))
        lines += [
            "",
            f"{schedule.name}: queries x keys ({pairs_text(counted.copies)})",
            f"worker  {steps}",
        ]
        for r, row in enumerate(cells):
            lines.append(f"{r:>6}  " + "  ".join(c.ljust(width) for c in row).rstrip())
        for t in range(len(schedule.steps)):
            lines.append(f"after step {t}: {travelling(schedule, t, absent_names(run))}")
        lines.append(summary(counted))
    return "\n".join(line.rstrip() for line in lines)


def run_as_html(run: Run) -> str:
    """Return what :func:`run_as_text` says as HTML tables; darker cells have more visible pairs."""
    parts = [f"<p>{html.escape(heading(run))}</p>"]
    for schedule in schedules(run):
        counted = cost(run.problem, schedule, run.layout_q, run.layout_k, run.recipe)
        most = max(int(counted.pairs.max()), 1)
        header = "".join(f"<th>step {t}</th>" for t in range(len(schedule.steps)))
        rows = []
        for r, row in enumerate(step_cells(schedule, counted)):
            cells = []
            for t, cell in enumerate(row):
                share = counted.pairs[t, r] / most
                color = f"background:rgba(0,114,178,{0.45 * share:.2f})"
                cells.append(f'<td style="{color}">{html.escape(cell)}</td>')
            rows.append(f"<tr><th>worker {r}</th>{''.join(cells)}</tr>")
        moves = "".join(
            f"<td><small>{html.escape(travelling(schedule, t, absent_names(run)))}</small></td>"
            for t in range(len(schedule.steps))
        )
        rows.append(f"<tr><th>then travel</th>{moves}</tr>")
        parts.append(
            f"<table><caption>{html.escape(schedule.name)}: queries x keys "
            f"({pairs_text(counted.copies)})</caption><tr><th></th>{header}</tr>{''.join(rows)}</table>"
            f"<p>{html.escape(summary(counted))}; columns = positions and segments of the keys, "
            "rows = those of the queries</p>"
        )
    return "\n".join(parts)


def run_tensors(run: Run) -> tuple[dict[str, NDArray], dict[str, str]]:
    """Return a dict of every array of a run, with names such as 'results/o', and the arguments of the run as metadata."""
    tensors: dict[str, NDArray] = {}

    def add(name: str, value: object) -> None:
        if isinstance(value, np.ndarray):
            tensors[name] = value

    for name in ("q", "k", "v"):
        add(f"inputs/{name}", getattr(run.problem, name))
    for name, seed in zip(("dy", "dlse"), run.seeds or (), strict=False):
        add(f"inputs/{name}", seed)
    for part, names in (("rows", ROW_NAMES), ("columns", COLUMN_NAMES)):
        for name in names:
            add(f"inputs/{part}/{name}", getattr(getattr(run.problem, part), name))
    add("inputs/sinks", run.problem.terms.sinks)
    for name in RESULT_NAMES[2:]:
        add(f"results/{name}", getattr(run, name))
    for result in run.workers:
        for name in RESULT_NAMES:
            add(f"workers/{result.worker}/{name}", getattr(result, name))
    for moment in run.moments:
        where = f"{moment.phase}/step{moment.step}/worker{moment.worker}"
        for when in WHEN:
            state = getattr(moment, when)
            owners = np.array([state.query.owner, state.key.owner], dtype=np.int64)
            add(f"{where}/{when}/owners", owners)
            for name in STATE_NAMES:
                add(f"{where}/{when}/{name}", getattr(state, name, None))
    meaning = {
        "workers": run.layout_q.workers,
        "layout": run.layout_q.name,
        "recipe": run.recipe.as_dict(),
        "schedules": [schedule.name for schedule in schedules(run)],
        "terms": {name: getattr(run.problem.terms, name) for name in TERM_NAMES},
        "recorded": bool(run.moments),
    }
    return tensors, {"ringspec.run": json.dumps(meaning, sort_keys=True)}
