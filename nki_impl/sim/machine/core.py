"""One physical core: its identity, memory and counters, and the entry point of all instructions.

Every kernel runs with a current :class:`Core` (:func:`current`). Each operation of ``nki.isa`` is wrapped by
:func:`instruction`. The machine of a launch may set four hooks of a core:

- ``core.on_instruction(core)`` is called before each instruction, so that a scheduler can switch to another core;
- ``core.on_access(core, tensor, is_write)`` is called before each read or write of HBM, for race detection;
- ``core.on_operands(core, index, names, args, kwargs)`` is called with the number of each instruction and its arguments;
- ``core.on_wait(index, producers)`` is called with the numbers of instructions that another one must follow.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from numpy.typing import NDArray

from nki_impl.sim.errors import LaunchError, TargetError, UninitializedError, UnsupportedError
from nki_impl.sim.machine.former import drop_former
from nki_impl.sim.memory.liveness import Clock
from nki_impl.sim.memory.storage import CoreMemory, RankMemory

if TYPE_CHECKING:
    from nki_impl.sim.machine.turns import Worker
    from nki_impl.sim.tensor.views import NkiTensor

GENERATIONS = {"trn1": 2, "inf2": 2, "trn2": 3, "trn3": 4}
OLDEST = 2
"""The first generation, which has every operation without another ``minimum``."""


@dataclass(slots=True)
class Tally:
    """The counts of one kind of instruction: calls, elements written, FLOPs, bytes moved."""

    instructions: int = 0
    elements: int = 0
    flops: int = 0
    bytes: int = 0


@dataclass(eq=False, slots=True)
class Core:
    """The state of one physical core during a launch.

    This is core ``core`` of the ``lnc`` cores of rank ``rank``; there are ``world`` ranks. ``grid``: n if the kernel
    was launched as ``kernel[n]``, else 0. ``tallies``: counts for each (engine, operation). ``accumulators``: the
    reduce registers of the "scalar" and "vector" engines, one float32 per partition, or None if the values are
    undefined. ``worker``: the thread of this core in the scheduler. ``strict_matmul``: whether accumulate=True raises
    an error on PSUM elements that no matmul has written. ``loops``: the device loops of this core, None before the first
    one. ``no_reorder``: the number of ``nl.no_reorder()`` blocks that the core is in. ``block_start``: the number of the
    last instruction before the outermost of them.
    """

    rank: int = 0
    core: int = 0
    lnc: int = 1
    world: int = 1
    target: str = "trn2"
    grid: int = 0
    memory: CoreMemory = field(default_factory=CoreMemory)
    shared: RankMemory = field(default_factory=RankMemory)
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)
    accumulators: dict[str, NDArray[np.float32] | None] = field(
        default_factory=lambda: {"scalar": None, "vector": None}
    )
    strict_matmul: bool = True
    index: int = 0
    operation: str = ""
    on_instruction: Callable[[Core], None] | None = None
    on_access: Callable[[Core, NkiTensor, bool], None] | None = None
    on_operands: (
        Callable[[int, int, Sequence[str], Sequence[Any], Mapping[str, Any]], None] | None
    ) = None
    on_wait: Callable[[int, Sequence[int]], None] | None = None
    constants: dict[object, object] = field(default_factory=dict)
    worker: Worker | None = None
    loops: Any = None  # a machine.loops.Loops, whose module imports this one
    no_reorder: int = 0
    block_start: int = 0

    @property
    def generation(self) -> int:
        """The generation of the target, 2, 3 or 4, as in ``nisa.nc_version``."""
        return GENERATIONS[self.target]

    def begin(self, operation: str) -> None:
        """Enter an instruction: set its name, give it a number, and let the scheduler switch to another core."""
        self.index += 1
        Clock.now += 1
        self.operation = operation
        if self.on_instruction is not None:
            self.on_instruction(self)
            self.operation = operation

    def count(self, engine: str, elements: int, flops: int = 0, nbytes: int = 0) -> None:
        """Add one instruction of the current operation on ``engine`` to the tallies."""
        key = (engine, self.operation)
        tally = self.tallies.get(key)
        if tally is None:
            tally = self.tallies[key] = Tally()
        tally.instructions += 1
        tally.elements += elements
        tally.flops += flops
        tally.bytes += nbytes

    def accumulator(self, engine: str, partitions: int) -> NDArray[np.float32]:
        """Return the reduce registers of ``engine`` for partitions 0..partitions-1.

        Raises :class:`UninitializedError` if their values are undefined or belong to another number of partitions.
        """
        held = self.accumulators[engine]
        if held is None or held.shape[0] != partitions:
            raise UninitializedError(
                "reduce_cmd",
                f"the reduce registers of the {engine} engine hold this reduction",
                "registers never reset, used for other partitions, or changed by another instruction",
                "use reduce_cmd.reset_reduce and add the partial results with tensor_reduce",
            )
        return held


_threads = threading.local()

_BUFFER_SIZE = 256
"""The elements in NumPy's buffers during a launch. NumPy copies the rows of a tile and a (P,1) operand into its buffers
if several rows fit, which takes longer than the operation on each row. The size has no effect on the bits of results:
these operations are element-wise, and NumPy reduces rows of float32 without a buffer."""


def current() -> Core:
    """Return the core that the calling thread simulates.

    Raises :class:`LaunchError` outside a launch.
    """
    core: Core | None = getattr(_threads, "core", None)
    if core is not None:
        return core
    raise LaunchError(
        "kernel",
        "an operation inside a launched kernel",
        "a call outside a launch",
        "launch with kernel(...), nki.simulate(kernel)(...) or run_ranks(kernel, ...)",
    )


@contextmanager
def acting_as(core: Core) -> Iterator[Core]:
    """Make ``core`` the current core of this thread inside the with block."""
    before = getattr(_threads, "core", None)
    _threads.core = core
    buffer_size = np.setbufsize(_BUFFER_SIZE)
    try:
        # The engines produce inf and NaN without warnings.
        with np.errstate(all="ignore"):
            yield core
    finally:
        np.setbufsize(buffer_size)
        _threads.core = before


def is_launched() -> bool:
    """Return whether the calling thread runs a launched kernel."""
    core: Core | None = getattr(_threads, "core", None)
    return core is not None and core.worker is not None


def generation() -> int:
    """Return the generation of the current core; outside a launch, that of trn2."""
    core: Core | None = getattr(_threads, "core", None)
    return 3 if core is None else core.generation


class NkiInstruction:
    """The return value of an operation of ``nki.isa``.

    Kernels use it to say that one instruction must run before another.
    """

    __slots__ = ("_nest", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._nest: tuple[object, ...] = ()

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Return self; the simulator runs in program order, so ``producers`` have already finished.

        Raises :class:`UnsupportedError` for a producer in a device loop that this instruction is not in, or in another
        iteration: the wait is fixed when the kernel is compiled.
        """
        for producer in producers:
            refuse_other_nest(producer, self._nest, "depends_on")
        core = current()
        if core.on_wait is not None:
            core.on_wait(self.handle, [producer.handle for producer in producers])
        return self


