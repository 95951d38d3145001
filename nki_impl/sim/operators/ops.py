"""The operators that instructions take: ``op=nl.add`` and so on.

An operator is passed as the function of ``nki.language`` itself; :data:`OPS` defines what an engine computes for it.
All arithmetic is in float32; comparisons and logical operators give 1.0 or 0.0. Bit operators work only on integers and
do not cast.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/nki.api.shared.html
(supported math operators, supported activation functions).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import DtypeError

Array = NDArray[Any]
F32 = np.float32


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: ``kind`` is "arith", "compare", "bit", "unary" or "activation".

    ``apply(a, b)`` (or ``apply(a)``) computes the operator. ``reduce(array2d)`` reduces axis 1; it is None if the
    operator cannot reduce. ``start`` is the result of an empty reduction.
    """

    name: str
    kind: str
    apply: Callable[..., Array]
    reduce: Callable[[Array], Array] | None = None
    start: float = 0.0


def _logical(function: Callable[..., Array]) -> Callable[..., Array]:
    def apply(*operands: Any) -> Array:
        return function(*[np.not_equal(o, 0) for o in operands])

    return apply


def _reducer(function: np.ufunc) -> Callable[[Array], Array]:
    def reduce(values: Array) -> Array:
        out: Array = function.reduce(values, axis=1)
        return out

    return reduce


def _logical_reducer(function: np.ufunc) -> Callable[[Array], Array]:
    def reduce(values: Array) -> Array:
        out: Array = function.reduce(np.not_equal(values, 0), axis=1)
        return out.astype(F32)

    return reduce


_erf = np.frompyfunc(math.erf, 1, 1)


def erf(x: Array) -> Array:
    """Return the error function of float32 values, rounded from float64."""
    return np.asarray(_erf(x.astype(np.float64)), dtype=np.float64).astype(F32)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow warnings."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, F32(1) / (F32(1) + small), small / (F32(1) + small))


def _gelu(x: Array) -> Array:
    return F32(0.5) * x * (F32(1) + erf(x * F32(math.sqrt(0.5))))


def _gelu_dx(x: Array) -> Array:
    density = np.exp(F32(-0.5) * x * x) * F32(1 / math.sqrt(2 * math.pi))
    return F32(0.5) * (F32(1) + erf(x * F32(math.sqrt(0.5)))) + x * density


def _gelu_tanh(x: Array) -> Array:
    inner = F32(math.sqrt(2 / math.pi)) * (x + F32(0.044715) * x * x * x)
    return F32(0.5) * x * (F32(1) + np.tanh(inner))


def _silu_dx(x: Array) -> Array:
    s = sigmoid(x)
    return s * (F32(1) + x * (F32(1) - s))


def _gelu_sigmoid_dx(x: Array) -> Array:
    s = sigmoid(F32(1.702) * x)
    return s * (F32(1) + F32(1.702) * x * (F32(1) - s))


def _larger(a: Array, b: Array) -> Array:
    """Return the operand of larger magnitude; b if the magnitudes are equal."""
    return np.asarray(np.where(np.abs(a) > np.abs(b), a, b))


def _smaller(a: Array, b: Array) -> Array:
    """Return the operand of smaller magnitude; b if the magnitudes are equal."""
    return np.asarray(np.where(np.abs(a) < np.abs(b), a, b))


BINARY = {
    "add": Op("add", "arith", np.add, _reducer(np.add), 0.0),
    "subtract": Op("subtract", "arith", np.subtract, lambda v: np.subtract.reduce(v, axis=1), 0.0),
    "multiply": Op("multiply", "arith", np.multiply, _reducer(np.multiply), 1.0),
    "divide": Op("divide", "arith", np.divide),
    "maximum": Op("maximum", "arith", np.maximum, _reducer(np.maximum), -math.inf),
    "minimum": Op("minimum", "arith", np.minimum, _reducer(np.minimum), math.inf),
    "abs_max": Op("abs_max", "arith4", _larger, lambda v: np.abs(v).max(axis=1)),
    "abs_min": Op("abs_min", "arith4", _smaller, lambda v: np.abs(v).min(axis=1)),
    "power": Op("power", "arith", np.power),
    "fmod": Op("fmod", "arith", np.fmod),
    "mod": Op("mod", "arith", np.mod),
    "equal": Op("equal", "compare", np.equal),
    "not_equal": Op("not_equal", "compare", np.not_equal),
    "less": Op("less", "compare", np.less),
    "less_equal": Op("less_equal", "compare", np.less_equal),
    "greater": Op("greater", "compare", np.greater),
    "greater_equal": Op("greater_equal", "compare", np.greater_equal),
    "bitwise_and": Op("bitwise_and", "bit", np.bitwise_and, _reducer(np.bitwise_and)),
    "bitwise_or": Op("bitwise_or", "bit", np.bitwise_or, _reducer(np.bitwise_or)),
    "bitwise_xor": Op("bitwise_xor", "bit", np.bitwise_xor, _reducer(np.bitwise_xor)),
    "left_shift": Op("left_shift", "bit", np.left_shift),
    "right_shift": Op("right_shift", "bit", np.right_shift),
    "logical_and": Op("logical_and", "compare", _logical(np.logical_and), _logical_reducer(np.logical_and), 1.0),
    "logical_or": Op("logical_or", "compare", _logical(np.logical_or), _logical_reducer(np.logical_or), 0.0),
    "logical_xor": Op("logical_xor", "compare", _logical(np.logical_xor), _logical_reducer(np.logical_xor), 0.0),
}  # fmt: skip
"""Operators of two operands, by their name in ``nki.language``."""

