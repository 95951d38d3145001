"""Launching kernels: ``nki.jit``, ``nki.simulate``, and :func:`run_ranks` for W ranks at once.

Array arguments become kernel inputs in HBM. The tensors that a kernel returns must be in shared HBM, and are returned
as arrays. Inputs are read-only, except with ``nki.simulate``: if a kernel writes an input there, the caller's array
changes in place, as NKI documents.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.jit.html,
nki.simulate.html in the same folder, and nki/guides/nki_simulator.html.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import BoundArguments
from typing import Any, Literal

from nki_impl.sim.errors import (
    CollectiveError,
    LaunchError,
    OutputError,
    RaceError,
    SimulatorError,
    line_of,
)
from nki_impl.sim.machine.arguments import (
    Input,
    as_torch,
    check_output,
    each_tensor,
    is_torch,
    load,
    unload,
    write_back,
)
from nki_impl.sim.machine.core import GENERATIONS, Core, acting_as, current
from nki_impl.sim.machine.counters import Counters, add_up, count_cores
from nki_impl.sim.machine.dependence import Graph, Program
from nki_impl.sim.machine.loops import refuse_ended
from nki_impl.sim.machine.races import Detector
from nki_impl.sim.machine.turns import Machine, Worker
from nki_impl.sim.memory.storage import CoreMemory, RankMemory
from nki_impl.sim.tensor.views import NkiTensor

__all__ = ["Kernel", "Outcome", "jit", "run_ranks", "simulate"]

Arguments = Sequence[Any] | Mapping[str, Any] | BoundArguments
TARGETS = {"gen2": "trn1", "gen3": "trn2", "gen4": "trn3"}


class Kernel:
    """The kernel that ``nki.jit`` makes of a function. A call launches it; ``kernel[2](...)`` uses two cores.

    ``grid``: n of ``kernel[n]``, else 0. Inside another kernel, a call is an ordinary function call. ``options``: the
    keyword arguments of ``nki.jit``; the simulator uses only ``platform_target``.
    """

    def __init__(self, function: Callable[..., Any], grid: int, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.grid = grid
        self.options = options

    def __getitem__(self, grid: int | tuple[int]) -> Kernel:
        size = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if isinstance(size, bool) or not isinstance(size, int) or size not in (1, 2):
            raise LaunchError(
                "grid", "kernel[1] or kernel[2]: LNC is 1 or 2", repr(grid), "use these"
            )
        return Kernel(self.function, size, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Launch the kernel on the grid; inside a running kernel, only call the function."""
        if _inside():
            return self.function(*args, **kwargs)
        return _launch_one(self, args, kwargs, update_inputs=False)

    def __repr__(self) -> str:
        return f"<nki kernel {self.function.__qualname__}>"


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a run of W ranks: the results and the counters of each rank.

    ``results[rank]``: the kernel's return value, with NumPy arrays in place of tensors. ``ranks``: the counters of each
    rank. ``total``: the sum of these counters. ``switches``: the number of times that the simulator switched between
    cores.
    """

    results: tuple[Any, ...]
    ranks: tuple[Counters, ...]
    switches: int

    @property
    def total(self) -> Counters:
        """The sum of the counters of all ranks."""
        return add_up(self.ranks)

    @property
    def sbuf_high(self) -> int:
        """The largest number of bytes per partition of SBUF that any core had in use."""
        return self.total.sbuf_high

    @property
    def psum_high(self) -> int:
        """The largest number of bytes per partition of PSUM that any core had in use."""
        return self.total.psum_high


def jit(fn: Callable[..., Any] | None = None, **kwargs: Any) -> Any:
    """Make a kernel of ``fn``: ``@nki.jit``, ``@nki.jit()`` or ``@nki.jit(platform_target="trn2")``.

    ``kwargs`` are kept as the kernel's options.
    """
    if fn is None:
        return lambda function: jit(function, **kwargs)
    if isinstance(fn, Kernel):
        return fn
    return Kernel(fn, 0, kwargs)


def simulate(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs ``kernel`` on the simulator; inputs that the kernel writes change in place.

    The returned function takes NumPy arrays or PyTorch tensors and returns the same kind. ``kernel`` may be a plain
    function, a ``nki.jit`` kernel, or ``kernel[2]``.
    """
    made = jit(kernel)

    @functools.wraps(made.function)
    def simulated(*args: Any, **kwargs: Any) -> Any:
        return _launch_one(made, args, kwargs, update_inputs=True)

    return simulated


