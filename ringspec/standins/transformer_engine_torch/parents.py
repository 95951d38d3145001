"""Imports of ``transformer_engine`` without its compiled part.

The files of the installed package are imported as they are, with two exceptions:

- The ``__init__`` files of the packages in :data:`PARENTS` are not run, because they load CUDA libraries, or import
  everything.
- The modules in :data:`PLACEHOLDERS` are replaced, because they need triton or are not used by context parallelism.

``transformer_engine.common`` is imported with its own option ``NVTE_PROJECT_BUILDING``, which loads no library.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from ringspec.errors import RefusedError

__all__ = ["PARENTS", "PLACEHOLDERS", "WithoutExtension"]

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
# Each with a module that its __init__ imports. Without the first, circular imports fail; the second reads the version of
# flash-attn, from which context parallelism derives the layout of lse.
PARENTS = {
    "transformer_engine": None,
    "transformer_engine.pytorch": "transformer_engine.pytorch.tensor",
    "transformer_engine.pytorch.attention": None,
    ATTENTION: f"{ATTENTION}.backends",
}

PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "transformer_engine.pytorch.module": (),
    "transformer_engine.pytorch.module.base": ("TransformerEngineBaseModule",),
    "transformer_engine.pytorch.ops": ("Sequential",),
    "transformer_engine.pytorch.ops.fuser": ("OperationFuser",),
    "transformer_engine.pytorch.ops.op": ("BasicOperation",),
    "transformer_engine.pytorch.triton": (),
    "transformer_engine.pytorch.triton.pad": ("pad_columnwise_scale_inv",),
}


class WithoutExtension:
    """A finder for the packages and placeholders above; it finds nothing if the package is not installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PARENTS and name not in PLACEHOLDERS:
            return None
        real = PathFinder.find_spec(name, path)
        if name in PLACEHOLDERS:
            origin = None if real is None else real.origin
            return ModuleSpec(name, Placeholder(), origin=origin, is_package=True)
        if real is None:
            return None
        spec = ModuleSpec(name, Parent(), origin=real.origin, is_package=True)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec


class Parent(Loader):
    """A loader of a package whose ``__init__`` is not run."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        module.__file__ = spec.origin
        first = PARENTS[module.__name__]
        if first is not None:
            importlib.import_module(first)


class Placeholder(Loader):
    """A loader of a module that has a few names, whose use raises RefusedError."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []
        for name in PLACEHOLDERS[module.__name__]:
            setattr(module, name, refusing(f"{module.__name__}.{name}", name))


def refusing(what: str, name: str) -> Any:
    """Make a class that can be imported and named as a type, but not used."""

    def refuse(self: Any, *given: Any, **named: Any) -> None:
        raise RefusedError(
            f"no use of {what}, for which the stand-in for transformer_engine_torch has a placeholder",
            f"{len(given) + len(named)} arguments",
            "use context parallelism with FlashAttention and 16-bit tensors only",
            code="not-modelled",
        )

    return type(name, (), {"__init__": refuse})
