"""What counts as seen: results that are not the truth plus noise of the size that the right ring has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from independent.problems import dense, results, ring_of, whole
from torch import Tensor

SEEDS = (1, 2, 3)
Parts = Mapping[str, Callable[..., Any]]


def measured(name: str, dtype: torch.dtype, seed: int, parts: Parts | None = None) -> dict:
    """For each tensor its error and its truth, global, in float64."""
    ring, seeds = ring_of(name, dtype, parts, seed)
    found, want = whole(name, results(ring, seeds)), dense(name, dtype, seed)
    assert set(found) == set(want)
    return {key: (found[key] - want[key], want[key]) for key in want}


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@functools.cache
def noise(name: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative rms error of each tensor of the right ring, the largest of some seeds.

    In float64 the dense truth is rounded as well, and one score can decide an rms: dv of 'rising' has 2e-16
    to 3.5e-15 over 24 seeds (PyTorch 2.13, AVX2). Less than 32 unit roundoffs, 3.6e-15, is no difference there.
    """
    runs = [measured(name, dtype, seed) for seed in SEEDS]
    wide = dtype == torch.float64
    least = 32 * torch.finfo(dtype).eps / 2 if wide else torch.finfo(torch.float32).eps / 2
    return {key: max(least, *(relative(*run[key]) for run in runs)) for key in runs[0]}


def relative(error: Tensor, truth: Tensor) -> float:
    real = torch.isfinite(truth)
    return rms(error[real]) / rms(truth[real])


def seen(name: str, dtype: torch.dtype, parts: Parts | None = None, seed: int = 0) -> list[str]:
    """What is wrong with the results of a ring, a sentence for each tensor; empty: nothing.

    Three questions: infinities and NaN where they belong; rms error within 1 + 8 / sqrt(rows) of the noise; no
    slope of the error on the truth beyond eight of its standard deviations, where the errors of a row
    may be one and the same.
    """
    usual = noise(name, dtype)
    found = []
    for key, (error, truth) in measured(name, dtype, seed, parts).items():
        real = torch.isfinite(truth)
        # Where the truth is -inf, the right result minus it is NaN, a finite one minus it is inf.
        if not (torch.isfinite(error[real]).all() and torch.isnan(error[~real]).all()):
            found.append(f"{key}: infinite or NaN where it should not be, or the reverse")
            continue
        rows = truth.shape[:3].numel()
        error, truth = error[real], truth[real]
        size = rms(error) / rms(truth)
        slope = float((error * truth).sum() / truth.square().sum())
        if not size <= usual[key] * (1.0 + 8.0 / rows**0.5):
            found.append(f"{key}: rms error {size:.1e} where noise is {usual[key]:.1e}")
        elif not abs(slope) <= 8.0 * usual[key] / rows**0.5:
            found.append(f"{key}: slope {slope:.1e} of the error on the truth")
    return found
