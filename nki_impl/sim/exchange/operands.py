"""The operands of collectives: lists, channels, splits, and the reduction of several sources."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from nki_impl.sim.errors import CollectiveError, PlacementError, UninitializedError
from nki_impl.sim.exchange.groups import Rings
from nki_impl.sim.memory.storage import MemoryRegion
from nki_impl.sim.operators import ops
from nki_impl.sim.tensor.access import is_written
from nki_impl.sim.tensor.dtypes import to_float32
from nki_impl.sim.tensor.views import NkiTensor

Values = NDArray[Any]
Apply = Callable[[Values, Values], Values]


def tensors(operand: str, given: object, how_many: int | None = None) -> tuple[NkiTensor, ...]:
    """Return a list operand as a tuple of tensors; raise unless it has ``how_many`` tensors (None: any number)."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(t, NkiTensor) for t in given):
        raise CollectiveError(operand, "a list of tensors", repr(given), "write [tensor]")
    if not given or (how_many is not None and len(given) != how_many):
        wanted = "at least one tensor" if how_many is None else f"exactly {how_many} tensor"
        raise CollectiveError(operand, wanted, f"{len(given)}", "issue one collective per tensor")
    return tuple(given)


def agree(srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor]) -> None:
    """Refuse sources and destinations that differ in number or dtype."""
    if len(srcs) != len(dsts):
        raise CollectiveError(
            "dsts", f"{len(srcs)} tensors, as in srcs", len(dsts), "pass one dst per src"
        )
    for src, dst in zip(srcs, dsts, strict=True):
        if src.dtype is not dst.dtype:
            raise CollectiveError(
                "dsts", f"the dtype of the source, {src.dtype}", dst.dtype, "use that dtype"
            )


def fit(operand: str, tensor: NkiTensor, shape: tuple[int, ...], why: str) -> None:
    """Refuse a destination that does not have ``shape``."""
    if tensor.shape != shape:
        raise CollectiveError(
            operand, f"shape {shape}: {why}", tensor.shape, "allocate it with this shape"
        )


def paired_lists(srcs: object, dsts: object) -> tuple[tuple[NkiTensor, ...], tuple[NkiTensor, ...]]:
    """Return sources and destinations as tuples of equal length; more than one tensor each is allowed only in HBM."""
    reads, writes = tensors("srcs", srcs), tensors("dsts", dsts)
    agree(reads, writes)
    if len(reads) > 1:
        check_hbm(reads, "several tensors at once are possible only there")
    return reads, writes


def by_channel(operand: str, given: object, channels: tuple[int, ...]) -> tuple[NkiTensor, ...]:
    """Return the one tensor of each channel."""
    if not isinstance(given, (list, tuple)) or len(given) != len(channels):
        raise CollectiveError(
            operand, f"one list per channel of {channels}", repr(given), "write [[tensor]]"
        )
    return tuple(tensors(operand, inner, 1)[0] for inner in given)


def channels_of(channel_ids: object, rings: Rings) -> tuple[int, ...]:
    """Check that the channel ids are 0, 1, ..., and that there are at most as many as the groups allow."""
    ids = tuple(channel_ids) if isinstance(channel_ids, (list, tuple)) else ()
    most = 4 if len(rings) == 1 else 2
    if not ids or ids != tuple(range(len(ids))) or len(ids) > most:
        raise CollectiveError(
            "channel_ids",
            f"0, 1, ... and at most {most} channels for these groups",
            channel_ids,
            "count from 0",
        )
    return ids


def check_dim(dim: object, reads: Sequence[NkiTensor], on_chip: tuple[int, ...]) -> None:
    """Refuse a ``collective_dim`` that the memory of the operands does not allow."""
    allowed = on_chip if reads[0].storage.on_chip else (0,)
    if dim not in allowed:
        raise CollectiveError(
            "collective_dim", f"one of {allowed} for these operands", dim, "use dimension 0"
        )
    if reads[0].storage.on_chip and reads[0].ndim != 2:
        raise CollectiveError("srcs", "a 2-D tile in SBUF", reads[0].shape, "reshape it")


def check_split(src: NkiTensor, n: int) -> None:
    """Refuse a source that cannot be divided evenly among ``n`` ranks."""
    if src.shape[0] % n:
        raise CollectiveError("srcs", f"a dimension 0 divisible by {n}", src.shape, "pad it")


def check_hbm(reads: Sequence[NkiTensor], why: str = "this collective works on HBM") -> None:
    """Refuse tensors on chip."""
    if any(tensor.buffer in (MemoryRegion.sbuf, MemoryRegion.psum) for tensor in reads):
        raise PlacementError(
            "srcs", f"tensors in HBM: {why}", reads[0].buffer.value, "copy to shared HBM"
        )


def reduction(op: object) -> Apply:
    """Return the function that computes ``op``, which must be nl.add, nl.minimum or nl.maximum."""
    meaning = ops.find(op, "op", "arith")
    if meaning.name not in ("add", "minimum", "maximum"):
        raise CollectiveError(
            "op", "nl.add, nl.minimum or nl.maximum", f"nl.{meaning.name}", "use one of these"
        )
    return meaning.apply


def op_option(op: object) -> tuple[str, str]:
    """Return ``op`` as an option that must agree across the group."""
    return "op", ops.find(op, "op", "arith").name


def taken(who: str, tensor: NkiTensor) -> Values:
    """Return a copy of a source of the core ``who``; raise :class:`UninitializedError` if an element is unwritten."""
    if not is_written(tensor):
        raise UninitializedError(
            "src",
            "elements that were written before they are sent",
            f"{tensor.name or 'the tensor'} of {who} has elements that were never written",
            "write the whole tensor first",
        )
    return tensor.array.copy()


def reduced(parts: Sequence[Values], apply: Apply) -> Values:
    """Reduce the parts in order, in float32 or in their integer dtype."""
    wide = [to_float32(part) if part.dtype.kind not in "iub" else part for part in parts]
    return functools.reduce(apply, wide)


def part_of(tensor: NkiTensor, dim: int, index: int, parts: int) -> NkiTensor:
    """Return the ``index``-th of equal parts along ``dim``."""
    length = tensor.shape[dim] // parts
    return tensor.slice(dim, index * length, (index + 1) * length)


def times(shape: tuple[int, ...], dim: int, n: int) -> tuple[int, ...]:
    """Return ``shape`` with ``n`` times the length of ``dim``."""
    return tuple(length * n if d == dim else length for d, length in enumerate(shape))


def size_of(group: Sequence[NkiTensor]) -> int:
    """Return the number of elements of all tensors."""
    return sum(tensor.size for tensor in group)


def bytes_in(group: Sequence[NkiTensor]) -> int:
    """Return the number of bytes of all tensors."""
    return sum(tensor.size * tensor.dtype.itemsize for tensor in group)
