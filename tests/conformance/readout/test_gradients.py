"""Faults of the buffers and routes of gradients: not cleared, mixed over heads or workers, and lost in skipped steps."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.faults.kinds import Kind, at_counts
from ringspec.conformance.readout.faults.places import Place
from ringspec.conformance.readout.faults.product_kinds import REPLACED
from ringspec.conformance.readout.search.backward_trials import of_whole_sums

pytestmark = pytest.mark.usefixtures("no_catalogue")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def told_of(ring):
    """Return the explanation, which must account for every problem that failed."""
    told = explain_target(ring)
    assert told.wrong == len(told.conclusion.explained) > 0
    return told


def of_workers(shared, *names):
    """Return the change of results in which every worker returns what ``shared`` makes of all workers' gradients."""

    def change(results):
        for name in names:
            results[name] = [shared(results[name], r) for r in range(len(results[name]))]

    return change


def of_heads(shared, *names):
    """Return the change of results in which every head has what ``shared`` makes of all heads' gradients."""

    def change(results):
        for name in names:
            results[name] = [
                np.stack([shared(list(x), h) for h in range(len(x))]) for x in results[name]
            ]

    return change


def summed(every, number):
    return sum(every)


def averaged(every, number):
    return sum(every) / len(every)


def summed_so_far(every, number):
    return sum(every[: number + 1])


def first(every, number):
    return every[0]


def last(every, number):
    return every[-1]


@pytest.mark.parametrize(
    ("names", "shared", "words"),
    [
        (("dk", "dv"), summed, "dk and dv are summed over all workers, and every worker gets the sum"),
        slow(("dq",), summed_so_far, "dq is summed over a worker and the workers before it"),
        slow(("dk", "dv"), averaged, "dk and dv are averaged over all workers, and every worker gets the average"),
        slow(("dk", "dv"), last, "dk and dv are those of the last worker on every worker"),
        slow(("dq", "dk", "dv"), first, "dq, dk and dv are those of the first worker on every worker"),
        slow(("dq", "dk", "dv"), summed, "dq, dk and dv are summed over all workers, and every worker gets the sum"),
    ],
)  # fmt: skip
def test_gradients_that_workers_share_are_named(names, shared, words):
    told = told_of(TiledRing(last_change=of_workers(shared, *names)))
    assert told.sentences == (f"In the backward pass, {words}.",)


@pytest.mark.parametrize(
    ("names", "shared", "words"),
    [
        (("dk", "dv"), last, "dk and dv are those of the last head in every head"),
        slow(("dv",), summed, "dv is summed over all heads, and every head gets the sum"),
        slow(("dq",), averaged, "dq is averaged over all heads, and every head gets the average"),
        slow(("dk", "dv"), first, "dk and dv are those of the first head in every head"),
    ],
)  # fmt: skip
def test_gradients_that_heads_share_are_named(names, shared, words):
    told = told_of(TiledRing(last_change=of_heads(shared, *names)))
    assert told.sentences == (f"In the backward pass, {words}.",)


@pytest.mark.parametrize(
    ("skipped", "words"),
    [
        ("kept", "in a skipped step, a worker drops the arriving dk and dv and sends its previous ones again"),
        ("lost", "in a skipped step, a worker sends zeros in place of the arriving dk and dv"),
        ("not sent", "in a skipped step, a worker sends no dk and dv, and the next one goes on with what it received last"),
    ],
)  # fmt: skip
def test_what_a_skipped_step_does_with_the_arriving_gradients_is_named(skipped, words):
    told = told_of(TiledRing(skipped=skipped))
    assert f"In the backward pass, {words}." in (told.sentences[0], *told.alternatives)


@pytest.mark.parametrize(
    ("names", "size", "words"),
    [
        (("dk", "dv"), 5, "dk and dv of a tile of 5 tokens still contain those of the tiles before it"),
        slow(("dk", "dv"), 3, "dk and dv of a tile of 3 tokens still contain those of the tiles before it"),
        slow(("dq",), 3, "dq of a tile of 3 tokens still contains those of the tiles before it"),
        slow(("dk",), 7, "dk of a tile of 7 tokens still contains those of the tiles before it"),
    ],
)  # fmt: skip
def test_the_buffer_of_a_tile_that_is_not_cleared_is_named_with_its_size(names, size, words):
    told = told_of(TiledRing(rows=size, keys=size, uncleared=names))
    assert told.sentences == (f"In the backward pass, {words} (the tile is not cleared).",)


def test_the_buffer_of_a_block_that_is_not_cleared_is_named():
    told = told_of(TiledRing(("striped",), uncleared_steps=9))
    assert told.sentences == (
        "In the backward pass, a block's dk and dv still contain those of the earlier steps (the buffer is not cleared).",
    )


def without_delta(p, dp, delta):
    return p * dp


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"last_change": of_workers(summed, "dk", "dv"), "ds_of": without_delta}, ("dk and dv are summed over all workers, and every worker gets the sum", "delta is left out")),
        ({"uncleared": ("dv",), "own_lse": True}, ("p is computed with the block's own lse", "dv of a tile of 5 tokens still contains those of the tiles before it (the tile is not cleared)")),
    ],
    ids=["shared", "not-cleared"],
)  # fmt: skip
def test_a_fault_that_moves_the_zeros_of_one_matrix_is_named_beside_one_of_several_matrices(
    faults, words
):
    told = told_of(TiledRing(rows=3, keys=5, **faults))
    assert told.sentences == tuple(f"In the backward pass, {one}." for one in words)


