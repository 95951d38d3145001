"""A ring on the kernel of FlashAttention 2 that PyTorch contains, by the stand-in 'flash_attn[cuda]', on all GPUs.

    python3 tests/gpu/check_standin_ring.py --out DIR [--workers 1 2] [--profile core]

The ring is docs/conform/example_standin.py; every case of the profile that it claims is judged, with each number of
workers. Needs no flash_attn. ``--device cpu`` tries the same with the stand-in 'flash_attn'. Writes ring.jsonl, as ``ringspec check --report`` does; exit status 1 if a claimed case failed.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from ringspec.conformance.adapters.torch_processes import TorchTarget  # noqa: E402
from ringspec.conformance.cases.profiles import run_cases  # noqa: E402
from ringspec.conformance.report.records import FAILURES  # noqa: E402
from ringspec.conformance.report.report import ReportWriter, make_header  # noqa: E402
from ringspec.conformance.run.load import load_target  # noqa: E402
from ringspec.conformance.run.suite import run  # noqa: E402

EXAMPLE = ROOT / "docs" / "conform" / "example_standin.py"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument("--profile", default="core")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    import torch

    workers = given.workers or range(1, torch.cuda.device_count() + 1)
    example = load_target(f"{EXAMPLE}:target")
    claims = dataclasses.replace(example.capabilities, workers=tuple(workers))
    standin = "flash_attn[cuda]" if given.device == "cuda" else "flash_attn"
    target = TorchTarget(f"{EXAMPLE}:attention", claims, device=given.device, standins=(standin,))
    header = make_header(target, spec=f"{EXAMPLE.name}:target", profile=given.profile)
    if given.device == "cuda":
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        header["versions"] |= {"torch": torch.__version__, "gpu": gpus}
    with (given.out / "ring.jsonl").open("w", encoding="utf-8") as file:
        writer = ReportWriter(file, header)
        summary = run(target, run_cases(given.profile), sink=writer)
        writer.finish(summary.complete)
    target.close()
    print(summary.counts, flush=True)
    for record in summary.failures:
        print(f"  {record.id}: {record.outcome} {record.message[-700:]}", flush=True)
    passed = summary.counts.get("pass", 0)
    return 1 if set(summary.counts) & set(FAILURES) or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
