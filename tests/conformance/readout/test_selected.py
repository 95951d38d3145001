"""A prediction that is selected from known ones, pair by pair or row by row, equals the computed prediction."""

import dataclasses
import functools

import numpy as np
import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.read_problems import run_problem
from ringspec.conformance.readout.faults.choices import OF_ALL
from ringspec.conformance.readout.faults.kinds import Fault
from ringspec.conformance.readout.faults.merges import OTHER_TOKENS
from ringspec.conformance.readout.faults.places import joined
from ringspec.conformance.readout.model.backward import backward_pass
from ringspec.conformance.readout.model.forward import forward_pass
from ringspec.conformance.readout.model.merging import weights_of_blocks
from ringspec.conformance.readout.model.scores import scores_of_pairs
from ringspec.conformance.readout.problem.chosen import problems_for
from ringspec.conformance.readout.problem.geometry import WAYS
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search import (
    backward_trials,
    forward_search,
    row_search,
    tile_search,
)
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.targets.reference import REFERENCES


@functools.cache
def first_problem():
    return problems_for(REFERENCES["float32"].capabilities)[0][0]


def assert_same(one, other):
    for part in ("equal", "alike", "ours"):
        got, wanted = getattr(one, part), getattr(other, part)
        assert got.keys() == wanted.keys()
        for name, x in wanted.items():
            known = np.broadcast_to(x, got[name].shape)
            if part != "ours":
                assert np.array_equal(got[name], known)
            else:  # merges without a fault have other roundings than merges step by step
                np.testing.assert_allclose(got[name], known, rtol=1e-9, atol=1e-12)


def test_a_local_fault_of_the_backward_pass_gives_at_its_place_what_it_gives_everywhere():
    context = SearchContext(first_problem().pairs, first_problem().tolerance)
    right, shown = context.model.right, forward_pass(context.model, context.model.right)
    saved = shown, shown.lse, shown.through
    kinds, places = context.kinds("backward"), context.places("backward")
    rng = np.random.default_rng(1)
    tables = backward_pass(
        context.model, Fault("backward", kinds[-1], places.blocks[3]).applied(right), *saved
    )
    noise = [x if x is None else x * rng.choice([1.0, 1.1], x.shape) for x in tables]
    seen = Seen(shown.weights, shown.lse, np.ones(shown.lse.shape), shown.through, *noise)
    without = backward_trials.with_kind(context, seen, saved, right)
    selected = 0
    with np.errstate(all="ignore"):
        for kind in [x for x in kinds if not x.slots & {*OF_ALL}][::80]:
            everywhere = Fault("backward", kind, places.blocks[0])
            applied = backward_trials.with_kind(context, seen, saved, everywhere.applied(right))
            attempt = backward_trials.attempts(
                context, seen, saved, right, without, applied, everywhere
            )
            if attempt.func is backward_trials.in_pairs_of:
                selected += 1
                for part in places.parts[selected % 5 + 1 :: 17]:
                    fault = Fault("backward", kind, joined(places.blocks[selected % 8], part))
                    computed = backward_trials.with_kind(context, seen, saved, fault.applied(right))
                    assert_same(attempt(fault), computed[1])
    assert selected > 10


@pytest.mark.parametrize("circulation", ["kv", "q"])
def test_a_fault_in_some_rows_gives_in_them_what_it_gives_in_all(circulation):
    claims = REFERENCES["float32"].capabilities
    problem = problems_for(dataclasses.replace(claims, circulations=(circulation,)))[0][0]
    context = SearchContext(problem.pairs, problem.tolerance)
    model, right = context.model, context.model.right
    shown = forward_pass(model, right)
    seen = Seen(shown.weights, shown.lse, shown.lse, shown.through)
    plain = forward_search.match_forward(context, seen, shown)
    kinds, places = context.kinds("forward"), context.places("forward")
    kinds = [x for x in kinds if row_search.rows_alone(context, x, right)]
    assert len(kinds) > 300
    with np.errstate(all="ignore"):
        for kind in kinds[::80]:
            everywhere = Fault("forward", kind, places.blocks[0]).applied(right)
            applied = forward_search.match_forward(context, seen, forward_pass(model, everywhere))
            for part in context.workers.parts[1::9]:
                rows = part.table[:, 0, :, :, 0]
                one = Fault("forward", kind, part).applied(right)
                computed = forward_search.match_forward(context, seen, forward_pass(model, one))
                selected = row_search.in_rows_of(context, plain, applied, rows)
                assert_same(selected, computed)


