"""TransformerEngine's context parallelism for PyTorch, unmodified, on a CPU.

Each target calls ``attn_forward_func_with_cp``, the function that TransformerEngine's attention backends call, with the
arguments of these backends. The kernels are replaced by :mod:`ringspec.standins`, which computes in float64 and rounds
once, so an error that is larger than roundings explain comes from context parallelism. TransformerEngine returns no lse.

=================================  ==============  =========================================================
target                             cp_comm_type    what is sent
=================================  ==============  =========================================================
``transformer-engine-p2p``         ``p2p``         keys and values in a ring, then their gradients
``transformer-engine-all-gather``  ``all_gather``  keys and values to all workers, their gradients by reduction
``transformer-engine-a2a``         ``a2a``         heads for tokens, so that a worker has all tokens of its heads
``transformer-engine-a2a-p2p``     ``a2a+p2p``     both: ``a2a`` in pairs of workers, ``p2p`` between the pairs
=================================  ==============  =========================================================

These use FlashAttention 2. Each has a target with ``-fa3`` for FlashAttention 3 and one with ``-fused`` for
FusedAttention. Their tensors are [B, S, H, D] in the layout zigzag, which TransformerEngine calls DualChunkSwap. Each
``-fused`` target has one with ``-sbhd`` for tensors [S, B, H, D], and every target one with ``-thd`` for packed
documents [T, H, D]: zigzag in each document, and with ``all_gather`` and FlashAttention 2 contiguous and causal, which
TransformerEngine calls NO_LOAD_BALANCE.

Bypassed, because they need a GPU: the checks and choices of ``DotProductAttention``, and ``torch.compile`` for small
functions. The targets claim what these checks accept (``get_attention_backend`` of 2.20.2): causal or no mask, windows
with ``all_gather`` and ``a2a``, grouped heads, soft cap with FlashAttention 2, other head dimensions of v with
FusedAttention, padded documents with FlashAttention 3 and FusedAttention. With ``a2a``, the number of workers must divide
that of key heads. Not claimed: dropout, bias and FP8; padded documents with ``a2a+p2p`` and FlashAttention 3, which
TransformerEngine's own tests omit as not yet supported; FlashAttention 4; one worker, with which TransformerEngine does
not use context parallelism.

Source: https://github.com/NVIDIA/TransformerEngine, transformer_engine 2.20.2 (PyPI),
transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py.
"""

from __future__ import annotations

import functools
from itertools import accumulate, pairwise
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.protocol import Refused
from ringspec.conformance.target.versions import check_keywords, require
from ringspec.conformance.targets.transformer_engine_claims import PAIR, VARIANTS, Variant, claims

PACKAGE, FLOOR, KNOWN = "transformer_engine", "2.20", "2.20.2"
COMMAND = f"pip install torch einops onnxscript packaging pydantic && pip install --no-deps '{PACKAGE}>={FLOOR}'"
STANDINS = ("flash_attn", "flash_attn_interface", "transformer_engine_torch")


KEYWORDS = tuple(
    (
        "cp_comm_type softmax_scale qkv_format attn_mask_type use_fused_attention window_size softcap pad_between_seqs"
        " use_flash_attn_3 load_balancing_strategy"
    ).split()
)
NOTES = (
    "context_parallel.py of TransformerEngine is unmodified; its checks in DotProductAttention are passed by",
    f"known to run with {PACKAGE} {KNOWN}",
    "not claimed: one worker (TransformerEngine then does not use context parallelism), dropout",
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
    tokens = q.shape[0 if one.form == "sbhd" else 1] * call.workers
    if one.packed:
        valid, padded, longest = documents(call, tokens, one)
    else:
        valid, padded, longest = dense_sequences(q.shape[one.form.index("b")], tokens), None, tokens
    mask = (
        ("padding_causal" if one.packed else "causal")
        if call.causal
        else ("padding" if one.packed else "no_mask")
    )
    balance = "NO_LOAD_BALANCE" if one.layout == "contiguous" else "DUAL_CHUNK_SWAP"
    o = attn_forward_func_with_cp(
        True,  # is_training
        *((x[0] for x in (q, k, v)) if one.packed else (q, k, v)),
        valid,
        valid,
        longest,
        longest,
        padded,  # of q and of k
        padded,
        0.0,  # dropout_p
        groups_of(call, group) if one.mode == "a2a+p2p" else group,
        dist.get_process_group_ranks(group),
        torch.cuda.Stream(),  # does nothing on a CPU
        one.mode,
        softmax_scale=call.scale,
        qkv_format=one.form,
        attn_mask_type=mask,
        use_fused_attention=one.backend == "fused",
        window_size=window_size(call, tokens),
        softcap=float(call.terms.get("softcap", 0.0)),
        pad_between_seqs=padded is not valid and one.packed,
        use_flash_attn_3=one.backend == "fa3",
        load_balancing_strategy=getattr(CPLoadBalancingStrategy, balance),
    )
    return o.view(*q.shape[:-1], v.shape[-1])


def dense_sequences(batch: int, tokens: int) -> Any:
    """Return the first token of each sequence of a batch and the end, int32."""
    import torch

    return torch.arange(batch + 1, dtype=torch.int32) * tokens


def documents(call: LocalCall, slots: int, one: Variant) -> tuple[Any, Any, int]:
    """Return the starts of the documents, their starts with padding, and the most slots of a document.

    Both starts are int32 and include the end; without padding they are the same tensor, as TransformerEngine expects.
    ``slots``: those of all workers. A call without documents has one document. With zigzag, a document has a multiple
    of 2 W slots.
    """
    import torch

    starts = call.terms.get("cu_seqlens", (0, slots))
    unit = 1 if one.layout == "contiguous" else 2 * call.workers
    lengths = [stop - start for start, stop in pairwise(starts)]
    rooms = [-(-length // unit) * unit for length in lengths]
    if "cu_seqlens_padded" in call.terms:
        rooms = [stop - start for start, stop in pairwise(call.terms["cu_seqlens_padded"])]
    if starts[0] != 0 or sum(rooms) != slots:
        raise Refused(f"documents that do not cover all tokens: {starts}")
    if rooms != lengths and not one.padded:
        raise Refused(f"documents that are not multiples of {unit}: {lengths}")
    valid = torch.tensor(starts, dtype=torch.int32)
    padded = torch.tensor([0, *accumulate(rooms)], dtype=torch.int32)
    return valid, valid if rooms == lengths else padded, max(rooms)


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


def groups_of(call: LocalCall, group: Any) -> list[Any]:
    """Return the groups of this rank for a2a and for p2p."""
    if call.scheme:
        return [call.device_mesh[axis].get_group() for axis in ("ulysses", "ring")]
    return pairs_and_rows(group)


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


def __getattr__(name: str) -> TorchTarget:
    """Make a target when it is read from the module: ``p2p_fused_thd`` is ``p2p-fused-thd``."""
    variant = name.replace("_", "-")
    if variant in VARIANTS:
        return target(variant)
    raise AttributeError(f"module {__name__} has no attribute {name}; known are {sorted(VARIANTS)}")
