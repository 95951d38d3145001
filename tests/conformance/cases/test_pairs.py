"""Core has no holes between features: every two values of claims that can meet do meet in some case."""

import hashlib
import math

import pytest
from conformance.wrong_targets import Wrong, like
from pair_coverage import FACTORS, IMPOSSIBLE, NONE, OF_RINGS, met, named, possible, values_of

from ringspec.conformance.cases import pairs
from ringspec.conformance.cases.golden import needs_of
from ringspec.conformance.cases.pair_problem import case_of
from ringspec.conformance.cases.pair_rows import ROWS as ROWS_AS_CLAIMS
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import (
    CIRCULATIONS,
    FEATURES,
    FORMATS,
    LAYOUTS,
    MASKS,
    OPERATIONS,
    Capabilities,
    why_not,
)
from ringspec.conformance.target.results import fingerprint
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load
from ringspec.vectors.catalogue import catalogue

EVERYTHING = REFERENCES["float64"].capabilities
GOLDEN = [case for case in catalogue("core") if case.operation != "schedule"]
ROWS = [case_of(row, f"pairs/{n:03}") for n, row in enumerate(ROWS_AS_CLAIMS)]
CASES = pairs.cases()


def test_the_factors_are_those_of_the_claims():
    assert FACTORS["operation"] == OPERATIONS
    assert FACTORS["layout"] == LAYOUTS
    assert set(FACTORS["circulation"]) == set(CIRCULATIONS)
    assert set(FACTORS["format"]) == set(FORMATS)
    assert set(FACTORS["mask"]) == {"none", *MASKS}
    assert set(FACTORS["feature"]) == set(FEATURES)


def test_core_has_every_pair_of_claims_that_can_meet():
    found = set().union(*map(met, [*GOLDEN, *ROWS]))
    assert named(possible() - found) == []


def test_without_a_row_the_pairs_that_it_alone_has_are_named():
    found = set().union(*map(met, ROWS[:-1]))
    formats_of_merge = {pair for pair in possible() if ("operation", "merge") in pair}
    missing = named(possible() - formats_of_merge - found)
    assert missing and all(" with " in text for text in missing)


def test_no_row_has_a_pair_that_is_said_to_be_impossible():
    impossible = {
        frozenset((a, b)) for a, b in IMPOSSIBLE if isinstance(a, tuple) and isinstance(b, tuple)
    }
    for case in [*GOLDEN, *ROWS]:
        for one in case.passes:
            values = values_of(case, one)
            both = [pair for pair in impossible if pair <= values]
            assert not both, (case.id, both)


def test_every_value_of_a_row_changes_its_result():
    for row, case in zip(ROWS_AS_CLAIMS, ROWS, strict=True):
        values = set().union(*(values_of(case, one) for one in case.passes))
        for kind, names in (("mask", row.masks), ("feature", row.features)):
            assert {name for factor, name in values if factor == kind} - {"none"} == set(names)


POSITIONS = (("feature", "positions"), ("feature", "q-offset"))
NARROW = {
    "a plain kernel": Capabilities(
        layouts=("contiguous", "zigzag"), circulations=("kv",), directions=(1,), workers=(2, 4),
        masks=("causal", "window"), features=("sinks", "softcap", "dlse"),
        formats=("bfloat16", "float32"), head_ratios=(1, 4),
    ),
    "a kernel that is always causal": Capabilities(
        layouts=("contiguous", "striped"), workers=(2, 3, 4), only_causal=True,
        masks=("causal", "documents"), features=("bias", "q-offset"), formats=("bfloat16",),
    ),
    "a kernel of tables": Capabilities(
        layouts=("table",), circulations=("q",), masks=("segments", "dense", "bounds"),
        features=("padding-slots", "empty-rows", "dropout", "positions"), head_ratios=(2,),
    ),
    "a block": Capabilities(
        operations=("block-forward", "block-backward"), masks=("causal", "bias-minus-infinity"),
        features=("bias", "positions", "unequal-lengths"), formats=("float16", "float32"),
    ),
}  # fmt: skip


