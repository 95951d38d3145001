"""Compare the results of each worker of a ring with dense attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.cli.shared.output import bands
from ringspec.cli.shared.progress import Tick
from ringspec.compare.row_scale import relative_errors, row_errors
from ringspec.errors import OptionError, nearest
from ringspec.formats import round_to
from ringspec.problem.model import Array, Integers, Problem
from ringspec.rings.ring import rounded_inputs
from ringspec.rings.run import Run, WorkerResult
from ringspec.truth.dense import Named, in_float64, pairs_in
from ringspec.truth.problem import Upstream, rows_of
from ringspec.truth.sharded import OF_KEYS, OF_QUERIES

METHODS = ("auto", "dense", "rows", "none")
# B * H * Sq * Sk above which 'auto' compares only some rows: about two seconds of computation.
DENSE_LIMIT = 1 << 24
ROWS_PER_WORKER = 8
BOUNDS = {"float64": 1e-14}
REFERENCE = "the dense definition in float64"
ROW_SCALE = (
    "the row's sums with every term replaced by its absolute value, "
    "times 1 + its largest logit, computed in the same way"
)

Data = dict[str, Any]


@dataclass(frozen=True)
class Reference:
    """Results of dense attention for the query rows ``rows`` [n] (global indices).

    ``values``: by name, o [B, H, n, Dv] and lse [B, H, n]; with dy or dlse also dq [B, H, n, D]; and dk, dv and dsinks
    if ``rows`` contains all rows. ``scale``: for the same names, the row scales, which are the magnitudes that errors
    are divided by.
    """

    rows: Integers
    values: Named
    scale: Named


def check_method(method: str) -> None:
    if method not in METHODS:
        raise OptionError(
            "a way to compare (auto, dense, rows or none)",
            repr(method),
            nearest(method, METHODS),
            code="unknown-name",
        )


def choose(method: str, problem: Problem) -> str:
    """Return ``method``, the value of --compare; replace 'auto' by 'dense', or by 'rows' if the problem is large."""
    if method != "auto":
        return method
    return "dense" if pairs_in(problem) <= DENSE_LIMIT else "rows"


def rows_to_compare(run: Run, method: str) -> Integers:
    """Return the query rows to compare: all, or up to 8 evenly spaced rows of each worker, including both ends."""
    if method == "dense":
        return run.problem.rows.index
    picked = []
    for table in run.layout_q.table:
        held = table[table >= 0]
        places = np.linspace(0, max(held.size - 1, 0), min(ROWS_PER_WORKER, held.size))
        picked.append(held[places.astype(np.int64)])
    return np.unique(np.concatenate(picked))


def evaluate(problem: Problem, upstream: Upstream, rows: Integers, tick: Tick) -> Reference:
    """Compute dense attention in float64 for the query rows ``rows``, from inputs that are already rounded."""
    values, scale = in_float64(rows_of(problem, rows), upstream.take(rows), tick=tick)
    if rows.size != problem.q.shape[2]:
        values = {name: x for name, x in values.items() if name in OF_QUERIES}
    return Reference(rows, values, scale)


def compare(
    run: Run, dy: Array | None, dlse: Array | None, method: str, tick: Tick = lambda: None
) -> Data:
    """Compare the results of a ring with dense attention; return plain data with the keys of ``schema.json``."""
    bound = BOUNDS.get(run.recipe.name)
    data: Data = {
        "method": method,
        "reference": REFERENCE if bound is not None else f"{REFERENCE}, on the rounded inputs",
        "relative_to": f"the row scale: {ROW_SCALE} (ringspec.compare.row_scale)",
        "bound": bound,
        "rows_compared": 0,
        "workers": [],
        "all": {},
        "within_bound": None,
    }
    if method == "none":
        return data
    problem = rounded_inputs(run.problem, run.recipe)
    dy = None if dy is None else round_to(dy, run.recipe.inputs)
    upstream = Upstream(dy, dlse)
    if dlse is not None:
        upstream = Upstream(*upstream.filled(problem))  # if only dlse is given, dy is 0
    reference = evaluate(problem, upstream, rows_to_compare(run, method), tick)
    data["rows_compared"] = int(reference.rows.size)
    data["workers"] = [
        {"worker": w.worker, **worker_errors(w, reference, problem.q.shape[2])} for w in run.workers
    ]
    for name in (*OF_QUERIES, *OF_KEYS):
        if name in data["workers"][0]:
            data["all"][name] = largest([entry[name] for entry in data["workers"]])
    if "dsinks" in reference.values and run.dsinks is not None:
        want = reference.values["dsinks"]
        errors = np.abs(run.dsinks.reshape(want.shape) - want)
        data["all"]["dsinks"] = pair_of(errors, reference.scale["dsinks"])
    if bound is not None:
        data["within_bound"] = all(entry["rel"] <= bound for entry in data["all"].values())
    return data


def worker_errors(worker: WorkerResult, reference: Reference, length: int) -> Data:
    """Return the errors of one worker's results, by the name of the tensor."""
    place = np.full(length + 1, -1, dtype=np.int64)  # padding slots are -1, the last entry
    place[reference.rows] = np.arange(reference.rows.size)
    errors: Data = {}
    for names, found in ((OF_QUERIES, place[worker.index_q]), (OF_KEYS, worker.index_k)):
        held = np.flatnonzero(found >= 0)
        at = found[held]
        for name in names:
            got = getattr(worker, name)
            if got is not None and name in reference.values:
                want, scale = (x[name][:, :, at] for x in (reference.values, reference.scale))
                errors[name] = pair_of(row_errors(got[:, :, held], want), scale)
    return errors


