"""Sums of gradients as public rings compute them: contributions of one block after another, with a rounding at each step.

::

    total = c_0 (or 0 + c_0)    total = N(total + c_i)    result = N'(total)

Each sum is a float32 sum. N rounds to the carried format, N' to the format of the result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import DtypeError, OptionError, ShapeError, shown
from ringspec.formats import format_of, name_of
from ringspec.merges.numbers import Float32, quiet, stored
from ringspec.merges.recipe import GradientSum

__all__ = ["add_gradients"]

STORED = ("float32", "bfloat16", "float16")


def add_gradients(
    contributions: Any, how: GradientSum | None, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Add contributions to a gradient, in the order given, as ``how`` says, and round the result.

    ``contributions`` are NumPy arrays of float32, bfloat16 or float16, or pairs (array, rows), where ``rows`` is an index of
    the leading axes of the gradient, to which alone the array is added. ``shape`` is that of the gradient. Rows without
    a contribution are 0. :func:`~ringspec.merges.visits` gives the order, with ``how.order``.

    Returns an array of ``shape``, in the storage dtype of ``how.result``. Raises OptionError if ``how`` is no
    :class:`~ringspec.merges.GradientSum`, DtypeError for contributions of other or different dtypes, and ShapeError for
    no contribution or one of another shape.

    >>> how = GradientSum("down", carried="float32", start="first")
    >>> add_gradients([np.float32([1, 2]), (np.float32([5]), slice(1, None))], how, (2,)).tolist()
    [1.0, 7.0]
    """
    if not isinstance(how, GradientSum):
        fix = "pass the dq or dkv of a merge recipe that has one"
        raise OptionError("how as ringspec.merges.GradientSum", shown(how), fix)
    pairs = _pairs(contributions, shape)
    own = name_of(pairs[0][0].dtype)
    assert own is not None
    carried = own if how.carried == "own" else "float32"
    # -0 + x is x for every x, so -0 makes the first sum a copy.
    total: Float32 = np.full(shape, -0.0 if how.start == "first" else 0.0, np.float32)
    touched = np.zeros(shape, bool)
    with quiet():
        for given, rows in pairs:
            total[rows] = stored(total[rows] + given.astype(np.float32), carried)
            touched[rows] = True
        total[~touched] = 0.0
        result = {"own": own, "carried": carried}.get(how.result, how.result)
        # The values are exact in the format after ``stored``, so the conversion cannot round.
        return stored(total, result).astype(format_of(result).dtype)


def _pairs(contributions: Any, shape: tuple[int, ...]) -> list[tuple[NDArray[Any], Any]]:
    """Check the contributions and return each with its rows."""
    if not isinstance(contributions, (list, tuple)) or not contributions:
        expected = "a list of at least one contribution"
        raise ShapeError(expected, shown(contributions), "pass [dq_0, dq_1, ...]")
    pairs = [one if isinstance(one, tuple) else (one, ...) for one in contributions]
    for number, (given, rows) in enumerate(pairs):
        if not isinstance(given, np.ndarray) or name_of(given.dtype) not in STORED:
            got = f"dtype {given.dtype}" if isinstance(given, np.ndarray) else shown(given)
            expected = f"contribution {number} as a NumPy array of {' or '.join(STORED)}"
            raise DtypeError(expected, got, "convert it with ringspec.formats.store(x, format)")
        if given.dtype != pairs[0][0].dtype:
            expected = (
                f"contribution {number} of dtype {pairs[0][0].dtype}, as that of contribution 0"
            )
            raise DtypeError(expected, f"dtype {given.dtype}", "round all to one format")
        covered = np.broadcast_to(np.float32(0), shape)[rows].shape
        if given.shape != covered:
            expected = f"contribution {number} of shape {covered}, the rows that it covers"
            raise ShapeError(
                expected, f"shape {given.shape}", "pass rows with a partial contribution"
            )
    return pairs
