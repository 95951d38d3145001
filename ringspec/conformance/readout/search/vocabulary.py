"""The single faults that are tried: every mistake that a kernel may make, in either pass.

A backward pass may consist of two KERNELS, one for dq, and one for dk and dv; each may make a mistake alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from ringspec.conformance.readout.faults.backward_kinds import backward_parts
from ringspec.conformance.readout.faults.block_kinds import block_parts
from ringspec.conformance.readout.faults.choices import (
    KERNELS,
    OF_ALL,
)
from ringspec.conformance.readout.faults.forward_kinds import forward_parts
from ringspec.conformance.readout.faults.kinds import Fault, Kind
from ringspec.conformance.readout.faults.masks import masks_of, of_first_sizes
from ringspec.conformance.readout.faults.places import place_named
from ringspec.conformance.readout.faults.tile_places import IN_TILES, tile_place_named
from ringspec.conformance.readout.faults.visible import Mask
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.conformance.readout.search.read_factors import kinds_of_number, number_in

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
    kinds = []
    for kind in chain(*parts_of(geometry, phase, masks, distinct)):
        kinds.append(kind)
        yield kind
    for kind in kinds if phase == "backward" else ():
        if both_kernels(kind):
            yield from in_one_kernel(kind)


def parts_of(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> list[Iterator[Kind]]:
    """Return the kinds of a pass in parts: those that either pass can have, then its own; all of both kernels, if it has two."""
    of_pass = forward_parts if phase == "forward" else backward_parts
    return [*block_parts(geometry, phase, masks, distinct), *of_pass(geometry, masks, distinct)]


class Made:
    """Kinds that are made only as far as one is looked for: most of them are needed in few rings.

    ``name``: that of the function that makes them.
    """

    def __init__(self, left: Iterator[Kind]) -> None:
        self.left, self.made = left, list[Kind]()
        self.name = getattr(left, "__qualname__", "")

    def __iter__(self) -> Iterator[Kind]:
        yield from self.made
        for kind in self.left:
            self.made.append(kind)
            yield kind


# The name of the function that made a kind, by pass and words. It is the same in every ring, so no other makes it.
MADE_BY: dict[tuple[str, str], str] = {}


class EveryKind:
    """Every kind of mistake in a pass.

    ``distinct``: without those that have the same effect in this ring as a simpler one.
    """

    def __init__(self, geometry: Geometry, phase: str, distinct: bool = False) -> None:
        self.phase = phase
        self.parts = [Made(one) for one in parts_of(geometry, phase, masks_of(geometry), distinct)]

    def of_kernel(self, only: str) -> Iterator[Kind]:
        """Yield the kinds that only one of KERNELS has; '': those of all kernels."""
        for kind in chain(*self.parts):
            if not only:
                yield kind
            elif both_kernels(kind):
                yield in_kernel(kind, only)

    def named(self, words: str) -> Kind | None:
        """Return the kind with these words; None if there is none."""
        for kernel in KERNELS if self.phase == "backward" else ():
            both = words.removesuffix(alone(kernel))
            kind = self.named(both) if both != words else None
            if kind is not None and both_kernels(kind):
                return in_kernel(kind, kernel)
        maker = MADE_BY.get((self.phase, words))
        for part in (one for one in self.parts if maker in (None, one.name)):
            kind = next((one for one in part if one.words == words), None)
            if kind is not None:
                MADE_BY[self.phase, words] = part.name
                return kind
        return None


@lru_cache(maxsize=96)
def every_kind(geometry: Geometry, phase: str, distinct: bool = False) -> EveryKind:
    return EveryKind(geometry, phase, distinct)


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
        yield in_kernel(kind, kernel)


def in_kernel(kind: Kind, kernel: str) -> Kind:
    words = f"{kind.words}{alone(kernel)}"
    return dataclasses.replace(kind, words=words, cost=kind.cost + 0.4, only=kernel)


def with_number(phase: str, words: str, value: float) -> list[Kind]:
    """Return the kinds of fault that are a factor read from the results, told in these ``words``, for each kernel alone, too."""
    kinds = list(kinds_of_number(phase, words, value))
    of_backward = kinds if phase == "backward" else []
    return [*kinds, *chain(*(in_one_kernel(x) for x in of_backward if both_kernels(x)))]


def alone(kernel: str) -> str:
    """Return the end of the words of a mistake that only one kernel makes."""
    return f" (for {kernel} alone)"


def fault_named(
    geometry: Geometry, masks: Sequence[Mask], name: tuple[str, str, str], distinct: bool = False
) -> Fault | None:
    """Return the fault with this ``Fault.name`` in the ring of ``geometry`` and ``masks``; None if it has no such fault.

    In this ring, the fault may have the same effect as another one, or none. ``distinct``: only a kind that has not the
    same effect as a simpler one.
    """
    phase, given, where = name
    words = of_first_sizes(given)
    number = number_in(words)
    if number is not None:
        kind = next((x for x in with_number(phase, *number) if x.words == words), None)
    else:
        every = every_kind(geometry, phase, distinct)
        # A kind that stands for those of other sizes names them all.
        kind = (every.named(given) if distinct else None) or every.named(words)
    if kind is None:
        return None
    if where.startswith(IN_TILES):
        place = tile_place_named(geometry, masks[0].pattern, where)
    else:
        place = place_named(geometry, phase, masks[0].pattern, where, kind.of_workers)
    return None if place is None else Fault(phase, kind, place)