def claimed_pairs(claims):
    """The possible pairs of the values that a target claims."""
    values = {
        "operation": claims.operations,
        "workers": claims.workers or FACTORS["workers"],
        "layout": claims.layouts,
        "circulation": claims.circulations or CIRCULATIONS,
        "direction": claims.directions or (1, -1),
        "format": claims.formats,
        "head_ratio": claims.head_ratios or FACTORS["head_ratio"],
        "mask": claims.masks if claims.only_causal else ("none", *claims.masks),
        "feature": claims.features,
    }
    if not any(name.startswith("ring-") for name in claims.operations):
        values |= dict.fromkeys(OF_RINGS, ())
    reads_positions = "dropout" in claims.features  # where no mask does
    without = set() if reads_positions else {frozenset((NONE, one)) for one in POSITIONS}
    return {
        pair
        for pair in possible() - without
        if all(value in values[factor] for factor, value in pair)
    }


@pytest.mark.parametrize("who", NARROW)
def test_a_target_of_few_claims_gets_every_pair_of_them(who):
    claims = NARROW[who]
    golden = [case for case in GOLDEN if why_not(claims, needs_of(case)) is None]
    rows = [
        pairs.fitted_case(n, claims) for n, case in enumerate(CASES) if case.why_not(claims) is None
    ]
    found = set().union(*map(met, [*golden, *rows]))
    assert named(claimed_pairs(claims) - found) == []


@pytest.mark.parametrize("who", NARROW)
def test_a_case_asks_nothing_that_is_not_claimed_and_none_asks_the_same_twice(who):
    claims = NARROW[who]
    kept = [case for case in CASES if case.why_not(claims) is None]
    assert 2 <= len(kept) <= len(CASES)
    asked = set()
    for case in kept:
        needs = case.needs_of(claims)
        assert why_not(claims, needs) is None
        asked.add(repr(sorted(needs.items())))
    assert len(asked) == len(kept)


@pytest.mark.parametrize(
    "recipe",
    ["float64", "bf16", pytest.param("fp16_partials", marks=pytest.mark.slow), "nki_low"],
)
def test_the_reference_passes_all_pairs(recipe):
    summary = run(REFERENCES[recipe], CASES)
    assert summary.claimed == len(CASES) >= 30
    assert [(r.id, r.message) for r in summary.failures] == []


def test_core_and_full_have_the_pairs_and_smoke_does_not():
    ids = {case.id for case in CASES}
    assert ids <= {case.id for case in run_cases("core")}
    assert not ids & {case.id for case in run_cases("smoke")}


def test_a_default_scale_is_no_power_of_two():
    for case in ROWS:
        assert math.frexp(case.terms["scale"])[0] != 0.5, case.id


def without_scale(call, result):
    if result.dq is not None:
        result.dq = [like(x, load(x) / call.terms["scale"]) for x in result.dq]


def counted_twice(call, result):
    if result.dq is not None:
        result.dq = [like(x, load(x) * 2) for x in result.dq]


@pytest.mark.parametrize(
    ("answer", "golden", "pair"),
    [
        (without_scale, "scale-missing-in-dq", "scale-missing-in-dq"),
        (counted_twice, "scale-missing-in-dq", None),  # D = 4: the scale is 1/2
    ],
)
def test_a_missing_scale_is_told_apart_from_a_gradient_that_counts_twice(answer, golden, pair):
    cases = [case for case in run_cases("core") if case.id in ("attention/causal", "pairs/002")]
    summary = run(Wrong(answer=answer), cases, diagnose=Diagnoser())
    names = [record.diagnosis["id"] for record in summary.records]
    assert names == [golden, pair]


def test_inputs_of_pairs_do_not_change(truth_on_demand):
    digest = hashlib.sha256()
    for case in CASES[::9]:
        for call in case.make(EVERYTHING):
            digest.update(f"{case.id} {fingerprint(call)}\n".encode())
    assert digest.hexdigest()[:16] == "4448230ab318dfc3"
