"""Faults of a ring between its blocks, of the last tile of a block, and of delta, that the readout names."""

import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing, merged

from ringspec.conformance.explain.explain import explain_target

pytestmark = pytest.mark.usefixtures("no_catalogue")

BACKWARD = ("backward",)
OF_BACKWARD = (
    "The backward pass is the gradient of this wrong forward pass.",
    "The gradients are right.",
)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def told_of(**faults):
    """Return the explanation of a ring with these faults, which must account for every problem that failed."""
    told = explain_target(TiledRing(**faults))
    assert told.wrong == len(told.conclusion.explained) > 0
    return told


def named(*words, phase="backward", **faults):
    """Assert that these are all sentences, apart from what the backward pass makes of a wrong forward pass."""
    found = told_of(**faults)
    told = [one for one in found.sentences if one not in (*OF_BACKWARD, *found.conclusion.ways)]
    assert sorted(told) == sorted(f"In the {phase} pass, {one}." for one in words)


# Merges of a worker's blocks, each (o, lse, whether it is visible).


def log2_of_l(m, l):
    return m + np.log2(l)


def logaddexp_in_base_2(x, y):
    """Return a merged lse from a natural logarithm where one in base 2 belongs."""
    x, y = x / np.log(2), y / np.log(2)
    return (np.maximum(x, y) + np.log(1 + np.exp2(-abs(x - y)))) * np.log(2)


def merged_in_base_2(blocks):
    return merged(blocks, logaddexp_in_base_2)


def first_o_is_overwritten(blocks):
    visible = [block for block in blocks if block[2]]
    if len(visible) > 1:
        visible[0] = (visible[1][0], *visible[0][1:])
    return merged(visible)


def later_blocks_share_a_buffer(blocks):
    visible = [block for block in blocks if block[2]]
    return merged([visible[0], *((visible[-1][0], *block[1:]) for block in visible[1:])])


def hidden_in_lse(blocks):
    o, lse = merged(blocks)
    for _, lse_of_block, is_visible in blocks:
        if not is_visible:
            lse = np.logaddexp(lse, lse_of_block)
    return o, lse


def not_rescaled(old, new, scale):
    return np.where(np.isneginf(old), 0, 1).astype(np.float32)


def bfloat16(x):
    """Return float32 numbers, rounded to the nearest bfloat16 numbers."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def replaced(total, share, first):
    total[:] = share


def replaced_and_added(total, share, first):
    total[:] = share if first else 2 * share


def by_first_query(i, j, row, key):
    return j > i - row


def own_is_hidden(i, j, row, key):
    return j >= i


def weighed_by_powers_of_2(blocks):
    """Merge normalised o by weights 2**lse of the natural lse of each."""
    (o, lse, _), *others = (block for block in blocks if block[2])
    for o_of_block, lse_of_block, _ in others:
        weight = 1 / (1 + np.exp2(lse - lse_of_block))
        o, lse = o + weight * (o_of_block - o), np.logaddexp(lse, lse_of_block)
    return o.astype(np.float32), lse.astype(np.float32)


def first_query_is_blind(row, last_row, key, last_key):
    return key > row


def read_in_order(x):
    """Return [4 heads, n, 1] as if read in the order (token, query head of a key head)."""
    return x.reshape(2, -1, 2).swapaxes(1, 2).reshape(x.shape)


def written_in_order(x):
    return x.reshape(2, 2, -1).swapaxes(1, 2).reshape(x.shape)


def lse_in(order):
    def change(results):
        results["lse"] = [order(x) for x in results["lse"]]

    return change


def of_key_head(delta):
    return delta[np.arange(4) // 2]


@pytest.mark.parametrize(
    "ways",
    [
        {"layouts": ("contiguous", "zigzag", "striped"), "directions": (1, -1)},
        {"from_the_last": True},
        {"merged": merged},
        {
            "layouts": ("zigzag",),
            "directions": (1, -1),
            "only_causal": False,
            "merged": merged,
            "own_chunks": True,
        },
    ],
    ids=["directions", "from-the-last", "merged", "own-chunks"],
)
def test_the_ring_is_right_in_each_way_of_computing_it(ways):
    told = explain_target(TiledRing(**ways))
    assert told.right and not told.sentences


@pytest.mark.parametrize(
    ("merge", "words"),
    [
        (later_blocks_share_a_buffer, "the o of the last block is merged in place of that of every block but a worker's own (lse is right)"),
        (first_o_is_overwritten, "the o of a worker's first block is overwritten by that of its next block before it is merged (lse is not)"),
        slow(merged_in_base_2, "lse becomes the larger of the two + ln 2 log(1 + exp(-abs(lse_block - lse_old))): a natural logarithm where lse is in base 2 (the weights of o are correct)"),
        (weighed_by_powers_of_2, "the merge weights blocks by 2**lse, where lse is natural (the merged lse is correct)"),
        slow(hidden_in_lse, "for keys of later workers, the block is merged into lse as if no pair were masked, and not into o: the running o stays as it was"),
    ],
)  # fmt: skip
def test_a_wrong_merge_of_blocks_is_named(merge, words):
    named(words, phase="forward", merged=merge)


def test_a_wrong_lse_of_every_call_has_one_name_if_own_chunks_are_calls():
    """A worker's own zigzag block is three calls here, and every other block is one."""
    words = "the new block's lse is the maximum plus log2 l"
    calls = {"own_chunks": True, "merged": merged, "lse_of": log2_of_l}
    named(words, phase="forward", layouts=("contiguous", "zigzag", "striped"), **calls)


