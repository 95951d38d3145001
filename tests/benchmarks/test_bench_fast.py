"""`pytest -m bench -s`: the figures that the fast path aims at, on this machine, which should be quiet.

What is missed is printed. Only memory is asserted: how long something took is no property of the code.
"""

import math

import pytest
from benchmarks.bench_fast import (
    MOST_EXPONENT,
    MOST_MIB,
    SHARE_OF_BOUND,
    THREADS,
    missed,
)

from ringspec.cli.bench_dense import Setting, dense_lines, ring_lines
from ringspec.cli.bench_memory import memory_lines

pytestmark = pytest.mark.bench


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
