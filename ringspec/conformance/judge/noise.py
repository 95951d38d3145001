"""Tests of whole tensors: are the errors of a result the rounding noise that a recipe predicts?

A recipe says where a kernel rounds, and to which format. A kernel that declares its recipe must show no more noise than
the recipe predicts. For a kernel that declares none, only systematic errors raise an alarm.

A recipe may leave two questions open. One is which maximum the kernel subtracts from the scores before it rounds P, the
softmax weights (``p_relative_to``). Each possible answer is called a reading of the recipe. The other is whether the
backward pass reads o before or after its last rounding. There is an alarm only if no plausible combination of answers
explains the errors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ringspec.compare.inference.infer import CONTRADICTION, EVEN, infer, score
from ringspec.compare.noise.predict import predict
from ringspec.compare.noise.problem import Geometry
from ringspec.compare.statistics.power import OPEN, UNDECLARED, Limits, Remembered, limits
from ringspec.compare.statistics.strata import strata_for
from ringspec.compare.statistics.tests import alarms, errors_of, examine, in_words
from ringspec.compare.statistics.types import Allowance, Test, allowance_for
from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.judge.noise_inputs import (
    Array,
    Question,
    geometry_of,
    in_order,
)
from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import declared_recipe
from ringspec.conformance.target.protocol import Call
from ringspec.formats import unit_roundoff
from ringspec.recipes import P_REFERENCES, Recipe
from ringspec.truth.dense import Named
from ringspec.truth.sharded import OF_KEYS

SYSTEMATIC = ("finite", "slope", "mean", "temperature")  # the tests that need no declared recipe
READ_DELTA = ("dq", "dk")
TILES = (128, 64, 32, 16)  # keys; tried for a kernel that declares no tile
NAMED = 4  # alarms in a message
KEPT = 40  # alarms in a report
FEW = 0.05  # fraction of the elements that the usual noise ignores
LEFT = 0.759  # mean square of a standard normal sample without the 5 % of largest magnitude


@dataclasses.dataclass(frozen=True)
class Examined:
    """The results of the tests of one call.

    ``recipe``: the declared recipe, or else that of the input format, in the reading that fits. ``rms``: root mean
    square of error / predicted noise, by tensor. ``alarms``: the failed tests. ``count``: the number of tests.
    ``inferred``: sentences about the arithmetic that the errors imply; empty if nothing was inferred. ``limits``: the
    smallest errors that these tests detect, by tensor; empty if there is an alarm.
    """

    recipe: Recipe
    declared: bool
    rms: dict[str, float]
    alarms: tuple[Test, ...]
    count: int
    inferred: tuple[str, ...] = ()
    limits: Mapping[str, Limits] = dataclasses.field(default_factory=dict)

    def message(self) -> str:
        lines = [in_words(test) for test in self.alarms[:NAMED]]
        if len(self.alarms) > NAMED:
            lines.append(f"and {len(self.alarms) - NAMED} more tests")
        head = f"The errors are not the rounding noise of recipe {self.recipe.name}:"
        return "\n".join([head, *lines, *self.inferred])

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a report."""
        return {
            "recipe": self.recipe.name,
            "declared": self.declared,
            "p_relative_to": self.recipe.p_relative_to if self.declared else None,
            "rms": self.rms,
            "tests": self.count,
            "alarms": [in_words(test) for test in self.alarms[:KEPT]],
            "inferred": list(self.inferred),
            "limits": {name: one.as_dict() for name, one in self.limits.items()},
        }


@dataclasses.dataclass(frozen=True)
class Answer:
    """The errors of one result and the other inputs of its tests.

    ``errors``: by tensor, in global token order. ``declared``: whether the recipe is declared. ``grouped``: whether
    query heads share key heads. ``rate``: probability of a false alarm in this call.
    """

    question: Question
    geometry: Geometry
    errors: Named
    workers: int
    declared: bool
    grouped: bool
    rate: float


