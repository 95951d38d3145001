"""TransformerEngine's context parallelism for PyTorch, unmodified, on a CPU.

Each target calls ``attn_forward_func_with_cp``, the function that TransformerEngine's FlashAttention backend calls, with
the arguments of this backend for FlashAttention 2 and tensors [B, S, H, D]. The kernels are replaced by
:mod:`ringspec.standins`, which computes in float64 and rounds once, so any larger error in a result is an error of
context parallelism. TransformerEngine returns no lse.

============================  ==============  ===========================================================
target                        cp_comm_type    what is sent
============================  ==============  ===========================================================
``transformer-engine-p2p``    ``p2p``         keys and values in a ring, gradients of keys and values after them
============================  ==============  ===========================================================

The layout is zigzag, which TransformerEngine calls DualChunkSwap.

Passed by, because they need a GPU: the checks and choices of ``DotProductAttention``, and ``torch.compile`` for small
functions. Claimed is what these checks accept for FlashAttention 2 (``get_attention_backend`` of 2.20.2): causal or no
mask, soft cap, grouped heads, head dimensions up to 256 with equal ones of v. Not claimed: dropout, and one worker, with
which TransformerEngine does not use context parallelism.

Source: https://github.com/NVIDIA/TransformerEngine, transformer_engine 2.20.2 (PyPI),
transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
"""

from __future__ import annotations

from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_keywords, require

PACKAGE, FLOOR, KNOWN = "transformer_engine", "2.20", "2.20.2"
COMMAND = f"pip install torch einops pydantic && pip install --no-deps '{PACKAGE}>={FLOOR}'"
MODES = ("p2p",)
STANDINS = ("flash_attn", "transformer_engine_torch")
KEYWORDS = (
    "cp_comm_type",
    "softmax_scale",
    "qkv_format",
    "attn_mask_type",
    "window_size",
    "softcap",
)

NOTES = (
    "context_parallel.py of TransformerEngine is unmodified; its checks in DotProductAttention are passed by",
    f"known to run with {PACKAGE} {KNOWN}",
    "not claimed: one worker (TransformerEngine then does not use context parallelism), dropout",
)


def recipe(base: str, narrow: str) -> dict[str, str | int]:
    """Return where context parallelism over the stand-in rounds for inputs in the format ``narrow``.

    o and the gradients have the input dtype in every block and after every step, and so has each product in the merge of
    o. P and dS, which flash-attn's kernel rounds to the input dtype, are exact in the stand-in.
    """
    exact = {"p": "float32", "ds": "float32"}
    return {"base": f"{base}_partials", "merge": narrow, **exact}


def claims(mode: str) -> Capabilities:
    """Return what a mode of communication supports."""
    return Capabilities(
        layouts=("zigzag",),
        circulations=("kv",),
        directions=(1,),
        workers=(2, 3, 4),
        masks=("causal",),
        features=("scale", "softcap"),
        formats=("bfloat16", "float16"),
        head_dims=tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        tokens_multiple=2,
        lse="hidden",
        axes="BSHD",
        recipe={"bfloat16": recipe("bf16", "bfloat16"), "float16": recipe("fp16", "float16")},
    )


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, mode: str) -> Any:
    """Compute o [B, n, H, D] of one worker."""
    import torch
    import torch.distributed as dist
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
        attn_forward_func_with_cp,
    )

    check_keywords(attn_forward_func_with_cp, KEYWORDS, PACKAGE, KNOWN)
    batch, tokens = q.shape[0], q.shape[1] * call.workers
    lengths = torch.arange(batch + 1, dtype=torch.int32) * tokens
    o = attn_forward_func_with_cp(
        True,  # is_training
        q,
        k,
        v,
        lengths,
        lengths,
        tokens,
        tokens,
        None,  # cu_seqlens_q_padded and cu_seqlens_kv_padded, of packed tensors only
        None,
        0.0,  # dropout_p
        group,
        dist.get_process_group_ranks(group),
        torch.cuda.Stream(),  # does nothing on a CPU
        mode,
        softmax_scale=call.scale,
        qkv_format="bshd",
        attn_mask_type="causal" if call.causal else "no_mask",
        window_size=(-1, 0) if call.causal else (-1, -1),
        softcap=float(call.terms.get("softcap", 0.0)),
    )
    return o.view(q.shape)


def target(mode: str, **settings: Any) -> TorchTarget:
    """Make the target of a mode of communication.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", "einops", "pydantic", PACKAGE), PACKAGE, FLOOR, COMMAND)
    # The first call imports TransformerEngine.
    chosen: dict[str, Any] = {"timeout": 180.0, "standins": STANDINS, **settings}
    return TorchTarget(
        f"{__name__}:attention",
        claims(mode),
        name=f"transformer-engine-{mode.replace('_', '-')}",
        options={"mode": mode},
        notes=NOTES,
        packages=("torch", PACKAGE),
        **chosen,
    )


def p2p(**settings: Any) -> TorchTarget:
    return target("p2p", **settings)
