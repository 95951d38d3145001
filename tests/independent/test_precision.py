"""Precision faults of the NumPy ring: none is given another fault's name, and most are named or inferred."""

import functools

import numpy as np
import pytest
from independent.judged import RIGHTLY, said_of
from independent.numpy_faults import FAULTS, RIGHT, cut, odd, stochastic
from independent.numpy_ring import bfloat16
from independent.numpy_target import NumpyRing

from ringspec.conformance.cases import noise as noise_cases
from ringspec.conformance.cases.noise import noise_call
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.match import diagnose
from ringspec.conformance.run.call import outputs_of
from ringspec.conformance.run.case import run_case

# Faults that were given another fault's name while the right program fitted as well.
ONCE_MISNAMED = ("p-odd", "ds-twice", "delta-16", "dy-o-16", "gradients-cut", "m-16", "scores-fp16")
NAMED = {
    "p-cut": "truncated-p",
    "p-cut-in-backward": "truncated-p",
    "results-cut": "truncated-results",
    "carried-o-16": "merge-in-16-bit",
    "block-o-16": "partials-rounded-to-16-bit",
    "carried-dq-16": "dq-accumulated-in-16-bit",
    "lse-16": "lse-in-16-bit",
    "exp-16": "statistics-in-16-bit",
    "statistics-16": "statistics-in-16-bit",
}
FORMS = {
    "p-cut": "",
    "p-cut-in-backward": "in the backward pass only",
    "delta-16": "only the sum of dy * o is rounded",
    "dy-o-16": "only the products dy * o are rounded",
    "gradients-cut": "only the gradients are truncated",
    "carried-o-16": "only o is rounded, between steps",
    "exp-16": "only the exponentials are rounded",
}


@pytest.fixture(scope="module")
def diagnosed():
    """The diagnosis of a fault on a call of 192 tokens, alarm or none."""
    call = noise_call("names", "bf16", 4, "contiguous", "causal", tokens=192, head_dim=32)
    found = {}

    def of(fault):
        if fault not in found:
            target = NumpyRing(fault)
            outputs = outputs_of(target.run(call), call, target.capabilities)
            found[fault] = diagnose(target.capabilities, [call], [outputs])
        return found[fault]

    return of


def some(faults, slow):
    """The faults as parameters; those in ``slow`` resemble another."""
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in faults]


@pytest.mark.parametrize("fault", some(ONCE_MISNAMED, ("m-16",)))
def test_a_fault_is_not_given_another_faults_name(diagnosed, fault):
    named = diagnosed(fault).named
    assert named is None or named.id in (FAULTS | RIGHT)[fault].ids


@pytest.mark.parametrize("fault", NAMED)
def test_a_precision_fault_of_independent_code_is_named(diagnosed, fault):
    found = diagnosed(fault)
    assert found.named is not None and found.named.id == NAMED[fault]
    assert found.named.distance < 0.7 * found.right.distance


@pytest.mark.parametrize("fault", FORMS)
def test_the_form_of_a_precision_fault_is_told(diagnosed, fault):
    assert diagnosed(fault).named.how.split(";")[0] == FORMS[fault]


@pytest.mark.parametrize("kernel", some(["right", "one-state", "p-wide", "ds-wide"], ("p-wide",)))
def test_a_right_kernel_of_any_family_gets_no_name(diagnosed, kernel):
    found = diagnosed(kernel)
    assert found.named is None and found.right.fits
    assert found.lines()[0].endswith("they differ from the correct results by rounding only")


CASES = ("ring/contiguous-causal-w4", "ring/zigzag-causal-w3", "ring/window-causal-w4", "ring/documents-w2",
         "noise/full-contiguous-w2-bf16", "noise/documents-contiguous-w3-bf16")  # fmt: skip


@functools.cache
def core():
    return run_cases("core")


@pytest.mark.parametrize("id", some(CASES, ("noise/full-contiguous-w2-bf16",)))
def test_the_ring_without_a_fault_passes(id):
    [case] = [case for case in core() if case.id == id]
    record = run_case(NumpyRing(), case)
    assert record.outcome == "pass", record.message


def test_each_fault_changes_bits_and_says_what():
    call = noise_call("bits", "bf16", 3, "zigzag", "causal", tokens=96, head_dim=32)
    right = NumpyRing().run(call)
    for name, fault in FAULTS.items():
        got = NumpyRing(name).run(call)
        same = [
            np.array_equal(a, b)
            for tensor in ("o", "lse", "dq", "dk", "dv")
            for a, b in zip(getattr(right, tensor), getattr(got, tensor), strict=True)
        ]
        assert fault.what and not all(same), name


def test_roundings_of_the_faults_are_what_they_are_called():
    x = np.random.default_rng(5).standard_normal(4096).astype(np.float32)
    unit = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    for rounding, least, most in (
        (cut, 0.0, 1.0),
        (odd, 0.0, 1.0),
        (stochastic, 0.0, 1.0),
        (bfloat16, 0.0, 0.5),
    ):
        error = np.abs(rounding(x) - x) / unit
        assert least <= error.min() and error.max() <= most
        assert (bfloat16(rounding(x)) == rounding(x)).all()
    assert (np.abs(cut(x)) <= np.abs(x)).all()
    assert ((odd(x).view(np.uint32) >> 16) & 1 == 1).all()  # no number of the sample is a bfloat16
    assert np.abs((stochastic(x) - x) / unit).mean() > 1.2 * np.abs((bfloat16(x) - x) / unit).mean()


@pytest.mark.slow
def test_most_faults_are_named_or_inferred_rightly_and_none_is_named_wrongly():
    """tests/benchmarks/name_precision_faults.py prints the same, fault by fault."""
    known = {case.id: case for case in noise_cases.cases()}
    cases = [known["noise/causal-contiguous-w4-bf16"]]
    said = [said_of(fault, cases) for fault in FAULTS]
    assert len(said) >= 20
    assert [one.fault for one in said if one.name_is_wrong] == []
    assert sum(one.kind in RIGHTLY for one in said) >= 15
