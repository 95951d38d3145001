"""diffusers' context parallelism: forward right; what is wrong in the gradients of its ring depends on the version.

Needs torch and diffusers; see its requirements file. ``by_hand_diffusers.py``, a program without ringspec, confirms the
failures of unified attention.
"""

import importlib.metadata
import importlib.util
import sys
import types

import numpy as np
import pytest
from conformance.targets.hand_checks import by_hand

import ringspec as rs
from ringspec.conformance.cases import golden, properties
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.protocol import Call, Refused
from ringspec.conformance.targets import diffusers_ring
from ringspec.errors import MissingPackageError

B, H, n, D = 1, 2, 3, 4
THERE = importlib.util.find_spec("diffusers") is not None
VERSION = importlib.metadata.version("diffusers") if THERE else ""


@pytest.fixture(scope="module")
def target():
    try:
        made = diffusers_ring.diffusers_ring()
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


# What is wrong in the golden cases with so many workers, by version.
WRONG = {
    "0.39.0": dict.fromkeys((2, 3, 4), {"dq", "dk", "dv"}),
    "0.42.1": {2: set(), 3: {"dk", "dv"}, 4: {"dk", "dv"}},
}
IDS = {2: "ring/contiguous-w2", 3: "ring/contiguous-w3", 4: "ring/contiguous-w4-batches"}


@pytest.mark.diffusers
def test_the_forward_is_right_and_the_gradients_are_wrong_where_this_version_has_them_so(target):
    known(WRONG)
    records = run_of(target, *IDS.values())
    assert {w: wrong_tensors(records[id]) for w, id in IDS.items()} == WRONG[VERSION]
    outcomes = {w: records[id].outcome for w, id in IDS.items()}
    assert outcomes == {w: "mismatch" if names else "pass" for w, names in WRONG[VERSION].items()}


def known(by_version):
    """A later version may have fixed it, or have other bugs."""
    if VERSION not in by_version:
        pytest.skip(f"known are the gradients of diffusers {', '.join(by_version)}")


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


def sums_that_travel_towards_the_later_blocks(q, k, v, dy):
    """0.42.1: step i of worker r takes block r + i; the sums that it adds to came from r - 1.

    So the sums that end on worker w hold the shares of the blocks w + 2i, from the queries of w + i.
    """
    workers = len(q)
    keys, values = (np.concatenate(x, axis=2) for x in (k, v))
    rows = [rs.attention(x, keys, values, scale=0.5) for x in q]

    def share(queries, block):
        queries, block = queries % workers, block % workers
        delta = (dy[queries] * rows[queries].o).sum(axis=3)
        given = {"lse": rows[queries].lse, "delta": delta, "scale": 0.5}
        return rs.attention_block_backward(q[queries], k[block], v[block], dy[queries], **given)

    each, steps = range(workers), range(workers)
    return {
        "dq": [sum(share(w, block).dq for block in each) for w in each],
        "dk": [sum(share(w + i, w + 2 * i).dk for i in steps) for w in each],
        "dv": [sum(share(w + i, w + 2 * i).dv for i in steps) for w in each],
    }


def every_step_of_the_own_block(q, k, v, dy):
    """0.39.0, issue 14265: each step differentiates the worker's own block, with its o and lse."""
    inputs = zip(q, k, v, dy, strict=True)
    own = [rs.attention_backward(*one, scale=0.5) for one in inputs]
    summed = {name: sum(getattr(one, name) for one in own) for name in ("dk", "dv")}
    every = {name: [x] * len(own) for name, x in summed.items()}
    return {"dq": [len(own) * one.dq for one in own]} | every


MODELS = {
    "0.39.0": every_step_of_the_own_block,
    "0.42.1": sums_that_travel_towards_the_later_blocks,
}


@pytest.mark.diffusers
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_gradients_are_what_the_bug_of_this_version_makes_of_them(target, workers):
    known(MODELS)
    drawn, result = gradients_of(target, workers)
    swapped = {name: [x.swapaxes(1, 2) for x in arrays] for name, arrays in drawn.items()}
    for name, wants in MODELS[VERSION](**swapped).items():
        for got, want in zip(getattr(result, name), wants, strict=True):
            np.testing.assert_allclose(got.swapaxes(1, 2), want, rtol=0, atol=1e-13)


EXPLANATIONS = {
    "0.39.0": (
        "stale-keys",
        ("In the backward pass, every step uses the keys, values, lse and o of step 0.",),
    ),
    "0.42.1": (
        "ring-direction",
        (
            "In the backward pass, dk and dv are added to those of the visitor in a ring of the opposite "
            "direction.",
        ),
    ),
}


@pytest.mark.diffusers
def test_one_explanation_says_what_this_version_computes_in_all_problems_that_fail(target):
    known(EXPLANATIONS)
    found = explain_target(target)
    assert (found.known["id"], found.sentences) == EXPLANATIONS[VERSION]
    assert len(found.conclusion.explained) == found.wrong == len(found.runs) > 0


