"""``nl.NKIObject``, the base class of classes that kernels define.

The NKI language guide gives the ``__init__`` of such a class, unless it defines one: a field that has no default value
and is not passed is None. Python's ``dataclass`` refuses that. NKI releases before 0.7 compile a kernel without running
its Python code, so AWS's library relies on the guide (``remainderIFused`` in core/mlp/mlp_tkg/mlp_tkg_constants.py). The
simulator accepts it with a warning.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/get-started/nki-language-guide.html (classes)
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

from nki_impl.sim.errors import SimulatorWarning, kernel_line


class NKIObject:
    """Base class of the classes that kernels may define and pass around.

    A class attribute without an annotation counts as a field, too, so that ``@dataclass`` on a subclass accepts it as
    an argument. Published kernels rely on this. A field without a default value gets the default None.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        annotations = cls.__dict__.get("__annotations__", {})
        required = tuple(
            name
            for name, kind in annotations.items()
            if name not in cls.__dict__ and "ClassVar" not in str(kind)
        )
        for name, value in list(cls.__dict__.items()):
            plain = not name.startswith("_") and not hasattr(value, "__get__")
            if plain and name not in annotations and type(value).__hash__ is not None:
                annotations = {**annotations, name: Any}
        cls.__annotations__ = annotations
        if required and "__init__" not in cls.__dict__ and "__slots__" not in cls.__dict__:
            for name in required:
                setattr(cls, name, None)
            cls.__new__ = _warn_of_missing({*required, *_required(cls)})  # type: ignore[method-assign]

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)


def _required(cls: type) -> set[str]:
    """Return the fields without a default value that the bases of ``cls`` declare."""
    return set().union(*(getattr(base.__new__, "required", ()) for base in cls.__bases__))


def _warn_of_missing(required: set[str]) -> Any:
    """Return a ``__new__`` that warns if a field of ``required`` is not passed to the default ``__init__``."""

    def new(cls: type, /, *args: Any, **kwargs: Any) -> Any:
        if dataclasses.is_dataclass(cls):
            names = [field.name for field in dataclasses.fields(cls) if field.init]
            missing = [name for name in names[len(args) :] if name in required - kwargs.keys()]
        else:
            missing = sorted(required - kwargs.keys()) if cls.__init__ is NKIObject.__init__ else []  # type: ignore[misc]
        if missing:
            _warn(cls, missing)
        return object.__new__(cls)

    new.required = required  # type: ignore[attr-defined]
    return staticmethod(new)


def _warn(cls: type, missing: list[str]) -> None:
    warnings.warn(
        f"{cls.__qualname__}: {', '.join(missing)} not passed, so None, as the NKI language guide says; Python's "
        f"dataclass refuses that. Pass a value, or give the field a default (at {kernel_line()})",
        SimulatorWarning,
        stacklevel=3,
    )
