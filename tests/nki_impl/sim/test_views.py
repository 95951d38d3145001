"""Views share storage, say what NumPy says, and refuse what the machine cannot express."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    OutOfBoundsError,
    PartitionError,
    PlacementError,
    UnsupportedError,
    ViewError,
)
from nki_impl.sim.machine.core import Core

from .tiles import empty, normal, tile, values

ARRAY = np.arange(4 * 2 * 3 * 6, dtype=np.float32).reshape(4, 2, 3, 6)


@pytest.fixture
def t(core: Core) -> nl.NkiTensor:
    return tile(ARRAY)


@pytest.fixture
def h(core: Core) -> nl.NkiTensor:
    return tile(ARRAY, buffer=nl.hbm)


def test_views_show_what_numpy_shows(t: nl.NkiTensor) -> None:
    pairs: list[tuple[nl.NkiTensor, Any]] = [
        (t.slice(3, 1, 6, 2), ARRAY[..., 1:6:2]),
        (t.slice(-1, 0, 2), ARRAY[..., :2]),
        (t.select(2, 1), ARRAY[:, :, 1]),
        (t.permute((0, 3, 1, 2)), ARRAY.transpose(0, 3, 1, 2)),
        (t.expand_dim(2), ARRAY[:, :, None]),
        (t.expand_dim(2).squeeze_dim(2), ARRAY),
        (t.reshape_dim(3, (2, 3)), ARRAY.reshape(4, 2, 3, 2, 3)),
        (t.reshape_dim(3, (2, -1)), ARRAY.reshape(4, 2, 3, 2, 3)),
        (t.flatten_dims(1, 2), ARRAY.reshape(4, 6, 6)),
        (t.flatten_dims(1, 3), ARRAY.reshape(4, 36)),
        (t.reshape((4, 9, 4)), ARRAY.reshape(4, 9, 4)),
        (t[:, 0:1].broadcast(1, 5), np.broadcast_to(ARRAY[:, 0:1], (4, 5, 3, 6))),
        (t.rearrange(("p", "a", "b", ("c", "d")), ("p", "d", ("a", "b"), "c"), {"c": 2}),
         ARRAY.reshape(4, 2, 3, 2, 3).transpose(0, 4, 1, 2, 3).reshape(4, 3, 6, 2)),
    ]  # fmt: skip
    for view, expected in pairs:
        assert np.array_equal(view.array, expected)
        assert view.storage is t.storage


def test_views_compose_and_keep_offset_and_strides(t: nl.NkiTensor) -> None:
    view = t[2:4].permute((0, 2, 1, 3))[:, 1].slice(2, 2, 6, 2)
    assert np.array_equal(view.array, ARRAY[2:4].transpose(0, 2, 1, 3)[:, 1, :, 2:6:2])
    assert (view.offset, view.strides) == (2 * 36 + 6 + 2, (36, 18, 2))


def test_writing_through_a_view_is_seen_through_the_other(t: nl.NkiTensor) -> None:
    nisa.memset(t.reshape((4, 36))[:, 0:6], -1.0)
    assert (t.array[:, 0, 0, :] == -1).all() and (t.array[:, 0, 1, :] != -1).all()


def test_dimension_0_stays_where_it_is_on_chip_and_moves_in_hbm(
    t: nl.NkiTensor, h: nl.NkiTensor
) -> None:
    moves: list[Any] = [
        lambda x: x.permute((1, 0, 2, 3)),
        lambda x: x.reshape((8, 18)),
        lambda x: x.flatten_dims(0, 1),
        lambda x: x.reshape_dim(0, (2, 2)),
        lambda x: x.rearrange(("a", "b", "c", "d"), ("b", "a", "c", "d")),
        lambda x: x.expand_dim(0),
        lambda x: x.select(0, 1),
    ]
    for move in moves:
        with pytest.raises(ViewError):
            move(t)
        move(h)
    with pytest.raises(PartitionError):
        t[0:1].squeeze_dim(0)
    with pytest.raises(PartitionError):
        t[0:1].broadcast(0, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.reshape((4, 35)),
        lambda t: t.permute((0, 1, 1, 2)),
        lambda t: t.permute((0, 1, 2)),
        lambda t: t.broadcast(1, 4),
        lambda t: t.squeeze_dim(1),
        lambda t: t.reshape_dim(3, (4, -1)),
        lambda t: t.reshape_dim(3, (-1, -1)),
        lambda t: t.select(1, 2),
        lambda t: t.slice(7, 0, 1),
        lambda t: t.slice(1, 2, 1),
        lambda t: t.rearrange(("p", "a", "b"), ("p", "a", "b")),
        lambda t: t.rearrange(("p", "a", "b", ("c", "d")), ("p", "a", "b", "c")),
        lambda t: t.rearrange(("p", "a", "b", ("c", "d")), ("p", "a", "b", "d", "c")),
        lambda t: t.view(nl.int8).slice(3, 0, 3).view(nl.int16),
        lambda t: t.permute((0, 3, 1, 2)).reshape((4, 36)),
        lambda t: t[:, :, 0:2].flatten_dims(1, 2),
    ],
)
def test_a_view_that_cannot_be_expressed_is_refused(t: nl.NkiTensor, wrong: Any) -> None:
    with pytest.raises(ViewError):
        wrong(t)


def test_view_reinterprets_bits_and_rescales_the_last_dimension(core: Core) -> None:
    t = tile(normal(8, 4))
    assert np.array_equal(t.view(nl.int32).array, t.array.view(np.int32))
    assert t.view(nl.uint8).shape == (8, 16) and t.view(nl.uint8).view(nl.float32).shape == (8, 4)
    assert t.reinterpret_cast(nl.bfloat16).dtype is nl.bfloat16


def test_contiguity_is_judged_per_partition_on_chip(core: Core) -> None:
    t = empty((128, 4, 6))
    assert t[:, 0:2].is_contiguous() and not t[:, :, 0:2].is_contiguous()
    assert not t.permute((0, 2, 1)).is_contiguous()
    h = nl.ndarray((4, 6), nl.float32, nl.hbm)
    assert h[0:2].is_contiguous() and not h[:, 0:2].is_contiguous()


# Access patterns ------------------------------------------------------------------------------------


def test_ap_on_chip_begins_with_the_partition_stride(core: Core) -> None:
    t = tile(normal(64, 32))
    view = t.ap([[32, 64], [2, 8]], offset=3)
    assert np.array_equal(view.array, t.array[:, 3:19:2])
    assert t.ap([[32, 64], [0, 5]], offset=7).shape == (64, 5)
    for pattern in ([[1, 64], [1, 4]], [[64, 32], [1, 4]], [[32, 129], [1, 1]]):
        with pytest.raises((PartitionError, OutOfBoundsError)):
            t.ap(pattern)


def test_ap_on_chip_offset_by_whole_partitions(core: Core) -> None:
    t = tile(normal(64, 32))
    assert np.array_equal(t.ap([[32, 32], [1, 32]], offset=32 * 32).array, t.array[32:])


def test_ap_in_hbm_is_free_and_stays_inside(core: Core) -> None:
    h = tile(np.arange(24.0).reshape(4, 6), buffer=nl.hbm)
    assert np.array_equal(h.ap([[1, 3], [6, 4]], offset=2).array, h.array.T[2:5])
    assert np.array_equal(h.ap([[0, 2], [1, 6]]).array, np.stack([h.array[0]] * 2))
    with pytest.raises(OutOfBoundsError):
        nisa.dma_copy(dst=h, src=h.ap([[6, 4], [1, 6]], offset=1))
    for pattern in ([], [[1, 0]], [[1, 1, 1]], [[1, 1]] * 6):
        with pytest.raises(ViewError):
            h.ap(pattern)


def test_ap_on_a_slice_within_partitions_counts_from_the_slice_if_its_stride_does(
    core: Core,
) -> None:
    t = tile(normal(64, 32))
    part = t[:, 20:32]
    assert np.array_equal(part.ap([[12, 64], [1, 12]], offset=0).array, part.array)
    assert np.array_equal(part.ap([[12, 64], [2, 3]], offset=5).array, part.array[:, 5:10:2])
    assert np.array_equal(part.ap([[12, 1], [1, 4]], offset=2).array, part.array[:1, 2:6])
    assert np.array_equal(part.ap([[12, 64], [1, 12]]).array, part.array)
    halves = part.ap([[24, 64], [1, 24]], offset=0, dtype=nl.int16)
    assert np.array_equal(halves.array, np.ascontiguousarray(part.array).view(np.int16))
    # The stride of the storage: the pattern counts from the storage, as before.
    assert np.array_equal(part.ap([[32, 64], [1, 12]], offset=0).array, t.array[:, :12])
    with pytest.raises(OutOfBoundsError):
        nisa.memset(part.ap([[12, 64], [1, 13]], offset=0), 0.0)
    for view in (t[:, 0:32:2], t.reshape((64, 4, 8))[:, :, 0:4]):
        with pytest.raises(PartitionError, match="the first pair"):
            view.ap([[16, 64], [1, 16]], offset=0)


UNUSABLE: dict[str, Callable[[Any], Any]] = {
    "an empty index": lambda h: h[2:2],
    "an empty slice": lambda h: h.slice(1, 6, 6),
    "a pattern past the end": lambda h: h.ap([[6, 4], [1, 6]], offset=1),
    "a pattern before the start": lambda h: h.ap([[6, 1], [1, 6]], offset=-1),
}
USES: dict[str, Callable[[Any, Any], Any]] = {
    "source": lambda h, view: nisa.dma_copy(dst=h, src=view),
    "destination": lambda h, view: nisa.dma_copy(dst=view, src=h),
    "operand": lambda h, view: nisa.tensor_copy(dst=empty((4, 6)), src=view),
    "shape": lambda h, view: view.shape,
    "strides": lambda h, view: view.strides,
    "offset": lambda h, view: view.offset,
    "index": lambda h, view: view[0],
    "reshape": lambda h, view: view.reshape((6, 4)),
    "NumPy": lambda h, view: np.asarray(view.array),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", UNUSABLE)
def test_a_view_without_usable_elements_is_an_error_as_soon_as_it_is_used(
    core: Core, made: str, use: str
) -> None:
    """AWS's kernels make such views, and use them only where they are valid; a pattern has a shape everywhere."""
    h = tile(np.arange(24.0).reshape(4, 6), buffer=nl.sbuf if use == "operand" else nl.hbm)
    view = UNUSABLE[made](h)
    assert "no usable elements" in repr(view)
    if use == "shape" and "pattern" in made:
        assert view.shape == ((4, 6) if "past" in made else (1, 6))
        return
    made_at = inspect.getsourcelines(UNUSABLE[made])[1]
    with pytest.raises(ViewError if "empty" in made else OutOfBoundsError) as caught:
        USES[use](h, view)
    assert f"{__file__}:{made_at})" in str(caught.value)
    assert any(f"used at {__file__}" in note for note in caught.value.__notes__)


