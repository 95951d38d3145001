"""The slower programs of ringspec against the clock: truth, noise, conformance, the NKI simulator."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringspec.cli.bench_dense import Line
from ringspec.errors import MissingPackageError, OptionError

WIDTH = 128


def exact_lines(lengths: Sequence[int]) -> list[Line]:
    """Correctly rounded forward and backward of one causal head, D = 128."""
    from ringspec import exact
    from ringspec.problem.options import default_scale

    lines: list[Line] = []
    for length in lengths:
        random = np.random.default_rng(length)
        q, k, v, dy = random.standard_normal((4, 1, 1, length, WIDTH))
        seen = np.tri(length, dtype=np.bool_)[None, None]
        problem = exact.Problem(q, k, v, default_scale(WIDTH), visible=seen)
        start = time.perf_counter()
        exact.forward(problem, ("float64",))
        middle = time.perf_counter()
        exact.backward(problem, dy, None, ("float64",))
        seconds = {"forward": middle - start, "backward": time.perf_counter() - middle}
        lines += [
            {"part": "exact", "pass": p, "length": length, "seconds": s} for p, s in seconds.items()
        ]
    return lines


def noise_lines(lengths: Sequence[int]) -> list[Line]:
    """The noise prediction of a bf16 ring of four workers, one causal head, D = 128."""
    from ringspec.compare.noise.predict import predict
    from ringspec.conformance.power_problem import Asked, setting_of

    lines: list[Line] = []
    for length in lengths:
        asked = Asked(recipe="bf16", tokens=length, head_dim=WIDTH, workers=4, layout="zigzag")
        setting = setting_of(asked)
        start = time.perf_counter()
        predict(setting.attention, "bf16", setting.geometry)
        seconds = time.perf_counter() - start
        lines.append({"part": "noise", "pass": "both", "length": length, "seconds": seconds})
    return lines


def core_lines(profile: str, jobs: int) -> list[Line]:
    """``ringspec check reference`` with a profile, in processes of their own."""
    command = [sys.executable, "-m", "ringspec", "check", "reference"]
    seconds = seconds_of([*command, "--profile", profile, "--jobs", str(jobs)])
    return [{"part": "core", "profile": profile, "jobs": jobs, "seconds": seconds}]


def nki_lines(rows: int) -> list[Line]:
    """The forward kernel of the package nki_impl on its simulator, in a process of its own."""
    if importlib.util.find_spec("nki_impl") is None:
        raise MissingPackageError(
            "the package nki_impl, for --part nki",
            "no package of that name",
            "install ringspec from its distribution, which holds it",
        )
    kernel = "ring_attention_spmd_fwd"
    command = [sys.executable, "-m", "nki_impl", "profile", kernel, "--rows", str(rows)]
    return [{"part": "nki", "pass": "forward", "length": rows, "seconds": seconds_of(command)}]


def seconds_of(command: list[str]) -> float:
    """Wall seconds of a program, its start included; a failure is an error."""
    start = time.perf_counter()
    done: Any = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise OptionError(
            f"{' '.join(command[1:])} to end with status 0",
            f"{done.returncode}: {last[0]}",
            "run it by itself to see what it says",
        )
    return seconds