def issued(core: Core) -> NkiInstruction:
    """Return a handle to the instruction that ``core`` is in."""
    out = NkiInstruction(core.index)
    if core.loops is not None:
        out._nest = core.loops.nest
    return out


def refuse_other_nest(
    producer: NkiInstruction, nest: tuple[object, ...], operation: str | None
) -> None:
    """Raise :class:`UnsupportedError` unless ``producer`` is in the same loops as ``nest``, or in fewer of them."""
    if producer._nest != nest[: len(producer._nest)]:
        raise UnsupportedError(
            "producers",
            "instructions of the same iteration of the same device loops, or of loops around them",
            "an instruction in another loop or iteration",
            "put both instructions into one body",
            operation=operation,
        )


P = ParamSpec("P")


def instruction(function: Callable[P, None], minimum: int = OLDEST) -> Callable[P, NkiInstruction]:
    """Make ``function`` an operation of ``nki.isa``, which checks the target and enters an instruction.

    ``minimum`` is the first generation that has the operation; older targets raise :class:`TargetError`.
    """
    name = function.__name__
    operands = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> NkiInstruction:
        core = current()
        if minimum > OLDEST and core.generation < minimum:
            raise TargetError(
                "target",
                f"{name} exists from NeuronCore-v{minimum} on",
                core.target,
                "use operations of this generation, or launch for a later target",
                name,
            )
        if "dtype" in kwargs or "mask" in kwargs:
            drop_former(name, args, kwargs)
        core.begin(name)
        if core.on_operands is not None:
            core.on_operands(core.core, core.index, operands, args, kwargs)
        loops = core.loops
        if loops is None:
            function(*args, **kwargs)
            return NkiInstruction(core.index)
        loops.enter(name, args, kwargs)
        function(*args, **kwargs)
        return issued(core)

    return entry


def instruction_from(minimum: int) -> Callable[[Callable[P, None]], Callable[P, NkiInstruction]]:
    """Decorate an operation that only targets of generation ``minimum`` or later have (3: trn2, 4: trn3)."""
    return functools.partial(instruction, minimum=minimum)
