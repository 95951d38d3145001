"""Correctly rounded merges of partial results in the forms in which implementations have them.

An empty part is neutral: its o does not count, even if it is NaN. A part that is not normalised, (m, l, o) with the sum of
exponentials l and o = sum exp(s - m) v, is merged exactly if l is an integer: it is l keys with the logit m, of which
the first has the value o and the others have 0. Their exponentials sum to l exp(m), and their products to exp(m) o.
"""

from __future__ import annotations

import numpy as np

from ringspec.errors import NonFiniteError, OptionError, shown
from ringspec.problem.model import Array
from ringspec.truth.exactly import FLOAT64, Truth, Wanted, merge

__all__ = ["LARGEST_SUM", "merge_parts"]

LARGEST_SUM = 4096


def merge_parts(
    o: Array,
    lse: Array,
    sums: Array | None = None,
    *,
    empty_lse: float = -np.inf,
    base: int | None = None,
    wanted: Wanted = FLOAT64,
) -> Truth:
    """Return o [B, H, S, Dv] and lse [B, H, S] merged from parts o [N, B, H, S, Dv] and lse [N, B, H, S], float64.

    ``sums`` [N, B, H, S]: integers l from 1 to :data:`LARGEST_SUM` of parts that are not normalised, whose ``lse`` are the
    maxima m; None: normalised parts. ``empty_lse``: the lse of an empty part, -inf or +inf. ``base``: 2 if the lse, also the
    one returned, are logarithms to base 2; None: natural. A row that is empty in all parts has o = 0 and lse = -inf. Raises NonFiniteError for NaN or infinity in a part that is not empty, and OptionError
    for other sums.

    >>> o, m = np.full((1, 1, 1, 1, 1), 6.0), np.zeros((1, 1, 1, 1))
    >>> truth = merge_parts(o, m, np.full(m.shape, 4.0))
    >>> truth.tensors["o"]["float64"].item()
    1.5
    """
    empty = lse == empty_lse
    lse, o = np.where(empty, -np.inf, lse), np.where(empty[..., None], 0.0, o)
    if not (np.isfinite(o).all() and np.isfinite(lse[~empty]).all()):
        raise NonFiniteError(
            f"finite o and lse in parts that are not empty (lse {empty_lse})",
            "NaN or infinity",
            "mark an empty part by its lse",
        )
    if sums is None:
        return merge(o, lse, wanted, base=base)
    if base is not None:
        expected = "natural logarithms with sums"
        raise OptionError(expected, f"base {base}", "convert the maxima to natural logarithms")
    counts = np.where(empty, 1.0, sums)
    if not ((counts == np.rint(counts)) & (counts >= 1) & (counts <= LARGEST_SUM)).all():
        got = shown(float(counts.min())) if counts.min() < 1 else shown(float(counts.max()))
        fix = "choose parts whose exponentials sum to an integer"
        raise OptionError(f"sums as integers from 1 to {LARGEST_SUM}", got, fix)
    return merge(*as_keys(o, lse, counts), wanted)


def as_keys(o: Array, lse: Array, counts: Array) -> tuple[Array, Array]:
    """Return the values and logits of ``counts`` keys in place of each part; missing keys have the logit -inf."""
    values, logits = [], []
    for one, m, count in zip(o, lse, counts, strict=True):
        for key in range(int(count.max())):
            values.append(one if key == 0 else np.zeros_like(one))
            logits.append(np.where(key < count, m, -np.inf))
    return np.stack(values), np.stack(logits)
