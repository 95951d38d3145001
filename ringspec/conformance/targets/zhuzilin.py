"""The rings of zhuzilin's ring-flash-attention 0.1.7 or later, unmodified, on a CPU.

The kernels of flash-attn that they call are replaced by :mod:`ringspec.standins`, which computes in float64 and rounds
once, so an error that is larger than roundings explain comes from the ring. Each target calls a public function:

===================  =========================================  ===================================
target               function                                   layout
===================  =========================================  ===================================
``zhuzilin-ring``    ``ring_flash_attn_func``                   contiguous
``zhuzilin-zigzag``  ``zigzag_ring_flash_attn_func``            zigzag, causal only
``zhuzilin-stripe``  ``stripe_flash_attn_func``                 striped, causal only
``zhuzilin-zigzag-varlen``  ``zigzag_ring_flash_attn_varlen_func``  zigzag per document, causal only
``zhuzilin-llama3``  ``llama3_flash_attn_varlen_func``          contiguous, with packed documents
===================  =========================================  ===================================

Results of 0.1.8, which the program tests/conformance/targets/by_hand_zhuzilin.py confirms without ringspec: for float16 inputs, dq of the variant ring has the precision of bfloat16, because
``ring_flash_attn_backward`` returns ``dq.to(torch.bfloat16)`` for every dtype. The variants zigzag and stripe return
``dq.to(q.dtype)``.

Not claimed: windows, dropout and ALiBi, which the project's README excludes or its code refuses; one worker, because
these rings send their gradients to themselves, which gloo refuses; for the variant stripe one token per worker, because
it then calls the kernel without queries.

Source: https://github.com/zhuzilin/ring-flash-attention, functions in ring_flash_attn 0.1.8 (PyPI).
"""

from __future__ import annotations

from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Refused
from ringspec.conformance.target.versions import check_names, require

PACKAGE, FLOOR, KNOWN = "ring-flash-attn", "0.1.7", "0.1.8"
# The package imports transformers, with names that transformers 5 no longer has.
COMMAND = f"pip install torch '{PACKAGE}>={FLOOR}' 'transformers<5'"
FUNCTIONS = {
    "ring": "ring_flash_attn_func",
    "zigzag": "zigzag_ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
    "zigzag-varlen": "zigzag_ring_flash_attn_varlen_func",
    "llama3": "llama3_flash_attn_varlen_func",
}
LAYOUTS = {
    "ring": "contiguous",
    "zigzag": "zigzag",
    "stripe": "striped",
    "zigzag-varlen": "zigzag_per_document",
    "llama3": "contiguous",
}
PACKED = ("zigzag-varlen", "llama3")
ONLY_CAUSAL = ("zigzag", "stripe", "zigzag-varlen")

NOTES = (
    "ring-flash-attn is unmodified",
    f"known to run with {PACKAGE} {KNOWN}",
    "not claimed: windows (the README excludes them), one worker (gloo does not send to itself)",
)


def recipe(base: str, narrow: str) -> dict[str, str | int]:
    """Return where a ring over the stand-in rounds for inputs in the format ``narrow``.

    A block's o, dq, dk and dv have the input dtype, and the ring adds them in float32. P and dS, which flash-attn's
    kernel rounds to the input dtype, are exact in the stand-in.
    """
    points = {"block_o": narrow, "block_gradients": narrow, "p": "float32", "ds": "float32"}
    return {"base": base, "merge_order": "normalised", **points}


def claims(variant: str) -> Capabilities:
    """Return what a variant supports."""
    packed = variant in PACKED
    recipes = {"bfloat16": recipe("bf16", "bfloat16"), "float16": recipe("fp16", "float16")}
    return Capabilities(
        layouts=(LAYOUTS[variant],),
        circulations=("gather",) if variant == "llama3" else ("kv",),
        directions=(1,),
        workers=(2, 3, 4),
        masks=("causal", "documents") if packed else ("causal",),
        only_causal=variant in ONLY_CAUSAL,
        features=("scale",),
        formats=("bfloat16", "float16"),
        head_dims=tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        tokens_multiple=2 if variant in ONLY_CAUSAL else 1,
        batch=(1,) if packed else None,
        axes="BSHD",
        # llama3 has one block for all keys, and its gradients are summed by a reduction whose rounding gloo decides.
        recipe=None if variant == "llama3" else recipes,
    )


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, variant: str) -> Any:
    """Compute o [B, n, H, D] and lse [B, H, n] of one worker."""
    import ring_flash_attn

    check_names(ring_flash_attn, (FUNCTIONS[variant],), PACKAGE, KNOWN)
    function = getattr(ring_flash_attn, FUNCTIONS[variant])
    shared = {"softmax_scale": call.scale, "causal": call.causal, "group": group}
    if variant not in PACKED:
        o, lse, _ = function(q, k, v, return_attn_probs=True, **shared)
        return o, lse
    lengths = packed_lengths(variant, call, q)
    o, lse, _ = function(q[0], k[0], v[0], *lengths, return_attn_probs=True, **shared)
    return o[None], lse[None]


def packed_lengths(variant: str, call: LocalCall, q: Any) -> tuple[Any, ...]:
    """Return the lengths that a packed function takes, on the device of q; without documents there is one."""
    import ring_flash_attn
    import torch

    n = q.shape[1]
    bounds = call.terms.get("cu_seqlens", (0, n * call.workers))
    starts = torch.tensor(bounds, dtype=torch.int32, device=q.device)
    if int(starts[0]) != 0 or int(starts[-1]) != n * call.workers:
        raise Refused(f"documents that do not cover all tokens: {starts.tolist()}")
    if variant == "zigzag-varlen":
        local = starts // call.workers
        return local, int((local[1:] - local[:-1]).max())
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    *four, local_k_slice = prepare(starts, call.causal, call.rank, call.workers)
    return *four, 1, local_k_slice  # 1: heads of k in each all-gather


def target(variant: str, **settings: Any) -> TorchTarget:
    """Make the target of a variant.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", "ring_flash_attn"), PACKAGE, FLOOR, COMMAND)
    # The first call imports transformers.
    chosen: dict[str, Any] = {"timeout": 180.0, "standins": ("flash_attn",), **settings}
    return TorchTarget(
        f"{__name__}:attention",
        claims(variant),
        name=f"zhuzilin-{variant}",
        options={"variant": variant},
        notes=NOTES,
        packages=("torch", PACKAGE),
        **chosen,
    )


def ring(**settings: Any) -> TorchTarget:
    return target("ring", **settings)


def zigzag(**settings: Any) -> TorchTarget:
    return target("zigzag", **settings)


def stripe(**settings: Any) -> TorchTarget:
    return target("stripe", **settings)


def zigzag_varlen(**settings: Any) -> TorchTarget:
    return target("zigzag-varlen", **settings)


def llama3(**settings: Any) -> TorchTarget:
    return target("llama3", **settings)
