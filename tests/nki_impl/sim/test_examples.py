"""The short examples of the official documentation, restated: the call, and what it says of the result.

Sources: the pages of these names below
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.language.html, and for memset and
shared_hbm nki/migration/nki-0-3-0-update-guide.html. Their ``assert nl.equal(c, expected)`` asks Python
for the value of a tile, which the simulator refuses; here the values are taken out of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DtypeError, DynamicValueError
from nki_impl.sim.machine.core import Core, acting_as
from nki_impl.sim.machine.launch import simulate

from .tiles import empty, values


def filled(value: float, width: int = 512) -> nl.NkiTensor:
    return nl.full((128, width), value, dtype=nl.float32, buffer=nl.sbuf)


@pytest.mark.parametrize(
    ("function", "x", "y", "expected"),
    [
        (nl.add, 3.0, 2.0, 5.0),
        (nl.subtract, 3.0, 2.0, 1.0),
        (nl.multiply, 3.0, 2.0, 6.0),
        (nl.divide, 6.0, 2.0, 3.0),
        (nl.maximum, 3.0, 5.0, 5.0),
        (nl.minimum, 3.0, 5.0, 3.0),
        (nl.power, 3.0, 2.0, 9.0),
    ],
)
def test_an_operator_takes_two_tiles_or_a_tile_and_a_number(
    core: Core, function: Any, x: float, y: float, expected: float
) -> None:
    for result in (function(filled(x), filled(y)), function(filled(x), y)):
        assert result.shape == (128, 512) and result.dtype is nl.float32
        assert (values(result) == expected).all()


@pytest.mark.parametrize(
    ("function", "x", "expected"), [(nl.abs, -1.0, 1.0), (nl.square, 3.0, 9.0)]
)
def test_an_operator_takes_one_tile_and_a_dtype(
    core: Core, function: Any, x: float, expected: float
) -> None:
    assert (values(function(filled(x))) == expected).all()
    half = function(filled(x), dtype=nl.float16)
    assert half.dtype is nl.float16 and (values(half) == expected).all()


@pytest.mark.parametrize(
    ("function", "x", "y", "expected"),
    [
        (nl.abs_max, -5.0, 3.0, -5.0),  # the number itself, not its magnitude
        (nl.abs_max, 1.0, -1.0, -1.0),  # equal magnitudes: the second
        (nl.abs_min, 5.0, -3.0, -3.0),
        (nl.abs_min, 1.0, -1.0, -1.0),
    ],
)
def test_abs_max_and_abs_min_return_one_of_their_arguments(
    function: Any, x: float, y: float, expected: float
) -> None:
    with acting_as(Core(target="trn3")):
        assert (values(function(filled(x), filled(y, width=1))) == expected).all()


def test_an_operator_repeats_a_column_over_a_tile_on_either_side(core: Core) -> None:
    column = nl.full((128, 1), 3.0, dtype=nl.float32)
    assert (values(nl.subtract(filled(5.0), column)) == 2.0).all()
    assert (values(nl.subtract(column, filled(5.0))) == -2.0).all()


def test_the_truth_of_a_tile_is_refused(core: Core) -> None:
    with pytest.raises(DynamicValueError):
        assert nl.equal(filled(1.0), filled(1.0))


def test_broadcast_to_repeats_dimensions_of_length_1_partitions_too(core: Core) -> None:
    row = nl.full((1, 512), 2.0, dtype=nl.float32)
    out = nl.broadcast_to(row, (128, 512))
    assert out.shape == (128, 512) and (values(out) == 2.0).all()
    assert nl.broadcast_to(row, (1, 512)) is row
    assert nl.broadcast_to(row, (1, 512), dtype=nl.bfloat16).dtype is nl.bfloat16


def test_memset_wants_an_int_for_integers_and_takes_0_for_floats(core: Core) -> None:
    tile = empty((128, 128), nl.int32)
    nisa.memset(dst=tile, value=2)
    assert (values(tile) == 2).all()
    with pytest.raises(DtypeError, match="value"):
        nisa.memset(dst=tile, value=2.0)
    sums = empty((128, 128), nl.bfloat16)
    nisa.memset(dst=sums, value=0)
    assert (values(sums) == 0).all()


def test_the_first_example_of_the_simulator_adds_two_tensors() -> None:
    def kernel(a: Any, b: Any) -> Any:
        out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
        nl.store(out, value=nl.add(nl.load(a), nl.load(b)))
        return out

    rng = np.random.default_rng(0)
    a, b = rng.random((2, 128, 512), dtype=np.float32)
    assert np.array_equal(simulate(kernel)(a, b), a + b)
