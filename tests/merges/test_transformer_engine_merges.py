"""Merge recipes against TransformerEngine's functions, executed on a CPU from the installed wheel, without torch.compile.

The environment decides the release: before 2.20 the functions make two passes, from 2.20 on they rescale.
"""

from __future__ import annotations

import numpy as np
import pytest
from merges.partials import Case, cases, same_bits
from merges.real_mergers import transformer_engine, transformer_engine_merger
from merges.torch_side import array, one_thread, tensor, torch_functions

from ringspec.formats import store
from ringspec.merges import Functions, Part, merge

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture
def engine():
    """The functions ``flash_attn_fwd_*`` of the installed TransformerEngine, without torch.compile.

    They are taken from the file of the package, because importing the package needs its compiled part, and the stand-in for
    it models 2.20 alone. Nothing but their decorator ``jit_fuser`` is replaced.
    """
    pytest.importorskip("torch")
    found = transformer_engine()
    if found is None:
        pytest.skip("needs the package transformer_engine")
    return found


def halves(x, axis: int):
    """Return a tensor with its token axis split in two, as TransformerEngine's causal ring does."""
    return x.view(*x.shape[:axis], 2, x.shape[axis] // 2, *x.shape[axis + 1 :])


def two_passes(engine, case: Case, parts):
    """Call the functions of releases before 2.20 as AttnFuncWithCPAndKVP2P does."""
    lse = lse_of(parts[0]).clone()
    for part in parts[1:]:
        if part.rows is None:
            engine.flash_attn_fwd_softmax_lse_correction(lse, lse_of(part))
        else:
            engine.flash_attn_fwd_second_half_softmax_lse_correction(halves(lse, 2), lse_of(part))
    o = None
    for part in parts:
        block = tensor(part.o)
        if o is None:
            o = engine.flash_attn_fwd_out_correction_init(block, lse, lse_of(part), 1)
        elif part.rows is None:
            engine.flash_attn_fwd_out_correction(o, block, lse, lse_of(part), 1)
        else:
            engine.flash_attn_fwd_second_half_out_correction(
                halves(o, 1), block, lse, lse_of(part), 1
            )
    return o, lse


def rescaling(engine, case: Case, parts):
    """Call the functions of releases from 2.20 on as AttnFuncWithCPAndKVP2P does."""
    o, lse = tensor(parts[0].o).clone(), lse_of(parts[0]).clone()
    for part in parts[1:]:
        old, block = lse.clone(), tensor(part.o)
        if part.rows is None:
            engine.flash_attn_fwd_softmax_lse_correction(lse, lse_of(part))
            engine.flash_attn_fwd_incremental_out_correction(o, block, old, lse, lse_of(part), 1)
        else:
            engine.flash_attn_fwd_second_half_softmax_lse_correction(halves(lse, 2), lse_of(part))
            engine.flash_attn_fwd_incremental_second_half_out_correction(
                halves(o, 1), block, old, lse, lse_of(part), 1
            )
    return o, lse


def lse_of(part):
    """Return a part's lse as a tensor [B, H, S], as kernels return it."""
    return tensor(np.swapaxes(part.lse, 1, 2))


def test_te_p2p_gives_the_bits_of_transformer_engine(engine):
    early = hasattr(engine, "flash_attn_fwd_out_correction_init")
    original, recipe = (two_passes, "te_p2p") if early else (rescaling, "te_p2p_2_20")
    for case in cases():
        parts = case.parts(axes="BSH")
        with one_thread():
            o, lse = original(engine, case, parts)
            got_o, got_lse = merge(parts, recipe, torch_functions())
        assert same_bits(got_o, array(o)), case
        assert same_bits(np.swapaxes(got_lse, 1, 2), array(lse)), case


def compiled(function):
    """A function of arrays that torch.compile has compiled alone."""
    import torch

    made = torch.compile(function, dynamic=False)
    return lambda x: made(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def test_compiled_functions_give_the_bits_of_the_recipe_with_compiled_exp_and_log1p():
    """torch.compile on a CPU, as TransformerEngine's jit_fuser does by default. It keeps the rescaled o of 2.20 in float32."""
    torch = pytest.importorskip("torch")
    engine = transformer_engine(fuser=lambda function: torch.compile(function, dynamic=False))
    if engine is None:
        pytest.skip("needs the package transformer_engine")
    early = hasattr(engine, "flash_attn_fwd_out_correction_init")
    recipe = "te_p2p" if early else "te_p2p_2_20_compiled"
    functions = Functions(name="compiled", exp=compiled(torch.exp), log1p=compiled(torch.log1p))
    random = np.random.default_rng(0)
    for name in ("float32", "bfloat16"):
        parts = [
            Part(
                store(random.normal(size=(2, 4, 64, 32)), name),
                random.normal(size=(2, 4, 64)).astype(np.float32),
            )
            for _ in range(4)
        ]
        with one_thread():
            real = transformer_engine_merger(parts, engine)
            assert same_bits(merge(parts, recipe, functions)[0], real), name
