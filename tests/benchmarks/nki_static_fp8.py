"""Compare attention_block_tkg with static weights and an fp8 cache with a float64 model of its source, stage by stage.

    python tests/benchmarks/nki_static_fp8.py nki-library [--batch 8] [--context 1024]

nki-library is a checkout of release 2.29. AWS's tests of these cases fail, because their reference does not round. The
model has no code of the simulator or of the library: NumPy in float64, and one rounding wherever the kernel's source
writes a bfloat16 or float8 tile. For each case the table has:

- the cosine of X_out with the test's reference (the test asks for 0.99), and its relative error (rms) to the model;
- the share of the new elements of the K and V caches that are bit-equal to those of the model;
- the cosine of the model without any rounding with the reference, and with itself if only the input of the projection
  is rounded to float8. The first shows that the reference is this model; the second, how far one rounding moves X_out.

Ends with status 1 if the error of X_out to the model exceeds 1 %, or if fewer than 99.9 % of the new elements are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TESTS = "test.integration.nkilib.experimental.transformer.test_attention_block_tkg"
CLIP = 240.0  # the largest float8_e4m3 of the library


def rounded(x: Array, bits: int, lowest: int) -> Array:
    """Round to nearest even with ``bits`` significant bits; ``lowest`` is the exponent of the smallest normal number."""
    exponent = np.maximum(np.frexp(x)[1], lowest + 1)
    unit = np.ldexp(1.0, exponent - bits)
    return np.asarray(np.round(x / unit) * unit)


def bfloat16(x: Array) -> Array:
    return rounded(x, 8, -126)


def float8(x: Array) -> Array:
    return rounded(x, 4, -6)


def exact(x: Array) -> Array:
    return x


@dataclass(frozen=True)
class Rounding:
    """``tile``: of every bfloat16 tile; ``hidden``: of the projection's input; ``cache``: of K, V and the second input."""

    tile: Callable[[Array], Array]
    hidden: Callable[[Array], Array]
    cache: Callable[[Array], Array]


KERNEL = Rounding(bfloat16, float8, float8)
NONE = Rounding(exact, exact, exact)
ONLY_INPUT = Rounding(exact, float8, exact)


def wide(x: Any) -> Array:
    return np.asarray(x).astype(np.float64)


def projection(given: dict[str, Any], case: Any, to: Rounding) -> Array:
    """Return [B, (heads + 2) D]: each core multiplies half of H, in as many partial sums as its array has tiles."""
    x, scale = wide(given["X"])[:, 0], wide(given["input_dequant_scale_qkv"])[0, 0]
    if case.rmsnorm_X:
        mean = (x**2).sum(-1, keepdims=True) / given["X_hidden_dim_actual"]
        x = to.tile(x * wide(given["rmsnorm_X_gamma"]) / np.sqrt(mean + given["rmsnorm_X_eps"]))
    x = to.hidden(np.clip(to.tile(x / scale), -CLIP, CLIP))
    halves = x.reshape(len(x), 2, 128, -1)
    weights = wide(given["W_qkv"]).reshape(2, 128, halves.shape[3], -1)
    parts = 128 // (32 if len(x) <= 32 else 64 if len(x) <= 64 else 128)
    columns = np.repeat(
        wide(given["weight_dequant_scale_qkv"])[0] * scale,
        np.array([case.q_heads, 1, 1]) * case.d_head,
    )
    halves_out = []
    for half in range(2):
        out = np.zeros((len(x), weights.shape[3]))
        for part in range(parts):
            a, w = halves[:, half, :, part::parts], weights[half, :, part::parts]
            out = to.tile(out + a.reshape(len(x), -1) @ w.reshape(-1, w.shape[2]))
        halves_out.append(to.tile(out * columns))
    return to.tile(halves_out[0] + halves_out[1])


def rotated(
    heads: Array, gamma: Any, given: dict[str, Any], case: Any, tile: Callable[..., Any]
) -> Array:
    """Return [D, B, heads] after RMSNorm and the rotary embedding, which rounds each product and each sum."""
    if case.qk_norm_pre_rope:
        mean = (heads**2).mean(0, keepdims=True)
        heads = heads / np.sqrt(mean + given["rmsnorm_QK_eps"])
        heads = tile(heads if gamma is None else heads * wide(gamma).reshape(-1, 1, 1))
    if given["cos"] is None:
        return heads
    cos, sin = wide(given["cos"]), wide(given["sin"])
    half = case.d_head // 2
    pairs = heads.reshape(2, half, *heads.shape[1:])
    if not case.rope_contiguous_layout:
        pairs = heads.reshape(half, 2, *heads.shape[1:]).swapaxes(0, 1)
    low, high = pairs
    turned = np.stack(
        [tile(tile(low * cos) - tile(high * sin)), tile(tile(high * cos) + tile(low * sin))]
    )
    turned = turned if case.rope_contiguous_layout else turned.swapaxes(0, 1)
    return turned.reshape(heads.shape)


def attention(q: Array, k: Array, v: Array, given: dict[str, Any], case: Any) -> Array:
    """Return [D, B, heads]. The cached tokens before the new one are visible, and the new one itself."""
    table, at = given["active_blocks_table"], case.S_ctx // 4 * 3
    blocks = np.arange(case.batch)[:, None] if table is None else table
    out = np.empty_like(q)
    for b in range(case.batch):
        length = (3 * b + at) % (case.S_ctx - 1)
        keys, values = (
            wide(cache[blocks[b]]).reshape(-1, case.d_head)[:length]
            for cache in (given["K_cache"], given["V_cache"])
        )
        keys, values = np.vstack([keys, k[:, b]]), np.vstack([values, v[:, b]])
        scores = q[:, b].T @ keys.T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, b] = (p @ values / p.sum(-1, keepdims=True)).T
    return out


