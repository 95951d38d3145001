"""Functions of an author, right and wrong, for the tests of the PyTorch adapter.

torch is imported when a function runs. Wrong ones do their wrong on one worker only.
"""

import contextlib
import ctypes
import functools
import os
import stat
import sys
import time
from pathlib import Path

from ringspec.conformance.target.protocol import Refused


@functools.cache
def gathering():
    """All shards of a tensor along its token axis, for autograd."""
    import torch

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group, rank, workers):
            ctx.given = group, rank, workers
            shards = [torch.empty_like(x) for _ in range(workers)]
            torch.distributed.all_gather(shards, x.contiguous(), group=group)
            return torch.cat(shards, dim=2)

        @staticmethod
        def backward(ctx, grad):
            group, rank, workers = ctx.given
            total = grad.to(torch.float64)
            torch.distributed.all_reduce(total, group=group)
            return total.to(grad.dtype).chunk(workers, dim=2)[rank], None, None, None

    return Gather.apply


def gathered_attention(q, k, v, *, group, call):
    """Right and slow: gather all keys and values, then attend with the mask of global positions."""
    import torch

    keys, values = (gathering()(x, group, call.rank, call.workers) for x in (k, v))
    positions = [torch.zeros_like(call.position_k) for _ in range(call.workers)]
    torch.distributed.all_gather(positions, call.position_k.contiguous(), group=group)
    group_size = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
    s = (q @ keys.transpose(-1, -2)) * call.scale
    if call.causal:
        rows = call.position_q[:, None, :, None]
        s = s.masked_fill(torch.cat(positions, dim=-1)[:, None, None, :] > rows, -torch.inf)
    lse = torch.logsumexp(s, dim=-1)
    return torch.exp(s - lse[..., None]) @ values, lse


def prints(q, k, v, *, group, call):
    print('{"ready": true}', flush=True)
    return gathered_attention(q, k, v, group=group, call=call)


def crashes(q, k, v, *, group, call):
    if call.rank == 1:
        ctypes.string_at(0)
    return gathered_attention(q, k, v, group=group, call=call)


def leaves(q, k, v, *, group, call):
    if call.rank == 0:
        sys.stderr.write("no space left\n")
        raise SystemExit(3)
    return gathered_attention(q, k, v, group=group, call=call)


def hangs(q, k, v, *, group, call):
    while call.rank == 1:
        time.sleep(0.1)
    return gathered_attention(q, k, v, group=group, call=call)


def raises(q, k, v, *, group, call):
    if call.rank == 1:
        raise ZeroDivisionError("no tokens")
    return gathered_attention(q, k, v, group=group, call=call)


def refuses(q, k, v, *, group, call):
    raise Refused("not on a Saturday")


def mutates(q, k, v, *, group, call):
    o, lse = gathered_attention(q, k, v, group=group, call=call)
    if call.rank == 1:
        k.data[0, 0, 0, 0] += 1
    return o, lse


def narrows(q, k, v, *, group, call):
    import torch

    o, lse = gathered_attention(q, k, v, group=group, call=call)
    return (o.to(torch.float16) if call.rank == 1 else o), lse


def rows_of_the_neighbour(q, k, v, *, group, call):
    import torch

    o, lse = gathered_attention(q, k, v, group=group, call=call)
    shards = [torch.empty_like(o) for _ in range(call.workers)]
    torch.distributed.all_gather(shards, o.detach().contiguous(), group=group)
    return o + (shards[(call.rank + 1) % call.workers] - o.detach()), lse


def one_nan(q, k, v, *, group, call):
    import torch

    o, lse = gathered_attention(q, k, v, group=group, call=call)
    spot = torch.zeros_like(o)
    if call.rank == 1:
        spot[0, 0, -1, 0] = torch.nan
    return o + spot, lse


CALLS = []
BY_TURNS = (prints, narrows, rows_of_the_neighbour, mutates, one_nan)


def wrong_by_turns(q, k, v, *, group, call):
    """Wrong in each way in which the processes live on, one after the other; then right."""
    CALLS.append(call.id)
    functions = (*BY_TURNS, gathered_attention)
    function = functions[min(len(CALLS), len(functions)) - 1]
    return function(q, k, v, group=group, call=call)


def of_no_tensor(q, k, v, *, group, call):
    return q.tolist()


def scaled(q, k, v, *, group, call, factor):
    o, lse = gathered_attention(q, k, v, group=group, call=call)
    return o * factor, lse


def tells_its_process(q, k, v, *, group, call, folder):
    (Path(folder) / f"{call.workers}-{call.rank}").write_text(str(os.getpid()))
    return gathered_attention(q, k, v, group=group, call=call)


def write_to_pipes(data):
    for handle in range(3, 64):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(handle).st_mode):
                os.write(handle, data)


def writes_part_of_a_reply(q, k, v, *, group, call):
    if call.rank == 1:
        write_to_pipes(b'{"changed":')
        time.sleep(600)
    return gathered_attention(q, k, v, group=group, call=call)


def writes_garbage(q, k, v, *, group, call):
    if call.rank == 1:
        write_to_pipes(b"step 1 of 2\n")
    return gathered_attention(q, k, v, group=group, call=call)


def forges_a_reply(q, k, v, *, group, call):
    if call.rank == 1:
        write_to_pipes(b'{"changed": 3}\n')
    return gathered_attention(q, k, v, group=group, call=call)


def prints_for_ever(q, k, v, *, group, call):
    while True:
        print("again and again", flush=True)
