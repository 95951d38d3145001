"""The NumPy ring as a target of ringspec, right or with one of the precision faults."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from independent.numpy_faults import FAULTS, RIGHT
from independent.numpy_ring import Problem, backward, forward
from numpy.typing import NDArray

from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, Result


class NumpyRing:
    """``fault`` names an entry of FAULTS or RIGHT; ``recipe``: what is declared, or None."""

    def __init__(self, fault: str = "right", recipe: str | None = "bf16") -> None:
        self.kernel = (FAULTS | RIGHT)[fault].kernel()
        self.name = f"NumPy ring, {fault}"
        self.capabilities = Capabilities(
            operations=("ring-forward", "ring-backward"),
            layouts=("contiguous", "striped", "zigzag"),
            masks=("causal", "window", "documents"),
            circulations=("kv",),
            formats=("bfloat16",),
            recipe=recipe,
        )

    def run(self, call: Call) -> Result:
        held = {name: [x.astype(np.float32) for x in call.tensors[name]] for name in "qkv"}
        problem = Problem(
            *held.values(), call.terms["scale"], call.direction, lambda a, b: visible(call, a, b)
        )
        if "forward" in call.passes:
            o, lse = forward(self.kernel, problem)
        else:
            o, lse = ([x.astype(np.float32) for x in call.tensors[name]] for name in ("o", "lse"))
        found: dict[str, Any] = {"o": o, "lse": lse} if "forward" in call.passes else {}
        if "backward" in call.passes:
            dy = [x.astype(np.float32) for x in call.tensors["dy"]]
            gradients = backward(self.kernel, problem, dy, o, lse)
            found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        for name in found.keys() - {"lse"}:
            found[name] = [x.astype(ml_dtypes.bfloat16) for x in found[name]]
        return Result(**found)


def visible(call: Call, a: int, b: int) -> NDArray[np.bool_]:
    """[n, n]: which keys of worker ``b`` the queries of worker ``a`` see."""
    assert call.position_q is not None and call.position_k is not None
    row, column = call.position_q[a][0][:, None], call.position_k[b][0][None]
    seen = np.ones((row.size, column.size), bool)
    if call.terms.get("causal"):
        seen &= column <= row
    if call.terms.get("window") is not None:
        left, right = call.terms["window"]
        seen &= True if left is None else row - column <= left
        seen &= True if right is None else column - row <= right
    if call.terms.get("cu_seqlens") is not None:
        assert call.index_q is not None and call.index_k is not None
        row, column = (
            np.searchsorted(call.terms["cu_seqlens"], index, side="right")
            for index in (call.index_q[a], call.index_k[b])
        )
        seen &= row[:, None] == column[None]
    return seen