def pair_of(errors: Array, scale: Array) -> dict[str, float]:
    """Return the largest absolute and the largest relative error (NaN if any error is NaN)."""
    relative = relative_errors(errors, scale)
    return {"abs": float(errors.max(initial=0.0)), "rel": float(relative.max(initial=0.0))}


def largest(entries: list[dict[str, float]]) -> dict[str, float]:
    return {key: float(np.max([entry[key] for entry in entries])) for key in ("abs", "rel")}


def comparison_lines(data: Data, width: int) -> list[str]:
    """Return the comparison as text."""
    if data["method"] == "none":
        return []
    names = list(data["workers"][0])[1:]
    entries = [*data["workers"], data["all"]]
    labels = ["worker", *(str(entry["worker"]) for entry in data["workers"]), "all", "abs"]
    columns = [
        [
            name,
            *(f"{entry[name]['rel']:.1e}" for entry in entries),
            f"{data['all'][name]['abs']:.1e}",
        ]
        for name in names
    ]
    lines = [
        f"ring against {data['reference']}, {data['rows_compared']} query rows: largest errors",
        *bands(labels, columns, width),
    ]
    if "dsinks" in data["all"]:
        dsinks = data["all"]["dsinks"]
        lines.append(
            f"dsinks, summed over the workers: {dsinks['rel']:.1e}, abs {dsinks['abs']:.1e}"
        )
    if "dq" in names and "dk" not in names:
        lines.append(
            f"{ROWS_PER_WORKER} query rows of each worker; dk and dv need all rows and are not compared "
            "(--compare dense compares them)"
        )
    return lines


def verdict(data: Data) -> str:
    """Return the result of the comparison in one line."""
    if data["method"] == "none":
        return "verdict: not compared with dense attention (--compare none)"
    worst = float(np.max([entry["rel"] for entry in data["all"].values()]))
    if data["bound"] is None:
        return (
            f"verdict: largest error against dense attention {worst:.1e} of the row scale; no bound "
            "for this recipe, which rounds"
        )
    assert math.isfinite(data["bound"])
    agrees = "agrees" if data["within_bound"] else "DISAGREES"
    return (
        f"verdict: ring {agrees} with dense attention: largest error {worst:.1e}, "
        f"bound {data['bound']:.0e}"
    )
