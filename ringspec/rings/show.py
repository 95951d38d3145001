"""A run as text, as an HTML table, and as named tensors: what ``print(run)`` and ``save`` use."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ringspec.rings.cost import Cost, cost
from ringspec.spec.schedule import Schedule

if TYPE_CHECKING:
    from ringspec.rings.run import Run

STATE_NAMES = ("q", "k", "v", "dy", "delta", "m", "l", "o", "lse", "dq", "dk", "dv")
ROW_NAMES = ("position", "segment", "bound_min", "bound_max", "bias", "mask", "keep")
COLUMN_NAMES = ("position", "segment")
TERM_NAMES = ("scale", "causal", "window", "softcap", "dropout_p", "dropout_seed")
RESULT_NAMES = ("index_q", "index_k", "o", "lse", "dq", "dk", "dv", "dsinks", "dbias")


def schedules(run: Run) -> list[Schedule]:
    return [s for s in (run.schedule, run.backward_schedule) if s is not None]


def step_cells(schedule: Schedule, counted: Cost) -> list[list[str]]:
    """One row per worker, one cell per step: 'q2 x k1 (16)' = owners and visible pairs."""
    table = []
    for r in range(schedule.workers):
        row = []
        for t, step in enumerate(schedule.steps):
            owner = step.uses[r]
            if owner is None:
                row.append("-")
                continue
            a, b = schedule.pair(r, owner)
            row.append(f"q{a} x k{b} ({counted.pairs[t, r]})")
        table.append(row)
    return table


def heading(run: Run) -> str:
    batch, heads, n_q, width = run.problem.q.shape
    what = f"B={batch} H={heads} Sq={n_q} Sk={run.problem.k.shape[2]} D={width}"
    return (
        f"ring of {run.layout_q.workers} workers, layout {run.layout_q.name}, "
        f"recipe {run.recipe.name}, {what}"
    )


def summary(counted: Cost) -> str:
    return (
        f"{counted.hops} hops, {int(counted.sent.sum())} bytes sent in all, "
        f"imbalance {counted.imbalance:.2f} (lockstep {counted.lockstep_imbalance:.2f})"
    )


def run_as_text(run: Run) -> str:
    """Who computes what in which step, what travels, and how even the work is."""
    lines = [heading(run)]
    for schedule in schedules(run):
        counted = cost(run.problem, schedule, run.layout_q, run.layout_k, run.recipe)
        cells = step_cells(schedule, counted)
        width = max([len("step 00")] + [len(c) for row in cells for c in row])
        steps = "  ".join(f"step {t}".ljust(width) for t in range(len(schedule.steps)))
        lines += ["", f"{schedule.name}: queries x keys (visible pairs)", f"worker  {steps}"]
        for r, row in enumerate(cells):
            lines.append(f"{r:>6}  " + "  ".join(c.ljust(width) for c in row).rstrip())
        for t in range(len(schedule.steps)):
            lines.append(f"after step {t}: {schedule.travelling(t)}")
        lines.append(summary(counted))
    return "\n".join(line.rstrip() for line in lines)


def run_as_html(run: Run) -> str:
    """The same as tables for a notebook; darker cells hold more visible pairs."""
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
            f"<td><small>{html.escape(schedule.travelling(t))}</small></td>"
            for t in range(len(schedule.steps))
        )
        rows.append(f"<tr><th>then travel</th>{moves}</tr>")
        parts.append(
            f"<table><caption>{html.escape(schedule.name)}: queries x keys (visible pairs)"
            f"</caption><tr><th></th>{header}</tr>{''.join(rows)}</table>"
            f"<p>{html.escape(summary(counted))}; columns = positions and segments of the keys, "
            "rows = those of the queries</p>"
        )
    return "\n".join(parts)


def run_tensors(run: Run) -> tuple[dict[str, NDArray], dict[str, str]]:
    """Every array of a run by a readable name, and what the run was, as metadata."""
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
        for when, state in (
            ("before", moment.before),
            ("during", moment.during),
            ("after", moment.after),
        ):
            owners = np.array([state.query_owner, state.key_owner], dtype=np.int64)
            add(f"{where}/{when}/owners", owners)
            for name in STATE_NAMES:
                add(f"{where}/{when}/{name}", getattr(state, name))
    meaning = {
        "workers": run.layout_q.workers,
        "layout": run.layout_q.name,
        "recipe": run.recipe.as_dict(),
        "schedules": [schedule.name for schedule in schedules(run)],
        "terms": {name: getattr(run.problem.terms, name) for name in TERM_NAMES},
        "recorded": bool(run.moments),
    }
    return tensors, {"ringspec.run": json.dumps(meaning, sort_keys=True)}
