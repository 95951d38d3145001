"""The targets of the fast path, measured: a program, and with `pytest -m bench` a test.

    python tests/benchmarks/bench_fast.py [--lengths 4096 8192] [--repeats 4] [--only dense ring memory]

Prints the lines of `ringspec bench` for H = 4, D = 128, the ring W = 8 beside W = 1, and the memory of
S = 65536 in all with W = 8, and beside each the figure that is aimed at. Exit code 1 if one is missed.
Two threads, as the figures are for two cores: on a larger machine pin the process to two.
"""

import argparse
import sys
from typing import Any

from ringspec.cli.bench_dense import Setting, dense_lines, ring_lines
from ringspec.cli.bench_memory import memory_lines
from ringspec.cli.bench_text import rows

THREADS = 2
# At most so many times the pass's own matrix products alone.
TIMES_PRODUCTS = 1.20
# At most so many times torch's flash attention on the CPU.
TIMES_TORCH = {("float64", False): 1.3, ("float64", True): 1.3, ("float32", False): 1.4, ("float32", True): 1.6}  # fmt: skip
# At least so much of the rate of square products, where nothing is masked.
SHARE_OF_BOUND = 0.55
TIMES_ONE_WORKER = 1.10
MOST_MIB = 1536.0
MOST_EXPONENT = 1.1


def missed(line: dict[str, Any]) -> list[str]:
    """What a line of `ringspec bench` falls short of."""
    found = []
    for name, limit in (
        ("times products", TIMES_PRODUCTS),
        ("times torch", TIMES_TORCH.get((line.get("dtype"), line.get("causal")), 0.0)),
        ("times fewest workers", TIMES_ONE_WORKER),
        ("peak MiB", MOST_MIB),
    ):
        if name in line and not line[name] <= limit:
            found.append(f"{name} {line[name]:.2f} > {limit}")
    full = line.get("part") == "dense" and not line["causal"]
    if full and not line["share of bound"] >= SHARE_OF_BOUND:
        found.append(f"share of bound {line['share of bound']:.2f} < {SHARE_OF_BOUND}")
    return found


def measured(only: list[str], lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for dtype in ("float32", "float64"):
        if "dense" in only:
            for length in lengths:
                for causal in (False, True):
                    lines += dense_lines(Setting(dtype, length, causal, THREADS, repeats))
        if "ring" in only:
            lines += ring_lines(Setting(dtype, max(lengths), False, THREADS, repeats), (1, 8))
    if "memory" in only:
        lines += memory_lines((16384, 32768, 65536), THREADS)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=["dense", "ring", "memory"])
    options = parser.parse_args()
    lines = measured(options.only, options.lengths, options.repeats)
    failed = False
    for part in options.only:
        print(f"{part}:")
        of_part = [line for line in lines if line["part"] == part]
        for text, line in zip(rows(of_part), [None, *of_part], strict=True):
            short = [] if line is None else missed(line)
            failed |= bool(short)
            print(text + ("   <- " + ", ".join(short) if short else ""), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
