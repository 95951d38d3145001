"""Read and write tensors. Instructions access values only through these functions.

Reading checks that every element has been written. Writing rounds once to the dtype of the destination
(:func:`nki_impl.sim.tensor.dtypes.round_once`) and marks the elements as written. Copies between equal dtypes are
bit-exact. :func:`copy_bits` accepts unwritten elements, and marks their copies as unwritten. So a tile with unwritten
elements may be moved; :mod:`nki_impl.sim.tensor.idle` says when an instruction may compute with them.

A *dynamic index* is a register or a tile; its value selects elements of a tensor when an instruction runs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import (
    DtypeError,
    OutOfBoundsError,
    OutputError,
    PartitionError,
    PlacementError,
    UninitializedError,
)
from nki_impl.sim.machine.core import current
from nki_impl.sim.memory.liveness import Clock
from nki_impl.sim.memory.registers import VirtualRegister
from nki_impl.sim.memory.storage import PSUM, SHARED_HBM, MemoryRegion, Storage
from nki_impl.sim.tensor.dtypes import (
    as_dtype,
    float32,
    int64,
    round_once,
    rounds_on_store,
    to_float32,
)
from nki_impl.sim.tensor.overlap import overwrite_rivals, refuse_lost
from nki_impl.sim.tensor.patterns import covers_storage, over, over_each, strided, view_of
from nki_impl.sim.tensor.views import NkiTensor

Array = NDArray

_MOST_WIDENED = 32
"""The largest number of operands of one storage that are known by :func:`read_operand`; it bounds the memory."""


def tile(tensor: object, operand: str, psum: bool = True) -> NkiTensor:
    """Return ``tensor`` as an on-chip tile that a compute engine can address, with a dynamic scalar index resolved.

    Raises :class:`DtypeError` if ``tensor`` is not a tensor, :class:`PlacementError` if it is in HBM, or in PSUM with
    ``psum=False``, and :class:`PartitionError` if engines cannot address its first partition. A tile of more than 64
    partitions must start at partition 0, a tile of 33 to 64 at 0 or 64, and a smaller tile at a multiple of 32.
    """
    if not isinstance(tensor, NkiTensor):
        raise DtypeError(operand, "a tensor", type(tensor).__name__, "pass a tile in SBUF or PSUM")
    storage = tensor._storage
    if not storage.on_chip:
        raise PlacementError(
            operand, "a tile in SBUF or PSUM", tensor.buffer.value, "dma_copy it to SBUF"
        )
    if not psum and storage.buffer is PSUM:
        raise PlacementError(operand, "a tile in SBUF", "psum", "tensor_copy it to SBUF first")
    if tensor.dynamic is not None:
        static = resolve(tensor)
        assert static is not None
        tensor = static
    if tensor.dtype is int64:
        raise DtypeError(
            operand,
            "a dtype that the engines compute with; int64 is only for DMA, scalar_load and scalar_store",
            tensor,
            "pass the array as int32",
        )
    storage.last = Clock.now
    if storage.first < 0:
        storage.first = storage.last
    placed = storage.placed
    if tensor._array.shape[0] != storage.shape[0] or (placed is not None and placed[0]):
        _check_start(tensor, operand)
    return tensor


def touch(storage: Storage) -> None:
    """Record a use of an on-chip tile (see :mod:`nki_impl.sim.memory.liveness`)."""
    if storage.first < 0:
        storage.first = Clock.now
    storage.last = Clock.now


def note_load(tensor: NkiTensor, src: NkiTensor) -> None:
    """Record that this instruction wrote ``tensor``, maybe as its first use, with ``src``, and could do so later."""
    storage = tensor._storage
    if storage.first == Clock.now and src._storage.is_input and not current().no_reorder:
        storage.first = -1


def _check_start(tensor: NkiTensor, operand: str) -> None:
    used = tensor._array.shape[0]
    storage = tensor._storage
    start = tensor.byte_offset // storage.partition_bytes + (storage.placed or (0, 0))[0]
    if start and start % (128 if used > 64 else 64 if used > 32 else 32):
        raise PartitionError(
            operand,
            "a start at partition 0 for more than 64 partitions, 0 or 64 for more than 32, else 0, 32, 64 or 96",
            f"{used} partitions starting at {start}",
            "move the rows with dma_copy, or start at such a partition",
        )


def index_value(source: NkiTensor | VirtualRegister, operand: str = "scalar_offset") -> int:
    """Return the integer that a register or a (1,1) integer tile holds when the instruction runs."""
    if isinstance(source, VirtualRegister):
        return source.read(operand)
    if source.size != 1 or not source.dtype.is_integer:
        raise DtypeError(
            operand, "a register or a (1,1) integer tile", source, "store the index as int32"
        )
    return int(read_raw(source, operand).item())


def resolve(tensor: NkiTensor, skip: bool = False) -> NkiTensor | None:
    """Return ``tensor`` with its dynamic scalar index, if it has one, replaced by the value of the index.

    If the index is out of bounds, raise :class:`OutOfBoundsError`; with ``skip``, return None instead.
    """
    dynamic = tensor.dynamic
    if dynamic is None:
        return tensor
    if dynamic.kind != "scalar":
        raise PlacementError(
            "vector_offset", "an operand of dma_copy", "another operation", "gather by DMA"
        )
    value = index_value(dynamic.source)
    try:
        if not 0 <= value < dynamic.limit:
            raise OutOfBoundsError(
                "scalar_offset",
                f"0 <= index < {dynamic.limit}",
                value,
                "clamp it, or use oob_mode.skip",
            )
        start = tensor.byte_offset + value * dynamic.stride * tensor.dtype.itemsize
        array = strided(tensor, start, tensor.shape, tensor._array.strides, tensor.dtype)
    except OutOfBoundsError:
        if skip:
            return None
        raise
    return view_of(tensor, array, tensor.dtype, start)


def _mask(tensor: NkiTensor) -> NDArray[np.bool_]:
    """Return the part of the mask of written elements that belongs to ``tensor``, for changes."""
    storage = tensor._storage
    if tensor.dtype.itemsize < storage.unit:
        storage.split_mask(tensor.dtype.itemsize)
    return over(tensor, storage.written_mask(), storage.unit)


def _marks(tensor: NkiTensor) -> NDArray[np.bool_]:
    """Return the same values as :func:`_mask`, which the caller must not change."""
    storage = tensor._storage
    if storage.alike and storage.mask is not None:
        if tensor.dtype.itemsize < storage.unit:
            storage.split_mask(tensor.dtype.itemsize)
        marks = over_each(tensor, storage.mask, storage.unit)
        if marks is not None:
            return marks
    return _mask(tensor)


def is_written(tensor: NkiTensor) -> bool:
    """Return True if every element of ``tensor`` has been written."""
    storage = tensor._storage
    if storage.missing == 0:
        return True
    if storage.mask is None:
        return False
    marks = _marks(tensor)
    if marks.strides[0] == 0:
        marks = marks[0]  # the same in all partitions
    return bool(np.logical_and.reduce(marks, axis=None))


def unwritten_count(tensor: NkiTensor) -> str:
    """Return how many elements of ``tensor`` were never written, such as '4 of 12'."""
    storage = tensor._storage
    count = 0 if storage.mask is None else int(np.count_nonzero(_marks(tensor)))
    total = tensor.size * (tensor.dtype.itemsize // storage.unit)
    return f"{total - count} of {total}"


def mark_written(tensor: NkiTensor) -> None:
    """Mark every element of ``tensor`` as written."""
    storage = tensor._storage
    if storage.missing == 0:
        return
    if covers_storage(tensor):
        storage.set_all_written()
        return
    if storage.on_chip and tensor._array.shape[0] == storage.shape[0] and _mark_columns(tensor):
        return
    fresh = storage.mask is None
    mask = _mask(tensor)
    before = 0 if fresh else int(np.count_nonzero(mask))
    if before == mask.size:
        return
    mask[...] = True
    if 0 in mask.strides:
        _recount(tensor)
        return
    storage.missing -= mask.size - before
    if storage.missing == 0:
        storage.mask = None


def _mark_columns(tensor: NkiTensor) -> bool:
    """Mark a tensor in all partitions of its storage as written, in one step for all; return whether that is possible."""
    storage = tensor._storage
    whole = storage.partition_mask()
    if whole is None:
        return False
    if tensor.dtype.itemsize < storage.unit:
        storage.split_mask(tensor.dtype.itemsize)
        whole = storage.mask
        assert whole is not None
    array, unit = tensor._array, storage.unit
    if array.strides == (storage.partition_bytes, unit) and array.itemsize == unit:
        # The usual columns, start to stop - 1: no other view of the mask is needed.
        start = tensor.byte_offset // unit
        whole[start : start + array.shape[1]] = True
    else:
        marks = over_each(tensor, whole, unit)
        if marks is None:
            return False
        marks[0] = True
    missing = whole.size - int(np.count_nonzero(whole))
    storage.missing = missing * storage.shape[0]
    if missing == 0:
        storage.mask = None
    return True


def check_read(tensor: NkiTensor, operand: str) -> None:
    """Notify the race detector, and raise :class:`UninitializedError` if an element has never been written."""
    storage = tensor._storage
    if storage.on_chip:
        touch(storage)
    else:
        core = current()
        if core.on_access is not None:
            core.on_access(core, tensor, False)
    if storage.missing and not is_written(tensor):
        refuse_lost(tensor, operand)
        _await_other_core(storage)
        raise UninitializedError(
            operand,
            "elements that are written before they are read",
            f"{unwritten_count(tensor)} elements of {tensor.name or 'the tensor'} {tensor.shape} never written",
            "write the whole tile first (memset, dma_copy), or read only what was written",
        )


def _await_other_core(storage: Storage) -> None:
    """Let the other core of the rank run, if it may still write the unwritten elements of ``storage``.

    A core that reads before the other core has written, with no barrier between the two, breaks the rule of races: the
    detector knows of the read, and raises :class:`~nki_impl.sim.errors.RaceError` at the write. Without this, the
    error would be UninitializedError or RaceError, depending on which core runs first.
    """
    core = current()
    if core.on_access is not None and storage.buffer is SHARED_HBM:
        assert core.worker is not None and core.worker.machine is not None
        core.worker.machine.let_others_run(core.worker)


def read_raw(tensor: NkiTensor, operand: str) -> Array:
    """Return a view of the elements in the dtype of the tensor; the caller must not change it."""
    check_read(tensor, operand)
    return tensor._array


def read(tensor: NkiTensor, operand: str) -> NDArray[np.float32]:
    """Return the elements as float32; for a float32 tensor this is a view, so the caller must not change it."""
    if tensor._storage.missing or not tensor._storage.on_chip:
        check_read(tensor, operand)
    return to_float32(tensor._array)


def read_operand(tensor: NkiTensor, operand: str) -> NDArray[np.float32]:
    """Return what :func:`read` returns, for an on-chip operand that several matmuls may read: a tile of keys, for example.

    The second conversion of the same elements to float32 is kept until the storage is written or freed. The first is
    not, because most operands are read once, and fresh memory for each of them would push others out of the cache.
    """
    storage = tensor._storage
    if storage.missing:
        check_read(tensor, operand)
    array = tensor._array
    if tensor.dtype is float32:
        return array
    start = tensor._start
    if start is None:
        start = tensor.byte_offset
    key = (start, array.shape, array.strides, tensor.dtype.name)
    known = storage.widened
    if known is None or len(known) == _MOST_WIDENED:
        known = storage.widened = {}
    held = known.get(key)
    if held is None:
        held = to_float32(array)
        known[key] = held if key in known else None
    return held


def check_write(tensor: NkiTensor, operand: str) -> None:
    """Raise :class:`OutputError` if the tensor is read-only; otherwise notify the race detector."""
    storage = tensor._storage
    if storage.on_chip:
        touch(storage)
        return
    if storage.read_only:
        raise OutputError(
            operand,
            "a tensor that the kernel allocated",
            f"kernel input {storage.name or '?'}",
            "copy into an nl.ndarray(..., buffer=nl.shared_hbm) and return that; or launch with update_inputs=True",
        )
    core = current()
    if core.on_access is not None:
        core.on_access(core, tensor, True)


def write(tensor: NkiTensor, values: Array, operand: str = "dst") -> None:
    """Round ``values`` once to the dtype of ``tensor``, store them and mark them as written.

    ``values`` have the tensor's shape, or a shape with as many elements, such as (partitions, free size). They may be
    the array of :func:`result_array`, which is then already stored.
    """
    if tensor._storage.on_chip:
        touch(tensor._storage)
    else:
        check_write(tensor, operand)
    array = tensor._array
    if values is not array:
        if values.shape != array.shape:
            values = values.reshape(array.shape)
        exact = rounds_on_store(values, tensor.dtype)
        array[...] = values if exact else round_once(values, tensor.dtype)
    storage = tensor._storage
    storage.widened = None
    if storage.missing:
        mark_written(tensor)
    if storage.started is not None:
        if covers_storage(tensor):
            storage.started = None
        else:
            over(tensor, storage.started_mask(), storage.dtype.itemsize)[...] = False
    if storage.site is not None:
        overwrite_rivals(tensor)


def result_array(dst: NkiTensor, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """Return the array of ``dst`` if the last step of a computation may write its float32 result of ``shape`` there.

    This saves a copy. NumPy copies an operand first if it overlaps the result. Returns None if the result must be
    rounded or reshaped.
    """
    array = dst._array
    return array if dst.dtype is float32 and array.shape == shape and dst._storage.on_chip else None


def write_where(dst: NkiTensor, values: Array, chosen: Array, operand: str = "dst") -> None:
    """Write ``values``, which have the shape and storage format of ``dst``, to the elements that ``chosen`` marks."""
    check_write(dst, operand)
    np.copyto(dst._array, values, where=chosen)
    storage = dst._storage
    storage.widened = None
    if storage.missing:
        mask = _mask(dst)
        mask[...] |= chosen[..., None] if mask.ndim > dst.ndim else chosen
        _recount(dst)
    if storage.started is not None:
        over(dst, storage.started_mask(), storage.dtype.itemsize)[chosen] = False
    if storage.site is not None:
        overwrite_rivals(dst)


def check_read_where(tensor: NkiTensor, chosen: Array, operand: str) -> None:
    """Raise :class:`UninitializedError` if an element of ``tensor`` where ``chosen`` is true has never been written."""
    if tensor._storage.missing and not is_written(tensor):
        if tensor._storage.mask is None or not _marks(tensor)[chosen].all():
            check_read(tensor, operand)


def _recount(tensor: NkiTensor) -> None:
    storage = tensor._storage
    full = storage.written_mask()
    storage.missing = full.size - int(np.count_nonzero(full))
    if storage.missing == 0:
        storage.mask = None


def copy_bits(dst: NkiTensor, src: NkiTensor) -> None:
    """Copy ``src`` to ``dst`` in row-major order; unwritten elements of ``src`` become unwritten in ``dst``.

    Between equal dtypes the copy is bit-exact; otherwise values are converted through float32.
    """
    hole = unwritten(src)
    write(dst, src._array if dst.dtype is src.dtype else to_float32(src._array))
    if hole is not None:
        keep_holes(dst, hole.reshape(dst.shape))


def unwritten(tensor: NkiTensor) -> NDArray[np.bool_] | None:
    """Return which elements of ``tensor`` were never written, or None if all were written."""
    if is_written(tensor):
        return None
    refuse_lost(tensor, "src")
    return _holes(tensor)


def keep_holes(dst: NkiTensor, hole: NDArray[np.bool_]) -> None:
    """Mark the elements of ``dst`` where ``hole`` is true as never written."""
    units = _mask(dst)
    units &= ~(hole[..., None] if units.ndim > dst.ndim else hole)
    _recount(dst)


def _holes(tensor: NkiTensor) -> NDArray[np.bool_]:
    """Return a bool array with the shape of ``tensor``: True where any byte of an element has not been written."""
    if tensor._storage.mask is None:
        return np.ones(tensor.shape, np.bool_)
    missing: NDArray[np.bool_] = ~_marks(tensor)
    return missing if missing.ndim == tensor.ndim else np.any(missing, axis=-1)


def hbm_tensor(
    array: Array, name: str, owner: tuple[int, int | None], read_only: bool
) -> NkiTensor:
    """Copy ``array`` to a new tensor in shared HBM, or in private HBM if ``owner`` names a core."""
    dtype = as_dtype(array.dtype, name)
    shape = array.shape or (1,)
    buffer = SHARED_HBM if owner[1] is None else MemoryRegion.private_hbm
    storage = Storage(shape, dtype, buffer, name, owner)
    storage.raw.view(dtype.storage).reshape(shape)[...] = array
    storage.set_all_written()
    storage.read_only = storage.is_input = read_only
    return NkiTensor(shape, dtype, storage, buffer, name)


def to_numpy(tensor: NkiTensor, operand: str = "result") -> Array:
    """Return a copy of the elements. Raises :class:`UninitializedError` if an element has never been written."""
    if not is_written(tensor):
        check_read(tensor, operand)
    return tensor._array.copy()
