"""Refuse Python operations on values that exist only on the device.

NKI traces a kernel with Python, so all of Python may be used for what is known before the run: shapes, loops, nested
functions, classes. The values of tensors and registers are not known then. They are refused to operators, to NumPy, to
copy and pickle, and to code that reads the simulator's own attributes of a tensor or register.
"""

from __future__ import annotations

import sys
import warnings
from types import CodeType
from typing import Any

from nki_impl.sim.errors import (
    DynamicValueError,
    HiddenStateError,
    SimulatorWarning,
    Spot,
    in_simulator,
    kernel_line,
)
from nki_impl.sim.machine.core import is_launched

_NAMES = (
    "bool iter len contains getitem lt le gt ge add radd iadd sub rsub isub mul rmul imul truediv rtruediv "
    "itruediv floordiv rfloordiv mod rmod pow rpow neg pos abs and rand or ror xor rxor invert lshift "
    "rshift matmul divmod round trunc int float complex index "
    "array array_ufunc array_function deepcopy reduce_ex"
).split()


# What a kernel writes for the methods that do not have its name.
_WRITTEN = {
    "iter": "iteration", "contains": "in", "getitem": "[...]", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**", "neg": "-",
    "pos": "+", "and": "&", "or": "|", "xor": "^", "invert": "~", "lshift": "<<", "rshift": ">>", "matmul": "@",
    "index": "use as a Python integer", "array": "conversion to a NumPy array", "deepcopy": "copy.deepcopy()",
    "reduce_ex": "copy or pickle",
}  # fmt: skip


def refuse(value: object, what: str) -> Any:
    """Raise :class:`DynamicValueError`, because ``what`` needs the value of a tensor or register in Python."""
    raise DynamicValueError(
        "value",
        "no Python access to values that exist only on the device",
        f"{what} on a {type(value).__name__}",
        "compute with nisa operations; branch on shapes and launch arguments only",
        operation=what,
    )


def _refusal(name: str) -> Any:
    """Return the method ``__name__`` of a class whose values Python does not know."""
    base = name[1:] if name[0] in "ir" and name[1:] in _WRITTEN else name
    what = _WRITTEN.get(base, f"{name}()")
    if not what[0].isalpha() and what != "[...]":
        what = f"operator {what}"
    if name in ("array_ufunc", "array_function"):
        return lambda value, function, *given, **more: refuse(value, f"np.{function.__name__}")
    return lambda value, *given, **more: refuse(value, what)


def refuse_values(cls: type) -> None:
    """Make every operator that the class ``cls`` does not define itself raise the error of :func:`refuse`."""
    for name in _NAMES:
        if f"__{name}__" not in cls.__dict__:
            setattr(cls, f"__{name}__", _refusal(name))


def is_argument(made_at: Spot | None) -> bool:
    """Return whether the function that asks for the truth of a tensor got it from a caller that allocated it.

    ``made_at``: where the kernel allocated the tensor; None if no function of the kernel did. A result that
    a function computes is allocated by itself or by a function that it called, so it never is such an argument.
    Functions inside the allocating one, which reach its variables without arguments, count as that one.
    """
    if made_at is None:
        return False
    asking, maker = sys._getframe(2), made_at[0]
    if _is_inside(asking.f_code, maker):
        return False
    frame = asking.f_back
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back
    return frame is not None


def _is_inside(code: CodeType, outer: CodeType) -> bool:
    return code is outer or code.co_qualname.startswith(f"{outer.co_qualname}.<locals>.")


def warn_of_truth(tensor: str) -> None:
    """Warn that the truth of a tile on chip says only that the caller passed it."""
    warnings.warn(
        f"the truth of {tensor or 'a tensor'}, which the calling function allocated, means that it was passed, whatever "
        f"its values are. AWS's library uses it so (core/mlp/mlp_tkg/mlp_tkg_constants.py). Write `is not None` "
        f"(at {kernel_line()})",
        SimulatorWarning,
        stacklevel=3,
    )


_trusted: set[str] = set()


def only_for_simulator(owner: str, name: str) -> None:
    """Raise :class:`HiddenStateError` if a kernel reads or writes the attribute ``name``, which NKI does not have.

    Called by a property or method, whose caller is the simulator or a kernel.
    """
    caller = sys._getframe(2)
    if caller.f_code.co_filename not in _trusted:
        _judge(caller.f_code.co_filename, owner, name)


def _judge(file: str, owner: str, name: str) -> None:
    if in_simulator(file):
        _trusted.add(file)
    elif is_launched():
        raise HiddenStateError(
            name,
            f"attributes of {owner} that the documentation of NKI lists",
            f"{owner}.{name}, which exists only in this simulator",
            "compute with nisa operations; shape, dtype, buffer, offset and strides are known to Python",
            operation=f"{owner}.{name}",
        )


def hidden(owner: str, name: str) -> Any:
    """Return a property for the attribute ``_name``, which only the simulator may read or write."""
    slot = "_" + name

    def get(self: object) -> Any:
        only_for_simulator(owner, name)
        return getattr(self, slot)

    def put(self: object, value: object) -> None:
        only_for_simulator(owner, name)
        setattr(self, slot, value)

    return property(get, put)
