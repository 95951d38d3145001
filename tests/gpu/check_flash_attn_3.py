"""The stand-in for FlashAttention 3 against its kernel, compiled for JAX, on a Hopper GPU.

    python3 tests/gpu/check_flash_attn_3.py --library libdew_flash_attn3.so --out DIR [--only 'packed']

The library is that of the package dew-flash-attn-cu13 (or cu12), which contains the kernels of FlashAttention 3 as functions for
JAX; JAX must see the GPU. Cases, float64 and bounds are those of check_flash_attn.py, except the kinds that need the
public functions, views, rows of no sequence or no keys, and except strides, which JAX decides. The bounds are those of
FlashAttention 2, which rounds at the same points or more. Writes flash_attn_3.json; exit status 1 after a difference.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import check_flash_attn as common  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from flash_attn_cases import cases  # noqa: E402

from ringspec.standins import installed  # noqa: E402

dense_forward = common.forward
KINDS = ("own", "whole", "infinite")
ROWS = 128  # of the largest row block of the backward pass


def visible(queries, keys, causal, window, longest):
    """Which key each query sees: query and key are aligned at the last ones, a negative side of a window has no limit."""
    left, right = window
    right = 0 if causal else right
    i = torch.arange(queries)[:, None] + keys - queries
    j = torch.arange(keys)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    seen &= (j >= i - left) if left >= 0 else True
    return seen & ((j <= i + right) if right >= 0 else True)


def forward(*given, **more):
    """o and lse in float64; the lse of a row without keys is -inf, which FlashAttention 2 has as +inf."""
    found = dense_forward(*given, **more)
    lse, bound = found["lse"]
    return found | {"lse": (torch.where(lse == torch.inf, -torch.inf, lse), bound)}


class Standin:
    """The stand-in under the names and arguments of FlashAttention 2."""

    def __init__(self):
        with installed("flash_attn_interface"):
            import flash_attn_interface as found
        self.found = found

    def forward(
        self, q, k, v, *lengths, softmax_scale, causal, window_size_left, window_size_right, **_
    ):
        return self.found._flash_attn_forward(
            q, k, v, **named(lengths), softmax_scale=softmax_scale, causal=causal,
            window_size_left=window_size_left, window_size_right=window_size_right,
        )[:2]  # fmt: skip

    def backward(
        self, dy, q, k, v, o, lse, dq, dk, dv, *lengths, softmax_scale, causal, window_size_left, window_size_right, **_
    ):  # fmt: skip
        self.found._flash_attn_backward(
            dy, q, k, v, o, lse, **named(lengths), dq=dq, dk=dk, dv=dv, softmax_scale=softmax_scale, is_causal=causal,
            window_size_left=window_size_left, window_size_right=window_size_right,
        )  # fmt: skip

    _flash_attn_forward = _flash_attn_varlen_forward = forward
    _flash_attn_backward = _flash_attn_varlen_backward = backward


def named(lengths):
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, lengths, strict=True)) if lengths else {}


class Kernel:
    """The compiled kernel under the names and arguments of FlashAttention 2."""

    def __init__(self, library):
        import jax

        self.jax, loaded = jax, ctypes.CDLL(str(library.resolve()))
        for name in ("fwd", "bwd", "varlen_fwd", "varlen_bwd"):
            target = jax.ffi.pycapsule(getattr(loaded, f"dew_flash3_mha_{name}"))
            jax.ffi.register_ffi_target(f"dew_flash3_mha_{name}", target, platform="CUDA")

    def call(self, name, shapes, tensors, lengths, options):
        """Call one function; widths are padded to a multiple of 8 by the cases, which have only such."""
        jax = self.jax
        attributes = {
            "softmax_scale": np.float64(options["softmax_scale"]),
            "is_causal": options["causal"],
            "window_size_left": np.int64(options["window_size_left"]),
            "window_size_right": np.int64(options["window_size_right"]),
        }
        if lengths:
            name, (*starts, longest, keys) = f"varlen_{name}", lengths
            tensors = (*tensors, *starts)
            attributes |= {"max_seqlen": np.int64(longest), "max_seqlen_k": np.int64(keys)}
        torch.cuda.synchronize()
        given = [jax.dlpack.from_dlpack(x.contiguous()) for x in tensors]
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        found = jax.ffi.ffi_call(f"dew_flash3_mha_{name}", results)(*given, **attributes)
        return [torch.utils.dlpack.from_dlpack(x) for x in jax.block_until_ready(found)]

    def forward(self, q, k, v, *lengths, **options):
        own = str(q.dtype).removeprefix("torch.")
        rows = (q.shape[1], q.shape[0]) if lengths else (q.shape[0], q.shape[2], q.shape[1])
        shapes = [
            (q.shape, own),
            (rows, "float32"),
            ((1, 1, 1, 1), "float32"),
            ((1, 1, 1), "float32"),
        ]
        return self.call("fwd", shapes, (q, k, v), lengths, options)[:2]

    def backward(self, dy, q, k, v, o, lse, dq, dk, dv, *lengths, **options):
        own = str(q.dtype).removeprefix("torch.")
        tokens, sequences = (
            (q.shape[0], len(lengths[0]) - 1) if lengths else (q.shape[:2].numel(), q.shape[0])
        )
        scratch = ((q.shape[-2] * (tokens + ROWS * (sequences + 1)),), "float32")
        shapes = [(x.shape, own) for x in (q, k, v)] + [scratch, scratch]
        found = self.call("bwd", shapes, (dy, q, k, v, o, lse), lengths, options)
        for buffer, x in zip((dq, dk, dv), found[:3], strict=True):
            buffer.copy_(x)

    _flash_attn_forward = _flash_attn_varlen_forward = forward
    _flash_attn_backward = _flash_attn_varlen_backward = backward


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    given, start = parser.parse_args(), time.monotonic()
    common.visible, common.forward = visible, forward
    about = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0)}
    standin, kernel, rows = Standin(), Kernel(given.library), []
    chosen = [c for c in cases() if c.kind in KINDS and given.only in c.name]
    for case in chosen:
        if time.monotonic() - start > given.seconds:
            break
        row = common.compared(case, standin, kernel, "cuda")
        rows.append(row)
        if not row["ok"]:
            print("DIFFERS", json.dumps(row)[:600], flush=True)
    passed = sum(row["ok"] for row in rows)
    about |= {"cases": len(chosen), "run": len(rows), "passed": passed}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "flash_attn_3.json").write_text(json.dumps({"about": about, "rows": rows}) + "\n")
    print(json.dumps(about), common.table(rows), sep="\n", flush=True)
    return 0 if rows and passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
