"""The rings, Ulysses and USP of yunchang 0.6.4 or later (long-context-attention), unmodified, on a CPU.

USP divides W = 4 workers into two groups of two: within a group, heads are exchanged for tokens (Ulysses); between
groups, keys and values circulate (ring). The kernels of flash-attn are replaced by :mod:`ringspec.standins`, which
computes in float64 and rounds once, so an error that is larger than roundings explain comes from yunchang.

===========================  ==========================================  =============================================
target                       what is called                              tokens
===========================  ==========================================  =============================================
``yunchang-ring``            ``ring_flash_attn_func``                    contiguous
``yunchang-zigzag``          ``zigzag_ring_flash_attn_func``             zigzag, causal only
``yunchang-stripe``          ``stripe_flash_attn_func``                  striped, causal only
``yunchang-ulysses``         ``UlyssesAttention``                        contiguous
``yunchang-usp``             ``LongContextAttention("basic")``           contiguous
``yunchang-usp-high``        the same, ``use_ulysses_low=False``         as ``EXTRACT_FUNC_DICT`` distributes them
``yunchang-usp-zigzag``      ``LongContextAttention("zigzag")``          as ``EXTRACT_FUNC_DICT`` distributes them
``yunchang-usp-stripe``      ``LongContextAttention("strip")``           as ``EXTRACT_FUNC_DICT`` distributes them
``yunchang-usp-torch-math``  ``LongContextAttention("basic")`` with      contiguous; forward pass only
                             ``AttnType.TORCH_MATH``
``yunchang-ulysses-torch-``  ``UlyssesAttention`` with                   contiguous; forward pass only
``flash``                    ``AttnType.TORCH_FLASH``
===========================  ==========================================  =============================================

Results of 0.6.4, which the program tests/conformance/targets/by_hand_yunchang.py confirms without ringspec:

- ``yunchang-ring``: for float16 inputs, dq has the precision of bfloat16, because ``ring_flash_attn_backward`` returns
  ``dq.to(torch.bfloat16)`` for every dtype. USP calls the same function.
- ``yunchang-usp-high``: causal results are wrong. ``basic_extract_local`` gives rank r the chunk r, but in this order
  the ring's blocks are then chunks 0 and 2, and chunks 1 and 3, so its causal mask hides the wrong keys.
- USP with stripes and ``use_ulysses_low=False`` (``yunchang-usp-stripe-scheme`` of :mod:`.public_schemes`): causal
  results are wrong, for the same reason: ``stripe_extract_local`` gives tokens by rank, not by coordinate. Zigzag is
  right in both orders, because ``zigzag_extract_local`` follows the coordinates.
- Rings and USP: results with a window are wrong. ``window_size`` is accepted, but goes to each block without the block's
  distance, so a query sees keys of earlier blocks that are outside of its window, and misses others.
- ``yunchang-usp-torch-math``: o is wrong. This kernel returns zeros instead of lse, so the ring merges blocks with
  wrong weights.
- ``yunchang-ulysses-torch-flash``: o is wrong. After the exchange of heads, each rank has all tokens of its heads, but
  this kernel is ``ring_pytorch_attn_func`` without a group: a ring of all ranks, whose keys are of other heads.

Not claimed: windows with kernels of torch, which ignore them; dropout and ALiBi; one worker, because the rings send their gradients to themselves, which gloo refuses; soft caps with
kernels of torch, which ignore them. No targets: USP with ``TORCH_FLASH``, whose lse is rounded
to the input dtype, and the values of AttnType that need kernels without a CPU version.

Source: https://github.com/feifeibear/long-context-attention, yunchang 0.6.4 (PyPI).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_names, require

PACKAGE, FLOOR, KNOWN = "yunchang", "0.6.4", "0.6.4"
COMMAND = f"pip install torch '{PACKAGE}>={FLOOR}'"
ULYSSES_DEGREE = 2  # of USP, whose ring has the degree 2 as well
USP_WORKERS = 4
Degrees = tuple[int, int, bool]


@dataclass(frozen=True)
class Variant:
    """What a target calls: a function or class of yunchang, and what it takes.

    ``name``: in the module yunchang. ``ring``: the ring of LongContextAttention. ``low``: whether neighbouring ranks
    exchange heads (``use_ulysses_low``). ``kernel``: a value of AttnType.
    """

    name: str
    layout: str = "contiguous"
    ring: str = "basic"
    low: bool = True
    kernel: str = "fa"
    only_causal: bool = False

    @property
    def usp(self) -> bool:
        return self.name == "LongContextAttention"

    @property
    def moves_tokens(self) -> bool:
        """Tell whether yunchang distributes the tokens otherwise than ringspec."""
        return self.usp and (self.ring != "basic" or not self.low)


USP = "LongContextAttention"
VARIANTS = {
    "ring": Variant("ring_flash_attn_func"),
    "zigzag": Variant("zigzag_ring_flash_attn_func", "zigzag", only_causal=True),
    "stripe": Variant("stripe_flash_attn_func", "striped", only_causal=True),
    "ulysses": Variant("UlyssesAttention"),
    "ulysses-torch-flash": Variant("UlyssesAttention", kernel="torch_flash"),
    "usp": Variant(USP),
    "usp-high": Variant(USP, low=False),
    "usp-zigzag": Variant(USP, ring="zigzag", only_causal=True),
    "usp-stripe": Variant(USP, ring="strip", only_causal=True),
    "usp-torch-math": Variant(USP, kernel="torch_math"),
}

NOTES = (
    "yunchang is unmodified",
    f"known to run with {PACKAGE} {KNOWN}",
)
MOVED = (
    "ringspec moves tokens between ranks before and after the call, as yunchang's EXTRACT_FUNC_DICT"
    " distributes them"
)


def recipe(variant: Variant, base: str, narrow: str) -> dict[str, str | int]:
    """Return where a variant rounds over the stand-in, for inputs in the format ``narrow``.

    A ring's block returns o, dq, dk and dv in the input dtype; the ring adds them in float32. Ulysses has one block. P
    and dS, which flash-attn's kernel rounds to the input dtype, are exact in the stand-in. No recipe fits USP: a block
    of its ring holds the tokens of two workers, and a recipe rounds for the block of each worker.
    """
    exact: dict[str, str | int] = {"base": base, "p": "float32", "ds": "float32"}
    if variant.name == "UlyssesAttention":
        return exact
    return exact | {
        "merge_order": "normalised",
        "block_o": narrow,
        "block_gradients": narrow,
    }


def claims(name: str) -> Capabilities:
    """Return what a variant supports."""
    one = VARIANTS[name]
    ulysses, flash = one.name == "UlyssesAttention", one.kernel == "fa"
    recipes = {
        "bfloat16": recipe(one, "bf16", "bfloat16"),
        "float16": recipe(one, "fp16", "float16"),
    }
    return Capabilities(
        operations=("ring-forward", "ring-backward") if flash else ("ring-forward",),
        layouts=(one.layout,),
        circulations=("gather",) if ulysses or one.usp else ("kv",),
        directions=(1,),
        workers=(USP_WORKERS,) if one.usp else (2, 3, 4),
        masks=("causal", "window") if flash else ("causal",),
        only_causal=one.only_causal,
        features=("scale", "softcap") if flash else ("scale",),
        formats=("bfloat16", "float16"),
        # The kernels of torch would take other numbers of heads if it passed enable_gqa.
        head_ratios=None if flash else (1,),
        kv_heads_multiple="workers" if ulysses else ULYSSES_DEGREE if one.usp else 1,
        head_dims=tuple(range(8, 257, 8)),
        value_dim_equals_head_dim=True,
        tokens_multiple=2 if one.only_causal and not one.usp else 1,
        axes="BSHD",
        lse="hidden" if ulysses or one.usp else "natural",
        recipe=recipes if flash and not one.usp else None,
    )


def attention(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, variant: str) -> Any:
    """Compute o [B, n, H, D], and lse [B, H, n] if the variant is a ring, of one worker."""
    import yunchang
    from yunchang.kernels import AttnType

    one = VARIANTS[variant]
    check_names(yunchang, (one.name, "EXTRACT_FUNC_DICT", "set_seq_parallel_pg"), PACKAGE, KNOWN)
    chosen: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal}
    if one.kernel == "fa":
        chosen["softcap"] = call.terms.get("softcap", 0.0)
        left, right = call.terms.get("window") or (None, None)
        chosen["window_size"] = tuple(-1 if side is None else side for side in (left, right))
    if one.name == "UlyssesAttention":
        kernel = AttnType.from_string(one.kernel)
        return yunchang.UlyssesAttention(group, attn_type=kernel)(q, k, v, **chosen)
    if not one.usp:
        function = getattr(yunchang, one.name)
        o, lse, _ = function(q, k, v, return_attn_probs=True, group=group, **chosen)
        return o, lse
    degrees = degrees_of(one, call)
    layer = usp_layer(variant, degrees, call.rank, call.workers)
    if not one.moves_tokens:
        return layer(q, k, v, **chosen)
    tokens = tokens_of_ranks(one.ring, degrees, group, call, q)
    held = tokens_of_call(call, group, q)
    there = [held.index(token) for token in tokens]
    back = [tokens.index(token) for token in held]
    given = [moved(x, there, group, call) for x in (q, k, v)]
    return moved(layer(*given, **chosen), back, group, call)


def degrees_of(one: Variant, call: LocalCall) -> Degrees:
    """Return the degrees of Ulysses and of the ring, and whether neighbouring ranks exchange heads (``use_ulysses_low``)."""
    if not call.scheme:
        return ULYSSES_DEGREE, call.workers // ULYSSES_DEGREE, one.low
    sizes = dict(call.mesh)
    return sizes["ulysses"], sizes["ring"], call.mesh[-1][0] == "ulysses"


@functools.cache
def process_groups(degrees: Degrees, rank: int, workers: int) -> tuple[Any, Any]:
    """Return yunchang's groups of this rank, which exchanges heads in one and has its ring in the other."""
    import yunchang
    from yunchang.globals import PROCESS_GROUP

    ulysses, ring, low = degrees
    yunchang.set_seq_parallel_pg(ulysses, ring, rank, workers, use_ulysses_low=low)
    return PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG


