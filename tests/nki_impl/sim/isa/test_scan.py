"""The scan of two tiles and the statistics of batch norm, against direct NumPy statements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    PlacementError,
    ShapeError,
    TargetError,
    UninitializedError,
)
from nki_impl.sim.machine.core import Core

from ..tiles import bf16, empty, normal, tile, values

F32 = np.float32


def scanned(a: Any, b: Any, start: Any, op0: Any, op1: Any) -> Any:
    """r[i] = op1(op0(a[i], r[i-1]), b[i]) of every row, in float32."""
    state = np.broadcast_to(np.asarray(start, F32).reshape(-1), (len(a),))
    columns = []
    for i in range(a.shape[1]):
        state = op1(op0(a[:, i], state), b[:, i]).astype(F32)
        columns.append(state)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize(
    ("op0", "op1", "numpy0", "numpy1"),
    [
        (nl.multiply, nl.add, np.multiply, np.add),
        (nl.add, nl.multiply, np.add, np.multiply),
        (nl.maximum, nl.subtract, np.maximum, np.subtract),
        (nl.subtract, nl.minimum, np.subtract, np.minimum),
        (nl.less, nl.add, lambda a, b: (a < b).astype(F32), np.add),
    ],
)
def test_the_scan_goes_on_from_its_last_value(
    core: Core, op0: Any, op1: Any, numpy0: Any, numpy1: Any
) -> None:
    a, b, first = normal(8, 33), normal(8, 33, seed=1), normal(8, 1, seed=2)
    out = empty((8, 33))
    nisa.tensor_tensor_scan(out, tile(a), tile(b), tile(first), op0, op1)
    assert np.array_equal(values(out), scanned(a, b, first, numpy0, numpy1))
    nisa.tensor_tensor_scan(out, tile(a), tile(b, None, nl.psum), 0.5, op0, op1)
    assert np.array_equal(values(out), scanned(a, b, 0.5, numpy0, numpy1))


def test_the_scan_swaps_operands_and_flattens_the_free_dimensions(core: Core) -> None:
    a, b = normal(4, 3, 5), normal(4, 3, 5, seed=1)
    out = empty((4, 3, 5))
    nisa.tensor_tensor_scan(out, tile(a), tile(b), 1.0, nl.subtract, nl.subtract, True, True)
    expected = scanned(
        a.reshape(4, 15), b.reshape(4, 15), 1.0, lambda x, y: y - x, lambda x, y: y - x
    )
    assert np.array_equal(values(out).reshape(4, 15), expected)


def test_the_state_of_the_scan_is_not_rounded_to_the_output(core: Core) -> None:
    a, b = bf16(normal(4, 64)), bf16(normal(4, 64, seed=1))
    out = empty((4, 64), nl.bfloat16)
    nisa.tensor_tensor_scan(
        out, tile(a, nl.bfloat16), tile(b, nl.bfloat16), 0.0, nl.multiply, nl.add
    )
    state = scanned(a, b, 0.0, np.multiply, np.add)
    assert np.array_equal(values(out), bf16(state))
    rounded = np.zeros(4, F32)
    for i in range(64):
        rounded = bf16(a[:, i] * rounded + b[:, i])
    assert not np.array_equal(values(out)[:, -1], rounded)


def test_the_scan_refuses_what_the_machine_cannot_do(core: Core) -> None:
    a, b, out = tile(normal(8, 6)), tile(normal(8, 6)), empty((8, 6))
    with pytest.raises(ShapeError, match="data1"):
        nisa.tensor_tensor_scan(out, a, b[:, 0:5], 0.0, nl.multiply, nl.add)
    with pytest.raises(ShapeError, match="initial"):
        nisa.tensor_tensor_scan(out, a, b, tile(normal(8, 2)), nl.multiply, nl.add)
    both = tile(normal(8, 6), None, nl.psum)
    with pytest.raises(PlacementError, match="data1"):
        nisa.tensor_tensor_scan(out, both, both, 0.0, nl.multiply, nl.add)
    with pytest.raises(DtypeError, match="op0"):
        nisa.tensor_tensor_scan(out, a, b, 0.0, nl.bitwise_and, nl.add)
    with pytest.raises(TargetError, match="op1"):
        nisa.tensor_tensor_scan(out, a, b, 0.0, nl.add, nl.abs_max)
    with pytest.raises(UninitializedError, match="data0"):
        nisa.tensor_tensor_scan(out, empty((8, 6)), b, 0.0, nl.add, nl.add)


@pytest.mark.parametrize("size", [1, 2, 7, 512])
def test_bn_stats_gives_the_moments_of_even_and_odd_elements(core: Core, size: int) -> None:
    x = normal(8, size) + F32(3)
    out = empty((8, 6))
    nisa.bn_stats(out, tile(x))
    for part, got in ((x[:, 0::2], values(out)[:, :3]), (x[:, 1::2], values(out)[:, 3:])):
        count = part.shape[1]
        wide = part.astype(np.float64)
        mean = wide.mean(axis=1) if count else np.zeros(8)
        assert (got[:, 0] == count).all()
        assert np.abs(got[:, 1] - mean).max() <= 1e-6
        spread = np.square(wide - mean[:, None]).sum(axis=1)
        assert np.abs(got[:, 2] - spread).max() <= 1e-6 * max(1, count)


def test_bn_aggr_joins_tiles_of_any_length(core: Core) -> None:
    x = normal(8, 700) * F32(2) - F32(5)
    stats = empty((8, 2, 6))
    for i, (first, last) in enumerate(((0, 512), (512, 700))):
        nisa.bn_stats(stats[:, i], tile(x[:, first:last]))
    out = empty((8, 2))
    nisa.bn_aggr(out, stats)
    wide = x.astype(np.float64)
    assert np.abs(values(out)[:, 0] - wide.mean(axis=1)).max() <= 2e-6
    assert np.abs(values(out)[:, 1] - wide.var(axis=1)).max() <= 1e-5


def test_bn_statistics_refuse_wrong_sizes(core: Core) -> None:
    with pytest.raises(ShapeError, match="at most 512"):
        nisa.bn_stats(empty((8, 6)), tile(normal(8, 513)))
    with pytest.raises(ShapeError, match="dst"):
        nisa.bn_stats(empty((8, 5)), tile(normal(8, 12)))
    with pytest.raises(ShapeError, match="multiple of 3"):
        nisa.bn_aggr(empty((8, 2)), tile(normal(8, 4)))
    with pytest.raises(ShapeError, match="dst"):
        nisa.bn_aggr(empty((8, 3)), tile(normal(8, 6)))
