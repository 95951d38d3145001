"""The operators of ``nki.language`` as functions: ``nl.add`` can be passed as an operator or called.

As an argument of an instruction (``op=nl.add``), an operator selects its entry in :mod:`nki_impl.sim.operators.ops`.
Called on tiles (``nl.add(x, y)``), it allocates a tile and issues the instruction that computes the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nki_impl.sim.operators.ops import BINARY, OPS, UNARY

# The functions that apply an operator to tiles. ``elementwise`` fills them in, because it issues instructions, which
# take operators.
ON_TILES: dict[str, Callable[..., Any]] = {}


def _binary(name: str) -> Callable[..., Any]:
    def function(x: Any, y: Any, dtype: Any = None) -> Any:
        return ON_TILES["binary"](function, x, y, dtype)

    return _named(
        function, name, f"Operator {name}(x, y); called on tiles, a new tile of {name}(x, y)."
    )


def _unary(name: str) -> Callable[..., Any]:
    def function(x: Any, dtype: Any = None) -> Any:
        return ON_TILES["unary"](function, x, dtype)

    return _named(function, name, f"Operator {name}(x); called on a tile, a new tile of {name}(x).")


def _named(function: Callable[..., Any], name: str, text: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name
    # Errors take the operation's name from the code object that the kernel called.
    code = function.__code__
    function.__code__ = code.replace(co_name=name, co_qualname=name)
    function.__doc__ = text
    OPS[function] = BINARY[name] if name in BINARY else UNARY[name]
    return function


add = _binary("add")
subtract = _binary("subtract")
multiply = _binary("multiply")
divide = _binary("divide")
maximum = _binary("maximum")
minimum = _binary("minimum")
abs_max = _binary("abs_max")
abs_min = _binary("abs_min")
power = _binary("power")
fmod = _binary("fmod")
mod = _binary("mod")
equal = _binary("equal")
not_equal = _binary("not_equal")
less = _binary("less")
less_equal = _binary("less_equal")
greater = _binary("greater")
greater_equal = _binary("greater_equal")
bitwise_and = _binary("bitwise_and")
bitwise_or = _binary("bitwise_or")
bitwise_xor = _binary("bitwise_xor")
left_shift = _binary("left_shift")
right_shift = _binary("right_shift")
logical_and = _binary("logical_and")
logical_or = _binary("logical_or")
logical_xor = _binary("logical_xor")

abs = _unary("abs")
square = _unary("square")
invert = _unary("invert")
logical_not = _unary("logical_not")
exp = _unary("exp")
log = _unary("log")
sqrt = _unary("sqrt")
rsqrt = _unary("rsqrt")
reciprocal = _unary("reciprocal")
copy = _unary("copy")
tanh = _unary("tanh")
sigmoid = _unary("sigmoid")
relu = _unary("relu")
gelu = _unary("gelu")
gelu_dx = _unary("gelu_dx")
gelu_apprx_tanh = _unary("gelu_apprx_tanh")
gelu_apprx_sigmoid = _unary("gelu_apprx_sigmoid")
gelu_apprx_sigmoid_dx = _unary("gelu_apprx_sigmoid_dx")
silu = _unary("silu")
silu_dx = _unary("silu_dx")
softplus = _unary("softplus")
mish = _unary("mish")
erf = _unary("erf")
erf_dx = _unary("erf_dx")
sin = _unary("sin")
cos = _unary("cos")
tan = _unary("tan")
arctan = _unary("arctan")
ceil = _unary("ceil")
floor = _unary("floor")
trunc = _unary("trunc")
negative = _unary("negative")
sign = _unary("sign")
