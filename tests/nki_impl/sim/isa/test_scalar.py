"""The scalar engine: activation functions, scale and bias, sums and their registers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.errors import DtypeError, ShapeError, UninitializedError
from nki_impl.sim.isa.scalar import ActivationRangeWarning
from nki_impl.sim.machine.core import Core, acting_as

from ..tiles import bf16, empty, normal, tile, values

F32 = np.float32
Cmd = nisa.reduce_cmd

FUNCTIONS: list[tuple[str, Any]] = [
    ("exp", math.exp), ("square", lambda x: x * x), ("copy", lambda x: x), ("tanh", math.tanh),
    ("sigmoid", lambda x: 1 / (1 + math.exp(-x))), ("relu", lambda x: max(x, 0.0)), ("erf", math.erf),
    ("gelu", lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2), ("silu", lambda x: x / (1 + math.exp(-x))),
    ("gelu_apprx_sigmoid", lambda x: x / (1 + math.exp(-1.702 * x))),
    ("gelu_apprx_tanh", lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2),
    ("softplus", lambda x: math.log1p(math.exp(x))), ("mish", lambda x: x * math.tanh(math.log1p(math.exp(x)))),
    ("sin", math.sin), ("cos", math.cos), ("arctan", math.atan), ("sign", lambda x: math.copysign(1, x)),
    ("abs", abs), ("erf_dx", lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "truth"), FUNCTIONS)
def test_an_activation_function_is_that_function_in_float32(
    core: Core, name: str, truth: Any
) -> None:
    x = normal(4, 50)
    out = empty((4, 50))
    nisa.activation(out, getattr(nl, name), tile(x))
    expected = np.vectorize(truth)(x.astype(np.float64))
    assert np.allclose(values(out), expected, rtol=3e-6, atol=3e-7)


@pytest.mark.parametrize(
    ("name", "primitive"),
    [("gelu_dx", "gelu"), ("silu_dx", "silu"), ("gelu_apprx_sigmoid_dx", "gelu_apprx_sigmoid")],
)
def test_a_derivative_is_the_slope_of_its_function(core: Core, name: str, primitive: str) -> None:
    x, h = normal(4, 50), 2.0**-8
    slope, above, below = empty((4, 50)), empty((4, 50)), empty((4, 50))
    nisa.activation(slope, getattr(nl, name), tile(x))
    nisa.activation(above, getattr(nl, primitive), tile(x + F32(h)))
    nisa.activation(below, getattr(nl, primitive), tile(x - F32(h)))
    assert np.allclose(values(slope), (values(above) - values(below)) / (2 * h), atol=2e-4)


@pytest.mark.parametrize(
    ("op", "truth"),
    [
        (nl.log, np.log),
        (nl.sqrt, np.sqrt),
        (nl.rsqrt, lambda x: x**-0.5),
        (nl.reciprocal, np.reciprocal),
    ],
)
def test_functions_of_positive_numbers(core: Core, op: Any, truth: Any) -> None:
    x = np.abs(normal(4, 50)) + F32(0.1)
    out = empty((4, 50))
    nisa.activation(out, op, tile(x))
    assert np.allclose(values(out), truth(x.astype(np.float64)), rtol=3e-7)


@pytest.mark.parametrize("dtype", [nl.float32, nl.bfloat16])
def test_scale_and_bias_come_before_the_function_and_the_result_is_rounded_once(
    core: Core, dtype: Any
) -> None:
    x, scale, bias = bf16(normal(16, 24)), normal(16, 1, seed=1), bf16(normal(16, 1, seed=2))
    out = empty((16, 24), dtype)
    nisa.activation(
        out, nl.exp, tile(x, nl.bfloat16), bias=tile(bias, nl.bfloat16), scale=tile(scale)
    )
    exact = np.exp(x * scale + bias)
    assert np.array_equal(values(out), exact if dtype is nl.float32 else bf16(exact))
    nisa.activation(out, nl.copy, tile(x, nl.bfloat16, nl.psum), bias=0.5, scale=-2.0)
    exact = x * F32(-2) + F32(0.5)
    assert np.array_equal(values(out), exact if dtype is nl.float32 else bf16(exact))


def test_data_is_not_changed_by_an_activation_out_of_place(core: Core) -> None:
    x = normal(4, 6)
    t = tile(x)
    nisa.activation(empty((4, 6)), nl.exp, t)
    assert np.array_equal(values(t), x)
    nisa.activation(t, nl.exp, t)
    assert np.array_equal(values(t), np.exp(x))


def test_the_sum_is_of_the_float32_values_before_they_are_rounded(core: Core) -> None:
    x = normal(16, 512)
    out, res = empty((16, 512), nl.bfloat16), empty((16, 1))
    nisa.activation_reduce(
        out, nl.exp, tile(x), nl.add, res, bias=tile(-x.max(axis=1, keepdims=True))
    )
    p = np.exp(x - x.max(axis=1, keepdims=True))
    assert np.array_equal(values(out), bf16(p))
    assert np.allclose(values(res), p.astype(np.float64).sum(axis=1, keepdims=True), rtol=1e-6)
    assert not np.allclose(
        values(res), bf16(p).astype(np.float64).sum(axis=1, keepdims=True), rtol=1e-6
    )


def test_registers_are_reset_go_on_and_are_left_alone_by_idle(core: Core) -> None:
    x, out, res = normal(4, 16), empty((4, 8)), empty((4, 1))
    left, right = tile(x[:, :8]), tile(x[:, 8:])
    nisa.activation(out, nl.copy, left, reduce_op=nl.add, reduce_cmd=Cmd.reset_reduce)
    nisa.activation(out, nl.exp, left)
    nisa.activation(out, nl.copy, right, reduce_op=nl.add, reduce_cmd=Cmd.reduce, reduce_res=res)
    assert np.allclose(values(res), x.sum(axis=1, keepdims=True), atol=1e-5)
    nisa.activation(out, nl.copy, right, reduce_cmd=Cmd.reset, reduce_res=res)
    assert (values(res) == 0).all()


def test_going_on_from_registers_never_reset_raises(core: Core) -> None:
    out, x = empty((4, 8)), tile(normal(4, 8))
    with pytest.raises(UninitializedError, match="scalar engine"):
        nisa.activation(out, nl.copy, x, reduce_op=nl.add, reduce_cmd=Cmd.reduce)
    with pytest.raises(UninitializedError):
        nisa.activation(out, nl.copy, x, reduce_res=empty((4, 1)))


def test_each_rule_of_activation_raises(core: Core) -> None:
    x, out = tile(normal(4, 8)), empty((4, 8))
    with pytest.raises(DtypeError, match="reduce_op"):
        nisa.activation(out, nl.exp, x, reduce_op=nl.maximum, reduce_cmd=Cmd.reset_reduce)
    with pytest.raises(DtypeError, match="reduce_op"):
        nisa.activation(out, nl.exp, x, reduce_cmd=Cmd.reset_reduce)
    with pytest.raises(DtypeError, match="reduce_cmd"):
        nisa.activation(out, nl.exp, x, reduce_op=nl.add, reduce_cmd=Cmd.load_reduce)
    with pytest.raises(DtypeError, match="reduce_res"):
        nisa.activation_reduce(out, nl.exp, x, nl.add, None)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="scale"):
        nisa.activation(out, nl.exp, x, scale=tile(normal(4, 1), nl.bfloat16))
    with pytest.raises(ShapeError, match="bias"):
        nisa.activation(out, nl.exp, x, bias=tile(normal(4, 8)))
    with pytest.raises(DtypeError, match="tfloat32"):
        nisa.activation(out, nl.exp, x, bias=tile(normal(4, 1), nl.tfloat32))
    with pytest.raises(DtypeError, match=r"nl\.add"):
        nisa.activation(out, nl.add, x)
    with pytest.raises(ShapeError):
        nisa.activation(empty((4, 7)), nl.exp, x)
    with acting_as(Core(target="trn1")), pytest.raises(DtypeError, match="trn1"):
        nisa.activation(empty((4, 8)), nl.exp, tile(normal(4, 8)), bias=1.0)


@pytest.mark.parametrize(
    ("op", "value"), [(nl.log, 0.0), (nl.log, 1e30), (nl.reciprocal, 0.0), (nl.reciprocal, -1e-20)]
)
def test_values_outside_the_specified_range_warn(core: Core, op: Any, value: float) -> None:
    with pytest.warns(ActivationRangeWarning, match="specified from"):
        nisa.activation(empty((1, 1)), op, tile(np.array([[value]])))


def test_values_inside_the_specified_range_do_not_warn(core: Core) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op in (nl.log, nl.reciprocal, nl.exp):
            nisa.activation(empty((1, 2)), op, tile(np.array([[2.0**-40, 2.0**40]])))