def test_ap_is_not_composed_and_an_explicit_offset_replaces_that_of_the_view(core: Core) -> None:
    h = tile(np.arange(24.0).reshape(4, 6), buffer=nl.hbm)
    assert h[2].ap([[1, 3]], offset=1).array.tolist() == [1, 2, 3]
    assert h[2].ap([[1, 3]]).array.tolist() == [12, 13, 14]
    assert h.ap([[6, 2], [2, 3]]).ap([[1, 4]], offset=0).array.tolist() == [0, 1, 2, 3]


def test_ap_can_reinterpret_the_dtype(core: Core) -> None:
    t = tile(normal(4, 4))
    assert np.array_equal(t.ap([[8, 4], [1, 8]], dtype=nl.int16).array, t.array.view(np.int16))


# Indices held on the device -------------------------------------------------------------------------


def index(value: int, dtype: Any = nl.int32) -> nl.NkiTensor:
    return tile(np.array([[value]]), dtype)


@pytest.mark.parametrize("kind", ["register", "int32", "uint32"])
def test_a_scalar_offset_counts_in_the_dimensions_after_indirect_dim(core: Core, kind: str) -> None:
    h = tile(np.arange(2 * 4 * 6.0).reshape(2, 4, 6), buffer=nl.hbm)
    at: Any = nisa.register_alloc(2) if kind == "register" else index(2, getattr(nl, kind))
    out = empty((2, 6))
    nisa.dma_copy(out, h.ap([[24, 2], [1, 6]], scalar_offset=at, indirect_dim=1))
    assert np.array_equal(values(out), h.array[:, 2])


