"""ParallelKernelBench's ring problems checked by hand: a program without ringspec.

    python by_hand_parallel_kernel_bench.py CHECKOUT

Processes under gloo run the unmodified files reference/54_ring_attention.py and
reference/57_ring_attention_backward_dp.py, and the benchmark's own generator of inputs, create_input_tensor, for problem
57. The results are compared with dense float64 attention of the whole sequence. Prints JSON; each number is the largest
error divided by the largest number of the right tensor:

- ``given``: problem 54, and problem 57 with the o and lse of the whole rows, full and causal, with 3 workers
- ``own_keys``: the o and lse that the benchmark generates for problem 57, against attention over each worker's own
  keys, with 4 processes, which are 2 rings of 2
- ``whole_rows``: the same o and lse, against attention over the ring's keys
- ``gradients``: the gradients of problem 57 with these inputs, against those of attention over the ring's keys
- ``corrected``: the same, with the o and lse of the whole rows in place of the generated ones

``same_ring`` tells whether the ring functions of problems 55 and 56 have the code of problem 54.
"""

import ast
import importlib.util
import json
import sys
from pathlib import Path

from by_hand_ranks import on_ranks

B, H, N, D = 2, 2, 6, 8
RING = ("_update_out_and_lse", "_merge_out_lse", "RingComm", "_local_attn", "_ring_attn_forward")
SHAPE = (2 * 64, 16 * 64)  # of which the benchmark makes 2 sequences of 16 tokens
GRADIENTS = ("dq", "dk", "dv")


def loaded(checkout, name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, Path(checkout) / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense(q, k, v, dy, causal, scale):
    """o, lse, dq, dk, dv of whole sequences [B, S, H, D] in float64, by autograd of a softmax."""
    import torch

    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    s = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(3), leaves[2])
    o.backward(dy.double())
    return o.detach(), s.logsumexp(3).detach(), *(x.grad for x in leaves)


def error(got, want):
    return float((got.double() - want).abs().max() / want.abs().max())


def given_rank(rank, checkout):
    """Errors of problems 54 and 57 on this rank of 3, with inputs of this file."""
    import torch
    import torch.distributed as dist

    made = torch.Generator().manual_seed(11)
    whole = [torch.randn(B, 3 * N, H, D, generator=made) for _ in range(4)]
    mine = slice(rank * N, rank * N + N)
    q, k, v, dy = (x[:, mine].contiguous() for x in whole)
    forward, backward = (loaded(checkout, name).solution for name in FILES)
    found = {}
    for causal in (False, True):
        o, lse, *gradients = dense(*whole, causal, 0.3)
        word = "causal" if causal else "full"
        group = dist.group.WORLD
        found[f"{word} o"] = error(forward(q, k, v, 0.3, causal, group), o[:, mine])
        given = (o[:, mine].float(), lse[:, :, mine].float())
        got = backward(dy, q, k, v, *given, 0.3, causal, group)
        for name, one, right in zip(GRADIENTS, got, gradients, strict=True):
            found[f"{word} {name}"] = error(one, right[:, mine])
    return found


def generated_rank(rank, checkout):
    """Errors of the benchmark's own inputs for problem 57, and of its reference with them, on this rank of 4."""
    import torch
    import torch.distributed as dist

    make = loaded(checkout, "utils/input_output_tensors.py").create_input_tensor
    given = make(rank, 4, 57, SHAPE, torch.float32, device="cpu")
    dout, q, k, v, out, lse, scale, causal, cp_group, dp_group = given
    assert scale is None and not causal
    scale, n = q.shape[-1] ** -0.5, q.shape[1]
    own = dense(q, k, v, dout, causal, scale)
    every = []
    for x in (q, k, v, dout):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(cp_group))]
        dist.all_gather(parts, x, group=cp_group)
        every.append(torch.cat(parts, 1))
    mine = slice(dist.get_rank(cp_group) * n, (dist.get_rank(cp_group) + 1) * n)
    o, rows, *gradients = dense(*every, causal, scale)
    whole = (o[:, mine], rows[:, :, mine])
    found = {"own_keys": {"o": error(out, own[0]), "lse": error(lse, own[1])}}
    found["whole_rows"] = {"o": error(out, whole[0]), "lse": error(lse, whole[1])}
    solution = loaded(checkout, FILES[1]).solution
    for name, statistics in (("gradients", (out, lse)), ("corrected", [x.float() for x in whole])):
        got = solution(dout, q, k, v, *statistics, None, causal, cp_group, dp_group)
        found[name] = {}
        for word, one, right in zip(GRADIENTS, got, gradients, strict=True):
            mean = right[:, mine].contiguous()
            dist.all_reduce(mean, group=dp_group)
            found[name][word] = error(one, mean / dist.get_world_size(dp_group))
    return found


FILES = ("reference/54_ring_attention.py", "reference/57_ring_attention_backward_dp.py")


def worst(several, pick=max):
    """The largest (or smallest) number of all ranks, by name; NaN counts as the largest."""
    names = several[0]
    return {
        name: pick(one[name] if one[name] == one[name] else 9e9 for one in several)
        for name in names
    }


def ring_code(checkout, name):
    tree = ast.parse((Path(checkout) / name).read_text(encoding="utf-8"))
    return {one.name: ast.dump(one) for one in tree.body if getattr(one, "name", "") in RING}


def main(checkout):
    report = {"given": worst(on_ranks(3, given_rank, checkout))}
    ranks = on_ranks(4, generated_rank, checkout)
    for name in ("own_keys", "corrected"):
        report[name] = worst([one[name] for one in ranks])
    for name in ("whole_rows", "gradients"):
        report[name] = worst([one[name] for one in ranks], min)
    others = ("reference/55_ring_attention_tp.py", "reference/56_ring_attention_pp.py")
    first = ring_code(checkout, FILES[0])
    report["same_ring"] = len(first) == len(RING) and all(
        ring_code(checkout, name) == first for name in others
    )
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
