"""All golden cases, in three sets: core, kernel and merge.

>>> [case.id for case in catalogue("core")][:2]
['attention/plain', 'attention/causal']
"""

from __future__ import annotations

import functools
from types import MappingProxyType

from ringspec.errors import OptionError, nearest, shown
from ringspec.vectors.catalogue import (
    adversarial,
    features,
    kernel_shapes,
    kernel_tiles,
    kernels,
    masks,
    merges,
    numerals,
    parts,
    ring_features,
    rings,
)
from ringspec.vectors.format.case import Case

SET_VERSIONS = MappingProxyType({"core": "1.0", "kernel": "1.1", "merge": "1.0"})
CORE = (masks, features, rings, ring_features, parts, adversarial, numerals, kernel_shapes)
SETS = {"core": CORE, "kernel": (kernels, kernel_tiles), "merge": (merges,)}


@functools.cache
def catalogue(name: str) -> tuple[Case, ...]:
    """Return all cases of the set ``name`` (a key of :data:`SET_VERSIONS`), with ``requires`` filled in and without ``digests``.

    Raises :class:`~ringspec.errors.OptionError` for another name.
    """
    if name not in SETS:
        raise OptionError(
            "the name of a set", shown(name), nearest(name, SETS), code="unknown-name"
        )
    return tuple(case for module in SETS[name] for case in module.CASES)
