"""Ring attention in JAX as a target: keys and values travel, JAX differentiates the whole ring.

ringspec check docs/conform/example_jax.py:target
"""

import jax
import jax.numpy as jnp

from ringspec.conformance.adapters.jax_mesh import JaxTarget
from ringspec.conformance.target import Capabilities


def ring_attention(q, k, v, *, axis_name, call):
    """o [B, H, n, D] and lse [B, H, n] of one worker, from its own q, k and v."""
    workers, wide = call.workers, jnp.promote_types(q.dtype, jnp.float32)
    q, block = q.astype(wide), (k.astype(wide), v.astype(wide), call.position_k)
    onward = [(worker, (worker + 1) % workers) for worker in range(workers)]
    m = jnp.full(q.shape[:3], -jnp.inf, wide)
    l, o = jnp.zeros_like(m), jnp.zeros((*q.shape[:3], v.shape[3]), wide)
    for step in range(workers):
        if step > 0:
            block = jax.lax.ppermute(block, axis_name, onward)
        k, v, position_k = block
        s = jnp.einsum("bhid,bhjd->bhij", q, k) * call.scale
        if call.causal:
            visible = position_k[:, None, :] <= call.position_q[:, :, None]
            s = jnp.where(visible[:, None], s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=3))
        shift = jnp.where(jnp.isneginf(m_new), 0.0, m_new)
        p, shrink = jnp.exp(s - shift[..., None]), jnp.exp(m - shift)
        l = l * shrink + p.sum(axis=3)
        o = o * shrink[..., None] + jnp.einsum("bhij,bhjd->bhid", p, v)
        m = m_new
    return (o / l[..., None]).astype(call.formats["outputs"]), m + jnp.log(l)


target = JaxTarget(
    ring_attention,
    Capabilities(
        layouts=("contiguous", "striped", "zigzag", "table"),
        circulations=("kv",),
        directions=(1,),
        workers=(1, 2, 3, 4, 8),
        features=("scale", "positions", "q-offset", "unequal-lengths", "dlse"),
        formats=("bfloat16", "float16", "float32", "float64"),
        head_ratios=(1,),
    ),
    name="example-jax",
)
