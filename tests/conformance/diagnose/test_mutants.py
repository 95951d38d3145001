"""Mutants: the ring that they are made of is right, each is killed by the case that it names, and said so."""

import dataclasses
import re

import numpy as np
import pytest
from conformance import wrong_targets as wrong
from conformance.diagnose.same_results import coincide

from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.cases.noise import noise_call
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.mutants import (
    MUTANTS,
    MutantTarget,
    backward_bugs,
    dropout_bugs,
    empty_bugs,
    head_bugs,
    lse_bugs,
    mask_bugs,
    merge_bugs,
    packing_bugs,
    run_mutant,
    score_bugs,
    sink_bugs,
)
from ringspec.conformance.diagnose.mutants.hooks import Hooks
from ringspec.conformance.diagnose.mutants.kills import KILLS
from ringspec.conformance.diagnose.mutants.mutant import RECIPES, mutant
from ringspec.conformance.diagnose.mutants.ring import RESULTS
from ringspec.conformance.diagnose.mutants.variants import (
    SMALL_TILES,
    USUAL,
    WAYS,
    Way,
    on_call,
    ways_of,
)
from ringspec.conformance.judge import noise as noise_judge
from ringspec.conformance.run.case import run_case
from ringspec.conformance.target.results import due_of
from ringspec.conformance.targets.reference import REFERENCES, block_results, ring_results
from ringspec.recipes import RECIPES as RECIPES_BY_NAME
from ringspec.vectors import open_set
from ringspec.vectors.catalogue.flags import FLAGS

CORE = open_set("core")
RIGHT = mutant("right", "", "", applies=lambda call: True)
GOLDEN = [id for id in CORE.ids if id.startswith(("ring/", "block/", "merge/", "adversarial/"))]
NAMED = [
    # A noise case takes up to ten seconds; test_noise_cases and test_diagnose have faults of rounding.
    pytest.param(id, recipe, marks=pytest.mark.slow) if case.startswith("noise/") else (id, recipe)
    for id in MUTANTS
    for recipe in RECIPES
    if (case := MUTANTS[id].kills.get(recipe))
]


def golden_call(id):
    return call_of(CORE.case(id), CORE.tensors(id))


@pytest.fixture(scope="module")
def cases():
    return {case.id: case for case in (*run_cases("core"), *run_cases("noise"))}


@pytest.mark.parametrize("recipe", REFERENCES)
def test_without_a_bug_the_ring_of_the_mutants_is_the_specification_bit_for_bit(recipe):
    """Every layout, circulation and direction of the core set, in every recipe."""
    right, same = REFERENCES[recipe], MutantTarget(RIGHT, recipe)
    ids = [id for id in GOLDEN if CORE.case(id).formats.inputs in right.capabilities.formats]
    ids = ids[:: 1 if recipe in ("float64", "bf16") else 5]
    assert len(ids) >= 1
    for id in ids:
        call = golden_call(id)
        a, b = right.run(call), same.run(call)
        for name in due_of(call):
            for x, y in zip(getattr(a, name), getattr(b, name), strict=True):
                assert (x.dtype, x.tobytes()) == (y.dtype, y.tobytes()), (id, name)


@pytest.mark.parametrize(("id", "recipe"), NAMED)
def test_a_mutant_is_killed_by_the_case_that_it_names(cases, id, recipe, monkeypatch):
    # Which recipe fits takes most of the time of a noise case, and is not asked here.
    monkeypatch.setattr(noise_judge, "inferred", lambda *given: ())
    record = run_case(MutantTarget(MUTANTS[id], recipe), cases[MUTANTS[id].kills[recipe]])
    assert record.outcome == "mismatch", record.message


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_right_program_passes_every_case_that_kills_a_mutant(cases, recipe):
    for id in sorted({one.kills[recipe] for one in MUTANTS.values() if recipe in one.kills}):
        assert run_case(REFERENCES[recipe], cases[id]).outcome == "pass", id


