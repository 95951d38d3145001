"""Small problems for several kinds of cases, each used in many rings.

A ring is a number of workers and a layout. Results of attention do not depend on the ring, so they are computed once,
in exact arithmetic, for all rings. In this module a problem is a :class:`~ringspec.vectors.format.case.Case`. A target
is the program under test; its claims say what it supports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.compare.explain import explain_all
from ringspec.conformance.cases.calls import call_of, passes_for, way, with_claimed_passes
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.judge.bounds import compared
from ringspec.conformance.report.records import Finding
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.truth.exactly import Truth, Wanted, attention
from ringspec.vectors.catalogue import build
from ringspec.vectors.catalogue.build import coins, put
from ringspec.vectors.format.case import Case, CaseFormats, Ring
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.format.requires import requires
from ringspec.vectors.generate import arguments_of, tensors_of_case

Tensors = dict[str, NDArray]
TOKENS, HEAD_DIM = 48, 64
RINGS = (
    (1, "contiguous"),
    *((w, layout) for layout in ("contiguous", "striped", "zigzag") for w in (2, 3, 4)),
)
FORMATS, STATISTICS = ("float64", "float32", "bfloat16", "float16"), ("float64", "float32")
PARTIAL_SUMS = ("sinks", "bias")
DTYPES = ("bf16", "f32", "fp16", "f64")
SHORT_SEGMENTS = tuple(i // 5 % 3 for i in range(TOKENS))
USUAL_DTYPES = ("bf16", "f32")
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (17, 0)},
    "two-sided-window": {"window": (9, 4)},
    "documents": {"causal": True, "cu_seqlens": (0, 13, 14, 37, TOKENS)},
    "segments": {"segments_q": SHORT_SEGMENTS, "segments_k": SHORT_SEGMENTS},
    "bounds": {
        "bound_min": tuple(max(0, i - 20) for i in range(TOKENS)),
        "bound_max": tuple(min(TOKENS, i + 1 + i % 7) for i in range(TOKENS)),
    },
    "dense": {
        "mask": coins(
            128, 1, 2, TOKENS, TOKENS, patches=tuple(put(True, 0, None, i, i) for i in range(TOKENS))
        )
    },
}  # fmt: skip
FEW_RINGS = ((1, "contiguous"), (2, "contiguous"), (3, "striped"), (4, "zigzag"))


def few_rings(dtype: str) -> tuple[tuple[int, str], ...]:
    """Return a few rings as (workers, layout): four for bfloat16 and float32, two for other formats."""
    return FEW_RINGS if dtype in USUAL_DTYPES else FEW_RINGS[1::2]


def drawn(name: str, dtype: str, *, backward: bool = True, **rest: Any) -> Case:
    """Make a problem that is not divided among workers yet, by default with S = 48 and D = Dv = 64.

    Its inputs depend only on ``name``; they are numbers of six bits, which every format holds. Keywords are those of
    ``ringspec.vectors.catalogue.build.case``.

    >>> drawn("example", "f32", causal=True).requires["masks"]
    ('causal',)
    """
    passes = ("forward", "backward") if backward else ("forward",)
    sizes = {"S": TOKENS, "D": HEAD_DIM} | rest
    made = build.case(f"conformance/{name}", "", "", dtype="bf16", passes=passes, **sizes)
    used = build.DTYPES[dtype]
    formats = CaseFormats(used.inputs, used.inputs, used.statistics)
    made = dataclasses.replace(made, formats=formats)
    return dataclasses.replace(made, requires=requires(made))


def dealt(case: Case, id: str, workers: int, layout: str = "contiguous") -> Case:
    """Divide a problem among the workers of a ring; the layout 'table' is that of :func:`shuffled`."""
    assert case.shape is not None
    if layout == "table":
        return with_table(case, id, shuffled(case.shape.Sq, workers))
    return over(case, id, Ring(workers, layout))


def with_table(case: Case, id: str, table: tuple[tuple[int, ...], ...]) -> Case:
    """Divide a problem among workers by a layout table, which has the tokens of worker r in row r."""
    return over(case, id, Ring(len(table), "table", table_q=table, table_k=table))


def over(case: Case, id: str, ring: Ring) -> Case:
    made = dataclasses.replace(case, id=id, operation="ring", ring=ring, requires={})
    return dataclasses.replace(made, requires=requires(made))


def shuffled(length: int, workers: int) -> tuple[tuple[int, ...], ...]:
    """Return a layout table [W, n] in which a worker's tokens follow each other in steps of 5, modulo ``length``.

    >>> shuffled(6, 2)
    ((0, 5, 4), (3, 2, 1))
    """
    tokens = [5 * t % length for t in range(length)]
    assert len(set(tokens)) == length
    n = length // workers
    return tuple(tuple(tokens[r * n : (r + 1) * n]) for r in range(workers))


class Keyed:
    """A hashable wrapper of a case, for the keys of caches."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __hash__(self) -> int:
        return hash((self.case.id, self.case.inputs.seed))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyed) and self.case == other.case


def tensors_of(case: Case) -> Tensors:
    """Return the tensors of a problem, cached.

    Their names begin with ``in``, ``layout``, ``position``, ``out`` (correct results) and ``scale`` (row scales).
    """
    return evaluated(Keyed(case))


