"""What a search found for each known bug is stored, and tried before a search."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.readout import proof
from ringspec.conformance.readout.rounding import is_rounding
from ringspec.conformance.run import known_bugs
from ringspec.conformance.run.explain import explain_target

BUGS = known_bugs.of_bugs()
CLAIMS = {
    "layouts": ("contiguous", "zigzag"),
    "masks": ("causal",),
    "features": (),
    "circulations": ("kv",),
    "directions": (1,),
    "batch": (1,),
}


def ring_with(bug, recipe="float32", **claims):
    """A kernel with a known bug; it claims little, so that it is read in a moment."""
    target = MutantTarget(MUTANTS[bug], recipe)
    target.capabilities = dataclasses.replace(target.capabilities, **{**CLAIMS, **claims})
    return target


def explained(target, **how):
    with np.errstate(all="ignore"):
        return explain_target(target, **how)


def evaluations(found):
    return sum(one.reading.evaluations for one in found.runs if one.reading)


def test_most_known_bugs_that_change_a_result_have_stored_readings():
    assert set(BUGS) <= set(MUTANTS)
    shown = [mutant.id for mutant in MUTANTS.values() if mutant.kills]
    assert sum("readings" in BUGS.get(id, {}) for id in shown) >= 0.7 * len(shown)


def test_no_rounding_is_stored_because_it_is_measured_in_each_problem():
    stored = [one for id in BUGS for one in known_bugs.readings_of(id)]
    faults = [x for one in stored for part in one.passes for faults in part.sets for x in faults]
    assert faults and not any(is_rounding(one.kind) for one in faults)


@pytest.mark.parametrize("bug", ["ring-direction", "stale-keys", "log2-lse"])
def test_a_known_bug_is_explained_without_a_search_by_the_words_that_a_search_finds(bug):
    quickly, searched = explained(ring_with(bug)), explained(ring_with(bug), catalogue=False)
    assert quickly.sentences == searched.sentences
    assert quickly.alternatives == searched.alternatives
    assert not quickly.unexplained and quickly.known == searched.known
    assert quickly.known["id"] == bug
    assert evaluations(quickly) <= len(quickly.runs) < 100 < evaluations(searched)


def test_a_stored_reading_that_does_not_give_the_numbers_is_not_told(monkeypatch):
    bug, other = "ring-direction", "log2-lse"
    right = explained(ring_with(bug))
    monkeypatch.setattr(known_bugs, "of_bugs", lambda: {bug: BUGS[other]})
    monkeypatch.setattr(proof, "SHARE_IF_KNOWN", 1.0)
    found = explained(ring_with(bug))
    assert found.sentences == right.sentences and evaluations(found) > 100


def test_a_kernel_without_a_backward_pass_is_not_told_of_one():
    bug = "key-positions-not-travelling"
    both = explained(ring_with(bug))
    assert any("backward" in one for one in both.sentences)
    forward = explained(ring_with(bug, operations=("ring-forward",)))
    assert forward.sentences and not any("backward" in one for one in forward.sentences)


def test_nothing_is_searched_for_long_if_a_known_bug_has_the_results(monkeypatch):
    monkeypatch.setattr(known_bugs, "of_bugs", dict)
    found = explained(ring_with("lse-only-first-head"))
    assert found.unexplained and found.searched
    assert 0 < evaluations(found) < 2_000


@pytest.mark.parametrize("thorough", [False, True])
def test_each_problem_is_shown_before_it_is_run(thorough):
    shown = []
    found = explained(ring_with("ring-direction"), thorough=thorough, progress=shown.append)
    assert shown == [one.problem.id for one in found.runs]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [id for id, one in BUGS.items() if "readings" in one])
def test_each_stored_bug_is_explained_by_what_is_stored(bug):
    claims = {**CLAIMS, **{x: getattr(MutantTarget(MUTANTS[bug]).capabilities, x) for x in CLAIMS}}
    claims["circulations"] = ("kv", "q", "gather")
    found = explained(ring_with(bug, next(iter(MUTANTS[bug].kills)), **claims))
    assert found.known is None or found.known["id"] == bug or evaluations(found) < 100
