"""The stand-in for ``transformer_engine_torch``, the compiled module of TransformerEngine 2.20 for PyTorch.

1. ``packed``   the functions for packed tensors [T, H, D] that context parallelism calls
2. ``fused``    the functions of FusedAttention that context parallelism calls
3. ``names``    the enumerations, and the names that are only imported
4. ``parents``  imports of ``transformer_engine`` without its compiled part
5. ``host``     replacements for CUDA streams, device queries and a second wait

With the wheel ``transformer_engine`` and the stand-ins for flash_attn and flash_attn_interface, the published file
``context_parallel.py`` then runs unmodified on a CPU: the paths of FlashAttention 2, FlashAttention 3 and FusedAttention.
FP8 and FlashAttention 4 are refused.

Modelled from the public sources of NVIDIA/TransformerEngine, version 2.20 of development, and from the calls in the wheel
2.20.2. No code is taken from there.
"""

from __future__ import annotations

import importlib.machinery
from types import ModuleType
from typing import Any

from ringspec.errors import nearest
from ringspec.standins.names import Standin
from ringspec.standins.transformer_engine_torch import fused, packed
from ringspec.standins.transformer_engine_torch.host import answered
from ringspec.standins.transformer_engine_torch.names import (
    CUDNN_VERSION,
    ENUMERATIONS,
    ONLY_IMPORTED,
)
from ringspec.standins.transformer_engine_torch.parents import refusing

__all__ = ["answered", "modules"]

MODULE = "transformer_engine_torch"


def modules(chosen: Standin) -> dict[str, ModuleType]:
    """Return the module of the stand-in by its name."""
    made = ModuleType(MODULE, chosen.note)
    made.__spec__ = importlib.machinery.ModuleSpec(MODULE, None, origin=__file__)
    made.__file__ = __file__
    made.ringspec_standin = chosen  # type: ignore[attr-defined]
    modelled = (*packed.FUNCTIONS, *fused.FUNCTIONS)
    functions: dict[str, Any] = {function.__name__: function for function in modelled}
    functions["get_cudnn_version"] = get_cudnn_version
    refused = {name: refusing(f"{MODULE}.{name}", name) for name in ONLY_IMPORTED}
    has = {**functions, **ENUMERATIONS, **refused}
    for name, value in has.items():
        setattr(made, name, value)
    made.__all__ = sorted(has)  # type: ignore[attr-defined]

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"expected a name that ringspec's stand-in for {MODULE} has; got {attribute!r}."
            f" Fix: {nearest(attribute, has)}.",
            name=attribute,
            obj=made,
        )

    made.__getattr__ = missing  # type: ignore[method-assign]
    return {MODULE: made}


def get_cudnn_version() -> int:
    """Return the version of cuDNN, which is only compared with others: 9.18.0, encoded as by cuDNN."""
    return CUDNN_VERSION