def test_an_index_along_a_dimension_of_length_1_counts_in_the_longer_one_before_it(
    core: Core,
) -> None:
    h = tile(np.arange(2 * 4 * 6.0).reshape(2, 4, 1, 6), buffer=nl.hbm)
    out = empty((2, 6))
    nisa.dma_copy(out, h.ap([[24, 2], [1, 6]], scalar_offset=index(3), indirect_dim=2))
    assert np.array_equal(values(out), h.array[:, 3, 0])
    with pytest.raises(OutOfBoundsError, match="0 <= index < 4"):
        nisa.dma_copy(out, h.ap([[24, 2], [1, 6]], scalar_offset=index(4), indirect_dim=2))


@pytest.mark.parametrize(("shape", "dim", "buffer"), [((1, 6), 0, nl.hbm), ((4, 1, 6), 1, nl.sbuf)])
def test_an_index_along_a_dimension_of_length_1_is_0_if_no_longer_one_is_before_it(
    core: Core, shape: tuple[int, ...], dim: int, buffer: Any
) -> None:
    t = tile(np.zeros(shape), buffer=buffer)
    out = empty((shape[0], 6))
    with pytest.raises(OutOfBoundsError, match="0 <= index < 1"):
        nisa.dma_copy(out, t.ap([[6, shape[0]], [1, 6]], scalar_offset=index(1), indirect_dim=dim))


