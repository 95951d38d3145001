"""Merges by the Triton kernels of SGLang and vLLM, from their source files in given folders, and Triton's elementary functions.

Only the named functions of a file are executed: importing the packages needs their compiled parts. Nothing of them is copied.
Each merger takes parts (o [..., D], lse [...]) in order, and returns o and lse. D is padded with zeros to a power of two.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from merges.torch_side import array, tensor

from ringspec.merges import Functions

Merger = Callable[[list[Any]], tuple[np.ndarray, np.ndarray]]
SGLANG = ("kernels/ops/attention/merge_state.py", "kernels/ops/attention/dcp_kernels.py")
VLLM_OPS = "v1/attention/ops"


def functions_in(file: Path, *names: str) -> SimpleNamespace:
    """Execute the functions ``names`` of a file, which may be static methods, and nothing else of it."""
    import torch
    import triton

    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
    missing = set(names) - {node.name for node in found}
    assert not missing, f"{file} has no function {', '.join(sorted(missing))}"
    for node in found:
        node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) != "staticmethod"]
    given = {
        "torch": torch,
        "triton": triton,
        "tl": triton.language,
        "Optional": {torch.Tensor: Any},  # of annotations
        "Tuple": tuple,
        "float8_info": torch.finfo(torch.float8_e4m3fn),
    }
    postponed = annotations.compiler_flag
    flags = postponed if "from __future__ import annotations" in text else 0
    code = compile(ast.Module(found, []), str(file), "exec", flags=flags, dont_inherit=True)
    exec(code, given)  # noqa: S102 (the public files' own functions)
    return SimpleNamespace(**{name: given[name] for name in names})


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def on_device(x: np.ndarray):
    return tensor(np.ascontiguousarray(x)).to(device())


def padded(o: np.ndarray) -> np.ndarray:
    """Return o as [rows, 1 head, a power of two]."""
    width = o.shape[-1]
    rows = np.ascontiguousarray(o).reshape(-1, 1, width)
    whole = np.zeros((*rows.shape[:2], 1 << (width - 1).bit_length()), rows.dtype)
    whole[..., :width] = rows
    return whole


def stacked(parts: list[Any]):
    """Return o [parts, rows, 1, width] and lse [parts, rows, 1] as tensors."""
    o = np.stack([padded(part.o) for part in parts])
    lse = np.stack([np.ascontiguousarray(part.lse).reshape(-1, 1) for part in parts])
    return on_device(o), on_device(lse)


def unstacked(o, lse, parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    shape = parts[0].o.shape
    bare = array(o.cpu())[..., : shape[-1]]
    return bare.reshape(shape), array(lse.cpu()).reshape(shape[:-1])


def pairs(both: Callable[..., Any]) -> Merger:
    """Merge parts one after the other by ``both(o, lse, other o, other lse)``."""

    def merged(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        all_o, all_lse = stacked(parts)
        o, lse = all_o[0], all_lse[0]
        for other, its in zip(all_o[1:], all_lse[1:], strict=True):
            o, lse = both(o, lse, other, its)
        return unstacked(o, lse, parts)

    return merged


def sglang_merge(package: Path) -> Merger:
    """SGLang's merge_state_triton, lse [tokens, heads]."""
    found = functions_in(package / SGLANG[0], "merge_state_kernel", "merge_state_triton")
    return pairs(found.merge_state_triton)


def vllm_merge(package: Path) -> Merger:
    """vLLM's merge_attn_states in Triton, lse [heads, tokens]."""
    import torch

    file = package / VLLM_OPS / "triton_merge_attn_states.py"
    found = functions_in(file, "merge_attn_states_kernel", "merge_attn_states")

    def both(o, lse, other, its):
        merged, total = torch.empty_like(o), torch.empty_like(lse.T.contiguous())
        found.merge_attn_states(
            merged, o, lse.T.contiguous(), other, its.T.contiguous(), output_lse=total
        )
        return merged, total.T

    return pairs(both)


