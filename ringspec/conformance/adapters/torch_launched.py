"""A PyTorch target on processes that torchrun started: rank 0 sends calls, and all ranks compute.

A target is an implementation under test. Calls and results are sent through a separate gloo group, as JSON and
safetensors bytes. No shared file and no port other than torchrun's is needed, so the ranks may be on several hosts.
After a crash torchrun ends all ranks. If a rank hangs, the timeout of the process group ends the wait.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import numpy as np

from ringspec.conformance.adapters import torch_pool
from ringspec.conformance.adapters import torch_ranks as own
from ringspec.conformance.adapters.torch_worker import Place, answer, load_function
from ringspec.conformance.adapters.wire import call_message
from ringspec.conformance.target.protocol import Call, Refused, Result
from ringspec.conformance.target.versions import agreed, installed, said_installed
from ringspec.errors import OptionError
from ringspec.standins import installed as standins_installed
from ringspec.tensorfile import decode, encode

__all__ = ["launched"]

STANDINS = ExitStack()  # in use as long as this process lives
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def send_bytes(data: bytes, rank: int, control: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.send(torch.tensor([len(data)]), rank, group=control)
    if data:
        dist.send(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), rank, group=control)


def receive_bytes(rank: int, control: Any) -> bytes:
    import torch
    import torch.distributed as dist

    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, rank, group=control)
    data = torch.zeros(int(length), dtype=torch.uint8)
    if len(data):
        dist.recv(data, rank, group=control)
    return data.numpy().tobytes()


def joined(device: str, seconds: float) -> tuple[Place, Any]:
    """Join torchrun's process group; return this rank's number, group and device, and the group for calls."""
    import torch
    import torch.distributed as dist

    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        fix = "start the program with torchrun"
        raise OptionError("the variables that torchrun sets", f"no {missing[0]}", fix)
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=limit)
    # Between calls the other ranks wait while rank 0 compares results, which can take long.
    control = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    return Place(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, where), control


def launched(target: Any) -> Any:
    """Return the TorchTarget ``target`` on rank 0.

    All other ranks answer calls until rank 0 is done, then exit.
    """
    place, control = joined(target.device, target.timeout)
    if target.standins:
        STANDINS.enter_context(standins_installed(*target.standins))
    function = load_function(target.function, target.options)
    have = installed(target.packages)
    if place.rank != 0:
        send_bytes(json.dumps(dataclasses.asdict(have)).encode(), 0, control)
        serve(function, place, control)
        raise SystemExit(0)
    others = [json.loads(receive_bytes(rank, control)) for rank in range(1, place.workers)]
    target.note(agreed([have, *map(said_installed, others)]))
    driver = Driver(target, function, place, control)
    target.capabilities = dataclasses.replace(target.capabilities, workers=(place.workers,))
    target.run = driver.run
    target.close = driver.close
    atexit.register(driver.close)
    return target


def serve(function: Any, place: Place, control: Any) -> None:
    """Answer calls until an empty request arrives."""
    while request := receive_bytes(0, control):
        given = decode(receive_bytes(0, control))
        reply, arrays = answer(function, json.loads(request), place, given)
        send_bytes(json.dumps(reply).encode(), 0, control)
        send_bytes(encode(arrays), 0, control)


class Driver:
    """Rank 0: send calls to the other ranks, compute too, gather the results."""

    def __init__(self, target: Any, function: Any, place: Place, control: Any) -> None:
        self.target, self.function, self.place, self.control = target, function, place, control
        self.closed = False

    def run(self, call: Call) -> Result:
        own.check_operation(call)
        if call.workers != self.place.workers:
            raise Refused(f"{call.workers} workers: torchrun started {self.place.workers}")
        request = call_message(call, "", "") | {"packages": self.target.packages}
        others = range(1, call.workers)
        for rank in others:
            send_bytes(json.dumps(request).encode(), rank, self.control)
            send_bytes(encode(own.local_arrays(call, rank)), rank, self.control)
        answers = [answer(self.function, request, self.place, own.local_arrays(call, 0))]
        for rank in others:
            reply = json.loads(receive_bytes(rank, self.control))
            answers.append((reply, decode(receive_bytes(rank, self.control))))
        replies = {rank: reply for rank, (reply, _) in enumerate(answers)}
        torch_pool.judge_replies(replies, call.workers, 0.0)
        own.raise_changed(list(replies.values()))
        self.target.note(agreed([*map(said_installed, replies.values())]))
        return own.gathered([arrays for _, arrays in answers])

    def close(self) -> None:
        """Tell the other ranks to exit."""
        if not self.closed:
            self.closed = True
            for rank in range(1, self.place.workers):
                send_bytes(b"", rank, self.control)
