"""Seconds, memory and simulated instructions per second of the ring kernels on the simulator.

    python tests/benchmarks/bench_nki.py [--workers 4] [--length 1024] [--lnc 1] [--json]

Forward and backward of one head in bfloat16, D = 128: each layout in a process of its own, which
reports the median of three runs and its largest resident memory, Python and NumPy included.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

RUNS = 3
WIDTH = 128
LAYOUTS = ("full", "contiguous", "striped")


def turned(x: Any) -> Any:
    """Rows to columns."""
    import numpy as np

    return np.ascontiguousarray(x.swapaxes(-1, -2))


def measure(layout: str, workers: int, length: int, lnc: int) -> dict[str, Any]:
    """Seconds and instructions of both passes, the backward from the forward's own o and lse."""
    import ml_dtypes
    import numpy as np

    from nki_impl.kernels import ring_attention_spmd_bwd, ring_attention_spmd_fwd
    from nki_impl.sim.machine.launch import run_ranks

    rng = np.random.default_rng(0)
    shape = (4, workers, 1, 1, length, WIDTH)
    q, k, v, dy = rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    scale = 1 / WIDTH**0.5
    causal, striped = layout != "full", layout == "striped"
    if causal:
        q = (q.astype(np.float32) * scale).astype(q.dtype)
    shared = {"num_workers": workers, "use_causal_mask": causal}
    seconds: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(RUNS):
        ahead_arguments = [
            {
                "q": turned(q[rank]),
                "k": turned(k[rank]),
                "v": v[rank],
                "training": True,
                "striped_input": striped,
                **shared,
            }
            for rank in range(workers)
        ]
        start = time.perf_counter()
        ahead = run_ranks(ring_attention_spmd_fwd, ahead_arguments, lnc=lnc)
        seconds["forward"].append(time.perf_counter() - start)
        back_arguments = [
            {
                "q_ref": turned(q[rank]),
                "k_ref": turned(k[rank]),
                "v_ref": turned(v[rank]),
                "o_ref": turned(ahead.results[rank][0]),
                "dy_ref": turned(dy[rank]),
                "lse_ref": ahead.results[rank][1],
                "softmax_scale": 1.0 if causal else scale,
                "striped_attention": striped,
                "lnc_size": lnc,
                **shared,
            }
            for rank in range(workers)
        ]
        start = time.perf_counter()
        back = run_ranks(ring_attention_spmd_bwd, back_arguments, lnc=lnc)
        seconds["backward"].append(time.perf_counter() - start)
    row: dict[str, Any] = {"layout": layout}
    for name, run in (("forward", ahead), ("backward", back)):
        taken = statistics.median(seconds[name])
        row[name] = {
            "seconds": taken,
            "instructions": run.total.instructions,
            "instructions_per_second": run.total.instructions / taken,
            "matmul_flops": run.total.matmul_flops,
            "sbuf_bytes_per_partition": run.sbuf_high,
            "psum_bytes_per_partition": run.psum_high,
        }
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each layout and pass."""
    lines = [
        "layout      pass      seconds  instructions  per second  SBUF B  PSUM B  process MiB",
    ]
    for row in rows:
        for name in ("forward", "backward"):
            one = row[name]
            lines.append(
                f"{row['layout']:10s}  {name:8s}  {one['seconds']:7.2f}  {one['instructions']:12d}  "
                f"{one['instructions_per_second']:10.0f}  {one['sbuf_bytes_per_partition']:6d}  "
                f"{one['psum_bytes_per_partition']:6d}  {row['peak_mib']:11.0f}"
            )
        both = row["forward"]["seconds"] + row["backward"]["seconds"]
        lines.append(f"{row['layout']:10s}  both      {both:7.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="rows on one rank")
    parser.add_argument("--lnc", type=int, default=1, choices=(1, 2))
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layout:
        row = measure(options.layout, options.workers, options.length, options.lnc)
        print(json.dumps(row))
        return
    rows = []
    for layout in LAYOUTS:
        command = [sys.executable, __file__, "--layout", layout]
        for name in ("workers", "length", "lnc"):
            command += [f"--{name}", str(getattr(options, name))]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=-1, text=True).stdout))
    print(json.dumps(rows, indent=2) if options.json else table(rows))


if __name__ == "__main__":
    main()
