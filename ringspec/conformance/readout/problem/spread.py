"""Spread a small problem over large tiles, for kernels whose token count must be a multiple of, say, 128.

The problem's tokens lie ``spread`` slots apart, with other tokens between them. These other keys have the score
FAR * scale with every query, so their weight is exactly 0, and the other queries have dy = 0. The results of the problem's
tokens are therefore the same as without the other tokens. The last dimension of q and k makes these scores: it is 1 in
every query, 0 in the problem's keys and FAR in the other keys.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ringspec.problem.model import Array

# Every input format holds it; times any usual scale, or its square, it is beyond the range of exp.
FAR = -16384.0


def with_mark(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Set the last dimension of q to 1 and that of k to 0, in inputs [W, heads, n, dim]."""
    found = {name: x.copy() for name, x in inputs.items()}
    found["q"][..., -1], found["k"][..., -1] = 1.0, 0.0
    return found


def spread_out(inputs: Mapping[str, Array], spread: int) -> dict[str, Array]:
    """Put the tokens of inputs [W, heads, n, dim] ``spread`` slots apart: [W, heads, n * spread, dim]."""
    found = {}
    for name, x in inputs.items():
        workers, heads, slots, dim = x.shape
        between = np.zeros((workers, heads, slots, spread, dim))
        between[..., -1] = {"q": 1.0, "k": FAR}.get(name, 0.0)
        between[..., 0, :] = x
        found[name] = between.reshape(workers, heads, slots * spread, dim)
    return found
