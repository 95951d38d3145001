"""How far the discrete simulation, and ``ringspec plan``, are from a ring that runs over MPI.

    mpiexec -n 4 python tests/benchmarks/plan_against_mpi.py [--tokens 512] [--json FILE]

Calibration: the time of a permute with all ranks sending at once, by message length, as a latency and
bytes/s; and the time of a block, in two ways: ``replayed``, what each block of that very run took, put in
its worker and step, and ``alone``, pairs/s of a block on every rank at once just before the run. The first
tells how good the model of waiting and sending is, also on a busy machine; the second also whether blocks
take as long in a ring as alone. Errors are medians over the repeats. Measured: from when the
last rank begins its first block of a pass (one that had less to do forward begins backward earlier) to the
end of the last block of all, over ``ringspec.comm``. Predicted for the same
stretch, in two ways:

``overlapped``   ``ringspec.rings.cost.timeline``: what a step sends travels while a block is computed, as
                 ``ringspec.comm`` posts it (inputs beside their own step's, accumulators beside the next)
``in turn``      the same with ``overlap=False``: compute, then send

The block of the specification computes hidden pairs as well, so that all blocks take alike; those that
are hidden wholly are skipped. Prints one line for each ring, and
the largest error of each prediction.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from mpi4py import MPI

import ringspec as rs
from ringspec.comm import ring_mpi
from ringspec.problem.options import check
from ringspec.recipes import recipe
from ringspec.rings.layouts import make_layout
from ringspec.rings.ring import invisible_pairs
from ringspec.rings.schedules import skip
from ringspec.spec.block import block_backward, block_forward

WORLD = MPI.COMM_WORLD
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
REPEATS = 20
MESSAGES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
RINGS = [
    ("contiguous", "kv", False),
    ("contiguous", "q", False),
    ("contiguous", "gather", False),
    ("contiguous", "kv", True),
    ("striped", "kv", True),
]
CLOCK: dict[str, list[tuple[float, float]]] = {"forward": [], "backward": []}


def clocked_forward(*arguments):
    """block_forward, with the time of its begin and its end."""
    begin = time.perf_counter()
    result = block_forward(*arguments)
    CLOCK["forward"].append((begin, time.perf_counter()))
    return result


def clocked_backward(*arguments):
    begin = time.perf_counter()
    result = block_backward(*arguments)
    CLOCK["backward"].append((begin, time.perf_counter()))
    return result


def tensors(tokens: int):
    random = np.random.default_rng(tokens)
    shapes = [(HEADS, tokens), (KV_HEADS, tokens), (KV_HEADS, tokens), (HEADS, tokens)]
    return [random.standard_normal((1, h, n, HEAD_DIM)) for h, n in shapes]


def run_ring(tokens: int, layout: str, circulation: str, causal: bool, links) -> dict:
    """Seconds of each pass, from when the last rank begins to when the last one ends.

    Under 'blocks forward' and 'blocks backward': for each rank the seconds of its blocks, in order.
    """
    for times in CLOCK.values():
        times.clear()
    q, k, v, dy = tensors(tokens)
    options = {
        "layout": layout,
        "circulation": circulation,
        "causal": causal,
        "skip_masked": True,
        "block_forward": clocked_forward,
        "block_backward": clocked_backward,
    }
    WORLD.Barrier()
    ring_mpi(q, k, v, dy, comm=links, root=0, **options)
    spans = {}
    for phase, times in CLOCK.items():
        # One machine has one clock: perf_counter is the same for all its processes.
        ends = WORLD.allgather((times[0][0], times[-1][1]))
        spans[phase] = max(end for _, end in ends) - max(begin for begin, _ in ends)
        spans[f"blocks {phase}"] = WORLD.allgather([end - begin for begin, end in times])
    return spans


def block_seconds(tokens: int, causal: bool) -> dict[str, float]:
    """Seconds of a block of n x n tokens, forward and backward, on the slowest of all ranks at once."""
    q, k, v, dy = tensors(tokens)
    for clock in CLOCK.values():
        clock.clear()
    WORLD.Barrier()
    blocks = {"block_forward": clocked_forward, "block_backward": clocked_backward}
    rs.ring(q, k, v, dy, workers=1, causal=causal, **blocks)
    return {phase: max(WORLD.allgather(c[0][1] - c[0][0])) for phase, c in CLOCK.items()}


def calibrate_permute() -> tuple[float, float]:
    """(latency, bytes/s) of a permute in which all ranks send and receive: a line of least squares."""
    to, come = (WORLD.rank + 1) % WORLD.size, (WORLD.rank - 1) % WORLD.size
    seconds = []
    for size in MESSAGES:
        mine, other = np.zeros(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
        tries = []
        for _ in range(REPEATS):
            WORLD.Barrier()
            begin = time.perf_counter()
            sent = mine.copy()  # a message is packed and unpacked
            requests = [WORLD.Irecv(other, source=come), WORLD.Isend(sent, dest=to)]
            MPI.Request.Waitall(requests)
            other.copy()
            tries.append(max(WORLD.allgather(time.perf_counter() - begin)))
        seconds.append(min(tries))
    weights = 1 / np.array(seconds)  # relative errors count
    sizes = np.stack((np.ones(len(MESSAGES)), np.array(MESSAGES, dtype=float)), axis=1)
    latency, each = np.linalg.lstsq(sizes * weights[:, None], np.ones(len(MESSAGES)), rcond=None)[0]
    return max(float(latency), 0.0), 1 / float(each)


def predicted(
    tokens: int, layout: str, circulation: str, causal: bool, backward: bool, rates: dict, blocks
) -> dict[str, float]:
    """Seconds from the first block to the end of the last, by the discrete simulation.

    ``blocks`` as run_ring gives them, or the seconds that every block takes.
    """
    workers = WORLD.size
    q, k, v, _ = tensors(tokens)
    problem = check(q, k, v, {"causal": causal})
    table = make_layout(layout, tokens, workers, None)
    maker = rs.backward_schedule if backward else rs.forward_schedule
    schedule = skip(maker(circulation, workers), invisible_pairs(problem, table, table))
    counted = rs.cost(problem, schedule, table, table, recipe("float64"))
    # The timeline takes whole numbers of anything: here nanoseconds in place of pairs.
    spent = np.zeros_like(counted.pairs)
    order = [iter(own) for own in blocks] if isinstance(blocks, list) else []
    for t in range(len(schedule.steps)):
        for worker, _ in schedule.pairs(t):
            seconds = next(order[worker]) if order else blocks
            spent[t, worker] = round(1e9 * seconds)
    sent = counted.sent.copy()
    sent[-1] = 0  # nothing after the last block belongs to the stretch
    first = 1 if circulation == "gather" else 0  # the first block begins when the keys are there
    counted = replace(counted, pairs=spent[first:], sent=sent[first:])
    speed = {"pairs_per_second": 1e9, "bytes_per_second": rates["bytes_per_second"]}
    found = {}
    for name, overlap in (("overlapped", True), ("in turn", False)):
        found[name] = max(s.stop for s in rs.timeline(counted, overlap=overlap, **speed))
    hops = int((counted.sent.max(axis=1) > 0).sum())
    return {name: seconds + hops * rates["latency"] for name, seconds in found.items()}


def line(row: dict) -> str:
    errors = "  ".join(f"{name} {100 * error:+.1f} %" for name, error in row["errors"].items())
    mask = "causal" if row["causal"] else "no mask"
    ring = f"{row['layout']} {row['circulation']} {mask} {row['pass']}"
    return f"{ring}: {1e3 * row['measured_seconds']:.1f} ms; {errors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    length = asked.tokens * WORLD.size
    rows: list[dict] = []
    worst: dict[str, float] = {}
    links = WORLD.Dup()
    run_ring(length, "contiguous", "kv", False, links)  # threads, imports and buffers are warm
    rates = dict(zip(("latency", "bytes_per_second"), calibrate_permute(), strict=True))
    for layout, circulation, causal in RINGS:
        tries = [
            (
                block_seconds(asked.tokens, causal),
                run_ring(length, layout, circulation, causal, links),
            )
            for _ in range(asked.repeats)
        ]
        for backward, phase in enumerate(("forward", "backward")):
            errors: dict[str, list[float]] = {}
            for alone, whole in tries:
                for which, blocks in (
                    ("replayed", whole[f"blocks {phase}"]),
                    ("alone", alone[phase]),
                ):
                    told = predicted(
                        length, layout, circulation, causal, bool(backward), rates, blocks
                    )
                    for name, seconds in told.items():
                        error = seconds / whole[phase] - 1
                        errors.setdefault(f"{which}, {name}", []).append(error)
            middle = {name: float(np.median(found)) for name, found in errors.items()}
            for name, error in middle.items():
                worst[name] = max(worst.get(name, 0.0), abs(error))
            ring = {"layout": layout, "circulation": circulation, "causal": causal, "pass": phase}
            measured = float(np.median([whole[phase] for _, whole in tries]))
            rows.append(ring | {"measured_seconds": measured} | rates | {"errors": middle})
            if WORLD.rank == 0:
                print(line(rows[-1]), flush=True)
    if WORLD.rank == 0:
        print(f"W = {WORLD.size}, n = {asked.tokens}; largest errors:")
        print({name: round(error, 3) for name, error in worst.items()})
        if asked.json:
            report = {"workers": WORLD.size, "tokens": asked.tokens, "rows": rows, "worst": worst}
            asked.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