@pytest.mark.parametrize("layouts", [("contiguous",), slow(("zigzag", "striped"))])
def test_dk_and_dv_that_are_exchanged_at_each_hop_are_named(layouts):
    told = told_of(TiledRing(layouts, only_causal=False, exchanged=True))
    assert told.sentences == ("In the backward pass, dk and dv are exchanged at each hop.",)


def test_gradients_that_are_read_as_a_stack_of_both_are_named():
    told = told_of(MutantTarget(MUTANTS["dkv-transfer-misread"], "float32"))
    assert told.sentences == (
        "In the backward pass, dk is returned as dk + dv, and dv as the dk + dv of the next worker.",
    )


@pytest.mark.slow  # 5 s: one of the three layouts needs a search of its own
def test_a_rule_about_tiles_that_one_layout_shows_is_tried_where_another_shows_only_pairs():
    def first_query_is_blind(row, last_row, key, last_key):
        return key > row

    ring = TiledRing(
        ("contiguous", "zigzag", "striped"),
        rows=3,
        keys=5,
        passes=("backward",),
        is_skipped=first_query_is_blind,
        last_change=of_workers(summed, "dq"),
    )
    told = told_of(ring)
    assert set(told.sentences) == {
        "In the backward pass, dq is summed over all workers, and every worker gets the sum.",
        "In the backward pass, tiles of 2 or 3 or 6 queries and 5 keys whose first query does not see their first key are skipped.",
        "In the layouts zigzag and striped, only the visible part of a block is computed, as one range.",
    }


def power_of_2(s, lse):
    return np.exp2(s - lse)


def delta_at_visible_pairs(p, dp, delta):
    return np.where(p > 0, p * dp - delta, 0)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"p_of": power_of_2}, "p is 2**(s - lse), where s and lse are natural"),
        slow({"p_of": lambda s, lse: np.exp((s - lse) / np.log(2))}, "p is exp(s - lse), where s and lse are in base 2"),
        ({"last_block": False}, "p is computed with the lse of all blocks but that of the last step"),
        ({"delta_so_far": True}, "delta is summed over only the keys of the blocks up to this one"),
        slow({"ds_of": delta_at_visible_pairs}, "dS is p dp - delta, not p (dp - delta), at visible pairs"),
    ],
    ids=["base-2", "base-e", "lse", "delta", "dS"],
)  # fmt: skip
def test_a_wrong_p_lse_delta_or_ds_is_named(faults, words):
    told = told_of(TiledRing(rows=8, keys=8, only_causal=False, **faults))
    assert told.sentences == (f"In the backward pass, {words}.",)


@pytest.mark.parametrize(
    ("of", "words"),
    [
        ({"dk": "k"}, "dk starts as a copy of k"),
        slow({"dv": "v"}, "dv starts as a copy of v"),
        slow({"dk": "k", "dv": "v"}, "dk and dv start as copies of k and v"),
    ],
    ids=["dk", "dv", "both"],
)
def test_gradients_that_start_as_copies_are_named(of, words):
    ring = TiledRing(("contiguous", "zigzag"), only_causal=False)

    class FromCopies:
        name, capabilities = "ring whose gradients start as copies", ring.capabilities

        def run(self, call):
            result = ring.run(call)
            sums = {
                name: [x + y for x, y in zip(getattr(result, name), call.tensors[inp], strict=True)]
                for name, inp in of.items()
            }
            return dataclasses.replace(result, **sums)

    assert told_of(FromCopies()).sentences == (f"In the backward pass, {words}, not as zeros.",)


def test_what_replaces_a_sum_is_told_only_of_whole_sums():
    """Shares of earlier steps are lost, too, so the words cannot say 'from step 1 on'."""
    table = np.ones((3, 3, 1, 1, 1), bool)
    step = np.array([[0, 2, 1], [1, 0, 2], [2, 1, 0]])[:, :, None, None, None]
    b = np.arange(3)[None, :, None, None, None]
    for names, whole in (
        (("dk", "dv"), table & (b == 1)),
        (("dq",), table & (b.swapaxes(0, 1) == 1)),
    ):
        able = of_whole_sums(Kind(f"a block's gradient is {REPLACED}", at_counts(names, 0.0)))
        assert able(Place("", table, 0.0)) and able(Place("", whole, 0.0))
        assert not able(Place("from step 1 on", step > 0, 0.0))
    assert of_whole_sums(Kind("the share of dk is lost", at_counts(("dk",), 0.0))) is None


def in_bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_a_rounded_gradient_does_not_hide_values_that_the_forward_pass_rounds():
    """A readout's keys and values are the same in bfloat16; those of its proof are not."""

    def rounded_dq(results):
        results["dq"] = [in_bfloat16(x) for x in results["dq"]]

    ring = TiledRing(passes=("forward",), sent=in_bfloat16, last_change=rounded_dq)
    told = explain_target(ring)
    assert told.unexplained
    assert told.sentences[1].endswith("in part: In the backward pass, dq is rounded to bfloat16.")