def examined(
    claims: Capabilities,
    question: Question,
    call: Call,
    outputs: Outputs,
    rate: float,
    sure: bool = False,
) -> Examined:
    """Test all tensors of a result of ``call``.

    ``rate``: probability of a false alarm in this call. ``sure``: True if the result is known to be wrong because it
    exceeds the bounds of its rows; then only one reading of the recipe is tried.
    """
    got = in_order(call, outputs)
    errors = {name: errors_of(x, question.truth[name]) for name, x in got.items()}
    at = question.attention
    declared = declared_recipe(claims.recipe, call.formats["inputs"]) is not None
    grouped = at.q.shape[1] != at.k.shape[1]
    answer = Answer(question, geometry_of(call), errors, call.workers, declared, grouped, rate)
    recipe = recipe_for(claims, call.formats)
    first, *others = readings(recipe, longest_block(answer.geometry))
    margin = (OPEN if declared else UNDECLARED) if others else 1.0
    seen = under(answer, first, margin)
    if not seen.alarms:
        return seen
    likely = []
    if "o" in errors and not sure:
        likely = as_likely(answer, first, others, in_o(seen))
    told_of = seen
    for reading in likely:
        result = under(answer, reading, margin)
        if not result.alarms and (not declared or no_noisier(result, grouped)):
            return result
        if result.alarms and in_o(told_of) and not in_o(result):
            told_of = result  # this reading explains o, but not the fault elsewhere
    about = told_of.recipe.replace(
        tile_k=recipe.tile_k
    )  # a tile size that was tried is not declared
    return dataclasses.replace(told_of, inferred=inferred(answer, about))


def inferred(answer: Answer, recipe: Recipe) -> tuple[str, ...]:
    """Say in sentences how the kernel rounds, as its errors imply."""
    attention = answer.question.attention
    found = infer(answer.errors, attention, answer.geometry, recipe, predict)
    return tuple(found.lines(answer.declared))


def readings(recipe: Recipe, block: int) -> list[Recipe]:
    """List the readings of a recipe. The first subtracts the maximum of the block, as the specification does.

    ``block``: the number of keys in a block. If the recipe has no tile size, some readings have tiles smaller than a
    block. There a kernel that carries its running maximum from tile to tile subtracts another maximum in each tile.
    """
    narrow = unit_roundoff(recipe.p) > unit_roundoff("float32")
    if recipe.p_relative_to is not None or not narrow:
        return [recipe]
    whole = [recipe.replace(p_relative_to=x) for x in P_REFERENCES]
    if recipe.tile_k is not None:
        return whole
    tiles = [size for size in TILES if size < block]
    return whole + [
        recipe.replace(p_relative_to=x, tile_k=size) for x in ("running", "stale") for size in tiles
    ]


def longest_block(geometry: Geometry) -> int:
    """Return the largest number of keys on a worker."""
    return int(np.bincount(geometry.owner_k).max())


def in_o(seen: Examined) -> bool:
    """Tell whether a test of o raised an alarm."""
    return any(test.tensor == "o" for test in seen.alarms)


def as_likely(answer: Answer, first: Recipe, others: list[Recipe], of_o: bool) -> list[Recipe]:
    """Return the readings among ``others`` that may explain the errors of o, the most likely first.

    ``of_o``: whether o raised an alarm under ``first``. A reading is left out in two cases:

    - A known fault, partial results that are rounded to the narrow format of P, explains o better. The reading would excuse
      this fault.
    - The errors of o are less likely under the reading than under ``first``, by more than CONTRADICTION nats if ``of_o``,
      else EVEN nats. The reading predicts more noise than o has, and could excuse a fault of the backward pass.
    """
    error, narrow = answer.errors["o"], first.p
    faults = [
        first.replace(**dict.fromkeys(points, narrow))
        for points in (("block_o",), ("carried_o",), ("block_o", "carried_o"))
    ]
    known = [first, *others, *faults]
    sds = [predict(answer.question.forward, x, answer.geometry).sd["o"] for x in known]
    scores = [score(error, sd**2, sds[0])[1] for sd in sds]
    least = max(scores[0] - (CONTRADICTION if of_o else EVEN), *scores[len(others) + 1 :])
    order = sorted(range(1, len(others) + 1), key=lambda n: -scores[n])
    return [known[n] for n in order if scores[n] >= least]


def no_noisier(seen: Examined, grouped: bool) -> bool:
    """Tell whether the noise of a result is at most what a reading predicts.

    The tests raise alarms only if the noise is far above the prediction. For the first reading that is enough. Of
    several readings, however, the one that predicts the most noise could excuse errors that no reading explains.
    """
    return all(
        ratio <= allowance_for(seen.recipe, name).high
        for name, ratio in seen.rms.items()
        if not (grouped and name in OF_KEYS)
    )


