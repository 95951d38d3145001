"""``python -m nki_impl profile``: run a kernel on the simulator, and report its counted work and estimated time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from nki_impl.sim.machine.counters import Counters
from nki_impl.sim.machine.launch import Outcome, run_ranks
from nki_impl.sim.machine.profile import Roofline, roofline
from nki_impl.workloads import DTYPES, WORKLOADS, Shape, find_workload


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = _parser().parse_args(arguments)
    shape = Shape(
        options.world, options.lnc, options.batch, options.heads, options.rows, options.dim,
        options.dtype, options.causal or options.striped, options.striped, options.seed,
    )  # fmt: skip
    try:
        kernel, given = find_workload(options.kernel, shape)
    except LookupError as error:
        print(f"python -m nki_impl profile: {error.args[0]}", file=sys.stderr)
        return 2
    start = time.perf_counter()
    outcome = run_ranks(kernel, given, lnc=shape.lnc)
    report = report_of(options.kernel, shape, outcome, time.perf_counter() - start)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m nki_impl", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    profile = commands.add_parser("profile", help="run a kernel and report what it did")
    profile.add_argument(
        "kernel",
        nargs="?",
        default="ring_attention_spmd_fwd",
        help=f"{', '.join(WORKLOADS)}, or package.module:function, where the module also has a function workload(shape) "
        "that returns the arguments of each rank",
    )
    for name, text in (
        ("world", "ranks"),
        ("lnc", "cores per rank, 1 or 2"),
        ("batch", "batch size"),
        ("heads", "heads"),
        ("rows", "sequence rows per rank"),
        ("dim", "head dimension"),
        ("seed", "seed of the random arguments"),
    ):
        profile.add_argument(f"--{name}", type=int, default=getattr(Shape, name), help=text)
    profile.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bf16", help="dtype of q, k and v"
    )
    profile.add_argument("--causal", action="store_true", help="causal mask, contiguous ranks")
    profile.add_argument("--striped", action="store_true", help="causal mask, striped ranks")
    profile.add_argument("--json", action="store_true", help="print JSON")
    return parser


def report_of(name: str, shape: Shape, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """Return a report as plain data: counts and estimated time of the busiest rank, and the speed of the simulation."""
    busiest = max(outcome.ranks, key=lambda counters: roofline(counters, shape.lnc).overlapped)
    return {
        "kernel": name,
        "shape": vars(shape),
        "rank": {
            "rank": outcome.ranks.index(busiest),
            "instructions": busiest.instructions,
            "operations": [vars(row) for row in busiest.rows],
            "engines": [vars(busiest.of_engine(engine)) for engine in busiest.engines],
            "matmul_flops": busiest.matmul_flops,
            "dma_bytes": busiest.dma_bytes,
            "collective_bytes": busiest.collective_bytes,
            "hops": busiest.hops,
            "sbuf_high_bytes_per_partition": busiest.sbuf_high,
            "psum_high_bytes_per_partition": busiest.psum_high,
        },
        "estimate": _estimate(busiest, roofline(busiest, shape.lnc)),
        "simulation": {
            "instructions": outcome.total.instructions,
            "seconds": seconds,
            "instructions_per_second": outcome.total.instructions / seconds,
        },
    }


def _estimate(counters: Counters, found: Roofline) -> dict[str, Any]:
    return {
        "what": "an estimate for one trn2 core: counted work at published peak rates, nothing else",
        "bounds": [
            {
                "engine": bound.engine,
                "work": bound.work,
                "unit": bound.unit,
                "seconds": bound.seconds,
                "rate": bound.rate.says,
                "source": bound.rate.source,
            }
            for bound in found.bounds
        ],
        "seconds_if_engines_overlap": found.overlapped,
        "seconds_if_engines_take_turns": found.in_turn,
        "without_a_published_rate": list(found.unrated),
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    rank, estimate, run = report["rank"], report["estimate"], report["simulation"]
    size = " ".join(f"{name}={value}" for name, value in report["shape"].items())
    lines = [f"{report['kernel']}: {size}", f"rank {rank['rank']}, the busiest:"]
    lines.append(
        f"  {'engine':11}{'operation':38}{'count':>8}{'elements':>13}{'FLOPs':>15}{'bytes':>13}"
    )
    for row in rank["operations"]:
        lines.append(
            f"  {row['engine']:11}{row['operation']:38}{row['instructions']:8}"
            f"{row['elements']:13}{row['flops']:15}{row['bytes']:13}"
        )
    lines += [
        f"  matmul FLOPs {rank['matmul_flops']}, DMA bytes {rank['dma_bytes']}, "
        f"collective bytes {rank['collective_bytes']} in {rank['hops']} hops",
        f"  high-water marks per partition: SBUF {rank['sbuf_high_bytes_per_partition']} bytes, "
        f"PSUM {rank['psum_high_bytes_per_partition']} bytes",
        f"{estimate['what']}:",
    ]
    for bound in estimate["bounds"]:
        lines.append(
            f"  {bound['engine']:11}{bound['seconds'] * 1e6:12.3f} us for {bound['work']} {bound['unit']}s"
            f" ({bound['rate']}; {bound['source']})"
        )
    lines += [
        f"  at least {estimate['seconds_if_engines_overlap'] * 1e6:.3f} us with all engines in parallel, "
        f"{estimate['seconds_if_engines_take_turns'] * 1e6:.3f} us one after the other",
        f"simulated {run['instructions']} instructions of all ranks in {run['seconds']:.2f} s: "
        f"{run['instructions_per_second']:.0f} per second",
    ]
    if estimate["without_a_published_rate"]:
        lines.append(f"no published rate: {', '.join(estimate['without_a_published_rate'])}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
