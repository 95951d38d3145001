"""Arguments that instructions no longer have: ``dtype`` and ``mask``.

Until Neuron 2.26 (NKI Beta 1, ``neuronxcc.nki``), instructions had no ``dst``: they returned a tile of the dtype that
``dtype`` named. Neuron 2.27 (NKI Beta 2, ``nki``) gave all of them ``dst``, and removed ``dtype`` and ``mask``.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/nki_rn.html and, for tensor_copy,
en/v2.26.1/nki/api/generated/nki.isa.tensor_copy.html and en/v2.28.1 of the same page.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from nki_impl.sim.errors import DtypeError, SimulatorWarning, UnsupportedError, kernel_line

_REMOVED = "removed in Neuron 2.27 (NKI Beta 2), when all instructions got dst"


def drop_former(name: str, args: Sequence[object], given: dict[str, object]) -> None:
    """Remove a ``dtype`` that repeats that of ``dst`` from the keyword arguments ``given`` of the instruction ``name``.

    AWS's tutorials of February 2026 still pass such a ``dtype`` to tensor_copy, so it is accepted with a warning.
    ``args`` and ``given`` are the arguments of the call; ``given`` has ``dtype`` or ``mask``. Raises
    :class:`UnsupportedError` for ``mask``, and for ``dtype`` without ``dst`` or in another instruction;
    :class:`DtypeError` for another dtype than that of ``dst``.
    """
    if "mask" in given:
        raise UnsupportedError(
            "mask", f"no mask: {_REMOVED}", "mask", "slice the operands instead", name
        )
    dtype = given["dtype"]
    has_dst = "dst" in given or len(args) > 1
    if name != "tensor_copy" or not has_dst:
        raise UnsupportedError(
            "dtype",
            f"no dtype: {_REMOVED}",
            f"dtype={dtype}",
            "allocate dst with this dtype, and leave out dtype",
            name,
        )
    dst: Any = given["dst"] if "dst" in given else args[0]
    if dtype != dst.dtype:
        raise DtypeError(
            "dtype", f"{dst.dtype} as dst has: dtype was {_REMOVED}", dtype, "leave it out", name
        )
    warnings.warn(
        f"{name}: dtype was {_REMOVED}. It equals the dtype of dst, as in the matrix products of AWS's nki-samples, so "
        f"it is accepted (at {kernel_line()})",
        SimulatorWarning,
        stacklevel=3,
    )
    del given["dtype"]
