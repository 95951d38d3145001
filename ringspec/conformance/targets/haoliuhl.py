"""haoliuhl's ``ringattention`` 0.1.2 or later: the ring attention of the paper's authors, in JAX.

The function under test is ``ring_attention`` of ``ringattention/ringattention_jax.py``, the blockwise implementation
for all platforms. The package cannot be imported if JAX lacks ``jax.lib.xla_bridge``. So this one file of the installed
distribution is loaded by its path, unmodified. The function takes [B, n, H, D], masks by token index in a contiguous
layout, always scales by 1/sqrt(D), requires Hkv = H and Dv = D, and returns no lse.

How the function is called here, and why:

- It gets one query chunk and one key chunk per worker (``query_chunk_size``, ``key_chunk_size`` = n).
- bfloat16 and float16 inputs are converted to float32, which is exact, and o and the gradients are rounded once. With
  16-bit inputs its backward pass returns float32 gradients, and with ``float32_logits=False`` it fails in ``lax.cond``.
- ``float32_logits`` is set, except in float64.
- Packed documents are passed as ``segment_ids``.

The target does not claim to support:

- Causal attention with one token per chunk. The function skips the diagonal there, so the first row is NaN and other
  rows lack their own key (JAX 0.10.2). Hence ``tokens_multiple=2``.
- The gradient of the bias, which the function does not compute.
- Rows without visible keys, which its masks cannot express.

Source: ringattention/ringattention_jax.py of ringattention 0.1.2, https://github.com/haoliuhl/ringattention.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ringspec.conformance.adapters.jax_mesh import JaxTarget
from ringspec.conformance.adapters.torch_worker import LocalCall
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.versions import check_names, require, unknown_version

PACKAGE, FILE = "ringattention", "ringattention/ringattention_jax.py"
FLOOR = KNOWN = "0.1.2"
NEEDED = ("jax", "flax", "einops")
COMMAND = f"pip install jax flax einops '{PACKAGE}>={FLOOR}'"

CLAIMS = Capabilities(
    layouts=("contiguous",),
    circulations=("kv",),
    directions=(1,),
    workers=(1, 2, 3, 4, 8),
    masks=("causal", "documents"),
    formats=("bfloat16", "float16", "float32", "float64"),
    head_ratios=(1,),
    value_dim_equals_head_dim=True,
    tokens_multiple=2,
    axes="BSHD",
    lse="hidden",
)
NOTES = (
    f"{FILE} is loaded by its path, because the package cannot be imported with this JAX",
    "bfloat16 and float16 inputs are widened to float32, and its results are rounded once",
    f"known to run with {PACKAGE} {KNOWN}",
)


@functools.cache
def module_file() -> ModuleType:
    """Load the file of the installed distribution as a module."""
    path = importlib.metadata.distribution(PACKAGE).locate_file(FILE)
    spec = importlib.util.spec_from_file_location("ringattention_jax_file", str(path))
    if spec is None or spec.loader is None or not Path(str(path)).is_file():
        raise unknown_version(f"the file {FILE}", PACKAGE, KNOWN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check_names(module, ("ring_attention",), PACKAGE, KNOWN)
    return module


def attention(q: Any, k: Any, v: Any, *, axis_name: str, call: LocalCall) -> Any:
    """Compute o [B, n, H, D] of one worker."""
    import jax
    import jax.numpy as jnp

    wide = jnp.promote_types(q.dtype, jnp.float32)
    inputs = (x.astype(wide) for x in (q, k, v))
    chunks = {
        "causal_block_size": 1 if call.causal else None,
        "query_chunk_size": q.shape[1],
        "key_chunk_size": k.shape[1],
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "dtype": wide,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": True,
    }
    segments = segment_ids(call, q.shape[0], q.shape[1] * call.workers)
    function = module_file().ring_attention
    o = function(*inputs, None, segments, None, axis_name, wide == jnp.float32, chunks)
    return o.astype(call.formats["outputs"])


def segment_ids(call: LocalCall, batch: int, length: int) -> Any:
    """Return the document number of each token of the whole sequence, [B, S]; None without documents."""
    import jax.numpy as jnp

    starts = call.terms.get("cu_seqlens")
    if starts is None:
        return None
    numbers = np.searchsorted(np.array(starts), np.arange(length), side="right")
    return jnp.asarray(np.broadcast_to(numbers, (batch, length)).astype(np.int32))


def haoliuhl(**settings: Any) -> JaxTarget:
    """Make the target.

    ``settings`` are passed to JaxTarget. Raises MissingPackageError if a package is missing or too old.
    """
    if "python" not in settings:
        require(NEEDED, PACKAGE, FLOOR, COMMAND)
    return JaxTarget(
        f"{__name__}:attention",
        CLAIMS,
        name="haoliuhl",
        notes=NOTES,
        packages=("jax", "ringattention"),
        **settings,
    )
