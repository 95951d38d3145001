"""lucidrains' ring-attention-pytorch: o and dq right, dk and dv mixed up from two workers on.

Needs torch and the package; see its requirements file.
"""

import numpy as np
import pytest
from conformance.targets.hand_checks import by_hand

import ringspec as rs
from ringspec.conformance.cases import golden
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.targets import lucidrains
from ringspec.errors import MissingPackageError

B, H, n, D, W = 1, 2, 5, 4, 3
CASES = ("kernel-shape/float32-causal-w2", "kernel-shape/float32-w4")


@pytest.fixture(scope="module")
def target():
    try:
        made = lucidrains.lucidrains()
    except MissingPackageError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.mark.lucidrains
def test_o_and_dq_are_right_and_the_bug_in_dk_and_dv_is_named(target):
    summary = run(target, golden.cases("core"), only=CASES, diagnose=Diagnoser())
    record = {one.id: one for one in summary.records}["kernel-shape/float32-causal-w2"]
    wrong = {finding.tensor for finding in record.findings if finding.kind != "ok"}
    assert (record.outcome, wrong) == ("mismatch", {"dk", "dv"})
    assert record.diagnosis["id"] == "dkv-transfer-misread"


@pytest.mark.lucidrains
def test_one_explanation_says_so_in_all_problems_that_fail(target):
    found = explain_target(target)
    assert found.known["id"] == "dkv-transfer-misread"
    assert found.sentences == (
        "In the backward pass, dk is returned as dk + dv, and dv as the dk + dv of the next worker.",
    )
    assert len(found.conclusion.explained) == found.wrong == len(found.runs) > 0


@pytest.mark.lucidrains
@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_dk_is_dk_plus_dv_and_dv_is_that_of_the_next_worker(target, layout):
    """Against the definition, in numbers that the target's own code had no part in."""
    rng = np.random.default_rng(2310)
    q, k, v, dy = (rng.standard_normal((B, H, W * n, D)).astype(np.float32) for _ in range(4))
    right = rs.ring(q, k, v, dy, workers=W, layout=layout, causal=True)
    tensors = {
        name: tuple(x[:, :, right.worker(r).index_q].transpose(0, 2, 1, 3) for r in range(W))
        for name, x in (("q", q), ("k", k), ("v", v), ("dy", dy))
    }
    formats = dict.fromkeys(("inputs", "outputs", "statistics"), "float32")
    terms = {"scale": D**-0.5, "causal": True}
    passes = ("forward", "backward")
    got = target.run(Call("misread", "ring", passes, W, tensors, terms, formats, layout=layout))
    both = [right.worker(r).dk + right.worker(r).dv for r in range(W)]
    for r in range(W):
        wants = {"dq": right.worker(r).dq, "dk": both[r], "dv": both[(r + 1) % W]}
        for name, want in wants.items():
            error = abs(getattr(got, name)[r].transpose(0, 2, 1, 3) - want).max()
            assert error < 4e-6, (name, r, error)


def test_it_claims_no_lse_because_it_gives_none():
    assert isinstance(lucidrains.CLAIMS, Capabilities) and lucidrains.CLAIMS.lse == "hidden"


@pytest.mark.lucidrains
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("contiguous", 2),
        ("striped", 3),
        ("contiguous", 2, "full", "noise"),
        ("contiguous", 4, "noise"),
        ("striped", 3, "noise"),
    ],
    ids=lambda words: "-".join(map(str, words)),
)
def test_by_hand_without_ringspec_dk_and_dv_are_wrong_and_o_and_dq_are_right(words):
    found = by_hand("lucidrains", *words)
    assert found["o"] <= 1e-6 and found["dq"] <= 1e-6
    assert found["dk"] > 0.5 and found["dv"] > 0.5
