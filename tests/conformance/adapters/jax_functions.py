"""Functions for the JAX adapter: one right, and one for each way to be wrong."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp


def right(q, k, v, *, axis_name, call):
    """Gathered keys, o and lse."""
    keys, values = (jax.lax.all_gather(x, axis_name, axis=2, tiled=True) for x in (k, v))
    s = jnp.einsum("bhid,bhjd->bhij", q, keys) * call.scale
    if call.causal:
        position_k = jax.lax.all_gather(call.position_k, axis_name, axis=1, tiled=True)
        visible = position_k[:, None, :] <= call.position_q[:, :, None]
        s = jnp.where(visible[:, None], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=3)
    return jnp.einsum("bhij,bhjd->bhid", jnp.exp(s - lse[..., None]), values), lse


def crashes(q, k, v, *, axis_name, call):
    print("about to end", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(q, k, v, *, axis_name, call):
    time.sleep(600)


def leaves(q, k, v, *, axis_name, call):
    sys.stderr.write("no space left\n")
    os._exit(3)


def raises(q, k, v, *, axis_name, call):
    raise RuntimeError("no such kernel")


def prints(q, k, v, *, axis_name, call):
    print('{"kind": "result"}')
    return right(q, k, v, axis_name=axis_name, call=call)


def narrow(q, k, v, *, axis_name, call):
    o, lse = right(q, k, v, axis_name=axis_name, call=call)
    return o.astype(jnp.float16), lse


def shifted(q, k, v, *, axis_name, call):
    """Each worker returns the rows of its neighbour."""
    onward = [(worker, (worker + 1) % call.workers) for worker in range(call.workers)]
    o, lse = right(q, k, v, axis_name=axis_name, call=call)
    neighbour = jax.lax.ppermute(jax.lax.stop_gradient(o), axis_name, onward)
    return o + (neighbour - jax.lax.stop_gradient(o)), lse


def one_nan(q, k, v, *, axis_name, call):
    """NaN in one element of worker 1."""
    o, lse = right(q, k, v, axis_name=axis_name, call=call)
    there = jnp.zeros(o.shape, bool).at[0, 0, 2, 3].set(True) & (call.rank == 1)
    return o + jnp.where(there, jnp.nan, 0.0).astype(o.dtype), lse


def mutates(q, k, v, *, axis_name, call):
    """What JAX does not let happen."""
    q[0, 0, 0, 0] = 1.0
    return right(q, k, v, axis_name=axis_name, call=call)


def without_lse(q, k, v, *, axis_name, call):
    return right(q, k, v, axis_name=axis_name, call=call)[0]


def usp(q, k, v, *, axis_name, call):
    """Tokens for heads along the axis ulysses, gathered keys along the axis ring."""
    assert axis_name == tuple(axis for axis, _ in call.mesh)
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    q, k, v = (jax.lax.all_to_all(x, "ulysses", 1, 2, tiled=True) for x in (q, k, v))
    rows = jax.lax.all_gather(call.position_q, "ulysses", axis=1, tiled=True)
    columns = jax.lax.all_gather(call.position_k, "ulysses", axis=1, tiled=True)
    columns = jax.lax.all_gather(columns, "ring", axis=1, tiled=True)
    k, v = (jax.lax.all_gather(x, "ring", axis=2, tiled=True) for x in (k, v))
    s = jnp.einsum("bhid,bhjd->bhij", q, k) * call.scale
    if call.causal:
        s = jnp.where(columns[:, None, None, :] <= rows[:, None, :, None], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=3)
    o = jnp.einsum("bhij,bhjd->bhid", jnp.exp(s - lse[..., None]), v)
    return tuple(jax.lax.all_to_all(x, "ulysses", 2, 1, tiled=True) for x in (o, lse))
