"""Partial results for tests of merges: random parts of W workers, some rows empty, zigzag or contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspec.formats import store
from ringspec.merges import Part

B, S, H, D = 2, 12, 3, 7  # odd sizes, so that a vector body and its tail both occur


@dataclass(frozen=True)
class Case:
    """The parts that worker ``rank`` of ``workers`` merges, in the order of its steps.

    ``zigzag``: after part ``rank``, parts cover the second half of the rows. ``empty``: share of rows of a part that saw no
    key. ``spread``: standard deviation of lse around ``level``.
    """

    workers: int
    rank: int
    zigzag: bool
    format: str
    empty: float = 0.0
    spread: float = 1.0
    level: float = 3.0

    def __str__(self) -> str:
        layout = "zigzag" if self.zigzag else "contiguous"
        return f"W{self.workers}r{self.rank}-{layout}-{self.format}-empty{self.empty}-spread{self.spread}"

    def parts(self, axes: str = "BSH", seed: int = 0) -> list[Part]:
        """Return the parts, o [B, S, H, D] ("BSH") or [B, H, S, D] ("BHS").

        The memory of lse is that of a [B, H, S] array, as kernels return it, whatever the axes.
        """
        random = np.random.default_rng([seed, self.workers, self.rank])
        return [
            self.part(random, axes, half=self.zigzag and step > self.rank)
            for step in range(self.workers)
        ]

    def part(self, random: np.random.Generator, axes: str, half: bool) -> Part:
        rows = S // 2 if half else S
        lse = random.normal(self.level, self.spread, (B, H, rows)).astype(np.float32)
        o = random.normal(0, 1, (B, rows, H, D) if axes == "BSH" else (B, H, rows, D))
        lse[random.random(lse.shape) < self.empty] = -np.inf
        moved = np.swapaxes(lse, 1, 2) if axes == "BSH" else lse
        o = np.where(np.isneginf(moved)[..., None], 0.0, o)
        second = slice(S // 2, None)
        covered = (slice(None), second) if axes == "BSH" else (slice(None), slice(None), second)
        return Part(store(o, self.format), moved, covered if half else None)


def cases(zigzag: tuple[bool, ...] = (False, True)) -> list[Case]:
    """Return W = 1 to 8 with a rank in the middle, both layouts, both formats, with and without empty rows."""
    found = []
    for workers in range(1, 9):
        for rank in sorted({0, workers // 2, workers - 1}):
            for layout in zigzag:
                for fmt in ("float32", "bfloat16"):
                    empty = 0.3 if (workers + rank) % 2 else 0.0
                    spread = 12.0 if rank % 2 else 1.0
                    found.append(Case(workers, rank, layout, fmt, empty, spread))
    return found


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Tell whether two arrays have the same dtype, shape and bits; every NaN equals every NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    return bool(equal_bits(got, want).all())


def equal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Tell element by element whether two arrays of one dtype and shape are equal; every NaN equals every NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    pattern = f"u{a.dtype.itemsize}"
    x, y = (np.ascontiguousarray(one).view(pattern) for one in (a, b))
    return (x == y) | (np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)))
