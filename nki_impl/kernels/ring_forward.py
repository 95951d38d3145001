"""Ring attention, forward: queries stay, keys and values travel.

At step t, rank r holds the keys and values of the rank t places earlier in the ring. The queries of each head attend to
these keys in *stretches* of at most 2048 (:mod:`block_forward`). Every partial result is merged into the running
softmax of its query tile of 128 rows (:mod:`merge`), which is stored in HBM between steps. Keys and values make W - 1
hops.

Sources: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; the interface is that of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/library/api/ring-attention-fwd.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_impl.kernels.block_forward import block_forward
from nki_impl.kernels.bounds import bounds_at, forward_bounds
from nki_impl.kernels.checks import (
    check_bounds,
    check_groups,
    check_sizes,
    check_tensors,
    forward_scale,
)
from nki_impl.kernels.masks import Mask, is_triangle, row_limits, visible_range
from nki_impl.kernels.merge import Partial, merge, take
from nki_impl.kernels.query_rows import (
    Forward,
    Rows,
    deal_rows,
    load_queries,
    load_state,
    store_results,
    store_state,
    tile_of,
)
from nki_impl.kernels.ring import (
    Pair,
    Ring,
    held,
    open_ring,
    pass_on,
    position_at,
    position_table,
    travelling_pair,
    wait_for_both_cores,
)
from nki_impl.kernels.tiles import (
    ROWS,
    STRETCH,
    DType,
    Tensor,
    load_columns,
    load_rows,
    rows_to_columns,
    tile_count,
)
from nki_impl.lang import nisa, nki, nl


@dataclass
class Block(nl.NKIObject):  # type: ignore[name-defined]
    """The data of one key head at one step: k [D, s] and v [s, D] in HBM, and the range of visible keys of each row.

    ``low``, ``high`` [128, tiles] on chip: a row sees the keys low <= j < high; both are None without a mask.
    ``is_triangle``: no row attends to a key with a larger index than its own, so tiles above the diagonal are left out.
    """

    step: int
    k: Tensor
    v: Tensor
    low: Tensor
    high: Tensor
    is_triangle: bool


@nki.jit  # type: ignore[untyped-decorator]
def ring_attention_spmd_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    replica_groups: Any = None,
    num_workers: int = 1,
    softmax_scale: float | None = None,
    use_causal_mask: bool = False,
    striped_input: bool = False,
    training: bool = False,
    lse_dtype: DType = nl.float32,
    tp_q: bool = False,
    tp_k: bool = False,
    bound_min: Tensor = None,
    bound_max: Tensor = None,
    zero_lse: bool = False,
    causal_scale: str = "refuse",
) -> Any:
    """Compute o [b, h, s, d] in q's dtype; with ``training`` also lse [b, h, 128, ceil(s / 128)].

    ``q``               [b, h, s, d] with tp_q, else [b, h, d, s]; bfloat16, float16 or float32;
                        d <= 128; s, the length on this rank, is the same on all ranks
    ``k``               [b, hkv, s, d] with tp_k, else [b, hkv, d, s]; hkv divides h, and query head
                        i uses key head i // (h / hkv). Without a causal mask, k and v can have
                        another length than q
    ``v``               [b, hkv, s, d]
    ``replica_groups``  disjoint tuples of num_workers rank ids; each tuple is a ring. None: one ring of all ranks
    ``softmax_scale``   None or 0: 1/sqrt(d). With ``use_causal_mask`` see ``causal_scale``
    ``striped_input``   True: ring position r holds tokens t * W + r, which requires a causal mask. False: r * s + t
    ``lse_dtype``       the dtype of lse, which is natural, with row t at [t % 128, t // 128], and 0 in the padding
    ``bound_min``, ``bound_max``   float32 or int32, for each row t a range of local key indices,
                        bound_min <= j < bound_max, as [b, s] or [b * h, s, 1] if it holds for the keys of every rank;
                        this requires a causal mask and striped input. [num_workers, b, s, 1]: a range for the keys of
                        each ring position, in any layout, with or without a causal mask (:mod:`bounds`)

    AWS's kernel does not have these arguments:

    ``zero_lse``        True: lse of a row without visible keys is 0, as in AWS's kernel. False: it is -inf
    ``causal_scale``    what a ``softmax_scale`` other than None, 0 and 1.0 means with ``use_causal_mask``. "refuse": an
                        error, because q must be multiplied by the scale before the call. "ignore": nothing, with a
                        warning; AWS's kernel ignores it silently. "apply": scores are multiplied by the scale, as
                        without a causal mask; then None means 1/sqrt(d)

    A row without visible keys has o = 0. Invalid arguments raise AssertionError.

    >>> import numpy as np
    >>> from nki_impl.sim.machine.launch import run_ranks
    >>> q = k = np.zeros((1, 1, 64, 128), np.float32)
    >>> rank = {"q": q, "k": k, "v": np.ones((1, 1, 128, 64), np.float32), "num_workers": 2}
    >>> o, lse = run_ranks(ring_attention_spmd_fwd, [{**rank, "training": True}] * 2).results[1]
    >>> o.shape, lse.shape, float(o[0, 0, 5, 3]), round(float(np.exp(lse[0, 0, 0, 0])))
    ((1, 1, 128, 64), (1, 1, 128, 1), 1.0, 256)
    """
    b, h, s, d = q.shape if tp_q else (q.shape[0], q.shape[1], q.shape[3], q.shape[2])
    hkv, s_k = v.shape[1], v.shape[2]
    check_groups(replica_groups, num_workers)
    check_tensors((k,), (b, hkv, s_k, d) if tp_k else (b, hkv, d, s_k), q.dtype)
    check_tensors((v,), (b, hkv, s_k, d), q.dtype)
    check_sizes((h, hkv), (s, s_k), d, num_workers, use_causal_mask)
    sizes = (num_workers, b, h, s)
    check_bounds(use_causal_mask, striped_input, bound_min, bound_max, sizes)
    ring = open_ring(replica_groups, num_workers)

    o = nl.ndarray((b, h, s, d), dtype=q.dtype, buffer=nl.shared_hbm)
    tiles = (b, h, ROWS, tile_count(s))
    lse = None
    if training:
        lse = nl.ndarray(tiles, dtype=lse_dtype, buffer=nl.shared_hbm)
    forward = Forward(
        q=q,
        q_is_rows=tp_q,
        o=o,
        lse=lse,
        o_held=nl.ndarray(tiles + (d,), dtype=nl.float32, buffer=nl.private_hbm),
        l_held=nl.ndarray(tiles, dtype=nl.float32, buffer=nl.private_hbm),
        n_held=nl.ndarray(tiles, dtype=nl.float32, buffer=nl.private_hbm),
        mask=Mask(use_causal_mask, striped_input, forward_bounds(ring, bound_min, bound_max)),
        scale=forward_scale(softmax_scale, use_causal_mask, causal_scale, d),
        group=h // hkv,
        workers=num_workers,
        zero_lse=zero_lse,
    )
    keys = travelling_pair(ring, (b, hkv, d, s_k), k.dtype, "ring_keys")
    values = travelling_pair(ring, (b, hkv, s_k, d), v.dtype, "ring_values")
    fill(ring, k, v, tp_k, held(keys, 0), held(values, 0))
    go_round(ring, forward, keys, values, deal_rows(ring, b, h, s))
    if training:
        return o, lse
    return o


def fill(ring: Ring, k: Tensor, v: Tensor, k_is_rows: bool, keys: Tensor, values: Tensor) -> None:
    """Copy this rank's k (as [D, s]) and v into the travelling buffers; each core copies its own heads."""
    b, hkv, s, _ = v.shape
    for item in range(ring.core, b * hkv, ring.cores):
        i, j = item // hkv, item % hkv
        nisa.dma_copy(dst=values[i, j], src=v[i, j])
        if k_is_rows:
            for start in range(0, s, STRETCH):
                stop = min(start + STRETCH, s)
                columns = rows_to_columns(load_rows(k[i, j], start, stop))
                nisa.dma_copy(dst=keys[i, j, :, start:stop], src=columns[:, : stop - start])
        else:
            nisa.dma_copy(dst=keys[i, j], src=k[i, j])
    wait_for_both_cores(ring, (keys, values))


def go_round(ring: Ring, forward: Forward, keys: Pair, values: Pair, shares: Any) -> None:
    """Run all W steps: in each, send the current keys and values to the successor, then compute attention to them."""
    table, mine, owner = None, None, None
    if forward.mask.causal and ring.workers > 1:
        table = position_table(ring)
        mine = position_at(ring, table, 0)
    for step in range(ring.workers):
        if step + 1 < ring.workers:
            pass_on(ring, keys, step)
            pass_on(ring, values, step)
        if table is not None and step > 0:
            owner = position_at(ring, table, step)
        for share in shares:
            i, key_head = share.i, share.head // forward.group
            low, high = limits(ring, forward, step, share, mine, owner)
            k, v = held(keys, step)[i, key_head], held(values, step)[i, key_head]
            block = Block(step, k, v, low, high, is_triangle(forward.mask, step))
            for first in range(share.first, share.end, STRETCH):
                end = min(first + STRETCH, share.end)
                attend(forward, Rows(i, share.head, first, end), block)


def limits(
    ring: Ring, forward: Forward, step: int, share: Rows, mine: Tensor, owner: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the range of visible keys, ``low`` and ``high`` [128, tiles], of a query head at one step.

    Both are None without a mask.
    """
    mask, heads, high = forward.mask, forward.o.shape[1], None
    if mask.causal:
        high = row_limits(mask, forward.o.shape[2], mine, owner)
    return visible_range(high, bounds_at(ring, mask.bounds, step, share.i, share.head, heads))


def attend(forward: Forward, rows: Rows, block: Block) -> None:
    """Compute attention of at most STRETCH rows to the current keys, and merge the results into the running softmax.

    After the last step, write o and lse.
    """
    q = load_queries(forward, rows)
    state = load_state(forward, rows, block.step)
    length = block.v.shape[0]
    for start in range(0, length, STRETCH):
        stop = min(start + STRETCH, length)
        if block.is_triangle:
            stop = min(stop, rows.end)
        if start < stop:
            attend_stretch(forward, rows, block, q, state, start, stop)
    if block.step + 1 < forward.workers:
        store_state(forward, rows, state)
    else:
        store_results(forward, rows, state)


def attend_stretch(
    forward: Forward, rows: Rows, block: Block, q: Tensor, state: Partial, start: int, stop: int
) -> None:
    """Compute attention of all query tiles in ``rows`` to keys start..stop-1, and merge each result into ``state``."""
    k, v = load_columns(block.k, start, stop), load_rows(block.v, start, stop)
    for t in range(tile_count(rows.end - rows.first)):
        row = rows.first + t * ROWS
        seen = stop - start
        if block.is_triangle:
            seen = min(seen, row + ROWS - start)
        if seen > 0:
            low, high = None, None
            if block.high is not None:
                column = row // ROWS
                low = block.low[:, column : column + 1]
                high = block.high[:, column : column + 1]
            part = block_forward(
                q[:, t * ROWS : (t + 1) * ROWS],
                k[:, :seen],
                v[:, : tile_count(seen), :],
                low,
                high,
                start,
                forward.scale,
            )
            running = tile_of(state, t)
            if block.step == 0 and start == 0:
                take(running, part)
            else:
                merge(running, part)
