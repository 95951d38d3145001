"""One exception class for each kind of rule of the machine that a kernel can break.

Every message names the operation, the operand, the limit, what was given, the line of the kernel and how to fix it. All
classes derive from :class:`SimulatorError`, which is an :class:`NkiValidationError` (``nki.isa.NkiValidationError``:
"raised when hardware constraints are violated").
"""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType, FrameType

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def in_simulator(file: str) -> bool:
    """Return whether ``file`` is a source file of the simulator."""
    return file.startswith(_PACKAGE)


def _kernel_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the kernel's function that called the simulator: the first one outside it."""
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    while frame is not None and frame.f_back is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back  # copy.deepcopy, for example, called by the kernel
    # The thread of a core, for example, begins in Python's own files: no kernel is running.
    return None if frame is not None and _is_standard(frame.f_code.co_filename) else frame


@functools.cache
def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file


def kernel_line() -> str:
    """Return ``file:line`` for the line of the kernel that is running."""
    frame = _kernel_frame(sys._getframe(1))
    return "?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


Spot = tuple[CodeType, int]
"""Code and the instruction in it. Its line is only searched for (:func:`line_of`) if a message needs it, because Python
goes through the code from its start to find a line."""


def kernel_spot() -> Spot | None:
    """Return what of the kernel is running; None if that is unknown."""
    frame = _kernel_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code, frame.f_lasti)


def line_of(spot: Spot | None) -> str:
    """Return ``file:line`` for a spot, as :func:`kernel_line` does."""
    if spot is None:
        return "?"
    code, at = spot
    line = next(line for start, end, line in code.co_lines() if start <= at < end)
    return f"{code.co_filename}:{line}"


def _operation_name() -> str:
    """Return the name of the simulator's function that the kernel called."""
    frame: FrameType | None = sys._getframe(1)
    public: FrameType | None = None
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        if frame.f_code.co_name != "entry" and not frame.f_code.co_name.startswith("<"):
            public = frame
        frame = frame.f_back
    return "?" if public is None else public.f_code.co_qualname.partition(".<locals>")[0]


class NkiValidationError(Exception):
    """Base class of all errors for broken rules of the machine (``nki.isa.NkiValidationError``)."""


class SimulatorWarning(UserWarning):
    """A kernel does what the documentation forbids and AWS's own kernels do; the simulator accepts it."""


class RaceWarning(SimulatorWarning):
    """Two accesses that only the program order of a core orders, or a race if races are to be reported and the run goes on."""


class SimulatorError(NkiValidationError):
    """A kernel breaks a rule of the machine.

    ``operand``: the argument at fault ("dst", "stationary"...). ``limit``: the rule. ``got``: what was passed. ``fix``:
    what to do. ``operation``: the simulator's function that the kernel called; by default it is found from the call
    stack. ``line``: the line of the kernel that called it; by default the one that is running.

    >>> try:
    ...     raise SimulatorError("dst", "at most 128 partitions", "130", "split it", "memset")
    ... except SimulatorError as error:
    ...     print(str(error).split(" (at ")[0])
    memset: dst: at most 128 partitions; got 130. Fix: split it
    """

    def __init__(
        self,
        operand: str,
        limit: str,
        got: object,
        fix: str,
        operation: str | None = None,
        line: str | None = None,
    ) -> None:
        self.operation = operation or _operation_name()
        self.operand = operand
        self.limit = limit
        self.got = str(got)
        self.fix = fix
        self.line = line or kernel_line()
        super().__init__(
            f"{self.operation}: {operand}: {limit}; got {self.got}. Fix: {fix} (at {self.line})"
        )


class ViewError(SimulatorError):
    """A slice, index, reshape or access pattern that the tensor cannot express."""


class EmptyViewError(ViewError):
    """A view without elements, which no instruction accepts."""


class PartitionError(ViewError):
    """Too many partitions, a step between partitions, or a first partition that an engine cannot address."""


class MatmulError(SimulatorError):
    """A rule of the tensor engine is broken: sizes, memories, dtypes that go together, PSUM bank or accumulation."""


class ShapeError(SimulatorError):
    """Operands have different partition counts or different free sizes."""


class PlacementError(SimulatorError):
    """An operand is in a memory that the engine cannot access, or two operands need the same port."""


class DmaError(SimulatorError):
    """A rule of the DMA engines is broken: operands in PSUM, element counts, rank or dtype of a transposition."""


class DtypeError(SimulatorError):
    """A dtype, a number or an operator does not fit the operation."""


class RangeSelectError(SimulatorError):
    """A rule of range_select is broken: fill value, bounds, comparison."""


class TargetError(SimulatorError):
    """The operation does not exist on the generation of the target."""


class UninitializedError(SimulatorError):
    """The kernel reads memory or an accumulator register that was never written."""


class OverlapError(SimulatorError):
    """A tensor is read after another one at the same address was written, or a copy overlaps its source."""


class OutputError(SimulatorError):
    """The kernel writes an input, or returns something that is not a tensor in shared HBM."""


class OutOfBoundsError(SimulatorError):
    """A dynamic offset or index points outside the tensor."""


class DynamicValueError(SimulatorError):
    """Python code needs the value of a register or tile, which exists only on the device."""


class HiddenStateError(DynamicValueError, AttributeError):
    """A kernel uses an attribute of a tensor or register that exists only in the simulator.

    It is an AttributeError, so that hasattr() returns False, as it does for a tensor of NKI.
    """


class CapacityError(SimulatorError):
    """SBUF or PSUM is full."""


class UnsupportedError(SimulatorError):
    """The kernel uses a part of NKI (a name, option or combination) that the simulator does not model."""


class LaunchError(SimulatorError):
    """An operation is called outside a launch, or a kernel is launched with invalid arguments."""


class CollectiveError(SimulatorError):
    """The operands, the group or the order of collectives break a rule."""


class DeadlockError(SimulatorError):
    """No core of any rank can continue; the message says what each core waits for."""


class RaceError(SimulatorError):
    """Data is read or written while another core or a collective may still use it."""
