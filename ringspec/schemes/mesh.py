"""The mesh: ranks arranged along named axes, such as a ring of Ulysses groups.

A rank's number is row-major in its coordinates: the last axis varies fastest. A *group* along an axis holds the ranks
that differ in the coordinate of this axis alone; every collective operation takes place inside such groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ringspec.errors import LayoutError, nearest, shown
from ringspec.problem.checks import LARGEST_RING, is_integer


@dataclass(frozen=True)
class Mesh:
    """Ranks along named axes: ``axes`` are pairs (name, size), outermost first.

    >>> mesh = Mesh((("ring", 2), ("ulysses", 3)))
    >>> mesh.ranks, mesh.coordinate(4, "ring"), mesh.coordinate(4, "ulysses")
    (6, 1, 1)
    >>> mesh.groups("ring")
    [(0, 3), (1, 4), (2, 5)]
    """

    axes: tuple[tuple[str, int], ...]

    @cached_property
    def ranks(self) -> int:
        """W, the number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def along(self) -> dict[str, tuple[int, int]]:
        """The size of each axis, and the difference of the numbers of neighbours along it."""
        sizes = [size for _, size in self.axes]
        return {
            name: (size, math.prod(sizes[place + 1 :]))
            for place, (name, size) in enumerate(self.axes)
        }

    def size(self, axis: str) -> int:
        """Return the number of ranks in a group along ``axis``; 1 if the mesh has no such axis."""
        return self.along.get(axis, (1, 1))[0]

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the coordinate of a rank along ``axis``; 0 if the mesh has no such axis."""
        size, stride = self.along.get(axis, (1, 1))
        return rank // stride % size

    def moved(self, rank: int, axis: str, hops: int) -> int:
        """Return the rank that is ``hops`` further along ``axis``, round the ring of this axis."""
        size, stride = self.along.get(axis, (1, 1))
        here = rank // stride % size
        return rank + ((here + hops) % size - here) * stride

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks of the group of ``rank`` along ``axis``, in order of their coordinate."""
        size, stride = self.along.get(axis, (1, 1))
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups along ``axis``, ordered by their first rank."""
        return sorted({self.group(rank, axis) for rank in range(self.ranks)})

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes)


def make_mesh(mesh: Any) -> Mesh:
    """Return a Mesh from a Mesh, a dict {name: size} or pairs (name, size), outermost axis first; LayoutError if malformed.

    >>> make_mesh({"ring": 2, "ulysses": 2}).ranks
    4
    """
    pairs: Any = mesh.axes if isinstance(mesh, Mesh) else mesh
    pairs = pairs.items() if isinstance(pairs, dict) else pairs
    try:
        axes = tuple((name, size) for name, size in pairs)
    except (TypeError, ValueError):
        axes = ()
    named = all(isinstance(name, str) and name for name, _ in axes)
    sized = all(is_integer(size) and 1 <= size <= LARGEST_RING for _, size in axes)
    if not axes or not named or not sized or len({name for name, _ in axes}) != len(axes):
        raise LayoutError(
            "a mesh of distinct named axes with sizes >= 1, outermost first",
            shown(mesh),
            "write mesh={'ring': 2, 'ulysses': 2}",
            code="mesh",
        )
    return Mesh(tuple((name, int(size)) for name, size in axes))


def check_axes(mesh: Mesh, scheme: str, known: Iterable[str]) -> None:
    """Raise LayoutError if the mesh has an axis that the scheme does not use."""
    known = tuple(known)
    for name in mesh.names:
        if name not in known:
            raise LayoutError(
                f"a mesh of the axes {', '.join(known)} for the scheme {scheme!r}",
                f"the axis {name!r}",
                nearest(name, known),
                code="mesh",
            )
