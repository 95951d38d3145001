"""Wrong ways to merge the partial results (o, lse) of blocks."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from ringspec.conformance.diagnose.scheme_answers import merged
from ringspec.conformance.diagnose.scheme_world import Partial

base2_as_natural = partial(merged, base=1 / math.log(2))
natural_as_base2 = partial(merged, base=math.log(2))


def mean(parts: list[Partial]) -> Partial:
    return np.mean([o for o, _ in parts], axis=0), merged(parts)[1]


def total(parts: list[Partial]) -> Partial:
    return np.sum([o for o, _ in parts], axis=0), merged(parts)[1]


def empty_counts(parts: list[Partial]) -> Partial:
    return merged([(o, np.where(np.isneginf(lse), 0.0, lse)) for o, lse in parts])


def garbage(parts: list[Partial]) -> Partial:
    o, lse = merged(parts)
    empty = np.any([np.isneginf(one) for _, one in parts], axis=0)
    return np.where(empty[..., None], np.nan, o), lse


def last_lse(parts: list[Partial]) -> Partial:
    return merged(parts)[0], parts[-1][1]


def tree(parts: list[Partial]) -> Partial:
    """Merge neighbours, then their results; two empty parts give NaN."""
    left = list(parts)
    while len(left) > 1:
        pairs = [left[n : n + 2] for n in range(0, len(left), 2)]
        left = [pair[0] if len(pair) == 1 else pair_with_nan(*pair) for pair in pairs]
    return left[0]


def pair_with_nan(one: Partial, other: Partial) -> Partial:
    o, lse = merged([one, other])
    empty = np.isneginf(one[1]) & np.isneginf(other[1])
    return np.where(empty[..., None], np.nan, o), np.where(empty, np.nan, lse)
