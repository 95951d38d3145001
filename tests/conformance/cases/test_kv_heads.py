"""A target that divides heads among workers claims which numbers of heads it takes (``kv_heads_multiple``)."""

import json

import pytest

from ringspec.conformance.adapters import wire
from ringspec.conformance.cases import edges, properties, readout
from ringspec.conformance.target.capabilities import Capabilities, capabilities_from, why_not
from ringspec.conformance.target.protocol import Garbage
from ringspec.errors import OptionError

RING = {"operation": "ring", "passes": ("forward",)}
CLAIMS = Capabilities(workers=(3, 4), kv_heads_multiple="workers", features=("scale", "softcap"))


@pytest.mark.parametrize(
    ("multiple", "workers", "heads", "ratio", "claimed"),
    [
        (1, 3, 4, 4, True),
        (2, 3, 4, 2, True),
        (2, 3, 4, 4, False),  # one head of k and v
        ("workers", 3, 6, 2, True),
        ("workers", 3, 4, 1, False),
        ("workers", 2, 4, 1, True),
        ("workers", 4, 8, 4, False),
    ],
)
def test_a_case_whose_key_heads_cannot_be_divided_is_not_claimed(
    multiple, workers, heads, ratio, claimed
):
    needs = RING | {"workers": workers, "heads": heads, "head_ratio": ratio}
    reason = why_not(Capabilities(kv_heads_multiple=multiple), needs)
    assert (reason is None) == claimed
    assert claimed or f"{heads // ratio} heads of k and v" in reason


def test_a_merge_has_no_heads_of_k_and_v():
    claims = Capabilities(operations=("merge",), kv_heads_multiple=2)
    assert why_not(claims, {"operation": "merge", "passes": ("forward",), "heads": 3}) is None


@pytest.mark.parametrize("multiple", [0, -2, True, 2.0, "heads", None])
def test_another_value_is_refused(multiple):
    with pytest.raises(OptionError):
        Capabilities(kv_heads_multiple=multiple)
    with pytest.raises(Garbage):
        wire.claims_from({"name": "x", "capabilities": {"kv_heads_multiple": multiple}}, "")


def test_the_claim_goes_through_json():
    assert capabilities_from(json.loads(json.dumps(CLAIMS.as_dict()))) == CLAIMS


@pytest.mark.parametrize("family", [edges, properties, readout])
def test_cases_made_for_a_target_have_heads_that_it_can_divide(family):
    """W is at least 3 in every call, so the default of two heads would not do."""
    wanted = (
        "edges/softcap/contiguous",
        "property/workers/causal-contiguous",
        "readout/causal-contiguous",
    )
    calls = [
        call
        for case in family.cases()
        if case.id.startswith(wanted) and case.why_not(CLAIMS) is None
        for call in case.make(CLAIMS)
    ]
    assert {3, 4} & {call.workers for call in calls}
    for call in calls:
        assert call.worker("k", 0).shape[1] % call.workers == 0, call.id


def test_a_readout_of_entries_with_one_head_each_is_not_claimed():
    (case,) = (one for one in readout.cases() if one.id == "readout/batches-contiguous")
    assert case.why_not(CLAIMS) == "1 head of k and v, not a multiple of 3"
    assert case.why_not(Capabilities(workers=(3,))) is None
