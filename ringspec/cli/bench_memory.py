"""Peak memory of a ring with the fast blocks, each length in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ringspec.cli.bench_dense import Line, Setting
from ringspec.errors import OptionError

WORKERS, WIDTH, HEADS = 8, 64, 1
PROGRAM = "import sys; from ringspec.cli.bench_memory import child; child(*map(int, sys.argv[1:]))"


def memory_lines(lengths: Sequence[int], threads: int) -> list[Line]:
    """W = 8, one head, D = 64, forward and backward in float64; MiB of the whole process and of
    what the ring added to the process with its inputs."""
    return [in_child(length, threads) for length in lengths]


def in_child(length: int, threads: int) -> Line:
    command = [sys.executable, "-c", PROGRAM, str(length), str(threads)]
    root = str(Path(__file__).resolve().parents[2])  # where this program found ringspec
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths}
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        raise OptionError(
            f"a run with S = {length} to end", last[0], "measure shorter lengths with --lengths"
        )
    line: Line = json.loads(done.stdout)
    return line


def child(length: int, threads: int) -> None:
    """Run the ring once and print its line as JSON."""
    from ringspec import fast
    from ringspec.rings.ring import ring

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
