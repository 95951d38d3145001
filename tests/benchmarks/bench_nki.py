"""Processor time, memory and simulated instructions per second of kernels on the simulator.

    python tests/benchmarks/bench_nki.py [--workers 4] [--length 1024] [--lnc 1] [--json]
    python tests/benchmarks/bench_nki.py --library nki-library

Forward and backward of one head in bfloat16, D = 128: each layout in a process of its own, which reports the smallest
time of ``--runs`` runs after a first one, and its largest resident memory, Python and NumPy included. With ``--library``,
attention_cte of a checkout of AWS's nki-library runs instead, on two cores. OPENBLAS_NUM_THREADS=1 makes the times
those of one core.
"""

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH = 128
LAYOUTS = ("full", "contiguous", "striped")
CALLS = {
    "train": {"length": 2048, "causal_mask": True, "cache_softmax": True, "scale": WIDTH**-0.5},
    "full": {"length": 2048, "causal_mask": False, "scale": WIDTH**-0.5},
    "window": {"length": 2048, "causal_mask": True, "sliding_window": 256},
    "prefix": {"length": 1024, "causal_mask": True, "prior": 1024},
}
"""Calls of attention_cte: two heads, D = 128; with a prefix, 700 of the ``prior`` tokens are used."""


def fastest(call: Callable[[], Any], runs: int) -> float:
    """The smallest processor time of ``runs`` calls after a first one."""
    call()
    seconds = []
    for _ in range(runs):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure_library(name: str, checkout: Path, runs: int) -> dict[str, Any]:
    """Seconds and instructions of one call of attention_cte."""
    import ml_dtypes
    import numpy as np

    from nki_impl.sim.install import installed
    from nki_impl.sim.machine.launch import run_ranks

    sys.path[:0] = [str(checkout / "src"), str(checkout / "src" / "nkilib_src")]
    with installed():
        kernel = importlib.import_module("nkilib.core.attention.attention_cte").attention_cte
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    given = dict(CALLS[name])
    length, prior = given.pop("length"), given.pop("prior", 0)
    given |= {
        "q": normal(2, length, WIDTH),
        "k": normal(2, WIDTH, length),
        "v": normal(2, length, WIDTH),
    }
    if prior:
        given |= {"k_prior": normal(2, WIDTH, prior), "v_prior": normal(2, prior, WIDTH)}
        given["prior_used_len"] = np.array([700], np.int32)
    total = run_ranks(kernel, [given], lnc=2).total
    taken = fastest(lambda: run_ranks(kernel, [given], lnc=2), runs)
    return {"call": name, "seconds": taken, "instructions": total.instructions}


def turned(x: Any) -> Any:
    """Rows to columns."""
    import numpy as np

    return np.ascontiguousarray(x.swapaxes(-1, -2))


def measure(layout: str, workers: int, length: int, lnc: int, runs: int) -> dict[str, Any]:
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

    def forward() -> Any:
        return run_ranks(ring_attention_spmd_fwd, ahead_arguments, lnc=lnc)

    ahead = forward()
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

    def backward() -> Any:
        return run_ranks(ring_attention_spmd_bwd, back_arguments, lnc=lnc)

    row: dict[str, Any] = {"layout": layout}
    for name, one_pass in (("forward", forward), ("backward", backward)):
        run = one_pass()
        taken = fastest(one_pass, runs)
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


def library_table(rows: list[dict[str, Any]]) -> str:
    """One line for each call of attention_cte."""
    lines = ["call      seconds  instructions"]
    lines += [f"{r['call']:8s}  {r['seconds']:7.3f}  {r['instructions']:12d}" for r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="rows on one rank")
    parser.add_argument("--lnc", type=int, default=1, choices=(1, 2))
    parser.add_argument("--runs", type=int, default=3, help="the smallest time of these counts")
    parser.add_argument(
        "--library", type=Path, help="a checkout of AWS's nki-library, release 2.29"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--one", choices=(*LAYOUTS, *CALLS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one and options.library:
        print(json.dumps(measure_library(options.one, options.library, options.runs)))
        return
    if options.one:
        row = measure(options.one, options.workers, options.length, options.lnc, options.runs)
        print(json.dumps(row))
        return
    rows = []
    for one in CALLS if options.library else LAYOUTS:
        command = [sys.executable, __file__, "--one", one]
        for name in ("workers", "length", "lnc", "runs"):
            command += [f"--{name}", str(getattr(options, name))]
        if options.library:
            command += ["--library", str(options.library)]
        printed = subprocess.run(command, check=True, stdout=-1, text=True).stdout
        rows.append(json.loads(printed.splitlines()[-1]))  # the library prints warnings
    show = library_table if options.library else table
    print(json.dumps(rows, indent=2) if options.json else show(rows))


if __name__ == "__main__":
    main()
