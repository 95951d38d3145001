"""Cases that test whether the errors of whole tensors are the rounding noise that the recipe predicts.

A recipe says where a kernel rounds, and to which format. Each case is one problem of a few hundred tokens; the softmax
is flat in some rows and peaked in others. Each row must be within its error bound. In addition, the statistical tests
of :mod:`ringspec.compare.statistics.tests` run on o, lse, dq, dk and dv: on each whole tensor and on its parts, such as
heads, workers and ring steps. A kernel that declares its recipe must show no more noise than predicted. For a kernel
that declares none, only systematic errors raise an alarm.

The smallest relative error that a case detects falls with the number of elements. The case with the most elements,
:data:`MANY_HEADS`, therefore has many heads. Its sequence is short and it has no backward pass, so that a target takes
about as long for it as for any other noise case.

The probability that any noise case of a run raises a false alarm is at most
:data:`ringspec.compare.statistics.types.RATE` = 1e-9. Each case gets an equal part of it, divided among its tests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from ringspec.compare.statistics.types import RATE
from ringspec.conformance.cases.calls import (
    ExpectedTensor,
    call_of,
    passes_for,
    way,
    with_claimed_passes,
)
from ringspec.conformance.cases.model import Judgement, Outputs, RunCase
from ringspec.conformance.cases.problems import Keyed, dealt, needs_of
from ringspec.conformance.judge.bounds import bounds_of, findings_of
from ringspec.conformance.judge.noise import examined
from ringspec.conformance.judge.noise_inputs import Question, question_of
from ringspec.conformance.target.capabilities import Capabilities, why_not
from ringspec.conformance.target.protocol import Call
from ringspec.formats import round_to
from ringspec.truth.expected import Expected, expected_of
from ringspec.truth.sharded import OF_KEYS, Tables, per_worker, slots_of
from ringspec.vectors.catalogue import build
from ringspec.vectors.catalogue.build import numbers, times
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.generate import arguments_of

TOKENS, HEAD_DIM = 384, 64
MOST_CASES = 64  # the false-alarm rate of a run is divided by it
PEAKED = 4.0  # factor of q in a quarter of the rows
BITS = {"bf16": 8, "fp16": 10, "f32": 20}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "documents": {"causal": True, "cu_seqlens": (0, 90, 96, 250, TOKENS)},
}
HEADS = 2
# Mask, W, layout, key heads. A recipe does not say how dk and dv are summed over the query heads of a group: inside a
# tile, or after rounding the result of each head. With grouped heads, dk and dv are judged as if no recipe were declared.
RINGS = (
    ("causal", 1, "contiguous", 2),
    ("causal", 2, "zigzag", 1),
    ("causal", 3, "striped", 1),
    ("causal", 4, "contiguous", 2),
    ("causal", 4, "zigzag", 2),
    ("full", 2, "contiguous", 1),
    ("full", 8, "contiguous", 2),
    ("window", 4, "contiguous", 2),
    ("documents", 3, "contiguous", 2),
)
FEW_RINGS = (("causal", 4, "zigzag", 2), ("full", 2, "contiguous", 1))
MANY_HEADS = "noise/many-heads-bf16"
# Chosen to detect a relative error of 1e-4 in o, for a kernel that declares its recipe.
SHORT, MANY = 128, 64  # tokens, heads
# Mask, W, layout; a target runs the first that it claims.
RINGS_IN_ORDER = tuple(
    (mask, workers, layout)
    for mask in ("causal", "full")
    for workers in (2, 4, 1, 8)
    for layout in ("zigzag", "contiguous", "striped")
)


def cases() -> Iterator[RunCase]:
    """Yield the cases of profile 'noise', in their order.

    >>> made = list(cases())
    >>> made[0].id, len(made) <= MOST_CASES
    ('noise/causal-contiguous-w1-bf16', True)
    """
    for dtype in BITS:
        for mask, workers, layout, kv_heads in FEW_RINGS if dtype == "fp16" else RINGS:
            id = f"noise/{mask}-{layout}-w{workers}-{dtype}"
            case = problem(mask, dtype, kv_heads=kv_heads)
            yield noise_case(id, dealt(case, id, workers, layout))
    yield first_claimed(MANY_HEADS, many_heads())


def many_heads() -> list[RunCase]:
    """Make the case of many heads in all rings; all of them have the same id."""
    problems = {mask: many_heads_problem(mask) for mask in ("causal", "full")}
    return [
        noise_case(MANY_HEADS, dealt(problems[mask], MANY_HEADS, workers, layout))
        for mask, workers, layout in RINGS_IN_ORDER
    ]


def many_heads_problem(mask: str, seed: int = 0) -> Case:
    return problem(mask, "bf16", tokens=SHORT, heads=MANY, kv_heads=MANY, seed=seed, backward=False)


def first_claimed(id: str, every: Sequence[RunCase]) -> RunCase:
    """Make one case of several variants: a target runs the first that it claims."""

    def chosen(claims: Capabilities) -> RunCase:
        return next((case for case in every if case.why_not(claims) is None), every[0])

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        return chosen(claims).judge(claims, calls, outputs)

    return dataclasses.replace(
        every[0],
        id=id,
        make=lambda claims: chosen(claims).make(claims),
        judge=judge,
        claimed=lambda claims: chosen(claims).why_not(claims),
        narrowed=lambda claims: chosen(claims).needs,
    )


def problem(
    mask: str,
    dtype: str,
    *,
    tokens: int = TOKENS,
    head_dim: int = HEAD_DIM,
    heads: int = HEADS,
    kv_heads: int | None = None,
    seed: int = 0,
    backward: bool = True,
) -> Case:
    """Make a problem with inputs between -2 and 2. In 32 of 128 rows q is 4 times larger, so the softmax is peaked.

    ``backward``: whether the problem has a backward pass.
    """
    bits = BITS[dtype]
    names = ("k", "v", "dy") if backward else ("k", "v")
    passes = ("forward", "backward") if backward else ("forward",)
    draw: dict[str, Any] = {name: numbers(bits, 2 - bits) for name in names}
    peaked = tuple(times(PEAKED, None, None, (t, t + 32), None) for t in range(32, tokens, 128))
    return build.case(
        f"noise/{mask}-{dtype}-{tokens}" + (f"-{seed}" if seed else ""), "", "", dtype=dtype, passes=passes,
        S=tokens, D=head_dim, H=heads, Hkv=kv_heads or max(heads // 2, 1), q=numbers(bits, 2 - bits, patches=peaked), **draw, **MASKS[mask],
    )  # fmt: skip


def noise_call(
    id: str, dtype: str, workers: int, layout: str = "contiguous", mask: str = "full", **sizes: Any
) -> Call:
    """Make only the call of a noise case, for examples and measurements.

    >>> noise_call("mine", "bf16", 4, "zigzag", "causal").worker("q", 0).shape
    (1, 2, 96, 64)
    """
    return call_of(dealt(problem(mask, dtype, **sizes), id, workers, layout), {})


def noise_case(id: str, case: Case) -> RunCase:
    """Make the noise case of one problem, which is already divided among the workers of a ring."""

    def claimed(claims: Capabilities) -> str | None:
        return why_not(claims, needs_of([case]) | {"passes": passes_for(case, claims)})

    def make(claims: Capabilities) -> list[Call]:
        call = dataclasses.replace(call_of(case, {}), **way(claims))
        return [with_claimed_passes(call, case, claims, lambda: forward_tensors(case, call))]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        return judged(claims, case, calls[0], outputs[0])

    return RunCase(
        id,
        "Flat and peaked softmax rows: the errors of whole tensors are the rounding noise of the recipe.",
        needs_of([case]),
        make,
        judge,
        rules=("NUM-2",),
        flags=("partials-rounded-to-16-bit",),
        truth="float64, sampled rows checked against exact values",
        claimed=claimed,
    )


@dataclasses.dataclass(frozen=True)
class Known:
    """What is known of a problem before any call; it does not depend on the ring.

    ``dense``: correct results and row scales. ``question``: inputs of the statistical tests.
    """

    dense: Expected
    question: Question


@lru_cache(maxsize=4)
def known(key: Keyed) -> Known:
    """Compute the correct results and the inputs of the statistical tests for a problem."""
    call = call_of(dealt(key.case, key.case.id, 1), {})
    dense = expected_of(*arguments_of(key.case, inputs_of(key.case)), limit=0)
    return Known(dense, question_of(call, dense.values))


def without_ring(case: Case) -> Keyed:
    return Keyed(dataclasses.replace(case, id="", operation="attention", ring=None, requires={}))


def forward_tensors(case: Case, call: Call) -> dict[str, Any]:
    """Return o and lse of the whole problem, divided among the workers, for a call of only the backward pass."""
    truth = known(without_ring(case)).question.truth
    assert call.index_q is not None
    formats = {"o": call.formats["outputs"], "lse": call.formats["statistics"]}
    return {
        f"out.{name}.{storage}": slots_of(round_to(truth[name], storage), call.index_q, 2, 0.0)
        for name, storage in formats.items()
    }


def judged(claims: Capabilities, case: Case, call: Call, outputs: Outputs) -> Judgement:
    """Check that rows are within their bounds and that the errors are rounding noise."""
    truth = known(without_ring(case))
    expected = expected_tensors(truth.dense, call)
    findings = findings_of(bounds_of(claims, call), expected, outputs, claims)
    within = all(finding.kind == "ok" for finding in findings)
    seen = examined(claims, truth.question, call, outputs, RATE / MOST_CASES, sure=not within)
    message = "" if not seen.alarms else seen.message()
    return Judgement(within and not seen.alarms, findings, message, noise=seen.as_dict())


def expected_tensors(dense: Expected, call: Call) -> dict[str, ExpectedTensor]:
    """Return the correct values of each result, divided among the workers."""
    assert call.index_q is not None and call.index_k is not None
    tables = Tables(call.index_q, call.index_k)
    values, scales = (per_worker(x, tables, 0.0) for x in (dense.values, dense.scale))
    expected = {}
    for name, x in values.items():
        rounded = round_to(x, call.formats["statistics" if name == "lse" else "outputs"])
        real = (call.index_k if name in OF_KEYS else call.index_q) >= 0
        expected[name] = ExpectedTensor(tuple(x), tuple(rounded), tuple(scales[name]), tuple(real))
    return expected
