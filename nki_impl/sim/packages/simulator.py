"""``cpu_simulate``, the entry point of the package ``nki_cpu_simulator`` that AWS's tests call.

AWS's tests run a kernel with ``nki.cpu_simulate(kernel)[lnc](**inputs)``, and choose the target by the environment
variable NKI_NC_VERSION (gen2, gen3 or gen4).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_impl.sim.errors import LaunchError
from nki_impl.sim.machine.launch import Outcome, run_ranks
from nki_impl.sim.memory.storage import NewMemory
from nki_impl.sim.tensor.dtypes import as_dtype

SCALE, RACES, INTERLEAVE = "RINGSPEC_NKI_SCALE", "RINGSPEC_NKI_RACES", "RINGSPEC_NKI_INTERLEAVE"
UNWRITTEN = "RINGSPEC_NKI_UNWRITTEN"


@dataclass(frozen=True)
class CpuSimulation:
    """A kernel that runs on the simulator when it is called; ``simulation[2]`` uses two cores."""

    kernel: Callable[..., Any]
    lnc: int | None = None

    def __getitem__(self, lnc: int) -> CpuSimulation:
        return CpuSimulation(self.kernel, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel on one rank, and return its results as NumPy arrays."""
        return scaled(on_ranks(self.kernel, [kwargs if not args else args], self.lnc).results[0])


def cpu_simulate(kernel: Callable[..., Any]) -> CpuSimulation:
    """Return a function that runs ``kernel`` on one rank: ``cpu_simulate(kernel)[lnc](**inputs)``.

    A kernel may write its inputs, as on the device. The caller's arrays stay as they are: the tests compute what they
    expect from them afterwards. A kernel returns a written input to show the change.
    """
    return CpuSimulation(kernel)


def on_ranks(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    lnc: int | None = None,
    target: str | None = None,
) -> Outcome:
    """Run ``kernel`` on as many ranks as ``arguments`` has entries; a ``target`` of None is that of NKI_NC_VERSION.

    With RINGSPEC_NKI_RACES=warn, races are warnings. RINGSPEC_NKI_INTERLEAVE is a seed for the turns of the cores.
    With RINGSPEC_NKI_UNWRITTEN=zeros, memory begins with zeros and counts as written.
    """
    target = target or os.environ.get("NKI_NC_VERSION") or None
    given = [_copied(one) for one in arguments]
    grid = getattr(kernel, "grid", 0)
    races: Any = os.environ.get(RACES) or "error"
    seed = os.environ.get(INTERLEAVE)
    NewMemory.zeros = _zeros()
    try:
        return run_ranks(
            kernel,
            given,
            lnc=None if grid else lnc,
            target=target,
            interleave=int(seed) if seed else None,
            update_inputs=True,
            races=races,
        )
    finally:
        NewMemory.zeros = False


def _zeros() -> bool:
    chosen = os.environ.get(UNWRITTEN) or "error"
    if chosen not in ("error", "zeros"):
        raise LaunchError(UNWRITTEN, "error or zeros", repr(chosen), "set it to one of them")
    return chosen == "zeros"


def scaled(result: Any) -> Any:
    """Return ``result`` with floating-point arrays multiplied by RINGSPEC_NKI_SCALE, if this variable is set.

    Tests that still pass then do not check their outputs.
    """
    factor = float(os.environ.get(SCALE) or 1.0)
    if factor == 1.0 or result is None:
        return result
    if isinstance(result, (tuple, list)):
        return tuple(scaled(one) for one in result)
    kind = as_dtype(result.dtype)
    return (result.astype(np.float32) * factor).astype(result.dtype) if kind.is_float else result


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (tuple, list):
        return type(value)(_copied(one) for one in value)
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    return value
