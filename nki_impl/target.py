"""The ring kernels as targets of the conformance suite, which ``ringspec check nki_impl`` runs.

This is the only module of the package that imports ringspec. It converts the arrays of a call to the layout that the
kernels require, and converts the results back. The conversion does this:

- A mask that is not just causal in the contiguous or striped layout becomes bounds, which hold a range of keys for
  each query and each owner of keys. If the tokens or segments of a worker do not ascend, its rows are sorted for the
  call (:mod:`nki_impl.ordering`).
- ``nki_impl-official`` multiplies q and dq by the scale under a causal mask, as AWS's interface requires. This is exact,
  because its head dimensions have a scale that is a power of two. The other targets let the kernel apply the scale.
- The kernels return gradients in float32. They are rounded once if the call requests a narrower format.

The targets:

``nki_impl``           everything that the kernels can compute
``nki_impl-lnc2``      the same, on ranks of two cores
``nki_impl-official``  only what AWS's interface has: one key head for each query head, no mask or a causal one, in the
                       contiguous or striped layout, and no argument of our own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.kernels import ring_attention_spmd_bwd, ring_attention_spmd_fwd
from nki_impl.lang import BACKEND, nl
from nki_impl.ordering import Orders, bounds_of, orders_of, sorted_call, taken
from nki_impl.sim.machine.launch import run_ranks
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, Refused, Result
from ringspec.conformance.target.results import due_of
from ringspec.formats import load, store

__all__ = ["NkiImpl", "nki_impl", "nki_impl_lnc2", "nki_impl_official"]

Array = NDArray[Any]
ROWS = 128
"""Rows of a tile."""
EXACT_SCALES = (1, 4, 16, 64)
"""Head dimensions D for which 1 / sqrt(D) is a power of two."""
RECIPES = {"bfloat16": "nki_impl_bf16", "float16": "nki_impl_fp16", "float32": "nki_impl_fp32"}
LSE_DTYPES = {"bfloat16": nl.bfloat16, "float16": nl.float16, "float32": nl.float32}
KERNEL_LAYOUTS = ("contiguous", "striped")
"""The layouts whose causal mask the kernels compute themselves."""
COMMON: dict[str, Any] = {
    "directions": (1,),
    "formats": tuple(RECIPES),
    "value_dim_equals_head_dim": True,
    "repeats_bitwise": True,
    "recipe": RECIPES,
}
EVERYTHING: dict[str, Any] = {
    "layouts": (*KERNEL_LAYOUTS, "zigzag", "zigzag_per_document", "table"),
    "masks": ("causal", "window", "documents", "segments", "bounds"),
    "features": ("scale", "unequal-lengths", "q-offset", "empty-rows", "padding-slots"),
    "head_dims": tuple(range(1, ROWS + 1)),
}
OFFICIAL: dict[str, Any] = {
    "layouts": KERNEL_LAYOUTS,
    "masks": ("causal",),
    "head_dims": EXACT_SCALES,
    "head_ratios": (1,),
}
NOTES = (
    "run on the bundled simulator, not on Trainium",
    "whatever the circulation, keys and values travel in the forward pass and queries in the backward pass",
    "the kernels return dq, dk, dv in float32; they are rounded once to the format of the call",
)
OWN_NOTE = "masks other than causal, and layouts other than contiguous and striped, become bounds of each query"
SCALED_NOTE = "under a causal mask q is multiplied by the scale, a power of two, before the call"


@dataclass(frozen=True)
class Plan:
    """How the kernels are called for one call.

    ``causal``, ``striped``: their arguments. ``bounds``: for each rank bound_min and bound_max, or None. ``prescale``:
    whether q is multiplied by the scale before the call, instead of the scores in the kernel.
    """

    causal: bool
    striped: bool
    bounds: list[tuple[Array, Array]] | None
    prescale: bool

    def common(self, rank: int, workers: int) -> dict[str, Any]:
        """Return the arguments that both kernels have."""
        given: dict[str, Any] = {"num_workers": workers, "use_causal_mask": self.causal}
        if self.bounds is not None:
            given["bound_min"], given["bound_max"] = self.bounds[rank]
        return given


class NkiImpl:
    """A target that runs the forward and the backward kernel on ranks of ``lnc`` cores.

    ``claims``, which say what the target supports, are added to the claims that all targets of this module share.
    ``name`` and ``notes`` are printed in the report. ``official``: pass no argument that AWS's kernels do not have.
    """

    def __init__(
        self,
        name: str,
        lnc: int = 1,
        notes: tuple[str, ...] = (),
        official: bool = False,
        **claims: Any,
    ) -> None:
        self.name = name
        self.lnc = lnc
        self.official = official
        self.capabilities = Capabilities(**COMMON | claims)
        self.notes = (*NOTES, *notes)

    def run(self, call: Call) -> Result:
        """Run one call; raise Refused if RINGSPEC_NKI is not the simulator."""
        if BACKEND != "simulator":
            raise Refused(f"RINGSPEC_NKI is {BACKEND}: the target runs only on the simulator")
        orders = orders_of(call)
        plan = plan_of(call, orders, self.official)
        call = sorted_call(call, orders)
        named: dict[str, list[Array]] = {}
        if "forward" in call.passes:
            named["o"], named["lse"] = forward(call, plan, self.lnc)
        else:
            named["o"], named["lse"] = list(call.tensors["o"]), list(call.tensors["lse"])
        if "backward" in call.passes:
            gradients = backward(call, plan, self.lnc, named["o"], named["lse"])
            named["dq"], named["dk"], named["dv"] = gradients
        due = due_of(call)
        results = {}
        for name in due:
            of = orders.k if name in ("dk", "dv") else orders.q
            pairs = zip(named[name], of, strict=True)
            values = [taken(x, np.argsort(order, axis=-1), 2) for x, order in pairs]
            results[name] = [store(load(x), due[name].format) for x in values]
        return Result(**results)


def plan_of(call: Call, orders: Orders, official: bool) -> Plan:
    """Choose the arguments of the kernels for a call whose slots will be sorted."""
    causal = bool(call.terms.get("causal", False))
    assert call.index_q is not None and call.index_k is not None
    plain = not (
        {"window", "cu_seqlens", "q_offset"} & set(call.terms)
        or {"segments_q", "bound_min"} & set(call.tensors)
        or call.index_q.min() < 0
        or call.index_k.min() < 0
        or call.index_q.shape != call.index_k.shape
    )
    if plain and (not causal or call.layout in KERNEL_LAYOUTS):
        return Plan(causal, causal and call.layout == "striped", None, official and causal)
    return Plan(
        False, False, [bounds_of(call, orders, rank) for rank in range(call.workers)], False
    )


def forward(call: Call, plan: Plan, lnc: int) -> tuple[list[Array], list[Array]]:
    """Compute o [B, H, n, D] in the input dtype and lse [B, H, n] of each rank."""
    own = {} if plan.prescale or not plan.causal else {"causal_scale": "apply"}
    given = [
        {
            "q": by_columns(query(call, plan, rank)),
            "k": by_columns(call.worker("k", rank)),
            "v": call.worker("v", rank),
            "softmax_scale": kernel_scale(call, plan),
            "striped_input": plan.striped,
            "training": True,
            "lse_dtype": LSE_DTYPES[call.formats["statistics"]],
            **plan.common(rank, call.workers),
            **own,
        }
        for rank in range(call.workers)
    ]
    results = run_ranks(ring_attention_spmd_fwd, given, lnc=lnc).results
    return [o for o, _ in results], [lse_by_rows(lse, o.shape[2]) for o, lse in results]


def backward(
    call: Call, plan: Plan, lnc: int, o: list[Array], lse: list[Array]
) -> tuple[list[Array], list[Array], list[Array]]:
    """Compute dq [B, H, n, D], dk, dv [B, Hkv, n, D] of each rank, from o and lse of the forward pass."""
    given = [
        {
            "q_ref": by_columns(query(call, plan, rank)),
            "k_ref": by_columns(call.worker("k", rank)),
            "v_ref": by_columns(call.worker("v", rank)),
            "o_ref": by_columns(o[rank]),
            "dy_ref": by_columns(call.worker("dy", rank)),
            "lse_ref": lse_by_tiles(lse[rank]),
            "softmax_scale": kernel_scale(call, plan),
            "lnc_size": lnc,
            "striped_attention": plan.striped,
            **plan.common(rank, call.workers),
        }
        for rank in range(call.workers)
    ]
    results = run_ranks(ring_attention_spmd_bwd, given, lnc=lnc).results
    dq, dk, dv = ([by_columns(x[i]) for x in results] for i in range(3))
    if kernel_scale(call, plan) != call.terms["scale"]:  # dq is the gradient of the scaled q
        dq = [x * np.float32(call.terms["scale"]) for x in dq]
    return dq, dk, dv


def kernel_scale(call: Call, plan: Plan) -> float:
    """Return the scale for the kernels; 1.0 if q is scaled, as for a scale of 0, which to them means the default."""
    scale = float(call.terms["scale"])
    return 1.0 if plan.prescale or scale == 0 else scale


def query(call: Call, plan: Plan, rank: int) -> Array:
    """Return q of one rank, multiplied by the scale if the kernels do not do it."""
    q = call.worker("q", rank)
    if kernel_scale(call, plan) == call.terms["scale"]:
        return q
    return store(load(q) * call.terms["scale"], call.formats["inputs"])


def by_columns(x: Array) -> Array:
    """Transpose [.., n, D] to [.., D, n], or back."""
    return np.ascontiguousarray(x.swapaxes(-1, -2))


def lse_by_tiles(lse: Array) -> Array:
    """Convert [B, H, n] to the kernels' [B, H, 128, tiles], with row t at [t % 128, t // 128] and 0 in the padding."""
    padded = np.pad(lse, [(0, 0)] * (lse.ndim - 1) + [(0, -lse.shape[-1] % ROWS)])
    return by_columns(padded.reshape(*lse.shape[:-1], -1, ROWS))


def lse_by_rows(tiles: Array, length: int) -> Array:
    """Undo :func:`lse_by_tiles` for ``length`` rows.

    >>> lse_by_rows(lse_by_tiles(np.arange(200.0)[None, None]), 200)[0, 0, [0, 1, 129]].tolist()
    [0.0, 1.0, 129.0]
    """
    return by_columns(tiles).reshape(*tiles.shape[:-2], -1)[..., :length]


nki_impl = NkiImpl("nki_impl", notes=(OWN_NOTE,), **EVERYTHING)
nki_impl_lnc2 = NkiImpl("nki_impl-lnc2", 2, (OWN_NOTE,), **EVERYTHING)
nki_impl_official = NkiImpl("nki_impl-official", notes=(SCALED_NOTE,), official=True, **OFFICIAL)
