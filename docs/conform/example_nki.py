"""Ring attention in NKI as a target, run on the bundled simulator: keys, values and positions travel.

    ringspec smoke docs/conform/example_nki.py:target
    ringspec check docs/conform/example_nki.py:target

The kernel is the program of one rank. On a Trainium instance (RINGSPEC_NKI=device) the same source takes NKI
from the official packages; only `of_all_ranks`, which launches the kernel, must then be replaced.
"""

import numpy as np

from nki_impl.lang import ncc, nisa, nki, nl
from nki_impl.sim.machine.launch import run_ranks
from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target import Capabilities

ROWS, KEYS = 128, 512  # length of a query tile, and of a key tile
# A masked score, and the least row maximum: exp(HIDDEN - FLOOR) = 0.
HIDDEN, FLOOR = -1e30, -1e29


@nki.jit
def ring_attention(q, k, v, position_q, position_k, workers, scale, causal):
    """o [G, n, D] and lse [G, n, 1] of one rank and G heads.

    q, k [G, D, n], v [G, n, D]; positions float32 [n, 1]; n is a multiple of 128, D at most 128.
    """
    heads, _, n = q.shape
    tiles = [(g, start) for g in range(heads) for start in range(0, n, ROWS)]
    states = {tile: empty_state(v.shape[2]) for tile in tiles}
    ring = ncc.ReplicaGroup((tuple(range(workers)),))
    travelling = [two_buffers("k", k), two_buffers("v", v), two_buffers("position", position_k)]
    for step in range(workers):
        here, coming = step % 2, (step + 1) % 2
        if step < workers - 1:
            for pair in travelling:
                ncc.collective_permute_implicit([[pair[here]]], [[pair[coming]]], ring, [0])
        keys, values, positions = (pair[here] for pair in travelling)
        for g, start in tiles:
            rows = on_chip(q[g, :, start : start + ROWS])
            own = on_chip(position_q[start : start + ROWS, :])
            for first in range(0, n, KEYS):
                last = min(first + KEYS, n)
                s = scores(rows, on_chip(keys[g, :, first:last]), scale)
                if causal:
                    hide(s, own, positions[first:last, :])
                absorb(states[g, start], s, values[g, first:last, :])
    o = nl.ndarray((heads, n, v.shape[2]), dtype=q.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray((heads, n, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    for g, start in tiles:
        finish(states[g, start], o[g, start : start + ROWS, :], lse[g, start : start + ROWS, :])
    return o, lse


def tile(columns, dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray((ROWS, columns), dtype=dtype, buffer=buffer)


def on_chip(x):
    loaded = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=x)
    return loaded


def two_buffers(name, x):
    """Two buffers: one for the block in use, one for the block that is arriving."""
    form = {"shape": x.shape, "dtype": x.dtype, "buffer": nl.private_hbm}
    pair = [nl.ndarray(name=name + end, **form) for end in ("_even", "_odd")]
    nisa.dma_copy(dst=pair[0], src=x)
    return pair


def empty_state(width):
    """m, l [128, 1] and o [128, D]."""
    state = tile(1), tile(1), tile(width)
    for part, value in zip(state, (FLOOR, 0.0, 0.0), strict=True):
        nisa.memset(dst=part, value=value)
    return state


def scores(rows, keys, scale):
    """s = scale * <q, k> [128, n] of columns [D, 128] and [D, n]."""
    product, s = tile(keys.shape[1], buffer=nl.psum), tile(keys.shape[1])
    nisa.nc_matmul(dst=product, stationary=rows, moving=keys, accumulate=False)
    nisa.tensor_scalar(dst=s, data=product, op0=nl.multiply, operand0=scale)
    return s


def hide(s, own, positions):
    """Add HIDDEN where the key's position is later than the query's."""
    n = s.shape[1]
    hidden = tile(n)
    nisa.dma_copy(dst=hidden, src=positions.ap(pattern=[[0, ROWS], [1, n]], offset=0))
    nisa.tensor_scalar(
        dst=hidden, data=hidden, op0=nl.greater, operand0=own, op1=nl.multiply, operand1=HIDDEN
    )
    nisa.tensor_tensor(dst=s, data1=s, data2=hidden, op=nl.add)


def absorb(state, s, values):
    """Update the state with these keys: m, then p = exp(s - m), l and o."""
    m, l, o = state
    new, minus, shrink, sums = tile(1), tile(1), tile(1), tile(1)
    nisa.tensor_reduce(dst=new, op=nl.maximum, data=s, axis=1, keepdims=True)
    nisa.tensor_tensor(dst=new, data1=new, data2=m, op=nl.maximum)
    nisa.tensor_scalar(dst=minus, data=new, op0=nl.multiply, operand0=-1.0)
    nisa.activation(dst=shrink, op=nl.exp, data=m, bias=minus)
    p, more = tile(s.shape[1], values.dtype), tile(o.shape[1], buffer=nl.psum)
    add = {"reduce_op": nl.add, "reduce_cmd": nisa.reduce_cmd.reset_reduce}
    nisa.activation(dst=p, op=nl.exp, data=s, bias=minus, reduce_res=sums, **add)
    for first in range(0, s.shape[1], ROWS):
        turned, weights = tile(ROWS, p.dtype, nl.psum), tile(ROWS, p.dtype)
        nisa.nc_transpose(dst=turned, data=p[:, first : first + ROWS])
        nisa.tensor_copy(dst=weights, src=turned)
        chunk = on_chip(values[first : first + ROWS, :])
        nisa.nc_matmul(dst=more, stationary=weights, moving=chunk, accumulate=first > 0)
    for held, added in ((l, sums), (o, more)):
        nisa.scalar_tensor_tensor(
            dst=held, data=held, op0=nl.multiply, operand0=shrink, op1=nl.add, operand1=added
        )
    nisa.tensor_copy(dst=m, src=new)


def finish(state, o, lse):
    m, l, total = state
    inverse, logs, result = tile(1), tile(1), tile(total.shape[1], o.dtype)
    nisa.reciprocal(dst=inverse, data=l)
    nisa.tensor_scalar(dst=result, data=total, op0=nl.multiply, operand0=inverse)
    nisa.activation(dst=logs, op=nl.log, data=l)
    nisa.tensor_tensor(dst=logs, data1=logs, data2=m, op=nl.add)
    nisa.dma_copy(dst=o, src=result)
    nisa.dma_copy(dst=lse, src=logs)


def of_all_ranks(q, k, v, scale, position_q, position_k, causal=False):
    """Convert lists with one array per worker to the kernel's layout, run it, and convert its results."""
    given = [
        {
            "q": columns(q[r]),
            "k": columns(k[r]),
            "v": v[r].reshape(-1, *v[r].shape[2:]),
            "position_q": position_q[r].T.astype(np.float32),
            "position_k": position_k[r].T.astype(np.float32),
            "workers": len(q),
            "scale": scale,
            "causal": causal,
        }
        for r in range(len(q))
    ]
    results = run_ranks(ring_attention, given).results
    return {
        "o": [o.reshape(x.shape) for x, (o, _) in zip(q, results, strict=True)],
        "lse": [lse.reshape(x.shape[:3]) for x, (_, lse) in zip(q, results, strict=True)],
    }


def columns(x):
    """[B, H, n, D] as [B * H, D, n]."""
    return np.ascontiguousarray(x.reshape(-1, *x.shape[2:]).swapaxes(1, 2))


target = NumPyTarget(
    of_all_ranks,
    Capabilities(
        operations=("ring-forward",),
        layouts=("contiguous", "striped", "zigzag"),
        circulations=("kv",),
        directions=(1,),
        features=("scale",),
        formats=("bfloat16", "float32"),
        head_ratios=(1,),
        head_dims=tuple(range(1, ROWS + 1)),
        value_dim_equals_head_dim=True,
        tokens_multiple=ROWS,
        recipe={"bfloat16": {"base": "bf16", "tile_k": KEYS}, "float32": "float32"},
    ),
    name="example-nki",
)
