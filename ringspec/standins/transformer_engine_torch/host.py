"""What a GPU and NCCL would answer, for programs that ask torch, on a CPU and with gloo.

- CUDA streams and events do nothing: everything happens in the order of the program.
- The device has compute capability 9.0, that of an H100.
- A transfer of ``isend`` or ``irecv`` may be awaited again, as with NCCL. With gloo, a second ``wait`` hangs.
- ``importlib.metadata`` gives the versions of flash-attn and flash-attn-3 if their stand-ins are in use, and the CUDA
  extension of flash-attn, which programs import to see if it is installed, can be imported.
- TransformerEngine's options in the environment: ``NVTE_PROJECT_BUILDING``, which imports it without its libraries, and
  ``NVTE_TORCH_COMPILE=0`` unless it is set: its small functions are not compiled, which would need a C++ compiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.metadata import Distribution
from types import ModuleType, SimpleNamespace
from typing import Any

from ringspec.standins.names import Standin
from ringspec.standins.transformer_engine_torch.parents import WithoutExtension, refusing

__all__ = ["answered"]

CAPABILITY = (9, 0)
FLASH_ATTN, EXTENSION = "flash_attn", "flash_attn_2_cuda"
FLASH_ATTN_3 = "flash_attn_interface"
BUILDING = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}
CHOICES = {"NVTE_TORCH_COMPILE": "0"}


@contextmanager
def answered(chosen: Standin) -> Iterator[None]:
    """Give these answers inside the with block. Afterwards torch, the environment and imports are as before."""
    import torch
    from torch.distributed import distributed_c10d

    finders: list[Any] = [WithoutExtension()]
    with ExitStack() as stack:
        if FLASH_ATTN in sys.modules:
            finders.append(OneDistribution("flash-attn", sys.modules[FLASH_ATTN].__version__))
            stack.enter_context(extension())
        if FLASH_ATTN_3 in sys.modules:
            version = sys.modules[FLASH_ATTN_3].ringspec_standin.version
            finders.append(OneDistribution("flash-attn-3", version))
        stack.enter_context(environment(BUILDING | {**CHOICES, **os.environ}))
        stack.enter_context(replaced(torch.cuda, **cuda()))
        once = {name: awaited(getattr(distributed_c10d, name)) for name in ("isend", "irecv")}
        for owner in (torch.distributed, distributed_c10d):
            stack.enter_context(replaced(owner, **once))
        sys.meta_path[:0] = finders
        try:
            yield
        finally:
            for finder in finders:
                sys.meta_path.remove(finder)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes inside the with block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def extension() -> Iterator[None]:
    """Let programs import the CUDA extension of flash-attn, and refuse its functions."""
    made = ModuleType(EXTENSION)
    made.varlen_bwd = refusing(f"{EXTENSION}.varlen_bwd", "varlen_bwd")  # type: ignore[attr-defined]
    sys.modules[EXTENSION] = made
    try:
        yield
    finally:
        sys.modules.pop(EXTENSION, None)


class OneDistribution(Distribution):
    """A finder of one distribution, and that distribution: a name and a version."""

    def __init__(self, name: str, version: str) -> None:
        self.given, self.text = name, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any) -> Iterator[Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.replace("_", "-").lower() == self.given:
            yield self

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path} of {self.given}, which is ringspec's stand-in")


class Idle:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def nothing(self, *_: Any) -> None:
        return None

    record = record_event = synchronize = wait = wait_event = wait_stream = nothing


def cuda() -> dict[str, Any]:
    """Return the functions of torch.cuda that are replaced."""
    import torch

    current = Idle()
    properties = SimpleNamespace(
        name="none (ringspec's stand-in)", major=CAPABILITY[0], minor=CAPABILITY[1]
    )
    return {
        "Event": Idle,
        "Stream": Idle,
        "current_device": lambda: torch.device("cpu"),  # where new tensors are allocated
        "current_stream": lambda device=None: current,
        "get_device_properties": lambda device=None: properties,
        "stream": lambda stream: nullcontext(),
    }


class Once:
    """A transfer that waits once; later calls of ``wait`` return at once."""

    def __init__(self, work: Any) -> None:
        self.work, self.done = work, False

    def wait(self, *given: Any, **named: Any) -> Any:
        if not self.done:
            self.work.wait(*given, **named)
            self.done = True
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def awaited(function: Any) -> Any:
    """Return isend or irecv with transfers that wait once; None, which a rank outside the group gets, stays None."""

    def transfer(*given: Any, **named: Any) -> Any:
        work = function(*given, **named)
        return None if work is None else Once(work)

    transfer.__name__ = function.__name__
    return transfer