def test_every_mutant_is_killed_in_both_recipes_or_says_why_not():
    for one in MUTANTS.values():
        for recipe in RECIPES:
            assert (recipe in one.kills) + (recipe in one.unseen) == 1, (one.id, recipe)
    assert set(KILLS) == set(MUTANTS)
    only_rounding = {one.id for one in MUTANTS.values() if one.needs == "statistics"}
    assert all("16-bit" in id or "truncated" in id for id in only_rounding)
    assert len(only_rounding) <= 8


def test_there_are_at_least_seventy_and_every_text_is_whole():
    assert len(MUTANTS) >= 70
    assert len({one.title for one in MUTANTS.values()}) == len(MUTANTS)
    for id, one in MUTANTS.items():
        assert one.id == id and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id)
        assert one.title and not one.title.endswith("."), id
        assert one.what.endswith("."), id
        assert len(one.title) <= 100 and len(one.what) <= 330, id
        assert all(
            re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+(/\S+)?", x) for x in one.links
        )
        assert set(one.flags) <= set(FLAGS), id


def test_most_mutants_are_publicly_reported_bugs():
    assert sum(bool(one.links) for one in MUTANTS.values()) >= 70


def test_flags_of_the_golden_vectors_have_mutants():
    """But for those that are not about a result, or about lengths and layouts that are refused."""
    shown = {flag for one in MUTANTS.values() for flag in one.flags}
    assert set(FLAGS) - shown == {"document-balance", "tolerance-too-wide", "zigzag-needs-causal"}


def test_a_mutant_that_does_not_apply_gives_the_right_results():
    call = golden_call("ring/contiguous-w2")  # no mask, no feature, two workers
    recipe = RECIPES_BY_NAME["bf16"]
    right = RESULTS["ring"](call, recipe, Hooks())
    quiet = [one for one in MUTANTS.values() if not one.applies(call)]
    assert {"ring-direction", "window-per-block", "sink-dropped"} <= {one.id for one in quiet}
    for one in quiet[::9]:
        results = run_mutant(one, call, recipe)
        for name in due_of(call):
            assert all(map(np.array_equal, results[name], right[name])), one.id


# Bugs of a kernel for one mask, of one end of a ring, of a merge: elsewhere there is no such thing.
OF_ONE_KERNEL = {
    "merge-overflow",
    "causal-as-empty-band",
    "empty-document",
    "last-worker-unnormalised",
    "lse-without-maximum",
}
SHOWN_WHERE_IT_APPLIES = (
    mask_bugs,
    packing_bugs,
    merge_bugs,
    lse_bugs,
    empty_bugs,
    backward_bugs,
    head_bugs,
    score_bugs,
    sink_bugs,
    dropout_bugs,
)


@pytest.mark.parametrize("module", SHOWN_WHERE_IT_APPLIES, ids=lambda module: module.__name__[-14:])
def test_a_call_to_which_a_bug_does_not_apply_cannot_show_it(module):
    """Whoever diagnoses looks at applicable mutants alone, so that none may be left out."""
    recipe = RECIPES_BY_NAME["float64"]
    for id in GOLDEN[len(module.BUGS) % 6 :: 6]:
        call, right = golden_call(id), None
        for one in module.BUGS:
            if one.applies(call) or one.id in OF_ONE_KERNEL:
                continue
            right = right or RESULTS[call.operation](call, recipe, Hooks())
            try:
                with np.errstate(all="ignore"):
                    results = RESULTS[call.operation](call, recipe, one.hooks(call, recipe))
            except Exception:  # the bug needs what the call has not got
                continue
            assert coincide(call, right, results, recipe), (one.id, id)


GUISES = [(id, n) for id, one in MUTANTS.items() for n in range(len(one.guises))]
WITH_EMPTY_ROWS = ("ring/striped-negative-offset-w4", "adversarial/nothing-visible-w2")


