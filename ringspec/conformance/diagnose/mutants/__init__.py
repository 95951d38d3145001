"""Known bugs of ring attention as small, named changes of the specification, called mutants.

The submodules :mod:`block` and :mod:`ring` compute a ring from functions that a bug can replace. :mod:`hooks` defines
these functions, and :mod:`mutant` the type of a bug. The ``*_bugs`` modules contain the bugs. Most bugs were reported
in public; the ``links`` of a bug lead to the reports.

>>> MUTANTS["stale-keys"].title
'every backward step uses the keys of step 0'
>>> MUTANTS["stale-keys"].links[0]
'https://github.com/huggingface/diffusers/issues/14265'
"""

from __future__ import annotations

from types import MappingProxyType

from ringspec.conformance.diagnose.mutants import (
    backward_bugs,
    dropout_bugs,
    empty_bugs,
    head_bugs,
    layout_bugs,
    lse_bugs,
    mask_bugs,
    merge_bugs,
    packing_bugs,
    precision_bugs,
    schedule_bugs,
    score_bugs,
    sink_bugs,
    travel_bugs,
)
from ringspec.conformance.diagnose.mutants.mutant import Mutant, MutantTarget, run_mutant

MODULES = (
    travel_bugs,
    schedule_bugs,
    layout_bugs,
    mask_bugs,
    packing_bugs,
    merge_bugs,
    lse_bugs,
    empty_bugs,
    backward_bugs,
    head_bugs,
    score_bugs,
    sink_bugs,
    dropout_bugs,
    precision_bugs,
)
MUTANTS: MappingProxyType[str, Mutant] = MappingProxyType(
    {one.id: one for module in MODULES for one in module.BUGS}
)

__all__ = ["MUTANTS", "Mutant", "MutantTarget", "run_mutant"]
