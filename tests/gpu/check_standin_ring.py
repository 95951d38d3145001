"""Rings on the kernel of FlashAttention 2 that PyTorch contains, by the stand-in 'flash_attn[cuda]', on all GPUs.

    python3 tests/gpu/check_standin_ring.py --out DIR [--targets example zhuzilin-ring yunchang-usp diffusers-ring]
        [--workers 1 2] [--profile core] [--without window]

``example`` is docs/conform/example_standin.py; the others are ready targets, whose packages must be installed, but not
flash_attn. Those of diffusers call PyTorch's kernel themselves, as diffusers' backend "_native_flash" does. Every case of
the profile that a target claims is judged, with each number of workers; no recipe is declared, because those of the ready
targets describe the stand-in that rounds once. ``--device cpu`` tries the same with the stand-in 'flash_attn', and with
'aten_flash' for diffusers. Writes TARGET.jsonl, as ``ringspec check --report`` does; exit status 1 if a claimed case failed.
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
from ringspec.conformance.targets import diffusers_ring, yunchang_usp, zhuzilin  # noqa: E402

EXAMPLE = ROOT / "docs" / "conform" / "example_standin.py"
READY = {"zhuzilin": zhuzilin, "yunchang": yunchang_usp}


def named_target(name, device, workers, without):
    """Return the target ``name``, on the device, with the numbers of workers that it claims and the machine has."""
    chosen = {
        "device": device,
        "standins": ("flash_attn[cuda]" if device == "cuda" else "flash_attn",),
    }
    if name == "example":
        claims = dataclasses.replace(
            load_target(f"{EXAMPLE}:target").capabilities, workers=tuple(workers)
        )
        return TorchTarget(f"{EXAMPLE}:attention", claims, name="example_standin", **chosen)
    package, variant = name.split("-", 1)
    if package == "diffusers":
        target = diffusers_ring.target(variant, "native-flash", device=device)
    else:
        target = READY[package].target(variant, **chosen)
    claims = target.capabilities
    fitting = {
        "workers": tuple(sorted({*claims.workers} & {*workers})),
        "masks": tuple(mask for mask in claims.masks if mask not in without),
    }
    if device == "cuda":  # the wrapper around PyTorch's kernel has no soft cap
        fitting["features"] = tuple(one for one in claims.features if one != "softcap")
    target.capabilities = dataclasses.replace(claims, recipe=None, **fitting)
    return target


def check(name, given, workers, versions):
    """Judge one target, write its report, and return whether all cases passed."""
    target = named_target(name, given.device, workers, given.without)
    header = make_header(target, spec=name, profile=given.profile)
    header["versions"] |= versions
    with (given.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        writer = ReportWriter(file, header)
        summary = run(target, run_cases(given.profile), sink=writer)
        writer.finish(summary.complete)
    target.close()
    print(name, target.capabilities.workers, summary.counts, flush=True)
    for record in summary.failures:
        print(f"  {record.id}: {record.outcome} {record.message[-700:]}", flush=True)
    return bool(summary.counts.get("pass", 0)) and not set(summary.counts) & set(FAILURES)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", nargs="+", default=["example"])
    parser.add_argument("--workers", type=int, nargs="+")
    parser.add_argument(
        "--without", nargs="+", default=[], help="masks of ready targets to leave out"
    )
    parser.add_argument("--profile", default="core")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    import torch

    versions = {"torch": torch.__version__}
    if given.device == "cuda":
        versions["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    workers = given.workers or range(1, torch.cuda.device_count() + 1)
    passed = [check(name, given, workers, versions) for name in given.targets]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
