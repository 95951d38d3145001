"""zhuzilin's ring-flash-attention over the stand-in: dq of the variant ring is bfloat16 for float16 inputs.

Needs torch and the packages of its requirements file. Every failure is confirmed by ``by_hand_zhuzilin.py``, a program
without ringspec.
"""

import pytest
from conformance.targets.hand_checks import by_hand

from ringspec.conformance.cases import probes, properties
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import zhuzilin
from ringspec.errors import MissingPackageError


@pytest.mark.zhuzilin
@pytest.mark.slow
@pytest.mark.parametrize("words", [(2,), (3,), (2, "noise")])
def test_by_hand_dq_of_ring_has_the_precision_of_bfloat16_for_float16_inputs(words):
    found = by_hand("zhuzilin", "ring", "float16", *words)
    assert found["dq"]["finer_than_bfloat16"] == 0 and found["dq"]["error"] > 2**-10
    for name in ("o", "dk", "dv"):
        assert found[name]["finer_than_bfloat16"] > 0 and found[name]["error"] <= 2**-10, name


@pytest.mark.zhuzilin
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["zigzag", "stripe"])
def test_by_hand_the_other_variants_are_right_in_float16(variant):
    for name, one in by_hand("zhuzilin", variant, "float16", 2).items():
        assert one["finer_than_bfloat16"] > 0 and one["error"] <= 2**-10, name


@pytest.mark.zhuzilin
@pytest.mark.slow
def test_by_hand_ring_is_right_in_bfloat16():
    for name, one in by_hand("zhuzilin", "ring", "bfloat16", 2).items():
        assert one["error"] <= 2**-7, name


@pytest.mark.zhuzilin
@pytest.mark.slow
def test_the_suite_finds_only_this():
    try:
        target = zhuzilin.ring()
    except MissingPackageError as error:
        pytest.skip(str(error))
    cases = [*probes.cases(), *properties.cases()]
    names = ("probe/gradient-pattern/causal-contiguous-w2-*16", "property/workers/causal-*")
    try:
        summary = run(target, cases, only=names)
    finally:
        target.close()
    wrong = {one.id: one for one in summary.records if one.outcome == "mismatch"}
    assert list(wrong) == ["probe/gradient-pattern/causal-contiguous-w2-fp16"]
    (record,) = wrong.values()
    assert {one.tensor for one in record.findings if one.kind != "ok"} == {"dq"}
    assert sum(one.outcome == "pass" for one in summary.records) >= 3


@pytest.mark.parametrize("variant", zhuzilin.FUNCTIONS)
def test_no_variant_claims_windows_or_one_worker(variant):
    claims = zhuzilin.claims(variant)
    assert "window" not in claims.masks and claims.workers == (2, 3, 4)
    assert claims.only_causal == (variant in ("zigzag", "stripe", "zigzag-varlen"))
