"""Merge recipes against TransformerEngine's functions, executed on a CPU from the installed wheel, without torch.compile.

The environment decides the release: before 2.20 the functions make two passes, from 2.20 on they rescale.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from merges.partials import Case, cases, same_bits
from merges.torch_side import array, one_thread, tensor, torch_functions

from ringspec.merges import merge

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PARTS = ("pytorch", "attention", "dot_product_attention", "context_parallel.py")


@pytest.fixture
def engine():
    """The functions ``flash_attn_fwd_*`` of the installed TransformerEngine, without torch.compile.

    They are taken from the file of the package, because importing the package needs its compiled part, and the stand-in for
    it models 2.20 alone. Nothing but their decorator ``jit_fuser`` is replaced.
    """
    torch = pytest.importorskip("torch")
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package transformer_engine")
    file = Path(spec.submodule_search_locations[0], *PARTS)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("flash_attn_fwd_")
    ]
    names = {"torch": torch, "jit_fuser": lambda function: function}
    exec(compile(ast.Module(wanted, []), str(file), "exec"), names)  # noqa: S102 (the installed package's own functions)
    return SimpleNamespace(**names)


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
