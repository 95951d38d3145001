"""PyTorch's context parallelism: ``torch.distributed.tensor.experimental``, unmodified.

Every target runs torch's ring: the loop, merge, rotation of keys and values, and load balance are torch's. The targets
differ in how the ring is called:

backend        device  how
``cpu``        cpu     torch's ring functions with torch's CPU flash kernel as their operation;
                       float32
``16bit``      cpu     the same in bfloat16 and float16, without its LSE (see NOTES)
``flash``      cuda    torch's ring functions for its flash kernel
``cudnn``      cuda    torch's ring functions for its cuDNN kernel
``sdpa-flash`` cuda    ``context_parallel`` and ``scaled_dot_product_attention``, which return no LSE
``sdpa-cudnn`` cuda    the same with the cuDNN kernel

The layout ``contiguous`` is torch without load balance. ``zigzag`` is torch with head-tail load balance, which torch
offers only for causal attention. A target is named layout_rotation_backend, without ``cpu``: ``zigzag_alltoall``,
``contiguous_allgather_16bit``, ``zigzag_alltoall_sdpa_flash``. Any version of torch is accepted; 2.13.0 is known to
work. The targets use names of torch that are not public and change between versions.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py, PyTorch 2.13.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Refused
from ringspec.conformance.target.versions import check_names

LAYOUTS = ("contiguous", "zigzag")
ROTATIONS = ("alltoall", "allgather")
BACKENDS = ("cpu", "16bit", "flash", "cudnn", "sdpa-flash", "sdpa-cudnn")
ON_CPU = ("cpu", "16bit")
SEQ_AXIS = 2
KNOWN = "2.13.0"
# The functions used from torch's module, each with its backward; the names are not public.
RINGS = {
    "cpu": "_templated_ring_attention",
    "16bit": "_templated_ring_attention",
    "flash": "_scaled_dot_product_ring_flash_attention",
    "cudnn": "_scaled_dot_product_ring_cudnn_attention",
}
# The files of expected failures of the targets with 16-bit inputs, by layout.
EXPECTED = {
    layout: Path(__file__).with_name(f"torch_cp_expected_{layout}.toml")
    for layout in ("contiguous", "zigzag")
}


def ring(
    q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, rotation: str, backend: str
) -> Any:
    """Compute one rank's o, and lse if the backend returns it."""
    if call.layout == "zigzag" and not call.causal:
        raise Refused("load balance without a causal mask")
    function = sdpa_function() if backend.startswith("sdpa") else ring_function()
    return function.apply(q, k, v, group, call, rotation, backend)


@contextmanager
def options(call: LocalCall, rotation: str) -> Iterator[None]:
    """Set the globals that torch reads in both passes."""
    from torch.distributed.tensor.experimental import _attention as cp

    check_names(cp, ("_cp_options", "set_rotate_method"), "torch", KNOWN)
    before = cp._cp_options.enable_load_balance
    cp._cp_options.enable_load_balance = call.layout == "zigzag"
    cp.set_rotate_method(rotation)
    try:
        yield
    finally:
        cp._cp_options.enable_load_balance = before


@functools.cache
def operations(backend: str) -> SimpleNamespace:
    """Import torch's ring functions from where this version has them."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError:  # before 2.10
        from torch.distributed.tensor.experimental import _attention
    check_names(_attention, (RINGS[backend], f"{RINGS[backend]}_backward"), "torch", KNOWN)
    return _attention


@functools.cache
def mesh_of(group: Any, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device)


def forward_of(
    backend: str, group: Any, call: LocalCall, q: Any, k: Any, v: Any
) -> tuple[Any, ...]:
    """Return o, lse and the further values that the backward pass needs."""
    import torch

    chosen = {"is_causal": call.causal, "scale": call.scale}
    if backend in ON_CPU:
        operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return operations(backend)._templated_ring_attention(
            group, SEQ_AXIS, operation, q, k, v, dropout_p=0.0, **chosen
        )
    mesh = mesh_of(group, q.device.type)
    if backend == "flash":
        return operations(backend)._scaled_dot_product_ring_flash_attention(mesh, q, k, v, **chosen)
    return operations(backend)._scaled_dot_product_ring_cudnn_attention(mesh, q, k, v, **chosen)


def backward_of(
    backend: str, group: Any, call: LocalCall, dy: Any, saved: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return (dq, dk, dv); ``saved``: q, k, v, o, lse and the further values of the forward pass."""
    import torch

    q, k, v, o, lse, *rest = saved
    if backend in ON_CPU:
        return operations(backend)._templated_ring_attention_backward(
            group,
            SEQ_AXIS,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=dy,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=o,
            logsumexp=lse,
            is_causal=call.causal,
            dropout_p=0.0,
            scale=call.scale,
        )[:3]
    mesh = mesh_of(group, q.device.type)
    cum_q, cum_k, max_q, max_k, seed, offset = rest[:6]
    tensors, lengths = (mesh, dy, q, k, v, o, lse), (cum_q, cum_k, max_q, max_k, 0.0, call.causal)
    if backend == "flash":
        function = operations(backend)._scaled_dot_product_ring_flash_attention_backward
        return function(*tensors, *lengths, seed, offset, scale=call.scale)[:3]
    function = operations(backend)._scaled_dot_product_ring_cudnn_attention_backward
    return function(*tensors, seed, offset, None, *lengths, scale=call.scale)[:3]