@pytest.mark.parametrize(
    ("keys", "faults", "words"),
    [
        (3, {"within": True}, "within a block that is masked in part"),
        slow(3, {"within": False, "merged": merged}, "within a block that needs no mask"),
        slow(3, {"from_the_last": True}, "of all blocks, from the last to the first"),
        (6, {}, "of all blocks"),
    ],
    ids=["masked", "whole", "from-the-last", "large"],
)
def test_the_blocks_and_the_order_of_tiles_that_are_merged_wrongly_are_named(keys, faults, words):
    faults = {"keys": keys, **faults}
    words = f"between tiles of {keys} keys {words}, the running o is not rescaled when the maximum rises (l is)"
    named(words, phase="forward", alpha=not_rescaled, **faults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masked", "words"), [(True, "that is masked in part"), (False, "that needs no mask")]
)
def test_the_blocks_whose_tiles_are_not_cleared_are_named(masked, words):
    words = f"dk and dv of a tile of 5 tokens still contain those of the tiles before it (the tile is not cleared), in a block {words}"
    named(words, rows=3, keys=5, uncleared=("dk", "dv"), uncleared_in=masked)


@pytest.mark.parametrize(
    ("names", "words"), [slow(("dq",), "dq is"), (("dk", "dv"), "dk and dv are")], ids=["dq", "dkv"]
)
@pytest.mark.parametrize(
    ("add", "also"),
    [(replaced, ""), slow(replaced_and_added, ", and then added to itself")],
    ids=["replaced", "and-added"],
)
def test_gradients_that_are_written_over_those_before_are_named(names, words, add, also):
    over = "written over what was added up before, in the rows that it sees"
    named(f"a block's {words} {over}{also}", add=add, added=names)


def test_p_that_is_rounded_before_its_product_with_v_is_named_with_the_other_possible_cause():
    words = (
        "p in the product with v, or the running o before its division by l, is rounded to bfloat16"
    )
    named(words, phase="forward", p_of_product=bfloat16)


@pytest.mark.parametrize("layout", ["contiguous", slow("striped")])
def test_a_running_o_that_is_rounded_after_each_merge_is_not_told_as_a_rounded_p(layout):
    named(
        "o is only about as precise as bfloat16",
        phase="forward",
        layouts=(layout,),
        kept_o=bfloat16,
    )


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"rows": 3, "keys": 5, "hides": by_first_query}, (
            "the product for dv (not dS) is made as if tiles of 3 queries and 5 keys that should be masked in part are not masked",
            "tiles of 3 queries and 5 keys that are masked in part count queries from the tile's first",
        )),
        slow({"keys": 8, "hides": own_is_hidden}, (
            "in the blocks of a worker's own keys (step 0), hidden pairs, also of fully masked blocks, are included in the product for dv (dS is correct)",
            "the causal mask hides each query's own position (key < query)",
        )),
    ],
    ids=["tiles", "own"],
)  # fmt: skip
def test_a_product_for_dv_without_the_mask_is_named_beside_a_wrong_mask(faults, words):
    named(*words, passes=BACKWARD, dv_before_mask=True, **faults)


