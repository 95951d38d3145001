"""The ways in which one machine can compute: BLAS kernels, thread counts, NumPy's SIMD dispatch.

An arrangement is a set of environment variables, which NumPy reads when it is imported, so each needs a
process started with it. :func:`in_force` says in that process what BLAS and NumPy really use, and
:func:`faults` compares it with what was asked for.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# OpenBLAS's name of a core type, and the NumPy features that it needs, by their names in NumPy 2.4
# and before. Forcing a core type that the processor lacks would end in an illegal instruction.
CORES = {
    "Nehalem": ("SSE42",),
    "Haswell": ("AVX2", "FMA3"),
    "SkylakeX": ("AVX512F", "AVX512CD", "AVX512VL", "AVX512BW", "AVX512DQ"),
}
THREADS = (1, 2)
# A thread of OpenBLAS without work spins for 2**26 cycles and more before it sleeps, and here for
# 2**4: on a busy machine that took a third of the time. It changes no result.
SLEEPY = {"OPENBLAS_THREAD_TIMEOUT": "4"}


@dataclass(frozen=True)
class Arrangement:
    """``core``: OpenBLAS's core type, None for its own choice; then NumPy dispatches nothing."""

    name: str
    environment: dict[str, str]
    core: str | None
    threads: int


def features() -> tuple[set[str], list[str]]:
    """NumPy's features of this processor, and those that it chooses at run time."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    there = {name for name, has in __cpu_features__.items() if has}
    return there, [name for name in __cpu_dispatch__ if name in there]


def arrangements() -> Iterator[Arrangement]:
    """Each that this processor can run; one that it cannot run is named and left out."""
    there, dispatched = features()
    for core, needed in CORES.items():
        missing = [name for name in needed if name not in there]
        for threads in THREADS:
            name = f"{core}, {threads} thread{'s' * (threads > 1)}"
            if missing:
                print(f"{name}: left out, this processor has no {missing[0]}", flush=True)
                continue
            environment = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": str(threads)} | SLEEPY
            yield Arrangement(name, environment, core, threads)
    if not dispatched:
        print("NumPy chooses nothing at run time on this processor")
    disabled = {"NPY_DISABLE_CPU_FEATURES": " ".join(dispatched), "OPENBLAS_NUM_THREADS": "1"}
    yield Arrangement("NumPy without SIMD dispatch", disabled, None, 1)


def in_force() -> dict[str, Any]:
    """What this process uses: core type and threads of each BLAS library, and NumPy's dispatch."""
    import numpy as np
    from threadpoolctl import threadpool_info

    np.ones((64, 64)) @ np.ones((64, 64))
    blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
    used = [(library.get("architecture"), library["num_threads"]) for library in blas]
    return {"blas": used, "dispatch": features()[1]}


def faults(wanted: Arrangement, used: dict[str, Any]) -> list[str]:
    """What of an arrangement is not in force.

    >>> one = Arrangement("Haswell, 1 thread", {}, "Haswell", 1)
    >>> faults(one, {"blas": [("Haswell", 1)], "dispatch": ["AVX2"]})
    []
    >>> faults(one, {"blas": [("Zen", 1)], "dispatch": []})
    ["Haswell, 1 thread: asked for Haswell, got [('Zen', 1)]"]
    >>> faults(Arrangement("no SIMD", {}, None, 1), {"blas": [("Zen", 1)], "dispatch": ["AVX2"]})
    ["no SIMD: NumPy still dispatches ['AVX2']"]
    """
    found = []
    blas = used["blas"]
    if wanted.core is not None and not (blas and all(core == wanted.core for core, _ in blas)):
        found.append(f"asked for {wanted.core}, got {blas}")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    threads = min(wanted.threads, processors)
    if not (blas and all(count == threads for _, count in blas)):
        found.append(f"asked for {threads} threads, got {blas}")
    if wanted.core is None and used["dispatch"]:
        found.append(f"NumPy still dispatches {used['dispatch']}")
    return [f"{wanted.name}: {fault}" for fault in found]
