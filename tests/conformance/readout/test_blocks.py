"""What `ringspec explain` says of targets without a ring: single blocks, and dense kernels (W = 1)."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from conformance.readout.faulty_blocks import BLOCK, DENSE, Block

from ringspec.cli import main
from ringspec.conformance.explain.block_ring import ring_of_blocks
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.block_words import BLOCK as OF_BLOCKS
from ringspec.conformance.readout.block_words import DENSE as OF_ONE
from ringspec.conformance.readout.block_words import reworded
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.faults.places import block_places, part_places, worker_places
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.search.vocabulary import kinds_of
from ringspec.conformance.targets.reference import Reference
from ringspec.recipes import RECIPES

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "wrong_block.py"
FORWARD, BACKWARD = "In the forward pass, ", "In the backward pass, "
SAME = "The backward pass does the same."
GRADIENT = "The backward pass is the gradient of this wrong forward pass."
# Faults that one block shows, and what is said of them, by a block as by a dense kernel.
IN_ONE_BLOCK = {
    "no scale": (FORWARD + "scores are not multiplied by the scale.", SAME),
    "scale twice": (FORWARD + "scores are multiplied by the scale twice.", SAME),
    "key heads mod Hkv": (
        FORWARD + "query head h reads key head h mod Hkv.",
        SAME,
        BACKWARD + "dk and dv are added to those of key head h mod Hkv.",
    ),
    "no mask": (FORWARD + "the causal mask is ignored (a window is kept).", GRADIENT),
    "no mask in the forward": (FORWARD + "the causal mask is ignored (a window is kept).",),
    "no mask in the backward": (BACKWARD + "the causal mask is ignored (a window is kept).",),
    "one key too many": (
        FORWARD + "the causal mask shows one key too many (key <= query + 1).",
        GRADIENT,
    ),
    "window too short": (FORWARD + "the window is one key too narrow on the left.", GRADIENT),
    "o not rescaled": (
        FORWARD
        + "between tiles of 4 keys, the running o is not rescaled when the maximum rises (l is).",
    ),
    "o not divided": (FORWARD + "o is not divided by l.",),
    "lse is the maximum": (FORWARD + "lse is only the row maximum.",),
    "lse in base 2": (FORWARD + "lse is in base 2.",),
    "lse as if in base 2": (BACKWARD + "lse is multiplied by ln 2.",),
    "no delta": (BACKWARD + "delta is left out.",),
    "ds without the scale": (BACKWARD + "dq and dk are not multiplied by the scale.",),
    "ds not transposed": (BACKWARD + "dS is not transposed in the product for dk.",),
    "dk with the query before": (
        BACKWARD
        + "the queries in the product for dk are taken from the token before (in the first token, from the last).",
    ),
    "dv of one head": (
        BACKWARD + "in all but the first query head of each key head, the share of dv is lost.",
    ),
    "dq twice": (BACKWARD + "dq is too large by a factor of 2.",),
}
# Faults that show only beside other blocks.
IN_SEVERAL_BLOCKS = {
    "positions ignored": (
        FORWARD + "the mask compares token numbers within the block, not positions.",
        GRADIENT,
    ),
    "lse of the block": (BACKWARD + "p is computed with the block's own lse.",),
    "delta of the block": (BACKWARD + "delta is summed over only the block's keys.",),
    "no guard": ("In rows without a visible key, o is nan, not 0.",),
    "lse of empty rows is 0": ("In rows without a visible key, lse is 0, not -inf.",),
}
SOME = ("key heads mod Hkv", "no mask", "o not rescaled", "lse in base 2", "no delta")
NOTED = ("positions ignored", "no guard", "lse of empty rows is 0")
OF_A_RING = re.compile(r"worker|step|visitor|\bring\b|\bhops?\b|sen[dt]\b|travel|transfer|slot|circulation|direction")  # fmt: skip


def all_but(some, faults):
    """Return the faults as parameters; all but ``some`` are slow."""
    return [
        pytest.param(fault, marks=() if fault in some else pytest.mark.slow) for fault in faults
    ]


@pytest.mark.parametrize("operations", [("block-forward",), ("block-backward",), BLOCK.operations])
def test_a_right_block_is_right_whichever_passes_it_claims(operations):
    found = explain_target(Block(operations=operations))
    assert found.right and not found.sentences and found.made_of == "block"
    ids = [run.problem.id for run in found.runs]
    assert ids[:4] == ["block/causal", "block/full", "block/window", "block/band"]
    assert {"blocks/causal-contiguous", "blocks/causal-zigzag", "blocks/band-contiguous"} <= {*ids}


@pytest.mark.parametrize("recipe", ["bf16", "nki", "fp16_partials"])
def test_blocks_that_round_as_their_recipe_says_are_right(recipe):
    given = {"masks": ("causal",), "features": ("positions", "empty-rows")}
    assert explain_target(Reference(RECIPES[recipe], operations=BLOCK.operations, **given)).right


@pytest.mark.parametrize(
    "claims",
    [
        {"features": ()},
        {"features": ("q-offset",)},
        {"features": ("q-offset", "empty-rows")},
        {"features": (), "only_causal": True, "masks": ("causal",)},
        {"lse": "hidden"},
        {"head_ratios": (1,), "head_dims": (64,), "batch": (1,)},
        {"operations": ("block-forward",), "tokens_multiple": 128, "head_dims": (64,), "features": ()},
    ],
    ids=["no-positions", "q-offset", "q-offset-and-empty-rows", "only-causal", "hidden-lse", "head-dim-64", "tiles-of-128"],
)  # fmt: skip
def test_a_right_block_is_called_only_as_it_claims(claims):
    target = Block(**claims)
    asked = []

    def run(call):
        asked.append(call)
        offset = call.position_q[0, 0, 0] or call.position_k[0, 0, 0]
        assert not offset or target.capabilities.features
        assert call.terms.get("causal") or not target.capabilities.only_causal
        assert call.workers == 1 and call.operation == "block"
        return Block.run(target, call)

    target.run = run
    found = explain_target(target)
    assert found.right and asked


@pytest.mark.parametrize("fault", all_but(SOME, IN_ONE_BLOCK))
def test_a_fault_of_a_block_is_told_and_accounts_for_all_that_failed(fault, no_catalogue):
    found = explain_target(Block(fault))
    assert found.sentences == IN_ONE_BLOCK[fault]
    assert len(found.conclusion.explained) == found.wrong > 0


@pytest.mark.parametrize("fault", all_but(NOTED, IN_SEVERAL_BLOCKS))
def test_a_fault_that_shows_only_beside_other_blocks_is_told(fault, no_catalogue):
    found = explain_target(Block(fault))
    assert found.sentences == IN_SEVERAL_BLOCKS[fault] and not found.right
    assert len(found.conclusion.explained) == found.wrong


@pytest.mark.parametrize("fault", all_but(SOME, IN_ONE_BLOCK))
def test_a_fault_of_a_dense_kernel_is_told_in_the_same_words(fault, no_catalogue):
    found = explain_target(Block(fault, claims=DENSE))
    assert found.sentences == IN_ONE_BLOCK[fault] and found.made_of == "dense"
    assert len(found.conclusion.explained) == found.wrong > 0


def test_a_right_dense_kernel_is_right_with_every_mask():
    found = explain_target(Block(claims=DENSE))
    assert found.right and len(found.runs) == 5


@pytest.mark.slow
def test_two_faults_of_a_block_are_told_together():
    found = explain_target(Block("lse of the block", "dq twice"))
    of_all, of_several = found.sentences
    assert of_all == BACKWARD + "dq is too large by a factor of 2."
    # One block alone has the lse of all its keys.
    where, _, also = of_several.partition(", also: ")
    assert also == BACKWARD + "p is computed with the block's own lse."
    assert where == ", ".join(
        x.problem.id for x in found.runs if x.problem.id.startswith("blocks/")
    )


def test_a_block_that_raises_says_so_and_for_which_keys():
    found = explain_target(Block("raises"))
    assert found.sentences == (
        "block/causal: no results (error: NotImplementedError: no such block).",
    )
    found = explain_target(Block("raises for an offset"))
    assert found.sentences == (
        "blocks/causal-contiguous: no results (error: queries of part 1 with keys of part 1: "
        "NotImplementedError: no offset).",
    )


def test_a_block_without_a_problem_that_fits_is_told_why():
    found = explain_target(Block(head_dims=(8,)))
    assert not found.right and not found.runs
    assert found.unread == "it needs a head dimension of at least 12, for 4 tokens"


def test_a_target_that_claims_a_ring_is_read_as_a_ring():
    both = Reference(RECIPES["float32"], masks=("causal",), features=())
    assert explain_target(both).made_of == "ring"


def test_hidden_blocks_are_not_called_unless_the_target_claims_empty_rows():
    for features, count in ((("positions",), 6), (("positions", "empty-rows"), 9)):
        ring = ring_of_blocks(Block(features=features), 3)
        call = next(
            x for x in explain_target(Block()).runs if x.problem.call.workers == 3
        ).problem.call
        assert call.workers == 3 and len(list(ring.blocks(call))) == count


@pytest.mark.parametrize(("made_of", "workers"), [(OF_ONE, 1), (OF_BLOCKS, 1), (OF_BLOCKS, 3)])
def test_no_sentence_about_a_block_or_a_dense_kernel_has_a_word_of_rings(made_of, workers):
    layouts = ("contiguous", "zigzag", "striped") if workers > 1 else ("contiguous",)
    said = set()
    for layout in layouts:
        plain = Geometry(
            workers, "kv", 1, layout, positions(layout, workers, 8), True, None, 4, 2, 0.1
        )
        for changes in (
            {}, {"causal": False}, {"window": (5, 2)}, {"causal": False, "window": (5, 2)},
            {"documents": (0, 2, 5)}, {"softcap": 4.5},
        ):  # fmt: skip
            geometry = dataclasses.replace(plain, **changes)
            masks = masks_of(geometry)
            said |= {x.words for x in (*part_places(geometry), *worker_places(geometry))}
            for phase in ("forward", "backward"):
                said |= {x.words for x in kinds_of(geometry, phase, masks)}
                said |= {x.words for x in block_places(geometry, phase, masks[0].pattern)}
    left = {words for words in said if OF_A_RING.search(reworded(words, made_of))}
    assert len(said) > 1000 and not left


def ringspec(*arguments):
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_the_command_prints_what_its_page_shows_for_a_block():
    printed = ringspec("explain", f"{EXAMPLE}:target", "--timeout", "0")
    page = (EXAMPLE.parents[1] / "conform" / "readout.md").read_text(encoding="utf-8")
    shown = page.split("wrong_block.py:target\n", 1)[1].split("```")[0]
    assert printed.exit_code == 1 and printed.output.split()[2:] == shown.split()[2:]


def test_json_says_that_a_block_was_read(no_catalogue):
    printed = ringspec("explain", f"{EXAMPLE}:target", "--timeout", "0", "--json")
    found = json.loads(printed.output)
    assert found["made_of"] == "block" and not found["right"]
    assert {one["id"].split("/")[0] for one in found["problems"]} == {"block", "blocks"}
