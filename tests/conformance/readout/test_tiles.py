"""Faults of the tiles in which a kernel computes its blocks: how they are merged, masked, skipped and filled up."""

import dataclasses

import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing, merged

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.faults.masks import every_mask
from ringspec.conformance.readout.problem.geometry import WAYS, WHOLE, Geometry, positions

pytestmark = pytest.mark.usefixtures("no_catalogue")

LAYOUTS = ("contiguous", "zigzag", "striped")


def not_rescaled(old, new, scale):
    return np.where(np.isneginf(old), 0, 1).astype(np.float32)


# A worker's own zigzag block is three calls, and every other block is one; calls are merged by their lse.
CALLS = {"layouts": LAYOUTS, "own_chunks": True, "merged": merged}


def unscaled(old, new, scale):
    return np.exp((old - new) / scale)


def of_first_head(old, new, scale):
    c = np.exp(old - new)
    return np.repeat(c[::2], 2, axis=0)


def by_first_query(i, j, row, key):
    """Hide keys as if queries were counted from the first of their tile."""
    return j > i - row


def both_by_first(i, j, row, key):
    return j - key > i - row


def first_query_is_blind(row, last_row, key, last_key):
    """Skip a tile by what its first query sees, not its last."""
    return key > row


def last_pair_is_hidden(row, last_row, key, last_key):
    return last_key > last_row


def p_times_dp_minus_delta(p, dp, delta):
    """Return dS with p multiplied by dp alone, so that it is not 0 where p is."""
    return p * dp - delta


def named(sentence, ring):
    """Assert that the sentence explains every problem that failed.

    Others may only say what the backward pass uses, and what the kernel computes as one range.
    """
    told = explain_target(ring)
    assert told.wrong == len(told.conclusion.explained) > 0
    assert told.sentences[0] == sentence
    others = [one for one in told.sentences[1:] if one not in told.conclusion.ways]
    assert all(one.startswith("The backward pass ") for one in others)
    return told


@pytest.mark.parametrize(("rows", "keys"), [(8, 3), (3, 5), (5, 2)])
def test_a_ring_that_computes_the_visible_parts_of_blocks_in_tiles_is_right(rows, keys):
    told = explain_target(TiledRing(LAYOUTS, rows, keys))
    assert told.right and len(told.runs) > 3 and not told.sentences


@pytest.mark.parametrize(
    ("keys", "faults", "sentence"),
    [
        (
            3,
            {"alpha": not_rescaled},
            "In the forward pass, between tiles of 3 keys of all blocks, the running o is not rescaled when the maximum rises "
            "(l is).",
        ),
        pytest.param(
            2,
            {"alpha": unscaled},
            "In the forward pass, between tiles of 2 keys of all blocks, the running o is rescaled by the exponential of the "
            "unscaled difference of the maxima (l is correct).",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            3,
            {"alpha": of_first_head},
            "In the forward pass, between tiles of 3 keys of all blocks, the running o is rescaled by the factor of the first "
            "query head of each key head (l is correct).",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            3,
            {"returned": [0, 2, 1, 3]},
            "In the forward pass, the returned o is that of the heads in another order (h mod group, then h // group).",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["not-rescaled", "unscaled", "first-head", "order-of-heads"],
)
def test_a_fault_between_tiles_is_named(keys, faults, sentence):
    named(sentence, TiledRing(keys=keys, **faults))


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(("zigzag",), marks=pytest.mark.slow)], ids=["all", "zigzag"]
)
def test_a_fault_between_tiles_has_one_name_if_own_chunks_are_calls(layouts):
    words = "between tiles of 3 keys within a block, from the last to the first, the running o and l are not rescaled when the maximum rises"
    faults = {"alpha": not_rescaled, "l_too": True, "from_the_last": True}
    named(f"In the forward pass, {words}.", TiledRing(**{**CALLS, "layouts": layouts}, **faults))


# Each wrong in the backward pass alone: rows and keys of a tile, the fault, and what is said of tiles.
IN_TILES = {
    "count-queries": (3, 5, {"hides": by_first_query}, "3 queries and 5 keys that are masked in part count queries from the tile's first"),
    "count-both": (5, 2, {"hides": both_by_first}, "5 queries and 2 keys that are masked in part count queries and keys from the tile's first"),
    "first-query": (5, 2, {"is_skipped": first_query_is_blind}, "5 queries and 2 keys whose first query does not see their first key are skipped"),
    "last-pair": (3, 5, {"is_skipped": last_pair_is_hidden}, "3 queries and 5 keys whose last query does not see their last key are skipped"),
}  # fmt: skip


def in_tiles(layouts, fault):
    rows, keys, faults, words = IN_TILES[fault]
    ring = TiledRing(layouts, rows, keys, passes=("backward",), **faults)
    named(f"In the backward pass, tiles of {words}.", ring)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        ("zigzag", "count-queries"),
        ("striped", "first-query"),
        pytest.param("zigzag", "last-pair", marks=pytest.mark.slow),
        pytest.param("zigzag", "first-query", marks=pytest.mark.slow),
        pytest.param("striped", "count-queries", marks=pytest.mark.slow),
        pytest.param("striped", "last-pair", marks=pytest.mark.slow),
    ],
)
def test_a_fault_in_tiles_of_the_visible_part_of_a_block_is_named(layout, fault):
    in_tiles((layout,), fault)


