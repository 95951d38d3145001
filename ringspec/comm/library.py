"""Access to the MPI library, which is loaded on first use. Loading it starts MPI."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ringspec.errors import MissingPackageError


@functools.cache
def mpi() -> Any:
    """Return ``mpi4py.MPI``; raise MissingPackageError if mpi4py is missing or cannot load an MPI library."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as cause:
        raise MissingPackageError(
            "mpi4py and an MPI library",
            f"neither, or an MPI library that cannot be loaded ({cause})",
            "pip install '.[mpi]'",
        ) from None


@functools.cache
def kept() -> int:
    """Return the key under which this package stores its own objects in an MPI communicator."""
    key: int = mpi().Comm.Create_keyval()
    return key
