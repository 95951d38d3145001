"""The reference rings of ParallelKernelBench's problems 54 and 57, unmodified, on a CPU.

Problem 54 is the forward pass of a ring, problem 57 its backward pass, which is given the o and lse of each worker's
queries. The files are read from a checkout of the repository, whose folder the environment variable
RINGSPEC_PARALLEL_KERNEL_BENCH names. Problems 55 and 56 contain the same ring as problem 54, between projections; they
have no targets.

======================================  =====================================
target                                  file
======================================  =====================================
``parallel-kernel-bench-forward``       reference/54_ring_attention.py
``parallel-kernel-bench-backward``      reference/57_ring_attention_backward_dp.py
======================================  =====================================

The backward ring is right for the o and lse of the whole rows, which this target gives it. The inputs that
ParallelKernelBench itself generates for problem 57 have the o and lse of each worker's own keys, so the gradients
that it expects there are not those of attention over all keys of the ring. The program
tests/conformance/targets/by_hand_parallel_kernel_bench.py shows both without ringspec.

Source: https://github.com/togethercomputer/ParallelKernelBench, commit 3cc0f9b435010b4957ccf7b4b85791480c7c69a6.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.errors import MissingPackageError, OptionError

VARIABLE = "RINGSPEC_PARALLEL_KERNEL_BENCH"
KNOWN = "3cc0f9b435010b4957ccf7b4b85791480c7c69a6"
FILES = {
    "forward": "reference/54_ring_attention.py",
    "backward": "reference/57_ring_attention_backward_dp.py",
}
NOTES = (
    "the file of ParallelKernelBench is unmodified",
    f"known to run with commit {KNOWN[:7]}",
)
BACKWARD_NOTE = (
    "the target gives the ring the o and lse of the whole rows; the inputs that ParallelKernelBench generates for problem"
    " 57 have those of each worker's own keys"
)


def claims(name: str) -> Capabilities:
    """Return what a ring supports: contiguous layout, as many key heads as query heads, no features but a scale."""
    return Capabilities(
        operations=(f"ring-{name}",),
        circulations=("kv",),
        directions=(1,),
        workers=(1, 2, 3, 4),
        masks=("causal",),
        features=("scale",),
        formats=("float32", "bfloat16", "float16"),
        head_ratios=(1,),
        lse="hidden",
        axes="BSHD",
    )


@functools.cache
def solution(path: str) -> Any:
    """Load the function ``solution`` of a file."""
    spec = importlib.util.spec_from_file_location("parallel_kernel_bench_reference", path)
    if spec is None or spec.loader is None:
        raise OptionError("a Python file", path, "pass the folder of a checkout")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.solution


def forward(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, path: str) -> Any:
    """Compute o [B, n, H, D] of one worker by problem 54."""
    return solution(path)(q, k, v, softmax_scale=call.scale, causal=call.causal, group=group)


def backward(q: Any, k: Any, v: Any, *, group: Any, call: LocalCall, path: str) -> Any:
    """Return the o given, whose gradients are those of problem 57."""
    return gradient_function().apply(q, k, v, group, call, path)


@functools.cache
def gradient_function() -> Any:
    """Make the autograd function, which needs torch."""
    import torch

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: Any, k: Any, v: Any, group: Any, call: LocalCall, path: str
        ) -> Any:
            ctx.save_for_backward(q, k, v)
            ctx.given = (group, call, path)
            return call.tensors["o"].clone()

        @staticmethod
        def backward(ctx: Any, dout: Any) -> Any:
            group, call, path = ctx.given
            given = (call.tensors["o"], call.tensors["lse"])
            named = {"softmax_scale": call.scale, "causal": call.causal, "cp_group": group}
            found = solution(path)(dout.contiguous(), *ctx.saved_tensors, *given, **named)
            return *found, None, None, None

    return Gradients


def target(name: str, checkout: str | None = None, **settings: Any) -> TorchTarget:
    """Make the target 'forward' or 'backward'.

    ``checkout``: the folder of a checkout of ParallelKernelBench; default: the environment variable
    RINGSPEC_PARALLEL_KERNEL_BENCH. ``settings`` are passed to TorchTarget. Raises MissingPackageError if neither is set,
    OptionError if the folder lacks the file.
    """
    folder = checkout or os.environ.get(VARIABLE)
    if not folder:
        expected = "a checkout of https://github.com/togethercomputer/ParallelKernelBench"
        raise MissingPackageError(expected, "none", f"set {VARIABLE} to its folder")
    file = Path(folder).expanduser().resolve() / FILES[name]
    if not file.is_file():
        fix = f"set {VARIABLE} to the folder of a checkout"
        raise OptionError(f"a folder with the file {FILES[name]}", str(folder), fix)
    return TorchTarget(
        f"{__name__}:{name}",
        claims(name),
        name=f"parallel-kernel-bench-{name}",
        options={"path": str(file)},
        notes=NOTES if name == "forward" else (*NOTES, BACKWARD_NOTE),
        packages=("torch",),
        **settings,
    )


def forward_ring(**settings: Any) -> TorchTarget:
    return target("forward", **settings)


def backward_ring(**settings: Any) -> TorchTarget:
    return target("backward", **settings)
