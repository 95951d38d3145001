"""xfuser's USP over stand-ins: which of its targets are wrong, and what they claim.

Needs torch, triton and xfuser; see its requirements file. Every failure is confirmed by ``by_hand_xfuser.py``, a program
without ringspec.
"""

import tomllib
from pathlib import Path

import pytest
from conformance.targets.hand_checks import by_hand

from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import xfuser_usp
from ringspec.errors import MissingPackageError

BF16, FP16 = 2**-7, 2**-10
CAUSAL, WINDOW = "probe/pattern/causal-contiguous-*", "probe/pattern/window-contiguous-*"


@pytest.mark.xfuser
@pytest.mark.slow
@pytest.mark.parametrize("size", [(), ("noise",)], ids=["small", "noise"])
def test_by_hand_a_window_goes_to_each_block_of_the_ring_without_its_distance(size):
    """The ranks of the first ring coordinate, which have no earlier block, have the right o; with noise, the size is
    that of noise/window-contiguous-w4-bf16."""
    found = by_hand("xfuser", "fa", 2, 2, "bfloat16", "window", *size)
    assert all(max(one["errors"]) > 0.1 for one in found.values())
    assert all(error <= BF16 for error in found["o"]["errors"][:2])


@pytest.mark.xfuser
@pytest.mark.slow
def test_by_hand_a_window_is_right_with_ulysses_alone():
    found = by_hand("xfuser", "fa", 2, 1, "bfloat16", "window")
    assert list(found) == ["o"] and all(error <= BF16 for error in found["o"]["errors"])


@pytest.mark.xfuser
@pytest.mark.slow
def test_by_hand_fa3_is_right_only_without_a_mask():
    for name, one in by_hand("xfuser", "fa3", 2, 2, "bfloat16", "full").items():
        assert all(error <= BF16 for error in one["errors"]), name
    for mask in ("causal", "window"):
        for name, one in by_hand("xfuser", "fa3", 2, 2, "bfloat16", mask).items():
            assert max(one["errors"]) > 0.1, (mask, name)


@pytest.mark.xfuser
@pytest.mark.slow
def test_by_hand_dq_has_the_precision_of_bfloat16_for_float16_inputs():
    found = by_hand("xfuser", "fa", 1, 3, "float16", "causal")
    assert found["dq"]["finer_than_bfloat16"] == 0 and min(found["dq"]["errors"]) > FP16
    for name in ("o", "dk", "dv"):
        assert found[name]["finer_than_bfloat16"] > 0, name
        assert all(error <= FP16 for error in found[name]["errors"]), name


@pytest.mark.xfuser
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["long", "long-fa3", "usp-flash", "usp-sdpa"])
def test_causal_is_right_but_with_fa3_and_a_window_is_wrong(variant):
    try:
        target = xfuser_usp.target(variant)
    except MissingPackageError as error:
        pytest.skip(str(error))
    try:
        records = run(target, run_cases("core"), only=(CAUSAL, WINDOW)).records
    finally:
        target.close()
    outcomes = {one.id: one.outcome for one in records if one.outcome != "not claimed"}
    assert outcomes
    for id, outcome in outcomes.items():
        wrong = "window" in id or variant == "long-fa3"
        assert outcome == ("mismatch" if wrong else "pass"), id


def test_each_variant_has_an_entry_point_and_only_the_class_a_backward_pass():
    data = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))
    points = data["project"]["entry-points"]["ringspec.targets"]
    for name, one in xfuser_usp.VARIANTS.items():
        value = f"{xfuser_usp.__name__}:{name.replace('-', '_')}"
        assert points[f"xfuser-{name}"] == value
        claims = xfuser_usp.claims(name)
        assert ("ring-backward" in claims.operations) == name.startswith("long"), name
        assert ("scale" in claims.features) == name.startswith("long"), name
        # RuntimeState refuses these backends with a ring.
        assert (one.ring == "none") == (one.kernel in ("SDPA", "SDPA_MATH")), name
    with pytest.raises(AttributeError, match="no attribute zigzag"):
        getattr(xfuser_usp, "zigzag")  # noqa: B009
