"""Regenerate cases of the core set under other BLAS kernels, thread counts and SIMD extensions.

    python .ci/blas_matrix.py [--set SET] [--sample N] [--only PATTERN]

Each arrangement runs in a process of its own, which says what BLAS and NumPy really used and prints
the content digest of each case. All digests must be equal, and equal to those of the packaged set. An
arrangement that this processor lacks is named and left out; Nehalem and NumPy without dispatch run on
every x86 processor. Exit code 1 on a difference, or if an arrangement was not in force.
"""

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import time

# OpenBLAS's name of a core type, and the NumPy features that it needs, by their names in NumPy 2.4
# and before. Forcing a core type that the processor lacks would end in an illegal instruction.
CORES = {
    "Nehalem": ("SSE42",),
    "Haswell": ("AVX2", "FMA3"),
    "SkylakeX": ("AVX512F", "AVX512CD", "AVX512VL", "AVX512BW", "AVX512DQ"),
}
THREADS = (1, 2)


def spread(ids, count):
    """``count`` ids at equal distances, the first and the last among them.

    >>> spread(["a", "b", "c", "d", "e"], 3), spread(["a", "b"], 5)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    if count >= len(ids):
        return list(ids)
    step = (len(ids) - 1) / max(count - 1, 1)
    return [ids[round(n * step)] for n in range(count)]


def features():
    """NumPy's features of this processor, and those that it chooses at run time."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    there = {name for name, has in __cpu_features__.items() if has}
    return there, [name for name in __cpu_dispatch__ if name in there]


def child(name, ids):
    """Derive the cases and print what was used and what came out, as one JSON document."""
    import numpy as np
    from threadpoolctl import threadpool_info

    from ringspec.vectors import open_set
    from ringspec.vectors.digest import case_digest
    from ringspec.vectors.generate import derive

    np.ones((64, 64)) @ np.ones((64, 64))
    digests = {}
    core = open_set(name)
    for id in ids:
        derived = derive(core.case(id))
        digests[id] = case_digest(derived.case, derived.tensors)
    blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
    used = [(library.get("architecture"), library["num_threads"]) for library in blas]
    print(json.dumps({"blas": used, "dispatch": features()[1], "digests": digests}))


def run(name, vectors, ids, environment):
    """The document of one arrangement; None where it failed, which is printed."""
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=json.dumps([vectors, ids]),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    if result.returncode != 0:
        print(f"  exit code {result.returncode}\n{result.stderr[-2000:]}")
        return None
    return json.loads(result.stdout)


def arrangements():
    """(name, environment, core type or None, threads) of each that this processor can run."""
    there, dispatched = features()
    for core, needed in CORES.items():
        missing = [name for name in needed if name not in there]
        for threads in THREADS:
            name = f"{core}, {threads} threads"
            if missing:
                print(f"{name}: left out, this processor has no {missing[0]}")
                continue
            environment = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": str(threads)}
            yield name, environment, core, threads
    if not dispatched:
        print("NumPy chooses nothing at run time on this processor")
    disabled = {"NPY_DISABLE_CPU_FEATURES": " ".join(dispatched), "OPENBLAS_NUM_THREADS": "1"}
    yield "NumPy without SIMD dispatch", disabled, None, 1


def faults(name, document, core, threads, pinned):
    """What is wrong with one arrangement's document."""
    found = []
    if core is not None and not any(used == core for used, _ in document["blas"]):
        found.append(f"asked for {core}, got {document['blas']}")
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads
    if not any(count == min(threads, processors) for _, count in document["blas"]):
        found.append(f"asked for {threads} threads, got {document['blas']}")
    if core is None and document["dispatch"]:
        found.append(f"NumPy still dispatches {document['dispatch']}")
    wrong = [id for id, digest in document["digests"].items() if digest != pinned[id]]
    if wrong:
        found.append(f"{len(wrong)} cases differ from the set: {', '.join(wrong[:5])}")
    return [f"{name}: {fault}" for fault in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=60, help="how many cases")
    parser.add_argument("--set", default="core", help="a packaged set or a folder")
    parser.add_argument("--only", default="*", help="pattern of ids")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*json.load(sys.stdin))
        return 0

    from ringspec.vectors import open_set

    core = open_set(given.set)
    ids = spread([id for id in core.ids if fnmatch.fnmatchcase(id, given.only)], given.sample)
    pinned = {id: core.entry(id).content for id in ids}
    found, runs = [], 0
    for name, environment, kind, threads in arrangements():
        document = run(name, given.set, ids, environment)
        runs += 1
        found += (
            [f"{name}: failed"]
            if document is None
            else faults(name, document, kind, threads, pinned)
        )
    print(f"{len(ids)} cases in {runs} arrangements, {len(found)} faults")
    print("\n".join(found))
    return 1 if found or not ids else 0


if __name__ == "__main__":
    sys.exit(main())
