"""Known bugs of ring attention as small, named mutations of the specification.

Read :mod:`hooks` for the pieces of a ring that a bug can replace, :mod:`block` and :mod:`ring` for the
program that is made of them, :mod:`mutant` for what a mutant is; the ``*_bugs`` modules are the bugs.
Most are drawn from public reports, which they link.

>>> MUTANTS["stale-keys"].title
'backward differentiates every step against step-0 keys'
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
from ringspec.conformance.diagnose.mutants.same import same_on
from ringspec.conformance.target.protocol import Call

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


def applicable(call: Call) -> list[Mutant]:
    """The mutants that can change a result of this call."""
    return [one for one in MUTANTS.values() if one.applies(call)]


__all__ = ["MUTANTS", "Mutant", "MutantTarget", "applicable", "run_mutant", "same_on"]
