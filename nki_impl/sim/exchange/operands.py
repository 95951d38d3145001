"""The operands of collectives: lists, channels, splits, and the reduction of several sources.

Every check raises CollectiveError or another error of :mod:`nki_impl.sim.errors`.
"""

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
from nki_impl.sim.tensor.overlap import refuse_lost
from nki_impl.sim.tensor.views import NkiTensor

Values = NDArray[Any]
Apply = Callable[[Values, Values], Values]


def tensors(operand: str, given: object, how_many: int | None = None) -> tuple[NkiTensor, ...]:
    """Return ``given``, a list of tensors, as a tuple; raise unless it has ``how_many`` (None: at least one)."""
    if not isinstance(given, (list, tuple)) or not all(isinstance(t, NkiTensor) for t in given):
        raise CollectiveError(operand, "a list of tensors", repr(given), "write [tensor]")
    if not given or (how_many is not None and len(given) != how_many):
        wanted = "at least one tensor" if how_many is None else f"exactly {how_many} tensor"
        raise CollectiveError(operand, wanted, f"{len(given)}", "issue one collective per tensor")
    return tuple(given)


def agree(srcs: Sequence[NkiTensor], dsts: Sequence[NkiTensor]) -> None:
    """Check that sources and destinations have the same number and the same dtypes."""
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
    """Check that a destination has ``shape``."""
    if tensor.shape != shape:
        raise CollectiveError(
            operand, f"shape {shape}: {why}", tensor.shape, "allocate it with this shape"
        )


def paired_lists(srcs: object, dsts: object) -> tuple[tuple[NkiTensor, ...], tuple[NkiTensor, ...]]:
    """Return sources and destinations as tuples of equal length; outside HBM, the length must be 1."""
    reads, writes = tensors("srcs", srcs), tensors("dsts", dsts)
    agree(reads, writes)
    if len(reads) > 1:
        check_hbm(reads, "several tensors at once are possible only there")
    return reads, writes


def by_channel(operand: str, given: object, channels: tuple[int, ...]) -> tuple[NkiTensor, ...]:
    """Return the tensor of each channel; ``given`` has one list with one tensor for each channel."""
    if not isinstance(given, (list, tuple)) or len(given) != len(channels):
        raise CollectiveError(
            operand, f"one list per channel of {channels}", repr(given), "write [[tensor]]"
        )
    return tuple(tensors(operand, inner, 1)[0] for inner in given)


def channels_of(channel_ids: object, rings: Rings) -> tuple[int, ...]:
    """Check that the channel ids are 0, 1, ..., and that there are at most 4 with one group, or 2 with several."""
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
    """Check that ``collective_dim`` is one that operands in this memory allow."""
    allowed = on_chip if reads[0].storage.on_chip else (0,)
    if dim not in allowed:
        raise CollectiveError(
            "collective_dim", f"one of {allowed} for these operands", dim, "use dimension 0"
        )
    if reads[0].storage.on_chip and reads[0].ndim != 2:
        raise CollectiveError("srcs", "a 2-D tile in SBUF", reads[0].shape, "reshape it")


def check_split(src: NkiTensor, n: int) -> None:
    """Check that dimension 0 of a source can be divided evenly among ``n`` ranks."""
    if src.shape[0] % n:
        raise CollectiveError("srcs", f"a dimension 0 divisible by {n}", src.shape, "pad it")


def check_hbm(
    reads: Sequence[NkiTensor], why: str = "this collective works on HBM", operand: str = "srcs"
) -> None:
    """Check that no tensor is on chip."""
    if any(tensor.buffer in (MemoryRegion.sbuf, MemoryRegion.psum) for tensor in reads):
        raise PlacementError(
            operand, f"tensors in HBM: {why}", reads[0].buffer.value, "copy to shared HBM"
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
    """Return ``op`` as a (name, value) option, which must be equal in all calls of a collective."""
    return "op", ops.find(op, "op", "arith").name


def taken(who: str, tensor: NkiTensor) -> Values:
    """Return a copy of a source of the core ``who``; raise :class:`UninitializedError` if an element is unwritten."""
    if not is_written(tensor):
        refuse_lost(tensor, "src")
        raise UninitializedError(
            "src",
            "elements that were written before they are sent",
            f"{tensor.name or 'the tensor'} of {who} has elements that were never written",
            "write the whole tensor first",
        )
    return tensor.array.copy()


def reduced(parts: Sequence[Values], apply: Apply) -> Values:
    """Reduce ``parts`` in their order, floats in float32 and integers in their own dtype."""
    wide = [to_float32(part) if part.dtype.kind not in "iub" else part for part in parts]
    return functools.reduce(apply, wide)


def part_of(tensor: NkiTensor, dim: int, index: int, parts: int) -> NkiTensor:
    """Return part ``index`` of a tensor that is cut along ``dim`` into ``parts`` equal parts."""
    length = tensor.shape[dim] // parts
    return tensor.slice(dim, index * length, (index + 1) * length)


def times(shape: tuple[int, ...], dim: int, n: int) -> tuple[int, ...]:
    """Return ``shape`` with its length in dimension ``dim`` multiplied by ``n``."""
    return tuple(length * n if d == dim else length for d, length in enumerate(shape))


def size_of(group: Sequence[NkiTensor]) -> int:
    """Return the number of elements of all tensors."""
    return sum(tensor.size for tensor in group)


def bytes_in(group: Sequence[NkiTensor]) -> int:
    """Return the number of bytes of all tensors."""
    return sum(tensor.size * tensor.dtype.itemsize for tensor in group)
