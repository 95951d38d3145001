"""Noise whose law is known exactly: independent roundings, one that each row shares, one that a head shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SyntheticNoise:
    """error = own * u + row_pattern * u_row + head_pattern * u_head, all u independent, uniform, variance 1."""

    name: str
    own: np.ndarray
    row_pattern: np.ndarray
    head_pattern: np.ndarray

    @property
    def sd(self):
        square = self.own**2 + self.row_pattern**2 + self.head_pattern**2
        return {self.name: np.sqrt(square)}

    @property
    def mean(self):
        return {}

    drift = mean

    def variance_of_sums(self, name, weights, labels=None):
        shape = self.own.shape[:3]
        labels = np.zeros(shape, dtype=int) if labels is None else labels
        weights = np.where((labels < 0).reshape(shape + (1,) * (weights.ndim - 3)), 0.0, weights)
        labels = np.maximum(labels, 0)
        count = labels.max() + 1
        axes = tuple(range(3, weights.ndim))
        own = (weights * weights * self.own**2).sum(axis=axes)
        row = (weights * self.row_pattern).sum(axis=axes) ** 2
        total = np.bincount(labels.ravel(), weights=(own + row).ravel(), minlength=count)
        lever = (weights * self.head_pattern).sum(axis=axes)
        for b, h in np.ndindex(shape[:2]):
            total += np.bincount(labels[b, h], weights=lever[b, h], minlength=count) ** 2
        return total

    def draw(self, rng):
        shape = self.own.shape
        flat = (1,) * (len(shape) - 3)
        own, row, head = (
            rng.uniform(-math.sqrt(3), math.sqrt(3), s)
            for s in (shape, shape[:3] + flat, shape[:2] + (1,) + flat)
        )
        return self.own * own + self.row_pattern * row + self.head_pattern * head


def problem(seed, shape=(1, 2, 64, 16), name="dq", row=0.5, head=0.0):
    """Truth, direction and noise: rows of unlike size, a relative error near that of bfloat16."""
    rng = np.random.default_rng(seed)
    size = np.exp(rng.standard_normal(shape[:3]))
    size = size.reshape(size.shape + (1,) * (len(shape) - 3))
    truth = size * rng.standard_normal(shape)
    direction = truth + 0.5 * size * rng.standard_normal(shape)
    own = 2e-3 * size * np.exp(0.3 * rng.standard_normal(shape))
    shared = 2e-3 * size * rng.standard_normal(shape)
    return truth, direction, SyntheticNoise(name, own, row * shared, head * shared)
