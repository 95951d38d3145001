"""The ring of a readout problem, and what belongs to it: steps, positions, and layouts that a kernel may wrongly assume."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.problem.model import Integers
from ringspec.spec.layout import contiguous, striped, zigzag

LAYOUTS = {"contiguous": contiguous, "striped": striped}  # zigzag takes an even number of slots
LATER = "contiguous, one token later"
SHORT = "contiguous, one token a worker fewer"
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Geometry:
    """Who computes what, and the mask.

    ``circulation`` and ``direction`` as in ``ringspec.ring``; ``position`` [W, n] of the slots under ``layout``.
    ``causal`` and ``window`` (left, right) are the mask. ``heads`` query heads, ``group`` of them to a key head.
    ``forward_travels``: 'keys', as in the specification; 'queries' for a kernel whose forward sends these.
    """

    workers: int
    circulation: str
    direction: int
    layout: str
    position: Integers
    causal: bool
    window: Window | None
    heads: int
    group: int
    scale: float
    forward_travels: str = "keys"

    @property
    def slots(self) -> int:
        """Tokens of one worker."""
        return int(self.position.shape[1])

    @property
    def tokens(self) -> int:
        return int(self.position.size)

    @property
    def sees_all(self) -> bool:
        """Tell whether nothing is masked."""
        return not self.causal and self.window is None

    def travels(self, phase: str) -> str:
        """Which side visits in a pass, 'queries' or 'keys'."""
        if phase == "forward":
            return self.forward_travels
        return "queries" if self.circulation == "q" else "keys"

    def steps(self, phase: str) -> Integers:
        """[a, b]: the step in which a pass computes the block of query worker a and key worker b (RING-1)."""
        a, b = np.indices((self.workers, self.workers))
        hops = b - a if self.travels(phase) == "queries" else a - b
        return (self.direction * hops) % self.workers


def positions(layout: str, workers: int, slots: int) -> Integers:
    """Positions [W, n] of the slots under 'contiguous', 'striped' or 'zigzag'."""
    return tables(workers, slots)[layout]


def tables(workers: int, slots: int) -> dict[str, Integers]:
    """Positions [W, n] by name of the layout, with the mistaken ones that kernels are known to use."""
    r, i = np.indices((workers, slots))
    length, half = workers * slots, slots // 2
    found = {name: make(length, workers).table for name, make in LAYOUTS.items()}
    if slots % 2 == 0:
        chunks = zigzag(length, workers).table
        found["zigzag"] = chunks
        found["zigzag with chunks r and W + r"] = np.where(i < half, r, workers + r - 1) * half + i
        found["zigzag with its two chunks exchanged"] = np.roll(chunks, half, axis=1)
    return found | {LATER: r * slots + i + 1, SHORT: r * (slots - 1) + i}


def believed(geometry: Geometry) -> dict[str, Integers]:
    """Positions [W, n] under the layouts that the problem does not have."""
    every = tables(geometry.workers, geometry.slots)
    return {name: x for name, x in every.items() if not np.array_equal(x, geometry.position)}


def dealt_otherwise(geometry: Geometry) -> list[Integers]:
    """For the correct layout and each of :func:`believed`: where the tokens of its slots really are.

    One array per layout: for each slot of that layout, the slot (counted over all workers) where its token
    really is. A layout that is not a permutation of the tokens is replaced by the correct one.
    """
    slot_of = np.argsort(geometry.position.ravel())
    maps = [np.arange(geometry.tokens)]
    for name, table in believed(geometry).items():
        maps.append(maps[0] if name in (LATER, SHORT) else slot_of[table.ravel()])
    return maps


def relations(
    geometry: Geometry, phase: str, side: str, distinct: bool = True
) -> dict[str, Integers]:
    """Return wrong owners [a, b] of the queries ('q') or keys ('k') of a block, by the words that describe them.

    ``distinct``: without those that are the correct owners, or equal to earlier ones.
    """
    W, d = geometry.workers, geometry.direction
    a, b = np.indices((W, W))
    step = geometry.steps(phase)
    own, other = (a, b) if side == "q" else (b, a)
    if (side == "q") == (geometry.travels(phase) == "queries"):
        tables = {
            "the worker that computes": other,
            "the previous step's visitor": (own + d) % W,
            "the next step's visitor": (own - d) % W,
            "the visitor in a ring of the other direction": (other + d * step) % W,
            "the worker whose number is that of the step": step % W,
            "the neighbour in pairs of workers (0 and 1, 2 and 3)": np.minimum(
                other ^ (step % 2), W - 1
            ),
            "worker 0": np.zeros_like(a),
            "the visitor of step 1": (other - d) % W,
        }
    else:
        tables = {
            "the visitor": other,
            "the next worker": (own + 1) % W,
            "the worker before": (own - 1) % W,
            "worker 0": np.zeros_like(a),
        }
    if not distinct:
        return tables
    left: dict[str, Integers] = {}
    for words, table in tables.items():
        same = any(np.array_equal(table, x) for x in (own, *left.values()))
        if not same:
            left[words] = table
    return left