@functools.cache
def usp_layer(variant: str, degrees: Degrees, rank: int, workers: int) -> Any:
    """Return yunchang's layer, which keeps the groups that are chosen when it is made."""
    import yunchang
    from yunchang.kernels import AttnType

    one = VARIANTS[variant]
    choose_groups(degrees, rank, workers)
    kernel = AttnType.from_string(one.kernel)
    return yunchang.LongContextAttention(ring_impl_type=one.ring, attn_type=kernel)


def choose_groups(degrees: Degrees, rank: int, workers: int) -> None:
    """Make the groups of these degrees the current ones of yunchang."""
    from yunchang.globals import PROCESS_GROUP

    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = process_groups(degrees, rank, workers)


def tokens_of_ranks(ring: str, degrees: Degrees, group: Any, call: LocalCall, q: Any) -> list[int]:
    """Return the tokens that yunchang gives to the ranks of q [B, n, H, D]: n of rank 0, n of rank 1, and so on."""
    import torch
    import yunchang

    n = q.shape[1]
    numbers = torch.arange(n * call.workers, device=q.device)[None, :, None]
    named = {"rd": degrees[1], "ud": degrees[0]}
    choose_groups(degrees, call.rank, call.workers)
    extract = yunchang.EXTRACT_FUNC_DICT[ring]
    own = extract(numbers, call.rank, world_size=call.workers, **named)
    return gathered(own.reshape(n), group, call)


