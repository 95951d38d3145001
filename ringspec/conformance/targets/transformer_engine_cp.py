"""TransformerEngine's context parallelism for PyTorch, unmodified, on a CPU.

Each target calls ``attn_forward_func_with_cp``, the function that TransformerEngine's FlashAttention backend calls, with
the arguments of this backend for FlashAttention 2. The kernels are replaced by :mod:`ringspec.standins`, which computes
in float64 and rounds once, so an error that is larger than roundings explain comes from context parallelism.
TransformerEngine returns no lse.

=================================  ==============  =========================================================
target                             cp_comm_type    what is sent
=================================  ==============  =========================================================
``transformer-engine-p2p``         ``p2p``         keys and values in a ring, then their gradients
``transformer-engine-all-gather``  ``all_gather``  keys and values to all workers, their gradients by reduction
``transformer-engine-a2a``         ``a2a``         heads for tokens, so that a worker has all tokens of its heads
``transformer-engine-a2a-p2p``     ``a2a+p2p``     both: ``a2a`` in pairs of workers, ``p2p`` between the pairs
=================================  ==============  =========================================================

Their tensors are [B, S, H, D] in the layout zigzag, which TransformerEngine calls DualChunkSwap. Each has a target with
``-thd`` for packed documents [T, H, D]: zigzag in each document, and with ``all_gather`` contiguous and causal, which
TransformerEngine calls NO_LOAD_BALANCE.

Bypassed, because they need a GPU: the checks and choices of ``DotProductAttention``, and ``torch.compile`` for small
functions. The targets claim what these checks accept for FlashAttention 2 (``get_attention_backend`` of 2.20.2): causal or no
mask, windows with ``all_gather`` and ``a2a``, soft cap, grouped heads, head dimensions up to 256 with the same head dimension for v.
With ``a2a``, the number of workers must divide that of key heads. Not claimed: dropout; padding between documents, which
is refused for FlashAttention 2; ``all_gather`` with zigzag documents, for which TransformerEngine's own tests need
FlashAttention 3; one worker, with which TransformerEngine does not use context parallelism.

Source: https://github.com/NVIDIA/TransformerEngine, transformer_engine 2.20.2 (PyPI),
transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Refused
from ringspec.conformance.target.versions import check_keywords, require

PACKAGE, FLOOR, KNOWN = "transformer_engine", "2.20", "2.20.2"
COMMAND = f"pip install torch einops onnxscript packaging pydantic && pip install --no-deps '{PACKAGE}>={FLOOR}'"
STANDINS = ("flash_attn", "transformer_engine_torch")
PAIR = 2  # workers that exchange heads, with a2a+p2p


@dataclass(frozen=True)
class Variant:
    """A target: TransformerEngine's ``cp_comm_type``, and the layout of the tokens."""

    mode: str
    layout: str = "zigzag"

    @property
    def packed(self) -> bool:
        """Tell whether its tensors are packed documents."""
        return self.layout != "zigzag"

    @property
    def kv_heads_multiple(self) -> int | str:
        """Return the claim of this name."""
        multiples: dict[str, int | str] = {"a2a": "workers", "a2a+p2p": PAIR}
        return multiples.get(self.mode, 1)


VARIANTS = {
    "p2p": Variant("p2p"),
    "all-gather": Variant("all_gather"),
    "a2a": Variant("a2a"),
    "a2a-p2p": Variant("a2a+p2p"),
    "p2p-thd": Variant("p2p", "zigzag_per_document"),
    "all-gather-thd": Variant("all_gather", "contiguous"),
    "a2a-thd": Variant("a2a", "zigzag_per_document"),
    "a2a-p2p-thd": Variant("a2a+p2p", "zigzag_per_document"),
}

KEYWORDS = tuple(
    "cp_comm_type softmax_scale qkv_format attn_mask_type window_size softcap load_balancing_strategy".split()
)
NOTES = (
    "context_parallel.py of TransformerEngine is unmodified; its checks in DotProductAttention are passed by",
    f"known to run with {PACKAGE} {KNOWN}",
    "not claimed: one worker (TransformerEngine then does not use context parallelism), dropout",
)