def run_ranks(
    kernel: Callable[..., Any],
    arguments: Sequence[Arguments],
    lnc: int | None = None,
    target: str | None = None,
    interleave: int | None = None,
    ring_ids: Literal["rank", "position"] = "rank",
    update_inputs: bool = False,
    races: Literal["error", "warn"] = "error",
) -> Outcome:
    """Run ``kernel``, which may use collectives, on as many ranks as ``arguments`` has entries.

    ``arguments[rank]``: the positional arguments (a tuple or list) or keyword arguments (a dict) of one rank. ``lnc``:
    the number of cores per rank; None: n of ``kernel[n]``, else 1. ``target``: "trn1", "trn2" or "trn3"; None: the
    target of ``nki.jit(platform_target=...)``, else that of the environment variable NEURON_PLATFORM_TARGET_OVERRIDE,
    else trn2. ``interleave``: a seed; ranks and cores then take turns at random instructions, which does not change the
    results of a correct kernel; None: a fixed order. ``ring_ids``: whether
    ``collective_permute_implicit_current_processing_rank_id`` returns the owner's number or its position in the ring.
    ``update_inputs``: whether a kernel may write its inputs, which changes the caller's arrays. ``races``: whether a race
    ends the run with a RaceError, or is a :class:`~nki_impl.sim.errors.RaceWarning`, once for each pair of lines. Accesses
    that are ordered only if the compiler keeps the order of the program are always warnings.

    Raises LaunchError for invalid arguments, another :class:`~nki_impl.sim.errors.SimulatorError` for a broken rule of
    the machine, or the exception that the kernel raised, with a note of the rank and core.
    """
    made: Kernel = jit(kernel)
    per_rank = (made.grid or 1) if lnc is None else lnc
    if per_rank not in (1, 2) or (made.grid and made.grid != per_rank):
        raise LaunchError(
            "lnc",
            "1 or 2, and the n of kernel[n] if there is one",
            f"lnc={lnc} and kernel[{made.grid}]" if made.grid else f"lnc={lnc}",
            "leave out lnc, or pass the same number",
        )
    if races not in ("error", "warn"):
        raise LaunchError("races", '"error" or "warn"', repr(races), "pass one of the two")
    if not arguments:
        raise LaunchError("arguments", "an entry for each rank", "none", "pass [(q, k, v), ...]")
    return _run(
        made, arguments, per_rank, target, interleave, ring_ids, update_inputs, races == "warn"
    )


def _run(
    made: Kernel,
    arguments: Sequence[Arguments],
    lnc: int,
    target: str | None,
    interleave: int | None,
    ring_ids: Literal["rank", "position"],
    update_inputs: bool,
    only_warn: bool,
) -> Outcome:
    """Run the kernel, see :func:`run_ranks`."""
    machine = Machine(len(arguments), lnc, interleave, ring_ids)
    generation_of = resolve_target(target, made)
    grid = made.grid or (2 if lnc == 2 else 0)
    inputs: list[list[Input]] = [[] for _ in arguments]
    calls = [
        _bind(made, arguments[rank], rank, lnc, not update_inputs, inputs[rank])
        for rank in range(machine.world)
    ]
    cores = _make_cores(machine, generation_of, grid, only_warn)
    bodies = [
        functools.partial(_body, made, core, calls[core.rank], update_inputs) for core in cores
    ]
    detectors = [worker.races for worker in machine.workers[::lnc] if worker.races is not None]
    try:
        returned = machine.run(bodies)
    except SimulatorError:
        _report(detectors)  # a race may be the cause
        raise
    _report(detectors)
    results = tuple(each_tensor(returned[rank * lnc], unload) for rank in range(machine.world))
    if update_inputs:
        for items in inputs:
            write_back(items)
    counted = tuple(
        count_cores(cores[rank * lnc : (rank + 1) * lnc]) for rank in range(machine.world)
    )
    return Outcome(results, counted, machine.switches)


def resolve_target(target: str | None = None, kernel: Kernel | None = None) -> str:
    """Return the target that the argument gives, else the kernel, else the environment, else "trn2"."""
    chosen = target or (kernel.options if kernel else {}).get("platform_target")
    chosen = chosen or os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE") or "trn2"
    name = TARGETS.get(str(chosen), str(chosen))
    if name not in GENERATIONS:
        raise LaunchError(
            "target", "trn1, trn2 or trn3 (gen2, gen3, gen4)", repr(chosen), "name one"
        )
    return name


def _inside() -> bool:
    """Return True when the calling thread is running a kernel."""
    try:
        current()
    except LaunchError:
        return False
    return True


def _launch_one(kernel: Kernel, args: Any, kwargs: Mapping[str, Any], update_inputs: bool) -> Any:
    """Launch the kernel on one rank. Return PyTorch tensors if a PyTorch tensor was passed, else NumPy arrays."""
    bound = _bound(kernel, args, kwargs)
    torch_given = any(map(is_torch, bound.arguments.values()))
    result = run_ranks(kernel, [bound], update_inputs=update_inputs).results[0]
    return _with_torch(result) if torch_given else result