def model(given: dict[str, Any], case: Any, to: Rounding) -> tuple[Array, Array, Array]:
    """Return X_out as [B, H], and the new rows of K and V as [D, B]."""
    qkv = projection(given, case, to).reshape(case.batch, -1, case.d_head).transpose(2, 0, 1)
    q = rotated(qkv[:, :, :-2], given["W_rmsnorm_Q_pre_rope"], given, case, to.tile)
    k = rotated(qkv[:, :, -2:-1], given["W_rmsnorm_K_pre_rope"], given, case, to.tile)[:, :, 0]
    k = to.cache(np.clip(k * wide(given["k_scale"])[0, 0], -CLIP, CLIP))
    v = to.cache(np.clip(qkv[:, :, -1] * wide(given["v_scale"])[0, 0], -CLIP, CLIP))
    out = to.tile(attention(to.tile(q * float(np.float32(case.d_head**-0.5))), k, v, given, case))
    scale = wide(given["input_dequant_scale_out"])[0, 0]
    flat = to.tile(out.transpose(1, 2, 0).reshape(case.batch, -1) / scale)
    flat = to.cache(np.clip(flat, -CLIP, CLIP))
    return flat @ wide(given["W_out"]) * wide(given["weight_dequant_scale_out"])[0, 0] * scale, k, v


def cosine(a: Array, b: Array) -> float:
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


def error(got: Array, want: Array) -> float:
    return float(np.sqrt(((got - want) ** 2).sum() / (want**2).sum()))


def rows(x: Any, case: Any) -> Array:
    """Return X_out as [B, H]; ``transposed_out`` gives [128, 2, H / 256, B], where row 128 c + p of H / 256 is [p, c]."""
    x = wide(x)
    return x.transpose(3, 1, 0, 2).reshape(case.batch, -1) if case.transposed_out else x


def equal_share(cache: Any, new: Array, given: dict[str, Any], case: Any) -> float:
    """Return the share of the new elements in ``cache`` that equal ``new``; the last sequence of several is not stored."""
    slots = given["kv_cache_update_idx"][:, 0]
    stored = slots != np.iinfo(np.uint32).max
    starts = 0 if case.block_len else np.arange(case.batch) * case.S_max_ctx
    got = wide(cache).reshape(-1, case.d_head)[(slots.astype(np.int64) + starts)[stored]]
    return float((got == new.T[stored]).mean())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what the library prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def compare(tests: Any, case: Any) -> tuple[float, ...]:
    """Return the figures of one line of the table."""
    from nki_impl.sim.packages.simulator import on_ranks

    with quiet():
        given = tests.generate_kernel_inputs(case)
        reference = rows(tests._golden_ref_via_torch(given, case.lnc)["X_out"], case)
        kernel = tests.attention_block_tkg_kernel_test_wrapper
        x_out, k_cache, v_cache = on_ranks(kernel, [given], case.lnc).results[0]
    want, k, v = model(given, case, KERNEL)
    unrounded = model(given, case, NONE)[0]
    got = rows(x_out, case)
    return (
        cosine(got, reference),
        error(got, want),
        equal_share(k_cache, k, given, case),
        equal_share(v_cache, v, given, case),
        cosine(unrounded, reference),
        cosine(unrounded, model(given, case, ONLY_INPUT)[0]),
    )


def cases(tests: Any, batch: int, context: int) -> list[Any]:
    """Return the suite's cases of static weights with an fp8 cache on one rank, each once."""
    configs = importlib.import_module(TESTS + "_model_config").attention_block_tkg_model_configs
    every = [config for group in configs.values() for config in group]
    static = tests.QuantizationType.STATIC
    chosen = {
        case.test_id(): case
        for case in every
        if case.kv_quant and case.quantization_type == static
        and not case.K_cache_transposed and case.KVDP == 1 and case.batch <= batch and case.S_ctx <= context
    }  # fmt: skip
    return list(chosen.values())


def load(checkout: Path) -> Any:
    """Import the test module of the checkout with the simulator as nki."""
    from nki_impl.sim.install import hide, show
    from nki_impl.sim.pytest_plugin import MissingModules

    source = checkout / "src"
    sys.path[:0] = [str(path) for path in (checkout, source, source / "nkilib_src")]
    os.environ["NKI_NC_VERSION"] = "gen3"
    hide()
    show()
    sys.meta_path.append(MissingModules())
    return importlib.import_module(TESTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--batch", type=int, default=16, help="cases of at most this batch size")
    parser.add_argument("--context", type=int, default=1024, help="and of at most this context")
    options = parser.parse_args()
    tests = load(options.checkout.resolve())
    print(
        "batch heads context     H  ~test   error  K equal  V equal | test~exact  exact~fp8 input"
    )
    wrong = 0
    for case in cases(tests, options.batch, options.context):
        x, ours, k, v, same, moved = compare(tests, case)
        wrong += ours > 0.01 or min(k, v) < 0.999
        print(
            f"{case.batch:5d} {case.q_heads:5d} {case.S_ctx:7d} {case.H:5d} {x:6.3f} {ours:7.4f} "
            f"{k:8.5f} {v:8.5f} | {same:10.6f} {moved:10.3f}",
            flush=True,
        )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