def claims(name: str) -> Capabilities:
    """Return what a target supports; ``name``: a key of VARIANTS.

    No recipe is declared: TransformerEngine keeps o and the gradients in the input dtype after every step, and rounds a
    product within a merge, for which no recipe has words.
    """
    one = VARIANTS[name]
    windows = one.mode == "a2a" or (one.mode == "all_gather" and not one.packed)
    masks = ("causal", *(["window"] if windows else []), *(["documents"] if one.packed else []))
    return Capabilities(
        layouts=(one.layout,),
        # Whatever is sent, a worker's results are those of a ring.
        circulations=("kv",) if one.mode == "p2p" else ("kv", "gather"),
        directions=(1,),
        workers=(4,) if one.mode == "a2a+p2p" else (2, 3, 4),
        masks=masks,
        only_causal=one.layout == "contiguous",
        features=("scale", "softcap"),
        formats=("bfloat16", "float16"),
        head_dims=tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        tokens_multiple=1 if one.layout == "contiguous" else 2,
        kv_heads_multiple=one.kv_heads_multiple,
        batch=(1,) if one.packed else None,
        lse="hidden",
        axes="BSHD",
    )


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, variant: str) -> Any:
    """Compute o [B, n, H, D] of one worker."""
    import torch
    import torch.distributed as dist
    from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
        CPLoadBalancingStrategy,
        attn_forward_func_with_cp,
    )

    check_keywords(attn_forward_func_with_cp, KEYWORDS, PACKAGE, KNOWN)
    one = VARIANTS[variant]
    lengths, longest = sequences(call, q.shape[0], q.shape[1] * call.workers, one.packed)
    mask = "causal" if call.causal else "no_mask"
    if one.packed:
        mask = "padding_causal" if call.causal else "padding"
    balance = "NO_LOAD_BALANCE" if one.layout == "contiguous" else "DUAL_CHUNK_SWAP"
    o = attn_forward_func_with_cp(
        True,  # is_training
        *((x[0] for x in (q, k, v)) if one.packed else (q, k, v)),
        lengths,
        lengths,
        longest,
        longest,
        lengths if one.packed else None,  # of q and of k with padding between documents
        lengths if one.packed else None,
        0.0,  # dropout_p
        pairs_and_rows(group) if one.mode == "a2a+p2p" else group,
        dist.get_process_group_ranks(group),
        torch.cuda.Stream(),  # does nothing on a CPU
        one.mode,
        softmax_scale=call.scale,
        qkv_format="thd" if one.packed else "bshd",
        attn_mask_type=mask,
        window_size=window_size(call, q.shape[1] * call.workers),
        softcap=float(call.terms.get("softcap", 0.0)),
        load_balancing_strategy=getattr(CPLoadBalancingStrategy, balance),
    )
    return o.view(q.shape)


def sequences(call: LocalCall, batch: int, tokens: int, packed: bool) -> tuple[Any, int]:
    """Return the first token of each sequence and the end, int32, and the longest length.

    A packed call without documents has one document.
    """
    import torch

    starts = [tokens * number for number in range(batch + 1)]
    if packed:
        starts = list(call.terms.get("cu_seqlens", (0, tokens)))
        if (starts[0], starts[-1]) != (0, tokens):
            raise Refused(f"documents that do not cover all tokens: {starts}")
    longest = max(stop - start for start, stop in pairwise(starts))
    return torch.tensor(starts, dtype=torch.int32), longest


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
def pairs_and_rows(group: Any) -> list[Any]:
    """Return two groups of this rank: its pair, which exchanges heads, and the ranks at its place in the pairs."""
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    pairs = [ranks[first : first + PAIR] for first in range(0, len(ranks), PAIR)]
    rows = [ranks[place::PAIR] for place in range(PAIR)]
    made = [[(one, dist.new_group(one)) for one in several] for several in (pairs, rows)]
    own = dist.get_rank()
    return [next(made for ranks, made in several if own in ranks) for several in made]


def target(name: str, **settings: Any) -> TorchTarget:
    """Make a target; ``name``: a key of VARIANTS.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(
            ("torch", "einops", "onnxscript", "packaging", "pydantic", PACKAGE),
            PACKAGE,
            FLOOR,
            COMMAND,
        )
    # The first call imports TransformerEngine.
    chosen: dict[str, Any] = {"timeout": 180.0, "standins": STANDINS, **settings}
    return TorchTarget(
        f"{__name__}:attention",
        claims(name),
        name=f"transformer-engine-{name}",
        options={"variant": name},
        notes=NOTES,
        packages=("torch", PACKAGE),
        **chosen,
    )


def p2p(**settings: Any) -> TorchTarget:
    return target("p2p", **settings)


def all_gather(**settings: Any) -> TorchTarget:
    return target("all-gather", **settings)


def a2a(**settings: Any) -> TorchTarget:
    return target("a2a", **settings)


def a2a_p2p(**settings: Any) -> TorchTarget:
    return target("a2a-p2p", **settings)


def p2p_thd(**settings: Any) -> TorchTarget:
    return target("p2p-thd", **settings)


def all_gather_thd(**settings: Any) -> TorchTarget:
    return target("all-gather-thd", **settings)


def a2a_thd(**settings: Any) -> TorchTarget:
    return target("a2a-thd", **settings)


def a2a_p2p_thd(**settings: Any) -> TorchTarget:
    return target("a2a-p2p-thd", **settings)
