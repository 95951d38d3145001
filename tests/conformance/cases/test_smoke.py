"""The profile smoke: a ring of three workers or more is run where one is claimed."""

import pytest
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.suite import run

SMOKE = run_cases("smoke")


def wrong_from(fewest, **claims):
    """The reference, but the queries of worker 0 and 1 are exchanged in rings of so many workers and more."""

    def answer(call, result):
        if call.workers >= fewest and result.o is not None:
            result.o = [result.o[1], result.o[0], *result.o[2:]]

    return Wrong("float32", answer=answer, formats=("float32",), **claims)


def outcome_in_smoke(target):
    summary = run(target, SMOKE)
    return summary.exit_code, {record.id for record in summary.failures}


@pytest.mark.parametrize("workers", [(2, 3, 4), (2, 6), (1, 2, 8), None])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_smoke_fails_a_kernel_that_is_wrong_from_three_workers_on(workers, layout):
    claims = {"workers": workers, "layouts": (layout,), "features": (), "circulations": ("q",)}
    assert outcome_in_smoke(wrong_from(9, **claims)) == (0, set())
    code, failed = outcome_in_smoke(wrong_from(3, **claims))
    assert code == 1 and f"property/workers/causal-{layout}-f32" in failed


def test_smoke_fails_a_kernel_of_whole_tiles_that_is_wrong_from_three_workers_on():
    claims = {"workers": (2, 3, 4), "tokens_multiple": 128, "layouts": ("contiguous",)}
    assert outcome_in_smoke(wrong_from(9, **claims)) == (0, set())
    code, failed = outcome_in_smoke(wrong_from(3, **claims))
    readouts = {f"readout/{mask}-contiguous-kv" for mask in ("causal", "full")}
    assert code == 1 and failed == {"kernel-shape/float32-w4", *readouts}


def test_every_case_of_smoke_is_in_core():
    assert {case.id for case in SMOKE} <= {case.id for case in run_cases("core")}
