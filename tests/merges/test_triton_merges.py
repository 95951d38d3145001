"""Merge recipes against the Triton kernels of SGLang and vLLM, on a GPU.

RINGSPEC_SGLANG and RINGSPEC_VLLM name the folders of the packages sglang and vllm, installed or of a checkout. Only the
kernels' files are read, so the packages need not be importable.
"""

import os
from pathlib import Path

import pytest
from merges.triton_comparison import candidates, compared
from merges.triton_mergers import MERGERS, triton_functions

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("name", sorted(MERGERS))
def test_the_recipe_gives_every_bit_of_the_triton_kernel_with_tritons_functions(name):
    pytest.importorskip("triton")
    package, make = MERGERS[name]
    variable = f"RINGSPEC_{package.upper()}"
    folder = os.environ.get(variable, "")
    if not Path(folder).is_dir() or not folder:
        pytest.skip(f"{variable} names no folder of the package {package}")
    merger, functions = make(Path(folder)), triton_functions()
    found = [compared(merger, recipe, functions, seeds=2) for recipe in candidates(name).values()]
    exact = [not any(sum(x.differing.values()) for x in one.values()) for one in found]
    assert any(exact), [one["golden"].first or one["random"].first for one in found]
