"""The ring kernels on the simulator, with the arrays of :mod:`reference` in and out."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nki_impl import kernels, packing
from nki_impl.packing import bounds_by_position, position_ranges
from nki_impl.sim.machine.core import Core
from nki_impl.sim.machine.launch import Outcome, run_ranks

from .reference import Array, Case, Inputs, Truth, backward, draw, forward, rings, worst


@dataclass(frozen=True)
class Forward:
    """o [W, b, h, s, d], lse [W, b, h, s] as the kernel left them, and the run's counters."""

    o: Array
    lse: Array
    outcome: Outcome


@dataclass(frozen=True)
class Backward:
    """dq, dk, dv by rows, as the kernel left them, and the run's counters."""

    dq: Array
    dk: Array
    dv: Array
    outcome: Outcome


def turned(x: Array) -> Array:
    """Rows to columns and back: the last two axes swapped."""
    return np.ascontiguousarray(x.swapaxes(-1, -2))


def tiles(rows: Array) -> Array:
    """[.., 128, ceil(s / 128)] of [.., s]: row t at [t % 128, t // 128]; NaN in the padding, which nobody may read."""
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % 128)]
    padded = np.pad(rows, padding, constant_values=rows.dtype.type(np.nan))
    return turned(padded.reshape(*rows.shape[:-1], -1, 128))


def rows(tiled: Array, length: int | None = None) -> Array:
    """[.., s] of [.., 128, ceil(s / 128)]; the padding must be 0."""
    padded = turned(tiled).reshape(*tiled.shape[:-2], -1)
    length = padded.shape[-1] if length is None else length
    assert (padded[..., length:] == 0).all()
    return padded[..., :length]


def common(case: Case, given: Inputs, rank: int) -> dict[str, Any]:
    """What both passes take alike."""
    bounds = {}
    if case.zigzag or case.documents:
        bounds = dict(zip(("bound_min", "bound_max"), of_owners(case, given, rank), strict=True))
    elif given.bound_min is not None and given.bound_max is not None:
        bounds["bound_min"] = given.bound_min[rank].astype(np.float32)
        bounds["bound_max"] = given.bound_max[rank].astype(np.float32)
    return {
        "num_workers": case.workers,
        "use_causal_mask": case.causal and not case.zigzag,
        "replica_groups": case.groups,
        "softmax_scale": case.scale,
        **bounds,
    }


def of_owners(case: Case, given: Inputs, rank: int) -> tuple[Array, Array]:
    """Bounds for the keys of each ring position: of the documents, and of the causal mask of zig-zag."""
    place = next(ring.index(rank) for ring in rings(case) if rank in ring)
    causal = case.causal and case.zigzag
    ranges = position_ranges(np.tile(case.positions[place], (case.batch, 1)), causal)
    if given.bound_min is not None and given.bound_max is not None:
        ranges = packing.both(ranges, (given.bound_min[rank], given.bound_max[rank]))
    return bounds_by_position(*ranges, case.positions)


def run_forward(
    case: Case, given: Inputs, module: Any = kernels, launch: Any = None, **options: Any
) -> Forward:
    """The forward of a case; ``launch`` are arguments of run_ranks, ``options`` of the kernel."""
    arguments = [
        {
            "q": given.q[rank] if options.get("tp_q") else turned(given.q[rank]),
            "k": given.k[rank] if options.get("tp_k") else turned(given.k[rank]),
            "v": given.v[rank],
            "striped_input": case.striped,
            "training": True,
            **common(case, given, rank),
            **options,
        }
        for rank in range(case.ranks)
    ]
    outcome = run_ranks(module.ring_attention_spmd_fwd, arguments, **(launch or {}))
    o, lse = (np.stack([result[i] for result in outcome.results]) for i in range(2))
    return Forward(o, rows(lse, case.length), outcome)


def run_backward(
    case: Case,
    given: Inputs,
    o: Array,
    lse: Array,
    module: Any = kernels,
    launch: Any = None,
    **options: Any,
) -> Backward:
    """The backward of a case from o and lse by rows."""
    arguments = [
        {
            "q_ref": turned(given.q[rank]),
            "k_ref": turned(given.k[rank]),
            "v_ref": turned(given.v[rank]),
            "o_ref": turned(o[rank]),
            "dy_ref": turned(given.dy[rank]),
            "lse_ref": tiles(lse[rank]),
            "striped_attention": case.striped,
            "lnc_size": (launch or {}).get("lnc", 1),
            **common(case, given, rank),
            **options,
        }
        for rank in range(case.ranks)
    ]
    outcome = run_ranks(module.ring_attention_spmd_bwd, arguments, **(launch or {}))
    dq, dk, dv = (turned(np.stack([r[i] for r in outcome.results])) for i in range(3))
    return Backward(dq, dk, dv, outcome)


def both(case: Case, module: Any = kernels, launch: Any = None) -> tuple[Forward, Backward]:
    """Forward, and backward from its o and lse."""
    given = draw(case)
    ahead = run_forward(case, given, module, launch)
    return ahead, run_backward(case, given, ahead.o, ahead.lse, module, launch)


def order(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> str:
    """What rank 0 issues during ``run``: P a permute, R one that adds, M matrix products in a row."""
    letters = {
        "collective_permute_implicit": "P",
        "collective_permute_implicit_reduce": "R",
        "nc_matmul": "M",
    }
    issued = []
    begin = Core.begin

    def noted(core: Core, operation: str) -> None:
        if core.rank == 0 and operation in letters:
            issued.append(letters[operation])
        begin(core, operation)

    with monkeypatch.context() as patch:
        patch.setattr(Core, "begin", noted)
        run()
    return re.sub("M+", "M", "".join(issued))


def errors_of_forward(case: Case, run: Forward) -> dict[str, float]:
    """The worst error of o and of lse over all ranks, in units of what is allowed."""
    return errors(forward(case, draw(case)), {"o": run.o, "lse": run.lse})


def errors_of_backward(
    case: Case, ahead: Forward, run: Backward, **options: Any
) -> dict[str, float]:
    """The worst errors of dq, dk, dv against the gradient from the forward's own o and lse."""
    truth = backward(case, draw(case), ahead.o, ahead.lse, **options)
    return errors(truth, {"dq": run.dq, "dk": run.dk, "dv": run.dv})


def errors(truth: Truth, got: dict[str, Array]) -> dict[str, float]:
    """Each tensor's worst error in units of what is allowed."""
    return {name: worst(x, truth.value[name], truth.allowed[name]) for name, x in got.items()}


def wrong(found: dict[str, float]) -> dict[str, float]:
    """The tensors that are further off than allowed."""
    return {name: error for name, error in found.items() if not error <= 1.0}