@pytest.mark.diffusers
@pytest.mark.slow
def test_over_pytorchs_kernel_the_ring_is_right_where_this_version_has_it_so():
    known(WRONG)
    if VERSION == "0.39.0":
        pytest.skip("0.39.0 has no backward pass over this kernel")
    made = diffusers_ring.target("ring", "native-flash")
    try:
        records = run(
            made, properties.cases(), only=("property/workers/full-contiguous-*16",)
        ).records
    finally:
        made.close()
    for record in records:
        assert wrong_tensors(record) == WRONG[VERSION][4], record.message


@pytest.mark.parametrize(("device", "standins"), [("cpu", ("aten_flash",)), ("cuda", ())])
def test_over_pytorchs_kernel_a_target_claims_16_bits_and_has_a_stand_in_only_on_a_cpu(
    device, standins
):
    made = diffusers_ring.target("ulysses", "native-flash", device=device, python="python3")
    assert made.standins == standins and made.options["kernel"] == "native-flash"
    assert made.capabilities.formats == ("bfloat16", "float16")
    assert made.capabilities.recipe is None and made.capabilities.head_dims[0] == 8


def test_without_the_packages_the_error_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="pip install torch 'diffusers>=0.39.0'"):
        diffusers_ring.diffusers_ring()


@pytest.mark.parametrize("version", ["0.39.0", "0.39.0.post1", "0.42.1", "1.0.0.dev0", "10.0"])
def test_every_version_from_the_floor_on_is_taken(monkeypatch, version):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert diffusers_ring.diffusers_ring().name == "diffusers_ring"


@pytest.mark.parametrize("version", ["0.38.9", "0.9", "0.4"])
def test_an_older_version_is_told_to_be_upgraded(monkeypatch, version):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(MissingPackageError, match=r"diffusers >= 0\.39\.0; got .*'diffusers>="):
        diffusers_ring.diffusers_ring()


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


# What is wrong in the program without ringspec, by version and number of workers.
BY_HAND = {("0.42.1", 2): set(), ("0.42.1", 3): {"dk", "dv"}}
BY_HAND |= {("0.39.0", workers): {"dq", "dk", "dv"} for workers in (2, 3)}


@pytest.mark.diffusers
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_by_hand_without_ringspec_the_same_results_are_wrong(workers):
    if (VERSION, workers) not in BY_HAND:
        pytest.skip(f"known are the versions {sorted({one for one, _ in BY_HAND})}")
    for name, error in by_hand("diffusers_ring", workers).items():
        if name in BY_HAND[VERSION, workers]:
            assert error > 0.1, name
        else:
            assert error <= 1e-12, name


@pytest.mark.diffusers
@pytest.mark.slow
def test_by_hand_ulysses_is_right():
    for name, errors in by_hand("diffusers", 1, 3).items():
        assert all(error <= 1e-5 for error in errors), name


@pytest.mark.diffusers
@pytest.mark.slow
def test_by_hand_unified_attention_is_wrong_where_its_ring_of_two_is():
    known(WRONG)
    for name, errors in by_hand("diffusers", 2, 2).items():
        if name in WRONG[VERSION][2]:
            assert all(error > 0.05 for error in errors), name
        else:
            assert all(error <= 1e-5 for error in errors), name


@pytest.mark.diffusers
@pytest.mark.slow
def test_by_hand_unified_attention_with_a_ring_of_three_is_wrong_as_its_ring_is():
    known(WRONG)
    for name, errors in by_hand("diffusers", 3, 2).items():
        if name in WRONG[VERSION][3]:
            assert all(error > 0.05 for error in errors), name
        else:
            assert all(error <= 1e-5 for error in errors), name


@pytest.mark.diffusers
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ulysses", "unified", "unified-3x2"])
def test_the_suite_agrees_with_the_check_by_hand(mode):
    known(WRONG)
    made = diffusers_ring.target(mode)
    try:
        records = run(made, properties.cases(), only=("property/workers/full-*",)).records
    finally:
        made.close()
    claimed = [record for record in records if record.outcome != "not claimed"]
    assert len(claimed) == 4  # one for each format
    ring = {"unified": 2, "unified-3x2": 3}.get(mode)
    wrong = WRONG[VERSION][ring] if ring else set()
    for record in claimed:
        assert record.outcome == ("mismatch" if wrong else "pass"), record.id
        assert wrong_tensors(record) <= wrong, record.id


def test_ulysses_claims_heads_that_workers_can_divide_and_unified_an_even_number():
    claims = {mode: one.kv_heads_multiple for mode, one in diffusers_ring.BY_MODE.items()}
    assert claims == {"ring": 1, "ulysses": "workers", "unified": 2, "unified-3x2": 2}
    workers = {mode: diffusers_ring.BY_MODE[mode].workers for mode in ("unified", "unified-3x2")}
    assert workers == {"unified": (4,), "unified-3x2": (6,)}
    assert "unequal-lengths" not in diffusers_ring.BY_MODE["ulysses"].features
