"""The single faults that are tried: every mistake that a kernel may make, in either pass.

A backward pass may consist of two KERNELS, one for dq, and one for dk and dv; each may make a mistake alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from ringspec.conformance.readout.backward_kinds import backward_kinds
from ringspec.conformance.readout.block_kinds import block_kinds
from ringspec.conformance.readout.choices import (
    KERNELS,
    OF_ALL,
)
from ringspec.conformance.readout.forward_kinds import forward_kinds
from ringspec.conformance.readout.geometry import Geometry
from ringspec.conformance.readout.kinds import Fault, Kind
from ringspec.conformance.readout.masks import masks_of, of_first_sizes
from ringspec.conformance.readout.places import place_named
from ringspec.conformance.readout.visible import Mask

# Choices for what both kernels of a backward pass compute: p, dp and dS.
OF_BOTH = {
    "q", "k", "v", "dy", "mask", "centred", "hidden_score", "times", "count", "lse", "lse_of", "delta", "delta_dy", "delta_o",
    "delta_times", "ds_times", "dlse_of", "dlse_times", "bias_q", "bias_k", "bias_times", "drop_q", "drop_k", "drop",
    "drop_times", "drop_ds", "dp_of_k",
}  # fmt: skip


def kinds_of(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool = True
) -> list[Kind]:
    """Return every kind of mistake in a pass.

    ``distinct``: leave out kinds that have the same effect in this ring as a simpler one.
    """
    return list(made_kinds(geometry, phase, masks, distinct))


def made_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """Yield the kinds of :func:`kinds_of`."""
    of_pass = forward_kinds if phase == "forward" else backward_kinds
    kinds = []
    blocks = block_kinds(geometry, phase, masks, distinct)
    for kind in chain(blocks, of_pass(geometry, masks, distinct)):
        kinds.append(kind)
        yield kind
    for kind in kinds if phase == "backward" else ():
        if both_kernels(kind):
            yield from in_one_kernel(kind)


class EveryKind:
    """Every kind of mistake in a pass, also those that have the same effect in this ring as a simpler one.

    They are made only as far as one is looked for: most of them are needed in few rings.
    """

    def __init__(self, geometry: Geometry, phase: str) -> None:
        self.left = made_kinds(geometry, phase, masks_of(geometry), False)
        self.made: list[Kind] = []

    def __iter__(self) -> Iterator[Kind]:
        yield from self.made
        for kind in self.left:
            self.made.append(kind)
            yield kind


@lru_cache(maxsize=48)
def every_kind(geometry: Geometry, phase: str) -> EveryKind:
    return EveryKind(geometry, phase)


def both_kernels(kind: Kind) -> bool:
    """Return whether one of KERNELS can make this mistake without the other.

    Factors on dS and on a block are excluded: in a single kernel they are factors on its gradients, which have their
    own kinds.
    """
    slots = kind.names
    alone = slots <= {"ds_times", "count"} or slots & {*OF_ALL, "exchanged"}
    return bool(slots & OF_BOTH) and not alone


def in_one_kernel(kind: Kind) -> Iterator[Kind]:
    """Yield the mistake as made only by the kernel of dq, then as made only by the kernel of dk and dv."""
    for kernel in KERNELS:
        words = f"{kind.words} (for {kernel} alone)"
        yield dataclasses.replace(kind, words=words, cost=kind.cost + 0.4, only=kernel)


def fault_named(
    geometry: Geometry,
    masks: Sequence[Mask],
    name: tuple[str, str, str],
    kinds: Iterable[Kind] | None = None,
) -> Fault | None:
    """Return the fault with this ``Fault.name`` in the ring of ``geometry`` and ``masks``; None if it has no such fault.

    In this ring, the fault may have the same effect as another one, or none. ``kinds``: the kinds of this pass, if the
    caller has them already; they must include those that have the same effect as a simpler one.
    """
    phase, words, where = name
    words = of_first_sizes(words)
    kinds = every_kind(geometry, phase) if kinds is None else kinds
    kind = next((one for one in kinds if one.words == words), None)
    if kind is None:
        return None
    place = place_named(geometry, phase, masks[0].pattern, where, kind.of_workers)
    return None if place is None else Fault(phase, kind, place)
