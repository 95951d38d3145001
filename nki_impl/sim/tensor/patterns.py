"""Access patterns: strided views of a storage's bytes, and indices that only the device knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError, OutOfBoundsError, PartitionError, ViewError, kernel_line
from nki_impl.sim.memory.storage import PARTITIONS
from nki_impl.sim.tensor.dtypes import DType, as_dtype, int64

if TYPE_CHECKING:
    from nki_impl.sim.memory.registers import VirtualRegister
    from nki_impl.sim.tensor.views import NkiTensor


@dataclass(frozen=True, slots=True)
class Dynamic:
    """An index whose value only the device knows; ``kind`` is "scalar" or "vector" (one index for each partition).

    ``source``: the register or tile that holds the index, which must be in 0 <= index < ``limit``. ``stride``: an index
    that is larger by 1 moves the view by this number of elements.
    """

    kind: str
    source: NkiTensor | VirtualRegister
    stride: int
    limit: int


def view_of(base: NkiTensor, array: NDArray, dtype: DType, start: int | None = None) -> NkiTensor:
    """Return a tensor on the storage of ``base``; ``array`` holds its elements.

    ``start``: the distance of its first element from that of the storage in bytes, if the caller knows it.
    """
    out = object.__new__(type(base))
    out._storage = base._storage
    out._array = array
    out._start = start
    out.dtype = dtype
    out.dynamic = None
    out.whole = False
    return out


class NoElements:
    """The place of the elements of a view that no instruction can use; every use raises ``error``.

    AWS's kernels make such views and do not use them: views past the end of a tile
    (core/output_projection/output_projection_tkg.py), and empty ones (experimental/loss/cross_entropy.py). An empty
    view has no shape; that of a pattern is given by its counts, and core/moe/moe_cte/bwmm_shard_on_block.py uses it:
    ``counts`` are the shape that :attr:`NkiTensor.shape` returns, or None.
    """

    __slots__ = ("error", "counts")

    def __init__(self, error: ViewError | OutOfBoundsError, counts: tuple[int, ...] | None) -> None:
        self.error = error
        self.counts = counts

    def __getattr__(self, name: str) -> NoReturn:
        raise self._used()

    def __getitem__(self, key: object) -> NoReturn:
        raise self._used()

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise self._used()

    def _used(self) -> ViewError | OutOfBoundsError:
        line = kernel_line()
        if line != self.error.line and not hasattr(self.error, "__notes__"):
            self.error.add_note(f"used at {line}")
        return self.error.with_traceback(None)


def unusable(
    base: NkiTensor,
    error: ViewError | OutOfBoundsError,
    dtype: DType,
    shape: tuple[int, ...] | None = None,
) -> NkiTensor:
    """Return a tensor on the storage of ``base`` that raises ``error`` when it is used, and not before.

    ``shape``: the shape of the tensor; None if its use is an error, too.
    """
    return view_of(base, cast(NDArray, NoElements(error, shape)), dtype)


def strided(
    base: NkiTensor,
    byte_offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType | None = None,
    check: bool = True,
) -> NDArray:
    """Return the NumPy view of the storage of ``base`` with the given shape; offset and strides are in bytes.

    Raises :class:`OutOfBoundsError` if the view reaches past the end of the storage, unless ``check`` is False. Callers
    with ``check=False`` use only the shape of the view.
    """
    storage = base._storage
    kind = (dtype or base.dtype).storage
    if not check:
        return np.lib.stride_tricks.as_strided(
            np.ndarray((1,) * len(shape), kind, storage.raw, byte_offset), shape, strides
        )
    try:
        return np.ndarray(shape, kind, storage.raw, byte_offset, strides)
    except (ValueError, TypeError):
        raise OutOfBoundsError(
            "pattern",
            f"inside the storage of {storage.raw.size} bytes",
            f"shape {shape}, strides {strides} bytes, offset {byte_offset} bytes",
            "count strides and offset in elements of the tensor",
        ) from None


def covers_storage(tensor: NkiTensor) -> bool:
    """Return whether the elements of ``tensor`` are all bytes of its storage, in order."""
    array = tensor._array
    return tensor.whole or (
        array.nbytes == tensor._storage.raw.size and bool(array.flags.c_contiguous)
    )


def over(tensor: NkiTensor, shadow: NDArray, unit: int) -> NDArray:
    """Return the part of ``shadow`` that belongs to ``tensor``; ``shadow`` has one entry per ``unit`` bytes of storage.

    If the tensor's elements are wider than ``unit``, the entries of one element are along an additional last axis.
    """
    width = tensor.dtype.itemsize // unit
    if tensor.whole and width == 1:
        return shadow.reshape(tensor._array.shape)
    size = shadow.itemsize
    strides = tuple(s // unit * size for s in tensor._array.strides)
    shape = tensor._array.shape
    if width > 1:
        shape, strides = (*shape, width), (*strides, size)
    start = tensor.byte_offset // unit * size
    return np.ndarray(shape, shadow.dtype, shadow, start, strides)


def over_each(tensor: NkiTensor, shadow: NDArray, unit: int) -> NDArray | None:
    """Return :func:`over` for a ``shadow`` of one on-chip partition, which is repeated for all partitions of ``tensor``.

    Returns None unless the first dimension of ``tensor`` is the partitions, and no other one reaches into the next
    partition, as an access pattern may.
    """
    width = tensor.dtype.itemsize // unit
    array, size = tensor._array, shadow.itemsize
    if array.shape[0] > 1 and array.strides[0] != tensor._storage.partition_bytes:
        return None
    shape, strides = array.shape, (0, *[s // unit * size for s in array.strides[1:]])
    if width > 1:
        shape, strides = (*shape, width), (*strides, size)
    start = tensor.byte_offset % tensor._storage.partition_bytes // unit * size
    try:
        return np.ndarray(shape, shadow.dtype, shadow, start, strides)
    except (ValueError, TypeError):  # NumPy checks the bounds
        return None


def access_pattern(
    base: NkiTensor,
    pattern: list[list[int]],
    offset: int | None,
    scalar_offset: NkiTensor | VirtualRegister | None,
    vector_offset: NkiTensor | None,
    indirect_dim: int,
    dtype: DType | None,
) -> NkiTensor:
    """Implement :meth:`NkiTensor.ap`; using a view that reaches past the storage raises :class:`OutOfBoundsError`."""
    kind = base.dtype if dtype is None else as_dtype(dtype)
    _check_pattern(base, pattern, kind)
    if scalar_offset is not None and vector_offset is not None:
        raise ViewError(
            "vector_offset", "scalar_offset or vector_offset", "both", "pass one of them"
        )
    start = base.byte_offset if offset is None else offset * kind.itemsize
    shape = tuple(int(count) for _, count in pattern)
    strides = tuple(int(stride) * kind.itemsize for stride, _ in pattern)
    if _counts_from_view(base, pattern[0][0], kind):
        strides = (base._storage.partition_bytes, *strides[1:])
        start = base.byte_offset + (offset or 0) * kind.itemsize
    indirect = scalar_offset is not None or vector_offset is not None
    try:
        array = strided(base, start, shape, strides, kind, check=not indirect)
    except OutOfBoundsError as error:
        return unusable(base, error, kind, shape)
    out = view_of(base, array, kind, int(start))
    if not indirect:
        return out
    if not 0 <= indirect_dim < base.ndim:
        raise ViewError("indirect_dim", f"0 <= dim < {base.ndim}", indirect_dim, "name a dimension")
    step = math.prod(base.shape[indirect_dim + 1 :])
    limit = base.shape[_longer_dim(base, indirect_dim)]
    if scalar_offset is not None:
        if base._storage.on_chip and getattr(scalar_offset, "dtype", None) is int64:
            raise DtypeError(
                "scalar_offset",
                "an int32 offset on chip",
                "an int64 scalar",
                "load it from an int32 tile",
            )
        out.dynamic = Dynamic("scalar", scalar_offset, step, limit)
        return out
    if indirect_dim != 0 or base._storage.on_chip:
        raise ViewError(
            "vector_offset", "indirect_dim 0 of an HBM tensor", f"{indirect_dim}, {base.buffer.value}",
            "gather on chip with other instructions",
        )  # fmt: skip
    assert vector_offset is not None
    out.dynamic = Dynamic("vector", vector_offset, step, limit)
    return out


def _longer_dim(base: NkiTensor, dim: int) -> int:
    """Return ``dim``, or the nearest earlier dimension that is longer than 1 if ``dim`` has length 1.

    An index moves by the same distance along both. AWS's TensorView.select finds the dimension by its stride, and so
    selects head ``rank_id`` of (batch, ranks, 1, ...) along the third dimension instead of the second
    (core/utils/tensor_view.py, experimental/transformer/attention_block_tkg_sharding.py). The partition dimension of an
    on-chip tile is not such a dimension.
    """
    first = 1 if base._storage.on_chip else 0
    longer = dim
    while longer > first and base.shape[longer] == 1:
        longer -= 1
    return longer if base.shape[longer] > 1 else dim


def _counts_from_view(base: NkiTensor, stride: int, kind: DType) -> bool:
    """Return whether a pattern whose first stride is ``stride`` counts from ``base`` instead of its storage.

    It does if ``base`` is a slice within the partitions of an on-chip tile, and the stride is the number of its free
    elements. The documentation does not describe this case; AWS's mlp_tkg makes such patterns, and adds their offset to
    the offset of the slice (core/mlp/mlp_tkg/mlp_tkg_gate_up_projection.py).
    """
    storage = base._storage
    if not storage.on_chip or base.whole or not base.is_contiguous():
        return False
    array = base._array
    row = array.nbytes // array.shape[0]
    return row != storage.partition_bytes and stride * kind.itemsize == row


def _check_pattern(base: NkiTensor, pattern: list[list[int]], kind: DType) -> None:
    storage = base._storage
    if not pattern or len(pattern) > 5 or any(len(pair) != 2 for pair in pattern):
        raise ViewError("pattern", "one to five [stride, count] pairs", pattern, "merge dimensions")
    if any(count < 1 for _, count in pattern):
        raise ViewError(
            "pattern",
            "counts of at least 1",
            pattern,
            "pass positive counts; no access can be empty",
        )
    if not storage.on_chip:
        return
    free = storage.free_size * storage.dtype.itemsize // kind.itemsize
    stride, count = pattern[0]
    if count > PARTITIONS or (
        count > 1 and stride != free and not _counts_from_view(base, stride, kind)
    ):
        raise PartitionError(
            "pattern",
            f"the first pair of an on-chip tensor is [{free} (its free elements), partitions <= {PARTITIONS}]",
            pattern[0],
            "start with the partition dimension",
        )


def parse_names(
    pattern: tuple,
    shape: tuple[int, ...],
    fixed: dict[str, int],
) -> tuple[list[str], list[int]]:
    """Return the names in ``pattern``, and the length of each name.

    A name in a tuple has its length in ``fixed``; for one name of each tuple, the length may follow from the others.

    >>> parse_names(("b", ("h", "d")), (2, 12), {"d": 4})
    (['b', 'h', 'd'], [2, 3, 4])
    """
    if len(pattern) != len(shape):
        raise ViewError("src_pattern", f"{len(shape)} entries", pattern, "name each dimension")
    names: list[str] = []
    lengths: list[int] = []
    for entry, size in zip(pattern, shape, strict=True):
        group = entry if isinstance(entry, tuple) else (entry,)
        unknown = [name for name in group if name not in fixed]
        known = math.prod(fixed[name] for name in group if name in fixed)
        if len(unknown) > 1 or size % known or (not unknown and known != size):
            raise ViewError(
                "fixed_sizes", f"lengths of {group} whose product is {size}", fixed, "fix them"
            )
        for name in group:
            names.append(name)
            lengths.append(fixed.get(name, size // known))
    return names, lengths