def vllm_dcp_ag_rs(package: Path) -> Merger:
    """vLLM's correction of each rank's o, then their sum by rank in the type of o, in place of the reduce-scatter."""
    import torch

    # One file until 0.24 at least; in 0.33 the kernel is a static method called ``kernel``, the first of its file.
    old, new = package / VLLM_OPS / "common.py", package / VLLM_OPS / "dcp.py"
    name = "_correct_attn_cp_out_kernel"
    if name in old.read_text(encoding="utf-8"):
        kernel = getattr(functions_in(old, name), name)
    else:
        kernel = functions_in(new, "kernel").kernel

    def merged(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        all_o, all_lse = stacked(parts)
        total, lse = None, torch.empty_like(all_lse[0])
        for rank, o in enumerate(all_o):
            out = torch.empty_like(o)
            strides = (*o.stride(), *all_lse.stride(), rank)
            fixed = {"HEAD_DIM": o.shape[-1], "N_ROUNDED": len(parts), "IS_BASE_E": True}
            kernel[(*o.shape[:2], 1)](o, out, all_lse, lse, *strides, **fixed)
            total = out if total is None else total + out
        return unstacked(total, lse, parts)

    return merged


def vllm_dcp_a2a(package: Path) -> Merger:
    """vLLM's _dcp_a2a_unpack_combine; the bits of lse lie after o in one buffer of o's type."""
    import torch

    old, new = package / VLLM_OPS / "dcp_alltoall.py", package / VLLM_OPS / "dcp.py"
    names = ("_dcp_a2a_unpack_combine_kernel", "_dcp_a2a_unpack_combine")
    combine = functions_in(old if old.exists() else new, *names)._dcp_a2a_unpack_combine

    def merged(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        o, lse = stacked(parts)
        packed = lse[..., None].contiguous().view(o.dtype)
        received = torch.cat([o, packed], dim=-1)
        return unstacked(*combine(received, o.shape[-1], packed.shape[-1], True, True), parts)

    return merged


def sglang_dcp_a2a(package: Path) -> Merger:
    """SGLang's dcp_lse_combine_triton."""
    names = ("_dcp_lse_combine_kernel", "dcp_lse_combine_triton")
    combine = functions_in(package / SGLANG[1], *names).dcp_lse_combine_triton

    def merged(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        o, lse = stacked(parts)
        return unstacked(*combine(o, lse, True, True), parts)

    return merged


MERGERS = {
    "sglang_merge": ("sglang", sglang_merge),
    "sglang_dcp_a2a": ("sglang", sglang_dcp_a2a),
    "vllm_merge": ("vllm", vllm_merge),
    "vllm_dcp_ag_rs": ("vllm", vllm_dcp_ag_rs),
    "vllm_dcp_a2a": ("vllm", vllm_dcp_a2a),
}


def triton_functions() -> Functions:
    """Return exp, log, exp2, log2 and the division as Triton compiles them for the device."""
    import torch
    from merges import triton_kernels

    def of(kernel):
        def function(*given: np.ndarray) -> np.ndarray:
            shape = np.broadcast_shapes(*[np.shape(x) for x in given])
            whole = [np.array(np.broadcast_to(x, shape), np.float32) for x in given]
            tensors = [torch.from_numpy(x).to(device()) for x in whole]
            result = torch.empty(shape, dtype=torch.float32, device=device())
            size = result.numel()
            kernel[(-(-size // 1024),)](*tensors, result, size, 1024)
            return result.cpu().numpy()

        return function

    return Functions(
        name="Triton",
        exp=of(triton_kernels.exp),
        log=of(triton_kernels.log),
        exp2=of(triton_kernels.exp2),
        log2=of(triton_kernels.log2),
        divide=of(triton_kernels.divide),
    )


def torch_functions_on_the_gpu() -> Functions:
    """Return torch's elementary functions of CUDA tensors; its division is correctly rounded."""
    import torch

    def of(function):
        return lambda x: function(torch.from_numpy(np.array(x)).to(device())).cpu().numpy()

    names = ("exp", "log", "log1p", "exp2", "log2", "sigmoid")
    return Functions(name="torch", **{name: of(getattr(torch, name)) for name in names})
