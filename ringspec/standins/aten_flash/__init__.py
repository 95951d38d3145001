"""The stand-in for ATen's flash-attention operators on a CPU, as rings of PyTorch call them.

``aten::_scaled_dot_product_flash_attention`` and its backward have no CPU implementation. This stand-in registers one,
through ``torch.library``, so autograd and every caller of ``torch.ops.aten`` reach it; CUDA tensors still reach the real
kernel. ``aten::_scaled_dot_product_flash_attention_for_cpu``, which exists, cannot take its place: it has another
signature and other results, and its lse and tiles are approximate for 16-bit inputs.

1. ``kernel``  the two operators; arguments that the CUDA operators refuse, or that are not modelled, as errors

Modelled from the schemas of PyTorch 2.13 (aten/src/ATen/native/native_functions.yaml). No code is taken from there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from ringspec.errors import OptionError
from ringspec.standins.aten_flash.kernel import operators
from ringspec.standins.names import Standin

__all__ = ["registered"]


@contextmanager
def registered(chosen: Standin) -> Iterator[None]:
    """Give ATen's two flash-attention operators a CPU implementation inside the with block.

    Raises OptionError if they have one already.
    """
    import torch

    functions = operators(chosen)
    for name in functions:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
            expected = f"no CPU implementation of aten::{name}"
            raise OptionError(expected, "one", "use one with block, and name each stand-in once")
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, function in functions.items():
                library.impl(name, function, "CPU")
        yield
    finally:
        library._destroy()
