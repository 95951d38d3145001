"""Refuse Python operations on values that exist only on the device."""

from __future__ import annotations

from typing import Any

from nki_impl.sim.errors import DynamicValueError

_NAMES = (
    "bool iter contains getitem lt le gt ge add radd iadd sub rsub isub mul rmul imul truediv rtruediv "
    "itruediv floordiv rfloordiv mod rmod pow rpow neg pos abs and rand or ror xor rxor invert lshift "
    "rshift matmul int float index"
).split()


def refuse(value: object, *others: object) -> Any:
    """Raise :class:`DynamicValueError`, because Python needs the value of a tensor or register."""
    raise DynamicValueError(
        "value",
        "no Python access to values that exist only on the device",
        f"bool(), comparison, iteration, indexing or arithmetic on a {type(value).__name__}",
        "compute with nisa operations; branch on shapes and launch arguments only",
    )


def refuse_values(cls: type) -> None:
    """Make every operator that the class ``cls`` does not define itself raise the error of :func:`refuse`."""
    for name in _NAMES:
        if f"__{name}__" not in cls.__dict__:
            setattr(cls, f"__{name}__", refuse)
