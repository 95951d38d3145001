"""For the programs by_hand_*.py: processes under gloo, and dense attention in float64. It does not use ringspec."""

import json
import socket
import sys

B, H, N, D = 1, 2, 8, 16
SCALE = D**-0.5
NAMES = ("o", "dq", "dk", "dv")
LAYOUTS = {
    "contiguous": lambda rank, workers: list(range(rank * N, (rank + 1) * N)),
    "striped": lambda rank, workers: list(range(rank, N * workers, workers)),
}


def inputs(workers, dtype):
    """q, k, v and dy of the whole sequence, [B, W * N, H, D]."""
    import torch

    made = torch.Generator().manual_seed(7)
    shape = (B, N * workers, H, D)
    drawn = (torch.randn(shape, generator=made, dtype=torch.float64) for _ in range(4))
    return [x.to(dtype) for x in drawn]


def dense(q, k, v, dy, causal):
    """o, dq, dk, dv in float64, by autograd of a dense softmax."""
    import torch

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s = torch.einsum("bihd,bjhd->bhij", *leaves[:2]) * SCALE
    if causal:
        s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    o = torch.einsum("bhij,bjhd->bihd", s.softmax(3), leaves[2])
    o.backward(dy.double())
    return [x.detach() for x in (o, *(x.grad for x in leaves))]


def started(rank, workers, function, given, over_standins, port, queue):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=workers, rank=rank)
    found = function(rank, *given)
    loaded = [name for name in sys.modules if name.split(".")[0] == "ringspec"]
    assert over_standins or not loaded
    queue.put((rank, found))
    dist.barrier()


def on_ranks(workers, function, *given, over_standins=False, method="spawn"):
    """What ``function(rank, *given)`` returns on each rank. ``over_standins``: it may use ringspec.standins.

    ``method``: how processes start; with 'fork' they share what this process has imported.
    """
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context(method)
    queue = context.Queue()
    rest = (workers, function, given, over_standins, port, queue)
    ranks = [context.Process(target=started, args=(rank, *rest)) for rank in range(workers)]
    for one in ranks:
        one.start()
    got = dict(queue.get(timeout=240) for _ in ranks)
    for one in ranks:
        one.join()
    return [got[rank] for rank in range(workers)]


def of_rank(rank, workers, attention, layout, dtype):
    import torch

    at = LAYOUTS[layout](rank, workers)
    q, k, v, dy = (x[:, at].contiguous() for x in inputs(workers, getattr(torch, dtype)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attention(*leaves, rank, workers)
    o.backward(dy)
    return [x.detach().double().tolist() for x in (o, *(x.grad for x in leaves))]


def main(attention, workers, layout="contiguous", dtype="float32", causal=False):
    """Run ``attention(q, k, v, rank, workers)`` on every rank, and print the largest error of each result as JSON.

    Errors are relative to the largest number of the correct tensor.
    """
    import torch

    got = on_ranks(workers, of_rank, workers, attention, layout, dtype)
    report = {}
    wants = dense(*inputs(workers, getattr(torch, dtype)), causal)
    for number, (name, want) in enumerate(zip(NAMES, wants, strict=True)):
        found = torch.empty_like(want)
        for rank in range(workers):
            values = torch.tensor(got[rank][number], dtype=torch.float64)
            found[:, LAYOUTS[layout](rank, workers)] = values
        report[name] = float((found - want).abs().max() / want.abs().max())
    print(json.dumps(report))
