"""Faults in pairs of tokens that no place of the vocabulary describes, in one kernel of a backward, or in large tiles."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.faults.masks import (
    masks_of,
    of_first_sizes,
    shares_sizes,
    with_more_sizes,
)
from ringspec.conformance.readout.faults.places import (
    PAIRS,
    block_places,
    pairs_listed,
    place_named,
)
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.problem.settings import Setting
from ringspec.conformance.readout.search.starts import widened
from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result
from ringspec.recipes import RECIPES


def two_kernels(call, shown=None, times=None, shown_to_dv=None, lse_of_dq=None):
    """Dense causal attention in float32 on all tokens; its backward computes p once for dq and once for dk and dv.

    Each fault is a function of positions or rows; ``shown`` and ``times`` take positions [S, 1] and [1, S].
    """
    order = np.argsort(call.position_q[:, 0].ravel())
    q, k, v, dy = (
        np.concatenate(list(map(np.asarray, call.tensors[name])), axis=2).astype(np.float32)[0][
            :, order
        ]
        for name in ("q", "k", "v", "dy")
    )
    group = q.shape[0] // k.shape[0]
    k, v = (np.repeat(x, group, axis=0) for x in (k, v))
    i, j = np.ogrid[: q.shape[1], : q.shape[1]]
    causal = j <= i if call.terms.get("causal") else np.ones((len(order), len(order)), bool)
    s = call.terms["scale"] * q @ k.swapaxes(1, 2)
    visible = causal if shown is None else shown(causal, i, j)
    s_forward = np.where(visible, s if times is None else s * times(causal, i, j), -np.inf)
    lse = np.log(np.exp(s_forward).sum(axis=2, keepdims=True))
    o = np.exp(s_forward - lse) @ v
    delta = (dy * o).sum(axis=2, keepdims=True)
    for_dq = np.where(causal, np.exp(s - (lse if lse_of_dq is None else lse_of_dq(lse))), 0)
    visible = causal if shown_to_dv is None else shown_to_dv(causal, i, j)
    for_dv = np.where(visible, np.exp(s - lse), 0)
    dp = dy @ v.swapaxes(1, 2) - delta
    of_keys = (len(k) // group, group, *k.shape[1:])
    results = {
        "o": o, "lse": lse[..., 0],
        "dq": call.terms["scale"] * (for_dq * dp) @ k,
        "dk": call.terms["scale"] * ((for_dv * dp).swapaxes(1, 2) @ q).reshape(of_keys).sum(axis=1),
        "dv": (for_dv.swapaxes(1, 2) @ dy).reshape(of_keys).sum(axis=1),
    }  # fmt: skip
    at = call.position_q[:, 0]
    return Result(
        **{
            n: [x.astype(np.float32)[None][:, :, at[a]] for a in range(call.workers)]
            for n, x in results.items()
        }
    )


class Dense:
    """The target of these faults, read in contiguous layout alone."""

    name = "dense"
    capabilities = Capabilities(
        layouts=("contiguous",), circulations=("kv",), workers=(3,), masks=("causal",), head_ratios=(2,),
        formats=("float32",), only_causal=True,
    )  # fmt: skip

    def __init__(self, **faults):
        self.faults = faults

    def run(self, call):
        return two_kernels(call, **self.faults)


def hidden_where_both_are_3_mod_5(causal, i, j):
    return causal & ~((i % 5 == 3) & (j % 5 == 3) & (i > j))


def shown_beside_the_diagonal_in_odd_rows(causal, i, j):
    return causal | ((j == i + 1) & (i % 4 == 1))


def test_two_kernels_without_a_fault_are_right():
    assert explain_target(Dense()).right


def slow(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "faults, words",
    [
        ({"shown": hidden_where_both_are_3_mod_5}, "the scores are not computed"),
        slow({"shown": shown_beside_the_diagonal_in_odd_rows}, "the mask does not hide what it should hide"),
        slow({"times": lambda causal, i, j: np.where((i % 5 == 3) & (j % 5 == 3), 2, 1)}, "scores are too large by a factor of 2"),
        slow({"shown_to_dv": hidden_where_both_are_3_mod_5}, "dk and dv are lost"),
        slow({"shown_to_dv": shown_beside_the_diagonal_in_odd_rows}, "(for dk and dv alone)"),
    ],
    ids=["hidden", "shown", "scores", "lost", "shown-to-dv"],
)  # fmt: skip
def test_pairs_that_no_place_describes_are_read_from_the_results(faults, words):
    found = explain_target(Dense(**faults))
    assert not found.right and len(found.conclusion.explained) == found.wrong
    said = [
        fault.sentence()
        for fault in found.conclusion.faults
        if fault.phase == ("forward", "backward")["shown_to_dv" in faults]
    ]
    assert len(said) == 1 and words in said[0]
    assert PAIRS in said[0]


def test_zeros_show_one_fault_although_another_changes_every_weight():
    def without_the_last_two_keys(causal, i, j):
        return causal & (j % 8 < 6)

    found = explain_target(
        Dense(shown=without_the_last_two_keys, times=lambda causal, i, j: np.log(2))
    )
    assert len(found.conclusion.explained) == found.wrong
    said = " ".join(found.sentences)
    assert "for the last 2 keys of a worker, the block is not computed" in said
    assert "scores are multiplied by ln 2" in said


def test_a_start_with_more_pairs_that_are_masked_anyway_is_simpler_to_describe():
    causal = np.tri(4, dtype=bool)[None, None, None]
    last_key = np.arange(4) == 3
    lost = causal & last_key
    found = widened(
        np.broadcast_to(lost, (2, 2, 1, 4, 4)), np.broadcast_to(causal & ~last_key, (2, 2, 1, 4, 4))
    )
    assert np.array_equal(found, np.broadcast_to(last_key, found.shape))
    exact = widened(lost, ~lost)
    assert np.array_equal(exact, lost)


def test_sizes_of_tiles_with_the_same_mask_are_named_together():
    rule = "that are masked in part are skipped"
    words = with_more_sizes(
        f"tiles of 5 queries and 2 keys {rule}", f"tiles of 5 queries and 3 keys {rule}"
    )
    assert words == f"tiles of 5 queries and 2 or 3 keys {rule}"
    assert of_first_sizes(words) == f"tiles of 5 queries and 2 keys {rule}"
    assert with_more_sizes(words, "tiles of 5 queries and 4 keys are lost") == words
    other = f"tiles of 4 queries and 4 keys {rule}"  # not 4 queries and 2 keys, which the words would say
    assert with_more_sizes(words, other) == words


def test_rules_about_tiles_are_the_same_if_they_share_a_size_of_each_side():
    rule = "tiles of 5 queries and {} keys are lost"
    assert shares_sizes(rule.format("2 or 3 or 6"), rule.format("3 or 6"))
    assert not shares_sizes(rule.format("2"), rule.format("3 or 6"))
    assert not shares_sizes(rule.format("2"), rule.format("2").replace("lost", "kept"))
    assert not shares_sizes("tiles of 4 queries and 2 keys are lost", rule.format("2"))


def test_zigzag_masks_that_are_wrong_only_in_visible_pairs_of_chunks_are_those_of_loops():
    W, half = 3, 4
    geometry = Geometry(
        W, "kv", 1, "zigzag", positions("zigzag", W, 2 * half), True, None, 2, 1, 0.3
    )
    in_chunks = "in pairs of chunks that"
    found = {mask.words: mask.pattern for mask in masks_of(geometry) if in_chunks in mask.words}
    after = {
        f"the causal mask shows one key too many (key <= query + 1) {in_chunks} it does not hide": 1,
        f"no pair is masked {in_chunks} the mask does not hide": W * 2 * half,
    }
    assert found.keys() == after.keys()
    for words, more in after.items():
        for a, b, _, i, j in np.ndindex(W, W, 1, 2 * half, 2 * half):
            query, key = geometry.position[a, i], geometry.position[b, j]
            shown = key // half <= query // half and key <= query + more
            assert found[words][a, b, 0, i, j] == shown


def test_a_fault_in_the_p_of_dq_alone_is_told_as_such():
    found = explain_target(Dense(lse_of_dq=lambda lse: lse / np.log(2)))
    assert [fault.kind for fault in found.conclusion.faults] == [
        "lse is divided by ln 2 (an lse in base 2 is used as if in base e) (for dq alone)"
    ]


def test_pairs_are_listed_in_words_that_name_the_same_pairs():
    geometry = Geometry(
        3, "kv", 1, "contiguous", positions("contiguous", 3, 8), True, None, 4, 2, 0.1
    )
    visible = masks_of(geometry)[0].pattern
    known = block_places(geometry, "forward", visible)
    random, listed = np.random.default_rng(0), 0
    for _ in range(300):
        table = np.zeros((3, 3, 4, 8, 8), bool)
        for _ in range(random.integers(1, 4)):
            part = np.zeros((4, 8, 8), bool)
            (i, j), (rows, keys) = random.integers(0, 8, 2), random.integers(1, 4, 2)
            part[random.integers(0, 3) :, i : i + rows, j : j + keys] = True
            table |= known[random.integers(len(known))].table & part
        place = pairs_listed(geometry, table, known)
        if place is not None:
            listed += 1
            assert np.array_equal(place.table, table)
            named = place_named(geometry, "forward", visible, place.words, False)
            assert named is not None and np.array_equal(named.table, table), place.words
    assert listed > 200


@pytest.mark.parametrize(
    "words",
    [
        "for the pairs of query 8 with key 0",
        "in head 4, for the pairs of query 0 with key 0",
        "in the blocks of nobody, for the pairs of query 0 with key 0",
        "for the pairs of",
        "for the pairs of queries 0-999999999 with key 0",
        "for the pairs of queries 3-1 with key 0",
        "for the pairs of query - with key 0",
    ],
)
def test_words_for_pairs_that_a_ring_does_not_have_name_nothing(words):
    geometry = Geometry(
        3, "kv", 1, "contiguous", positions("contiguous", 3, 8), True, None, 4, 2, 0.1
    )
    assert place_named(geometry, "forward", masks_of(geometry)[0].pattern, words, False) is None


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_problem_in_whole_tiles_has_the_results_of_the_problem(layout):
    in_tiles = dataclasses.replace(
        Dense.capabilities, layouts=(layout,), tokens_multiple=128, head_dims=(64, 128)
    )
    found = problem_for(Setting("causal", layout), in_tiles)
    assert found.spread == 16 and found.asked[0].worker("q", 0).shape == (1, 4, 128, 128)
    for asked, read in zip(found.asked, (found.call, found.proof), strict=True):
        small = run_right(read, RECIPES["float64"])
        large = found.results([run_right(asked, RECIPES["float64"])])[0]
        for name in ("o", "lse", "dq", "dk", "dv"):
            got, want = np.stack(large[name]), np.stack(small[name])
            np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
def test_a_kernel_with_large_tiles_is_read():
    class Tiled(Dense):
        capabilities = dataclasses.replace(
            Dense.capabilities, tokens_multiple=128, head_dims=(128,)
        )

    assert explain_target(Tiled()).right
    found = explain_target(Tiled(lse_of_dq=lambda lse: lse / np.log(2)))
    assert len(found.conclusion.explained) == found.wrong == 1
    assert found.conclusion.faults[0].kind.startswith("lse is divided by ln 2")
