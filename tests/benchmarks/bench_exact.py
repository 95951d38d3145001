"""Seconds and peak memory of correctly rounded attention, beside plain float64 NumPy and mpmath.

    python tests/benchmarks/bench_exact.py [--lengths 128 256] [--inputs float64] [--json]

One head, causal, D = 128, rounded to float64, float32 and bfloat16. Every line is measured in a
process of its own: the median of three runs (one from 1024 tokens on), and the largest resident
memory of the whole process, Python and NumPy included. Ratios are of CPU seconds, which a busy
machine disturbs less. mpmath takes minutes at these lengths, so it is measured at 16 tokens, and its
ratio is to the exact evaluation at 16 tokens.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FORMATS = ("float64", "float32", "bfloat16")
LENGTHS = (128, 256, 512, 1024)
WIDTH = 128
MPMATH_LENGTH = 16
MPMATH_DIGITS = 450
ONE_RUN_FROM = 1024
PROGRAMS = ("exact", "numpy", "mpmath")
PASSES = ("forward", "backward")


def call_of(program: str, what: str, length: int, inputs: str) -> Callable[[], object]:
    """The call to be timed; its imports and data are made before."""
    import numpy as np

    from ringspec.formats import round_to

    rng = np.random.default_rng(length)
    q, k, v, dy = round_to(rng.standard_normal((4, 1, 1, length, WIDTH)), inputs)
    visible = np.tril(np.ones((length, length), dtype=bool))[None, None]
    scale = 0.08838834764831845  # the float64 nearest to 1/sqrt(128)
    backward = what == "backward"
    if program == "numpy":
        import ringspec as rs

        options = {"causal": True, "scale": scale}
        if not backward:
            return lambda: rs.attention(q, k, v, **options)
        return lambda: (
            rs.attention(q, k, v, **options),
            rs.attention_backward(q, k, v, dy, **options),
        )
    if program == "exact":
        from ringspec import exact

        problem = exact.Problem(q, k, v, scale, visible=visible)
        if backward:
            return lambda: exact.backward(problem, dy, None, FORMATS)
        return lambda: exact.forward(problem, FORMATS)
    from oracle.precise import Problem

    given = Problem(q, k, v, scale, visible=visible)
    return lambda: every_element_in_mpmath(given, dy if backward else None)


def every_element_in_mpmath(problem, dy) -> None:
    """All of o and lse, and with dy of dq, dk, dv; without rounding."""
    import numpy as np
    from oracle.precise import Reference

    reference = Reference(problem, dy, digits=MPMATH_DIGITS)
    shapes = {"o": problem.v.shape, "lse": problem.q.shape[:3]}
    if dy is not None:
        shapes |= {"dq": problem.q.shape, "dk": problem.k.shape, "dv": problem.v.shape}
    for name, shape in shapes.items():
        for index in np.ndindex(shape):
            reference.value(name, index)


def peak_mebibytes() -> float:
    """The largest resident memory of this process so far; the system counts in KiB, macOS in bytes."""
    units = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units


def measure_here(program: str, what: str, length: int, inputs: str) -> dict:
    """Seconds of each run and the peak memory of this process."""
    call = call_of(program, what, length, inputs)
    seconds, cpu = [], []
    for _ in range(1 if length >= ONE_RUN_FROM else 3):
        start, cpu_start = time.perf_counter(), time.process_time()
        call()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {
        "program": program,
        "pass": what,
        "length": length,
        "seconds": statistics.median(seconds),
        "CPU seconds": statistics.median(cpu),
        "runs": len(seconds),
        "peak MiB": peak_mebibytes(),
    }


def measure(program: str, what: str, length: int, inputs: str) -> dict:
    """The same in a fresh process with one BLAS thread."""
    command = [sys.executable, __file__, "--inputs", inputs, "--child", program, what, str(length)]
    places = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
    }
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def all_lines(lengths: list[int], inputs: str) -> list[dict]:
    """Every measurement, with the ratio of CPU seconds of exact to the other program's."""
    jobs = [(n, program) for n in lengths for program in ("exact", "numpy")]
    jobs += [(MPMATH_LENGTH, program) for program in ("exact", "mpmath")]
    lines = []
    for length, program in jobs:
        for what in PASSES:
            lines.append(measure(program, what, length, inputs))
            print(f"  {program} {what} {length}: {lines[-1]['seconds']:.4f} s", file=sys.stderr)
    exact = {
        (line["pass"], line["length"]): line["CPU seconds"]
        for line in lines
        if line["program"] == "exact"
    }
    for line in lines:
        if line["program"] != "exact":
            line["exact / this"] = exact[line["pass"], line["length"]] / line["CPU seconds"]
    return lines


def table(lines: list[dict]) -> str:
    """The lines as a table for people."""
    rows = [
        f"{'S':>5} {'program':8} {'pass':22} {'seconds':>9} {'CPU s':>9} {'runs':>4} {'peak MiB':>9}  ratio"
    ]
    names = {"forward": "forward", "backward": "forward and backward"}
    for line in lines:
        ratio = ""
        if "exact / this" in line:
            x = line["exact / this"]
            slower = f"{x:.0f} times slower" if x >= 1 else f"{1 / x:.0f} times faster"
            ratio = f"exact is {slower}"
        rows.append(
            f"{line['length']:>5} {line['program']:8} {names[line['pass']]:22}"
            f" {line['seconds']:>9.4f} {line['CPU seconds']:>9.4f} {line['runs']:>4}"
            f" {line['peak MiB']:>9.0f}  {ratio}".rstrip()
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--inputs", default="bfloat16", help="number format of q, k, v and dy")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        program, what, length = options.child
        print(json.dumps(measure_here(program, what, int(length), options.inputs)))
        return
    lines = all_lines(options.lengths, options.inputs)
    if options.json:
        print(json.dumps({"machine": platform.machine(), "width": WIDTH, "lines": lines}, indent=1))
        return
    print(
        f"One head, causal, D = {WIDTH}, {options.inputs} inputs; rounded to {', '.join(FORMATS)}."
    )
    print(table(lines))
    print(
        f"mpmath: {MPMATH_DIGITS} digits, not rounded to formats, measured at {MPMATH_LENGTH}"
        " tokens alone; its ratio holds for that length."
    )


if __name__ == "__main__":
    main()
