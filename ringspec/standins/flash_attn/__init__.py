"""The stand-in for the package ``flash_attn`` (FlashAttention 2), interface versions 2.6, 2.7 and 2.8.

1. ``arguments``  what the kernel refuses and what the stand-in does not model, as errors; window and lengths
2. ``kernel``     forward and backward of dense and packed (varlen) tensors, as the CUDA extension returns them
3. ``aten``       the same by PyTorch's own build of the kernel, on a GPU
4. ``calls``      one call: arguments checked, results as each version returns them
5. ``version_2_6``, ``version_2_7``  the underscored functions that rings call, with the signatures of each version
6. ``public``     the differentiable functions

Modelled from the signatures, docstrings and argument checks of FlashAttention 2.6.3, 2.7.4 and 2.8.3
(https://github.com/Dao-AILab/flash-attention). No code is taken from there.
"""

from __future__ import annotations

import importlib.machinery
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ringspec.errors import nearest
from ringspec.standins.flash_attn.public import public
from ringspec.standins.flash_attn.version_2_6 import functions_of_2_6
from ringspec.standins.flash_attn.version_2_7 import functions_of_2_7
from ringspec.standins.names import Standin

__all__ = ["modules"]

NEWEST = {"2.6": "2.6.3", "2.7": "2.7.4", "2.8": "2.8.3"}


def modules(chosen: Standin) -> dict[str, ModuleType]:
    """Return the modules of the stand-in, by the names under which programs import them."""
    functions = public(chosen)
    low_level = (functions_of_2_6 if chosen.version == "2.6" else functions_of_2_7)(chosen)
    package = module("flash_attn", functions, chosen)
    package.__version__ = NEWEST[chosen.version]  # type: ignore[attr-defined]
    package.__path__ = []
    interface = module("flash_attn.flash_attn_interface", functions | low_level, chosen)
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    return {"flash_attn": package, "flash_attn.flash_attn_interface": interface}


def module(name: str, functions: dict[str, Callable[..., Any]], chosen: Standin) -> ModuleType:
    """Make a module of these functions, which names any attribute that it does not have."""
    made = ModuleType(name, chosen.note)
    # importlib.util.find_spec, by which programs look for the package, needs a spec.
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__file__)
    # Python names this file if a program imports a name that the module does not have.
    made.__file__ = __file__
    made.ringspec_standin = chosen  # type: ignore[attr-defined]
    for key, function in functions.items():
        function.__module__ = name
        setattr(made, key, function)

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"expected a name that ringspec's stand-in for {name} has; got {attribute!r}."
            f" Fix: {nearest(attribute, functions)}.",
            name=attribute,
            obj=made,
        )

    made.__getattr__ = missing  # type: ignore[method-assign]
    return made
