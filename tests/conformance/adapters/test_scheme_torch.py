"""Schemes in PyTorch: the example of the documentation passes, and a rank gets a device mesh with named axes."""

import os
from pathlib import Path

import pytest

from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.cases.schemes import cases
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.load import load_target
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.protocol import Refused
from ringspec.conformance.targets.schemes import reference_float32

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(os.name != "posix", reason="processes of POSIX"),
]
EXAMPLE = Path(__file__).parents[3] / "docs" / "conform" / "example_ulysses.py"
CASES = {case.id: case for case in cases()}


def tells(q, k, v, *, group, call):
    """Refuse on rank 2, and say what it was given."""
    if call.rank != 2:
        return q * 1
    mesh = call.device_mesh
    at = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))
    size = mesh["ulysses"].size()
    heads = call.heads_k.tolist()
    raise Refused(f"{call.scheme} {call.mesh}, rank {call.rank} at {at} of {size}, heads {heads}")


def test_the_example_passes_forward_and_backward():
    target = load_target(f"{EXAMPLE}:target")
    try:
        chosen = [CASES[f"scheme/ulysses/{name}-w2"] for name in ("gqa-backward", "zigzag-causal")]
        assert run(target, chosen).counts == {"pass": 2}
    finally:
        target.close()


def test_a_rank_gets_a_device_mesh_with_the_axes_of_the_case():
    target = TorchTarget(tells, reference_float32.capabilities)
    try:
        record = run_case(target, CASES["scheme/usp/ring-outer-causal-w4"])
    finally:
        target.close()
    told = (
        "usp (('ring', 2), ('ulysses', 2)), rank 2 at {'ring': 1, 'ulysses': 0} of 2, heads [0, 1]"
    )
    assert (record.outcome, told in record.message) == ("refused", True), record.message
