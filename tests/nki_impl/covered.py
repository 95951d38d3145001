"""One run of the covering set: the kernels on the simulator, held to both levels of :mod:`tolerance`.

The runs are the lines of covering_runs.json, which tests/benchmarks/nki_covering.py makes and runs.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from nki_impl.lang import nl

from .prediction import predicted, recipe_for, rings_of
from .reference import Case, draw
from .running import run_backward, run_forward
from .tolerance import Measured, broken, broken_any_order, broken_same_order, compared

FILE = Path(__file__).with_name("covering_runs.json")
MASKS: dict[str, dict[str, bool]] = {
    "full": {},
    "causal": {"causal": True},
    "striped": {"causal": True, "striped": True},
    "bounds": {"causal": True, "striped": True, "packed": True},
    "zigzag": {"causal": True, "zigzag": True},
    "documents, full": {"documents": True},
    "documents, causal": {"causal": True, "documents": True},
    "documents, striped": {"causal": True, "striped": True, "documents": True},
    "documents, zigzag": {"causal": True, "zigzag": True, "documents": True},
}
FACTORS: dict[str, list[Any]] = {
    "workers": [1, 2, 3, 4, 8],
    "mask": list(MASKS),
    "lnc": [1, 2],
    # Batch, query heads, query heads that share a key head.
    "heads": [
        [1, 1, 1],
        [1, 2, 1],
        [2, 1, 1],
        [1, 3, 1],
        [3, 1, 1],
        [1, 2, 2],
        [1, 3, 3],
        [2, 4, 4],
    ],
    # Whole tiles, and ragged ones: less than a tile, a tile and two rows, five tiles and a half.
    "length": [128, 256, 384, 640, 1024, 50, 130, 702],
    "width": [64, 128],
    "dtype": ["bfloat16", "float16", "float32"],
    "rings": [1, 2],
    "tp_q": [False, True],
    "tp_k": [False, True],
    "mixed_precision": [True, False],
    "lse_dtype": ["float32", "bfloat16", "float16"],
}


# Beyond pairs: each head of a group adds to a carried sum of the input type by itself.
MORE: list[dict[str, Any]] = [
    {
        "workers": workers, "mask": mask, "lnc": lnc, "heads": heads, "length": 128, "width": 64,
        "dtype": dtype, "rings": 1, "tp_q": False, "tp_k": False, "mixed_precision": False,
        "lse_dtype": "float32",
    }
    for workers, mask, lnc, heads, dtype in (
        (4, "striped", 1, [1, 3, 3], "bfloat16"),
        (3, "bounds", 2, [1, 2, 2], "float16"),
    )
]  # fmt: skip


def covering_runs() -> list[dict[str, Any]]:
    """The stored set: each run a value of every factor, and its number as ``seed``."""
    runs: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["runs"]
    return runs


def cost(run: dict[str, Any]) -> int:
    """Scores that a run computes: what its time goes with."""
    batch, heads, _ = run["heads"]
    return run["rings"] * batch * heads * (run["workers"] * run["length"]) ** 2


def case_of(run: dict[str, Any]) -> Case:
    """Two rings side by side take turns: ranks 0, 2, .. and 1, 3, .."""
    batch, heads, group = run["heads"]
    ranks, rings = run["workers"] * run["rings"], run["rings"]
    groups = tuple(tuple(range(first, ranks, rings)) for first in range(rings))
    return Case(
        run["workers"], batch, heads, group, run["length"], run["width"], run["dtype"],
        seed=run["seed"], groups=groups if rings > 1 else None, **MASKS[run["mask"]],
    )  # fmt: skip


def measured(run: dict[str, Any]) -> list[Measured]:
    """Forward, and backward from its own o and lse; every tensor of every rank."""
    case, launch = case_of(run), {"lnc": run["lnc"]}
    given = draw(case)
    turns = {name: run[name] for name in ("tp_q", "tp_k")}
    lse_dtype = getattr(nl, run["lse_dtype"])
    ahead = run_forward(case, given, launch=launch, lse_dtype=lse_dtype, **turns)
    back = run_backward(
        case, given, ahead.o, ahead.lse, launch=launch, mixed_precision=run["mixed_precision"]
    )
    got = {"o": ahead.o, "lse": ahead.lse, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    recipe = recipe_for(run["dtype"], run["mixed_precision"], run["lse_dtype"])
    found = []
    for ring in rings_of(case, given):
        want = predicted(ring, recipe, ahead.o, ahead.lse)
        found += compared(ring, recipe, got, want)
    return found


def report(run: dict[str, Any]) -> dict[str, Any]:
    """A run as plain data: what it measured in the worst rank, and what it broke."""
    start = time.perf_counter()
    found = measured(run)
    worst: dict[str, dict[str, float]] = {}
    for name in ("o", "lse", "dq", "dk", "dv"):
        ranks = [dataclasses.asdict(one) for one in found if one.tensor == name]
        worst[name] = {"equal": min(one["equal"] for one in ranks)}
        for column in ("ulps", "beyond", "deviations", "rms"):
            values = [one[column] for one in ranks if one[column] is not None]
            if values:
                worst[name][column] = float(f"{max(values):.4g}")
    return {
        **run,
        "seconds": round(time.perf_counter() - start, 2),
        "worst": worst,
        "broken_same_order": broken(found, broken_same_order),
        "broken_any_order": broken(found, broken_any_order),
    }
