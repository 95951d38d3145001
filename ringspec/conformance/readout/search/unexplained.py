"""Describe what no set of faults explains: the matrices, the blocks, and how large their wrong elements are."""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.matches import Explanation, Match
from ringspec.conformance.readout.search.read_factors import EXACT, FEWEST, LEAST_WEIGHT
from ringspec.problem.model import Booleans

MATRICES = {
    "A": "the softmax weights in o",
    "lse": "lse",
    "V": "the rest of o",
    "P": "the softmax weights of the backward pass",
    "dS of dq": "dS as used for dq",
    "dS of dk": "dS as used for dk",
    "dS of bias": "dbias",
    "dsinks": "the gradient of the sinks",
}


def left_of(seen: Seen, found: Explanation) -> str:
    """Describe the matrices and blocks that are not explained, and how large their wrong elements are."""
    return "; ".join(
        f"{MATRICES[matrix]} in {blocks_text(equal)}{size_text(seen, found.match, matrix)}"
        for matrix, equal in found.match.blocks.items()
        if not equal.all()
    )


def size_text(seen: Seen, match: Match, matrix: str) -> str:
    """Say how large the wrong elements of a matrix are, as parts of what is expected; '' if too few of these are not 0."""
    read = {
        "A": seen.weights, "P": seen.p, "dS of dq": seen.ds_of_dq, "dS of dk": seen.ds_of_dk
    }.get(matrix)  # fmt: skip
    if read is None:
        return ""
    ours = match.ours[matrix]
    at = ~match.equal[matrix] & (np.abs(ours) > LEAST_WEIGHT) & np.isfinite(read)
    if at.sum() < FEWEST:
        return ""
    low, middle, high = np.quantile(read[at] / ours[at], (0.25, 0.5, 0.75))
    if high - low <= EXACT * abs(middle):
        return f", {middle:.3g} times as large as expected" if middle else ", most of them 0"
    first, last = (f"{x + 0.0:.2g}" for x in (low, high))  # adding 0 makes -0 a 0
    some = first if first == last else f"{first} to {last}"
    return f", half of the wrong ones {some} times as large as expected"


def blocks_text(equal: Booleans) -> str:
    """Describe the wrong blocks or workers; ``equal`` [a, b] or [a] is False for them."""
    where = list(zip(*np.nonzero(~np.asarray(equal)), strict=True))
    if len(where) == equal.size:
        return "all blocks" if equal.ndim == 2 else "all workers"
    if equal.ndim == 1:
        return "worker " + ", ".join(str(a) for (a,) in where)
    return "the blocks (queries of worker, keys of worker) " + ", ".join(
        f"({a}, {b})" for a, b in where
    )
