"""PyTorch's context parallelism on the GPUs of this machine, judged, and written down.

    python3 tests/gpu/check_torch_cp.py --out DIR [--targets 'zigzag_*_flash'] [--profile core]
        [--only 'ring/*'] [--tokens 4096,32768] [--device cuda]

For each target whose name matches: the cases of the profile (``--profile none``: none of them), then
long sequences with W = all GPUs. One JSON Lines file a target in DIR, and summary.json. Exit status 1 if
a claimed case failed. ``--device cpu --workers 2`` tries the same on a CPU.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import long_sequences as long  # noqa: E402

from ringspec.conformance.targets import torch_cp  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="*")
    parser.add_argument("--profile", default="core")
    parser.add_argument("--only")
    parser.add_argument("--tokens", default="4096,32768")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def long_records(target, given, workers, known):
    """Records of long sequences. ``known`` keeps truth, which all targets share."""
    for tokens in map(int, filter(None, given.tokens.split(","))):
        layout = target.capabilities.layouts[0]
        for causal in (True,) if target.capabilities.only_causal else (True, False):
            settings = {"causal": causal, "head_dim": given.head_dim}
            call, inputs = long.long_call(tokens, workers, layout, **settings)
            if (tokens, causal) not in known:
                values = long.truth(inputs, call.terms["scale"], causal)
                rng = np.random.default_rng(1)
                checked = long.cross_check(inputs, call.terms["scale"], causal, values, rng)
                print(
                    f"truth of {tokens} tokens against longdouble: {checked:.1e} scales", flush=True
                )
                assert checked <= 1e-12
                known[tokens, causal] = values
            yield long_record(target, call, known[tokens, causal])


def long_record(target, call, values):
    start = time.monotonic()
    record = {"id": call.id, "outcome": "error", "findings": [], "truth": "float64 blockwise"}
    try:
        result = target.run(call)
        found = long.verdicts(target.capabilities, call, values, result)
        record["findings"] = [dataclasses.asdict(one) for one in found]
        record["outcome"] = "pass" if all(one.error <= 1.0 for one in found) else "mismatch"
    except Exception as error:
        record["message"] = f"{type(error).__name__}: {error}\n{getattr(error, 'log', '')}"[-4000:]
    return record | {"seconds": time.monotonic() - start}


def profile_records(target, given):
    if given.profile == "none":
        return []
    from ringspec.conformance.cases import run_cases
    from ringspec.conformance.runner import run

    summary = run(target, run_cases(given.profile), only=given.only)
    return [dataclasses.asdict(record) for record in summary.records]


def worst_of(records):
    """The largest error of each tensor in units of its bound."""
    worst = {}
    for record in records:
        for one in record["findings"]:
            before = worst.get(one["tensor"], 0.0)
            # NaN is not less than anything: it stays.
            worst[one["tensor"]] = before if one["error"] <= before else one["error"]
    return worst


def main():
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    import torch

    workers = given.workers or torch.cuda.device_count()
    about = {"torch": torch.__version__, "workers": workers, "python": sys.version.split()[0]}
    if given.device == "cuda":
        about |= {
            "gpu": torch.cuda.get_device_name(0),
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    print(about, flush=True)
    summary, known = {"about": about, "targets": {}}, {}
    for name in torch_cp.TARGETS:
        if torch_cp.on_cpu(name) != (given.device == "cpu") or not fnmatchcase(name, given.targets):
            continue
        target, start = getattr(torch_cp, name), time.monotonic()
        with (given.out / f"{name}.jsonl").open("w") as file:
            records = profile_records(target, given)
            records += list(long_records(target, given, workers, known))
            target.close()
            header = {"kind": "header", "target": target.name, "notes": target.notes} | about
            for line in (header, *({"kind": "case"} | record for record in records)):
                file.write(json.dumps(line) + "\n")
        counts = dict(Counter(record["outcome"] for record in records))
        summary["targets"][name] = {"counts": counts, "worst": worst_of(records)}
        print(
            f"{name}: {counts}, {time.monotonic() - start:.0f} s, {worst_of(records)}", flush=True
        )
        for record in records:
            if record["outcome"] not in ("pass", "not claimed"):
                print(f"  {record['id']}: {record['outcome']} {record.get('message', '')[-700:]}")
    (given.out / "summary.json").write_text(json.dumps(summary, indent=1))
    failed = [
        n for n, one in summary["targets"].items() if set(one["counts"]) - {"pass", "not claimed"}
    ]
    return 1 if failed or not summary["targets"] else 0


if __name__ == "__main__":
    sys.exit(main())
