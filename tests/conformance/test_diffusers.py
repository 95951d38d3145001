"""diffusers' ring attention: forward right, gradients wrong from two workers on.

Needs torch and diffusers; see its requirements file.
"""

import importlib.util

import numpy as np
import pytest

import ringspec as rs
from ringspec.conformance import golden
from ringspec.conformance.runner import run
from ringspec.conformance.target import Call
from ringspec.conformance.targets import diffusers_ring
from ringspec.errors import MissingPackageError

B, H, n, D = 1, 2, 3, 4


@pytest.fixture(scope="module")
def target():
    try:
        made = diffusers_ring.target()
    except MissingPackageError as error:
        pytest.skip(str(error))
    yield made
    made.close()


def run_of(target, *ids):
    return {record.id: record for record in run(target, golden.cases("core"), only=ids).records}


def wrong_tensors(record):
    return {finding.tensor for finding in record.findings if finding.kind != "ok"}


@pytest.mark.diffusers
def test_with_one_worker_all_is_right_so_the_stand_in_kernels_are(target):
    ids = ("attention/plain", "attention/scale-given", "adversarial/near-ties")
    for id, record in run_of(target, *ids).items():
        assert record.outcome == "pass", (id, record.message)


@pytest.mark.diffusers
def test_from_two_workers_the_forward_is_right_and_every_gradient_is_wrong(target):
    records = run_of(
        target, "ring/contiguous-w2", "ring/contiguous-w3", "ring/contiguous-w4-batches"
    )
    for id, record in records.items():
        assert record.outcome == "mismatch", id
        assert wrong_tensors(record) == {"dq", "dk", "dv"}, id


@pytest.mark.diffusers
@pytest.mark.parametrize("workers", [2, 3])
def test_the_gradients_are_what_issue_14265_makes_of_them(target, workers):
    """Each step differentiates the worker's own block, with that block's own o and lse."""
    rng = np.random.default_rng(14265)
    drawn = {
        name: tuple(rng.standard_normal((B, n, H, D)) for _ in range(workers))
        for name in ("q", "k", "v", "dy")
    }
    formats = dict.fromkeys(("inputs", "outputs", "statistics"), "float64")
    passes = ("forward", "backward")
    result = target.run(Call("14265", "ring", passes, workers, drawn, {"scale": 0.5}, formats))
    own = [
        rs.attention_backward(
            *(drawn[x][w].swapaxes(1, 2) for x in ("dy", "q", "k", "v")), scale=0.5
        )
        for w in range(workers)
    ]
    summed = {name: sum(getattr(one, name) for one in own) for name in ("dk", "dv")}
    for worker in range(workers):
        got = {x: getattr(result, x)[worker].swapaxes(1, 2) for x in ("dq", "dk", "dv")}
        np.testing.assert_allclose(got["dq"], workers * own[worker].dq, rtol=0, atol=1e-13)
        np.testing.assert_allclose(got["dk"], summed["dk"], rtol=0, atol=1e-13)
        np.testing.assert_allclose(got["dv"], summed["dv"], rtol=0, atol=1e-13)


def test_without_the_packages_the_error_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install torch==2.13.0 diffusers==0.39.0"):
        _ = diffusers_ring.diffusers_ring