@pytest.mark.parametrize(
    "fault",
    [x if x == "count-both" else pytest.param(x, marks=pytest.mark.slow) for x in IN_TILES],
)
def test_a_fault_in_tiles_has_one_name_in_all_layouts(fault):
    in_tiles(LAYOUTS, fault)


def test_a_sentence_says_what_is_one_range_if_the_numbers_depend_on_it():
    queries = (
        "tiles of 3 queries and 5 keys that are masked in part count queries from the tile's first"
    )
    faults = {"hides": by_first_query, "passes": ("backward",)}
    told = named(f"In the backward pass, {queries}.", TiledRing(LAYOUTS, 3, 5, **faults))
    assert told.sentences[-1] == (
        "In the layouts zigzag and striped, only the visible part of a block is computed, as one range."
    )


@pytest.mark.parametrize("layout", ["contiguous", pytest.param("striped", marks=pytest.mark.slow)])
def test_a_ds_that_is_not_0_in_the_hidden_pairs_of_computed_tiles_is_named(layout):
    words = "dS is p dp - delta, not p (dp - delta), as if tiles of 3 queries and 5 keys that should be masked in part are not masked"
    named(
        f"In the backward pass, {words}.",
        TiledRing((layout,), 3, 5, ds_of=p_times_dp_minus_delta),
    )


@pytest.mark.parametrize(
    ("keys", "ways"),
    [(3, {}), pytest.param(5, {}, marks=pytest.mark.slow), (3, CALLS)],
    ids=["3", "5", "own-chunks"],
)
def test_zeros_that_fill_up_the_last_tile_and_count_as_keys_are_named(keys, ways):
    words = f"the zeros that fill up the last tile of {keys} keys of a block are counted as keys with score 0 where no mask hides them"
    named(f"In the forward pass, {words}.", TiledRing(keys=keys, filled=True, **ways))


@pytest.mark.parametrize(
    ("keys", "sizes"), [(6, "6"), pytest.param(5, "5", marks=pytest.mark.slow)]
)
def test_copies_of_the_last_key_that_fill_up_the_last_tile_are_named(keys, sizes):
    words = f"the last tile of {sizes} keys of a block is filled up with copies of its last key"
    ring = TiledRing(rows=5, keys=keys, copied=True, only_causal=False)
    named(f"In the forward pass, {words}.", ring)


def test_a_kernel_may_compute_whole_zigzag_blocks_in_tiles():
    """Tiles of 5 queries and 3 keys that are skipped if their first query does not see their first key."""
    W, n = 3, 8
    position = positions("zigzag", W, n)
    expected = position[:, None, :, None] >= position[None, :, None, :]
    for a, b, i, j in np.ndindex(W, W, n, n):
        if position[a, i - i % 5] < position[b, j - j % 3]:
            expected[a, b, i, j] = False
    geometry = Geometry(W, "kv", 1, "zigzag", position, True, None, 4, 2, 0.3)
    words = (
        "tiles of 5 queries and 3 keys whose first query does not see their first key are skipped"
    )
    same = [
        any(
            x.words == words and np.array_equal(x.pattern[:, :, 0], expected)
            for x in every_mask(dataclasses.replace(geometry, parts=parts))
        )
        for parts in WAYS["zigzag"]
    ]
    assert same == [parts == WHOLE for parts in WAYS["zigzag"]]


@pytest.mark.parametrize(
    ("layout", "whole", "passes"),
    [
        ("zigzag", "keys", ("backward",)),
        pytest.param("striped", "queries", ("backward",), marks=pytest.mark.slow),
        pytest.param("zigzag", "keys", ("forward", "backward"), marks=pytest.mark.slow),
    ],
)
def test_a_short_last_tile_that_is_skipped_is_named(layout, whole, passes):
    of_pass = "forward" if "forward" in passes else "backward"
    size = "3 or 6" if layout == "striped" else "3"
    named(
        f"In the {of_pass} pass, the short last tile of {size} {whole} of the visible part of each block is skipped.",
        TiledRing((layout,), 3, 3, passes, whole=whole),
    )


@pytest.mark.slow
def test_other_sizes_and_words_of_a_short_last_tile_are_told_beside_its_slots():
    told = explain_target(TiledRing(rows=3, passes=("backward",), whole="queries"))
    assert (
        "In the backward pass, for the last 2 queries of a worker, the block is not computed."
        in told.sentences
    )
    assert (
        "In the backward pass, the short last tile of 3 or 6 queries of the visible part of each block is skipped."
        in told.alternatives
    )


def test_the_lse_of_a_block_from_the_forward_pass_is_named_beside_tiles_that_only_the_backward_pass_skips():
    ring = TiledRing(
        rows=3, keys=5, passes=("backward",), own_lse=True, is_skipped=first_query_is_blind
    )
    told = explain_target(ring)
    assert told.wrong == len(told.conclusion.explained) > 0
    assert told.sentences == (
        "In the backward pass, tiles of 2 or 3 or 6 queries and 5 keys whose first query does not see their first key are skipped.",
        "In the backward pass, p is computed with the block's own lse.",
    )
