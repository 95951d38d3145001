"""Peak memory of a ring with the fast blocks, each length in a separate process.

That process runs this file: ``python tests/benchmarks/bench_memory.py LENGTH THREADS`` prints one line as JSON.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from benchmarks.bench_dense import Line, Setting  # noqa: E402

from ringspec import fast  # noqa: E402
from ringspec.rings.ring import ring  # noqa: E402

WORKERS, WIDTH, HEADS = 8, 64, 1


def memory_lines(lengths: Sequence[int], threads: int) -> list[Line]:
    """W = 8, one head, D = 64, forward and backward in float64; MiB of the whole process and of
    what the ring added to the process with its inputs."""
    return [in_child(length, threads) for length in lengths]


def in_child(length: int, threads: int) -> Line:
    command = [sys.executable, __file__, str(length), str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line: Line = json.loads(done.stdout)
    return line


def child(length: int, threads: int) -> None:
    """Run the ring once and print its line as JSON."""
    setting = Setting("float64", length, False, threads, 1, HEADS, WIDTH)
    q, k, v, dy = setting.tensors()
    before = peak_mib()
    ring(q, k, v, dy, workers=WORKERS, **fast.pieces(threads=threads))
    after = peak_mib()
    line = {
        "part": "memory",
        "pass": "both",
        "dtype": "float64",
        "length": length,
        "causal": False,
        "workers": WORKERS,
        "peak MiB": after,
        "added MiB": after - before,
    }
    print(json.dumps(line))


def peak_mib() -> float:
    """The largest resident memory of this process so far.

    ru_maxrss begins with the parent's value where a process starts another, so Linux's own figure for the
    address space is taken where there is one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    child(int(sys.argv[1]), int(sys.argv[2]))
