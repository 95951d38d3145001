"""The counters of a run: instructions and elements per engine, FLOPs, bytes, hops, memory.

Counts are facts about the program; :mod:`nki_impl.sim.machine.profile` estimates times from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nki_impl.sim.machine.core import Core


@dataclass(frozen=True)
class Row:
    """The counts of one kind of instruction: calls, elements written, FLOPs, bytes moved."""

    engine: str
    operation: str
    instructions: int
    elements: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class Counters:
    """The counts of one rank (all its cores), or the sum over several ranks.

    ``rows`` are sorted by engine and operation. ``sbuf_high`` and ``psum_high`` are the largest numbers of bytes per
    partition that any core had in use at any time. ``hops`` is the number of transfers by collectives.
    """

    rows: tuple[Row, ...]
    instructions: int
    hops: int
    sbuf_high: int
    psum_high: int

    def of_engine(self, engine: str) -> Row:
        """Return the sum over all operations of ``engine``."""
        rows = [row for row in self.rows if row.engine == engine]
        return Row(
            engine,
            "*",
            sum(row.instructions for row in rows),
            sum(row.elements for row in rows),
            sum(row.flops for row in rows),
            sum(row.bytes for row in rows),
        )

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that ran an instruction, in alphabetical order."""
        return tuple(sorted({row.engine for row in self.rows}))

    @property
    def matmul_flops(self) -> int:
        """FLOPs of the tensor engine's matrix products (2 K M N each)."""
        return sum(row.flops for row in self.rows if row.operation == "nc_matmul")

    @property
    def dma_bytes(self) -> int:
        """Bytes that DMA transfers wrote; collectives are not included."""
        return self.of_engine("dma").bytes

    @property
    def collective_bytes(self) -> int:
        """Bytes that collectives sent to other ranks."""
        return self.of_engine("collective").bytes


def count_cores(cores: Sequence[Core]) -> Counters:
    """Return the sum of the counts of ``cores``; for memory, return the largest amount that any core used."""
    sums: dict[tuple[str, str], list[int]] = {}
    for core in cores:
        for key, tally in core.tallies.items():
            numbers = sums.setdefault(key, [0, 0, 0, 0])
            numbers[0] += tally.instructions
            numbers[1] += tally.elements
            numbers[2] += tally.flops
            numbers[3] += tally.bytes
    return Counters(
        tuple(Row(*key, *sums[key]) for key in sorted(sums)),
        sum(core.index for core in cores),
        sum(core.worker.hops for core in cores if core.worker is not None),
        max(core.memory.sbuf_high for core in cores),
        max(core.memory.psum_high for core in cores),
    )


def add_up(parts: Sequence[Counters]) -> Counters:
    """Return the sum of the counts of several ranks; for memory, return the largest amount that any rank used."""
    sums: dict[tuple[str, str], list[int]] = {}
    for part in parts:
        for row in part.rows:
            numbers = sums.setdefault((row.engine, row.operation), [0, 0, 0, 0])
            for index, value in enumerate((row.instructions, row.elements, row.flops, row.bytes)):
                numbers[index] += value
    return Counters(
        tuple(Row(*key, *sums[key]) for key in sorted(sums)),
        sum(part.instructions for part in parts),
        sum(part.hops for part in parts),
        max(part.sbuf_high for part in parts),
        max(part.psum_high for part in parts),
    )
