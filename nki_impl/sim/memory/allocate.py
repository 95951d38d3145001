"""Allocation of tensors on the current core."""

from __future__ import annotations

from collections.abc import Sequence

from nki_impl.sim.errors import DtypeError, ShapeError
from nki_impl.sim.machine.core import current
from nki_impl.sim.memory.storage import (
    PSUM,
    PSUM_BANK_BYTES,
    SBUF,
    SHARED_HBM,
    MemoryRegion,
    Storage,
    check_shape,
)
from nki_impl.sim.tensor.dtypes import as_dtype
from nki_impl.sim.tensor.overlap import join_site
from nki_impl.sim.tensor.views import NkiTensor


def as_region(buffer: object) -> MemoryRegion:
    """Return the memory region that ``buffer`` means: a MemoryRegion, the name of a region, or None for SBUF."""
    if isinstance(buffer, MemoryRegion):
        return buffer
    if buffer is None:
        return SBUF
    if buffer == "hbm":
        return MemoryRegion.private_hbm
    try:
        return MemoryRegion(buffer)
    except ValueError:
        raise DtypeError(
            "buffer",
            "nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm",
            repr(buffer),
            "use one of them",
        ) from None


def new_tensor(
    shape: Sequence[int],
    dtype: object,
    buffer: object = SBUF,
    name: str | None = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """Allocate a tensor and return it; its elements count as not written. The device loop around it records it.

    Raises :class:`~nki_impl.sim.errors.CapacityError` if SBUF or PSUM is full, and the errors of :func:`check_shape`.
    """
    if isinstance(shape, int):
        raise ShapeError("shape", "a tuple of lengths", shape, "write (P, F)")
    lengths = tuple(shape)
    kind = as_dtype(dtype)
    region = as_region(buffer)
    check_shape(lengths, region)
    core = current()
    label = name or ""
    if region is SHARED_HBM:
        storage = core.shared.allocate(core.core, lengths, kind, label, core.rank)
    else:
        storage = Storage(lengths, kind, region, label, (core.rank, core.core))
    if storage.on_chip:
        if address is not None:
            _check_address(address, storage)
        core.memory.charge(storage, address)
        if address is not None:
            sites = core.memory.psum_sites if region is PSUM else core.memory.sbuf_sites
            join_site(storage, sites)
    tensor = NkiTensor(lengths, kind, storage, region, label)
    if core.loops is not None:
        core.loops.allocated(tensor)
    return tensor


def _check_address(address: tuple[int, int], storage: Storage) -> None:
    partition, byte = address
    if partition % 32 or partition + storage.shape[0] > 128 or byte < 0:
        raise ShapeError(
            "address",
            "(start partition 0, 32, 64 or 96, byte) with all partitions below 128",
            f"{address} for {storage.shape[0]} partitions",
            "place it at such a partition",
        )
    if storage.buffer is PSUM and storage.partition_bytes <= PSUM_BANK_BYTES:
        if byte % PSUM_BANK_BYTES + storage.partition_bytes > PSUM_BANK_BYTES:
            raise ShapeError(
                "address",
                "a PSUM tile of up to 2048 bytes inside one bank",
                address,
                "place it at a bank's start",
            )