@pytest.mark.parametrize("way", [*WAYS, SMALL_TILES], ids=Way.in_words)
def test_the_right_program_gives_the_same_in_every_way(way):
    """In float64, with padding, empty rows, features and every circulation."""
    recipe = RECIPES_BY_NAME["float64"]
    assert way != USUAL and way.in_words()
    for id in (*GOLDEN[::7], *WITH_EMPTY_ROWS):
        call = golden_call(id)
        right = RESULTS[call.operation](call, recipe, Hooks())
        assert coincide(call, right, RESULTS[call.operation](call, recipe, Hooks(), way), recipe), (
            id
        )


def test_what_is_left_out_of_a_way_makes_no_difference_on_the_call():
    recipe = RECIPES_BY_NAME["float32"]
    for id in ("ring/contiguous-w3", "ring/contiguous-causal-w3", "ring/contiguous-w4-batches"):
        call = golden_call(id)
        for way in WAYS:
            one, other = (
                run_mutant(MUTANTS["merge-weights-exchanged"], call, recipe, x)
                for x in (way, on_call(way, call))
            )
            assert all(
                np.array_equal(a, b) for n in one for a, b in zip(one[n], other[n], strict=True)
            ), (
                id,
                way,
            )
    assert on_call(WAYS[2], golden_call("ring/contiguous-w3")) != WAYS[2]
    assert ways_of(MUTANTS["scale-twice"].hooks(call, recipe), call) == []
    merges = MUTANTS["empty-merge-nan"].hooks(call, recipe)
    assert len(ways_of(merges, call)) >= 4 and ways_of(merges, call, forward_is_right=True) == []


def test_a_bug_of_empty_rows_shows_in_one_way_and_not_in_another():
    call, recipe = golden_call("ring/contiguous-causal-w3"), RECIPES_BY_NAME["float64"]
    right = RESULTS["ring"](call, recipe, Hooks())
    for id in ("masked-block-nan", "finite-lse-of-empty"):
        spoilt = run_mutant(MUTANTS[id], call, recipe)
        spared = run_mutant(MUTANTS[id], call, recipe, Way(skips=True))
        assert not coincide(call, right, spoilt, recipe), id
        assert coincide(call, right, spared, recipe), id


def test_a_way_changes_tiles_and_the_order_of_merging():
    call, recipe = noise_call("ways", "f32", 4, tokens=32, head_dim=8), RECIPES_BY_NAME["float32"]
    usual = RESULTS["ring"](call, recipe, Hooks())
    for way in (Way(tile_k=2), Way(first_as_is=True, tree=True), Way(normalised=True)):
        other = RESULTS["ring"](call, recipe, Hooks(), way)
        assert not all(map(np.array_equal, usual["o"], other["o"])), way
        assert coincide(call, usual, other, recipe), way


def never(call):
    return False


def bits(results):
    return [x.tobytes() for name in sorted(results) for x in results[name]]


@pytest.mark.parametrize(("id", "n"), GUISES)
def test_a_guise_is_a_bug_and_another_one_than_its_mutant(id, n):
    """In some golden case the right program and the mutant itself give something else."""
    one = MUTANTS[id]
    guise = one.guises[n]
    assert guise.words and not guise.words.endswith(".")
    recipe = RECIPES_BY_NAME["float64"]
    ids = [*WITH_EMPTY_ROWS, *(case for case in GOLDEN if case.startswith("ring/"))]
    if id == "running-max-of-masked-block":  # needs a hidden tile, and exp(-200) = 0
        recipe = RECIPES_BY_NAME["float32"].replace(tile_k=2)
        ids = ["adversarial/first-keys-hidden-then-minus-200"]

    if id == "truncated-p":  # stays within rounding, and is another by its bits
        recipe = RECIPES_BY_NAME["bf16"]

    def other(call):
        got = run_mutant(guise, call, recipe)
        if id == "truncated-p":
            others = (run_mutant(x, call, recipe) for x in (mutant("", "", "", applies=never), one))
            return all(bits(x) != bits(got) for x in others)
        both = (RESULTS[call.operation](call, recipe, Hooks()), run_mutant(one, call, recipe))
        return not any(coincide(call, x, got, recipe) for x in both)

    assert any(other(call) for call in map(golden_call, ids) if guise.applies(call))


