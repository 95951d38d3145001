"""Cases whose errors are looked at as a whole: are they the rounding noise that the recipe predicts?

Each case is one problem of a few hundred tokens with flat and peaked rows. Besides the bound of each row,
the statistical tests of :mod:`ringspec.compare.statistics` are made on o, lse, dq, dk and dv, over all of a
tensor and over its heads, workers, ring steps and other parts. A kernel that declares its recipe must
show no more noise than that; of one that declares none only systematic errors are looked for.

The false-alarm rate of all these cases of a run together is at most
:data:`ringspec.compare.statistics.RATE` = 1e-9: a case has its share of it, and a test its share of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ringspec.compare.inference import infer
from ringspec.compare.noise import Geometry, Noise, predict
from ringspec.compare.statistics import (
    RATE,
    Allowance,
    Test,
    alarms,
    allowance_for,
    errors_of,
    examine,
    told,
)
from ringspec.compare.strata import strata_for
from ringspec.conformance.calls import ExpectedTensor, backward_alone, call_of, forward_alone
from ringspec.conformance.capabilities import Capabilities, why_not
from ringspec.conformance.cases import Judgement, Outputs, RunCase
from ringspec.conformance.declared import declared_recipe
from ringspec.conformance.dense import Dense, Seeds, truth_of
from ringspec.conformance.drawing import Keyed, dealt, needs_of
from ringspec.conformance.golden import passes_for, way
from ringspec.conformance.judging import bounds_of, findings_of
from ringspec.conformance.noise_of import (
    OF_KEYS,
    Named,
    Question,
    geometry_of,
    in_order,
    question_of,
)
from ringspec.conformance.precision import recipe_for
from ringspec.conformance.target import Call, PerWorker
from ringspec.formats import round_to
from ringspec.recipes import Recipe
from ringspec.vectors.case import Case
from ringspec.vectors.catalogue import build
from ringspec.vectors.catalogue.build import numbers, times
from ringspec.vectors.generate import spec_problem
from ringspec.vectors.inputs import inputs_of
from ringspec.vectors.ringwise import slots_of

TOKENS, HEAD_DIM = 384, 64
MOST_CASES = 64  # each has this share of the false-alarm rate of a run
PEAKED = 4.0  # q of a quarter of the rows is multiplied by it
BITS = {"bf16": 8, "fp16": 10, "f32": 20}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "documents": {"causal": True, "cu_seqlens": (0, 90, 96, 250, TOKENS)},
}
HEADS = 2
# Mask, W, layout, key heads. Recipes do not say how dk and dv of a group's query heads are added: inside a
# tile, or after each head's result was rounded. Where heads share keys these two are judged as undeclared.
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
SYSTEMATIC = ("finite", "slope", "mean", "temperature")  # all that an undeclared sum allows
READ_DELTA = ("dq", "dk")
NAMED = 4  # alarms that a message tells
KEPT = 40  # alarms that a report keeps


def cases() -> Iterator[RunCase]:
    """The cases of profile 'noise', in their order.

    >>> made = list(cases())
    >>> made[0].id, len(made) <= MOST_CASES
    ('noise/causal-contiguous-w1-bf16', True)
    """
    for dtype in BITS:
        for mask, workers, layout, kv_heads in FEW_RINGS if dtype == "fp16" else RINGS:
            id = f"noise/{mask}-{layout}-w{workers}-{dtype}"
            case = problem(mask, dtype, kv_heads=kv_heads)
            yield noise_case(id, dealt(case, id, workers, layout))


def problem(
    mask: str,
    dtype: str,
    *,
    tokens: int = TOKENS,
    head_dim: int = HEAD_DIM,
    heads: int = HEADS,
    kv_heads: int | None = None,
    seed: int = 0,
) -> Case:
    """Numbers within 2 of 0; every fourth run of 32 rows has large scores, and so peaked rows."""
    bits = BITS[dtype]
    draw: dict[str, Any] = {name: numbers(bits, 2 - bits) for name in ("k", "v", "dy")}
    peaked = tuple(times(PEAKED, None, None, (t, t + 32), None) for t in range(32, tokens, 128))
    return build.case(
        f"noise/{mask}-{dtype}-{tokens}" + (f"-{seed}" if seed else ""), "", "", dtype=dtype,
        S=tokens, D=head_dim, H=heads, Hkv=kv_heads or max(heads // 2, 1), q=numbers(bits, 2 - bits, patches=peaked), **draw, **MASKS[mask],
    )  # fmt: skip


def noise_call(
    id: str, dtype: str, workers: int, layout: str = "contiguous", mask: str = "full", **sizes: int
) -> Call:
    """The call of such a problem, for a program of one's own.

    >>> noise_call("mine", "bf16", 4, "zigzag", "causal").worker("q", 0).shape
    (1, 2, 96, 64)
    """
    return call_of(dealt(problem(mask, dtype, **sizes), id, workers, layout), {})


def noise_case(id: str, case: Case) -> RunCase:
    """One such case."""

    def claimed(claims: Capabilities) -> str | None:
        return why_not(claims, needs_of([case]) | {"passes": passes_for(case, claims)})

    def make(claims: Capabilities) -> list[Call]:
        call = dataclasses.replace(call_of(case, {}), **way(claims))
        passes = passes_for(case, claims)
        if passes == case.passes:
            return [call]
        if passes == ("forward",):
            return [forward_alone(call)]
        return [backward_alone(call, case, forward_tensors(case, call))]

    def judge(claims: Capabilities, calls: Sequence[Call], outputs: Sequence[Outputs]) -> Judgement:
        return judged(claims, case, calls[0], outputs[0])

    return RunCase(
        id,
        "Flat and peaked rows: the errors of whole tensors are the rounding noise of the recipe.",
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
    """What is known of a problem, whatever the ring: its truth, row scales, directions."""

    dense: Dense
    question: Question


@lru_cache(maxsize=4)
def known(key: Keyed) -> Known:
    """The truth of a problem without its ring."""
    inputs = inputs_of(key.case)
    checked = spec_problem(key.case, inputs)
    seeds = Seeds(np.asarray(inputs["dy"], dtype=np.float64))
    call = call_of(dealt(key.case, key.case.id, 1), {})
    dense = truth_of(checked, seeds, limit=0)
    return Known(dense, question_of(call, dense.values))


def without_ring(case: Case) -> Keyed:
    return Keyed(dataclasses.replace(case, id="", operation="attention", ring=None, requires={}))


def forward_tensors(case: Case, call: Call) -> dict[str, Any]:
    """o and lse of the whole problem as the backward alone is given them, dealt to the workers."""
    truth = known(without_ring(case)).question.truth
    assert call.index_q is not None
    formats = {"o": call.formats["outputs"], "lse": call.formats["statistics"]}
    return {
        f"out.{name}.{storage}": slots_of(round_to(truth[name], storage), call.index_q, 2, 0.0)
        for name, storage in formats.items()
    }


def judged(claims: Capabilities, case: Case, call: Call, outputs: Outputs) -> Judgement:
    """Rows within their bounds, and errors that are noise."""
    truth = known(without_ring(case))
    expected = {name: expected_tensor(name, truth.dense, call) for name in truth.question.truth}
    findings = findings_of(bounds_of(claims, call), expected, outputs, claims)
    seen = examined(claims, truth.question, call, outputs)
    within = all(finding.kind == "ok" for finding in findings)
    message = "" if not seen.alarms else seen.message()
    return Judgement(within and not seen.alarms, findings, message, noise=seen.as_dict())


def expected_tensor(name: str, dense: Dense, call: Call) -> ExpectedTensor:
    """The truth of one tensor as the workers hold it."""
    index = call.index_k if name in ("dk", "dv") else call.index_q
    assert index is not None
    storage = call.formats["statistics" if name == "lse" else "outputs"]

    def held(x: Any) -> PerWorker:
        return tuple(slots_of(x, index, 2, 0.0))

    values = dense.values[name]
    return ExpectedTensor(
        held(values), held(round_to(values, storage)), held(dense.scale[name]), tuple(index >= 0)
    )


@dataclasses.dataclass(frozen=True)
class Examined:
    """What the tests of one call gave.

    ``rms``: root mean square of error / predicted by tensor; ``alarms``: the tests that no correct
    kernel shows, of ``count`` that were made; ``inferred``: sentences about the recipe, where one was
    looked for.
    """

    recipe: Recipe
    declared: bool
    rms: dict[str, float]
    alarms: tuple[Test, ...]
    count: int
    inferred: tuple[str, ...] = ()

    def message(self) -> str:
        lines = [told(test) for test in self.alarms[:NAMED]]
        if len(self.alarms) > NAMED:
            lines.append(f"and {len(self.alarms) - NAMED} more tests")
        head = f"The errors are not the rounding noise of recipe {self.recipe.name}:"
        return "\n".join([head, *lines, *self.inferred])

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "recipe": self.recipe.name,
            "declared": self.declared,
            "rms": self.rms,
            "tests": self.count,
            "alarms": [told(test) for test in self.alarms[:KEPT]],
            "inferred": list(self.inferred),
        }


def examined(
    claims: Capabilities,
    question: Question,
    call: Call,
    outputs: Outputs,
    rate: float | None = None,
) -> Examined:
    """The tests of all tensors of an answer. ``rate``: false alarms of this call."""
    rate = RATE / MOST_CASES if rate is None else rate
    recipe, geometry = recipe_for(claims, call.formats), geometry_of(call)
    noise = predict(question.attention, recipe, geometry)
    got = in_order(call, outputs)
    errors = {name: errors_of(x, question.truth[name]) for name, x in got.items()}
    declared = declared_recipe(claims.recipe, call.formats["inputs"]) is not None
    rms = {name: rms_ratio(error, noise.sd[name]) for name, error in errors.items()}
    grouped = question.attention.q.shape[1] != question.attention.k.shape[1]
    strata = strata_for(geometry, question.attention.p, question.attention.k.shape[1])

    def tested(name: str, noise: Noise) -> list[Test]:
        told_of = declared and not (grouped and name in OF_KEYS)
        allowance = allowance_for(recipe, name, call.workers)
        if not told_of:
            allowance = widened(allowance, rms[name])
        made = examine(
            name, errors[name], question.truth[name], noise, strata[name], allowance=allowance,
            direction=question.directions[name],
        )  # fmt: skip
        return [test for test in made if told_of or test.name in SYSTEMATIC]

    by_name = {name: tested(name, noise) for name in errors}
    raised = alarms([test for tests in by_name.values() for test in tests], rate)
    if any(test.tensor in READ_DELTA for test in raised) and recipe.outputs != recipe.merge:
        # A backward may read o before its last rounding, which a recipe cannot say.
        unrounded = predict(question.attention, recipe.replace(outputs=recipe.merge), geometry)
        again = {name: tested(name, unrounded) for name in READ_DELTA if name in errors}
        if not alarms([test for tests in again.values() for test in tests], rate):
            by_name |= again
    tests = [test for made in by_name.values() for test in made]
    raised = alarms(tests, rate)
    words: tuple[str, ...] = ()
    if raised:
        words = inferred(errors, question, geometry, recipe)
    return Examined(recipe, declared, rms, raised, len(tests), words)


def rms_ratio(error: Any, sd: Any) -> float:
    """Root mean square of error / sd over the elements that have noise."""
    used = (sd > 0) & np.isfinite(error)
    return float(np.sqrt(np.mean((error[used] / sd[used]) ** 2))) if used.any() else 1.0


def widened(allowance: Allowance, ratio: float) -> Allowance:
    """For a kernel that declares no recipe: as much noise as it shows is its own."""
    return dataclasses.replace(allowance, high=max(allowance.high, 1.15 * ratio))


def inferred(
    errors: Named, question: Question, geometry: Geometry, recipe: Recipe
) -> tuple[str, ...]:
    return tuple(infer(errors, question.attention, geometry, recipe, predict).lines())
