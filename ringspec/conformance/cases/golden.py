"""Golden vectors (stored problems with their correct results) as cases of a run.

The ids are those of the golden sets. Profile 'core' runs the core set. 'full' adds the kernel set, whose expected
values are read from the cache or derived, and those cases of the set merge whose partial results a call can express. It also
adds the cases of dense attention, distributed over several workers. Withdrawn cases are left out, and so are schedules, which no target computes.

A target is the program under test, with claims that say what it supports. If it claims only the forward pass, it is
called only for that pass. If it claims only the backward pass, it gets the correctly rounded o and lse. Dense attention
runs on one worker, where the layouts in :data:`SAME_ON_ONE_WORKER` are equal, so it is called in any of them that the
target claims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from ringspec.conformance.cases.calls import (
    Tensors,
    call_of,
    passes_for,
    way,
    with_claimed_passes,
)
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.judge.bounds import compared
from ringspec.conformance.judge.scales import truth_text, with_scales
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.case import Case, Ring
from ringspec.vectors.format.requires import requires
from ringspec.vectors.generate import tensors_of_case
from ringspec.vectors.sets.cache import tensors_of
from ringspec.vectors.sets.stored import open_set

Load = Callable[[], Tensors]
SMOKE = (
    "attention/plain",
    "attention/float32",
    "ring/contiguous-causal-w2",
    "ring/contiguous-w2",
    "ring/striped-causal-w2",
    "ring/zigzag-causal-w2",
    "ring/float32-zigzag-w4",
    "kernel-shape/contiguous-causal-w2",
    "kernel-shape/contiguous-w2",
    "kernel-shape/float32-causal-w2",
    "kernel-shape/contiguous-causal-w4",
    "kernel-shape/contiguous-w3",
    "kernel-shape/striped-causal-w3",
    "kernel-shape/zigzag-causal-w4",
    "kernel-shape/float32-w4",
    "merge/two-parts",
)
RESHARDED = (2, 3, 4)
OTHER_PARTS = ("lse_base", "empty_lse", "unnormalised", "garbage")
SAME_ON_ONE_WORKER = ("contiguous", "striped", "table", "zigzag")


def cases(profile: str) -> list[RunCase]:
    """Return the golden cases of a profile, 'smoke', 'core' or 'full'."""
    core = open_set("core")
    ids = SMOKE if profile == "smoke" else core.ids
    chosen = [case for case in map(core.case, ids) if is_asked(case)]
    made = [
        golden_case(case, partial(core.tensors, case.id), partial(tensors_of, core, case.id))
        for case in chosen
    ]
    if profile == "full":
        for case in filter(is_asked, open_set("kernel")):
            made.append(golden_case(case, *[partial(kernel_tensors, case.id)] * 2))
        merges = open_set("merge")
        for case in filter(is_expressible, merges):
            made.append(golden_case(case, *[partial(merges.tensors, case.id)] * 2))
        for dealt in resharded(chosen):
            made.append(golden_case(dealt, *[partial(tensors_of_case, dealt)] * 2))
    return made


def is_asked(case: Case) -> bool:
    return case.operation != "schedule" and case.withdrawn is None


def is_expressible(case: Case) -> bool:
    """Tell whether the parts of a merge are normalised and finite, with natural lse, of which -inf marks an empty one."""
    return is_asked(case) and not {*case.requires} & {*OTHER_PARTS}


@lru_cache(maxsize=2)
def kernel_tensors(id: str) -> Tensors:
    """Return the tensors of a kernel-set case, with all rows and row scales.

    They are cached, because both the call and the judge need them.
    """
    kernel = open_set("kernel")
    return with_scales(kernel.case(id), tensors_of(kernel, id))


def resharded(cases: Sequence[Case]) -> list[Case]:
    """Distribute cases of dense attention over 2, 3 and 4 workers in contiguous blocks, if the lengths allow it."""
    dealt = []
    for case in cases:
        if case.operation != "attention" or case.shape is None:
            continue
        for workers in RESHARDED:
            if case.shape.Sq % workers == 0 and case.shape.Sk % workers == 0:
                id = f"resharded/{case.id.replace('/', '-')}-w{workers}"
                ring = Ring(workers, "contiguous")
                made = dataclasses.replace(case, id=id, operation="ring", ring=ring)
                dealt.append(dataclasses.replace(made, requires=requires(made)))
    return dealt


def golden_case(case: Case, stored: Load, whole: Load) -> RunCase:
    """Make one golden case.

    ``stored`` returns its tensors as stored, ``whole`` returns them with all rows.
    """

    def make(claims: Capabilities) -> list[Call]:
        call = call_of(case, stored())
        if case.operation == "attention":
            call = dataclasses.replace(
                call, layout=layout_on_one_worker(case, claims) or call.layout, **way(claims)
            )
        return [with_claimed_passes(call, case, claims, whole)]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        findings = compared(claims, case, stored(), calls[0], outputs[0])
        return Judgement(all(finding.kind == "ok" for finding in findings), findings)

    return RunCase(
        case.id,
        case.reason,
        needs_of(case),
        make,
        judge,
        flags=case.flags,
        rules=case.rules,
        truth=truth_text(case),
        claimed=partial(why_not_claimed, case),
    )


def needs_of(case: Case) -> dict[str, Any]:
    """Return what a case requires of a target; dense attention is a ring of one worker."""
    needs = dict(case.requires)
    if case.operation == "attention":
        needs |= {"workers": 1, "tokens_per_worker": needs["lengths"]}
    return needs


def why_not_claimed(case: Case, claims: Capabilities) -> str | None:
    """Return the first reason why a target does not claim a case; None if it claims the case.

    A target that claims only one pass needs to claim only what that pass requires.
    """
    needs = needs_of(case) | {"passes": passes_for(case, claims)}
    if case.operation == "attention" and layout_on_one_worker(case, claims) is None:
        return f"layout {SAME_ON_ONE_WORKER[0]}"
    if needs["passes"] == ("forward",):
        needs["features"] = tuple(name for name in needs.get("features", ()) if name != "dlse")
    return why_not(claims, needs)


def layout_on_one_worker(case: Case, claims: Capabilities) -> str | None:
    """Return a claimed layout that keeps the order of tokens on one worker; None if there is none."""
    assert case.shape is not None
    even = case.shape.Sq % 2 == 0 and case.shape.Sk % 2 == 0  # zigzag has two chunks
    fits = [name for name in SAME_ON_ONE_WORKER if name in claims.layouts]
    return next((name for name in fits if even or name != "zigzag"), None)