@lru_cache(maxsize=24)
def evaluated(key: Keyed) -> Tensors:
    """Compute the tensors of a problem; all rings with the same problem share its correct results."""
    case = key.case
    truth = truth_of(problem_of(case)) if case.operation == "ring" else None
    return tensors_of_case(case, truth=truth)


def problem_of(case: Case) -> Keyed:
    """Remove formats and ring from a problem, because its exact results do not depend on them.

    With sinks or a bias the ring stays, because each worker returns its part of the gradients of sinks and bias.
    """
    exact = CaseFormats("float64", "float64", "float64")
    bare = dataclasses.replace(case, id="", requires={}, formats=exact)
    if any(name in case.inputs.tensors for name in PARTIAL_SUMS):
        return Keyed(bare)
    return Keyed(dataclasses.replace(bare, operation="attention", ring=None))


@lru_cache(maxsize=24)
def truth_of(key: Keyed) -> Truth:
    """Compute the correct results in global order, rounded to every format, and their row scales."""
    asked = arguments_of(key.case, inputs_of(key.case))
    return attention(*asked, Wanted(FORMATS, STATISTICS, scales=True))


def tables_of(tensors: Tensors) -> Tensors:
    """Return the layout tables of 'q' and 'k', int64 [W, n]; W = 1 if the problem is not divided among workers."""
    if "layout.q" in tensors:
        return {"q": tensors["layout.q"], "k": tensors["layout.k"]}
    q, k = tensors["in.q"], tensors["in.k"]
    return {"q": np.arange(q.shape[2])[None], "k": np.arange(k.shape[2])[None]}


def side_of(name: str) -> str:
    """Return whether the rows of a result are queries ('q') or keys ('k')."""
    return "k" if name in ("dk", "dv") else "q"


@dataclass(frozen=True)
class Seen:
    """The problems of one case, their calls and their results, all in the same order, and the claims of the target."""

    claims: Capabilities
    cases: tuple[Case, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Outputs, ...]


# The additional check of a probe. It returns (message, picture); the message is empty if nothing is wrong.
Look = Callable[[Seen], tuple[str, dict[str, Any] | None]]


def run_case(
    id: str,
    reason: str,
    cases: Sequence[Case],
    look: Look | None = None,
    *,
    only_backward: bool = False,
    **rest: Any,
) -> RunCase:
    """Make one case from one or several problems; the results of each are compared with its own correct results.

    A target is called for the passes that it claims; with ``only_backward``, it claims the case only if it claims the
    backward pass. The ring has a circulation and a direction that the target claims, because no result depends on them.
    """
    needs = needs_of(cases)

    def claimed(claims: Capabilities) -> str | None:
        passes = passes_for(cases[0], claims)
        if only_backward and "backward" not in passes:
            passes = cases[0].passes
        return why_not(claims, needs | {"passes": passes})

    def make(claims: Capabilities) -> list[Call]:
        return [call_for(claims, case) for case in cases]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        return judged(Seen(claims, tuple(cases), tuple(calls), tuple(outputs)), look)

    return RunCase(id, reason, needs, make, judge, claimed=claimed, **rest)


def judged(seen: Seen, look: Look | None = None) -> Judgement:
    """Compare the results of each problem with its correct results, then apply the check ``look`` to all results."""
    findings: list[Finding] = []
    for case, call, output in zip(seen.cases, seen.calls, seen.outputs, strict=True):
        findings += compared(seen.claims, case, tensors_of(case), call, output)
    message, picture = ("", None) if look is None else look(seen)
    passed = not message and all(finding.kind == "ok" for finding in findings)
    return Judgement(passed, tuple(findings), message, None if passed else picture)


def judged_each(name: Callable[[Case, Call], str], seen: Seen) -> Judgement:
    """Compare the results of each problem with its correct results; the message describes the first wrong one.

    ``name(case, call)``: how the message begins, such as "With causal True" or "In bfloat16".
    """
    findings: list[Finding] = []
    message = ""
    for case, call, output in zip(seen.cases, seen.calls, seen.outputs, strict=True):
        made = compared(seen.claims, case, tensors_of(case), call, output)
        findings += made
        if not message and any(finding.kind != "ok" for finding in made):
            message = f"{name(case, call)}: {explain_all(made)}"
    return Judgement(not message, tuple(findings), message)


def call_for(claims: Capabilities, case: Case) -> Call:
    """Make the call of a problem, with passes, circulation and direction that the target claims."""
    tensors = tensors_of(case)
    call = call_of(case, tensors)
    if case.operation == "ring":
        call = dataclasses.replace(call, **way(claims))
    return with_claimed_passes(call, case, claims, lambda: tensors)


def needs_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return what the problems need together; their needs may differ only in masks and features."""
    needs = dict(cases[0].requires)
    for name in ("circulation", "direction"):
        needs.pop(name, None)
    for name in ("masks", "features"):
        every = {one for case in cases for one in case.requires.get(name, ())}
        if name in needs:
            needs[name] = tuple(sorted(every))
    return needs
