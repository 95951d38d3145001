"""Capacity by lifetimes: a tile needs space from its first to its last use, as it does for the compiler.

Python keeps a tile until the last reference to it is dropped, which can be much later: in a loop, a variable holds the
tile of the previous round while the next one is allocated. If SBUF or PSUM is full by that measure during a launch,
:class:`Lifetimes` notes the error. When the kernel has ended, :meth:`Lifetimes.settle` allocates the tiles once more by
their uses, and raises the error only if they do not fit by that measure, either.

A load of a kernel input (``dma_copy``) is not a first use: the scheduler is free to reorder independent operations, so
it can load the tile just before the instruction that needs it. It must keep the order inside ``nl.no_reorder()``.

A tile uses bytes only of the partitions in which it is. It starts at partition 0, 32, 64 or 96, so two tiles of 64 partitions, or
four of 32, can have the same bytes of different partitions. The documentation shows such placements (``address=``, and
``num_par_tiles`` of the older allocator), and does not say when the compiler makes them. AWS's kernels need them:
experimental/loss/cross_entropy.py holds two tiles of 64 partitions x 131,070 bytes.

Tiles that a kernel places itself (``address=``) keep their place until Python frees them, and count as if they used all
partitions.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.language.no_reorder.html
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Sequence
from typing import NamedTuple

from nki_impl.sim.errors import CapacityError

PSUM_BANKS, PSUM_BANK_BYTES = 8, 2048


class Clock:
    """The number of instructions that all cores have begun; lifetimes are measured with it."""

    now = 0


class Life(NamedTuple):
    """The first and the last use of a tile in PSUM or SBUF, its bytes per partition, and its partitions."""

    first: int
    last: int
    size: int
    psum: bool
    partitions: int = 128


class Lifetimes:
    """The lifetimes of the tiles of one core that were freed, and the first error about capacity.

    ``deferred``: True during a launch; otherwise an error is raised at once.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.ended: list[tuple[int, int, int, bool, int]] = []
        """The fields of a Life for each tile: a plain tuple takes a third of the time to make."""
        self.error: CapacityError | None = None

    def full(self, error: CapacityError, size: int, limit: int) -> None:
        """Note ``error``; raise it at once outside a launch, or if a single tile of ``size`` exceeds the capacity."""
        if not self.deferred or size > limit:
            raise error
        if self.error is None:
            self.error = error

    def settle(self, sbuf_held: int, psum_held: Sequence[int], sbuf_limit: int | None) -> None:
        """Raise the noted error unless all tiles fit by their uses.

        ``sbuf_held`` and ``psum_held``: bytes of tiles that were not freed; they are counted for the whole launch.
        """
        if self.error is None:
            return
        lives = [Life(*fields) for fields in self.ended]
        sbuf = [life for life in lives if not life.psum]
        psum = [life for life in lives if life.psum]
        if sbuf_limit is not None and not fits_quadrants(sbuf, sbuf_held, sbuf_limit):
            raise self.error
        if not fits_banks(psum, psum_held):
            raise self.error


def collect() -> None:
    """Free tiles that only reference cycles hold."""
    gc.collect()


def fits_quadrants(lives: Sequence[Life], held: int, limit: int) -> bool:
    """Return whether a simple rule fits the tiles into SBUF, each into some of the four quadrants of 32 partitions.

    Two rules are tried: each tile into the quadrants that are used least, or into the last ones that have space.
    ``held``: the bytes per partition that other tiles use all the time. ``limit``: the capacity in bytes per partition.

    >>> whole = [Life(1, 3, 10, False), Life(4, 9, 10, False), Life(3, 4, 5, False)]
    >>> fits_quadrants(whole, 0, 15), fits_quadrants(whole, 0, 14)
    (True, False)
    >>> halves = [Life(1, 3, 10, False, 64), Life(1, 3, 10, False, 40)]
    >>> fits_quadrants(halves, 0, 10), fits_quadrants([*halves, Life(2, 2, 1, False, 8)], 0, 10)
    (True, False)
    """
    return any(_fits(sorted(lives), held, limit, least_used) for least_used in (True, False))


def _fits(lives: Sequence[Life], held: int, limit: int, least_used: bool) -> bool:
    used = [held] * 4
    running: list[tuple[int, tuple[int, ...], int]] = []
    for life in lives:
        while running and running[0][0] < life.first:
            _, freed, size = heapq.heappop(running)
            for quadrant in freed:
                used[quadrant] -= size
        levels = {
            place: max(used[q] for q in place) + life.size for place in _places(life.partitions)
        }
        possible = [place for place, level in levels.items() if level <= limit]
        if not possible:
            return False
        chosen = min(possible, key=levels.__getitem__) if least_used else possible[0]
        for quadrant in chosen:
            used[quadrant] += life.size
        heapq.heappush(running, (life.last, chosen, life.size))
    return True


def _places(partitions: int) -> tuple[tuple[int, ...], ...]:
    """Return the sets of quadrants in which a tile can be, the last one first: larger tiles need the quadrant 0."""
    if partitions > 64:
        return (tuple(range(-(-partitions // 32))),)
    return ((2, 3), (0, 1)) if partitions > 32 else ((3,), (2,), (1,), (0,))


def fits_banks(lives: Sequence[Life], held: Sequence[int]) -> bool:
    """Return whether the tiles fit into the banks of PSUM, each into the first bank with space, or into empty banks.

    >>> full = [PSUM_BANK_BYTES] * 7 + [0]
    >>> fits_banks([Life(1, 2, 2048, True), Life(3, 4, 2048, True)], full)
    True
    >>> fits_banks([Life(1, 3, 2048, True), Life(3, 4, 2048, True)], full)
    False
    """
    banks = list(held)
    running: list[tuple[int, list[int], int]] = []
    for life in sorted(lives):
        while running and running[0][0] < life.first:
            _, freed, share = heapq.heappop(running)
            for bank in freed:
                banks[bank] -= share
        count, share = -(-life.size // PSUM_BANK_BYTES), min(life.size, PSUM_BANK_BYTES)
        if count > 1:
            share = PSUM_BANK_BYTES
        chosen = [bank for bank in range(PSUM_BANKS) if banks[bank] + share <= PSUM_BANK_BYTES]
        if len(chosen) < count:
            return False
        for bank in chosen[:count]:
            banks[bank] += share
        heapq.heappush(running, (life.last, chosen[:count], share))
    return True
