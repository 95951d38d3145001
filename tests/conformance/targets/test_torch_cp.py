"""PyTorch's context parallelism passes, on a CPU, and what is claimed of it is what it takes."""

import importlib.util
import os
from importlib.metadata import version

import pytest

from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.expected import read_expected
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import torch_cp
from ringspec.vectors import open_set

THERE = importlib.util.find_spec("torch") is not None
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        THERE and (not version("torch").startswith("2.13.") or os.name != "posix"),
        reason="torch_cp is made for torch 2.13.0 (requirements-torch.txt)",
    ),
]
CASES = {
    "zigzag": ("ring/zigzag-causal-w2", "ring/zigzag-causal-w3", "ring/zigzag-causal-w4"),
    "zigzag-float32": ("ring/float32-zigzag-w4",),
    "contiguous": (
        "ring/contiguous-causal-w2",
        "ring/contiguous-causal-w3",
        "ring/contiguous-w3",
        "ring/contiguous-causal-w4",
    ),
    "contiguous-float32": ("kernel-shape/float32-causal-w2", "kernel-shape/float32-w4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rotation", torch_cp.ROTATIONS)
@pytest.mark.parametrize("layout", torch_cp.LAYOUTS)
@pytest.mark.parametrize("backend", torch_cp.ON_CPU)
def test_torch_passes_golden_cases(layout, rotation, backend):
    target = torch_cp.target(layout, rotation, backend)
    names = CASES[layout if backend == "16bit" else f"{layout}-float32"]
    try:
        summary = run(target, run_cases("core"), only=names)
    finally:
        target.close()
    assert summary.counts == {"pass": len(names)}, [r.message for r in summary.failures]
    tensors = {finding.tensor for record in summary.records for finding in record.findings}
    assert tensors == {"o", "dq", "dk", "dv"} | ({"lse"} if backend == "cpu" else set())


@pytest.mark.slow
def test_a_wrong_rotation_would_be_seen(monkeypatch):
    """The judge sees torch's ring when the load balance does not fit the layout."""
    core = open_set("core")
    target = torch_cp.target("contiguous", "alltoall", "16bit")
    id = "ring/contiguous-causal-w2"

    def as_zigzag(call):
        return original(
            call_of(core.case("ring/zigzag-causal-w2"), core.tensors("ring/zigzag-causal-w2"))
        )

    original = target.run
    target.run = as_zigzag
    try:
        summary = run(target, run_cases("core"), only=id)
    finally:
        target.close()
    assert summary.exit_code == 1


def test_every_target_is_found_by_its_name():
    assert len(torch_cp.TARGETS) == 24
    for name in torch_cp.TARGETS:
        assert getattr(torch_cp, name).name == f"torch_cp.{name}"
    with pytest.raises(AttributeError, match="zigzag_alltoall"):
        torch_cp.no_such_target  # noqa: B018


def test_the_example_of_the_documentation_loads():
    from ringspec.conformance.run.load import load_target

    target = load_target("docs/conform/example_torch.py:target")
    assert target.name == "ring_attention" and target.function.endswith(
        "example_torch.py:ring_attention"
    )


def test_expected_failures_name_cases_that_are_claimed():
    cases = {case.id: case for case in run_cases("core")}
    for layout in torch_cp.LAYOUTS:
        claims = torch_cp.claims(layout, "alltoall", "16bit")
        for id in read_expected(torch_cp.EXPECTED[layout]):
            assert cases[id].why_not(claims) is None, (layout, id)