def _bound(kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """Return the arguments of one call by the names of the parameters, including defaults."""
    signature = inspect.signature(kernel.function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise LaunchError(
            "arguments",
            f"those of {kernel.function.__name__}{signature}",
            error,
            "pass one value for each parameter",
        ) from None
    bound.apply_defaults()
    return bound


def _with_torch(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(_with_torch(part) for part in result)
    if isinstance(result, dict):
        return {name: _with_torch(part) for name, part in result.items()}
    return None if result is None else as_torch(result)


def _bind(
    kernel: Kernel, given: Arguments, rank: int, lnc: int, read_only: bool, inputs: list[Input]
) -> BoundArguments:
    """Return the arguments of one rank by the names of the parameters, with kernel inputs in place of arrays."""
    if isinstance(given, BoundArguments):
        bound = given
    elif isinstance(given, Mapping):
        bound = _bound(kernel, (), given)
    elif isinstance(given, (tuple, list)):
        bound = _bound(kernel, given, {})
    else:
        raise LaunchError(
            "arguments", "a tuple or a dict for each rank", type(given).__name__, "write (x,)"
        )
    for name, value in bound.arguments.items():
        bound.arguments[name] = load(name, value, rank, lnc, read_only, inputs)
    return bound


def _make_cores(machine: Machine, target: str, grid: int, only_warn: bool) -> list[Core]:
    """Make a core for each worker (thread); the cores of a rank share one HBM and one race detector."""
    cores = []
    graph = Graph()
    for rank in range(machine.world):
        shared = RankMemory(machine.lnc)
        detector = Detector(graph, only_warn) if machine.lnc > 1 else None
        for worker in machine.cores_of([rank]):
            memory = CoreMemory(GENERATIONS[target])
            memory.lifetimes.deferred = True
            core = Core(rank, worker.core, machine.lnc, machine.world, target, grid, memory, shared)
            core.worker = worker
            worker.races = detector
            if detector is not None:
                core.on_access = detector.on_access
                program = Program(graph, core)
                detector.programs.append(program)
                core.on_operands, core.on_wait = program.enter, program.wait
            cores.append(core)
            if not machine.alone and (machine.interleaved or detector is not None):
                core.on_instruction = functools.partial(_step, machine, worker)
    machine.on_interrupt = functools.partial(_step_from_now, machine, cores)
    return cores


def _report(detectors: Sequence[Detector]) -> None:
    for rank, detector in enumerate(detectors):
        try:
            detector.report()
        except RaceError as error:
            error.args = (f"[rank {rank}] {error}", *error.args[1:])
            raise


def _step_from_now(machine: Machine, cores: list[Core]) -> None:
    """Let every core see at its next instruction that the run was interrupted."""
    for core, worker in zip(cores, machine.workers, strict=True):
        core.on_instruction = functools.partial(_step, machine, worker)


def _step(machine: Machine, worker: Worker, core: Core) -> None:
    """Let the scheduler switch before an instruction, or stop the worker."""
    if worker.races is not None:
        worker.races.settle()
    machine.step(worker)


def _body(kernel: Kernel, core: Core, call: BoundArguments, inputs_too: bool) -> Any:
    """Run the kernel as one core from its first line to its last, and check what it returns."""
    with acting_as(core):
        returned = kernel.function(*call.args, **call.kwargs)
    worker = core.worker
    assert worker is not None and worker.machine is not None
    if worker.races is not None:
        worker.races.settle()
    core.memory.settle()
    if worker.prepared is not None:
        raise worker.prepared.not_triggered("the kernel ended")

    def checked(path: str, tensor: NkiTensor) -> NkiTensor:
        storage = check_output(path, tensor, inputs_too)
        refuse_ended(core, tensor, "result")
        if storage in worker.exchanged:
            raise CollectiveError(
                path,
                "an output that no collective has used",
                f"{storage.name}, an operand of {worker.exchanged[storage]}",
                "dma_copy it into another shared_hbm tensor and return that",
                operation="return",
                line=line_of(storage.made_at) if storage.made_at else None,
            )
        return tensor

    result = each_tensor(returned, checked)
    if core.lnc > 1:
        _at_end_of_both(worker, result)
    return result


def _at_end_of_both(worker: Worker, result: Any) -> None:
    """Raise an error if the two cores of a rank return different tensors or end with a race."""
    machine = worker.machine
    assert machine is not None
    partner = machine.cores_of([worker.rank])[1 - worker.core]
    if not partner.finished:
        return
    assert worker.races is not None
    worker.races.finish()
    if _identity(partner.result) != _identity(result):
        raise OutputError(
            "result",
            "both cores return the same tensors",
            "different tensors",
            "allocate outputs on both cores, in the same order or under the same name",
        )


def _identity(result: Any) -> Any:
    if isinstance(result, NkiTensor):
        return (id(result.storage), result.byte_offset, result.shape, result.array.strides)
    if isinstance(result, tuple):
        return tuple(_identity(part) for part in result)
    if isinstance(result, dict):
        return tuple((name, _identity(part)) for name, part in result.items())
    return None
