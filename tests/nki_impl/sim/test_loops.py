"""Loops that the device runs: what they compute, and each of their rules broken once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import (
    DtypeError,
    DynamicValueError,
    HiddenStateError,
    UnsupportedError,
)
from nki_impl.sim.machine.core import Core
from nki_impl.sim.machine.launch import run_ranks

from .tiles import empty, normal, tile, values

SEEN: list[Any] = []


def number(value: int) -> Any:
    return tile(np.array([[value]]), nl.int32)


def column(x: Any, register: Any) -> Any:
    return x.ap([[x.shape[1], x.shape[0]], [1, 1]], scalar_offset=register, indirect_dim=1)


@pytest.mark.parametrize(("bounds", "step"), [((0, 5), 1), ((1, 6), 2), ((4, 4), 1), ((3, 1), 1)])
@pytest.mark.parametrize("held", [False, True])
def test_fori_loop_runs_its_body_for_each_number_of_the_range(bounds, step, held):
    def kernel(x):
        out, source = nl.ndarray((1, 8), nl.float32, nl.shared_hbm), nl.load(x)
        nisa.dma_copy(out, nl.zeros((1, 8), nl.float32))
        lower, upper = map(nisa.register_alloc, bounds) if held else bounds

        def body(i):
            one = empty((1, 1))
            nisa.tensor_copy(one, column(source, i))
            nisa.dma_copy(column(out, i), one)

        nl.fori_loop(lower, upper, body, step)
        return out

    x = normal(1, 8)
    want = np.zeros_like(x)
    chosen = list(range(*bounds, step))
    want[:, chosen] = x[:, chosen]
    (got,) = run_ranks(kernel, [(x,)]).results
    assert np.array_equal(got, want)


def test_an_inner_loop_may_run_another_number_of_times_in_each_iteration(core: Core) -> None:
    total, limit = number(0), number(0)

    def inner(_):
        nisa.tensor_scalar(total, total, nl.add, 1.0)

    def outer(_):
        register = nisa.register_alloc()
        nisa.register_load(register, limit)
        nl.fori_loop(0, register, inner)
        nisa.tensor_scalar(limit, limit, nl.add, 1.0)

    nl.fori_loop(0, 4, outer)
    assert values(total).item() == 0 + 1 + 2 + 3


@pytest.mark.parametrize("start", [0, 1, 3])
def test_while_loop_tests_before_each_iteration_and_its_register_may_be_written(core, start):
    count, runs = number(start), number(0)

    def body(register):
        nisa.tensor_scalar(runs, runs, nl.add, 1.0)
        nisa.tensor_scalar(count, count, nl.subtract, 1.0)
        nisa.register_load(register, count)
        return register

    nl.while_loop(nisa.register_alloc(start), body)
    assert values(runs).item() == start


@pytest.mark.parametrize("step", [0, -1, 1.0, True])
def test_a_step_is_a_positive_int(core, step):
    with pytest.raises(DtypeError, match="step"):
        nl.fori_loop(0, 4, lambda i: None, step)


def test_a_bound_is_an_int_or_a_register(core):
    with pytest.raises(DtypeError, match="upper"):
        nl.fori_loop(0, 4.5, lambda i: None)


def test_the_variable_of_fori_loop_is_read_only(core):
    with pytest.raises(DtypeError, match="frozen"):
        nl.fori_loop(0, 4, lambda i: nisa.register_move(i, 0) and None)


@pytest.mark.parametrize("use", [int, bool, lambda i: i + 1, lambda i: i < 2, range])
def test_python_cannot_use_the_value_of_the_variable(core, use):
    def body(i):
        use(i)

    with pytest.raises(DynamicValueError):
        nl.fori_loop(0, 4, body)


def test_a_kernel_cannot_read_the_register():
    def kernel(x):
        nl.fori_loop(0, 4, lambda i: i.read("i"))

    with pytest.raises(HiddenStateError):
        run_ranks(kernel, [(np.zeros((1, 1), np.float32),)])


def test_a_body_of_fori_loop_returns_nothing(core):
    with pytest.raises(DynamicValueError, match="return value"):
        nl.fori_loop(0, 1, lambda i: i)


def test_a_body_of_while_loop_returns_a_register(core):
    with pytest.raises(DtypeError, match="body_fun: a register"):
        nl.while_loop(nisa.register_alloc(1), lambda r: None)
    with pytest.raises(DtypeError, match="init: a register"):
        nl.while_loop(1, lambda r: r)


def grows_a_list():
    kept: list[int] = []
    return lambda i: kept.append(1)


def grows_a_dict_of_a_helper():
    kept: dict[str, int] = {}

    def helper():
        kept["n"] = len(kept)

    return lambda i: helper()


def counts():
    n = 0

    def body(i):
        nonlocal n
        n += 1

    return body


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (grows_a_list, "kept"),
        (grows_a_dict_of_a_helper, "kept"),
        (counts, "n"),
        (lambda: lambda i: SEEN.append(1), "SEEN"),
    ],
)
@pytest.mark.parametrize("times", [1, 3])
def test_a_body_that_changes_python_state_is_refused(core, make, name, times):
    with pytest.raises(DynamicValueError, match=f"got {name} was changed"):
        nl.fori_loop(0, times, make())


class State(nl.NKIObject):
    """State that the comparison of variables does not see."""

    column = 0


def test_an_iteration_with_other_operands_than_the_first_is_refused(core):
    state, out = State(), tile(np.zeros((1, 4)))

    def body(i):
        nisa.memset(out[:, state.column : state.column + 1], 1.0)
        state.column += 1

    with pytest.raises(DynamicValueError, match="memset with other operands"):
        nl.fori_loop(0, 4, body)


@pytest.mark.parametrize(("first", "later"), [(1, 2), (2, 1)])
def test_an_iteration_with_more_or_fewer_instructions_is_refused(core, first, later):
    state, out = State(), tile(np.zeros((1, 4)))

    def body(i):
        for _ in range(first if state.column == 0 else later):
            nisa.memset(out, 1.0)
        state.column += 1

    with pytest.raises(DynamicValueError, match="differs from the first"):
        nl.fori_loop(0, 4, body)


def test_buffers_that_swap_in_python_are_refused(core):
    state = State()
    state.now, state.free = tile(normal(2, 2)), empty((2, 2))

    def body(i):
        nisa.tensor_copy(state.free, state.now)
        state.now, state.free = state.free, state.now

    with pytest.raises(DynamicValueError, match="tensor_copy with other operands"):
        nl.fori_loop(0, 2, body)


def test_the_loop_in_a_loop_is_traced_once_too(core):
    state, out = State(), tile(np.zeros((1, 4)))

    def inner(i):
        nisa.memset(out[:, state.column : state.column + 1], 1.0)

    def outer(i):
        nl.fori_loop(0, 2, inner)
        state.column += 1

    with pytest.raises(DynamicValueError, match="memset with other operands"):
        nl.fori_loop(0, 2, outer)


def test_a_counter_in_an_object_is_allowed_if_no_operand_depends_on_it(core):
    state, out = State(), tile(np.zeros((1, 1)))

    def body(i):
        state.column += 1
        one = nl.ndarray((1, 1), nl.float32, name=f"one_{state.column}")
        nisa.memset(one, 1.0, name=f"set_{state.column}")
        nisa.tensor_tensor(out, out, one, nl.add)

    nl.fori_loop(0, 3, body)
    assert values(out).item() == 3


@pytest.mark.parametrize("use", [lambda t: nisa.tensor_copy(empty((1, 1)), t),
                                 lambda t: nisa.memset(t[:, 0:1], 1.0)])  # fmt: skip
def test_a_tensor_of_the_body_cannot_be_used_after_the_loop(core, use):
    state = State()

    def body(i):
        state.made = nl.zeros((1, 1), nl.float32)

    nl.fori_loop(0, 1, body)
    with pytest.raises(UnsupportedError, match="an iteration that has ended"):
        use(state.made)


def test_a_tensor_of_the_body_cannot_be_used_in_the_next_iteration(core):
    state = State()
    state.made = nl.zeros((1, 1), nl.float32)

    def body(i):
        nisa.tensor_scalar(state.made, state.made, nl.add, 1.0)
        state.made = nl.zeros((1, 1), nl.float32)

    with pytest.raises(UnsupportedError, match="an iteration that has ended"):
        nl.fori_loop(0, 2, body)


def test_a_tensor_of_the_body_cannot_be_returned():
    def kernel(x):
        state = State()

        def body(i):
            state.made = nl.ndarray(x.shape, x.dtype, nl.shared_hbm)
            nisa.dma_copy(state.made, x)

        nl.fori_loop(0, 1, body)
        return state.made

    with pytest.raises(UnsupportedError, match="an iteration that has ended"):
        run_ranks(kernel, [(normal(2, 2),)])


def test_a_loop_in_a_no_reorder_block_is_refused(core):
    with nl.no_reorder(), pytest.raises(UnsupportedError, match="no_reorder"):
        nl.fori_loop(0, 1, lambda i: None)
    with nl.no_reorder(), pytest.raises(UnsupportedError, match="no_reorder"):
        nl.while_loop(nisa.register_alloc(0), lambda r: r)
    nl.fori_loop(0, 1, lambda i: None)


def test_an_order_of_instructions_cannot_lead_into_a_loop_or_out_of_it(core):
    state, out = State(), tile(np.zeros((1, 1)))
    state.before = nisa.memset(out, 0.0)

    def body(i):
        state.inside = nisa.memset(out, 1.0).depends_on(state.before)
        nisa.memset(out, 2.0).depends_on(state.inside)

    nl.fori_loop(0, 2, body)
    with pytest.raises(UnsupportedError, match="depends_on"):
        nisa.memset(out, 3.0).depends_on(state.inside)


def test_both_cores_of_a_rank_may_run_a_loop_of_their_own_length():
    def kernel(x):
        me, n = nl.program_id(0), nl.num_programs(0)
        out, source = nl.ndarray((1, 5), nl.float32, nl.shared_hbm, "out"), nl.load(x)

        def body(i):
            nisa.dma_copy(column(out, i), column(source, i))

        nl.fori_loop(me, 5, body, step=n)
        return out

    x = normal(1, 5)
    (got,) = run_ranks(kernel, [(x,)], lnc=2).results
    assert np.array_equal(got, x)
