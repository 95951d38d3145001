"""Tensors, which are views of storages. No view copies data.

Dimension 0 of an on-chip tensor (SBUF, PSUM) is the partition dimension; view methods cannot reorder, step or drop it.
Indexing follows the language guide. An int on dimension 0 of an on-chip tensor keeps the dimension, with length 1. An
int on a free dimension removes the dimension. The rank never falls below 2 on chip, or below 1 in HBM. Slices need
0 <= start < end <= size. An empty slice (start == end) and an access pattern past the end of the storage are errors when
the view is used.

The values of a tensor exist only on the device: bool(), comparison (except with None), iteration and arithmetic raise
:class:`DynamicValueError`. The exception is the truth of an optional argument, as in ``if bias:``, which means that the
caller passed it: AWS's kernels test optional arguments in this way. It is True for a whole kernel input, and for a whole
tensor of several elements that a calling function allocated with ``nl.ndarray`` (with a warning). Any other tensor may
be meant as a value, so its truth remains an error.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.language.NkiTensor.html
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import (
    EmptyViewError,
    PartitionError,
    UnsupportedError,
    ViewError,
)
from nki_impl.sim.memory.storage import MemoryRegion, Storage
from nki_impl.sim.operators.refusal import (
    hidden,
    is_argument,
    refuse,
    refuse_values,
    warn_of_truth,
)
from nki_impl.sim.tensor.dtypes import DType, as_dtype
from nki_impl.sim.tensor.indexing import (
    checked_index,
    checked_slice,
    numpy_key,
    plain_offset,
)
from nki_impl.sim.tensor.objects import NKIObject
from nki_impl.sim.tensor.patterns import (
    Dynamic,
    NoElements,
    access_pattern,
    parse_names,
    strided,
    unusable,
    view_of,
)

if TYPE_CHECKING:
    from nki_impl.sim.memory.registers import VirtualRegister

sbuf = MemoryRegion.sbuf


class NkiTensor(NKIObject):
    """A view of a :class:`Storage`: ``array`` is the NumPy view of its bytes, ``dtype`` is their format.

    Only the simulator can use ``storage`` and ``array``; kernels get an error. ``dynamic`` is None, or an index (:class:`Dynamic`) whose value is read when an instruction runs. ``whole`` is True
    if the view covers the whole storage in order.
    """

    __slots__ = ("_storage", "_array", "_start", "dtype", "dynamic", "whole")

    _storage: Storage
    _array: NDArray
    _start: int | None
    dtype: DType
    dynamic: Dynamic | None
    whole: bool

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        storage: Any,
        buffer: MemoryRegion | str = sbuf,
        name: str = "",
    ) -> None:
        self._storage = storage
        self.dtype = dtype
        self._array = np.ndarray(shape, dtype.storage, storage.raw)
        self._start = 0
        self.dynamic = None
        self.whole = True

    storage = hidden("NkiTensor", "storage")
    array = hidden("NkiTensor", "array")

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each dimension; dimension 0 is the partition dimension on chip."""
        array = self._array
        if isinstance(array, NoElements) and array.counts is not None:
            return array.counts
        return array.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The distance between neighbours in each dimension, in elements."""
        return tuple(s // self.dtype.itemsize for s in self._array.strides)

    @property
    def offset(self) -> int:
        """The distance of the view's first element from the first element of the storage, in elements."""
        return self.byte_offset // self.dtype.itemsize

    @property
    def byte_offset(self) -> int:
        """The distance of the view's first element from the first element of the storage, in bytes."""
        if self._start is None:
            # NumPy describes the whole array for its address, which takes longer than to make the view.
            here: int = self._array.__array_interface__["data"][0]
            self._start = here - self._storage.raw.__array_interface__["data"][0]
        return self._start

    @property
    def name(self) -> str:
        """The name given at allocation, or ''."""
        return self._storage.name

    @property
    def buffer(self) -> MemoryRegion:
        """The memory that contains the tensor."""
        return self._storage.buffer

    @property
    def base_tensor(self) -> NkiTensor:
        """The tensor itself, if it is whole; else :class:`UnsupportedError`.

        The documentation has no such attribute. AWS's MX kernels (core/moe/moe_tkg) read it of kernel inputs, and expect the
        same shape.
        """
        if self.whole:
            return self
        raise UnsupportedError(
            "base_tensor", "a whole tensor", f"a view {self.shape}", "use the tensor of which it is a view"
        )  # fmt: skip

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._array.size

    def _view(
        self, array: NDArray, dtype: DType | None = None, start: int | None = None
    ) -> NkiTensor:
        out = view_of(self, array, dtype or self.dtype, start)
        if self.dynamic is not None:
            if self.dynamic.kind == "vector" and array.shape[0] != self._array.shape[0]:
                raise ViewError(
                    "dimension 0",
                    "no index on the dimension of an indirect vector index",
                    array.shape,
                    "slice the index tile instead",
                )
            if dtype is not None:
                raise ViewError(
                    "dtype", "a static view", "an indirect one", "view before selecting"
                )
            out.dynamic = self.dynamic
        return out

    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous (on chip: within each partition)."""
        array = self._array[0] if self._storage.on_chip else self._array
        return self.dynamic is None and bool(array.flags.c_contiguous)

    def is_indirect(self) -> bool:
        """Whether the elements depend on an index that only the device knows."""
        return self.dynamic is not None

    def get_pattern(self) -> list[list[int]]:
        """Return [[stride, count], ...] in elements, outermost dimension first."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def __getitem__(self, key: Any) -> NkiTensor:
        array, on_chip, start = self._array, self._storage.on_chip, self._start
        shape = array.shape
        if self.dynamic is None and start is not None:
            skipped = plain_offset(array, on_chip, key)
            if skipped is not None:
                return view_of(self, array[key], self.dtype, start + skipped)
        try:
            at = numpy_key(shape, on_chip, key)
        except EmptyViewError as error:
            return unusable(self, error, self.dtype)
        if start is not None:
            for one, stride in zip(at, array.strides, strict=False):
                start += int(stride * (one if isinstance(one, int) else one.start or 0))
        return self._view(array[at], None, start)

    def _free_dim(self, dim: int, what: str) -> int:
        """Return ``dim``, counted from 0, and raise an error for the partition dimension.

        A negative ``dim`` counts from the end.
        """
        if not -self.ndim <= dim < self.ndim:
            raise ViewError("dim", f"0 <= dim < {self.ndim}", dim, "name a dimension of the tensor")
        dim %= self.ndim
        if dim == 0 and self._storage.on_chip:
            raise PartitionError("dim", f"{what} on a free dimension", dim, "use dim >= 1")
        return dim

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Return the elements start, start + step, ... below ``end`` along dimension ``dim``."""
        if not -self.ndim <= dim < self.ndim:
            raise ViewError("dim", f"0 <= dim < {self.ndim}", dim, "name a dimension of the tensor")
        dim %= self.ndim
        size = self.shape[dim]
        try:
            key = checked_slice(size, self._storage.on_chip, dim, start, end, step)
        except EmptyViewError as error:
            return unusable(self, error, self.dtype)
        return self._view(self._array[(slice(None),) * dim + (key,)])

    def select(self, dim: int, index: int | NkiTensor) -> NkiTensor:
        """Take ``index`` (an int, a register or a (1,1) tile) in dimension ``dim``, and drop that dimension."""
        dim = self._free_dim(dim, "select")
        if isinstance(index, (int, np.integer)):
            at = checked_index(self.shape[dim], dim, index)
            return self._view(self._array[(slice(None),) * dim + (at,)])
        if self.dynamic is not None:
            raise ViewError("index", "one dynamic index per tensor", "a second one", "copy first")
        out = self._view(self._array[(slice(None),) * dim + (0,)])
        out.dynamic = Dynamic("scalar", index, self.strides[dim], self.shape[dim])
        return out

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Select rows along dimension 0 of an HBM tensor, one per partition; the shape is (P, rest of the shape)."""
        if dim != 0 or self._storage.on_chip:
            raise UnsupportedError(
                "dim", "dimension 0 of an HBM tensor", dim, "permute, or gather on chip"
            )
        if self.dynamic is not None:
            raise ViewError(
                "vector_offset", "one dynamic index per tensor", "a second one", "copy first"
            )
        shape = (vector_offset.shape[0], *self.shape[1:])
        out = self._view(strided(self, self.byte_offset, shape, self._array.strides, check=False))
        out.dynamic = Dynamic("vector", vector_offset, self.strides[0], self.shape[0])
        return out

    def permute(self, dims: tuple[int, ...]) -> NkiTensor:
        """Reorder the dimensions as in ``dims``; on chip dimension 0 must stay first."""
        if sorted(dims) != list(range(self.ndim)):
            raise ViewError("dims", f"a permutation of 0..{self.ndim - 1}", dims, "name each once")
        if self._storage.on_chip and dims[0] != 0:
            raise PartitionError(
                "dims", "the partition dimension stays first", dims, "use nc_transpose"
            )
        return self._view(self._array.transpose(dims))

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat dimension ``dim``, which has length 1, ``size`` times (stride 0)."""
        dim = self._free_dim(dim, "broadcast")
        if self.shape[dim] != 1:
            raise ViewError("dim", "a dimension of length 1", self.shape[dim], "expand_dim first")
        shape, strides = list(self.shape), list(self._array.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(strided(self, self.byte_offset, tuple(shape), tuple(strides)))

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of length 1 at ``dim``."""
        dim = dim if dim >= 0 else dim + self.ndim + 1
        if not 0 <= dim <= self.ndim or (dim == 0 and self._storage.on_chip):
            raise ViewError(
                "dim", f"a place among the free dimensions of {self.shape}", dim, "use 1..ndim"
            )
        return self._view(np.expand_dims(self._array, dim))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Drop dimension ``dim``, which has length 1."""
        dim = self._free_dim(dim, "squeeze_dim")
        if self.shape[dim] != 1:
            raise ViewError("dim", "a dimension of length 1", self.shape[dim], "use select")
        return self._view(self._array.squeeze(dim))

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        """Split dimension ``dim`` into ``shape``, in which one length may be -1."""
        dim = self._free_dim(dim, "reshape_dim")
        known = math.prod(n for n in shape if n != -1)
        size = self.shape[dim]
        if (
            list(shape).count(-1) > 1
            or known < 1
            or size % known
            or (-1 not in shape and known != size)
        ):
            raise ViewError(
                "shape", f"a factorisation of {size}, at most one -1", shape, "make it fit"
            )
        full = tuple(size // known if n == -1 else n for n in shape)
        return self._reshaped(self.shape[:dim] + full + self.shape[dim + 1 :])

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge dimensions start_dim..end_dim (both included) into one."""
        end_dim %= self.ndim
        start_dim = (
            start_dim % self.ndim
            if start_dim == end_dim
            else self._free_dim(start_dim, "flatten_dims")
        )
        merged = math.prod(self.shape[start_dim : end_dim + 1])
        return self._reshaped((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    def reshape(self, shape: tuple[int, ...]) -> NkiTensor:
        """Return the elements in row-major order in another shape; on chip dimension 0 must not change."""
        shape = tuple(shape)
        if math.prod(shape) != self.size or min(shape) < 1:
            raise ViewError(
                "shape", f"{self.size} elements", shape, "pass a shape with as many elements"
            )
        if self._storage.on_chip and (shape[0] != self.shape[0] or len(shape) < 2):
            raise PartitionError(
                "shape", f"({self.shape[0]}, ...)", shape, "keep the partition dimension"
            )
        return self._reshaped(shape)

    def _reshaped(self, shape: tuple[int, ...]) -> NkiTensor:
        try:
            return self._view(self._array.reshape(shape, copy=False), None, self._start)
        except ValueError:
            raise ViewError(
                "shape",
                f"a shape that strides {self.strides} of {self.shape} can express",
                shape,
                "copy into a contiguous tensor first",
            ) from None

    def rearrange(
        self,
        src_pattern: tuple,
        dst_pattern: tuple,
        fixed_sizes: dict[str, int] | None = None,
    ) -> NkiTensor:
        """Split, permute and merge dimensions by their names, as in ('b', ('h', 'd')) -> ('h', ('b', 'd'))."""
        names, lengths = parse_names(src_pattern, self.shape, fixed_sizes or {})
        groups = [g if isinstance(g, tuple) else (g,) for g in dst_pattern]
        order = [name for group in groups for name in group]
        if sorted(order) != sorted(names):
            raise ViewError(
                "dst_pattern", f"the names {names}, each once", dst_pattern, "name them all"
            )
        at = [names.index(name) for name in order]
        if self._storage.on_chip and (
            at[0] != 0 or lengths[0] != self.shape[0] or len(groups[0]) > 1
        ):
            raise PartitionError(
                "dst_pattern", "the partition dimension stays first", dst_pattern, "keep it"
            )
        split = self._reshaped(tuple(lengths))
        merged = [math.prod(lengths[names.index(name)] for name in group) for group in groups]
        return self._view(split._array.transpose(at))._reshaped(tuple(merged))

    def ap(
        self,
        pattern: list[list[int]],
        offset: int | None = None,
        scalar_offset: NkiTensor | VirtualRegister | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: DType | None = None,
    ) -> NkiTensor:
        """Return the view with the access pattern [[stride, count], ...] on the storage, in elements.

        ``offset`` counts from the start of the storage and replaces the offset of this view. None keeps the offset of
        this view, as the API reference says. The programming guide says instead that the view's offset is ignored, so
        pass ``offset`` explicitly. A slice within the partitions of an on-chip tile is different if the first stride is
        its own number of free elements: then the pattern describes the slice, and ``offset`` counts from its start.

        ``scalar_offset`` (a register or a (1,1) integer tile) and ``vector_offset`` (a (P,1) integer tile, one row per
        partition) are indices along dimension ``indirect_dim``. Each index is multiplied by the product of the lengths
        of the later dimensions of this tensor.
        """
        return access_pattern(
            self, pattern, offset, scalar_offset, vector_offset, indirect_dim, dtype
        )

    def view(self, dtype: DType) -> NkiTensor:
        """Reinterpret the bytes as ``dtype``; the length of the last dimension changes accordingly."""
        dtype = as_dtype(dtype)
        try:
            array = self._array.view(dtype.storage)
        except ValueError:
            raise ViewError(
                "dtype",
                f"a last dimension of {self.shape} that {dtype} divides",
                self.dtype,
                "pad it",
            ) from None
        return self._view(array, dtype)

    reinterpret_cast = view

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Not modelled: raises :class:`UnsupportedError`."""
        raise UnsupportedError(
            "index", "tensor indirection is not modelled", "indirect()", "use vector_select"
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        raise UnsupportedError(
            "index",
            "an instruction that writes the tile",
            "an assignment",
            "use nisa.tensor_copy(dst=..., src=...)",
        )

    def __bool__(self) -> bool:
        if self.whole and self._storage.is_input:
            return True
        # A tensor of one element may be a flag; no other one has a truth of its own in Python.
        if self.whole and self.size > 1 and is_argument(self._storage.made_at):
            warn_of_truth(self.name)
            return True
        return bool(refuse(self, "bool()"))

    def __eq__(self, other: object) -> bool:
        if other is None or isinstance(other, (str, DType, MemoryRegion)):
            return False
        return bool(refuse(self, "operator =="))

    def __ne__(self, other: object) -> bool:
        return not self.__eq__(other)

    def __hash__(self) -> int:
        return id(self)

    def __copy__(self) -> NkiTensor:
        return self._view(self._array)

    def __repr__(self) -> str:
        shape = "no usable elements" if isinstance(self._array, NoElements) else self.shape
        return f"NkiTensor({self.name or '?'}, {shape}, {self.dtype}, {self.buffer.value})"


refuse_values(NkiTensor)
