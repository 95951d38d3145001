"""The context parallelism of Hugging Face diffusers, in the installed version (0.39.0 or later).

=========================  ===============================================================
target                     ``ContextParallelConfig``
=========================  ===============================================================
``diffusers-ring``         ``ring_degree=W``
``diffusers-ulysses``      ``ulysses_degree=W``: workers exchange heads for tokens
``diffusers-unified``      ``ring_degree=2, ulysses_degree=2``, for W = 4
``diffusers-unified-3x2``  ``ring_degree=3, ulysses_degree=2``, for W = 6
=========================  ===============================================================

With ``kernel="native-flash"``, the same over the operator of PyTorch that diffusers' backend "_native_flash" calls: on a
GPU with ``device="cuda"``, otherwise over the stand-in ``aten_flash``, in 16 bits.

``_templated_context_parallel_attention`` is called as diffusers calls it, unmodified, with its flash-attention
operations. These operations call a forward and a
backward CUDA kernel of the flash-attn package. On a CPU, :func:`kernel_forward` and :func:`kernel_backward` replace
these kernels. They have the same signatures, compute in float64 and round once, so an error
that is larger than roundings explain comes from the ring.

Results of 0.39.0 (issue 14265): o and lse are correct; dq, dk and dv are wrong for W >= 2. The operation reads q, k,
v, o and lse from ``ctx.saved_tensors``, which were saved at step 0. Every step of the backward pass therefore
differentiates the worker's own block, with the lse and o of that block. dq is W times the gradient of that block, and
dk and dv are the same on every worker: the sum of all workers' block gradients.

Results of 0.42.1: dk and dv are wrong for W >= 3. At step i, worker r computes with the block of worker r + i, but
sends its dk and dv to worker r + 1, which computes next with the block of r + i + 2. With W = 2, both are the same
block.

The unified attention contains this ring. With two workers in it, its gradients are wrong in 0.39.0 and right in 0.42.1;
with three, dk and dv are wrong in 0.42.1 as well. Nothing is wrong in Ulysses. Its backward pass takes the number of
keys from dy, so unequal lengths are not claimed.

There is no causal mask, and Hkv = H and Dv = D are required. The ring's configuration refuses one worker, but this
target runs it with one worker as well. The gradients are then correct, which confirms the two replacement functions.

Source: diffusers/models/attention_dispatch.py and _modeling_parallel.py of diffusers 0.39.0 and 0.42.1;
https://github.com/huggingface/diffusers/issues/14265.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_names, require

PACKAGE, FLOOR, KNOWN = "diffusers", "0.39.0", "0.39.0 and 0.42.1"
COMMAND = f"pip install torch '{PACKAGE}>={FLOOR}'"
# The names used from diffusers' attention_dispatch; they are not public.
NAMES = (
    "TemplatedRingAttention",
    "_flash_attention_backward_op",
    "_flash_attention_forward_op",
    "_templated_context_parallel_attention",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
)
# The forward and backward operations of diffusers, by the kernel that they call.
OPERATIONS = {
    "flash": ("_flash_attention_forward_op", "_flash_attention_backward_op"),
    "native-flash": ("_native_flash_attention_forward_op", "_native_flash_attention_backward_op"),
}
# The dropout that diffusers passes to flash-attn to get the lse without dropout.
NO_DROPOUT = 1e-30

CLAIMS = Capabilities(
    # Without a mask the layout only decides which rows a worker holds, so every layout works.
    layouts=("contiguous", "striped", "zigzag", "table"),
    # Keys and values are gathered; their gradients travel around the ring.
    circulations=("kv", "gather"),
    workers=(1, 2, 3, 4),
    masks=(),
    features=("scale", "unequal-lengths"),
    formats=("bfloat16", "float16", "float32", "float64"),
    head_ratios=(1,),
    value_dim_equals_head_dim=True,
    axes="BSHD",
    recipe="bf16_partials",
)
# A kernel call has the tokens of all workers and rounds its results once.
ROUNDED_ONCE = {
    name: {"base": base, "p": "float32", "ds": "float32"}
    for name, base in (("bfloat16", "bf16"), ("float16", "fp16"))
}
# No recipe fits: a block of the ring has the tokens of two workers, and a recipe rounds for the block of each.
UNIFIED = dataclasses.replace(
    CLAIMS, circulations=("gather",), workers=(4,), kv_heads_multiple=2, recipe=None
)
BY_MODE = {
    "ring": CLAIMS,
    "ulysses": dataclasses.replace(
        CLAIMS,
        circulations=("gather",),
        workers=(2, 3, 4),
        features=("scale",),
        kv_heads_multiple="workers",
        recipe=ROUNDED_ONCE,
    ),
    "unified": UNIFIED,
    "unified-3x2": dataclasses.replace(UNIFIED, workers=(6,)),
}
# The ring's degree is that of the remaining workers.
ULYSSES_DEGREES = {"ring": 1, "unified": 2, "unified-3x2": 2}
REPLACED = (
    "diffusers' code is unmodified; the two flash-attn CUDA kernels that it calls are replaced"
    " by functions of ringspec that compute in float64 and round once"
)
NATIVE = "diffusers' code is unmodified; it calls aten::_scaled_dot_product_flash_attention"
NOTES = (
    f"known to run with {PACKAGE} {KNOWN}; the gradients of 0.39.0 are wrong"
    " (https://github.com/huggingface/diffusers/issues/14265), and dk and dv of 0.42.1 from 3 workers on",
)


def kernel_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Any,
    return_softmax: bool,
) -> tuple[Any, Any, Any, Any]:
    """Replace flash-attn's ``_wrapped_flash_attn_forward``.

    Returns o [B, n, H, D], lse [B, H, n] and two unused results.
    """
    import torch

    check_plain(dropout_p, causal, window_left, window_right, softcap, alibi_slopes)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * softmax_scale
    lse = torch.logsumexp(s, dim=3)
    o = torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse[..., None]), v.double())
    statistics = torch.promote_types(q.dtype, torch.float32)
    nothing = torch.empty(0)
    return o.to(q.dtype), lse.to(statistics), nothing, nothing


def kernel_backward(
    dy: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Any,
    deterministic: bool,
    rng_state: Any,
) -> None:
    """Replace flash-attn's ``_wrapped_flash_attn_backward``.

    It writes dq, dk and dv, which it computes from the given o and lse.
    """
    import torch

    check_plain(dropout_p, causal, window_left, window_right, softcap, alibi_slopes)
    # The kernel reads the memory of lse as [B, H, n], whatever its view (0.39.0: [B, n, H]).
    batch, n, heads, _ = q.shape
    lse = lse.as_strided((batch, heads, n), (heads * n, n, 1))
    wide_q, wide_k, wide_v, wide_dy = (x.double() for x in (q, k, v, dy))
    s = torch.einsum("bihd,bjhd->bhij", wide_q, wide_k) * softmax_scale
    p = torch.exp(s - lse.double()[..., None])
    delta = (wide_dy * o.double()).sum(dim=3).permute(0, 2, 1)
    dp = torch.einsum("bihd,bjhd->bhij", wide_dy, wide_v)
    ds = p * (dp - delta[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, wide_k))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, wide_q))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, wide_dy))


def check_plain(
    dropout_p: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Any,
) -> None:
    """Raise NotImplementedError for features that :func:`kernel_forward` and :func:`kernel_backward` lack."""
    plain = (window_left, window_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
    if causal or not plain or dropout_p > NO_DROPOUT:
        raise NotImplementedError("a mask, soft cap or dropout inside the kernel")


@functools.cache
def dispatch() -> Any:
    """Return diffusers' module with :func:`kernel_forward` and :func:`kernel_backward` in place of flash-attn's."""
    from diffusers.models import attention_dispatch

    check_names(attention_dispatch, NAMES, PACKAGE, KNOWN)
    attention_dispatch._wrapped_flash_attn_forward = kernel_forward
    attention_dispatch._wrapped_flash_attn_backward = kernel_backward
    return attention_dispatch


@functools.cache
def configuration(
    rank: int, workers: int, in_float32: bool, ulysses: int = 1, device: Any = "cpu"
) -> Any:
    """Make diffusers' parallel configuration on a mesh of this process group; ``ulysses``: its degree."""
    import torch
    from diffusers.models import _modeling_parallel as theirs
    from torch.distributed.device_mesh import init_device_mesh

    check_names(theirs, ("ContextParallelConfig", "ParallelConfig"), PACKAGE, KNOWN)
    ring = workers // ulysses
    refused = ring == ulysses == 1
    context = theirs.ContextParallelConfig(
        ring_degree=2 if refused else ring, ulysses_degree=ulysses, convert_to_fp32=in_float32
    )
    context.ring_degree = ring
    parallel = theirs.ParallelConfig(context_parallel_config=context)
    device = torch.device(device)
    mesh = init_device_mesh(device.type, (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    parallel.setup(rank, workers, device, mesh=mesh)
    return parallel


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any,
    call: LocalCall,
    mode: str = "ring",
    kernel: str = "flash",
) -> tuple[Any, Any]:
    """Compute o [B, n, H, D] and lse [B, H, n] of one worker."""
    import torch

    module = dispatch()
    check_names(module, OPERATIONS[kernel], PACKAGE, KNOWN)
    operations = tuple(getattr(module, name) for name in OPERATIONS[kernel])
    usual = ULYSSES_DEGREES.get(mode, call.workers)
    degree = dict(call.mesh).get("ulysses", 1) if call.scheme else usual
    in_float32 = q.dtype != torch.float64
    parallel = configuration(call.rank, call.workers, in_float32, degree, q.device)
    if call.workers == 1:
        plain = (None, 0.0, False, call.scale, False, True)
        o, lse = module.TemplatedRingAttention.apply(q, k, v, *plain, *operations, parallel)
    else:
        o, lse = module._templated_context_parallel_attention(
            q,
            k,
            v,
            scale=call.scale,
            return_lse=True,
            forward_op=operations[0],
            backward_op=operations[1],
            _parallel_config=parallel,
        )
    return o.to(getattr(torch, call.formats["outputs"])), lse.permute(0, 2, 1)


def diffusers_ring(**settings: Any) -> TorchTarget:
    return target("ring", **settings)


def diffusers_ulysses(**settings: Any) -> TorchTarget:
    return target("ulysses", **settings)


def diffusers_unified(**settings: Any) -> TorchTarget:
    return target("unified", **settings)


def diffusers_unified_3x2(**settings: Any) -> TorchTarget:
    return target("unified-3x2", **settings)


def claims(mode: str, kernel: str) -> Capabilities:
    """Return what a target supports; ``kernel``: a key of OPERATIONS."""
    if kernel == "flash":
        return BY_MODE[mode]
    # PyTorch's kernels take these head dimensions in 16 bits; no recipe was compared with them.
    return dataclasses.replace(
        BY_MODE[mode],
        formats=("bfloat16", "float16"),
        head_dims=tuple(range(8, 257, 8)),
        recipe=None,
    )


def target(mode: str, kernel: str = "flash", **settings: Any) -> TorchTarget:
    """Make the target of one of :data:`BY_MODE`; ``kernel``: a key of OPERATIONS.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", PACKAGE), PACKAGE, FLOOR, COMMAND)
    native = kernel == "native-flash"
    # The first call imports diffusers.
    chosen: dict[str, Any] = {"timeout": 180.0, **settings}
    if native and chosen.get("device", "cpu") == "cpu":
        chosen.setdefault("standins", ("aten_flash",))
    return TorchTarget(
        f"{__name__}:attention",
        claims(mode, kernel),
        name=f"diffusers_{mode}".replace("-", "_"),
        options={"mode": mode, "kernel": kernel},
        notes=(NATIVE if native else REPLACED, *NOTES),
        packages=("torch", PACKAGE),
        **chosen,
    )