@pytest.mark.parametrize(
    ("layout", "parts"), [("contiguous", ""), *(("zigzag", x) for x in WAYS["zigzag"])]
)
def test_some_queries_are_merged_as_in_the_whole_ring(layout, parts):
    """Wrong merges, of tiles and of blocks, are ruled out by one query of each worker."""
    claims = dataclasses.replace(REFERENCES["float32"].capabilities, layouts=(layout,))
    problem = next(x for x in problems_for(claims)[0] if "causal" in x.id)
    there = dataclasses.replace(problem.pairs.geometry, parts=parts)
    context = SearchContext(dataclasses.replace(problem.pairs, geometry=there), problem.tolerance)
    model, right, one = context.model, context.model.right, slice(5, 6)
    blocks = context.places("forward").blocks
    there = np.array([x.table[..., 0] for x in blocks])
    kinds, s = context.kinds("forward"), scores_of_pairs(model, right)[:, :, :, one]
    of_tiles = [
        x for x in kinds if x.slots == {"tiles"} and dict(x.changes)["tiles"].merge != OTHER_TOKENS
    ]
    of_blocks = [x for x in kinds if x.slots == {"merge"}]
    assert len(of_tiles) > 500 and len(of_blocks) > 50
    with np.errstate(all="ignore"):
        for kind in of_tiles[::7]:
            c = Fault("forward", kind, blocks[0]).applied(right)
            whole = forward_pass(model, c)
            weights, lse = tile_search.merged_rows(model, s, c)
            np.testing.assert_allclose(weights, whole.weights[:, :, :, one], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(lse, whole.lse[..., one], rtol=1e-9)
        for kind in of_blocks[::3]:
            c = Fault("forward", kind, blocks[0]).applied(right)
            assert row_search.by_rows(c) or "(token, head)" in kind.words
            if row_search.by_rows(c):
                some = weights_of_blocks(model, right, c, there, one)
                every = weights_of_blocks(model, right, c, there, slice(None))
                for x, y in zip(some[:3], every[:3], strict=True):
                    np.testing.assert_array_equal(x, y[..., one])


def test_places_with_the_same_key_have_the_same_forward_pass():
    context = SearchContext(first_problem().pairs, first_problem().tolerance)
    model, right = context.model, context.model.right
    kinds, places = context.kinds("forward"), context.places("forward")
    there = np.array([x.table[..., 0] for x in places.blocks])
    equal = 0
    for kind in [x for x in kinds if x.slots == {"merge"}][:6]:
        everywhere = Fault("forward", kind, places.blocks[0]).applied(right)
        keys = weights_of_blocks(model, right, everywhere, there, slice(None))[3]
        first = {}
        for place, key in zip(places.blocks, keys, strict=True):
            now = forward_pass(model, Fault("forward", kind, place).applied(right))
            known = first.setdefault(key, now)
            equal += known is not now
            for name in ("weights", "lse", "through"):
                assert np.array_equal(getattr(now, name), getattr(known, name), equal_nan=True)
    assert equal > 20


def test_a_head_that_reads_a_wrong_key_head_is_found_in_a_few_evaluations():
    target = MutantTarget(MUTANTS["last-head-reads-first-key-head"], "float32")
    found = run_problem(target, first_problem()).reading
    assert found.explained and found.evaluations < 2_000
