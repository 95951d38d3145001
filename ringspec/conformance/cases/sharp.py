"""Noise cases with more tokens and heads, which detect smaller errors: for ``ringspec check --sharp``.

A noise case tests the statistics of rounding errors. The smallest error that it detects is inversely proportional to
the square root of the number of elements. Its time is proportional to the number of query-key pairs. More tokens give
more pairs per element and more heads do not, so a larger case first gets more heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.noise import HEADS, TOKENS, noise_case, problem
from ringspec.conformance.cases.problems import dealt

# Mask, W, layout of noise cases in bfloat16 with one key head per query head; a target runs the first that it claims.
RINGS = (
    ("causal", 4, "zigzag"),
    ("causal", 4, "contiguous"),
    ("full", 2, "contiguous"),
    ("causal", 1, "contiguous"),
)
SIZES = ((512, 8), (512, 32), (1024, 32))  # tokens, heads
DTYPE = "bf16"


def cases() -> Iterator[RunCase]:
    """Yield the cases of all sizes; a size is a number of tokens and heads.

    >>> [case.id for case in cases()][:2]
    ['noise/causal-zigzag-w4-bf16-n512-h8', 'noise/causal-zigzag-w4-bf16-n512-h32']
    """
    for mask, workers, layout in RINGS:
        for tokens, heads in SIZES:
            id = f"{base_id(mask, workers, layout)}-n{tokens}-h{heads}"
            case = problem(mask, DTYPE, tokens=tokens, heads=heads, kv_heads=heads)
            yield noise_case(id, dealt(case, id, workers, layout))


def base_id(mask: str, workers: int, layout: str) -> str:
    """Return the id of the usual noise case with this mask, layout and number of workers."""
    return f"noise/{mask}-{layout}-w{workers}-{DTYPE}"


def pairs_ratio(tokens: int, heads: int) -> float:
    """Return how many times more query-key pairs a case of this size has than the usual noise case.

    >>> round(pairs_ratio(512, 8), 1)
    7.1
    """
    return heads * tokens**2 / (HEADS * TOKENS**2)


def elements_ratio(tokens: int, heads: int) -> float:
    """Return how many times more elements of o a case of this size has than the usual noise case."""
    return heads * tokens / (HEADS * TOKENS)
