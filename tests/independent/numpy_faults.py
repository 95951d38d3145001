"""Precision faults of the NumPy ring: what each switch changes, and what a judge may rightly say of it.

A fault is wrong by construction: exactly the points in ``points`` (or the matrix product) differ from the right
kernel. ``ids`` are the known bugs that describe this change, ``words`` what an inference may say (parts of its
sentence). Both are empty where neither the catalogue nor inference has words for it; every name is then wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from independent.numpy_ring import BF16, Array, Kernel, Rounding, bfloat16, keep, product, to

float16 = to(np.float16)
e4m3, e5m2 = to(ml_dtypes.float8_e4m3fn), to(ml_dtypes.float8_e5m2)


def cut(x: Array) -> Array:
    """Towards zero to bfloat16: the lower half of the word is dropped."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def odd(x: Array) -> Array:
    """To odd in bfloat16: cut, and the last bit set where something was cut off."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    lost = (bits & np.uint32(0xFFFF)) != 0
    return ((bits & np.uint32(0xFFFF0000)) | (lost.astype(np.uint32) << 16)).view(np.float32)


def stochastic(x: Array) -> Array:
    """Up with the probability of what is cut off. The same input gives the same bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    noise = np.random.default_rng(11).integers(0, 1 << 16, bits.shape, dtype=np.uint32)
    return ((bits + noise) & np.uint32(0xFFFF0000)).view(np.float32)


def half_product(a: Array, b: Array) -> Array:
    """Accumulated in float16, 16 terms at a time."""
    total = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for start in range(0, a.shape[-1], 16):
        part = np.s_[start : start + 16]
        total = float16(total + np.matmul(a[..., part], b[..., part, :]))
    return total


@dataclass(frozen=True)
class Fault:
    """One switch: ``what`` in words, the ``points`` or the ``matmul`` that it changes."""

    what: str
    points: Mapping[str, Rounding] = field(default_factory=dict)
    ids: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    matmul: Callable[[Array, Array], Array] = product
    carried: bool = False

    def kernel(self) -> Kernel:
        return Kernel({**BF16, **self.points}, self.matmul, self.carried)


def after(first: Rounding, then: Rounding = bfloat16) -> Rounding:
    return lambda x: then(first(x))


