"""The targets of public packages as targets of schemes: the operation 'context_parallel', with meshes and layouts.

They call what the targets without ``-scheme`` call, with the same stand-ins. A mesh gives the degrees and the order of
ranks; the layout of a case must be one that the package distributes.

===================================  ============  ==================================  ===================================
target                               scheme        meshes                              layouts
===================================  ============  ==================================  ===================================
``yunchang-ulysses-scheme``          ``ulysses``   ulysses                             contiguous
``yunchang-usp-scheme``              ``usp``       both orders (``use_ulysses_low``)   contiguous
``yunchang-usp-zigzag-scheme``       ``usp``       both orders                         zigzag, causal only
``yunchang-usp-stripe-scheme``       ``usp``       both orders                         striped, causal only
``diffusers-ulysses-scheme``         ``ulysses``   ulysses                             all, as there is no mask
``diffusers-unified-scheme``         ``usp``       ring x ulysses                      all, as there is no mask
``deepspeed-ulysses-scheme``         ``ulysses``   ulysses                             contiguous
``deepspeed-ulysses-sbhd-scheme``    ``ulysses``   ulysses                             contiguous
``xfuser-long-scheme``               ring, usp     ring; ring x ulysses                contiguous
``xfuser-long-joint-scheme``         ulysses,      ulysses; ring; ring x ulysses       contiguous; forward pass only
                                     joint
``xfuser-usp-*-scheme``              ring,         ring; ulysses; ring x ulysses       contiguous; forward pass only
                                     ulysses, usp
``xfuser-usp-*-joint-scheme``        ``joint``     ring; ulysses; ring x ulysses       forward pass only
``transformer-engine-a2a-scheme``,   ``ulysses``   ulysses                             zigzag; with ``-thd`` zigzag_padded
and its variants
``transformer-engine-a2a-p2p-        ``usp``       ring x ulysses                      the same
scheme``, and its variants
===================================  ============  ==================================  ===================================

In USP with zigzag and stripe, yunchang distributes tokens in its own way (``EXTRACT_FUNC_DICT``); ringspec moves them
before and after the call. No target claims key heads that several ranks need: every one of these packages divides the
key heads among the ranks that exchange heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.target.capabilities import SCHEME_OPERATIONS, Capabilities
from ringspec.conformance.targets import (
    deepspeed_ulysses,
    diffusers_ring,
    transformer_engine_claims,
    transformer_engine_cp,
    xfuser_usp,
    yunchang_usp,
)

__all__ = ["TARGETS", "claims", "target"]

RING_OUTER, ULYSSES_OUTER = "ring x ulysses", "ulysses x ring"


@dataclass(frozen=True)
class Public:
    """A target: what makes it, its claims without schemes, and how it splits attention.

    ``more``: claims that differ, by name, ``schemes`` if the axes of the meshes do not tell them.
    """

    make: Callable[..., TorchTarget]
    claims: Capabilities
    meshes: tuple[str, ...]
    more: dict[str, Any]

    @property
    def schemes(self) -> tuple[str, ...]:
        own: tuple[str, ...] = self.more.get("schemes", ())
        return own or (("ulysses",) if self.meshes == ("ulysses",) else ("usp",))


def yunchang(variant: str, *meshes: str, **more: Any) -> Public:
    make = partial(yunchang_usp.target, variant)
    return Public(make, yunchang_usp.claims(variant), meshes, more)


def diffusers(mode: str, *meshes: str) -> Public:
    return Public(partial(diffusers_ring.target, mode), diffusers_ring.BY_MODE[mode], meshes, {})


def deepspeed(form: str) -> Public:
    make = partial(deepspeed_ulysses.target, form)
    return Public(make, deepspeed_ulysses.claims(form), ("ulysses",), {})


def transformer_engine(variant: str, mesh: str) -> Public:
    one, base = (
        transformer_engine_claims.VARIANTS[variant],
        transformer_engine_claims.claims(variant),
    )
    make = partial(transformer_engine_cp.target, variant)
    features = tuple(name for name in base.features if name != "padding-slots")
    more: dict[str, Any] = {"features": features}
    if one.packed:
        padded = ("padded-documents",) if one.padded else ()
        more = {"layouts": ("zigzag_padded",), "features": (*features, *padded)}
    return Public(make, base, (mesh,), more)


def xfuser(variant: str, schemes: tuple[str, ...] = ("ring", "ulysses", "usp")) -> Public:
    """Return a target of xfuser, with the forward pass alone where text tokens are on all ranks."""
    base = xfuser_usp.claims(variant)
    more: dict[str, Any] = {"schemes": schemes}
    if "joint" in schemes:
        more |= {
            "operations": SCHEME_OPERATIONS[:1],
            "features": (*base.features, "replicated-tokens"),
        }
        if variant.startswith("usp"):
            more["head_ratios"] = (1,)  # USP refuses kv_head_repeat there
    alone = tuple(name for name in ("ring", "ulysses") if {name, "joint"} & set(schemes))
    both = (RING_OUTER,) if {"usp", "joint"} & set(schemes) else ()
    return Public(partial(xfuser_usp.target, variant), base, (*alone, *both), more)


def targets() -> dict[str, Public]:
    """Return the targets by name, without the ending ``-scheme``."""
    both = (RING_OUTER, ULYSSES_OUTER)
    found = {
        "yunchang-ulysses": yunchang("ulysses", "ulysses"),
        "yunchang-usp": yunchang("usp", *both),
        "yunchang-usp-zigzag": yunchang("usp-zigzag", *both, layouts=("zigzag",)),
        "yunchang-usp-stripe": yunchang("usp-stripe", *both, layouts=("striped",)),
        "diffusers-ulysses": diffusers("ulysses", "ulysses"),
        "diffusers-unified": diffusers("unified", RING_OUTER),
        "deepspeed-ulysses": deepspeed("bshd"),
        "deepspeed-ulysses-sbhd": deepspeed("sbhd"),
        # Its backward pass in a ring of one sends to itself, which gloo refuses.
        "xfuser-long": xfuser("long", ("ring", "usp")),
        "xfuser-long-joint": xfuser("long", ("ulysses", "joint")),
    }
    for kernel in ("flash", "flash-combined", "flash-3", "sdpa-flash"):
        found[f"xfuser-usp-{kernel}"] = xfuser(f"usp-{kernel}")
    for kernel in ("flash", "flash-3", "sdpa-flash"):
        found[f"xfuser-usp-{kernel}-joint"] = xfuser(f"usp-{kernel}", ("joint",))
    for variant, one in transformer_engine_claims.VARIANTS.items():
        # Documents without padding have no case; with padding, not every backend takes them.
        if one.mode in ("a2a", "a2a+p2p") and one.packed == one.padded:
            mesh = "ulysses" if one.mode == "a2a" else RING_OUTER
            found[f"transformer-engine-{variant}"] = transformer_engine(variant, mesh)
    return found


TARGETS = targets()


def claims(name: str) -> Capabilities:
    """Return what a target supports; ``name``: a key of TARGETS."""
    one = TARGETS[name]
    passes = (
        SCHEME_OPERATIONS if "ring-backward" in one.claims.operations else SCHEME_OPERATIONS[:1]
    )
    # With a ring, the number of ranks is free; that key heads can be divided is the feature kv-replicas.
    workers = one.claims.workers if one.schemes == ("ulysses",) else None
    own = {"operations": passes, "meshes": one.meshes, "kv_heads_multiple": 1, "workers": workers}
    return replace(one.claims, **{"schemes": one.schemes, **own, **one.more})


def target(name: str, **settings: Any) -> TorchTarget:
    """Make a target; ``name``: a key of TARGETS.

    ``settings`` are passed to TorchTarget. Raises MissingPackageError if a package is missing or too old.
    """
    made = TARGETS[name].make(**settings)
    made.name, made.capabilities = f"{name}-scheme", claims(name)
    return made


def __getattr__(name: str) -> TorchTarget:
    """Make a target when it is read from the module: ``yunchang_usp`` is ``yunchang-usp``."""
    dashed = name.replace("_", "-")
    if dashed in TARGETS:
        return target(dashed)
    raise AttributeError(f"module {__name__} has no attribute {name}; known are {sorted(TARGETS)}")
