"""Shrink a failing case of the operation 'context_parallel': fewer ranks, tokens, heads and terms that fail in the same way.

The scheme and the order of its axes stay. A smaller case is drawn anew, and accepted if all its wrong tensors were wrong
before, with the same kind of error. Documents and texts keep their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.scheme_list import SPLITS
from ringspec.conformance.cases.schemes import case_of
from ringspec.conformance.cases.splits import Split, width_for
from ringspec.conformance.reproduce.explicit import Explicit
from ringspec.conformance.reproduce.shrink import (
    SECONDS,
    Progress,
    Shrunk,
    Trial,
    limited,
    refuse,
    results,
    shrink,
)
from ringspec.conformance.run.call import Stop
from ringspec.conformance.target.cells import global_of
from ringspec.conformance.target.protocol import Call, Target
from ringspec.errors import RingspecError
from ringspec.vectors.format.case import CaseFormats

Named = tuple[str, Split]
# Terms that can be left out, each with those that need it.
OPTIONAL = (
    ("dlse",),
    ("sinks",),
    ("bias",),
    ("dropout_p", "dropout_seed", "keep"),
    ("window",),
    ("causal",),
)
OF_TOKENS = ("cu_seqlens", "cu_seqlens_k", "bias", "keep", "positions_q", "positions_k", "patches")


def shrink_case(
    target: Target, case: RunCase, seconds: float = SECONDS, progress: Progress | None = None
) -> Shrunk:
    """Find the simplest case or call that a target fails as it fails ``case``, of a scheme or of another operation."""
    search = shrink_scheme if is_scheme(case) else shrink
    return search(target, case, seconds, progress)


def is_scheme(case: RunCase) -> bool:
    """Tell whether a case splits attention by a scheme."""
    return bool(case.needs.get("operation") == "context_parallel")


def shrink_scheme(
    target: Target, case: RunCase, seconds: float = SECONDS, progress: Progress | None = None
) -> Shrunk:
    """Find the simplest case of the same scheme that a target fails in the same way; ``seconds`` limits the search.

    Raises OptionError for a case that passes, is not claimed, or fails otherwise than by wrong numbers.
    """
    begun = time.monotonic()
    reason = case.why_not(target.capabilities)
    if reason is not None:
        refuse(f"{case.id}, which the target does not claim ({reason})")
    split = next(one for one in SPLITS if one.id == case.id)
    split = replace(split, drawn_as=split.drawn_as or split.id)
    first = trial_of(target, split)
    if isinstance(first, Stop):
        refuse(
            f"{case.id}: {first.outcome}",
            "a case that fails by wrong numbers",
            "repair this failure first",
        )
    if not first.wrong:
        refuse(f"{case.id}, which passes: nothing to shrink")
    best, steps, trials, finished = first, list[str](), 0, True
    going = True
    while going and finished:
        going = False
        for name, smaller in reductions(split, target):
            if time.monotonic() > begun + seconds:
                finished = False
                break
            trials += 1
            if progress is not None:
                progress(trials, best.problem)
            with limited(target, begun + seconds - time.monotonic()):
                trial = trial_of(target, smaller)
            if not isinstance(trial, Stop) and trial.wrong and trial.wrong <= first.wrong:
                split, best, going = smaller, trial, True
                steps.append(name)
                break
    return Shrunk(
        case.id, first, best, tuple(steps), trials, time.monotonic() - begun, (), finished
    )


def trial_of(target: Target, split: Split) -> Trial | Stop:
    """Run a case and compare its results; return the Stop if there are no valid ones."""
    claims, case = target.capabilities, case_of(split)
    [made] = case.make(claims)
    call = replace(made, id=split.id.partition(" ")[0])
    try:
        outputs = results(target, call)
    except Stop as stop:
        return stop
    return Trial(problem_of(call), call, outputs, case.judge(claims, [call], [outputs]).findings)


def problem_of(call: Call) -> Explicit:
    """Return the problem of a call in global order."""
    tensors = {name: global_of(call, name) for name in call.tensors}
    formats = CaseFormats(**call.formats)
    return Explicit(
        call.operation, call.passes, formats, None, dict(call.terms), tensors, call.workers
    )


def reductions(split: Split, target: Target) -> Iterator[Named]:
    """Yield simpler cases that the target claims, those that leave out most first."""
    for name, smaller in candidates(split, width_for(split, target.capabilities)):
        try:
            reason = case_of(smaller).why_not(target.capabilities)
        except (RingspecError, AssertionError, ValueError):
            continue  # such a case does not exist
        if reason is None:
            yield name, smaller


def candidates(split: Split, width: int) -> Iterator[Named]:
    sizes, terms = dict(split.sizes), dict(split.terms)
    for number, (axis, size) in enumerate(split.mesh):
        for fewer in range(2, size):
            mesh = (*split.mesh[:number], (axis, fewer), *split.mesh[number + 1 :])
            for heads in fitting(sizes, fewer):
                yield f"{fewer} ranks on the axis {axis}", resized(split, heads, mesh=mesh)
    if sizes.get("B", 1) > 1:
        yield "one element of the batch", resized(split, sizes | {"B": 1})
    if not set(OF_TOKENS) & terms.keys() and not split.own.get("text"):
        for name in ("S", "Sk"):
            for fewer in sorted({sizes.get(name, 0) // 2, sizes.get(name, 0) - 1} - {0, -1}):
                yield f"{name} = {fewer}", resized(split, sizes | {name: fewer})
    for names in OPTIONAL:
        rest = {name: x for name, x in terms.items() if name not in names}
        if len(rest) < len(terms):
            yield f"no {names[0]}", replace(split, terms=rest, id=f"{split.id} without {names[0]}")
    for heads in fitting(sizes, 1):
        yield f"{heads['H']} heads", resized(split, heads)
    if "D" not in sizes:
        for narrower in (d for d in (1, 2, 4, 8) if d < width):
            yield f"D = {narrower}", resized(split, sizes | {"D": narrower})
    if split.layout not in (None, "contiguous", "zigzag_per_document"):
        yield "contiguous", replace(split, layout="contiguous", id=f"{split.id} contiguous")


def fitting(sizes: Mapping[str, int], unit: int) -> Iterator[dict[str, int]]:
    """Yield sizes with fewer heads, the fewest first: the same number of query heads for each key head, or one for one."""
    group = sizes["H"] // sizes["Hkv"]
    for kv_heads in range(1, sizes["Hkv"] + 1):
        for each in sorted({1, group}):
            smaller = dict(sizes) | {"H": kv_heads * each, "Hkv": kv_heads}
            if kv_heads * each % unit == 0 and (unit > 1 or smaller != dict(sizes)):
                yield smaller


def resized(split: Split, sizes: Mapping[str, int], **more: Any) -> Split:
    """Return a split with other sizes; its id, by which cases are cached, names them."""
    made = replace(split, sizes=sizes, **more)
    if "q_offset" in made.terms:  # the queries stay the last ones
        moved = made.terms["q_offset"] + sizes["Sk"] - split.sizes["Sk"]
        made = replace(made, terms={**made.terms, "q_offset": moved})
    if "sinks" in made.terms:
        made = replace(made, terms={**made.terms, "sinks": made.terms["sinks"][: sizes["H"]]})
    return replace(made, id=f"{split.id.split(' ')[0]} {sizes} {made.mesh} {sorted(made.terms)}")