OUTPUTS_ONLY = "only the outputs were rounded"
PARTIALS = "partials were rounded to bfloat16 between steps"
FAULTS: dict[str, Fault] = {
    "p-cut": Fault(
        "P is cut to bfloat16 and not rounded",
        {"p_forward": cut, "p_backward": cut},
        ("truncated-p",), ("P was truncated",),
    ),
    "p-cut-in-backward": Fault(
        "P of the backward is cut to bfloat16", {"p_backward": cut},
        ("truncated-p",), ("P was truncated",),
    ),
    "p-odd": Fault(
        "P is rounded to odd", {"p_forward": odd, "p_backward": odd},
        (), ("P was rounded to odd",),
    ),
    "p-stochastic": Fault(
        "P is rounded stochastically: twice the variance of one rounding to nearest",
        {"p_forward": stochastic, "p_backward": stochastic},
        (), ("P was rounded stochastically", "P was rounded twice"),
    ),
    "p-e4m3": Fault(
        "P is rounded to float8 e4m3",
        {"p_forward": e4m3, "p_backward": e4m3},
        (), ("P was rounded to float8_e4m3",),
    ),
    "p-e5m2": Fault(
        "P is rounded to float8 e5m2",
        {"p_forward": e5m2, "p_backward": e5m2},
        (), ("P was rounded to float8_e5m2",),
    ),
    "ds-cut": Fault(
        "dS is cut to bfloat16 and not rounded", {"ds": cut},
        ("truncated-ds",), ("dS was truncated",),
    ),
    "ds-twice": Fault(
        "dP - delta is rounded to bfloat16, and dS once more", {"dp": bfloat16},
        (), ("dS was rounded twice",),
    ),
    "ds-e5m2": Fault("dS is rounded to float8 e5m2", {"ds": e5m2}, (), ("dS was rounded to float8_e5m2",)),
    "results-cut": Fault(
        "o and the gradients are cut to bfloat16",
        {"o": cut, "gradients": cut},
        ("truncated-results",), ("the results were truncated",),
    ),
    "gradients-cut": Fault(
        "the gradients are cut to bfloat16", {"gradients": cut},
        ("truncated-results",), ("the results were truncated", "gradients were truncated"),
    ),
    "delta-16": Fault(
        "dy_o_sum is rounded to bfloat16", {"delta": bfloat16},
        ("delta-in-16-bit",), ("dy_o_sum was rounded to bfloat16",),
    ),
    "dy-o-16": Fault(
        "each product of dy_o_sum is rounded to bfloat16", {"dy_o": bfloat16},
        ("delta-in-16-bit",), ("the products of dy_o_sum were rounded to bfloat16",),
    ),
    "delta-and-dy-o-16": Fault(
        "dy_o_sum and its products are rounded to bfloat16", {"dy_o": bfloat16, "delta": bfloat16},
        ("delta-in-16-bit",), ("dy_o_sum was rounded to bfloat16",),
    ),
    "lse-16": Fault(
        "lse is bfloat16, in the result and in the backward", {"lse": bfloat16},
        ("lse-in-16-bit",), ("lse was rounded to bfloat16",),
    ),
    "backward-lse-16": Fault(
        "the backward reads lse in bfloat16", {"backward_lse": bfloat16},
        ("lse-in-16-bit",), ("the lse that the backward pass reads was rounded to bfloat16",),
    ),
    "carried-o-16": Fault(
        "o is bfloat16 between steps", {"carried_o": bfloat16},
        ("merge-in-16-bit",), ("o between steps was rounded to bfloat16", PARTIALS),
    ),
    "block-o-16": Fault(
        "o of each block is bfloat16", {"block_o": bfloat16},
        ("partials-rounded-to-16-bit",), ("partial o was rounded to bfloat16", PARTIALS),
    ),
    "carried-dq-16": Fault(
        "dq is accumulated in bfloat16", {"carried_dq": bfloat16},
        ("dq-accumulated-in-16-bit",), ("dq between steps was rounded to bfloat16",),
    ),
    "carried-dkv-16": Fault(
        "dk and dv are accumulated in bfloat16", {"carried_dkv": bfloat16},
        ("dkv-accumulated-in-16-bit",), ("dk and dv between steps were rounded to bfloat16",),
    ),
    "partials-16": Fault(
        "every partial result is bfloat16 when it leaves its block and between steps",
        dict.fromkeys(("block_o", "carried_o", "block_dq", "carried_dq", "block_dkv", "carried_dkv"), bfloat16),
        ("partials-rounded-to-16-bit",), (PARTIALS, "bf16_partials"),
    ),
    "block-gradients-16": Fault(
        "dq, dk and dv of each block are bfloat16", {"block_dq": bfloat16, "block_dkv": bfloat16},
        ("partials-rounded-to-16-bit",), ("partial gradients were rounded to bfloat16", PARTIALS),
    ),
    "l-16": Fault(
        "the running sum l is bfloat16", {"l": bfloat16},
        ("statistics-in-16-bit",), ("softmax statistics were rounded to bfloat16",),
    ),
    "exp-16": Fault(
        "exp(s - m) is bfloat16 before it is summed and used", {"exp": bfloat16, "p_wide": bfloat16},
        ("statistics-in-16-bit",), ("softmax statistics were rounded to bfloat16",),
    ),
    "statistics-16": Fault(
        "exp(s - m), l and p are bfloat16", {"exp": bfloat16, "l": bfloat16, "p_wide": bfloat16},
        ("statistics-in-16-bit",), ("softmax statistics were rounded to bfloat16",),
    ),
    "scores-16": Fault(
        "the scores are rounded to bfloat16", {"scores": bfloat16},
        ("scores-in-16-bit",), ("scores were rounded to bfloat16",),
    ),
    "scores-fp16": Fault(
        "the scores are rounded to float16", {"scores": float16},
        (), ("scores were rounded to float16",),
    ),
    "q-scaled-16": Fault(
        "q times log2(e) is rounded to bfloat16 before the scores",
        {"q": lambda x: bfloat16(x * np.float32(np.log2(np.e))) / np.float32(np.log2(np.e))},
        (), ("q was rounded",),
    ),
    "k-e5m2": Fault("keys are rounded to float8 e5m2", {"k": e5m2}),
    "v-e4m3": Fault("values are rounded to float8 e4m3", {"v": e4m3}),
    "sums-fp16": Fault(
        "matrix products accumulate in float16", matmul=half_product,
        words=("products were rounded to float16",),
    ),
    "results-through-e5m2": Fault(
        "o and the gradients are rounded to float8 e5m2 and stored as bfloat16",
        {"o": after(e5m2), "gradients": after(e5m2)},
    ),
}  # fmt: skip
# Changes that leave a kernel right: no name. (An alarm would be a matter of the recipe.)
RIGHT: dict[str, Fault] = {
    "right": Fault("the right kernel"),
    "one-state": Fault("one state goes through all blocks", carried=True),
    "m-16": Fault("the maximum is bfloat16, the same in every use", {"m": bfloat16}),
    "p-wide": Fault("P stays in float32", {"p_forward": keep, "p_backward": keep}),
    "ds-wide": Fault("dS stays in float32", {"ds": keep}),
    "results-through-fp16": Fault(
        "results are rounded to float16 on the way to bfloat16",
        {"o": after(float16), "gradients": after(float16)},
    ),
}
