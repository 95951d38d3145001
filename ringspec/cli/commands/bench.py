"""``ringspec bench``: how fast this machine runs the fast path, rings and the other programs."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

import ringspec
from ringspec.cli.bench_dense import Line, Setting, dense_lines, machine_lines, ring_lines
from ringspec.cli.bench_memory import memory_lines
from ringspec.cli.bench_parts import core_lines, exact_lines, nki_lines, noise_lines
from ringspec.cli.bench_text import against, exponents, table
from ringspec.cli.shared import output
from ringspec.errors import FileFormatError, OptionError, UnknownNameError, nearest
from ringspec.fast.team import thread_count
from ringspec.plainfile import read_plain_file

PARTS = ("dense", "ring", "memory", "exact", "noise", "core", "nki")
DEFAULT_PARTS = ("dense", "ring", "memory")
LENGTHS, QUICK_LENGTHS = (1024, 4096, 8192, 16384), (512, 1024)
WORKERS, QUICK_WORKERS = (1, 4, 8), (1, 4)
MEMORY_LENGTHS, QUICK_MEMORY_LENGTHS = (8192, 16384, 32768, 65536), (2048, 4096, 8192)
TRUTH_LENGTHS, QUICK_TRUTH_LENGTHS = (256, 512, 1024), (64, 128)
EXAMPLES = """\b
Examples:
  ringspec bench --quick
  ringspec bench --part dense --lengths 4096,8192 -o here.json
  ringspec bench --quick --baseline here.json

\b
Exit code: 0; 1 with --fail-above when a measurement is worse than that; 2 for bad input.
"""


@click.command("bench", epilog=EXAMPLES)
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="[" + "|".join(PARTS) + "]",
    help=f"What to measure; may be repeated. [default: {', '.join(DEFAULT_PARTS)}]",
)
@click.option("--quick", is_flag=True, help="Short lengths and two repeats: about a minute.")
@click.option("--lengths", metavar="N,N,...", help="S of dense, ring and memory.")
@click.option("--threads", type=int, metavar="N", help="Threads. [default: one for each core]")
@click.option("--repeats", type=int, metavar="N", help="Runs of which the fastest counts.")
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compare with an earlier --output: the times of bound, here over there.",
)
@click.option(
    "--fail-above",
    type=float,
    metavar="X",
    help="Exit code 1 if a ratio to the baseline is above X.",
)
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def bench_command(**given: Any) -> None:
    """Time dense attention and rings of the fast path, forward and backward, float32 and float64,
    causal and not, and their peak memory.

    Beside them, in the same run: the same matrix products alone, PyTorch's scaled_dot_product_attention
    on the CPU where it is installed, naive NumPy, and the bound, which is the same flops at the
    best rate of square matrix products.
    """
    parts = parts_from(given["parts"])
    asked = {name: given[name] for name in ("threads", "repeats")}
    if given["fail_above"] is not None and given["baseline"] is None:
        raise OptionError("--fail-above together with --baseline", "it alone", "name a baseline")
    earlier = None if given["baseline"] is None else read_baseline(given["baseline"])
    if given["path"] is not None and not given["path"].absolute().parent.is_dir():
        raise OptionError("-o in a directory that exists", str(given["path"]), "make it first")
    lines = measure(parts, given["quick"], lengths_from(given["lengths"]), **asked)
    document = report(lines, thread_count(given["threads"]), earlier)
    if given["path"] is not None:
        text = json.dumps(output.plain(document), indent=1) + "\n"
        given["path"].write_text(text, encoding="utf-8")
    if given["as_json"]:
        output.show_json(document)
    else:
        output.show(table(document), max(output.width(), 120))
    limit = given["fail_above"]
    if limit is not None and any(not ratio["ratio"] <= limit for ratio in document["baseline"]):
        click.get_current_context().exit(1)


def parts_from(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in PARTS:
            raise UnknownNameError("a part of the benchmark", repr(name), nearest(name, PARTS))
    return tuple(names) or DEFAULT_PARTS


def lengths_from(text: str | None) -> tuple[int, ...] | None:
    """
    >>> lengths_from("1024,4096")
    (1024, 4096)
    """
    if text is None:
        return None
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = (0,)
    if not all(16 <= n <= 1 << 20 for n in lengths):
        raise OptionError("--lengths as numbers from 16 to 2**20", repr(text), "write 1024,4096")
    return lengths


def measure(
    parts: Sequence[str],
    quick: bool,
    lengths: tuple[int, ...] | None,
    threads: int | None,
    repeats: int | None,
) -> list[Line]:
    """The lines of all parts, in order, with a moving sign on a terminal."""
    count = thread_count(threads)
    if repeats is not None and repeats < 1:
        raise OptionError("--repeats of at least 1", str(repeats), "leave it out, or pass 3")
    sizes = lengths or (QUICK_LENGTHS if quick else LENGTHS)
    truths = QUICK_TRUTH_LENGTHS if quick else TRUTH_LENGTHS

    def settings() -> list[Setting]:
        return [
            Setting(dtype, n, causal, count, repeats or (5 if n <= 4096 and not quick else 2))
            for dtype in ("float32", "float64")
            for n in sizes
            for causal in (False, True)
        ]

    workers = QUICK_WORKERS if quick else WORKERS
    memory = lengths or (QUICK_MEMORY_LENGTHS if quick else MEMORY_LENGTHS)
    work: dict[str, Callable[[], list[Line]]] = {
        "dense": lambda: [line for s in settings() for line in dense_lines(s)],
        "ring": lambda: [line for s in settings() for line in ring_lines(s, workers)],
        "memory": lambda: memory_lines(memory, count),
        "exact": lambda: exact_lines(truths),
        "noise": lambda: noise_lines(truths),
        "core": lambda: core_lines("smoke" if quick else "core", min(count, 2)),
        "nki": lambda: nki_lines(256 if quick else 1024),
    }
    with output.working("machine", wanted=True):
        lines = machine_lines(count)
    for part in parts:
        with output.working(part, wanted=True):
            lines += work[part]()
    return lines


def report(lines: list[Line], threads: int, earlier: dict[str, Any] | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "command": "bench",
        "version": ringspec.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "threads": threads,
        "lines": lines,
        "exponents": exponents(lines),
    }
    if earlier is not None:
        document["baseline"] = against(lines, earlier["lines"])
    return document


def read_baseline(path: Path) -> dict[str, Any]:
    """An earlier document, with the lines that can be compared."""
    try:
        document = json.loads(read_plain_file(path))
        assert all(type(line) is dict for line in document["lines"])
        measured = [
            x
            for line in document["lines"]
            for x in (line.get("seconds", 1.0), line.get("share of bound", 1.0))
        ]
        assert all(type(x) is float and math.isfinite(x) and x > 0 for x in measured)
    except (OSError, ValueError, TypeError, KeyError, AssertionError) as cause:
        raise FileFormatError(
            "--baseline with a file that ringspec bench -o wrote",
            f"{path} ({type(cause).__name__})",
            "write one with ringspec bench -o FILE",
        ) from None
    return dict(document)
