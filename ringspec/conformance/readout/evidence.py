"""The picture of a failing readout: the first wrong matrix over pairs of tokens, and the expected matrix.

A *readout* is a problem whose results show matrices of queries and keys. One of them, for example, is the weight that
each key has for each query in the forward pass. A block is the part of a matrix with the queries of one worker and the
keys of one worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.problem.pairs import Seen, joined, seen_in, without_padding
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.formats import load
from ringspec.problem.model import Array
from ringspec.recipes import RECIPES

DIGITS = 4


def picture_of(problem: Problem, outputs: Mapping[str, Sequence[NDArray]]) -> dict[str, Any] | None:
    """Return the first wrong matrix and the expected one, for one head; None if no matrix differs visibly.

    Keys of the dict: ``expected`` and ``got``, lists [queries][keys] in the order of the workers; ``block``, the number
    of tokens of a worker; ``caption``, which names the matrix and the head.
    """
    geometry = problem.pairs.geometry
    right = run_right(problem.call, RECIPES["float64"])
    got, want = (
        seen_in(
            geometry,
            without_padding(geometry, {name: joined(map(load, results[name])) for name in outputs}),
        )
        for results in (outputs, right)
    )
    for words, have, expected in matrices(got, want):
        wrong = ~(np.abs(have - expected) <= problem.tolerance * np.abs(expected).max())
        if wrong.any():
            head = int(np.argmax(wrong.any(axis=(0, 1, 3, 4))))
            return {
                "expected": whole(expected[:, :, head]),
                "got": whole(have[:, :, head]),
                "block": geometry.slots,
                "caption": f"{words}, head {head}; lines separate the workers",
            }
    return None


def matrices(got: Seen, want: Seen) -> Iterator[tuple[str, Array, Array]]:
    """Yield each matrix as (words for it, the matrix that was read, the expected matrix)."""
    yield "A, the weights in the forward pass", got.weights, want.weights
    for words, name in (
        ("P, the weights in the backward pass", "p"),
        ("dS as used for dq", "ds_of_dq"),
        ("dS as used for dk", "ds_of_dk"),
    ):
        have, expected = getattr(got, name), getattr(want, name)
        if have is not None and expected is not None:
            yield words, have, expected


def whole(x: Array) -> list[list[float]]:
    """Join the blocks [a, b, i, j] (query i of worker a, key j of worker b) into one matrix, and return its rows."""
    a, b, n, m = x.shape
    rows: list[list[float]] = (
        np.round(x.transpose(0, 2, 1, 3).reshape(a * n, b * m), DIGITS) + 0.0
    ).tolist()
    return rows
