"""``nki.compiler.frontend``: tracing a kernel runs it on the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import SimulatorError, UnsupportedError
from nki_impl.sim.packages.compiler.frontend import CompiledKernel, CompileOptions, ParserFrontend

X = np.ones((2, 3), np.float32)


def checked(x: Any, width: int) -> Any:
    tile = nl.ndarray(x.shape, x.dtype)
    assert tile.shape[1] == width, "another width"
    nisa.dma_copy(dst=tile, src=x)
    nisa.dma_copy(dst=x, src=tile)
    return x


def trace(kernel: Any = checked, lnc: int = 1, **inputs: Any) -> Any:
    return ParserFrontend().compile(kernel, inputs={"x": X, **inputs}, target="trn2", lnc=lnc)


def test_a_kernel_whose_assertions_hold_is_traced_and_its_result_is_available() -> None:
    assert np.array_equal(trace(width=3).outcome.results[0], X)


def test_a_failed_assertion_of_the_kernel_fails_the_trace() -> None:
    with pytest.raises(AssertionError, match="another width"):
        trace(width=4)


def test_a_broken_rule_of_the_machine_fails_the_trace() -> None:
    def wide(x: Any) -> Any:
        nl.ndarray((129, 1), x.dtype)

    with pytest.raises(SimulatorError, match="at most 128 partitions"):
        trace(wide)


def test_inputs_that_a_traced_kernel_writes_do_not_change() -> None:
    def cleared(x: Any) -> Any:
        nisa.dma_copy(dst=x, src=nl.zeros(x.shape, x.dtype))
        return x

    given = X.copy()
    assert (trace(cleared, x=given).outcome.results[0] == 0).all()
    assert (given == X).all()


def test_target_and_number_of_cores_are_those_of_the_trace(monkeypatch: Any) -> None:
    monkeypatch.setenv("NKI_NC_VERSION", "gen4")
    seen: list[object] = []

    def kernel(x: Any) -> None:
        seen.append((nisa.get_nc_version().name, nl.num_programs(0)))

    trace(kernel, lnc=2)
    assert seen == [("gen3", 2)] * 2


def test_what_needs_code_for_the_device_is_refused() -> None:
    traced = trace(width=3)
    for use in (
        lambda: traced.module,
        lambda: CompileOptions(target="trn2"),
        lambda: CompiledKernel.from_frontend(traced, None),
        lambda: ParserFrontend().compile(checked, {"x": X}, "trn2", dump_python_ast=True),
    ):
        with pytest.raises(UnsupportedError, match="Fix: run the tests with"):
            use()
