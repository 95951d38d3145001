"""The program of one process of a PyTorch target: a rank of a process group, which runs one call at a time.

The target is the implementation under test: a PyTorch function. :mod:`ringspec.conformance.adapters.torch_processes`
starts this program. It takes over standard input and output for JSON lines; what the target prints goes to the log.
torch is imported by functions, so that this module can be imported without it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import importlib
import importlib.util
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.adapters.control import take_control
from ringspec.conformance.target.conventions import from_torch
from ringspec.conformance.target.protocol import EVERY_TABLE, Refused
from ringspec.conformance.target.versions import installed
from ringspec.errors import DtypeError, OptionError, shown
from ringspec.formats import FORMATS
from ringspec.standins import installed as standins_installed
from ringspec.tensorfile import read_tensors, write_tensors

__all__ = ["LocalCall"]

Arrays = dict[str, NDArray]
SEEDS = ("dy", "dlse")
LEAVES = ("q", "k", "v", "sinks", "bias")
OF_SCHEMES = ("scheme", "mesh", "heads_q", "heads_k", "device_mesh")


@dataclass(frozen=True)
class LocalCall:
    """One rank's part of a call, which the function under test gets in addition to q, k and v.

    ``id``, ``operation``, ``passes``, ``workers``, ``layout``, ``circulation``, ``direction``, ``terms`` and
    ``formats`` are those of :class:`~ringspec.conformance.target.protocol.Call`; ``causal`` and ``scale`` are
    terms. ``rank``: the worker's number. ``tensors``: this rank's further inputs as torch tensors (``bias``,
    ``sinks``, ``mask``, ``segments_q``, ...); ``index_q``, ``index_k`` [n] and ``position_q``, ``position_k``
    [1|B, n], int64.

    Only of the operation 'context_parallel': ``scheme``, ``mesh`` (pairs of an axis and its size), ``heads_q`` [h] and
    ``heads_k`` [hkv], int64, and ``device_mesh``, a ``torch.distributed.DeviceMesh`` with these named axes;
    ``call.device_mesh["ulysses"].get_group()`` is the rank's group along an axis.
    """

    id: str
    operation: str
    passes: tuple[str, ...]
    rank: int
    workers: int
    layout: str
    circulation: str
    direction: int
    terms: Mapping[str, Any]
    formats: Mapping[str, str]
    tensors: Mapping[str, Any] = field(default_factory=dict)
    index_q: Any = None
    index_k: Any = None
    position_q: Any = None
    position_k: Any = None
    scheme: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    heads_q: Any = None
    heads_k: Any = None
    device_mesh: Any = None

    @property
    def causal(self) -> bool:
        """Tell whether the mask is causal."""
        return bool(self.terms.get("causal", False))

    @property
    def scale(self) -> float:
        """The factor by which the products of q and k are multiplied."""
        return float(self.terms["scale"])


@dataclass(frozen=True)
class Place:
    """The number, process group and device of a rank."""

    rank: int
    workers: int
    group: Any
    device: Any


def to_torch(array: NDArray, device: Any) -> Any:
    """Copy an array to a torch tensor with the same bits."""
    import torch

    copy = np.array(array, order="C")
    if copy.dtype == FORMATS["bfloat16"].dtype:
        return torch.from_numpy(copy.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(copy).to(device)


def check_tensor(x: Any, name: str) -> None:
    import torch

    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name} as a torch tensor", shown(x), "return o, or (o, lse)")


def load_function(spec: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Load the function ``package.module:name`` or ``path/file.py:name``."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise OptionError("package.module:name or path/file.py:name", spec, "add the name")
    if place.endswith(".py"):
        found = importlib.util.spec_from_file_location(Path(place).stem, place)
        if found is None or found.loader is None:
            raise OptionError(
                "a Python file", place, "pass the path of a Python file that can be imported"
            )
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = functools.reduce(getattr, name.split("."), module)
    if not callable(function):
        raise OptionError(f"{spec} as a function", shown(function), "pass the name of a function")
    return functools.partial(function, **options) if options else function


def plain_fields() -> set[str]:
    """Return the fields of a LocalCall that are the same on all ranks and in every operation."""
    every = {field.name for field in dataclasses.fields(LocalCall)}
    return every - {"tensors", "rank", *OF_SCHEMES, *EVERY_TABLE}


def local_call(request: Mapping[str, Any], place: Place, tensors: Mapping[str, Any]) -> LocalCall:
    plain = {name: request[name] for name in plain_fields()}
    if request.get("scheme"):
        mesh = tuple((str(axis), int(size)) for axis, size in request["mesh"])
        plain |= {"scheme": request["scheme"], "mesh": mesh}
        if place.device is not None:  # JAX has named axes instead
            plain["device_mesh"] = device_mesh(place.device.type, mesh)
    plain["passes"] = tuple(plain["passes"])
    further = {n: t for n, t in tensors.items() if n not in ("q", "k", "v", *SEEDS, *EVERY_TABLE)}
    flat = {name: tensors[name] for name in EVERY_TABLE if name in tensors}
    return LocalCall(**plain, rank=place.rank, tensors=further, **flat)


@functools.cache
def device_mesh(device: str, mesh: tuple[tuple[str, int], ...]) -> Any:
    """Return the device mesh of all ranks; its process groups are made once and kept."""
    from torch.distributed.device_mesh import init_device_mesh

    axes, sizes = zip(*mesh, strict=True)
    return init_device_mesh(device, sizes, mesh_dim_names=axes)


def evaluate(
    function: Callable[..., Any], request: Mapping[str, Any], place: Place, given: Arrays
) -> tuple[Arrays, list[str]]:
    """Compute the forward pass and, if requested, autograd's backward pass on one rank.

    Returns the results by name, and the names of inputs that the function changed.
    """
    import torch

    tensors = {name: to_torch(array, place.device) for name, array in given.items()}
    backward = "backward" in request["passes"]
    leaves = {name: tensors[name] for name in LEAVES if name in tensors}
    for leaf in leaves.values():
        leaf.requires_grad_(backward)
    call = local_call(request, place, tensors)
    with torch.set_grad_enabled(backward):
        returned = function(*(tensors[n] for n in "qkv"), group=place.group, call=call)
    several = isinstance(returned, (tuple, list))
    o, lse = (returned[0], returned[1]) if several and len(returned) > 1 else (returned, None)
    results = {"o": o} if lse is None else {"o": o, "lse": lse}
    for name, result in results.items():
        check_tensor(result, name)
    if backward:
        pairs = [(o, tensors["dy"])]
        if "dlse" in tensors:
            pairs.append((lse, tensors["dlse"]))
        torch.autograd.backward([one for one, _ in pairs], [seed for _, seed in pairs])
        gradients = {f"d{name}": leaf.grad for name, leaf in leaves.items()}
        results |= {name: grad for name, grad in gradients.items() if grad is not None}
    if "forward" not in request["passes"]:
        results = {name: one for name, one in results.items() if name not in ("o", "lse")}
    arrays = {name: from_torch(one) for name, one in results.items()}
    changed = [n for n, a in given.items() if from_torch(tensors[n]).tobytes() != a.tobytes()]
    return arrays, changed


def answer(
    function: Callable[..., Any], request: Mapping[str, Any], place: Place, given: Arrays
) -> tuple[dict[str, Any], Arrays]:
    """Return the reply to one request, and the results.

    If the call fails, the reply says why, and there are no results. Otherwise it names those of the request's
    ``packages`` that this process has imported.
    """
    try:
        arrays, changed = evaluate(function, request, place, given)
    except Refused as refused:
        return {"refused": str(refused)}, {}
    except Exception:
        return {"error": traceback.format_exc()}, {}
    have = installed(request["packages"], imported=True)
    return {"changed": changed} | dataclasses.asdict(have), arrays


def joined(setup: Mapping[str, Any]) -> Place:
    """Join the process group that ``setup`` describes."""
    import torch
    import torch.distributed as dist

    rank, workers = setup["rank"], setup["workers"]
    device = torch.device("cpu")
    if setup["device"] == "cuda":
        if torch.cuda.device_count() < workers:
            got = f"{torch.cuda.device_count()}"
            raise OptionError(f"{workers} GPUs, one per process", got, "claim fewer workers")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=Path(setup["rendezvous"]).as_uri(),
        rank=rank,
        world_size=workers,
    )
    return Place(rank, workers, dist.group.WORLD, device)


class Rank:
    """A rank that runs in this process: started by :func:`main`, or run for a debugger (``torch_pool.RankHere``)."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.function: Callable[..., Any] | None = None
        self.standins = ExitStack()

    def joined(self, setup: Mapping[str, Any]) -> dict[str, Any]:
        """Join the group and load the function, as the first request says; return the reply."""
        try:
            self.place = joined(setup)
            if setup.get("standins"):
                self.standins.enter_context(standins_installed(*setup["standins"]))
            self.function = load_function(setup["function"], setup["options"])
        except Exception:
            return {"error": traceback.format_exc()}
        return {"ready": True} | dataclasses.asdict(installed(setup.get("packages", ())))

    def reply(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a call, and write the results to its file."""
        assert self.function is not None and self.place is not None
        given = read_tensors(request["inputs"])
        message, arrays = answer(self.function, request, self.place, given)
        write_tensors(request["result"], arrays)
        return message


def main() -> None:
    """Take over the control stream, join the group, then answer requests until the stream ends."""
    control = take_control()
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)
    rank = Rank()
    control.reply(rank.joined(control.next()))
    while rank.function is not None:
        control.reply(rank.reply(control.next()))


if __name__ == "__main__":
    main()