def test_a_register_is_read_when_the_instruction_runs(core: Core) -> None:
    h = tile(np.arange(8.0).reshape(8, 1), buffer=nl.hbm)
    register = nisa.register_alloc(1)
    source, out = h.ap([[1, 1], [1, 1]], scalar_offset=register), empty((1, 1))
    nisa.register_move(register, 5)
    nisa.dma_copy(out, source)
    assert values(out).item() == 5.0


def test_a_dynamic_destination_writes_there_alone(core: Core) -> None:
    h = tile(np.zeros((8, 2)), buffer=nl.hbm)
    nisa.dma_copy(h.select(0, index(3)), tile(np.ones((1, 2))))
    assert h.array.sum() == 2 and h.array[3].tolist() == [1, 1]


def test_select_by_index_on_chip_and_a_further_slice(core: Core) -> None:
    t = tile(normal(128, 8, 4))
    out = empty((128, 2))
    nisa.tensor_copy(out, t.select(1, index(6))[:, 1:3])
    assert np.array_equal(values(out), t.array[:, 6, 1:3])
    assert t.select(1, index(6)).is_indirect()


@pytest.mark.parametrize("value", [8, 100, -1])
def test_an_index_outside_raises_or_is_skipped(core: Core, value: int) -> None:
    h = tile(np.arange(8.0).reshape(8, 1), buffer=nl.hbm)
    out = tile(np.full((1, 1), 77.0))
    source = h.select(0, index(value))
    with pytest.raises(OutOfBoundsError, match="0 <= index < 8"):
        nisa.dma_copy(out, source)
    nisa.dma_copy(out, source, oob_mode=nisa.oob_mode.skip)
    assert values(out).item() == 77.0


