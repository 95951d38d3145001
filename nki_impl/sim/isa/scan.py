"""Instructions of the vector engine that run along a partition: a scan of two tiles, and statistics for batch norm.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.isa.html
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_impl.sim.errors import ShapeError
from nki_impl.sim.isa.common import (
    combine,
    free_limit,
    free_size,
    generation_op,
    not_both_psum,
    read_flat,
    same_size,
    scalar_operand,
)
from nki_impl.sim.machine.core import current, instruction
from nki_impl.sim.operators.ops import find
from nki_impl.sim.tensor.access import tile, write
from nki_impl.sim.tensor.views import NkiTensor

ARITH = ("arith", "arith4", "compare")
BN_STATS_FREE = 512


@instruction
def tensor_tensor_scan(
    dst: NkiTensor,
    data0: NkiTensor,
    data1: NkiTensor,
    initial: float | NkiTensor,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """Compute r[i] = (data0[i] op0 r[i-1]) op1 data1[i] along each partition, where r[-1] is ``initial``.

    ``initial`` is a number, or a (P,1) tile with one number for each partition. r stays in float32; each r[i] is
    rounded once when it is written to dst. ``reverse0`` swaps the operands of op0, ``reverse1`` the operands of op1.
    data0 and data1 must not both be in PSUM; their free dimensions are flattened.
    """
    core = current()
    dst, data0, data1 = tile(dst, "dst"), tile(data0, "data0"), tile(data1, "data1")
    same_size(data0, "data0", data1, "data1")
    same_size(data0, "data0", dst, "dst")
    not_both_psum(data0, "data0", data1, "data1")
    free_limit(data0, "data0")
    first, second = find(op0, "op0", *ARITH), find(op1, "op1", *ARITH)
    generation_op(first, core, "op0")
    generation_op(second, core, "op1")
    a, b = read_flat(data0, "data0"), read_flat(data1, "data1")
    start = scalar_operand(initial, "initial", a.shape[0], float32=False)
    state = np.broadcast_to(start, (a.shape[0], 1))[:, 0]
    out = np.empty(a.shape, np.float32)
    for i in range(a.shape[1]):
        state = combine(second, combine(first, a[:, i], state, reverse0), b[:, i], reverse1)
        out[:, i] = state
    write(dst, out)
    core.count("vector", dst._array.size)


def _moments(values: Any) -> tuple[Any, Any, Any]:
    """Return count, mean and variance * count of each row, in float32."""
    count = values.shape[1]
    if not count:
        zero = np.zeros(values.shape[0], np.float32)
        return zero, zero, zero
    mean = values.sum(axis=1, dtype=np.float32) / np.float32(count)
    spread = np.square(values - mean[:, None]).sum(axis=1, dtype=np.float32)
    return np.full_like(mean, count), mean, spread


@instruction
def bn_stats(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Write count, mean and variance * count of each partition, for its even elements and then for its odd elements.

    ``data`` has at most 512 elements per partition; dst has 6.
    """
    dst, data = tile(dst, "dst"), tile(data, "data")
    if free_size(data) > BN_STATS_FREE:
        raise ShapeError(
            "data",
            f"at most {BN_STATS_FREE} elements per partition",
            free_size(data),
            "call it once per 512 elements, and pass all results to bn_aggr",
        )
    _check_result(dst, data, 6)
    values = read_flat(data, "data")
    parts = [*_moments(values[:, 0::2]), *_moments(values[:, 1::2])]
    write(dst, np.stack(parts, axis=1))
    current().count("vector", data._array.size)


@instruction
def bn_aggr(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """Write mean and variance of each partition, computed from triples (count, mean, variance * count).

    ``data`` holds the results of one or several calls of :func:`bn_stats`; dst has 2 elements per partition. The
    variance is the population variance.
    """
    dst, data = tile(dst, "dst"), tile(data, "data")
    if free_size(data) % 3:
        raise ShapeError(
            "data", "triples: a multiple of 3 elements per partition", free_size(data),
            "pass complete results of bn_stats",
        )  # fmt: skip
    _check_result(dst, data, 2)
    values = read_flat(data, "data")
    counts, means, spreads = values[:, 0::3], values[:, 1::3], values[:, 2::3]
    total = counts.sum(axis=1)
    mean = (counts * means).sum(axis=1) / total
    spread = (spreads + counts * np.square(means - mean[:, None])).sum(axis=1)
    write(dst, np.stack([mean, spread / total], axis=1))
    current().count("vector", data._array.size)


def _check_result(dst: NkiTensor, data: NkiTensor, size: int) -> None:
    partitions = data._array.shape[0]
    if dst._array.shape[0] != partitions or free_size(dst) != size:
        raise ShapeError("dst", f"({partitions}, {size})", dst.shape, f"allocate (P, {size})")