def tokens_of_call(call: LocalCall, group: Any, q: Any) -> list[int]:
    """Return the tokens that the ranks have in a call, in the same order."""
    import torch

    n = q.shape[1]
    first = call.rank * n
    own = call.index_q if call.scheme else torch.arange(first, first + n)
    return gathered(own.to(q.device), group, call)


def gathered(own: Any, group: Any, call: LocalCall) -> list[int]:
    import torch
    import torch.distributed as dist

    every = [torch.empty_like(own) for _ in range(call.workers)]
    dist.all_gather(every, own.contiguous(), group=group)
    return torch.cat(every).tolist()


def moved(x: Any, order: list[int], group: Any, call: LocalCall) -> Any:
    """Return this rank's part of the sequence ``order``, differentiable.

    ``x``: this rank's part [B, n, H, D] of the slots 0, 1, 2 ... of all ranks; ``order`` is a permutation of these slots.
    """
    return move_function().apply(x, order, group, call.rank, call.workers)


@functools.cache
def move_function() -> Any:
    import torch
    import torch.distributed as dist

    def part(x: Any, order: list[int], group: Any, rank: int, workers: int) -> Any:
        every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(workers)]
        dist.all_gather(every, x.contiguous(), group=group)
        n = x.shape[1]
        return torch.cat(every, dim=1)[:, order[rank * n : (rank + 1) * n]].contiguous()

    class Move(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, order: list[int], *place: Any) -> Any:
            ctx.order, ctx.place = order, place
            return part(x, order, *place)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            back = [at for _, at in sorted((token, at) for at, token in enumerate(ctx.order))]
            return part(gradient, back, *ctx.place), None, None, None, None

    return Move


def target(variant: str, **settings: Any) -> TorchTarget:
    """Make the target of a variant.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(("torch", PACKAGE), PACKAGE, FLOOR, COMMAND)
    kernels = ("flash_attn", "aten_flash")[: 2 if VARIANTS[variant].kernel == "torch_flash" else 1]
    # The first call imports the package.
    chosen: dict[str, Any] = {"timeout": 180.0, "standins": kernels, **settings}
    return TorchTarget(
        f"{__name__}:attention",
        claims(variant),
        name=f"yunchang-{variant}",
        options={"variant": variant},
        notes=(*NOTES, MOVED) if VARIANTS[variant].moves_tokens else NOTES,
        packages=("torch", PACKAGE),
        **chosen,
    )


def __getattr__(name: str) -> TorchTarget:
    """Make the target of a variant when it is read from the module: ``usp_zigzag`` is ``usp-zigzag``."""
    variant = name.replace("_", "-")
    if variant in VARIANTS:
        return target(variant)
    raise AttributeError(f"module {__name__} has no attribute {name}; known are {sorted(VARIANTS)}")
