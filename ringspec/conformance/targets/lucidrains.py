"""The ring in plain PyTorch of lucidrains' ring-attention-pytorch 0.5.20 or later, unmodified.

``ring_flash_attn`` of ``ring_attention_pytorch.ring_flash_attention`` is called as its ``RingAttention`` module
calls it on a CPU, with one bucket per worker. The layouts are contiguous and striped, in which slot t of worker r holds
token t * W + r. Query head h of this ring uses key head h mod Hkv instead of h // (H / Hkv), so heads are permuted
before and after the call, which changes no number.

Source: https://github.com/lucidrains/ring-attention-pytorch.
"""

from __future__ import annotations

from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_keywords, check_names, require

PACKAGE, FLOOR, KNOWN = "ring-attention-pytorch", "0.5.20", "0.5.20"
COMMAND = f"pip install torch '{PACKAGE}>={FLOOR}'"
KEYWORDS = (
    "bucket_size",
    "causal",
    "ring_reduce_col",
    "ring_size",
    "softclamp_qk_sim",
    "softclamp_value",
    "striped_ring_attn",
)

CLAIMS = Capabilities(
    layouts=("contiguous", "striped"),
    circulations=("kv",),
    directions=(1,),
    workers=(2, 3, 4),
    masks=("causal",),
    features=("softcap",),
    # For float64 inputs it raises: the initial row maximum does not fit into float32.
    formats=("float32",),
    head_ratios=(1, 2, 4),
    value_dim_equals_head_dim=True,
    lse="hidden",
    axes="BSHD",
)
NOTES = (
    "ring-attention-pytorch is unmodified; its CPU path runs with one bucket per worker",
    f"known to run with {PACKAGE} {KNOWN}",
)


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall) -> Any:
    """Compute o [B, n, H, D] of one worker."""
    from ring_attention_pytorch import ring_flash_attention

    check_names(ring_flash_attention, ("ring_flash_attn",), PACKAGE, KNOWN)
    check_keywords(ring_flash_attention.ring_flash_attn, KEYWORDS, PACKAGE, KNOWN)
    batch, n, heads, width = q.shape
    kv_heads = k.shape[2]
    shared = (batch, n, kv_heads, heads // kv_heads, width)
    theirs = q.reshape(shared).transpose(2, 3).reshape(q.shape)
    softcap = call.terms.get("softcap")
    o = ring_flash_attention.ring_flash_attn(
        theirs,
        k,
        v,
        causal=call.causal,
        bucket_size=n,
        ring_reduce_col=True,
        striped_ring_attn=call.layout == "striped" and call.causal,
        ring_size=call.workers,
        softclamp_qk_sim=softcap is not None,
        softclamp_value=50.0 if softcap is None else float(softcap),
    )
    back = (batch, n, heads // kv_heads, kv_heads, width)
    return o.reshape(back).transpose(2, 3).reshape(q.shape)


def lucidrains(**settings: Any) -> TorchTarget:
    """Make the target.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", "ring_attention_pytorch"), PACKAGE, FLOOR, COMMAND)
    return TorchTarget(
        f"{__name__}:attention",
        CLAIMS,
        name="lucidrains",
        **{"packages": ("torch", PACKAGE), "notes": NOTES, **settings},
    )
