"""The truth of a tensor says that an optional argument was passed, and never anything about its values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DynamicValueError, SimulatorWarning
from nki_impl.sim.machine.launch import run_ranks

X = np.ones((2, 4), np.float32)


@dataclass
class Options:
    index: Any = None


def equal(x: Any, shape: tuple[int, int] = (2, 4)) -> Any:
    """Return a tile that says where ``x`` equals itself."""
    flag = nl.ndarray(shape, nl.float32)
    compare(flag, x)
    return flag


def compare(flag: Any, x: Any) -> None:
    part = x[: flag.shape[0], : flag.shape[1]]
    nisa.tensor_tensor(dst=flag, data1=part, data2=part, op=nl.equal)


def is_true(flag: Any) -> bool:
    return bool(flag)


def was_passed(options: Options) -> bool:
    return bool(options and options.index)


def run(body: Callable[[Any], Any]) -> list[Any]:
    seen = []

    def kernel(x: Any) -> Any:
        tile = nl.load(x)
        seen.append(body(tile))
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    run_ranks(kernel, [(X,)])
    return seen


def test_a_tensor_that_a_caller_allocated_and_passed_is_true_with_a_warning() -> None:
    def body(tile: Any) -> Any:
        index = nl.ndarray((2, 4), nl.uint32, name="index")
        return was_passed(Options(index)), was_passed(Options())

    with pytest.warns(SimulatorWarning, match="index.*means that it was passed.*test_truth.py"):
        assert run(body) == [(True, False)]


def asked_where_it_was_allocated(tile: Any) -> None:
    flag = nl.ndarray((2, 4), nl.float32)
    compare(flag, tile)
    if flag:
        pass


def asked_in_a_function_inside(tile: Any) -> None:
    flag = nl.ndarray((2, 4), nl.float32)

    def ask() -> bool:
        return bool(flag)

    ask()


def one_element(tile: Any) -> None:
    flag = nl.ndarray((1, 1), nl.float32)
    compare(flag, tile)
    is_true(flag)


def part(tile: Any) -> None:
    flag = nl.ndarray((2, 4), nl.float32)
    compare(flag, tile)
    is_true(flag[:, 0:2])


REFUSED = {
    "a comparison": lambda tile: is_true(nl.equal(tile, tile)),
    "a comparison asserted": lambda tile: 1 if nl.equal(tile, tile) else 2,
    "a result of a helper": lambda tile: 1 if equal(tile) else 2,
    "a result of a helper, passed on": lambda tile: is_true(equal(tile)),
    "a result of a helper in any()": lambda tile: any([equal(tile)]),
    "a result of a helper, one element": lambda tile: is_true(equal(tile, (1, 1))),
    "a tensor of the asking function": asked_where_it_was_allocated,
    "a tensor of the function around": asked_in_a_function_inside,
    "an argument of one element": one_element,
    "a part of an argument": part,
    "a loaded tile": is_true,
    "a loaded tile in a dataclass": lambda tile: was_passed(Options(tile)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_truth_of_what_may_be_a_value_is_refused(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SimulatorWarning)
        with pytest.raises(DynamicValueError, match=r"^(bool\(\)|operator ==): .*test_truth\.py"):
            run(REFUSED[name])
