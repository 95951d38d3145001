"""Measure the rates that ``ringspec plan`` needs on GPUs, and write them as a hardware file.

    python tests/benchmarks/plan_rates_cuda.py rates.json
    ringspec plan --hardware rates.json

Compute: PyTorch's scaled_dot_product_attention with the flash and the cuDNN backend, causal, bfloat16,
D = 128, forward and backward, as visible FLOP/s (4 D and 10 D for each visible pair). Transfers, with two
GPUs or more: every process sends to the next one and receives from the one before with NCCL, both at
once, as a ring does; latency and bytes/s are a straight line through the times of small and large
messages. With one GPU no link is measured, and the file cannot be written.
"""

import json
import sys
import time
from pathlib import Path

LENGTHS = (4096, 8192, 16384)
HEADS, HEAD_DIM = 32, 128
MESSAGES = [1 << p for p in range(10, 29, 3)]
REPEATS = 10


def timed(call, torch) -> float:
    """Seconds of one call, the median of several."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[REPEATS // 2]


def attention_rates() -> list[dict]:
    """Visible FLOP/s of both passes by backend and length."""
    from torch.nn.attention import SDPBackend

    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return [attention_rate(backend, length) for backend in backends for length in LENGTHS]


def attention_rate(backend, length: int) -> dict:
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    shape = (1, HEADS, length, HEAD_DIM)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(shape, **kind, requires_grad=True) for _ in range(3))
    dy = torch.randn(shape, **kind)

    def forward():
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(backend):
        forward_seconds = timed(forward, torch)
        y = forward()
        backward_seconds = timed(
            lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True), torch
        )
    pairs = HEADS * length * (length + 1) / 2
    return {
        "backend": str(backend).split(".")[-1],
        "length": length,
        "forward_flops": 4 * HEAD_DIM * pairs / forward_seconds,
        "backward_flops": 10 * HEAD_DIM * pairs / backward_seconds,
    }


def permute(rank: int, world: int, results) -> None:
    """One process of the ring: times of a permute by message length."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29581", rank=rank, world_size=world
    )
    for size in MESSAGES:
        mine = torch.zeros(size, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(mine)

        def hop(mine=mine, other=other):
            work = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine, (rank + 1) % world),
                    dist.P2POp(dist.irecv, other, (rank - 1) % world),
                ]
            )
            for part in work:
                part.wait()

        seconds = timed(hop, torch)
        if rank == 0:
            results.append((size, seconds))
    dist.destroy_process_group()


def link_rates(world: int) -> dict:
    """Latency and bytes/s of one hop among all GPUs."""
    import torch.multiprocessing as processes

    with processes.Manager() as manager:
        results = manager.list()
        processes.spawn(permute, args=(world, results), nprocs=world)
        times = dict(results)
    small, large = min(times), max(times)
    speed = (large - small) / (times[large] - times[small])
    return {"times": times, "bytes_per_second": speed, "latency": times[small]}


def main(path: str) -> None:
    import torch

    rows = attention_rates()
    for row in rows:
        print(json.dumps(row))
    best = {
        way: max(row[f"{way}_flops"] for row in rows if row["length"] == LENGTHS[-1])
        for way in ("forward", "backward")
    }
    world = torch.cuda.device_count()
    link = link_rates(world) if world > 1 else None
    print(json.dumps(link))
    copied = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(copied)
    stream = 2 * (1 << 30) / timed(lambda: target.copy_(copied), torch)
    peak = max(best.values())
    if link is None:
        raise SystemExit("one GPU alone has no link to measure")
    rates = {
        "name": torch.cuda.get_device_name().replace("NVIDIA ", ""),
        "source": f"measured with PyTorch {torch.__version__} on {world} GPUs",
        "flops_per_second": {"bfloat16": peak},
        "efficiency": {way: best[way] / peak for way in best},
        "memory": {
            "bytes": torch.cuda.get_device_properties(0).total_memory,
            "bytes_per_second": stream,
        },
        "links": [
            {
                "name": "measured",
                "bytes_per_second": link["bytes_per_second"],
                "latency": link["latency"],
                "workers": 8,
            }
        ],
    }
    Path(path).write_text(json.dumps(rates, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rates))


if __name__ == "__main__":
    main(sys.argv[1])
