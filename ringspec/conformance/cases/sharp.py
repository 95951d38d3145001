"""Noise cases with more tokens and heads, which detect smaller errors: for ``ringspec check --sharp``.

The smallest detected error is inversely proportional to the square root of the number of elements. The time is
proportional to the number of query-key pairs. More tokens add more pairs per element, more heads do not, so larger
cases first get more heads.
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
    """Yield the cases of all rings and sizes.

    >>> [case.id for case in cases()][:2]
    ['noise/causal-zigzag-w4-bf16-n512-h8', 'noise/causal-zigzag-w4-bf16-n512-h32']
    """
    for mask, workers, layout in RINGS:
        for tokens, heads in SIZES:
            id = f"{base_id(mask, workers, layout)}-n{tokens}-h{heads}"
            case = problem(mask, DTYPE, tokens=tokens, heads=heads, kv_heads=heads)
            yield noise_case(id, dealt(case, id, workers, layout))


def base_id(mask: str, workers: int, layout: str) -> str:
    """Return the id of the usual noise case in this ring, with which the ids of larger cases begin."""
    return f"noise/{mask}-{layout}-w{workers}-{DTYPE}"


def pairs_ratio(tokens: int, heads: int) -> float:
    """Return how many times more pairs a size has than the usual noise case.

    >>> round(pairs_ratio(512, 8), 1)
    7.1
    """
    return heads * tokens**2 / (HEADS * TOKENS**2)


def elements_ratio(tokens: int, heads: int) -> float:
    """Return how many times more elements of o a size has than the usual noise case."""
    return heads * tokens / (HEADS * TOKENS)