@functools.cache
def ring_function() -> Any:
    """Make an autograd function from torch's forward and backward rings."""
    import torch

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
            group, call, rotation, backend = ctx.given = rest
            with options(call, rotation):
                o, lse, *further = forward_of(backend, group, call, q, k, v)
            ctx.further = tuple(further)
            ctx.save_for_backward(q, k, v, o, lse)
            exposed = lse.squeeze(-1) if lse.dim() == 4 else lse  # cuDNN's has an axis of 1
            ctx.mark_non_differentiable(exposed)
            return o, exposed

        @staticmethod
        def backward(ctx: Any, dy: Any, _: Any) -> Any:
            group, call, rotation, backend = ctx.given
            with options(call, rotation):
                saved = (*ctx.saved_tensors, *ctx.further)
                grads = backward_of(backend, group, call, dy.contiguous(), saved)
            return (*grads, None, None, None, None)

    return Ring


@functools.cache
def sdpa_function() -> Any:
    """Make an autograd function that runs both passes of ``scaled_dot_product_attention`` in ``context_parallel``."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    }

    @contextmanager
    def parallel(group: Any, call: LocalCall, rotation: str, q: Any) -> Iterator[None]:
        # The inputs are sharded already, but context_parallel requires a buffer to shard.
        tokens = torch.zeros(q.shape[SEQ_AXIS] * call.workers, device=q.device)
        with (
            options(call, rotation),
            context_parallel(mesh_of(group, "cuda"), buffers=[tokens], buffer_seq_dims=[0]),
        ):
            yield

    class Sdpa(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
            group, call, rotation, backend = ctx.given = rest
            wanted = zip((q, k, v), ctx.needs_input_grad[:3], strict=True)
            leaves = [x.detach().requires_grad_(needed) for x, needed in wanted]
            chosen: dict[str, Any] = {"is_causal": call.causal, "scale": call.scale}
            if q.shape[1] != k.shape[1]:
                chosen["enable_gqa"] = True
            with (
                parallel(group, call, rotation, q),
                sdpa_kernel(kernels[backend]),
                torch.enable_grad(),
            ):
                # Looked up here, because context_parallel replaces the function.
                attention = torch.nn.functional.scaled_dot_product_attention
                o = attention(*leaves, **chosen)
            ctx.tape = (leaves, o)
            return o.detach()

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            group, call, rotation, _ = ctx.given
            leaves, o = ctx.tape
            with parallel(group, call, rotation, dy):
                grads = torch.autograd.grad(o, leaves, dy.contiguous())
            return (*grads, None, None, None, None)

    return Sdpa


def gpus() -> tuple[int, ...] | None:
    """Return the numbers of workers for which this machine has enough GPUs; None if torch is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return tuple(range(1, torch.cuda.device_count() + 1))


# torch's CPU kernel returns a block's results in the input dtype. Its backward pass also sums over tiles in that dtype;
# a tile has 512 keys and 32 queries, or 64 if there are at least 192 queries, or 256 if there are at least 768
# (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). Gradients are sent in float32. For float32 inputs no recipe is
# declared: torch merges by o - sigmoid(lse_b - lse) (o - o_b), whose rounding error is that of o even if o has little
# weight in the end, and no recipe describes that.
def sixteen_bit(base: str, narrow: str) -> dict[str, str | int]:
    points = ("block_o", "block_gradients", "tile_dq", "tile_dkv")
    tiles: dict[str, str | int] = {"merge_order": "normalised", "tile_q": 32, "tile_k": 512}
    return {"base": base} | tiles | dict.fromkeys(points, narrow)


