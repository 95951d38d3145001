"""o of public mergers over given partial results [B, H, S, D], executed from the installed packages; no bit of lse."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from merges.torch_side import array, tensor

PARTS = ("pytorch", "attention", "dot_product_attention", "context_parallel.py")


def torch_merger(parts, wide: bool):
    """o of torch's _SDPAMerger."""
    name = "torch.distributed.tensor.experimental._context_parallel._attention"
    merger = importlib.import_module(name)._SDPAMerger(wide, seq_dim=2)
    for part in parts:
        merger.step(tensor(part.o), tensor(part.lse), False)
    return array(merger.results()[0])


def ring_flash_attn_merger(parts):
    """o of update_out_and_lse of ring_flash_attn, whose flash_attn is a stand-in that is not called."""
    from ringspec.standins import installed

    if "ring_flash_attn.utils" not in sys.modules:
        with installed("flash_attn"):
            importlib.import_module("ring_flash_attn.utils")
    update = sys.modules["ring_flash_attn.utils"].update_out_and_lse
    o = lse = None
    for part in parts:
        o, lse = update(o, lse, tensor(rows_first(part.o)), tensor(part.lse))
    return np.swapaxes(array(o.to(tensor(parts[0].o).dtype)), 1, 2)


def transformer_engine_merger(parts, engine):
    """o of the functions of TransformerEngine: two passes before 2.20, rescaling from then on."""
    lse = tensor(parts[0].lse).clone()
    blocks = [tensor(rows_first(part.o)) for part in parts]
    given = [tensor(part.lse) for part in parts]
    if hasattr(engine, "flash_attn_fwd_out_correction_init"):
        for one in given[1:]:
            engine.flash_attn_fwd_softmax_lse_correction(lse, one)
        o = engine.flash_attn_fwd_out_correction_init(blocks[0], lse, given[0], 1)
        for block, one in zip(blocks[1:], given[1:], strict=True):
            engine.flash_attn_fwd_out_correction(o, block, lse, one, 1)
    else:
        o = blocks[0].clone()
        for block, one in zip(blocks[1:], given[1:], strict=True):
            old = lse.clone()
            engine.flash_attn_fwd_softmax_lse_correction(lse, one)
            engine.flash_attn_fwd_incremental_out_correction(o, block, old, lse, one, 1)
    return np.swapaxes(array(o), 1, 2)


def rows_first(x):
    return np.ascontiguousarray(np.swapaxes(x, 1, 2))


def transformer_engine(folder: Path | None = None, fuser=lambda function: function):
    """The functions flash_attn_fwd_* of the package TransformerEngine, installed or in ``folder``; None if there is none.

    ``fuser`` is what their decorator jit_fuser does; importing the package would need its compiled part.
    """
    import torch

    if folder is None:
        spec = importlib.util.find_spec("transformer_engine")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(spec.submodule_search_locations[0])
    file = folder.joinpath(*PARTS)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("flash_attn_fwd_")
    ]
    names = {"torch": torch, "jit_fuser": fuser}
    exec(compile(ast.Module(wanted, []), str(file), "exec"), names)  # noqa: S102 (the installed package's own functions)
    return SimpleNamespace(**names)
