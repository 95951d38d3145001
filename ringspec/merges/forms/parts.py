"""One partial result, as the forms work on it, and the rows that it covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.merges.intervals import endwise
from ringspec.merges.numbers import Float32

__all__ = ["Part"]


@dataclass(frozen=True)
class Part:
    """A partial result: ``o`` [..., Dv] and its ``lse`` [...], and optionally the rows of the whole that it covers.

    o is a NumPy array of float32, bfloat16 or float16, lse one of float32; the leading axes are in any order, such as
    [B, H, S] or [B, S, H], and keep their strides. ``rows`` is an index of the leading axes, such as
    ``(slice(None), slice(n // 2, None))``: the part covers only these rows, and the others keep what they have, as in a
    ring whose causal mask hides a block from the first half of the queries. None means all rows.

    ``sums``: the sum of exponentials l [...] of a part that is not normalised. Then o is the unnormalised sum of
    exp(s - m) v, and ``lse`` holds the maximum m. None: o is normalised, and lse is its log-sum-exp, that is m = lse, l = 1.
    """

    o: NDArray[Any]
    lse: Float32
    rows: Any = None
    sums: Float32 | None = None

    @property
    def total(self) -> Float32:
        """The sum of exponentials relative to ``lse``: ``sums``, or ones."""
        return np.ones_like(self.lse) if self.sums is None else self.sums

    def of_rows(self, rows: Any) -> Part:
        """Return the part of these rows alone."""
        sums = None if self.sums is None else self.sums[rows]
        return Part(self.o[rows], self.lse[rows], rows, sums)

    def at(self, whole: Float32) -> Float32:
        """Return the rows of ``whole`` that this part covers, a view."""
        return whole if self.rows is None else whole[self.rows]

    def put(self, whole: Float32, value: Float32) -> Float32:
        """Return ``whole`` with this part's rows replaced by ``value``."""
        if self.rows is None:
            return value
        result: Float32 = endwise(self._replaced, whole, value)
        return result

    def _replaced(self, whole: Float32, value: Float32) -> Float32:
        result = whole.copy(order="K")
        result[self.rows] = value
        return result
