"""The USP attention of xfuser (xDiT) 0.7.0 or later, unmodified, on a CPU.

USP divides W workers into groups: within a group, heads are exchanged for tokens (Ulysses); between groups, keys and
values circulate (ring). xfuser has it twice: the class ``xFuserLongContextAttention``, whose ring is
``xdit_ring_flash_attn_forward`` and whose backward pass is yunchang's, and the function ``USP``, which has a forward pass
only and uses PyTorch's ``_templated_ring_attention``. The kernels of flash-attn are replaced by
:mod:`ringspec.standins`, which computes in float64 and rounds once, so an error that is larger than roundings explain
comes from xfuser, or from the code of yunchang and PyTorch that it calls.

=============================  ===================================================  ==========  ======================
target                         what is called                                       ring        kernel
=============================  ===================================================  ==========  ======================
``xfuser-long``                ``xFuserLongContextAttention``                       W / 2       ``AttnType.FA``
``xfuser-long-ring``           the same                                             W           ``AttnType.FA``
``xfuser-long-fa3``            the same                                             W / 2       ``AttnType.FA3``
``xfuser-usp-flash``           ``USP(backend=FLASH)``                               W / 2       flash-attn 2
``xfuser-usp-flash-combined``  the same, with ``combine_qkv_a2a=True``              W / 2       flash-attn 2
``xfuser-usp-flash-ring``      ``USP(backend=FLASH)``                               W           flash-attn 2
``xfuser-usp-flash-3``         ``USP(backend=FLASH_3)``                             W / 2       flash-attn 3
``xfuser-usp-sdpa-flash``      ``USP(backend=SDPA_FLASH)``                          W / 2       ATen's flash operator
``xfuser-usp-sdpa``            ``USP(backend=SDPA)``                                1           PyTorch's own, on CPUs
``xfuser-usp-sdpa-math``       ``USP(backend=SDPA_MATH)``                           1           PyTorch's own, on CPUs
=============================  ===================================================  ==========  ======================

With a ring of W / 2, pairs of neighbouring workers exchange heads: 2 x 2 and 3 x 2. The backends and their rings are those
that ``RuntimeState`` of xfuser accepts; it refuses ``SDPA`` and ``SDPA_MATH`` with a ring.

xfuser cannot be imported without an accelerator. :func:`import_on_a_cpu` says during the import alone that there is one.
The ring of the class also imports ``update_npu_out`` of yunchang, a function for Ascend NPUs that no release of yunchang
up to 0.6.4 has, so with these releases the class of xfuser 0.5.0 to 0.7.0 raises ImportError when it is made; xDiT has
corrected this since. During the import, a placeholder has this name. Groups are made by xfuser's own functions, for the
backend gloo.

Not claimed: dropout; the kernels of AttnType and AttentionBackendType that need a GPU; ``AttnType.TORCH_MATH`` and
``TORCH_FLASH``, which xfuser's documentation does not name, and whose lse in yunchang 0.6.4 is zero or rounded to the
input dtype; KV caches of PipeFusion; FP8; sparse attention.

Source: https://github.com/xdit-project/xDiT, xfuser 0.7.0 (PyPI), xfuser/core/long_ctx_attention and
xfuser/model_executor/layers/usp.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_keywords, require

PACKAGE, FLOOR, KNOWN = "xfuser", "0.7.0", "0.7.0"
COMMAND = f"pip install torch triton '{PACKAGE}>={FLOOR}'"
PAIR = 2  # workers that exchange heads, if the ring has W / 2
CLASS, FUNCTION = "xFuserLongContextAttention", "USP"
FOR_NPUS = "update_npu_out"  # of yunchang.ring.utils
NOTES = (
    "xfuser is unmodified; during its import alone, torch.cuda says that there is a GPU, which it requires, and"
    " yunchang.ring.utils.update_npu_out is a placeholder if yunchang lacks it, as all releases up to 0.6.4 do",
    f"known to run with {PACKAGE} {KNOWN}",
)


@dataclass(frozen=True)
class Variant:
    """What a target calls.

    ``name``: the class or the function. ``kernel``: a value of AttnType, or the name of an AttentionBackendType.
    ``ring``: its degree, 'pairs' (W / 2), 'all' (W) or 'none' (1). ``standins``: what replaces the kernel.
    """

    name: str
    kernel: str
    ring: str = "pairs"
    standins: tuple[str, ...] = ("flash_attn",)
    combined: bool = False

    @property
    def backward(self) -> bool:
        return self.name == CLASS


FA3_OF_YUNCHANG = ("flash_attn", "flash_attn_interface==3.0.0.b1")
VARIANTS = {
    "long": Variant(CLASS, "fa"),
    "long-ring": Variant(CLASS, "fa", "all"),
    "long-fa3": Variant(CLASS, "fa3", standins=FA3_OF_YUNCHANG),
    "usp-flash": Variant(FUNCTION, "FLASH"),
    "usp-flash-combined": Variant(FUNCTION, "FLASH", combined=True),
    "usp-flash-ring": Variant(FUNCTION, "FLASH", "all"),
    "usp-flash-3": Variant(FUNCTION, "FLASH_3", standins=("flash_attn", "flash_attn_interface")),
    "usp-sdpa-flash": Variant(FUNCTION, "SDPA_FLASH", standins=("flash_attn", "aten_flash")),
    "usp-sdpa": Variant(FUNCTION, "SDPA", "none"),
    "usp-sdpa-math": Variant(FUNCTION, "SDPA_MATH", "none"),
}


def claims(name: str) -> Capabilities:
    """Return what a variant supports; ``name``: a key of VARIANTS."""
    one = VARIANTS[name]
    on_cpu = one.ring == "none"
    multiples: dict[str, int | str] = {"pairs": PAIR, "all": 1, "none": "workers"}
    recipes = {x: recipe(one, b, x) for x, b in (("bfloat16", "bf16"), ("float16", "fp16"))}
    return Capabilities(
        operations=("ring-forward", "ring-backward") if one.backward else ("ring-forward",),
        circulations=("kv",) if one.ring == "all" else ("gather",),
        directions=(1,),
        workers=(4, 6) if one.ring == "pairs" else (2, 3, 4),
        masks=("causal", "window") if one.backward else ("causal",),
        features=("scale",) if one.backward else (),  # the function has no argument for a scale
        formats=("float32",) if on_cpu else ("bfloat16", "float16"),
        kv_heads_multiple=multiples[one.ring],
        head_dims=None if on_cpu else tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        axes="BSHD" if one.backward else "BHSD",
        lse="hidden",
        recipe=recipes if one.ring == "all" else None,
    )


def recipe(one: Variant, base: str, narrow: str) -> dict[str, str | int]:
    """Return where a ring of all workers rounds over the stand-in, for inputs in the format ``narrow``.

    A ring's block returns o, dq, dk and dv in the input dtype; the ring adds them in float32. P and dS, which the kernel
    rounds to the input dtype, are exact in the stand-in. No recipe fits USP: a block of its ring holds the tokens of two
    workers, and a recipe rounds for the block of each worker.
    """
    made: dict[str, str | int] = {"base": base, "p": "float32", "merge_order": "normalised"}
    made |= {"block_o": narrow}
    return made | ({"ds": "float32", "block_gradients": narrow} if one.backward else {})


@contextlib.contextmanager
def import_on_a_cpu() -> Iterator[None]:
    """Say in the with block that there is an NVIDIA GPU, if there is none, and give yunchang the name that it lacks.

    xfuser's modules raise without a GPU, or leave out USP. Its functions do not ask again.
    """
    import torch
    import yunchang.ring.utils as rings

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "none: ringspec",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(gcnArchName=""),
    }
    with contextlib.ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
            stack.enter_context(mock.patch.object(torch.version, "cuda", "12.8"))
        if not hasattr(rings, FOR_NPUS):
            stack.enter_context(mock.patch.object(rings, FOR_NPUS, None, create=True))
        yield


@functools.cache
def modules() -> SimpleNamespace:
    """Import xfuser and return what is used of it."""
    with import_on_a_cpu():
        import xfuser.core.distributed as distributed
        from xfuser.config import xFuserArgs
        from xfuser.core.distributed import parallel_state, runtime_state
        from xfuser.core.long_ctx_attention import AttnType, ring, xFuserLongContextAttention
        from xfuser.model_executor.layers.usp import USP
    assert ring is not None  # the class imports it when it is made
    check_keywords(USP, ("joint_strategy", "kv_head_repeat", "combine_qkv_a2a"), PACKAGE, KNOWN)
    check_keywords(xFuserLongContextAttention.forward, ("joint_strategy",), PACKAGE, KNOWN)
    return SimpleNamespace(
        distributed=distributed,
        groups=parallel_state,
        runtime=runtime_state,
        arguments=xFuserArgs,
        kernels=AttnType,
        layer=xFuserLongContextAttention,
        usp=USP,
    )


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, variant: str) -> Any:
    """Compute o of one worker: [B, n, H, D] of the class, [B, H, n, D] of the function."""
    one = VARIANTS[variant]
    set_degrees(*degrees_of(one, call), call, one)
    text = len(call.terms.get("text", ()))
    return (of_class if one.name == CLASS else of_function)(q, k, v, one, call, text)


def of_class(q: Any, k: Any, v: Any, one: Variant, call: LocalCall, text: int) -> Any:
    """Call the class; the first ``text`` tokens of each rank are those that all ranks have."""
    import torch

    xfuser = modules()
    left, right = call.terms.get("window") or (None, None)
    named: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "window_size": tuple(-1 if side is None else side for side in (left, right)),
    }
    layer = xfuser.layer(attn_type=xfuser.kernels.from_string(one.kernel))
    if not text:
        return layer(None, q, k, v, **named)
    where = call.terms["text_at"]
    for name, x in zip(("query", "key", "value"), (q, k, v), strict=True):
        named[f"joint_tensor_{name}"] = x[:, :text]
    own = (x[:, text:] for x in (q, k, v))
    o = layer(None, *own, joint_strategy=where, **named)
    return o if where == "front" else torch.cat([o[:, -text:], o[:, :-text]], dim=1)


def of_function(q: Any, k: Any, v: Any, one: Variant, call: LocalCall, text: int) -> Any:
    """Call the function; the first ``text`` tokens of each rank are those that all ranks have."""
    import torch

    xfuser = modules()
    named: dict[str, Any] = {"is_causal": call.causal, "combine_qkv_a2a": one.combined}
    if not text:
        return xfuser.usp(q, k, v, kv_head_repeat=q.shape[1] // k.shape[1], **named)
    where = call.terms["text_at"]
    for name, x in zip(("query", "key", "value"), (q, k, v), strict=True):
        named[f"joint_{name}"] = x[:, :, :text]
    own = (x[:, :, text:] for x in (q, k, v))
    o = xfuser.usp(*own, joint_strategy=where, **named)
    return o if where == "front" else torch.cat([o[:, :, -text:], o[:, :, :-text]], dim=2)


def degrees_of(one: Variant, call: LocalCall) -> tuple[int, int]:
    """Return the degrees of Ulysses and of the ring."""
    if call.scheme:
        sizes = dict(call.mesh)
        return sizes.get("ulysses", 1), sizes.get("ring", 1)
    ulysses = {"pairs": PAIR, "all": 1, "none": call.workers}[one.ring]
    return ulysses, call.workers // ulysses


def set_degrees(ulysses: int, ring: int, call: LocalCall, one: Variant) -> None:
    """Make xfuser's groups, and the runtime state that chooses the backend, if they do not have these degrees."""
    import torch.distributed as dist

    xfuser = modules()
    if xfuser.distributed.model_parallel_is_initialized():
        now = xfuser.groups.get_sp_group()
        if (now.ulysses_world_size, now.ring_world_size) == (ulysses, ring):
            return
        xfuser.groups.destroy_model_parallel()
    backend, degrees = dist.get_backend(), {"ulysses_degree": ulysses, "ring_degree": ring}
    xfuser.distributed.init_distributed_environment(
        world_size=call.workers, rank=call.rank, local_rank=call.rank, backend=backend
    )
    xfuser.distributed.initialize_model_parallel(**degrees, backend=backend)
    if one.name == FUNCTION:
        # initialize_runtime_state needs a pipeline. RuntimeState refuses a backend that has no ring.
        config, _ = xfuser.arguments(attention_backend=one.kernel, **degrees).create_config()
        xfuser.runtime._RUNTIME = xfuser.runtime.RuntimeState(config)


def target(variant: str, **settings: Any) -> TorchTarget:
    """Make the target of a variant.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", "triton", PACKAGE), PACKAGE, FLOOR, COMMAND)
    # The first call imports xfuser, diffusers and transformers.
    chosen: dict[str, Any] = {
        "timeout": 300.0,
        "standins": VARIANTS[variant].standins,
        **settings,
    }
    return TorchTarget(
        f"{__name__}:attention",
        claims(variant),
        name=f"xfuser-{variant}",
        options={"variant": variant},
        notes=NOTES,
        packages=("torch", PACKAGE, "yunchang"),
        **chosen,
    )


def __getattr__(name: str) -> TorchTarget:
    """Make the target of a variant when it is read from the module: ``usp_flash`` is ``usp-flash``."""
    variant = name.replace("_", "-")
    if variant in VARIANTS:
        return target(variant)
    raise AttributeError(f"module {__name__} has no attribute {name}; known are {sorted(VARIANTS)}")
