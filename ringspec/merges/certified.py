"""The bits of a merge that do not depend on the elementary functions, for users who lack those of the original.

The merge is evaluated on intervals: every elementary function returns all values that a function of stated accuracy can
have (:mod:`ringspec.merges.enclosures`), and every other operation all results on these. An element is certified if both
ends of its result have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.errors import OptionError, shown
from ringspec.formats import store
from ringspec.merges.enclosures import ROUNDED, within
from ringspec.merges.intervals import Interval, same_bits
from ringspec.merges.merge import evaluate, merge
from ringspec.merges.numbers import Float32, quiet
from ringspec.merges.recipe import MergeRecipe

__all__ = ["Certain", "certain"]

MOST_ULPS = 1024


@dataclass(frozen=True)
class Certain:
    """The result of a merge, and which of its elements do not depend on the elementary functions.

    ``o`` [..., Dv] in the dtype of the parts, ``lse`` [...] float32: the bits with functions computed in float64 and
    rounded. ``o_certain`` and ``lse_certain``, boolean arrays of the same shapes: where every other set of functions within
    the stated accuracy gives these bits. A certain NaN is one for all of them.
    """

    o: NDArray[Any]
    lse: Float32
    o_certain: NDArray[np.bool_]
    lse_certain: NDArray[np.bool_]


def certain(parts: Any, recipe: str | MergeRecipe, ulps: int = 4) -> Certain:
    """Merge ``parts`` as :func:`ringspec.merges.merge` does, and mark the elements whose bits any functions would give.

    ``ulps``, 1 to 1024: how far an elementary function may be from the correctly rounded result, in units in the last
    place; sigmoid and logsigmoid may also be composed of such functions. 4 covers NumPy's (of 8 million
    float32 arguments each, exp was at most 2 away and log at most 4). Functions must be exact where the result is, such as exp(0) = 1, and may
    return 0 for a subnormal result. Division counts as such a function, and is exact for a power of two. Not covered: a
    GPU's approximate exponential for large arguments, whose error grows with the argument, and contraction by a compiler.

    An element that is not certain may have the same bits nevertheless, because intervals ignore that the operands of
    repeated operations depend on each other. Bits are certain for the recipe: whether the implementation has them, too,
    depends on the recipe being right.

    Raises OptionError for other ``ulps``, and the errors of ``merge``.

    >>> import numpy as np
    >>> o, lse = np.ones((1, 4, 2, 8), np.float32), np.zeros((1, 4, 2), np.float32)
    >>> found = certain([(o, lse), (3 * o, lse - 100)], "vllm_merge")
    >>> float(found.o[0, 0, 0, 0]), bool(found.o_certain.all()), bool(found.lse_certain.all())
    (1.0, True, True)
    """
    if type(ulps) is not int or not 1 <= ulps <= MOST_ULPS:
        raise OptionError(f"ulps as 1 to {MOST_ULPS}", shown(ulps), "write ulps=4")
    o, lse = merge(parts, recipe, ROUNDED)
    with quiet():
        all_o, all_lse, own = evaluate(parts, recipe, within(ulps))
    return Certain(o, lse, _agree(all_o, o, own), _agree(all_lse, lse, "float32"))


def _agree(found: Any, bits: NDArray[Any], own: str) -> NDArray[np.bool_]:
    """Tell where both ends of ``found``, stored as ``own``, have the bits ``bits``; an array has no ends but itself."""
    ends = (found.low, found.high) if isinstance(found, Interval) else (found, found)
    low, high = (same_bits(store(end, own) if own != "float32" else end, bits) for end in ends)
    certain: NDArray[np.bool_] = low & high
    return certain
