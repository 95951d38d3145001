"""Faults in the tiles that need no mask, or in those that are masked in part, and faults of a single tile's statistics."""

import dataclasses

import numpy as np
from conformance.readout.tiled_ring import TiledRing

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.faults.masks import every_mask, right_mask
from ringspec.conformance.readout.faults.tile_places import tile_places, tiles_fitting
from ringspec.conformance.readout.problem.chosen import problem_of, settings_for
from ringspec.conformance.readout.problem.geometry import VISIBLE
from ringspec.conformance.targets.reference import reference_float32


def geometry_of(name):
    settings, _ = settings_for(reference_float32.capabilities)
    problems = (problem_of(one, reference_float32.capabilities) for one in settings)
    return next(one for one in problems if name in one.id).pairs.geometry


def named(geometry, words):
    right = right_mask(geometry).pattern
    return next(one.table for one in tile_places(geometry, right) if one.words == words)


def test_tiles_that_need_no_mask_are_those_whose_pairs_are_all_visible():
    table = named(
        geometry_of("causal-contiguous"), "in tiles of 3 queries and 5 keys that need no mask"
    )
    own = np.zeros((8, 8), bool)
    own[6:, :5] = True
    assert np.array_equal(table[1, 1, 0], own)
    assert table[1, 0].all() and not table[0, 1].any()


def test_tiles_that_are_masked_in_part_contain_hidden_pairs():
    table = named(
        geometry_of("causal-contiguous"),
        "in tiles of 3 queries and 5 keys that are masked in part",
    )
    own = np.zeros((8, 8), bool)
    own[:6, :5] = own[3:, 5:] = True
    assert np.array_equal(table[0, 0, 0], own)
    assert not table[1, 0].any()


def test_tiles_of_the_visible_part_of_a_zigzag_block_begin_at_its_first_query():
    geometry = dataclasses.replace(geometry_of("causal-zigzag"), parts=VISIBLE)
    table = named(geometry, "in tiles of 3 queries and 5 keys that need no mask")
    later = np.zeros((8, 8), bool)
    later[4:] = True
    assert np.array_equal(table[0, 1, 0], later)


def test_tiles_are_found_from_the_pairs_that_show_a_fault():
    geometry = geometry_of("causal-contiguous")
    right = right_mask(geometry).pattern
    words = "in tiles of 2 queries and 3 keys that need no mask"
    pairs = named(geometry, words) & right
    assert words in [one.words for one in tiles_fitting(geometry, right, pairs, pairs)]
    assert tiles_fitting(geometry, right, right, right & ~pairs) == []


def of_its_tile(p, dp, delta):
    return p * (dp - (p * dp).sum(axis=-1, keepdims=True))


def test_a_mask_with_one_key_too_many_moves_the_diagonal_of_every_block_that_needs_a_mask():
    words = "the mask of a block that needs one shows one key too many in each row"
    masks = {one.words: one.pattern for one in every_mask(geometry_of("causal-striped"))}
    i, j = np.indices((8, 8))
    assert np.array_equal(masks[words][1, 0, 0], j <= i + 1)
    assert np.array_equal(masks[words][0, 1, 0], j <= i)
    fewer = masks[words.replace("shows", "hides")]
    assert np.array_equal(fewer[1, 0, 0], j < i)
    assert np.array_equal(fewer[0, 1, 0], j < i - 1)


def test_a_delta_of_only_a_tile_of_keys_is_named():
    found = explain_target(TiledRing(rows=8, keys=5, ds_of=of_its_tile))
    assert found.wrong == len(found.conclusion.explained) > 0
    assert found.sentences[0] == (
        "In the backward pass, delta is summed over only the keys of the tile, in tiles of 5 keys."
    )
