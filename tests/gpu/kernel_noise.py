"""The rounding noise of PyTorch's kernels on the GPUs of this machine, examined as whole tensors.

    python3 tests/gpu/kernel_noise.py --out DIR [--seeds 50] [--tokens 512] [--large 2048] [--workers 1 2 4]

W = 1: scaled_dot_product_attention by the flash, cuDNN, memory-efficient and math backends, in bfloat16
and float16, causal and not. W = 2, 4: the ring of torch's context parallelism, by flash and cuDNN. No recipe
is declared: the noise says which one fits. Every seed is tested for systematic errors, at the rate of a run;
one of them is inferred, and a large problem is also run with a softmax scale that is wrong by 5e-5. Writes noise.json; exit status 1 after a false alarm or a scale error that was not found.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402

from ringspec.compare.inference.infer import infer  # noqa: E402
from ringspec.compare.noise.predict import predict  # noqa: E402
from ringspec.compare.statistics.tests import errors_of  # noqa: E402
from ringspec.conformance.cases.calls import call_of  # noqa: E402
from ringspec.conformance.cases.noise import MOST_CASES, RATE, problem  # noqa: E402
from ringspec.conformance.cases.problems import dealt  # noqa: E402
from ringspec.conformance.judge.noise import examined  # noqa: E402
from ringspec.conformance.judge.noise_inputs import geometry_of, in_order, question_of  # noqa: E402
from ringspec.conformance.judge.recipe import recipe_for  # noqa: E402
from ringspec.conformance.target.capabilities import Capabilities  # noqa: E402
from ringspec.formats import load, store  # noqa: E402

FORMATS = {"bf16": "bfloat16", "fp16": "float16"}
WRONG = 5e-5


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--large", type=int, default=2048)
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    return parser.parse_args()


def kernels():
    """Backends of scaled_dot_product_attention by name; on a CPU those that it has."""
    import torch
    from torch.nn.attention import SDPBackend

    named = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    on_cpu = ("flash", "math")
    return {n: x for n, x in named.items() if torch.cuda.is_available() or n in on_cpu}


def on_gpu(backend, call, dtype, factor=1.0):
    """o, dq, dk, dv of a call of one worker; the softmax scale is multiplied by ``factor``."""
    import torch
    from torch.nn.attention import sdpa_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    types = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    given = [torch.from_numpy(load(call.worker(n, 0))).to(device, types[dtype]) for n in "qkv"]
    leaves = [x.requires_grad_() for x in given]
    dy = torch.from_numpy(load(call.worker("dy", 0))).to(device, types[dtype])
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=call.terms.get("causal", False), scale=call.terms["scale"] * factor
        )
        grads = torch.autograd.grad(o, leaves, dy)
    named = zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True)
    return {name: (store(x.detach().double().cpu().numpy(), dtype),) for name, x in named}


def calls(given, workers, layout, masks):
    """(key, call): small problems by seed, and one large one."""
    for dtype in FORMATS:
        for mask in masks:
            for seed in range(max(given.seeds // len(masks), 1)):
                sizes = {"tokens": given.tokens, "head_dim": 128, "heads": 2, "kv_heads": 2}
                id = f"{mask}-{dtype}-{seed}"
                case = dealt(problem(mask, dtype, seed=seed + 1, **sizes), id, workers, layout)
                yield (dtype, mask, seed), call_of(case, {})


def judge(work):
    """Alarms of one answer; for one seed and the large problem also what it looks like."""
    name, (dtype, mask, seed), call, outputs = work
    claims = Capabilities(recipe=None)
    question = question_of(call)
    seen = examined(claims, question, call, outputs, RATE / MOST_CASES)
    row = {"kernel": name, "dtype": dtype, "mask": mask, "seed": seed, "tests": seen.count}
    row |= {"rms": seen.rms, "alarms": seen.as_dict()["alarms"]}
    if seed == 0:
        recipe, geometry = recipe_for(claims, call.formats), geometry_of(call)
        got = in_order(call, outputs)
        errors = {one: errors_of(x, question.truth[one]) for one, x in got.items()}
        found = infer(errors, question.attention, geometry, recipe, predict)
        row["inferred"] = found.lines()
        row["best"] = found.best.name
    return row


def large_answers(given):
    """The large problem on one GPU, as it is and with a wrong scale."""
    sizes = {"tokens": given.large, "head_dim": 128, "heads": 4, "kv_heads": 4}
    call = call_of(dealt(problem("causal", "bf16", seed=1, **sizes), "large", 1), {})
    for name in ("flash", "cudnn"):
        if name in kernels():
            for seed, factor in (("large", 1.0), ("wrong", 1.0 + WRONG)):
                outputs = on_gpu(kernels()[name], call, "bfloat16", factor)
                yield name, ("bf16", "causal", seed), call, outputs


def answers(given):
    """(kernel, key, call, outputs) of everything that was asked for, what takes longest first."""
    if given.large:
        yield from large_answers(given)
    for workers in given.workers:
        yield from answers_of(given, workers)


def answers_of(given, gpus):
    """The small problems with ``gpus`` workers."""
    if gpus == 1:
        listed = list(calls(given, 1, "contiguous", ("full", "causal")))
        for name, backend in kernels().items():
            for key, call in listed:
                yield name, key, call, on_gpu(backend, call, FORMATS[key[0]])
        return
    from ringspec.conformance.targets import torch_cp

    for layout, masks in (("contiguous", ("full", "causal")), ("zigzag", ("causal",))):
        listed = list(calls(given, gpus, layout, masks))
        for backend in ("flash", "cudnn"):
            target = torch_cp.target(layout, "alltoall", backend)
            for key, call in listed:
                result = target.run(call)
                names = ("o", "lse", "dq", "dk", "dv")
                outputs = {n: tuple(np.asarray(x) for x in getattr(result, n)) for n in names}
                yield f"{layout}-{backend}-w{gpus}", key, call, outputs
            target.close()


def main():
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    import torch

    gpus = torch.cuda.device_count()
    rows = []
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for row in pool.imap_unordered(judge, answers(given)):
            rows.append(row)
            if row["alarms"] or row.get("best") or row["seed"] in ("large", "wrong"):
                print(json.dumps(row), flush=True)
    small = [row for row in rows if row["seed"] != "wrong"]
    counts = Counter((row["kernel"], row["dtype"], bool(row["alarms"])) for row in small)
    for (kernel, dtype, alarm), count in sorted(counts.items()):
        print(kernel, dtype, "ALARM" if alarm else "no alarm", count, flush=True)
    about = {
        "torch": torch.__version__,
        "gpu": f"{gpus} x {torch.cuda.get_device_name(0) if gpus else 'cpu'}",
    }
    (given.out / "noise.json").write_text(json.dumps({"about": about, "rows": rows}) + "\n")
    missed = [row for row in rows if row["seed"] == "wrong" and not row["alarms"]]
    return 1 if any(row["alarms"] for row in small) or missed else 0


if __name__ == "__main__":
    sys.exit(main())
