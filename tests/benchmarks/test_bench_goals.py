"""`pytest -m bench -s`: the figures that the fast path aims at, on this machine, which should be quiet.

What is missed is printed. Only memory is asserted: how long something took is no property of the code.
"""

import math

import pytest
from benchmarks.bench_dense import Setting, dense_lines, ring_lines
from benchmarks.bench_memory import memory_lines

pytestmark = pytest.mark.bench
# The figures are for two cores: on a larger machine pin the process to two.
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


def missed(line):
    """The figures that a line of bench.py falls short of."""
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


def told(lines):
    """Print what is missed; every line has a time."""
    for line in lines:
        assert line["seconds"] > 0
        print("", line, *(f"  missed: {text}" for text in missed(line)), sep="\n")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [4096, 8192])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dense_attention_is_near_its_own_products_and_torch(dtype, length, causal):
    lines = dense_lines(Setting(dtype, length, causal, THREADS, 4))
    assert [line["pass"] for line in lines] == ["forward", "backward"]
    told(lines)


def test_a_ring_of_eight_costs_little_more_than_one_worker():
    lines = ring_lines(Setting("float64", 8192, False, THREADS, 4), (1, 8))
    told(lines)


def test_memory_is_linear_in_the_length_and_small():
    lines = memory_lines((16384, 32768, 65536), THREADS)
    assert lines[-1]["peak MiB"] < MOST_MIB
    growth = math.log(lines[-1]["added MiB"] / lines[0]["added MiB"]) / math.log(4)
    assert growth < MOST_EXPONENT


def test_a_slow_line_would_be_seen():
    line = {"part": "dense", "dtype": "float32", "causal": False, "times products": 2.0,
            "times torch": float("nan"), "share of bound": SHARE_OF_BOUND - 0.1}  # fmt: skip
    assert len(missed(line)) == 3