RECIPES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "16bit": {
        "bfloat16": sixteen_bit("bf16", "bfloat16"),
        "float16": sixteen_bit("fp16", "float16"),
    },
}


def claims(layout: str, rotation: str, backend: str) -> Capabilities:
    """Return what a target of torch claims to support.

    It needs Dv = D, and supports no mask other than causal and no dlse.
    """
    widest = 128 if backend.endswith("cudnn") else 256
    on_cpu = backend in ON_CPU
    return Capabilities(
        layouts=(layout,),
        # With allgather all keys arrive at once and are used in the order of the ring.
        circulations=("kv",) if rotation == "alltoall" else ("kv", "gather"),
        directions=(1,),
        workers=None if on_cpu else gpus(),
        masks=("causal",),
        only_causal=layout == "zigzag",
        features=("scale",),
        formats=("float32",) if backend == "cpu" else ("bfloat16", "float16"),
        head_dims=None if on_cpu else tuple(range(8, widest + 1, 8)),
        value_dim_equals_head_dim=True,
        # cuDNN has no backward pass for one query and one key.
        tokens_multiple=2 if layout == "zigzag" or backend.endswith("cudnn") else 1,
        recipe=RECIPES[backend] if on_cpu else "bf16_partials",
        lse="hidden" if backend == "16bit" or backend.startswith("sdpa") else "natural",
    )


DIRECT = (
    "torch's dispatcher has no ring for its CPU kernel: its ring functions are called directly, with"
    " aten._scaled_dot_product_flash_attention_for_cpu as their operation"
)
EXPOSED = "torch's ring functions are called directly, because only they return the LSE"
PUBLIC = "called through context_parallel, with inputs that ringspec has sharded"
NOTES = {
    "cpu": (DIRECT,),
    "16bit": (
        DIRECT,
        "the LSE is not claimed: for 16-bit inputs torch's CPU kernel approximates exp,"
        " which leaves an error near 4e-5 in the float32 LSE",
    ),
    "flash": (EXPOSED,),
    "cudnn": (EXPOSED,),
    "sdpa-flash": (PUBLIC,),
    "sdpa-cudnn": (PUBLIC,),
}


def name_of(layout: str, rotation: str, backend: str) -> str:
    """Return the name of a target in this module.

    >>> name_of("zigzag", "alltoall", "cpu"), name_of("zigzag", "alltoall", "sdpa-flash")
    ('zigzag_alltoall', 'zigzag_alltoall_sdpa_flash')
    """
    last = [] if backend == "cpu" else [backend.replace("-", "_")]
    return "_".join([layout, rotation, *last])


def target(layout: str, rotation: str, backend: str = "cpu", **settings: Any) -> TorchTarget:
    """Make a target of one of the rings of torch; ``settings`` are passed to TorchTarget."""
    return TorchTarget(
        f"{__name__}:ring",
        claims(layout, rotation, backend),
        name=f"torch_cp.{name_of(layout, rotation, backend)}",
        device="cpu" if backend in ON_CPU else "cuda",
        options={"rotation": rotation, "backend": backend},
        notes=(
            "torch's ring code is unmodified",
            f"known to run with torch {KNOWN}",
            *NOTES[backend],
        ),
        **settings,
    )


TARGETS: dict[str, Callable[[], TorchTarget]] = {
    name_of(layout, rotation, backend): functools.partial(target, layout, rotation, backend)
    for backend in BACKENDS
    for layout in LAYOUTS
    for rotation in ROTATIONS
}


def on_cpu(name: str) -> bool:
    """Tell whether the target with this name computes on the CPU.

    >>> on_cpu("zigzag_alltoall_16bit"), on_cpu("zigzag_alltoall_sdpa_cudnn")
    (True, False)
    """
    return not name.endswith(("flash", "cudnn"))


def __getattr__(name: str) -> TorchTarget:
    """Make the target with this name when it is read from the module."""
    if name in TARGETS:
        return TARGETS[name]()
    raise AttributeError(f"module {__name__} has no attribute {name}; known are {sorted(TARGETS)}")
