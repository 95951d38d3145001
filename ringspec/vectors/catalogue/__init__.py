"""All golden cases, in four sets: core, kernel, merge and cp.

>>> [case.id for case in catalogue("core")][:2]
['attention/plain', 'attention/causal']
"""

from __future__ import annotations

import functools
import importlib
from types import MappingProxyType

from ringspec.errors import OptionError, nearest, shown
from ringspec.vectors.format.case import Case

SET_VERSIONS = MappingProxyType({"core": "1.0", "kernel": "1.1", "merge": "1.0", "cp": "1.0"})
# The modules of each set, which make all their cases when they are imported: a program reads one set, or none.
SETS = {
    "core": (
        "masks", "features", "rings", "ring_features", "parts", "adversarial", "numerals", "kernel_shapes",
    ),
    "kernel": ("kernels", "kernel_tiles"),
    "merge": ("merges",),
    "cp": ("splits", "split_pairs"),
}  # fmt: skip


@functools.cache
def catalogue(name: str) -> tuple[Case, ...]:
    """Return all cases of the set ``name`` (a key of :data:`SET_VERSIONS`), with ``requires`` and without ``digests``.

    Raises :class:`~ringspec.errors.OptionError` for another name.
    """
    if name not in SETS:
        raise OptionError(
            "the name of a set", shown(name), nearest(name, SETS), code="unknown-name"
        )
    modules = [importlib.import_module(f"{__name__}.{module}") for module in SETS[name]]
    return tuple(case for module in modules for case in module.CASES)
