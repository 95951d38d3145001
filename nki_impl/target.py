"""The ring kernels as targets of the conformance suite, which ``ringspec check nki_impl`` runs.

This is the only module of the package that imports ringspec. It converts the arrays of a call to the layout that the
kernels require, and converts the results back. The conversion changes values in two cases only:

- With a causal mask, the kernels leave it to the caller to multiply q and dq by the scale. This is exact if the scale
  is a power of two.
- The kernels return gradients in float32. They are rounded once if the call requests a narrower format.

The targets:

``nki_impl``       head dimensions whose default scale is a power of two, with or without a causal mask
``nki_impl_lnc2``  the same, on ranks of two cores
``nki_impl_full``  any head dimension up to 128, without a causal mask
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.kernels import ring_attention_spmd_bwd, ring_attention_spmd_fwd
from nki_impl.lang import BACKEND, nl
from nki_impl.sim.machine.launch import run_ranks
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, Refused, Result
from ringspec.conformance.target.results import due_of
from ringspec.formats import load, store

__all__ = ["NkiImpl", "nki_impl", "nki_impl_full", "nki_impl_lnc2"]

Array = NDArray[Any]
ROWS = 128
"""Rows of a tile; the length on a rank must be a multiple of it."""
EXACT_SCALES = (1, 4, 16, 64)
"""Head dimensions D for which 1 / sqrt(D) is a power of two."""
RECIPES = {"bfloat16": "nki_impl_bf16", "float16": "nki_impl_fp16", "float32": "nki_impl_fp32"}
LSE_DTYPES = {"bfloat16": nl.bfloat16, "float16": nl.float16, "float32": nl.float32}
COMMON: dict[str, Any] = {
    "layouts": ("contiguous", "striped"),
    "directions": (1,),
    "formats": tuple(RECIPES),
    "value_dim_equals_head_dim": True,
    "tokens_multiple": ROWS,
    "repeats_bitwise": True,
    "recipe": RECIPES,
}
NOTES = (
    "run on the bundled simulator, not on Trainium",
    "whatever the circulation, keys and values travel in the forward pass and queries in the backward pass",
    "the kernels return dq, dk, dv in float32; they are rounded once to the format of the call",
)
SCALED = "under a causal mask q is multiplied by the scale, a power of two, before the call"


class NkiImpl:
    """A target that runs the forward and the backward kernel on ranks of ``lnc`` cores.

    ``claims``, which say what the target supports, are added to the claims that all targets of this module share.
    ``name`` and ``notes`` are printed in the report.
    """

    def __init__(self, name: str, lnc: int = 1, notes: tuple[str, ...] = (), **claims: Any) -> None:
        self.name = name
        self.lnc = lnc
        self.capabilities = Capabilities(**COMMON | claims)
        self.notes = (*NOTES, *notes)

    def run(self, call: Call) -> Result:
        """Run one call; raise Refused if RINGSPEC_NKI is not the simulator."""
        if BACKEND != "simulator":
            raise Refused(f"RINGSPEC_NKI is {BACKEND}: the target runs only on the simulator")
        named: dict[str, list[Array]] = {}
        if "forward" in call.passes:
            named["o"], named["lse"] = forward(call, self.lnc)
        else:
            named["o"], named["lse"] = list(call.tensors["o"]), list(call.tensors["lse"])
        if "backward" in call.passes:
            named["dq"], named["dk"], named["dv"] = backward(
                call, self.lnc, named["o"], named["lse"]
            )
        due = due_of(call)
        results = {name: [store(load(x), due[name].format) for x in named[name]] for name in due}
        return Result(**results)


def forward(call: Call, lnc: int) -> tuple[list[Array], list[Array]]:
    """Compute o [B, H, n, D] in the input dtype and lse [B, H, n] of each rank."""
    causal = bool(call.terms.get("causal", False))
    given = [
        {
            "q": by_columns(scaled(call, rank)),
            "k": by_columns(call.worker("k", rank)),
            "v": call.worker("v", rank),
            "num_workers": call.workers,
            "softmax_scale": 1.0 if causal else call.terms["scale"],
            "use_causal_mask": causal,
            "striped_input": causal and call.layout == "striped",
            "training": True,
            "lse_dtype": LSE_DTYPES[call.formats["statistics"]],
        }
        for rank in range(call.workers)
    ]
    results = run_ranks(ring_attention_spmd_fwd, given, lnc=lnc).results
    return [o for o, _ in results], [lse_by_rows(lse) for _, lse in results]


def backward(
    call: Call, lnc: int, o: list[Array], lse: list[Array]
) -> tuple[list[Array], list[Array], list[Array]]:
    """Compute dq [B, H, n, D], dk, dv [B, Hkv, n, D] of each rank, from o and lse of the forward pass."""
    causal = bool(call.terms.get("causal", False))
    given = [
        {
            "q_ref": by_columns(scaled(call, rank)),
            "k_ref": by_columns(call.worker("k", rank)),
            "v_ref": by_columns(call.worker("v", rank)),
            "o_ref": by_columns(o[rank]),
            "dy_ref": by_columns(call.worker("dy", rank)),
            "lse_ref": lse_by_tiles(lse[rank]),
            "use_causal_mask": causal,
            "softmax_scale": 1.0 if causal else call.terms["scale"],
            "num_workers": call.workers,
            "lnc_size": lnc,
            "striped_attention": causal and call.layout == "striped",
        }
        for rank in range(call.workers)
    ]
    results = run_ranks(ring_attention_spmd_bwd, given, lnc=lnc).results
    dq, dk, dv = ([by_columns(x[i]) for x in results] for i in range(3))
    if causal:  # the kernel's dq is the gradient of the scaled q
        dq = [x * np.float32(call.terms["scale"]) for x in dq]
    return dq, dk, dv


def scaled(call: Call, rank: int) -> Array:
    """Return q of one rank, multiplied by the scale if the mask is causal."""
    q = call.worker("q", rank)
    if not call.terms.get("causal", False):
        return q
    return store(load(q) * call.terms["scale"], call.formats["inputs"])


def by_columns(x: Array) -> Array:
    """Transpose [.., n, D] to [.., D, n], or back."""
    return np.ascontiguousarray(x.swapaxes(-1, -2))


def lse_by_tiles(lse: Array) -> Array:
    """Convert [B, H, n] to the kernels' [B, H, 128, n / 128], with row t at [t % 128, t // 128]."""
    return by_columns(lse.reshape(*lse.shape[:-1], -1, ROWS))


def lse_by_rows(tiles: Array) -> Array:
    """Undo :func:`lse_by_tiles`.

    >>> lse_by_rows(lse_by_tiles(np.arange(256.0)[None, None]))[0, 0, [0, 1, 129]].tolist()
    [0.0, 1.0, 129.0]
    """
    return by_columns(tiles).reshape(*tiles.shape[:-2], -1)


nki_impl = NkiImpl("nki_impl", notes=(SCALED,), head_dims=EXACT_SCALES)
nki_impl_lnc2 = NkiImpl("nki_impl-lnc2", 2, (SCALED,), head_dims=EXACT_SCALES)
nki_impl_full = NkiImpl(
    "nki_impl-full", masks=(), features=("scale",), head_dims=tuple(range(1, ROWS + 1))
)
