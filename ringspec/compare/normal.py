"""The standard normal distribution, for the tests of whole tensors and for the noise that they compare with.

SciPy is imported by the first call. Its special functions take as long to load as ringspec, and a run without a noise
case needs none of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def below(z: Array | float) -> Any:
    """Return P(N(0, 1) <= z), in the shape of ``z``."""
    from scipy import special

    return special.ndtr(z)


def outside(z: Array) -> Array:
    """Return P(|N(0, 1)| > |z|), in the shape of ``z``."""
    from scipy import special

    return special.erfc(np.abs(z) / np.sqrt(2.0))


def quantile(p: float) -> float:
    """Return the z below which a standard normal number is with probability ``p``.

    >>> quantile(0.5)
    0.0
    """
    from scipy import special

    return float(special.ndtri(p))
