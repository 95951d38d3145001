"""diffusers' ring attention: forward right; what is wrong in the gradients depends on the version.

Needs torch and diffusers; see its requirements file.
"""

import importlib.metadata
import importlib.util
import sys
import types

import numpy as np
import pytest

import ringspec as rs
from ringspec.conformance import golden
from ringspec.conformance.runner import run
from ringspec.conformance.target import Call, Refused
from ringspec.conformance.targets import diffusers_ring
from ringspec.errors import MissingPackageError

B, H, n, D = 1, 2, 3, 4
THERE = importlib.util.find_spec("diffusers") is not None
VERSION = importlib.metadata.version("diffusers") if THERE else ""


def only(version):
    """For a test that says what one version does wrong; another version may have mended it."""
    return pytest.mark.skipif(VERSION != version, reason=f"of diffusers {version}")


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
def test_the_report_names_the_installed_version_and_its_file(target):
    have = target.installed
    assert have.versions["diffusers"] == VERSION
    assert have.files["diffusers"] == importlib.util.find_spec("diffusers").origin


@only("0.39.0")
@pytest.mark.diffusers
def test_from_two_workers_the_forward_is_right_and_every_gradient_is_wrong(target):
    records = run_of(
        target, "ring/contiguous-w2", "ring/contiguous-w3", "ring/contiguous-w4-batches"
    )
    for id, record in records.items():
        assert record.outcome == "mismatch", id
        assert wrong_tensors(record) == {"dq", "dk", "dv"}, id


@only("0.42.1")
@pytest.mark.diffusers
def test_with_two_workers_all_is_right_and_with_three_dk_and_dv_are_wrong(target):
    records = run_of(target, "ring/contiguous-w2", "ring/contiguous-w3")
    assert records["ring/contiguous-w2"].outcome == "pass"
    assert records["ring/contiguous-w3"].outcome == "mismatch"
    assert wrong_tensors(records["ring/contiguous-w3"]) == {"dk", "dv"}


def gradients_of(target, workers):
    """Random inputs, one array a worker, and what the target makes of them."""
    rng = np.random.default_rng(14265)
    drawn = {
        name: tuple(rng.standard_normal((B, n, H, D)) for _ in range(workers))
        for name in ("q", "k", "v", "dy")
    }
    formats = dict.fromkeys(("inputs", "outputs", "statistics"), "float64")
    passes = ("forward", "backward")
    call = Call("14265", "ring", passes, workers, drawn, {"scale": 0.5}, formats)
    return drawn, target.run(call)


@only("0.42.1")
@pytest.mark.diffusers
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_sums_of_dk_and_dv_travel_towards_the_later_blocks(target, workers):
    """Step i of worker r takes block r + i; the sums that it adds to came from r - 1.

    So the sums that end on worker w hold the shares of the blocks w + 2i, from the queries of w + i.
    """
    drawn, result = gradients_of(target, workers)
    q, k, v, dy = ([x.swapaxes(1, 2) for x in drawn[name]] for name in ("q", "k", "v", "dy"))
    keys, values = (np.concatenate(x, axis=2) for x in (k, v))
    rows = [rs.attention(x, keys, values, scale=0.5) for x in q]

    def share(queries, block):
        queries, block = queries % workers, block % workers
        delta = (dy[queries] * rows[queries].o).sum(axis=3)
        given = {"lse": rows[queries].lse, "delta": delta, "scale": 0.5}
        return rs.attention_block_backward(dy[queries], q[queries], k[block], v[block], **given)

    for w in range(workers):
        for name in ("dk", "dv"):
            want = sum(getattr(share(w + i, w + 2 * i), name) for i in range(workers))
            got = getattr(result, name)[w].swapaxes(1, 2)
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-13)
        want = sum(share(w, block).dq for block in range(workers))
        np.testing.assert_allclose(result.dq[w].swapaxes(1, 2), want, rtol=0, atol=1e-13)


@only("0.39.0")
@pytest.mark.diffusers
@pytest.mark.parametrize("workers", [2, 3])
def test_the_gradients_are_what_issue_14265_makes_of_them(target, workers):
    """Each step differentiates the worker's own block, with that block's own o and lse."""
    drawn, result = gradients_of(target, workers)
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
    with pytest.raises(MissingPackageError, match="pip install torch 'diffusers>=0.39.0'"):
        _ = diffusers_ring.diffusers_ring


@pytest.mark.parametrize("version", ["0.39.0", "0.39.0.post1", "0.42.1", "1.0.0.dev0", "10.0"])
def test_every_version_from_the_floor_on_is_taken(monkeypatch, version):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    diffusers_ring.check_installed()


@pytest.mark.parametrize("version", ["0.38.9", "0.9", "0.4"])
def test_an_older_version_is_told_to_be_upgraded(monkeypatch, version):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(MissingPackageError, match=r"diffusers >= 0\.39\.0; got .*'diffusers>="):
        diffusers_ring.target()


def test_a_version_without_a_name_that_is_used_is_refused_in_a_sentence(monkeypatch):
    """A refusal keeps the processes, so that such a run ends soon, and shows no traceback."""
    theirs = types.SimpleNamespace(__name__="diffusers.models.attention_dispatch")
    models = types.SimpleNamespace(attention_dispatch=theirs)
    monkeypatch.setitem(sys.modules, "diffusers", types.ModuleType("diffusers"))
    monkeypatch.setitem(sys.modules, "diffusers.models", models)
    with pytest.raises(
        Refused, match="expected TemplatedRingAttention, .*, as diffusers 0.39.0 and"
    ):
        diffusers_ring.dispatch.__wrapped__()
