"""PyTorch's context parallelism on the GPUs of this machine, judged, and written down.

    python3 tests/gpu/check_torch_cp.py --out DIR [--targets 'zigzag_*_flash'] [--profile core]
        [--only 'ring/*'] [--tokens 4096,32768] [--device cuda]

For each target whose name matches: the cases of the profile (``--profile none``: none of them), then
long sequences with W = all GPUs. One report a target in DIR (what ``ringspec check --report`` writes),
and summary.json. Exit status 1 if a claimed case failed. ``--device cpu --workers 2`` tries the same on a
CPU.
"""

import argparse
import json
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import long_sequences as long  # noqa: E402

from ringspec.conformance.cases.model import Judgement, RunCase  # noqa: E402
from ringspec.conformance.cases.profiles import run_cases  # noqa: E402
from ringspec.conformance.report.records import FAILURES  # noqa: E402
from ringspec.conformance.report.report import ReportWriter, make_header  # noqa: E402
from ringspec.conformance.run.suite import run  # noqa: E402
from ringspec.conformance.targets import torch_cp  # noqa: E402


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--targets", default="*")
    parser.add_argument("--profile", default="core")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--tokens", default="4096,32768")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def profile_cases(given):
    if given.profile == "none":
        return []
    made = run_cases(given.profile)
    if not given.only:
        return made
    return [case for case in made if any(fnmatchcase(case.id, one) for one in given.only)]


def long_cases(target, given, workers, known):
    """Long sequences, in the target's layout. ``known`` keeps truth, which all targets share."""
    layout, only_causal = target.capabilities.layouts[0], target.capabilities.only_causal
    return [
        long_case(tokens, workers, layout, causal, given.head_dim, known)
        for tokens in map(int, filter(None, given.tokens.split(",")))
        for causal in ((True,) if only_causal else (True, False))
    ]


def long_case(tokens, workers, layout, causal, head_dim, known):
    call, inputs = long.long_call(tokens, workers, layout, causal=causal, head_dim=head_dim)

    def judge(claims, calls, outputs):
        if (tokens, causal) not in known:
            known[tokens, causal] = checked_truth(inputs, call.terms["scale"], causal)
        verdicts = long.verdicts(claims, call, known[tokens, causal], outputs[0])
        return Judgement(all(one.ok for one in verdicts), tuple(verdicts))

    needs = {"workers": workers, "layout": layout, "masks": ["causal"] if causal else []}
    return RunCase(
        call.id,
        "A long sequence: every element of every worker.",
        needs,
        lambda claims: [call],
        judge,
        truth="float64 blockwise, cross-checked on sampled rows",
        claimed=lambda claims: None,
    )


def checked_truth(inputs, scale, causal):
    values = long.truth(inputs, scale, causal)
    checked = long.cross_check(inputs, scale, causal, values, np.random.default_rng(1))
    print(f"truth against longdouble: {checked:.1e} row scales", flush=True)
    assert checked <= 1e-12
    return values


def worst_of(records):
    """The largest error of each tensor in units of its bound."""
    worst = {}
    for record in records:
        for one in record.findings:
            before = worst.get(one.tensor, 0.0)
            # NaN is not less than anything: it stays.
            worst[one.tensor] = before if one.error <= before else one.error
    return worst


def about_machine(given, workers):
    import torch

    about = {"torch": torch.__version__}
    if given.device == "cuda":
        about |= {
            "gpu": f"{workers} x {torch.cuda.get_device_name(0)}",
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return about


def checked(name, given, workers, about, known):
    """One target's run; its report is written case by case."""
    target, start = getattr(torch_cp, name), time.monotonic()
    spec = f"ringspec.conformance.targets.torch_cp:{name}"
    header = make_header(target, spec=spec, profile=given.profile)
    header["versions"] |= about
    cases = [*profile_cases(given), *long_cases(target, given, workers, known)]
    with (given.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        writer = ReportWriter(file, header)
        summary = run(target, cases, sink=writer)
        writer.finish(summary.complete)
    target.close()
    worst = worst_of(summary.records)
    seconds = time.monotonic() - start
    print(f"{name}: {summary.counts}, {seconds:.0f} s, {worst}", flush=True)
    for record in summary.failures:
        print(f"  {record.id}: {record.outcome} {record.message[-700:]}", flush=True)
    return {"counts": summary.counts, "worst": worst}


def main():
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    import torch

    workers = given.workers or torch.cuda.device_count()
    about = about_machine(given, workers)
    print(about, flush=True)
    summary, known = {"about": about, "targets": {}}, {}
    for name in torch_cp.TARGETS:
        if torch_cp.on_cpu(name) == (given.device == "cpu") and fnmatchcase(name, given.targets):
            summary["targets"][name] = checked(name, given, workers, about, known)
            (given.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    failed = [
        name for name, one in summary["targets"].items() if set(one["counts"]) & set(FAILURES)
    ]
    return 1 if failed or not summary["targets"] else 0


if __name__ == "__main__":
    sys.exit(main())
