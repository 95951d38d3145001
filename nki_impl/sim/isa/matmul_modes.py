"""The modes of nc_matmul that read its operands in another way: transposition, and double_row for float8.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/api/generated/nki.isa.nc_matmul.html, and for
double_row nki/guides/architecture/trainium2_arch.html.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from nki_impl.sim.errors import DtypeError, MatmulError, SimulatorWarning, kernel_line
from nki_impl.sim.isa.common import Array, flat
from nki_impl.sim.isa.enums import matmul_perf_mode
from nki_impl.sim.tensor.access import keep_holes, read, unwritten, write
from nki_impl.sim.tensor.dtypes import to_float32
from nki_impl.sim.tensor.views import NkiTensor


def perf_mode_of(given: Any) -> matmul_perf_mode:
    """Return the mode that ``given`` means: a member of matmul_perf_mode, or its name, which AWS's library passes."""
    if isinstance(given, matmul_perf_mode):
        return given
    try:
        return matmul_perf_mode(given)
    except ValueError:
        raise DtypeError(
            "perf_mode", "a member of nisa.matmul_perf_mode", repr(given), "use one of them"
        ) from None


def double_rows(tensor: NkiTensor, operand: str, column_tiling: bool, generation: int) -> Array:
    """Return a float8 operand [K, 2, F] of the mode double_row as float32 [2 K, F]: both rows are contracted."""
    if generation < 3 or column_tiling:
        raise MatmulError(
            "perf_mode", "double_row from trn2 on, and without column tiling",
            "trn1" if generation < 3 else "a tile_size with fewer than 128 columns", "leave it out",
        )  # fmt: skip
    if not tensor.dtype.name.startswith("float8_e") or tensor.dtype.is_packed:
        raise MatmulError(operand, "float8 with double_row", tensor.dtype, "cast it to float8_e4m3")
    if tensor.ndim != 3 or tensor.shape[1] != 2:
        raise MatmulError(
            operand, "a shape [K, 2, F] with double_row", tensor.shape, "view it with two rows"
        )
    return read(tensor, operand).transpose(1, 0, 2).reshape(2 * tensor.shape[0], tensor.shape[2])


def transpose_through_matmul(
    dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor, accumulate: Any
) -> None:
    """Write the transpose of ``stationary`` to ``dst``; ``moving`` must be an identity matrix.

    This moves data and computes nothing, so elements that were never written remain unwritten, as in tensor_copy.
    find_nonzero_indices of AWS's library transposes such a tile.
    """
    values = flat(read(moving, "moving"))
    if values.shape[0] != values.shape[1] or not np.array_equal(values, np.eye(len(values))):
        raise MatmulError(
            "moving", "an identity matrix with is_transpose=True", values.shape, "use nc_transpose"
        )
    if accumulate:
        raise MatmulError(
            "accumulate", "None or False with is_transpose=True", accumulate, "add afterwards"
        )
    if dst.dtype is not stationary.dtype and dst.dtype.name != "float32":
        raise MatmulError(
            "dst", f"{stationary.dtype} as stationary has, or float32", dst.dtype, "allocate it so"
        )
    holes = unwritten(stationary)
    write(dst, to_float32(flat(stationary._array)).T)
    if holes is not None:
        keep_holes(dst, flat(holes).T.reshape(dst._array.shape))


def warn_of_narrow_psum(dst: NkiTensor) -> None:
    """Warn that trn2 has no 16-bit destination in PSUM by the documentation, but AWS's kernels use one."""
    warnings.warn(
        f"nc_matmul: the documentation requires a float32 dst on trn2, and dst is {dst.dtype}. AWS's library writes "
        f"such a dst with is_transpose=True (core/moe/moe_cte/bwmm_shard_on_I.py), so it is accepted (at {kernel_line()})",
        SimulatorWarning,
        stacklevel=2,
    )
