"""Merge recipes against the public merges that they describe, executed on a CPU from the installed packages.

The elementary functions are torch's, on arrays of the same shape and strides, with one thread: every bit must be equal.
NaN equals NaN. Nothing of the packages is copied here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from merges.partials import cases, same_bits
from merges.torch_side import array, one_thread, tensor, torch_functions

from ringspec.merges import merge
from ringspec.vectors import open_set

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def needed(module: str):
    """Import a module of a public package, or skip the test with a sentence."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"needs the package {module.partition('.')[0]}")
    return importlib.import_module(module)


@pytest.mark.parametrize("wide", [True, False], ids=["float32", "narrow"])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_torch_cp_gives_the_bits_of_torchs_merger(case, wide):
    attention = needed("torch.distributed.tensor.experimental._context_parallel._attention")
    parts = case.parts(axes="BHS")
    merger = attention._SDPAMerger(wide, seq_dim=2)
    with one_thread():
        for part in parts:
            merger.step(tensor(part.o), tensor(part.lse), part.rows is not None)
        o, lse = (array(x) for x in merger.results())
        got_o, got_lse = merge(parts, "torch_cp" if wide else "torch_cp_narrow", torch_functions())
    assert same_bits(got_o, o) and same_bits(got_lse, lse)


@pytest.mark.parametrize(
    ("package", "recipe"),
    [
        ("ring_flash_attn.utils", "ring_flash_attn"),
        ("ring_flash_attn.utils", "ring_flash_attn_zigzag"),
        ("yunchang.ring.utils", "yunchang"),
    ],
)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_ring_flash_attn_and_yunchang_give_the_bits_of_update_out_and_lse(case, package, recipe):
    utils = update_of(package)
    parts = case.parts(axes="BSH")
    with one_thread():
        o = lse = None
        for part in parts:
            block_lse = tensor(part.lse).transpose(1, 2)  # [B, H, S], contiguous
            assert block_lse.is_contiguous()
            o, lse = utils(o, lse, tensor(part.o), block_lse, slice_=part.rows)
        o = o.to(tensor(parts[0].o).dtype)
        got_o, got_lse = merge(parts, recipe, torch_functions())
    assert same_bits(got_o, array(o)) and same_bits(got_lse, array(lse[..., 0]))


def update_of(module: str):
    """Return update_out_and_lse of a package; flash_attn, which it imports and does not use here, is a stand-in."""
    from ringspec.standins import installed

    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    if module not in sys.modules:
        with installed("flash_attn"):
            importlib.import_module(module)
    return sys.modules[module].update_out_and_lse


@pytest.mark.parametrize("case", cases(zigzag=(False,)), ids=str)
def test_diffusers_gives_the_bits_of_its_ring(monkeypatch, case):
    torch = pytest.importorskip("torch")
    loop = needed("diffusers.models.attention_dispatch")
    gathered = SimpleNamespace(all_gather_tensor=lambda x, **_: x.repeat(case.workers))
    monkeypatch.setattr(loop, "funcol", gathered)
    parts = case.parts(axes="BSH")
    blocks = iter([(tensor(part.o), tensor(part.lse)) for part in parts])
    cp = SimpleNamespace(
        _ring_mesh=SimpleNamespace(get_group=lambda: None),
        _ring_local_rank=case.rank,
        ring_degree=case.workers,
        convert_to_fp32=True,
    )
    whole = torch.zeros_like(tensor(parts[0].o))
    with one_thread():
        o, lse = loop.TemplatedRingAttention.forward(
            SimpleNamespace(),
            *[whole] * 3,
            attn_mask=None,
            dropout_p=0.0,
            is_causal=False,
            scale=None,
            enable_gqa=False,
            return_lse=True,
            forward_op=lambda *_, **__: next(blocks),
            backward_op=None,
            _parallel_config=SimpleNamespace(context_parallel_config=cp),
        )
        got_o, got_lse = merge(parts, "diffusers", torch_functions())
    assert same_bits(got_o, array(o)) and same_bits(got_lse, array(lse))


@pytest.mark.parametrize("recipe", ["torch_cp", "torch_cp_narrow"])
def test_torchs_merger_gives_the_certain_bits_of_the_golden_set(recipe):
    """The set merge holds bits that any elementary functions give, so torch's own must."""
    attention = needed("torch.distributed.tensor.experimental._context_parallel._attention")
    vectors = open_set("merge")
    seen = 0
    for case in vectors:
        if recipe not in case.recipes:
            continue
        x = vectors.tensors(case.id)
        merger = attention._SDPAMerger(recipe == "torch_cp", seq_dim=2)
        for o, lse in zip(x["in.parts_o"], x["in.parts_lse"], strict=True):
            merger.step(tensor(np.ascontiguousarray(o)), tensor(np.ascontiguousarray(lse)), False)
        for name, got in zip(("o", "lse"), map(array, merger.results()), strict=True):
            want, known = x[f"bits.{recipe}.{name}"], x[f"certain.{recipe}.{name}"]
            got = got.reshape(want.shape).astype(want.dtype)
            assert same_bits(got[known], want[known]), (case.id, name)
            seen += known.sum()
    assert seen > 1500
