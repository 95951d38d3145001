"""Read correct rings whose blocks are PyTorch's GPU kernels: each readout must say that the ring is right.

    python3 tests/gpu/check_readouts.py --out DIR [--kernels flash cudnn efficient math]

All workers are in one process on one GPU. The blocks are computed forward and backward by the kernels of
scaled_dot_product_attention. A block is a run of consecutive tokens of one worker against another, so the kernels'
own causal mask is enough. Keys travel, or queries; the rings have 2, 3 and 4 workers, and 1, 2 and 4 query heads for
each key head. Two wrong rings are read as well: one loses the last step's gradients of k and v, the other masks every
block as if it were on the diagonal. Writes readouts.json; exit status 1 after a correct ring that is called wrong, or a
wrong one that is called right.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from ringspec.conformance.adapters.numpy_lists import NumPyTarget  # noqa: E402
from ringspec.conformance.explain.explain import explain_target  # noqa: E402
from ringspec.conformance.explain.read_problems import run_problem  # noqa: E402
from ringspec.conformance.readout.problem.chosen import problem_for  # noqa: E402
from ringspec.conformance.readout.problem.problems import Problem  # noqa: E402
from ringspec.conformance.readout.problem.settings import SETTINGS  # noqa: E402
from ringspec.conformance.target.capabilities import Capabilities  # noqa: E402
from ringspec.formats import load, store  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
aten = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """What a kernel's backward pass needs of one of its calls: what it returned besides o and lse."""

    o: torch.Tensor
    lse: torch.Tensor
    rest: tuple = ()


def flash(q, k, v, causal, scale):
    o, lse, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
    return Block(o, lse, tuple(rest[:6]))


def flash_backward(dy, q, k, v, o, lse, block, causal, scale):
    return aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, o, lse, *block.rest[:4], 0.0, causal, *block.rest[4:6], scale=scale
    )


def cudnn(q, k, v, causal, scale):
    o, lse, *rest = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return Block(o, lse.reshape(q.shape[:3]), tuple(rest[:6]))


def cudnn_backward(dy, q, k, v, o, lse, block, causal, scale):
    cum_q, cum_k, max_q, max_k, seed, offset = block.rest
    return aten._scaled_dot_product_cudnn_attention_backward(
        dy, q, k, v, o, lse[..., None], seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal, scale=scale
    )  # fmt: skip


def efficient(q, k, v, causal, scale):
    o, lse, *rest = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return Block(o, lse[:, :, : q.shape[2]], (lse.shape[2], *rest))


def efficient_backward(dy, q, k, v, o, lse, block, causal, scale):
    # In 16 bits, torch 2.11 returns NaN or wrong dq and dk, without an error, unless o has the strides that its forward pass returns.
    o = o.transpose(1, 2).contiguous().transpose(1, 2)
    padded, seed, offset = block.rest
    lse = torch.nn.functional.pad(lse, (0, padded - lse.shape[2]), value=float("inf"))
    mask = [True, True, True, False]
    found = aten._scaled_dot_product_efficient_attention_backward(
        dy, q, k, v, None, o, lse, seed, offset, 0.0, mask, causal, scale=scale
    )
    return found[:3]


def math_scores(q, k, causal, scale):
    s = scale * (q.float() @ k.float().mT)
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return s.masked_fill(hidden, -torch.inf) if causal else s


def math(q, k, v, causal, scale):
    s = math_scores(q, k, causal, scale)
    return Block((s.softmax(3) @ v.float()).to(q.dtype), s.logsumexp(3))


def math_backward(dy, q, k, v, o, lse, block, causal, scale):
    p = (math_scores(q, k, causal, scale) - lse[..., None]).exp()
    delta = (dy.float() * o.float()).sum(3, keepdim=True)
    ds = scale * p * (dy.float() @ v.float().mT - delta)
    return ds @ k.float(), ds.mT @ q.float(), p.mT @ dy.float()


KERNELS = {
    "flash": (flash, flash_backward, ("bfloat16", "float16")),
    "cudnn": (cudnn, cudnn_backward, ("bfloat16", "float16")),
    "efficient": (efficient, efficient_backward, ("bfloat16", "float16", "float32")),
    "math": (math, math_backward, ("bfloat16", "float16", "float32")),
}


