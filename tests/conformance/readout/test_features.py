"""Readouts with packed documents, a soft cap, and a gradient that arrives for lse (dlse)."""

import dataclasses

import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.problem.chosen import problems_for
from ringspec.conformance.readout.problem.settings import LAYOUTS
from ringspec.conformance.targets.reference import REFERENCES


def limited(target, layout="contiguous", circulation="kv"):
    """The target with these claims, with all masks and features."""
    claims = dataclasses.replace(
        target.capabilities, layouts=(layout,), circulations=(circulation,), formats=("float32",)
    )
    return type("Limited", (), {"name": "limited", "capabilities": claims, "run": target.run})()


@pytest.mark.parametrize("circulation", ["kv", "q"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_is_right_with_documents_soft_cap_and_dlse(layout, circulation):
    found = explain_target(limited(REFERENCES["float32"], layout, circulation))
    assert found.right
    masks = {one.problem.id.split("/")[1].split("-")[0] for one in found.runs}
    assert "documents" in masks
    assert {"softcap", "dlse"} <= masks or layout != "contiguous"


def test_a_target_without_these_claims_is_not_asked_for_them():
    claims = dataclasses.replace(REFERENCES["float32"].capabilities, masks=("causal",), features=())
    geometries = [one.pairs.geometry for one in problems_for(claims)[0]]
    assert geometries
    assert all(x.documents is None and x.softcap is None and not x.dlse for x in geometries)


SENTENCES = {
    "packing-ignored": "In the forward pass, documents are ignored.",
    "local-document-starts": "In the forward pass, the boundaries of documents are compared with slot numbers within a worker.",
    "documents-numbered-by-worker": "In the forward pass, documents are numbered within each worker.",
    "softcap-gradient-missing": "In the backward pass, dS lacks the derivative of the soft cap.",
    "softcap-ignored-in-backward": "In the backward pass, the soft cap and its derivative are left out.",
    "softcap-before-scale": "In the forward pass, the soft cap is applied before the scale.",
    "softcap-over-mask": "In the forward pass, hidden pairs get the score -cap (they are masked before the soft cap).",
    "softcap-not-multiplied-back": "In the forward pass, scores are tanh(s / cap), not multiplied by the cap.",
    "dlse-ignored": "In the backward pass, dlse is left out.",
    "dlse-sign": "In the backward pass, dlse is added to delta, not subtracted from it.",
}


@pytest.mark.parametrize(
    "bug",
    [
        x if n in (0, 3, 8) else pytest.param(x, marks=pytest.mark.slow)
        for n, x in enumerate(SENTENCES)
    ],
)
def test_a_known_bug_of_a_feature_is_explained(bug):
    found = explain_target(limited(MutantTarget(MUTANTS[bug], "float32")))
    assert found.sentences[0] == SENTENCES[bug]
    assert len(found.conclusion.explained) == found.wrong > 0
