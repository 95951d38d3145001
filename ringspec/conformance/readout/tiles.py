"""A problem in whole tiles, for kernels that take multiples of many tokens alone.

The tokens of the problem lie ``spread`` slots apart. The keys between them have the score FAR * scale with every query, so
that exp gives 0; the queries between them have dy = 0. Each result of the problem's tokens is then what it is without the
others. One more dimension holds these scores: it is 1 in every query and 0 in the problem's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ringspec.problem.model import Array

# Every input format holds it; times any usual scale, or its square, it is beyond the range of exp.
FAR = -16384.0


def with_mark(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Give q, k, v, dy [W, heads, n, dim] the last dimension that tells a problem's keys from those between them."""
    found = {name: x.copy() for name, x in inputs.items()}
    found["q"][..., -1], found["k"][..., -1] = 1.0, 0.0
    return found


def spread_out(inputs: Mapping[str, Array], spread: int) -> dict[str, Array]:
    """Put inputs that have the mark, [W, heads, n, dim], ``spread`` slots apart: [W, heads, n spread, dim]."""
    found = {}
    for name, x in inputs.items():
        workers, heads, slots, dim = x.shape
        between = np.zeros((workers, heads, slots, spread, dim))
        between[..., -1] = {"q": 1.0, "k": FAR}.get(name, 0.0)
        between[..., 0, :] = x
        found[name] = between.reshape(workers, heads, slots * spread, dim)
    return found