def test_an_index_inside_whose_pattern_reaches_outside_raises(core: Core) -> None:
    h = tile(np.arange(8.0).reshape(8, 1), buffer=nl.hbm)
    with pytest.raises(OutOfBoundsError):
        nisa.dma_copy(empty((1, 4)), h.ap([[1, 1], [1, 4]], scalar_offset=index(5)))


def test_one_index_per_tensor_of_an_integer_dtype(core: Core) -> None:
    h = tile(np.zeros((8, 8, 2)), buffer=nl.hbm)
    with pytest.raises(ViewError, match="one dynamic index"):
        h.select(0, index(1)).select(0, index(1))
    with pytest.raises(DtypeError):
        nisa.dma_copy(empty((8, 2)), h.select(0, index(1, nl.float32)))
    with pytest.raises(ViewError):
        h.ap([[1, 1]], scalar_offset=index(1), vector_offset=index(1))
    with pytest.raises(ViewError):
        h.ap([[1, 1]], scalar_offset=index(1), indirect_dim=3)


def test_vector_offsets_gather_and_scatter_rows(core: Core) -> None:
    h = tile(normal(16, 4), buffer=nl.hbm)
    rows = tile(np.array([[3], [15], [0], [3]]), nl.int32)
    out = empty((4, 4))
    nisa.dma_copy(out, h.vector_select(0, rows))
    assert np.array_equal(values(out), h.array[[3, 15, 0, 3]])
    part = empty((4, 2))
    nisa.dma_copy(part, h.ap([[4, 4], [1, 2]], offset=1, vector_offset=rows))
    assert np.array_equal(values(part), h.array[[3, 15, 0, 3], 1:3])
    target = tile(np.zeros((16, 4)), buffer=nl.hbm)
    nisa.dma_copy(target.vector_select(0, rows[0:3]), out[0:3, :])
    assert np.array_equal(np.nonzero(target.array.any(axis=1))[0], [0, 3, 15])


def test_a_vector_offset_outside_raises_or_skips_that_row(core: Core) -> None:
    h = tile(np.arange(8.0).reshape(8, 1), buffer=nl.hbm)
    rows = tile(np.array([[7], [8], [2]]), nl.int32)
    out = tile(np.full((3, 1), -1.0))
    with pytest.raises(OutOfBoundsError):
        nisa.dma_copy(out, h.vector_select(0, rows))
    nisa.dma_copy(out, h.vector_select(0, rows), oob_mode=nisa.oob_mode.skip)
    assert values(out).ravel().tolist() == [7, -1, 2]


def test_a_vector_offset_inside_whose_row_reaches_outside_raises(core: Core) -> None:
    h = tile(np.arange(8.0).reshape(8, 1), buffer=nl.hbm)
    rows = tile(np.array([[1], [6]]), nl.int32)
    with pytest.raises(OutOfBoundsError):
        nisa.dma_copy(empty((2, 4)), h.ap([[1, 2], [1, 4]], vector_offset=rows))


def test_vector_offsets_are_for_hbm_dimension_0_and_dma(core: Core) -> None:
    rows = tile(np.zeros((4, 1)), nl.int32)
    with pytest.raises(UnsupportedError):
        empty((8, 4)).vector_select(0, rows)
    with pytest.raises(ViewError):
        empty((8, 4)).ap([[4, 4], [1, 4]], vector_offset=rows)
    h = tile(np.zeros((8, 4)), buffer=nl.hbm)
    with pytest.raises(PlacementError):
        nisa.tensor_copy(empty((4, 4)), h.vector_select(0, rows))
    with pytest.raises(ViewError):
        h.vector_select(0, rows)[0:2]
    with pytest.raises(UnsupportedError):
        h.indirect(rows)


def test_base_tensor_is_the_tensor_itself_and_no_view_has_one(t: nl.NkiTensor) -> None:
    assert t.base_tensor is t
    with pytest.raises(UnsupportedError, match="whole tensor"):
        _ = t[0:1].base_tensor
