"""Problems over four workers, and the comparison bit for bit, for threads and for MPI ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringspec.rings.run import Run

W = 4
NAMES = ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias")
CIRCULATIONS = ("kv", "q", "gather")
# The names say which feature; S is filled in where a shape depends on it.
FEATURES = (
    "causal", "window", "softcap", "sinks", "dlse", "bias", "bias of all rows", "mask", "segments",
    "documents", "bounds", "dropout", "keep", "positions", "bf16", "nki", "skip_masked",
)  # fmt: skip


def inputs(seed: int, tokens: int = 24, batch: int = 2) -> dict[str, np.ndarray]:
    """q, k, v, dy with grouped heads, Dv != D and H != S."""
    rng = np.random.default_rng(seed)
    shapes = {"q": (4, 8), "k": (2, 8), "v": (2, 6), "dy": (4, 6)}
    return {n: rng.standard_normal((batch, h, tokens, d)) for n, (h, d) in shapes.items()}


def option(name: str, tokens: int = 24, batch: int = 2) -> dict[str, Any]:
    """Keywords of ``ringspec.ring`` for one feature."""
    rng = np.random.default_rng(len(name))
    pairs = (batch, 4, tokens, tokens)
    at = np.arange(tokens)
    known: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"causal": True, "window": (7, 0)},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": rng.standard_normal((4, 2))},
        "dlse": {"dlse": rng.standard_normal(pairs[:3])},
        "bias": {"bias": rng.standard_normal((1, 4, tokens, tokens))},
        "bias of all rows": {"bias": rng.standard_normal((batch, 1, 1, tokens))},
        "mask": {"mask": rng.random(pairs) < 0.7},
        "segments": {"segments_q": rng.integers(-1, 3, (batch, tokens))},
        "documents": {"cu_seqlens": [0, 5, 16, tokens], "causal": True},
        "bounds": {"bound_min": at // 2, "bound_max": at + 1},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
        "keep": {"dropout_p": 0.5, "keep": rng.random((1, 4, tokens, tokens)) < 0.5},
        "positions": {"causal": True, "positions_q": at[::-1].copy(), "positions_k": 2 * at},
        "bf16": {"recipe": "bf16", "causal": True},
        "nki": {"recipe": "nki"},
        "skip_masked": {"causal": True, "skip_masked": True},
    }
    return known[name]


def problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every layout with every circulation and direction; every feature in two circulations."""
    rings = itertools.product(("contiguous", "striped", "zigzag"), CIRCULATIONS, (1, -1))
    for layout, circulation, direction in rings:
        how = {"layout": layout, "circulation": circulation, "direction": direction}
        yield f"{layout} {circulation} {direction}", how | option("causal")
    for n, feature in enumerate(FEATURES):
        for circulation in (CIRCULATIONS[n % 3], CIRCULATIONS[(n + 1) % 3]):
            how = {"circulation": circulation, "layout": "striped"}
            yield f"{feature} {circulation}", how | option(feature)
    table = np.array([[0, 5, 9, -1], [1, 2, 3, 4], [6, -1, 7, 8], [10, 11, 12, -1]])
    yield "a table with padding", {"layout": table, "causal": True}


def tokens_of(keywords: dict[str, Any]) -> int:
    """Length of the tensors for these keywords."""
    return 24 if isinstance(keywords["layout"], str) else 13


def differences(one: Run, other: Run) -> list[str]:
    """Names of the tensors of which a bit differs, of the whole and of each worker."""
    found = []
    for where, a, b in [("", one, other), *zip("0123", one.workers, other.workers, strict=False)]:
        for name in NAMES:
            x, y = getattr(a, name), getattr(b, name)
            if (x is None) != (y is None) or (x is not None and x.tobytes() != y.tobytes()):
                found.append(f"{name}{where}")
    return found
