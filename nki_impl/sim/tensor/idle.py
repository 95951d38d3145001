"""Lanes that hold no data: elements that an instruction computes although nobody wrote its operands there.

An instruction works on a rectangle of partitions x free elements, and its partitions never mix. If the last of several
tiles has fewer partitions than the others, a kernel may nevertheless run one instruction on the whole rectangle, as
AWS's attention_tkg and moe_cte do. The documentation only says that the content of memory that was never written is
undefined (the official simulator fills it with NaN), so the results in the idle lanes are undefined, and the others are
not affected. The simulator therefore marks results of unwritten elements as unwritten, and reports an error when
something reads them that mixes partitions or leaves the chip: a matrix product, a DMA, a collective or an output.

An element is idle only if other partitions have been written at its position. A position that no partition has written
is a forgotten write, and reading it is an error at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.tensor.access import check_read, keep_holes, unwritten
from nki_impl.sim.tensor.views import NkiTensor


class Idle:
    """The elements of one instruction, as (partitions, free elements), whose operands were never written."""

    __slots__ = ("holes",)

    def __init__(self) -> None:
        self.holes: NDArray[np.bool_] | None = None

    def admit(self, tensor: NkiTensor, operand: str) -> None:
        """Note the unwritten elements of an on-chip operand; raise UninitializedError if no partition wrote one.

        A (P,1) operand is used for all elements of its partition.
        """
        if not tensor._storage.missing:
            return
        hole = unwritten(tensor)
        if hole is None:
            return
        hole = hole.reshape(hole.shape[0], -1)
        if hole.all(axis=0).any():
            check_read(tensor, operand)
        self.holes = hole if self.holes is None else np.asarray(self.holes | hole)

    def reduce(self, length: int) -> None:
        """Let each run of ``length`` free elements become one; it is unwritten if any of them was."""
        if self.holes is not None:
            runs = self.holes.reshape(self.holes.shape[0], -1, length)
            self.holes = np.asarray(runs.any(axis=-1))

    def used(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the ``values`` that were computed from written elements."""
        if self.holes is None:
            return values
        return values[~np.broadcast_to(self.holes, values.shape)]

    def mark(self, dst: NkiTensor) -> None:
        """Mark the results in ``dst``, which has just been written, as unwritten where an operand was."""
        if self.holes is not None:
            free = dst.size // dst.shape[0]
            keep_holes(dst, np.broadcast_to(self.holes, (dst.shape[0], free)).reshape(dst.shape))