UNARY = {
    "abs": Op("abs", "unary", np.abs),
    "square": Op("square", "activation", np.square),
    "invert": Op("invert", "bit1", np.invert),
    "logical_not": Op("logical_not", "unary", _logical(np.logical_not)),
    "exp": Op("exp", "activation", np.exp),
    "log": Op("log", "activation", np.log),
    "sqrt": Op("sqrt", "activation", np.sqrt),
    "rsqrt": Op("rsqrt", "activation", lambda x: F32(1) / np.sqrt(x)),
    "reciprocal": Op("reciprocal", "activation", lambda x: F32(1) / x),
    "copy": Op("copy", "activation", lambda x: x),
    "tanh": Op("tanh", "activation", np.tanh),
    "sigmoid": Op("sigmoid", "activation", sigmoid),
    "relu": Op("relu", "activation", lambda x: np.maximum(x, F32(0))),
    "gelu": Op("gelu", "activation", _gelu),
    "gelu_dx": Op("gelu_dx", "activation", _gelu_dx),
    "gelu_apprx_tanh": Op("gelu_apprx_tanh", "activation", _gelu_tanh),
    "gelu_apprx_sigmoid": Op("gelu_apprx_sigmoid", "activation", lambda x: x * sigmoid(F32(1.702) * x)),
    "gelu_apprx_sigmoid_dx": Op("gelu_apprx_sigmoid_dx", "activation", _gelu_sigmoid_dx),
    "silu": Op("silu", "activation", lambda x: x * sigmoid(x)),
    "silu_dx": Op("silu_dx", "activation", _silu_dx),
    "softplus": Op("softplus", "activation", lambda x: np.logaddexp(F32(0), x)),
    "mish": Op("mish", "activation", lambda x: x * np.tanh(np.logaddexp(F32(0), x))),
    "erf": Op("erf", "activation", erf),
    "erf_dx": Op("erf_dx", "activation", lambda x: F32(2 / math.sqrt(math.pi)) * np.exp(-x * x)),
    "sin": Op("sin", "activation", np.sin),
    "cos": Op("cos", "activation", np.cos),
    "tan": Op("tan", "activation", np.tan),
    "arctan": Op("arctan", "activation", np.arctan),
    "ceil": Op("ceil", "unary", np.ceil),
    "floor": Op("floor", "unary", np.floor),
    "trunc": Op("trunc", "unary", np.trunc),
    "negative": Op("negative", "unary", np.negative),
    "sign": Op("sign", "activation", np.sign),
}  # fmt: skip
"""Operators of one operand, by their name in ``nki.language``."""

RANGES = {"log": (2.0**-64, 2.0**64), "reciprocal": (2.0**-42, 2.0**42)}
"""The range in which the scalar engine's result is specified; for reciprocal, the range of the magnitude."""

OPS: dict[object, Op] = {}
"""From the function of ``nki.language`` to its meaning; filled by :mod:`nki_impl.sim.operators.tokens`."""

UNARY_KINDS = ("unary", "activation", "bit1")


def find(op: object, operand: str, *kinds: str) -> Op:
    """Return the Op that defines the operator ``op``; raise :class:`DtypeError` unless its kind is one of ``kinds``."""
    meaning = OPS.get(op) if op.__hash__ is not None else None
    if meaning is None:
        raise DtypeError(
            operand,
            "an operator of nki.language such as nl.add",
            repr(op),
            "pass the nl function itself",
        )
    if meaning.kind not in kinds:
        allowed = sorted(o.name for o in OPS.values() if o.kind in kinds)
        raise DtypeError(
            operand,
            "one of nl." + ", nl.".join(allowed),
            f"nl.{meaning.name}",
            "use an operator of this list",
        )
    return meaning
