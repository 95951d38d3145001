"""A merge is inferred from the errors of o: named, or not told apart from others, but never another one."""

import dataclasses
import functools
import importlib.util

import numpy as np
import pytest
from compare.noise_problems import attention_of, draw, geometry_of, run_merged
from merges.inferring import inferred, label
from merges.real_mergers import (
    ring_flash_attn_merger,
    torch_merger,
    transformer_engine,
    transformer_engine_merger,
)

from ringspec.compare.inference.infer import infer
from ringspec.compare.inference.merge_classes import classes, kind_of
from ringspec.compare.noise.predict import predict
from ringspec.merges import MERGES, with_merges
from ringspec.recipes import RECIPES


@pytest.mark.parametrize("name", ["vllm_merge", "torch_cp_narrow", "tokamax"])
def test_a_merge_that_rounds_as_no_other_is_named(name):
    found = inferred(name, 4, seed=0, tokens=48)
    assert name in found.names and len(found.words) == 1, found.lines()
    assert found.lines() == [f"the noise is that of {found.words[0]}"]


def test_rounding_o_at_every_step_is_told_from_rounding_it_once():
    found = inferred("te_p2p", 4, seed=0, tokens=48)
    assert "te_p2p" in found.names and not {"torch_cp", "ring_flash_attn"} & set(found.names)


@pytest.mark.parametrize("name", ["te_p2p", "torch_cp"])
def test_two_workers_do_not_tell_merges_apart_that_round_alike(name):
    # Of two parts, te_p2p and te_p2p_2_20 round the same numbers, and so do torch_cp and a pair of vLLM's.
    other = {"te_p2p": "te_p2p_2_20", "torch_cp": "vllm_merge"}[name]
    found = inferred(name, 2, seed=1, tokens=32)
    assert {name, other} <= set(found.names), found.lines()
    assert found.lines()[0] == "the errors cannot tell these merges apart:"


def test_errors_that_no_merge_has_are_not_given_a_name():
    for scale in (0.5, 3.0):
        found = inferred("te_p2p", 2, seed=0, tokens=32, scale=scale)
        assert found.names == () and "no merge recipe" in found.lines()[0]


def test_merge_recipes_of_one_class_round_alike_and_every_recipe_has_a_class():
    for gradients in (False, True):
        found = classes(gradients)
        names = [name for members in found.values() for name in members]
        assert len(set(names)) == len(names)
        assert gradients or set(names) == set(MERGES)
        assert all(
            len({kind_of(MERGES[name]) for name in members}) == 1 for members in found.values()
        )
    assert ["torch_cp", "ring_flash_attn"] == found[next(iter(found))][:2]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("name", ["torch_cp", "torch_cp_narrow", "ring_flash_attn", "engine"])
def test_the_merge_of_public_code_is_never_called_another(name, workers):
    mergers = {
        "torch_cp": functools.partial(torch_merger, wide=True),
        "torch_cp_narrow": functools.partial(torch_merger, wide=False),
        "ring_flash_attn": ring_flash_attn_merger,
    }
    if name == "ring_flash_attn":
        if importlib.util.find_spec("ring_flash_attn") is None:
            pytest.skip("needs the package ring_flash_attn")
    if name == "engine":
        engine = transformer_engine()
        if engine is None:
            pytest.skip("needs the package transformer_engine")
        early = hasattr(engine, "flash_attn_fwd_out_correction_init")
        name = "te_p2p" if early else "te_p2p_2_20"
        mergers[name] = functools.partial(transformer_engine_merger, engine=engine)
    for seed in range(2):
        found = inferred(name, workers, seed, mergers[name])
        assert name in found.names, (label(found), found.lines())


def test_a_kernel_that_rounds_partial_results_is_compared_with_merge_recipes():
    """A ring with bf16 blocks that declares bf16 and merges as TransformerEngine's kernel for packed documents."""
    used = with_merges(RECIPES["bf16"], "te_thd")
    case = draw(np.random.default_rng(3), used, 4, n=32, heads=(1, 1), width=32, features=())
    attention = dataclasses.replace(attention_of(case), dy=None)
    error = run_merged(case, used, {}).o - attention.o
    found = infer({"o": error}, attention, geometry_of(case), "bf16", predict)
    assert found.contradicted and found.best.good, found.lines()
    near = "; ".join(fit.candidate.words for fit in (found.best, *found.alike))
    assert "each weighted part and each sum of them are rounded (te_thd)" in near, found.lines()
