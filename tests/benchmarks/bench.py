"""Time dense attention and rings of ringspec.fast on this machine, and measure their peak memory.

    python tests/benchmarks/bench.py --quick
    python tests/benchmarks/bench.py --part dense --lengths 4096 8192 --output here.json
    python tests/benchmarks/bench.py --part dense --baseline here.json

Forward and backward, float32 and float64, causal and not. Beside each, in the same run: the same matrix
products alone, PyTorch's scaled_dot_product_attention on the CPU where it is installed, naive NumPy, and
the bound, which is the same flops at the best rate of square matrix products.
docs/reference/speed.md explains the columns.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from benchmarks.bench_dense import (  # noqa: E402
    Line,
    Setting,
    dense_lines,
    machine_lines,
    ring_lines,
)
from benchmarks.bench_memory import memory_lines  # noqa: E402
from benchmarks.bench_text import against, exponents, table  # noqa: E402

import ringspec  # noqa: E402
from ringspec.fast.team import thread_count  # noqa: E402

PARTS = ("dense", "ring", "memory")
LENGTHS, QUICK_LENGTHS = (1024, 4096, 8192, 16384), (512, 1024)
WORKERS, QUICK_WORKERS = (1, 4, 8), (1, 4)
MEMORY_LENGTHS, QUICK_MEMORY_LENGTHS = (8192, 16384, 32768, 65536), (2048, 4096, 8192)


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    earlier = None if asked.baseline is None else json.loads(asked.baseline.read_text())
    threads = thread_count(asked.threads)
    lines = machine_lines(threads)
    for part in asked.parts or PARTS:
        print(f"measuring {part}", file=sys.stderr, flush=True)
        lines += measured(part, asked, threads)
    document: dict[str, Any] = {
        "version": ringspec.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "threads": threads,
        "lines": lines,
        "exponents": exponents(lines),
    }
    if earlier is not None:
        document["baseline"] = against(lines, earlier["lines"])
    if asked.output is not None:
        asked.output.write_text(json.dumps(document, indent=1) + "\n")
    print("\n".join(table(document)))


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part", dest="parts", action="append", choices=PARTS, help="may be repeated; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="short lengths: about a minute")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="S", help="tokens, 16 or more")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--repeats", type=int, metavar="N", help="runs of which the fastest counts")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="an earlier --output")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write JSON")
    asked = parser.parse_args(words)
    if asked.lengths is not None and min(asked.lengths) < 16:
        parser.error("--lengths: expected 16 tokens or more. Fix: write --lengths 1024 4096")
    for name in ("threads", "repeats"):
        if getattr(asked, name) is not None and getattr(asked, name) < 1:
            parser.error(f"--{name}: expected 1 or more. Fix: leave it out, or write --{name} 2")
    if asked.output is not None and not asked.output.absolute().parent.is_dir():
        parser.error("--output: expected a file in a folder that exists. Fix: make the folder")
    return asked


def measured(part: str, asked: argparse.Namespace, threads: int) -> list[Line]:
    """The lines of one part."""
    if part == "memory":
        lengths = QUICK_MEMORY_LENGTHS if asked.quick else MEMORY_LENGTHS
        return memory_lines(asked.lengths or lengths, threads)
    workers = QUICK_WORKERS if asked.quick else WORKERS
    lines = []
    for dtype in ("float32", "float64"):
        for n in asked.lengths or (QUICK_LENGTHS if asked.quick else LENGTHS):
            for causal in (False, True):
                repeats = asked.repeats or (5 if n <= 4096 and not asked.quick else 2)
                setting = Setting(dtype, n, causal, threads, repeats)
                lines += dense_lines(setting) if part == "dense" else ring_lines(setting, workers)
    return lines


if __name__ == "__main__":
    main()
