"""Scalar registers of an engine (``nisa.VirtualRegister``).

A register holds one 32-bit integer that only the device knows: Python can neither compare it nor
compute with it. It can be the ``scalar_offset`` of an access pattern and an operand of the
``register_*`` operations. A scalar (``nisa.NkiScalar``) is a register that kernels may compute with.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError, UninitializedError
from nki_impl.sim.operators.refusal import hidden, only_for_simulator, refuse, refuse_values
from nki_impl.sim.tensor.objects import NKIObject


class VirtualRegister(NKIObject):
    """A 32-bit scalar register. ``_state``: its value, None before it has one. ``frozen``: True if it is read-only.

    Results of collectives and the registers of loops are read-only.
    """

    __slots__ = ("_state", "frozen", "trails")

    def __init__(self, state: Any = None, frozen: bool = False) -> None:
        self._state = None if state is None else checked_int(state, "x")
        self.frozen = frozen
        self.trails: Any = None  # of machine.dependence, which imports this module

    def read(self, operand: str) -> int:
        """Return the value for use by an instruction; raise :class:`UninitializedError` if no value was loaded.

        Raises :class:`HiddenStateError` if a kernel calls it.
        """
        only_for_simulator("VirtualRegister", "read")
        if self._state is None:
            raise UninitializedError(
                operand,
                "a register that was loaded",
                "an empty register",
                "register_alloc(value) or register_load",
            )
        return self._state

    state = hidden("VirtualRegister", "state")

    def assign(self, value: int, operand: str = "dst") -> None:
        """Set the value; raises :class:`DtypeError` for frozen registers."""
        if self.frozen:
            raise DtypeError(
                operand,
                "a register from register_alloc",
                "a frozen register",
                "register_move it first",
            )
        self._state = value

    def __eq__(self, other: object) -> bool:
        return False if other is None else bool(refuse(self, "operator =="))

    def __ne__(self, other: object) -> bool:
        return True if other is None else bool(refuse(self, "operator !="))

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "VirtualRegister(...)"


def checked_int(value: Any, operand: str) -> int:
    """Return ``value`` as an int that fits 32 bits (signed or unsigned), or raise DtypeError."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer))
        or not -(2**31) <= value < 2**32
    ):
        raise DtypeError(operand, "an integer of 32 bits", repr(value), "pass such an integer")
    return int(value)


refuse_values(VirtualRegister)


class NkiScalar(VirtualRegister):
    """An int32 or int64 on the device that kernels compute with: every operator returns a new scalar.

    The operators are + - * with a Python int or another scalar of the same dtype; results wrap to the bits of ``dtype``.
    It can be a ``scalar_offset``, and Python cannot know its value. An int32, like a register, can be a bound of
    ``fori_loop`` and an offset on chip. ``roots``: the loaded scalars that it was computed from; none if it was loaded.

    Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.NkiScalar.html
    """

    __slots__ = ("dtype", "roots")

    def __init__(self, state: int, dtype: Any, roots: tuple[NkiScalar, ...] = ()) -> None:
        super().__init__(frozen=True)
        self._state = state
        self.dtype = dtype
        self.roots = roots

    def _int(self) -> int:
        assert self._state is not None
        return self._state

    def _result(self, value: int, other: object = None) -> NkiScalar:
        low: int = self.dtype.low
        roots = [r for s in (self, other) if isinstance(s, NkiScalar) for r in s.roots or (s,)]
        return NkiScalar((value - low) % (-2 * low) + low, self.dtype, tuple(dict.fromkeys(roots)))

    def _other(self, value: object) -> int:
        """Return the other operand of an operator as an int."""
        if isinstance(value, NkiScalar):
            if value.dtype is not self.dtype:
                raise DtypeError(
                    "operand", f"a scalar of {self.dtype}", value.dtype, "load both from one dtype"
                )
            return value._int()
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise DtypeError(
                "operand",
                "an int or an NkiScalar",
                type(value).__name__,
                "load it with scalar_load",
            )
        if not self.dtype.low <= value <= self.dtype.high:
            raise DtypeError(
                "operand", f"an int that {self.dtype} holds", value, "use a smaller number"
            )
        return int(value)

    def __add__(self, other: object) -> NkiScalar:
        return self._result(self._int() + self._other(other), other)

    def __sub__(self, other: object) -> NkiScalar:
        return self._result(self._int() - self._other(other), other)

    def __rsub__(self, other: object) -> NkiScalar:
        return self._result(self._other(other) - self._int(), other)

    def __mul__(self, other: object) -> NkiScalar:
        return self._result(self._int() * self._other(other), other)

    def __neg__(self) -> NkiScalar:
        return self._result(-self._int())

    def __pos__(self) -> NkiScalar:
        return self._result(self._int())

    # The classes of registers refuse the operators with assignment, so they are listed, too.
    __radd__ = __iadd__ = __add__
    __rmul__ = __imul__ = __mul__
    __isub__ = __sub__

    def __repr__(self) -> str:
        return "NkiScalar(...)"