def runs(position):
    """Return the slices of a worker's slots whose positions are consecutive."""
    cuts = [0, *(np.flatnonzero(np.diff(position) != 1) + 1), len(position)]
    return [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def on_gpu(arrays, dtype):
    return [
        torch.from_numpy(np.ascontiguousarray(load(x))).to(DEVICE, TYPES[dtype]) for x in arrays
    ]


def of_group(x, group):
    return x.repeat_interleave(group, 1)


def sum_of_group(x, group):
    return x.unflatten(1, (-1, group)).sum(2)


def ring(kernel, mistake=""):
    """Return a target's function: the ring with the blocks of one kernel."""
    forward, backward, _ = KERNELS[kernel]

    def function(
        q, k, v, scale, position_q, position_k, formats, circulation, direction, dy=None, causal=False
    ):  # fmt: skip
        dtype, workers = formats["inputs"], len(q)
        q, k, v = (on_gpu(x, dtype) for x in (q, k, v))
        group = q[0].shape[1] // k[0].shape[1]

        def blocks(r, owner):
            for rows in runs(position_q[r][0]):
                for columns in runs(position_k[owner][0]):
                    first, other = position_q[r][0][rows.start], position_k[owner][0][columns.start]
                    if causal and first < other:
                        continue
                    own = causal and (first == other or mistake == "mask")
                    keys = (of_group(x[owner][:, :, columns], group) for x in (k, v))
                    yield rows, columns, own, (q[r][:, :, rows].contiguous(), *keys)

        o, lse, kept = [], [], {}
        for r in range(workers):
            total = torch.zeros(q[r].shape, dtype=torch.float32, device=DEVICE)
            state = torch.full(q[r].shape[:3], -torch.inf, device=DEVICE)
            for step in range(workers):
                owner = (r - direction * step) % workers
                for rows, columns, own, given in blocks(r, owner):
                    one = forward(*given, own, scale)
                    kept[r, owner, rows.start, columns.start] = one
                    new = torch.logaddexp(state[:, :, rows], one.lse.float())
                    old, more = (state[:, :, rows] - new).exp(), (one.lse.float() - new).exp()
                    total[:, :, rows] = total[:, :, rows] * old[..., None] + more[..., None] * one.o
                    state[:, :, rows] = new
            o.append(total.to(TYPES[dtype]))
            lse.append(state)
        found = {"o": [store(x.double().cpu().numpy(), dtype) for x in o]}
        found["lse"] = [x.cpu().numpy() for x in lse]
        if dy is None:
            return found
        dy = on_gpu(dy, dtype)
        sums = [[torch.zeros(y.shape, dtype=torch.float32, device=DEVICE) for y in x] for x in (q, k, v)]  # fmt: skip
        for step in range(workers):
            for x in range(workers):
                other = (x - direction * step) % workers
                r, owner = (other, x) if circulation == "q" else (x, other)
                for rows, columns, own, given in blocks(r, owner):
                    part = (y[r][:, :, rows].contiguous() for y in (o, lse))
                    grads = backward(
                        dy[r][:, :, rows].contiguous(), *given, *part,
                        kept[r, owner, rows.start, columns.start], own, scale,
                    )  # fmt: skip
                    dq, dk, dv = (y.float() for y in grads)
                    sums[0][r][:, :, rows] += dq
                    if mistake == "lost" and step == workers - 1:
                        continue
                    sums[1][owner][:, :, columns] += sum_of_group(dk, group)
                    sums[2][owner][:, :, columns] += sum_of_group(dv, group)
        for name, shards in zip(("dq", "dk", "dv"), sums, strict=True):
            found[name] = [store(x.double().cpu().numpy(), dtype) for x in shards]
        return found

    return function


def target(kernel, dtype, mistake="", workers=3, ratio=2):
    claims = Capabilities(
        # cuDNN has no backward pass for blocks of one token, which striped rings have: a segmentation fault.
        layouts=("contiguous", "zigzag") + (() if kernel == "cudnn" else ("striped",)),
        circulations=("kv", "q", "gather"),
        directions=(1, -1),
        formats=(dtype,),
        workers=(workers,),
        head_ratios=(ratio,),
        # The kernels need D a multiple of 8, and flash has no backward pass above 256.
        head_dims=tuple(range(8, 257, 8)),
    )
    return NumPyTarget(
        ring(kernel, mistake), claims, f"{kernel}-{dtype}{mistake and '-' + mistake}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    given = parser.parse_args()
    rows, wrong = [], 0
    for kernel in given.kernels:
        for dtype in KERNELS[kernel][2]:
            start, row = time.perf_counter(), {"target": f"{kernel}-{dtype}", "readouts": 0}
            row["not right"] = bad = []
            for workers, ratio in np.ndindex(3, 3):
                one = target(kernel, dtype, workers=workers + 2, ratio=2**ratio)
                made = [problem_for(setting, one.capabilities) for setting in SETTINGS]
                read = [run_problem(one, x) for x in made if isinstance(x, Problem)]
                row["readouts"] += len(read)
                bad += [x.problem.id + ": " + x.stopped for x in read if not x.right]
            row["seconds"] = round(time.perf_counter() - start, 1)
            for mistake in ("lost", "mask"):
                row[mistake] = list(explain_target(target(kernel, dtype, mistake)).sentences)
            wrong += bool(bad) + sum(not row[x] for x in ("lost", "mask"))
            rows.append(row)
            print(json.dumps(row), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    about = {"device": device, "torch": torch.__version__, "rows": rows}
    (given.out / "readouts.json").write_text(json.dumps(about, indent=1))
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
