"""The stand-in for ``flash_attn_interface``, the module of FlashAttention 3, versions 3.0.0.b1 and 3.0.0.

1. ``arguments``  what the kernel refuses and what the stand-in does not model, as errors; rows of each sequence
2. ``kernel``     forward and backward of dense and packed (varlen) tensors
3. ``low_level``  ``_flash_attn_forward`` and ``_flash_attn_backward``, with the signatures of each version
4. ``public``     the differentiable functions

Modelled from the signatures, docstrings and argument checks of hopper/flash_attn_interface.py and hopper/flash_api.cpp
in the tags v2.8.3 (3.0.0.b1) and of 2026 (3.0.0) of https://github.com/Dao-AILab/flash-attention. No code is taken from
there.
"""

from __future__ import annotations

from types import ModuleType

from ringspec.standins.flash_attn import module
from ringspec.standins.flash_attn_3.low_level import low_level
from ringspec.standins.flash_attn_3.public import public
from ringspec.standins.names import Standin

__all__ = ["modules"]


def modules(chosen: Standin) -> dict[str, ModuleType]:
    """Return the modules of the stand-in, by the names under which programs import them.

    ``flash_attn_3`` exists in 3.0.0 only.
    """
    functions = public(chosen) | low_level(chosen)
    interface = module("flash_attn_interface", functions, chosen)
    found = {"flash_attn_interface": interface}
    if chosen.version == "3.0.0":
        package = module("flash_attn_3", {}, chosen)
        package.__version__ = chosen.version  # type: ignore[attr-defined]
        package.__path__ = []
        package.flash_attn_interface = interface  # type: ignore[attr-defined]
        found |= {"flash_attn_3": package, "flash_attn_3.flash_attn_interface": interface}
    return found
