"""The only module from which kernels import NKI: ``from nki_impl.lang import nki, nl, nisa, ncc``.

The environment variable RINGSPEC_NKI selects the backend when this module is imported:

- ``simulator`` (the default): the simulator of this package, which runs collectives on any machine;
- ``nki-simulate``: the official ``nki`` package with its function ``nki.simulate``, which runs only kernels without
  collectives, because it does not implement ``nki.collectives``;
- ``device``: the official ``nki`` package and the compiler ``neuronx-cc``, for a Trainium instance.

The official packages come from the vendor's package index. The public index has placeholders with the names of both
packages, which fail on import or are empty. A placeholder is recognised by its version and by missing submodules; the
error then says how to install the real packages.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import warnings
from pathlib import Path
from types import ModuleType

__all__ = ["BackendError", "check_package", "chosen_backend", "load_backend", "warn"]

BACKENDS = ("simulator", "nki-simulate", "device")
INDEX = "https://pip.repos.neuron.amazonaws.com"
FLOORS = {"nki": (0, 3), "neuronx-cc": (2, 24)}
"""The lowest versions that are not placeholders, as in the extra ``neuron``."""


class BackendError(ImportError):
    """RINGSPEC_NKI is not the name of a backend, or the packages of that backend are missing or placeholders."""


def chosen_backend() -> str:
    """Return the value of RINGSPEC_NKI, or "simulator" if it is not set; raises :class:`BackendError`."""
    chosen = os.environ.get("RINGSPEC_NKI") or "simulator"
    if chosen not in BACKENDS:
        raise BackendError(f"RINGSPEC_NKI is {chosen!r}; it can be {', '.join(BACKENDS)}")
    return chosen


def check_package(distribution: str) -> None:
    """Raise BackendError if the package ``distribution``, 'nki' or 'neuronx-cc', is missing or a placeholder."""
    floor = FLOORS[distribution]
    wanted = f"{distribution}>={'.'.join(map(str, floor))}"
    command = f'pip install --upgrade "{wanted}" --extra-index-url {INDEX}'
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise BackendError(f"{distribution} is not installed. To install it: {command}") from None
    if _numbers(version) < floor:
        raise BackendError(
            f"{distribution} {version} is the placeholder of the public index, not AWS's package. "
            f"To install the real one: {command}"
        )
    if distribution == "nki" and not _has_submodules("nki", ("language", "isa", "collectives")):
        raise BackendError(
            f"the package nki {version} has no nki.language: it is not AWS's. To install it: {command}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version string.

    >>> _numbers("1.0.post1"), _numbers("2.24.8799.0+6f62ff7c")
    ((1, 0), (2, 24, 8799, 0))
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _has_submodules(package: str, names: tuple[str, ...]) -> bool:
    """Return whether the package has the submodules ``names``, without importing the package."""
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return all(
        any((place / name).is_dir() or list(place.glob(f"{name}.*")) for place in places)
        for name in names
    )


def load_backend(backend: str) -> tuple[ModuleType, ModuleType, ModuleType, ModuleType]:
    """Return (nki, nki.language, nki.isa, nki.collectives) of ``backend``."""
    if backend == "simulator":
        root = importlib.import_module("nki_impl.sim.nki")
        return root, root.language, root.isa, root.collectives
    check_package("nki")
    if backend == "device":
        check_package("neuronx-cc")
    names = ("nki", "nki.language", "nki.isa", "nki.collectives")
    root, language, isa, collectives = (importlib.import_module(name) for name in names)
    return root, language, isa, collectives


def warn(message: str) -> None:
    """Issue a Python warning while a kernel is built. AWS's kernels do this too, with a logger."""
    warnings.warn(message, UserWarning, stacklevel=2)


BACKEND = chosen_backend()
nki, nl, nisa, ncc = load_backend(BACKEND)
