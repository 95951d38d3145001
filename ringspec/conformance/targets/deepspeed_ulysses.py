"""DeepSpeed's Ulysses, ``deepspeed.sequence.layer.DistributedAttention``, unmodified, on a CPU.

It exchanges heads for tokens, so that a worker has all tokens of its heads, calls an attention that its caller gives, and
exchanges them back. That attention is here ``flash_attn_func`` of flash-attn's stand-in (:mod:`ringspec.standins`), which
computes in float64 and rounds once, so an error that is larger than roundings explain comes from DeepSpeed.

===========================  ===================================================
target                       tensors
===========================  ===================================================
``deepspeed-ulysses``        [B, S, H, D]: ``batch_dim_idx=0, gather_idx=1``
``deepspeed-ulysses-sbhd``   [S, B, H, D]: ``batch_dim_idx=1, gather_idx=0``
===========================  ===================================================

Not claimed: key heads that W does not divide, for which DeepSpeed needs its own process groups; ``sp_stream``, which
overlaps communication on a GPU; rotary embeddings; dropout.

Source: https://github.com/deepspeedai/DeepSpeed, deepspeed 0.19.8 (PyPI), deepspeed/sequence/layer.py.
"""

from __future__ import annotations

import functools
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import require

PACKAGE, FLOOR, KNOWN = "deepspeed", "0.19", "0.19.8"
COMMAND = f"pip install torch '{PACKAGE}>={FLOOR}'"
SHARED_MEMORY = "deepspeed_shm_comm"
AXES = {"bshd": "BSHD", "sbhd": "SBHD"}
NOTES = (
    "deepspeed.sequence.layer is unmodified; the attention of a worker is flash_attn_func",
    f"known to run with {PACKAGE} {KNOWN}",
)
# The stand-in's P and dS are exact; flash-attn's kernel rounds them to the input dtype.
RECIPE = {
    "bfloat16": {"base": "bf16", "p": "float32", "ds": "float32"},
    "float16": {"base": "fp16", "p": "float32", "ds": "float32"},
}


def claims(form: str) -> Capabilities:
    """Return what a target supports; ``form``: a key of AXES."""
    return Capabilities(
        circulations=("gather",),
        directions=(1,),
        workers=(2, 3, 4),
        masks=("causal", "window"),
        features=("scale", "softcap"),
        formats=("bfloat16", "float16"),
        kv_heads_multiple="workers",
        head_dims=tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        axes=AXES[form],
        lse="hidden",
        recipe=RECIPE,
    )


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, form: str) -> Any:
    """Compute o of one worker, in the axes of q."""
    left, right = call.terms.get("window") or (None, None)
    named = {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": tuple(-1 if side is None else side for side in (left, right)),
        "softcap": float(call.terms.get("softcap", 0.0)),
    }
    return layer(form, group)(q, k, v, batch_dim_idx=form.index("b"), **named)


@functools.cache
def layer(form: str, group: Any) -> Any:
    """Return DeepSpeed's layer; its communication uses torch's process group."""
    import deepspeed.comm
    import deepspeed.ops
    from deepspeed.sequence.layer import DistributedAttention
    from flash_attn import flash_attn_func

    # Otherwise a C++ compiler builds it, for minutes. Only reductions use it, and Ulysses has none.
    deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    deepspeed.comm.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)

    def local(q: Any, k: Any, v: Any, **named: Any) -> Any:
        if form == "bshd":
            return flash_attn_func(q, k, v, **named)
        return flash_attn_func(*(x.transpose(0, 1) for x in (q, k, v)), **named).transpose(0, 1)

    return DistributedAttention(local, group, scatter_idx=2, gather_idx=form.index("s"))


def target(form: str, **settings: Any) -> TorchTarget:
    """Make a target; ``form``: a key of AXES.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", PACKAGE), PACKAGE, FLOOR, COMMAND)
    # The first call imports DeepSpeed.
    chosen: dict[str, Any] = {"timeout": 180.0, "standins": ("flash_attn",), **settings}
    return TorchTarget(
        f"{__name__}:attention",
        claims(form),
        name="deepspeed-ulysses" + ("" if form == "bshd" else f"-{form}"),
        options={"form": form},
        notes=NOTES,
        packages=("torch", PACKAGE),
        **chosen,
    )


def bshd(**settings: Any) -> TorchTarget:
    return target("bshd", **settings)


def sbhd(**settings: Any) -> TorchTarget:
    return target("sbhd", **settings)
