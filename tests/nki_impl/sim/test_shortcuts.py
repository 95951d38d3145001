"""What the simulator remembers to run faster must not change what it reports, or any bit of a result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim import nki
from nki_impl.sim.errors import UninitializedError
from nki_impl.sim.machine import core as machine_core
from nki_impl.sim.machine.core import Core, acting_as
from nki_impl.sim.machine.launch import run_ranks
from nki_impl.sim.machine.turns import Machine
from nki_impl.sim.tensor.access import is_written, unwritten, write
from nki_impl.sim.tensor.patterns import view_of

from .tiles import empty, normal, tile, values

SHAPE = (4, 4, 6)


def some_slice(rng: np.random.Generator, size: int, whole: bool) -> slice:
    """Return all of a dimension, as the usual instruction has it, or a part."""
    if whole:
        return slice(None)
    start = int(rng.integers(size))
    return slice(start, int(rng.integers(start + 1, size + 1)))


def some_view(rng: np.random.Generator, whole: nl.NkiTensor) -> nl.NkiTensor:
    """Return a random view of ``whole``: an index, an access pattern, another dtype, or several of these.

    A DMA that gathers rows uses views of one partition, whose first dimension is not the partitions.
    """
    if rng.random() < 0.1:
        return view_of(whole, whole.array[int(rng.integers(SHAPE[0]))], whole.dtype)
    if rng.random() < 0.2:
        free, count = 24, int(rng.integers(1, SHAPE[0] + 1))
        length = int(rng.integers(1, 13))
        start = int(rng.integers(0, (SHAPE[0] - count) * free + free - length + 1))
        return whole.ap([[free, count], [1, length]], offset=start)
    keys: list[Any] = [some_slice(rng, size, rng.random() < 0.6) for size in SHAPE]
    if rng.random() < 0.4:
        keys[1] = int(rng.integers(SHAPE[1]))
    view = whole[tuple(keys)]
    if rng.random() < 0.2 and view.strides[-1] == 1:
        view = view.view(nl.uint8)
    if rng.random() < 0.2:
        view = view[1:] if view.shape[0] > 1 else view[:, 0:1]
    return view


def first_address(array: np.ndarray) -> int:
    """Return the address of the first element of ``array``."""
    return int(array.__array_interface__["data"][0])


def bytes_in(marks: np.ndarray, view: nl.NkiTensor) -> np.ndarray:
    """Return the entries of ``marks``, one for each byte of the storage, that belong to ``view``."""
    address = first_address(view.array) - first_address(view.storage.raw)
    shape, strides = (*view.shape, view.dtype.itemsize), (*view.array.strides, 1)
    return np.ndarray(shape, np.bool_, marks, address, strides)


@pytest.mark.parametrize("seed", range(40))
def test_written_elements_are_known_exactly_after_any_writes(core: Core, seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = empty(SHAPE, nl.bfloat16)
    marks = np.zeros(whole.storage.raw.size, np.bool_)
    for _ in range(12):
        target = some_view(rng, whole)
        write(target, np.zeros(target.shape, target.dtype.storage))
        bytes_in(marks, target)[...] = True
        for _ in range(6):
            view = some_view(rng, whole)
            mine = bytes_in(marks, view)
            assert is_written(view) == mine.all()
            holes = unwritten(view)
            known = np.zeros(view.shape, np.bool_) if holes is None else holes
            assert np.array_equal(known, ~mine.all(axis=-1))
        unit = whole.storage.unit
        assert whole.storage.missing == np.count_nonzero(~marks.reshape(-1, unit)[:, 0])


PLACES = (
    ((64, 4, 6), nl.bfloat16, (0, 0)),
    ((64, 10), nl.float32, (0, 21)),
    ((32, 60), nl.uint8, (32, 5)),
    ((64, 12), nl.float32, (0, 0)),
)


def in_memory(view: nl.NkiTensor, place: tuple[int, int]) -> Any:
    """Return the partition and byte in SBUF of each byte of ``view``, whose storage is at ``place``."""
    numbers = np.arange(view.storage.raw.size)
    shape, strides = (*view.shape, view.dtype.itemsize), [8 * s for s in (*view.array.strides, 1)]
    mine = np.ndarray(shape, numbers.dtype, numbers, 8 * view.byte_offset, strides)
    rows, columns = np.divmod(mine, view.storage.partition_bytes)
    return rows + place[0], columns + place[1]


def state(tensor: nl.NkiTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return which elements of a whole tensor are written, and which have lost a byte to another tensor."""
    storage, shape = tensor.storage, tensor.shape
    size = (shape[0], storage.partition_bytes // storage.unit)
    written = np.full(size, storage.missing == 0)
    if storage.mask is not None:
        written[...] = storage.mask.reshape(1 if storage.alike else shape[0], -1)
    lost = np.zeros(size, np.bool_)
    if storage.lost is not None:
        lost[...] = storage.lost
    assert storage.missing == np.count_nonzero(~written)
    elements = (*shape, tensor.dtype.itemsize // storage.unit)
    return written.reshape(elements).all(axis=-1), lost.reshape(elements).any(axis=-1)


@pytest.mark.parametrize("seed", range(30))
def test_lost_elements_are_known_exactly_after_any_writes(core: Core, seed: int) -> None:
    """The first two tensors share bytes in all partitions, the third in the upper half; the fourth is where the first is."""
    rng = np.random.default_rng(seed)
    tensors = [nl.ndarray(shape, kind, address=place) for shape, kind, place in PLACES]
    ever = [np.zeros(shape, np.bool_) for shape, _, _ in PLACES]
    writer = np.full((64, 100), -1)
    for _ in range(25):
        number = int(rng.integers(len(PLACES)))
        view = tensors[number]
        key = tuple(some_slice(rng, n, rng.random() < 0.7) for n in view.shape)
        part: Any = key if rng.random() < 0.7 else ...
        view = view if part is ... else view[part]
        if rng.random() < 0.2 and view.strides[-1] == 1:
            view = view.view(nl.uint8)
        write(view, np.zeros(view.shape, view.dtype.storage))
        ever[number][part] = True
        writer[in_memory(view, PLACES[number][2])] = number
        for index, tensor in enumerate(tensors):
            mine = (writer[in_memory(tensor, PLACES[index][2])] == index).all(axis=-1)
            written, lost = state(tensor)
            assert np.array_equal(written, mine)
            assert np.array_equal(lost, ever[index] & ~mine)


def test_a_place_that_is_used_again_and_again_remembers_only_the_tensor_that_fills_it(
    core: Core,
) -> None:
    for size in (4, 8, 4, 8, 4, 8):
        used = nl.ndarray((64, size), nl.float32, address=(0, 0))
        nisa.memset(used[:, 0:size], 1.0)
    sites = core.memory.sbuf_sites.values()
    assert [(site.extent[3], len(site.near)) for site in sites] == [(16, 2), (32, 2)]
    kept = [nl.ndarray((64, 4), nl.float32, address=(0, 0)) for _ in range(50)]
    for tensor in kept:
        nisa.memset(tensor, 1.0)
    assert max(len(site.filled) for site in sites) == 1


@pytest.mark.parametrize("seed", range(20))
def test_the_offset_of_a_view_is_the_place_of_its_first_element(core: Core, seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = empty(SHAPE, nl.bfloat16)
    for _ in range(20):
        view = some_view(rng, whole)
        address = first_address(view.array) - first_address(whole.storage.raw)
        assert view.byte_offset == address


WRITES: dict[str, Callable[[nl.NkiTensor, nl.NkiTensor], Any]] = {
    "memset": lambda t, other: nisa.memset(t, 2.0),
    "tensor_copy": lambda t, other: nisa.tensor_copy(t, other),
    "dma_copy": lambda t, other: nisa.dma_copy(t, other),
    "tensor_scalar": lambda t, other: nisa.tensor_scalar(t, t, nl.multiply, 3.0),
    "a part": lambda t, other: nisa.memset(t[:, 3:4], 2.0),
    "another dtype": lambda t, other: nisa.memset(t.view(nl.uint16), 0x4000),
    "copy_predicated": lambda t, other: nisa.tensor_copy_predicated(
        t, other, tile(np.arange(128 * 8).reshape(128, 8) % 2, nl.uint8)
    ),
}


@pytest.mark.parametrize("written", WRITES)
def test_a_product_uses_what_was_written_last(core: Core, written: str) -> None:
    """nc_matmul keeps operands that it read twice; the third product must not use them after a write."""
    moving = tile(normal(128, 8), nl.bfloat16)
    other = tile(normal(128, 8, seed=1), nl.bfloat16)
    eye = tile(np.eye(128), nl.bfloat16)
    product = empty((128, 8), nl.float32, nl.psum)
    for _ in range(3):
        nisa.nc_matmul(product, eye, moving, accumulate=False)
        assert np.array_equal(values(product), values(moving))
    before = values(product).copy()
    WRITES[written](moving, other)
    nisa.nc_matmul(product, eye, moving, accumulate=False)
    assert np.array_equal(values(product), values(moving))
    assert not np.array_equal(values(product), before)


def test_a_product_refuses_an_operand_that_lost_elements_after_two_reads(core: Core) -> None:
    moving, eye = tile(normal(128, 8), nl.bfloat16), tile(np.eye(128), nl.bfloat16)
    product = empty((128, 8), nl.float32, nl.psum)
    for _ in range(3):
        nisa.nc_matmul(product, eye, moving, accumulate=False)
    nisa.tensor_copy(moving, empty((128, 8), nl.bfloat16))
    with pytest.raises(UninitializedError, match="never written"):
        nisa.nc_matmul(product, eye, moving, accumulate=False)


def test_a_tile_of_tfloat32_is_rounded_when_it_is_written(core: Core) -> None:
    """tfloat32 is stored as float32, so only its own name says that a write must round."""
    out = empty((128, 4), nl.tfloat32)
    nisa.tensor_scalar(out, tile(np.full((128, 4), 1 + 2**-12)), nl.add, 0.0)
    assert (values(out) == 1.0).all()


class InterruptsOnce:
    """A lock that stands for the user's interruption: the second wait for it ends with KeyboardInterrupt."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.waits = 0

    def acquire(self) -> bool:
        self.waits += 1
        if self.waits == 2:
            time.sleep(0.02)
            raise KeyboardInterrupt
        return bool(self.lock.acquire())

    def release(self) -> None:
        self.lock.release()


def test_an_interrupt_stops_a_kernel_that_is_not_interleaved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Machine.__init__

    def prepare(self: Machine, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._done = InterruptsOnce(self._done)  # type: ignore[assignment]

    monkeypatch.setattr(Machine, "__init__", prepare)
    most, counted = 100_000, []

    @nki.jit
    def kernel() -> None:
        t = nl.ndarray((1, 1), nl.float32)
        for _ in range(most):
            nisa.memset(t, 0.0)
            counted.append(None)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(kernel, [(), ()])
    assert len(counted) < most


@pytest.mark.parametrize("length", [96, 512, 1000, 4096])
def test_results_do_not_depend_on_the_size_of_numpys_buffers(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    before, results = np.getbufsize(), []
    for size in (8192, machine_core._BUFFER_SIZE, 16):
        monkeypatch.setattr(machine_core, "_BUFFER_SIZE", size)
        with acting_as(Core()):
            assert np.getbufsize() == size
            wide = tile(normal(128, 2 * length), nl.bfloat16)
            data, column = wide[:, :length], tile(normal(128, 1, seed=1))
            out, total, top = empty((128, length)), empty((128, 1)), empty((128, 1))
            nisa.activation(
                out, nl.exp, data, column, 0.5, nl.add, total, nisa.reduce_cmd.reset_reduce
            )
            nisa.tensor_scalar(out, out, nl.multiply, column, op1=nl.add, operand1=column)
            nisa.tensor_reduce(top, nl.add, out, axis=1)
            results.append([values(out), values(total), values(top)])
        assert np.getbufsize() == before
    for other in results[1:]:
        for expected, got in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(expected.view(np.uint32), got.view(np.uint32))
