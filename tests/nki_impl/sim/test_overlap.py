"""Tensors placed at overlapping addresses, and copies whose destination overlaps their source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import MatmulError, OverlapError
from nki_impl.sim.machine.core import Core, acting_as
from nki_impl.sim.tensor.access import to_numpy as values

F32 = np.float32


@pytest.fixture(autouse=True)
def core() -> Iterator[Core]:
    with acting_as(Core()) as core:
        yield core


def placed(columns: int, byte: int, name: str, value: float | None = None, **options: Any) -> Any:
    buffer = options.pop("buffer", nl.sbuf)
    partition, rows = options.pop("partition", 0), options.pop("rows", 32)
    dtype = options.pop("dtype", nl.float32)
    t = nl.ndarray((rows, columns), dtype, buffer, name=name, address=(partition, byte))
    if value is not None:
        nisa.memset(t, value)
    return t


def copied(t: Any) -> Any:
    out = nl.ndarray(t.shape, t.dtype)
    nisa.tensor_copy(out, t)
    return values(out)


def refused(call: Callable[[], Any], *texts: str) -> None:
    with pytest.raises(OverlapError) as caught:
        call()
    for text in texts:
        assert text in str(caught.value)


def line_of(function: Any, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f":{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.parametrize("buffer", [nl.sbuf, nl.psum])
def test_reading_a_tensor_after_another_was_written_over_it_names_both_and_their_lines(
    buffer: Any,
) -> None:
    a = nl.ndarray((32, 8), nl.float32, buffer, name="a", address=(0, 64))  # here a
    b = nl.ndarray((32, 8), nl.float32, buffer, name="b", address=(0, 80))  # here b
    nisa.memset(a, 1.0)
    nisa.memset(b, 2.0)  # the write
    here = test_reading_a_tensor_after_another_was_written_over_it_names_both_and_their_lines
    lines = [line_of(here, text) for text in ("# here a", "# here b", "# the write")]
    for read in (copied, lambda t: nisa.tensor_scalar(t, t, nl.add, 1.0)):
        refused(lambda read=read: read(a), "a (", "b (", "128 of 256", *lines)
    assert copied(b).max() == 2.0


def test_an_older_tensor_that_is_no_longer_read_may_be_overwritten() -> None:
    for step in range(4):
        t = placed(8, 0, f"t{step}", float(step))
        assert copied(t).min() == step


def test_what_does_not_overlap_may_still_be_read() -> None:
    a, b = placed(8, 0, "a", 1.0), placed(8, 16, "b")
    nisa.memset(b[:, 4:8], 2.0)  # bytes 32 to 47, past the end of a
    assert copied(a).max() == 1.0
    nisa.memset(b[0:1, 0:1], 2.0)  # row 0, bytes 16 to 19, column 4 of a
    assert copied(a[:, 0:4]).max() == 1.0 and copied(a[:, 5:8]).max() == 1.0
    refused(lambda: copied(a[:, 4:5]), "1 of 32 elements")


def test_a_tensor_that_is_written_again_may_be_read_and_its_rival_may_not() -> None:
    a, b = placed(8, 0, "a", 1.0), placed(8, 0, "b", 2.0)
    nisa.memset(a, 3.0)
    assert copied(a).max() == 3.0
    refused(lambda: copied(b), "b (", "a (")


def test_other_partitions_other_memories_and_other_bytes_are_no_overlap() -> None:
    a = placed(8, 0, "a", 1.0)
    placed(8, 0, "rows", 2.0, partition=32)
    placed(8, 32, "bytes", 2.0)
    placed(8, 0, "psum", 2.0, buffer=nl.psum)
    assert copied(a).max() == 1.0


def test_rows_are_compared_by_their_partition() -> None:
    a = placed(8, 0, "a", 1.0, rows=96)
    placed(4, 0, "b", 2.0, partition=64)
    assert copied(a[0:64]).max() == 1.0
    refused(lambda: copied(a[64:96]), "128 of 256")


def test_an_element_is_lost_if_one_of_its_bytes_is() -> None:
    a = placed(8, 0, "a", 1.0)
    placed(1, 6, "b", 2.0, dtype=nl.bfloat16)
    assert copied(a[:, 0:1]).max() == 1.0
    refused(lambda: copied(a[:, 1:2]), "32 of 32")


def test_accumulation_onto_an_overwritten_bank_is_refused() -> None:
    ones = nl.ndarray((32, 32), nl.float32)
    nisa.memset(ones, 1.0)
    a = placed(32, 0, "a", buffer=nl.psum)
    b = placed(32, 0, "b", buffer=nl.psum)
    nisa.nc_matmul(a, ones, ones, accumulate=False)
    nisa.nc_matmul(b, ones, ones, accumulate=False)
    refused(lambda: nisa.nc_matmul(a, ones, ones, accumulate=True), "a (", "b (")
    never = placed(32, 2048, "never", buffer=nl.psum)
    with pytest.raises(MatmulError):
        nisa.nc_matmul(never, ones, ones, accumulate=True)


def test_a_predicated_write_counts_as_a_write() -> None:
    a, b = placed(8, 0, "a", 1.0), placed(8, 0, "b")
    mask = nl.ndarray((32, 8), nl.uint8)
    nisa.memset(mask, 1)
    nisa.tensor_copy_predicated(b, 2.0, mask)
    refused(lambda: copied(a), "256 of 256")


def filled(*shape: int) -> Any:
    t = nl.ndarray(shape, nl.float32, name="t")
    nisa.iota(t, [[1, int(np.prod(shape[1:]))]], offset=0)
    return t


@pytest.mark.parametrize("shift", [1, -1, 3])
def test_a_tensor_copy_onto_shifted_elements_is_refused(shift: int) -> None:
    t = filled(4, 8)
    low, high = max(shift, 0), min(shift, 0)
    dst, src = t[:, low : 8 + high], t[:, low - shift : 8 + high - shift]
    refused(lambda: nisa.tensor_copy(dst, src), f"{4 * (8 - 2 * abs(shift)) * 4} of", "t and t")


def test_a_copy_onto_itself_or_onto_other_elements_is_no_overlap() -> None:
    t = filled(4, 8)
    before = values(t)
    nisa.tensor_copy(t, t)
    nisa.tensor_copy(t.reshape((4, 2, 4)), t)
    nisa.dma_copy(t, t)
    assert np.array_equal(values(t), before)
    nisa.tensor_copy(t[:, 0:8:2], t[:, 1:8:2])
    assert np.array_equal(values(t)[:, 0::2], before[:, 1::2])


def test_a_copy_in_another_order_of_the_same_elements_is_refused() -> None:
    t = filled(4, 4, 4)
    refused(lambda: nisa.tensor_copy(t, t.permute((0, 2, 1))), "256 of 256 bytes")
    square = filled(4, 4)
    refused(lambda: nisa.dma_transpose(square, square), "64 of 64 bytes")


@pytest.mark.parametrize("buffer", [nl.private_hbm, nl.shared_hbm, nl.sbuf])
def test_a_dma_onto_shifted_rows_is_refused(buffer: Any) -> None:
    t = nl.ndarray((8, 4), nl.float32, buffer, name="t")
    nisa.dma_copy(t, filled(8, 4))
    refused(lambda: nisa.dma_copy(t[1:8], t[0:7]), "96 of 112 bytes")
    nisa.dma_copy(t[0:4], t[4:8])
    assert np.array_equal(values(t)[:4], values(t)[4:])


def test_a_copy_between_two_tensors_at_overlapping_addresses_is_refused() -> None:
    a, b = placed(8, 0, "a", 1.0), placed(8, 4, "b")
    refused(lambda: nisa.tensor_copy(b, a), "a (", "b (")
    same = placed(8, 0, "same")
    nisa.tensor_copy(same, a)
    assert copied(same).max() == 1.0
