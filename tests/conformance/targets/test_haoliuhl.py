"""haoliuhl's ringattention: right where it claims to be. Needs the package; see its requirements file."""

import importlib
import importlib.metadata
import importlib.util

import pytest

from ringspec.conformance.cases import golden
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.protocol import Refused
from ringspec.conformance.targets import haoliuhl
from ringspec.errors import MissingPackageError

CASES = (
    "ring/contiguous-causal-w2",
    "ring/contiguous-w2",
    "ring/documents-w2",
    "ring/contiguous-causal-w4",
    "ring/contiguous-w4-batches",
    "kernel-shape/float32-causal-w2",
    "kernel-shape/float32-w4",
    "attention/float64",
)


@pytest.fixture(scope="module")
def target():
    try:
        made = haoliuhl.haoliuhl()
    except MissingPackageError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.haoliuhl
def test_forward_and_gradients_are_right_with_two_and_four_workers(target):
    summary = run(target, golden.cases("core"), only=CASES)
    assert summary.counts == {"pass": len(CASES)}, [r.message for r in summary.failures]


@pytest.mark.haoliuhl
def test_causal_attention_with_one_token_a_worker_is_not_claimed_because_it_is_wrong(target):
    """Its causal block test skips the diagonal of a chunk of one token."""
    import numpy as np

    from ringspec.conformance.target.protocol import Call

    given, other = np.ones((1, 1, 1, 4), np.float32), np.full((1, 1, 1, 4), 2, np.float32)
    call = Call(
        "one-token",
        "ring",
        ("forward",),
        2,
        dict.fromkeys(("q", "k", "v"), (given, other)),
        {"scale": 0.5, "causal": True},
        {"inputs": "float32", "outputs": "float32", "statistics": "float32"},
    )
    first, second = target.run(call).o
    assert np.isnan(first).all()
    np.testing.assert_array_equal(second, given)


def test_without_the_package_the_error_names_the_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(MissingPackageError, match="pip install jax .*'ringattention>=0.1.2'"):
        haoliuhl.haoliuhl()


def test_an_older_version_is_refused_and_a_later_one_is_taken(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.1")
    with pytest.raises(MissingPackageError, match="ringattention >= 0.1.2; got '0.1.1'"):
        haoliuhl.haoliuhl()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.0")
    assert haoliuhl.haoliuhl().name == "haoliuhl"


def test_a_version_without_the_file_is_refused_in_a_sentence(monkeypatch, tmp_path):
    class Distribution:
        def locate_file(self, path):
            return tmp_path / path

        def read_text(self, path):
            return None

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(Refused, match="ringattention_jax.py, as ringattention 0.1.2 has it; got"):
        haoliuhl.module_file.__wrapped__()
