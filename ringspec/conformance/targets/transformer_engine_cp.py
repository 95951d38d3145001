"""TransformerEngine's context parallelism for PyTorch, unmodified, on a CPU.

Each target calls ``attn_forward_func_with_cp``, the function that TransformerEngine's FlashAttention backend calls, with
the arguments of this backend for FlashAttention 2 and tensors [B, S, H, D]. The kernels are replaced by
:mod:`ringspec.standins`, which computes in float64 and rounds once, so any larger error in a result is an error of
context parallelism. TransformerEngine returns no lse.

=================================  ==============  =========================================================
target                             cp_comm_type    what is sent
=================================  ==============  =========================================================
``transformer-engine-p2p``         ``p2p``         keys and values in a ring, then their gradients
``transformer-engine-all-gather``  ``all_gather``  keys and values to all workers, their gradients by reduction
``transformer-engine-a2a``         ``a2a``         heads for tokens, so that a worker has all tokens of its heads
``transformer-engine-a2a-p2p``     ``a2a+p2p``     both: ``a2a`` in pairs of workers, ``p2p`` between the pairs
=================================  ==============  =========================================================

The layout is zigzag, which TransformerEngine calls DualChunkSwap.

Passed by, because they need a GPU: the checks and choices of ``DotProductAttention``, and ``torch.compile`` for small
functions. Claimed is what these checks accept for FlashAttention 2 (``get_attention_backend`` of 2.20.2): causal or no
mask, soft cap, grouped heads, head dimensions up to 256 with equal ones of v. Not claimed: dropout, and one worker, with
which TransformerEngine does not use context parallelism.

Source: https://github.com/NVIDIA/TransformerEngine, transformer_engine 2.20.2 (PyPI),
transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
"""

from __future__ import annotations

import functools
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_keywords, require

PACKAGE, FLOOR, KNOWN = "transformer_engine", "2.20", "2.20.2"
COMMAND = f"pip install torch einops pydantic && pip install --no-deps '{PACKAGE}>={FLOOR}'"
MODES = ("p2p", "all_gather", "a2a", "a2a+p2p")
PAIR = 2  # workers that exchange heads, with a2a+p2p
KV_HEADS_MULTIPLE: dict[str, int | str] = {
    "p2p": 1,
    "all_gather": 1,
    "a2a": "workers",
    "a2a+p2p": PAIR,
}
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
    o. Modes other than ``p2p`` merge nothing or only gradients, and are within the same bounds. P and dS, which flash-attn's kernel rounds to the input dtype, are exact in the stand-in.
    """
    exact = {"p": "float32", "ds": "float32"}
    return {"base": f"{base}_partials", "merge": narrow, **exact}


def claims(mode: str) -> Capabilities:
    """Return what a mode of communication supports."""
    return Capabilities(
        layouts=("zigzag",),
        # Whatever is sent, a worker's results are those of a ring.
        circulations=("kv",) if mode == "p2p" else ("kv", "gather"),
        directions=(1,),
        workers=(4,) if mode == "a2a+p2p" else (2, 3, 4),
        masks=("causal", "window") if mode in ("all_gather", "a2a") else ("causal",),
        features=("scale", "softcap"),
        formats=("bfloat16", "float16"),
        head_dims=tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        tokens_multiple=2,
        kv_heads_multiple=KV_HEADS_MULTIPLE[mode],
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
    groups = halves_of(group) if mode == "a2a+p2p" else group
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
        groups,
        dist.get_process_group_ranks(group),
        torch.cuda.Stream(),  # does nothing on a CPU
        mode,
        softmax_scale=call.scale,
        qkv_format="bshd",
        attn_mask_type="causal" if call.causal else "no_mask",
        window_size=window_size(call, tokens),
        softcap=float(call.terms.get("softcap", 0.0)),
    )
    return o.view(q.shape)


def window_size(call: LocalCall, tokens: int) -> tuple[int, int]:
    """Return the window as TransformerEngine writes it: (-1, 0) for causal, (-1, -1) for no window.

    TransformerEngine has no windows with one open side except causal ones, so all tokens stand for an open side.
    """
    left, right = call.terms.get("window") or (None, None)
    if call.causal:
        return (-1 if left is None else left, 0)
    if left is None and right is None:
        return (-1, -1)
    return (tokens if left is None else left, tokens if right is None else right)


@functools.cache
def halves_of(group: Any) -> list[Any]:
    """Return two groups of this rank: its pair, which exchanges heads, and the ranks at its place in the pairs."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    pairs = [ranks[first : first + PAIR] for first in range(0, len(ranks), PAIR)]
    rows = [ranks[place::PAIR] for place in range(PAIR)]
    made = [[(one, dist.new_group(one)) for one in several] for several in (pairs, rows)]
    own = dist.get_rank()
    return [next(made for ranks, made in several if own in ranks) for several in made]


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
        name=f"transformer-engine-{mode.replace('_', '-').replace('+', '-')}",
        options={"mode": mode},
        notes=NOTES,
        packages=("torch", PACKAGE),
        **chosen,
    )


def p2p(**settings: Any) -> TorchTarget:
    return target("p2p", **settings)


def all_gather(**settings: Any) -> TorchTarget:
    return target("all_gather", **settings)


def a2a(**settings: Any) -> TorchTarget:
    return target("a2a", **settings)


def a2a_p2p(**settings: Any) -> TorchTarget:
    return target("a2a+p2p", **settings)
