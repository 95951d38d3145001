"""The enumerations of ``nki.isa``.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.isa.html
"""

from __future__ import annotations

import functools
from enum import Enum


class engine(Enum):
    """Engines of a core. ``unknown`` lets the compiler choose."""

    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    """What an instruction does with the reduce registers of its engine: reset, continue, load, or leave them alone."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    """What generates the descriptors of a DMA: unknown (the compiler chooses), software, hardware, none."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    """What a DMA does with a dynamic index outside the tensor: raise an error, or skip that element."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    """Performance mode of nc_matmul; double_row packs two rows of float8."""

    none = "none"
    double_row = "double_row"


@functools.total_ordering
class nc_version(Enum):
    """Generation of the core: gen2 (trn1), gen3 (trn2), gen4 (trn3). A later generation compares as greater.

    >>> nc_version.gen3 >= nc_version.gen2
    True
    """

    gen2 = 2
    gen3 = 3
    gen4 = 4

    def __lt__(self, other: nc_version) -> bool:
        return self.value < other.value


class dma_engine(Enum):
    """The DMA that sendrecv uses."""

    dma = 1
    gpsimd_dma = 2


tensor_engine = engine.tensor
vector_engine = engine.vector
scalar_engine = engine.scalar
gpsimd_engine = engine.gpsimd
unknown_engine = engine.unknown

# Instructions test the members by these names: to look up a member of an Enum takes 20 times as long in Python 3.11.
IDLE, RESET, REDUCE = reduce_cmd.idle, reduce_cmd.reset, reduce_cmd.reduce
RESET_REDUCE, LOAD_REDUCE = reduce_cmd.reset_reduce, reduce_cmd.load_reduce
PLAIN_MATMUL = matmul_perf_mode.none
