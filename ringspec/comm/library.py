"""The MPI library. It is loaded on first use; loading it starts MPI."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ringspec.errors import MissingPackageError


@functools.cache
def mpi() -> Any:
    """``mpi4py.MPI``. Raises MissingPackageError without mpi4py, or if no MPI library can be loaded."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as cause:
        raise MissingPackageError(
            "mpi4py and an MPI library",
            f"neither, or no library that loads ({cause})",
            "pip install '.[mpi]'",
        ) from None


@functools.cache
def kept() -> int:
    """The key under which a communicator keeps objects made for it."""
    key: int = mpi().Comm.Create_keyval()
    return key
