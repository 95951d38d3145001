"""``nl.fori_loop`` and ``nl.while_loop``: loops that the device runs.

The compiler traces the body of such a loop once, while the simulator calls it once for each iteration. A body has the
same meaning in both only if every call issues the same instructions on the same tensors, so that is checked:

- every iteration must issue the instructions of the first one, with the same operands;
- the body must not change Python state: rebind a variable of an enclosing function or module, or change a list, dict
  or set that such a variable holds. Attributes of objects are not compared, because allocators that kernels pass around
  keep counters there; if such an attribute changes an instruction, the first rule finds it;
- a tensor that the body allocates cannot be used outside its iteration.

The documentation leaves open, and the stricter reading was chosen:

- The migration guide calls the variable of ``fori_loop`` read-only, the API reference says that writing it has no
  effect. It is read-only here. The register of ``while_loop`` may be written, as in the example of the reference.
- With NKI 0.7, the variable is an ``NkiScalar``, with which Python may compute, if both bounds are ints. Here it is
  always a register, with which Python cannot compute.
- A body that runs no iteration is not called, so its errors are not found. The compiler traces it.

Sources: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.33.0/nki/api/generated/nki.language.fori_loop.html,
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.language.while_loop.html and "Rules for
migrated loops" in https://awsdocs-neuron.readthedocs-hosted.com/en/v2.32.0/nki/migration/index.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np

from nki_impl.sim.errors import DtypeError, DynamicValueError, UnsupportedError
from nki_impl.sim.machine.core import Core, current
from nki_impl.sim.machine.python_state import difference, state_of
from nki_impl.sim.memory.registers import NkiScalar, VirtualRegister
from nki_impl.sim.memory.storage import Storage
from nki_impl.sim.tensor.dtypes import int64
from nki_impl.sim.tensor.views import NkiTensor

Entry = tuple[Any, ...]


@dataclass(eq=False)
class Trace:
    """What the compiler would record of one loop: the instructions of its body, and the loops within it.

    ``entries`` is complete when the first iteration has ended. ``at`` and ``made`` count the instructions and the
    allocations of the current iteration; ``storages`` are those allocations.
    """

    entries: list[Entry] = field(default_factory=list)
    inner: dict[int, Trace] = field(default_factory=dict)
    complete: bool = False
    at: int = 0
    made: int = 0
    storages: list[ref[Storage]] = field(default_factory=list)

    def note(self, entry: Entry) -> None:
        """Record the next instruction of the body; raise an error if the first iteration had another one there."""
        if not self.complete:
            self.entries.append(entry)
        elif self.at >= len(self.entries) or self.entries[self.at] != entry:
            first = self.entries[self.at][0] if self.at < len(self.entries) else "no instruction"
            other = "with other operands" if first == entry[0] else f"where the first had {first}"
            raise _not_once(f"{entry[0]} {other}", str(entry[0]))
        self.at += 1


@dataclass(eq=False)
class Loops:
    """The device loops of one core. ``running``: the loops that it is in, outermost first.

    ``places``: for each tensor that was allocated in a loop, the depth of the loop and the number of the allocation;
    None when its iteration has ended. ``nest`` identifies the current iteration of each running loop.
    """

    running: list[Trace] = field(default_factory=list)
    places: WeakKeyDictionary[Storage, tuple[int, int] | None] = field(
        default_factory=WeakKeyDictionary
    )
    nest: tuple[object, ...] = ()

    def enter(self, name: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> None:
        """Check and record an instruction. Its ``name=`` is ignored, because allocators number names."""
        named = sorted(item for item in (kwargs or {}).items() if item[0] != "name")
        entry = (name, *map(self._described, args), *((k, self._described(v)) for k, v in named))
        if self.running:
            self.running[-1].note(entry)

    def refuse_ended(self, tensor: NkiTensor, operation: str | None = None) -> None:
        """Raise :class:`UnsupportedError` if the iteration that allocated ``tensor`` has ended."""
        if self.places.get(tensor._storage, (0, 0)) is None:
            raise UnsupportedError(
                tensor.name or "a tensor",
                "tensors that a loop body allocates are used only in that iteration",
                f"{tensor!r} of an iteration that has ended",
                "allocate it before the loop",
                operation=operation,
            )

    def allocated(self, tensor: NkiTensor) -> None:
        """Record an allocation in the innermost running loop."""
        if self.running and tensor._storage not in self.places:
            trace = self.running[-1]
            self.places[tensor._storage] = (len(self.running), trace.made)
            trace.storages.append(ref(tensor._storage))
            trace.made += 1

    def _described(self, value: Any) -> Any:
        """Return what the compiler knows of an operand while it traces; equal for equal operands."""
        if isinstance(value, NkiTensor):
            self.refuse_ended(value)
            place = self.places.get(value._storage) or id(value._storage)
            text: Entry = (place, value.shape, value.dtype.name, value.strides, value.byte_offset)
            if value.dynamic is not None:
                dynamic = value.dynamic
                text += (dynamic.kind, dynamic.stride, self._described(dynamic.source))
            return text
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if value is None or isinstance(value, (bool, int, float, str, np.number, Enum)):
            return repr(value)
        return type(value).__name__, getattr(value, "__name__", "")


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any], None], step: Any = 1) -> None:
    """Call body_fun(i) with a read-only register i = lower, lower + step, ... below upper.

    The bounds are ints or registers; ``step`` is a positive int. See :mod:`nki_impl.sim.machine.loops` for the rules.
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise DtypeError("step", "an int of at least 1", repr(step), "pass a Python int")
    values = range(bound(lower, "lower"), bound(upper, "upper"), step)
    with _loop("fori_loop") as (loops, trace):
        for value in values:
            returned = _iterate(loops, trace, body_fun, VirtualRegister(value, frozen=True))
            if returned is not None:
                raise DynamicValueError(
                    "body_fun",
                    "a body without a return value",
                    type(returned).__name__,
                    "write the result to a tensor that was allocated before the loop",
                )