@pytest.mark.parametrize(
    ("clamped", "passes", "of"),
    [("keys", ("forward",), ""), slow("keys", BACKWARD, " (for dq)"), slow("queries", BACKWARD, " (for dk and dv)")],
)  # fmt: skip
def test_a_last_tile_that_begins_inside_the_one_before_is_named(clamped, passes, of):
    words = f"the last tile of 3 {clamped} begins inside the one before, whose last {clamped} count twice{of}"
    named(words, phase=passes[0], rows=3, clamped=clamped, passes=passes)


@pytest.mark.parametrize(
    ("end", "over"), [(None, ""), (8, ", in tiles over all keys of a block, also hidden ones")]
)
def test_such_tiles_of_visible_keys_are_told_from_tiles_over_all_keys_of_a_block(end, over):
    words = (
        f"the last tile of 3 keys begins inside the one before, whose last keys count twice{over}"
    )
    faults = {} if end is None else {"clamped_at": end}
    told = told_of(clamped="keys", passes=("forward",), layouts=("striped",), **faults)
    assert told.sentences[0] == f"In the forward pass, {words}."


@pytest.mark.parametrize("order", [slow(read_in_order), slow(written_in_order)])
def test_an_lse_of_packed_query_heads_in_the_wrong_order_is_named(order):
    how = order.__name__.split("_")[0]
    words = f"the returned lse is taken as if {how} in the order (token, query head of a key head)"
    told = told_of(last_change=lse_in(order))
    assert told.sentences == (f"In the forward pass, {words}.", "The gradients are right.")


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"delta_of": read_in_order}, "delta is taken as if read in the order (token, query head of a key head)"),
        slow({"delta_of": written_in_order}, "delta is taken as if written in the order (token, query head of a key head)"),
        slow({"delta_of": of_key_head}, "delta is that of head h // group (the number of the key head)"),
        ({"dp_of_k": True}, "dp is <dy, k>, not <dy, v>"),
    ],
    ids=["read", "written", "key-head", "dp"],
)  # fmt: skip
def test_a_wrong_delta_or_dp_is_named(faults, words):
    named(words, **faults)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_keys_and_values_that_do_not_arrive_over_one_link_are_named(layout):
    told = told_of(layouts=(layout,), no_wrap=True)
    words = "for keys of later workers, keys and values are 0 (the block counts with score 0)"
    assert told.sentences == tuple(f"In the {x} pass, {words}." for x in ("forward", "backward"))


def test_with_direction_minus_1_such_keys_are_those_of_earlier_workers():
    told = explain_target(TiledRing(("zigzag",), directions=(1, -1), no_wrap=True))
    assert told.wrong == len(told.conclusion.explained) + len(told.conclusion.others) == 2
    words = "keys and values are 0 (the block counts with score 0)"
    assert told.sentences[-1] == " ".join(
        [
            "readout/causal-zigzag-backwards:",
            f"In the forward pass, for keys of earlier workers, {words}.",
            f"In the backward pass, for keys of earlier workers, {words}.",
        ]
    )


@pytest.mark.parametrize("layout", ["contiguous", slow("zigzag"), slow("striped")])
@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"early": True}, "added one step early, to those of the previous step's visitor, and those of a worker's own block are lost"),
        ({"last_hop": "lost"}, "returned without the last hop: a worker returns those of another block, and those of the last step are lost"),
    ],
    ids=["early", "last-hop"],
)  # fmt: skip
def test_dk_and_dv_of_another_step_are_named(layout, faults, words):
    named(f"a block's dk and dv are {words}", layouts=(layout,), **faults)


def test_a_rule_about_tiles_is_named_in_all_layouts_beside_a_wrong_delta():
    named(
        "tiles of 2 or 3 or 6 queries and 5 keys whose first query does not see their first key are skipped",
        "delta is that of head h // group (the number of the key head)",
        layouts=("contiguous", "zigzag", "striped"),
        rows=3,
        keys=5,
        passes=BACKWARD,
        is_skipped=first_query_is_blind,
        delta_of=of_key_head,
    )


@pytest.mark.slow  # the search that it is about is the second one
def test_a_fault_that_random_inputs_refute_is_replaced_by_one_that_they_confirm():
    """Here the first search finds an lse that is divided by the scale, which only the special inputs allow."""
    named(
        "in the blocks of a worker's own keys (step 0), for the pairs of query 5 with key 5 (slots of a worker, from 0), the shares of dq, dk and dv are lost",
        "dv of a tile of 5 tokens still contains those of the tiles before it (the tile is not cleared)",
        layouts=("zigzag",),
        rows=3,
        keys=5,
        passes=BACKWARD,
        is_skipped=first_query_is_blind,
        uncleared=("dv",),
    )