def under(answer: Answer, recipe: Recipe, margin: float = 1.0) -> Examined:
    """Test all tensors under one reading of the recipe.

    ``margin``: factor of the smallest detected errors, above 1 if other readings are accepted as well.
    """
    attention = answer.question.attention
    noise = Remembered(predict(attention, recipe, answer.geometry))
    strata = strata_for(answer.geometry, attention.p, attention.k.shape[1])
    rms = {name: rms_ratio(error, noise.sd[name]) for name, error in answer.errors.items()}

    def of(name: str, noise: Remembered) -> list[Test]:
        made = examine(
            name, answer.errors[name], answer.question.truth[name], noise, strata[name],
            allowance=allowance_of(answer, recipe, name, noise),
            direction=answer.question.directions[name], merging=merging(answer, name),
        )  # fmt: skip
        return [test for test in made if strict(answer, name) or test.name in SYSTEMATIC]

    by_name = {name: of(name, noise) for name in answer.errors}
    raised = alarms([test for tests in by_name.values() for test in tests], answer.rate)
    if any(test.tensor in READ_DELTA for test in raised) and recipe.outputs != recipe.merge:
        # A backward pass may read o before its last rounding, which a recipe cannot express.
        unrounded = Remembered(
            predict(attention, recipe.replace(outputs=recipe.merge), answer.geometry)
        )
        again = {name: of(name, unrounded) for name in READ_DELTA if name in answer.errors}
        if not alarms([test for tests in again.values() for test in tests], answer.rate):
            by_name |= again
    tests = [test for made in by_name.values() for test in made]
    raised = alarms(tests, answer.rate)
    seen = {} if raised else limits_of(answer, recipe, noise, len(tests), margin)
    return Examined(recipe, answer.declared, rms, raised, len(tests), limits=seen)


def limits_of(
    answer: Answer, recipe: Recipe, noise: Remembered, tests: int, margin: float
) -> dict[str, Limits]:
    """Compute the smallest errors that the tests of each tensor detect.

    They are multiplied by ``margin``, except for lse.
    """
    question = answer.question

    def of(name: str) -> Limits:
        def widened(added: Array) -> Allowance:
            return allowance_of(answer, recipe, name, noise, added)

        return limits(
            name, question.truth[name], noise, noise.noise.before.get(name),
            allowance_of(answer, recipe, name, noise), question.directions[name],
            answer.rate / tests, widened=None if strict(answer, name) else widened,
            margin=1.0 if name == "lse" else margin,
        )  # fmt: skip

    return {name: of(name) for name in answer.errors}


def strict(answer: Answer, name: str) -> bool:
    """Tell whether a tensor must show no more noise than its recipe predicts."""
    return answer.declared and not (answer.grouped and name in OF_KEYS)


def allowance_of(
    answer: Answer, recipe: Recipe, name: str, noise: Remembered, added: Array | float = 0.0
) -> Allowance:
    """Return which deviations from the predicted noise are accepted in a tensor.

    If :func:`strict` is False, all the noise that the tensor shows is accepted, even with the error ``added`` to it.
    """
    allowance = allowance_for(recipe, name, answer.workers)
    if strict(answer, name):
        return allowance
    either = (answer.errors[name] + sign * added for sign in (1.0, -1.0))
    return widened(allowance, max(usual_ratio(error, noise.sd[name]) for error in either))


def merging(answer: Answer, name: str) -> Array:
    """Bound the error that W merges in float32 can add, whatever formula computes the merge weights.

    Weights exp(lse_n - lse) have the error of a rounded lse. The sigmoid form o - w (o - o_n) rounds at the magnitude
    of o or o_n, whichever is larger, even if w is 1.
    """
    return answer.workers * unit_roundoff("float32") * answer.question.sizes[name]


def rms_ratio(error: Any, sd: Any) -> float:
    """Return the root mean square of error / sd; elements whose predicted noise ``sd`` is 0 are left out."""
    used = (sd > 0) & np.isfinite(error)
    return float(np.sqrt(np.mean((error[used] / sd[used]) ** 2))) if used.any() else 1.0


def usual_ratio(error: Any, sd: Any) -> float:
    """Return the root mean square of error / sd, without the largest ratios (the fraction FEW).

    It is scaled to be 1 for normally distributed errors. Rows with one visible key have almost no predicted noise. A
    fault in such a row may be 10^10 standard deviations, and must not count as noise of the whole tensor.
    """
    used = (sd > 0) & np.isfinite(error)
    if not used.any():
        return 1.0
    square = (error[used] / sd[used]) ** 2
    least = np.sort(square)[: max(round((1 - FEW) * square.size), 1)]
    return float(np.sqrt(least.mean() / LEFT))


def widened(allowance: Allowance, ratio: float) -> Allowance:
    """Widen an allowance so that it accepts the noise of this kernel: ``ratio`` times the predicted noise."""
    return dataclasses.replace(allowance, high=max(allowance.high, 1.15 * ratio))