def while_loop(init: Any, body_fun: Callable[[Any], Any]) -> None:
    """Set a register r to ``init``; then, as long as r is not 0, set r to the register body_fun(r).

    See :mod:`nki_impl.sim.machine.loops` for the rules.
    """
    condition = _condition(init, "init").read("init")
    with _loop("while_loop") as (loops, trace):
        while condition != 0:
            returned = _iterate(loops, trace, body_fun, VirtualRegister(condition))
            condition = _condition(returned, "body_fun").read("body_fun")


def bound(value: object, operand: str) -> int:
    """Return a bound of a loop, an int or a register, as an int."""
    if isinstance(value, NkiScalar) and value.dtype is int64:
        raise DtypeError(operand, "a 32-bit bound", "an int64 scalar", "load it from an int32 tile")
    if isinstance(value, VirtualRegister):
        return value.read(operand)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise DtypeError(
            operand, "an int or a register", repr(value), "load the bound into a register"
        )
    return int(value)


def _condition(value: object, operand: str) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        raise DtypeError(operand, "a register", repr(value), "return the register of the condition")
    return value


@contextmanager
def _loop(name: str) -> Iterator[tuple[Loops, Trace]]:
    """Enter a loop on the current core, and leave it at the end of the with block."""
    core = current()
    if core.no_reorder:
        raise UnsupportedError(
            name,
            "a loop outside nl.no_reorder()",
            "a loop inside such a block",
            "put the block into the body",
            operation=name,
        )
    loops: Loops = core.loops or Loops()
    core.loops = loops
    trace = _entered(loops, name)
    outer = loops.nest
    loops.running.append(trace)
    try:
        yield loops, trace
    finally:
        loops.running.pop()
        loops.nest = outer


def _entered(loops: Loops, name: str) -> Trace:
    """Return the trace of a loop that begins; within another loop, it is the one of that loop's first iteration."""
    if not loops.running:
        return Trace()
    around = loops.running[-1]
    around.note((name,))
    return around.inner.setdefault(around.at, Trace())


def _iterate(loops: Loops, trace: Trace, body: Callable[[Any], Any], register: Any) -> Any:
    """Call the body once, and check what it did."""
    outer = loops.nest
    loops.nest = (*outer, object())
    trace.at = trace.made = 0
    before = state_of(body)
    returned = body(register)
    changed = difference(before, state_of(body))
    if changed is not None:
        raise DynamicValueError(
            "body_fun",
            "a body that changes no Python state, because it is traced once",
            f"{changed} was changed",
            "keep it in SBUF or HBM, and change it with instructions",
        )
    if trace.at != len(trace.entries):
        raise _not_once(f"it ended before {trace.entries[trace.at][0]}", None)
    trace.complete = True
    for made in trace.storages:
        storage = made()
        if storage is not None:
            loops.places[storage] = None
    trace.storages.clear()
    loops.nest = outer
    return returned


def _not_once(got: str, operation: str | None) -> DynamicValueError:
    return DynamicValueError(
        "body_fun",
        "the same instructions on the same operands in every iteration, because the body is traced once",
        f"a later iteration that differs from the first: {got}",
        "let the operands depend on the register of the loop (scalar_offset), not on Python values",
        operation=operation,
    )


def refuse_ended(core: Core, tensor: NkiTensor, operation: str | None = None) -> None:
    """Raise an error if the iteration of a loop that allocated ``tensor`` has ended."""
    if core.loops is not None:
        core.loops.refuse_ended(tensor, operation)
