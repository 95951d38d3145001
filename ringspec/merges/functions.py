"""The elementary functions of a merge, which the caller may supply as functions of whole arrays.

Libraries differ in the last bit of exp, log1p and sigmoid, and some differ between elements of one array (a vector body
and a scalar tail). A recipe therefore fixes everything else, and takes these functions as they are given. If it was compared
with the real code, its result is bit-exact from given partial results *with the elementary functions supplied*.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringspec.errors import DtypeError, OptionError, ShapeError, shown
from ringspec.merges.intervals import Interval
from ringspec.merges.numbers import Float32, quiet

__all__ = ["NUMPY", "Functions"]

Function = Callable[[Float32], Float32]


def _sigmoid(x: Float32) -> Float32:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def _logsigmoid(x: Float32) -> Float32:
    return np.minimum(x, np.float32(0)) - np.log1p(np.exp(-np.abs(x)))


@dataclass(frozen=True)
class Functions:
    """exp, log, log1p, exp2, log2, sigmoid, logsigmoid: each maps a float32 array to a float32 array of the same shape.

    ``divide`` maps two float32 arrays to their quotient. Its default is correctly rounded; a GPU's division may not be, such
    as that of Triton (``div.full.f32``).

    Each default is NumPy's; sigmoid(x) = 1 / (1 + exp(-x)) and logsigmoid(x) = min(x, 0) - log1p(exp(-abs(x))) are composed
    of NumPy's float32 operations. ``name`` labels the set in tables and reports. A function receives the array with the
    strides that the caller's arrays give it, because torch's sigmoid depends on them.

    A field that is not a function raises OptionError. A function that returns another shape raises ShapeError, and one
    that returns another dtype raises DtypeError.

    >>> import numpy as np
    >>> Functions().exp(np.zeros(2, np.float32)).tolist()
    [1.0, 1.0]
    >>> wide = Functions(name="float64, rounded", exp=lambda x: np.exp(x.astype(np.float64)).astype(np.float32))
    """

    exp: Function = np.exp
    log: Function = np.log
    log1p: Function = np.log1p
    exp2: Function = np.exp2
    log2: Function = np.log2
    sigmoid: Function = _sigmoid
    logsigmoid: Function = _logsigmoid
    divide: Callable[..., Float32] = np.divide
    name: str = "NumPy"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise OptionError("name as a text", shown(self.name), "pass name='torch'")
        for field in dataclasses.fields(self):
            if field.name == "name":
                continue
            given = getattr(self, field.name)
            if not callable(given):
                expected = f"{field.name} as a function of a float32 array"
                raise OptionError(expected, shown(given), f"pass {field.name}=numpy.{field.name}")
            object.__setattr__(self, field.name, _checked(given, field.name))


def _checked(function: Callable[..., Float32], name: str) -> Callable[..., Float32]:
    def checked(*operands: Float32) -> Float32:
        with quiet():
            value = function(*operands)
        if not isinstance(value, (np.ndarray, np.generic, Interval)) or value.dtype != np.float32:
            got = f"dtype {value.dtype}" if hasattr(value, "dtype") else shown(value)
            raise DtypeError(
                f"a NumPy float32 array from {name}", got, "convert it in the function"
            )
        shape = np.broadcast_shapes(*[x.shape for x in operands])
        if value.shape != shape:
            expected = f"shape {shape} from {name}"
            raise ShapeError(expected, f"shape {value.shape}", "return one value per element")
        return value

    return checked


NUMPY = Functions()
