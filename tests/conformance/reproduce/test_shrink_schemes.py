"""Cases of schemes are made smaller: the scheme stays, the failure stays, and what is not needed goes."""

import dataclasses

import pytest
from independent.cp_target import right, target
from refusals import refuses

from ringspec.cli.views.shrink import lines
from ringspec.conformance.cases.scheme_list import SPLITS
from ringspec.conformance.cases.schemes import cases
from ringspec.conformance.cases.splits import dtype_for
from ringspec.conformance.reproduce.shrink_schemes import candidates, is_scheme, shrink_scheme
from ringspec.errors import OptionError

CASES = {case.id: case for case in cases()}


@pytest.mark.parametrize("fault,id,least", [
    ("dropout-by-slots", "dropout/ring-w3", {"W": 2, "H": 1, "D": 1}),
    ("right-aligned-triangle", "dcp/mtp-w2", {"W": 2, "D": 1}),
    ("first-of-the-batch", "batch/dcp-w2", {"W": 2}),
])  # fmt: skip
def test_a_smaller_case_of_the_same_scheme_fails_in_the_same_tensors(fault, id, least):
    case = CASES[f"scheme/{id}"]
    found = shrink_scheme(target(fault), case, 30.0)
    first, last = found.first, found.last
    assert found.finished and found.steps and last.wrong <= first.wrong
    assert last.call.scheme == first.call.scheme
    assert [axis for axis, _ in last.call.mesh] == [axis for axis, _ in first.call.mesh]
    shape = last.problem.shape
    small = {"W": last.problem.workers, "S": shape.Sq, "H": shape.H, "D": shape.D}
    assert {name: small[name] for name in least} == least
    if id == "dcp/mtp-w2":  # the queries are still the last ones
        assert last.call.position_q.max() == last.call.position_k.max()
    if fault == "first-of-the-batch":
        assert shape.B > 1
    told = found.as_dict()["call"]
    assert told["scheme"] == first.call.scheme and len(told["heads_q"]) == last.problem.workers
    assert any(f"{first.call.scheme}, mesh" in line for line in lines(found))


@pytest.mark.parametrize("id", ["ulysses/gqa-w4", "batch/usp-w6"])
def test_a_smaller_case_has_the_format_of_the_original(id):
    claims = dataclasses.replace(right.capabilities, formats=("float32", "float64", "bfloat16"))
    split = next(one for one in SPLITS if one.id == f"scheme/{id}")
    smaller = [one for _, one in candidates(split, 16)]
    assert len(smaller) >= 4
    assert {dtype_for(one, claims) for one in smaller} == {dtype_for(split, claims)}


def test_a_case_that_passes_is_refused():
    case = CASES["scheme/ring/backward-w2"]
    assert is_scheme(case)
    with refuses(OptionError, match="which passes: nothing to shrink"):
        shrink_scheme(right, case)
