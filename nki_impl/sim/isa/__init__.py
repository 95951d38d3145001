"""``nki.isa``: the instructions, one file per engine, with the official names and signatures."""

from typing import NoReturn as _NoReturn

from nki_impl.sim.errors import NkiValidationError
from nki_impl.sim.isa import enums as constants
from nki_impl.sim.isa.dma import dma_copy, dma_transpose
from nki_impl.sim.isa.dma_sums import dma_compute
from nki_impl.sim.isa.enums import (
    dge_mode,
    dma_engine,
    engine,
    gpsimd_engine,
    matmul_perf_mode,
    nc_version,
    oob_mode,
    reduce_cmd,
    scalar_engine,
    tensor_engine,
    unknown_engine,
    vector_engine,
)
from nki_impl.sim.isa.gpsimd import affine_select, iota, tensor_partition_reduce
from nki_impl.sim.isa.lanes import max8, nc_stream_shuffle, tensor_copy_predicated
from nki_impl.sim.isa.mx import nc_matmul_mx, quantize_mx
from nki_impl.sim.isa.reduce import (
    exponential,
    range_select,
    select_reduce,
    tensor_reduce,
    tensor_scalar_reduce,
)
from nki_impl.sim.isa.registers import (
    get_nc_version,
    register_alloc,
    register_load,
    register_move,
    register_store,
    scalar_load,
    scalar_store,
)
from nki_impl.sim.isa.scalar import activation, activation_reduce
from nki_impl.sim.isa.scan import bn_aggr, bn_stats, tensor_tensor_scan
from nki_impl.sim.isa.search import (
    local_gather,
    nc_find_index8,
    nc_match_replace8,
    nc_n_gather,
    nonzero_with_count,
)
from nki_impl.sim.isa.tensor import nc_matmul, nc_transpose
from nki_impl.sim.isa.topk import topk
from nki_impl.sim.isa.vector import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_scalar,
    tensor_tensor,
)
from nki_impl.sim.machine.core import NkiInstruction
from nki_impl.sim.machine.sync import core_barrier, sendrecv
from nki_impl.sim.memory.registers import NkiScalar, VirtualRegister
from nki_impl.sim.public_names import no_such_name as _no_such_name

__all__ = [
    "NkiInstruction", "NkiScalar", "NkiValidationError", "VirtualRegister", "activation", "activation_reduce",
    "affine_select", "bn_aggr", "bn_stats", "constants", "core_barrier", "dge_mode", "dma_compute", "dma_copy", "dma_engine", "dma_transpose", "engine",
    "exponential", "get_nc_version", "gpsimd_engine", "iota", "local_gather", "matmul_perf_mode", "max8", "memset",
    "nc_find_index8", "nc_match_replace8", "nc_matmul", "nc_matmul_mx", "nc_n_gather", "nc_stream_shuffle", "nc_transpose", "nc_version", "nonzero_with_count", "oob_mode", "quantize_mx", "range_select",
    "reciprocal", "reduce_cmd", "register_alloc", "register_load", "register_move", "register_store",
    "scalar_engine", "scalar_load", "scalar_store", "scalar_tensor_tensor", "select_reduce", "sendrecv", "tensor_copy", "tensor_copy_predicated",
    "tensor_engine", "tensor_partition_reduce", "tensor_reduce", "tensor_scalar",
    "tensor_scalar_reduce", "tensor_tensor", "tensor_tensor_scan", "topk", "unknown_engine", "vector_engine",
]  # fmt: skip


def __getattr__(name: str) -> _NoReturn:
    raise _no_such_name("nki.isa", name)
