"""What a target may say of its own arithmetic, and what is refused."""

import pytest
from refusals import refuses

from ringspec.conformance.judge.recipe import recipe_for
from ringspec.conformance.target.capabilities import Capabilities, capabilities_from, why_not
from ringspec.conformance.target.declared import declared_recipe
from ringspec.errors import OptionError
from ringspec.recipes import RECIPES

BF16 = dict.fromkeys(("inputs", "outputs", "statistics"), "bfloat16")


def test_a_name_a_mapping_and_nothing():
    assert declared_recipe(None, "bfloat16") is None
    assert declared_recipe("nki", "bfloat16") is RECIPES["nki"]
    own = {"float16": "fp16_partials", "bfloat16": {"tile_k": 64, "name": "ours"}}
    assert declared_recipe(own, "float16") is RECIPES["fp16_partials"]
    assert declared_recipe(own, "float32") is None
    assert declared_recipe(own, "bfloat16") == RECIPES["bf16"].replace(name="ours", tile_k=64)


def test_a_single_name_or_number_is_a_claim_of_one():
    claims = Capabilities(masks="causal", layouts="zigzag", formats="float32", workers=4)
    assert claims == Capabilities(
        masks=("causal",), layouts=("zigzag",), formats=("float32",), workers=(4,)
    )
    assert why_not(claims, {"operation": "ring", "passes": ["forward"], "workers": 2}) == (
        "workers 2"
    )
    assert capabilities_from({"operations": "ring-forward"}).operations == ("ring-forward",)
    with refuses(
        (OptionError, "unknown-name"), match="a name in masks; got 'casual'.*write 'causal'"
    ):
        Capabilities(masks="casual")


def test_calls_are_judged_by_what_is_declared_for_their_format():
    claims = capabilities_from({"recipe": {"bfloat16": {"base": "bf16", "tile_dq": "bfloat16"}}})
    assert recipe_for(claims, BF16).tile_dq == "bfloat16"
    wide = dict.fromkeys(BF16, "float32")
    assert recipe_for(claims, wide).tile_dq == "float32"


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        ("bf15", (OptionError, "unknown-name"), "bf16"),
        ({"bf16": "bf16"}, (OptionError, "unknown-name"), "bfloat16"),
        ({"bfloat16": "bf15"}, (OptionError, "unknown-name"), "bf16"),
        ({"bfloat16": {"tile_qq": 4}}, (OptionError, "unknown-name"), "tile_q"),
        ({"bfloat16": {"base": 3}}, (OptionError, "unknown-name"), "recipe"),
        ({"bfloat16": {"tile_q": 0}}, OptionError, "tile_q"),
        ({"bfloat16": ["bf16"]}, OptionError, "base"),
        (3, OptionError, "base"),
    ],
)
def test_what_no_recipe_is_is_refused_when_it_is_declared(recipe, error, words):
    with refuses(error, match=words):
        Capabilities(recipe=recipe)