# Bugs that are the right program on another call: the specification itself says what they give.
AS_ANOTHER_CALL = {
    "packing-ignored": (wrong.no_documents, "ring/documents-w2"),
    "documents-numbered-by-worker": (
        lambda call: numbered_by_worker(call), "ring/documents-w4"
    ),
    "window-ignored": (wrong.no_window, "ring/window-causal-w4"),
    "window-per-block": (wrong.window_per_block, "ring/window-causal-w4"),
    "local-positions": (wrong.local_indices, "ring/contiguous-causal-w3"),
    "diagonal-inclusive": (wrong.sees_next_key, "ring/zigzag-causal-w3"),
    "scale-missing": (lambda call: with_scale(call, 1.0), "ring/contiguous-causal-w2"),
    "scale-twice": (
        lambda call: with_scale(call, call.terms["scale"] ** 2), "ring/contiguous-causal-w2"
    ),
}  # fmt: skip


def numbered_by_worker(call):
    """Segments instead of document starts, counted by each worker from 0."""
    starts = call.terms["cu_seqlens"]
    document = np.searchsorted(starts, call.index_q, "right") - 1
    document = np.where(call.index_q >= starts[-1], -1, document)
    own = [np.where(ids < 0, -1, ids - ids[ids >= 0].min())[None] for ids in document]
    terms = {name: value for name, value in call.terms.items() if name != "cu_seqlens"}
    tensors = {**call.tensors, "segments_q": own, "segments_k": own}
    return dataclasses.replace(call, terms=terms, tensors=tensors)


def with_scale(call, scale):
    return dataclasses.replace(call, terms={**call.terms, "scale": scale})


@pytest.mark.parametrize("id", AS_ANOTHER_CALL)
def test_a_mutant_is_the_specification_on_the_call_that_it_mistakes_its_own_for(id):
    change, case = AS_ANOTHER_CALL[id]
    call, recipe = golden_call(case), RECIPES_BY_NAME["float64"]
    right = {"ring": ring_results, "block": block_results}[call.operation](change(call), recipe)
    results = run_mutant(MUTANTS[id], call, recipe)
    for name in due_of(call):
        for x, y in zip(results[name], right[name], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_direction_does_not_show_on_two_workers():
    call = golden_call("ring/contiguous-causal-w2")
    assert not MUTANTS["ring-direction"].applies(call)
    forced = RESULTS["ring"](
        call, RECIPES_BY_NAME["float64"], MUTANTS["ring-direction"].hooks(call, None)
    )
    right = RESULTS["ring"](call, RECIPES_BY_NAME["float64"], Hooks())
    assert all(map(np.array_equal, forced["dk"], right["dk"]))


def test_stale_keys_leave_the_forward_right():
    call, recipe = golden_call("ring/contiguous-w2"), RECIPES_BY_NAME["bf16"]
    results = run_mutant(MUTANTS["stale-keys"], call, recipe)
    right = ring_results(call, recipe)
    assert all(map(np.array_equal, results["o"], right["o"]))
    assert not any(map(np.array_equal, results["dq"], right["dq"]))


def test_a_wrong_delta_leaves_dv_right():
    call, recipe = golden_call("ring/contiguous-causal-w3"), RECIPES_BY_NAME["float64"]
    right = ring_results(call, recipe)
    for id in ("block-local-delta", "delta-of-few-rows", "delta-missing", "delta-of-first-step"):
        results = run_mutant(MUTANTS[id], call, recipe)
        assert all(map(np.array_equal, results["dv"], right["dv"])), id
        assert not all(map(np.array_equal, results["dq"], right["dq"])), id
