"""The sentences of the readouts say what the model ring does with the faults that they name."""

from __future__ import annotations

import re

import pytest

from ringspec.conformance.readout.conclusion import SAME_SCORES, Conclusion, base_in_words
from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.conformance.readout.problem.chosen import problem_of, settings_for
from ringspec.conformance.readout.proof.all_problems import with_sizes_that_hold
from ringspec.conformance.readout.proof.calls import given_of
from ringspec.conformance.readout.proof.read_proven import needed
from ringspec.conformance.readout.proof.ring_results import RingOf
from ringspec.conformance.readout.reading import SAME, Named
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.fault_sets import undoes
from ringspec.conformance.targets.reference import reference_float32

PER_SCALE = re.compile(r"(not multiplied by the scale|by the scale twice)$")


@pytest.fixture(scope="module")
def context() -> SearchContext:
    settings, _ = settings_for(reference_float32.capabilities)
    return SearchContext(problem_of(settings[0], reference_float32.capabilities).pairs, 1e-5)


def test_only_what_contains_the_scale_is_said_to_lack_it_or_to_have_it_twice(context):
    for phase in ("forward", "backward"):
        words = [one.words for one in context.kinds(phase) if PER_SCALE.search(one.words)]
        assert words and all(x.startswith(("scores ", "dq ", "dk ")) for x in words)
        assert not any("dv" in x for x in words)


def test_of_several_sizes_of_tiles_those_are_told_that_hold_in_every_problem():
    kind = "tiles of 5 queries and 6 or 7 or 8 keys are skipped"
    faults = (Named("forward", kind, "", 1.0, ""),)
    found = Conclusion(faults, stated=(faults[0].sentence(),), explained=("one", "other"))

    def holds(id, conclusion):
        return " 8 keys" not in conclusion.faults[0].kind or id == "one"

    kept = with_sizes_that_hold(found, holds)
    assert kept.faults[0].kind == "tiles of 5 queries and 6 or 7 keys are skipped"
    assert kept.stated == (kept.faults[0].sentence(),)


def test_two_faults_that_move_different_parts_of_one_operand_are_not_told_together(context):
    words = "queries are taken as in the layout zigzag", "queries are those of the next worker"
    kinds = {one.words: one for one in context.kinds("forward")}
    everywhere, *_ = context.places("forward").blocks
    layout, worker = (Fault("forward", kinds[x], everywhere) for x in words)
    right = context.model.right
    assert undoes(worker, layout.applied(right), right)
    assert not undoes(worker, right, right)


def test_a_backward_pass_with_wrong_scores_and_correct_products_is_not_said_to_do_the_same():
    keys, scores = (
        Named("forward", kind, "", 1.0, "")
        for kind in (
            "keys are those of the worker that computes",
            "scores are multiplied by the scale twice",
        )
    )
    assert base_in_words(SAME, [keys]) == SAME_SCORES
    assert base_in_words(SAME, [scores]) == SAME


def test_a_fault_that_changes_nothing_in_a_problem_is_not_told_of_it():
    """The window hides the block of the last step, so nothing shows whose values it uses."""
    claims = reference_float32.capabilities
    settings, _ = settings_for(claims)
    problems = {one.id: one for one in (problem_of(x, claims) for x in settings)}
    faults = (
        Named("backward", "dv is too large by a factor of 3", "", 1.2, ""),
        Named("backward", "values are those of the visitor of step 1", "in the last step", 1.5, ""),
    )

    def told_of(id):
        calls = problems[id].call, problems[id].proof
        outputs = []
        for call in calls:
            results = {}
            for made, _ in RingOf(given_of(call, 0)).passes_of(Conclusion(faults)):
                results |= {name: tuple(y[None] for y in x) for name, x in made.items()}
            outputs.append(results)
        return needed(list(faults), "", calls, outputs)

    assert tuple(told_of("readout/full-contiguous-kv")) == faults
    assert tuple(told_of("readout/window-contiguous")) == faults[:1]
