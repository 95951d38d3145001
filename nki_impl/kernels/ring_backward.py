"""Ring attention, backward: keys and values stay, and queries travel with their dQ.

An *item* is a key head with the query heads that share it. At step t, rank r holds the queries, dY and row data (lse
and delta of each row) of the rank t places earlier in the ring. Rank r adds to its own dK and dV. It also computes a
contribution to dQ, adds it to the sum of dQ that arrived with the queries, and sends the sum to its successor. After W
hops the sum is complete and back at the owner of the queries. Queries, dY and row data make W - 1 hops. Bounds do not
travel: the ranks exchange them before the first step.

Sources: Liu et al., Ring Attention, https://arxiv.org/abs/2310.01889; the interface is that of
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/nki/library/api/ring-attention-bwd.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nki_impl.kernels.block_backward import Keys, Queries, block_backward
from nki_impl.kernels.bounds import backward_bounds, bounds_at
from nki_impl.kernels.checks import (
    check_bounds,
    check_groups,
    check_sizes,
    check_tensors,
    given_scale,
)
from nki_impl.kernels.masks import Mask, is_triangle, row_limits, visible_range
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
from nki_impl.kernels.row_data import fill_planes, load_plane
from nki_impl.kernels.tiles import (
    ROWS,
    STRETCH,
    DType,
    Tensor,
    columns_to_rows,
    load_columns,
    tile_count,
    zero_padding,
)
from nki_impl.lang import ncc, nisa, nki, nl

Item = tuple[int, int]
"""The batch entry and key head of an item."""


@dataclass
class Travellers(nl.NKIObject):  # type: ignore[name-defined]
    """The travelling buffers, two of each kind; their first dimension has one part for each core of the rank.

    ``q``, ``dy`` [cores, group, D, S]. ``planes`` [cores, planes, 128, tiles]: the row data
    (:mod:`nki_impl.kernels.row_data`). ``dq`` [cores, group, D, S] float32: the sum that travels. ``dq_block``, of the
    same shape: the contribution of one step. It has two buffers so that a step can be computed while the contribution
    of the previous step is being sent.
    """

    q: Pair
    dy: Pair
    planes: Pair
    dq: Pair
    dq_block: Pair


@dataclass
class Backward(nl.NKIObject):  # type: ignore[name-defined]
    """The constants of a backward pass: the tensors of this rank, and the travelling buffers.

    ``group`` is the number of query heads that share a key head. ``narrow`` is the dtype of the accumulators of dk and
    dv; -lse and delta are rounded to it as well. ``positions`` is the table of ring positions, or None if no mask needs
    it.
    """

    ring: Ring
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    dy: Tensor
    lse: Tensor
    mask: Mask
    scale: float
    group: int
    narrow: DType
    travellers: Travellers
    positions: Tensor


@dataclass
class Block(nl.NKIObject):  # type: ignore[name-defined]
    """The data of an item at one step, in HBM: q, dy [group, D, S], row data, and a buffer for dq.

    ``ranges``: for each query head the range of visible keys of each row, low <= j < high, as two tiles [128, tiles] on
    chip; without a mask, both are None. ``is_triangle``: no row attends to a key with a larger index than its own.
    """

    step: int
    q: Tensor
    dy: Tensor
    planes: Tensor
    dq: Tensor
    ranges: Any
    is_triangle: bool


@nki.jit  # type: ignore[untyped-decorator]
def ring_attention_spmd_bwd(
    q_ref: Tensor,
    k_ref: Tensor,
    v_ref: Tensor,
    o_ref: Tensor,
    dy_ref: Tensor,
    lse_ref: Tensor,
    use_causal_mask: bool = False,
    mixed_precision: bool = True,
    softmax_scale: float | None = None,
    num_workers: int = 1,
    lnc_size: int = 1,
    replica_groups: Any = None,
    striped_attention: bool = False,
    bound_min: Tensor = None,
    bound_max: Tensor = None,
) -> Any:
    """Compute dq [B, N, D, S] and dk, dv [B, Nkv, D, S], all in float32.

    ``q_ref``, ``o_ref``, ``dy_ref``   [B, N, D, S]: q and o of the forward pass, transposed, and dL/do;
                        bfloat16, float16 or float32; D <= 128
    ``k_ref``, ``v_ref``  [B, Nkv, D, S]; Nkv divides N, query head i uses key head i // (N / Nkv). Without a causal
                        mask, S can be another length than that of q
    ``lse_ref``         [B, N, 128, ceil(S / 128)], natural, row t at [t % 128, t // 128], any float dtype;
                        the padding is not read; a row with lse = -inf contributes to no gradient
    ``mixed_precision`` False: lse, dy_o_sum and its products, and the accumulators of dk and dv
                        are rounded to q's dtype
    ``softmax_scale``   None or 0: 1/sqrt(D), also with a causal mask. After a causal forward pass, pass 1.0 and
                        the scaled q; dq is then the gradient with respect to the scaled q
    ``lnc_size``        physical cores per rank; must be the number with which the kernel is launched
    ``bound_min``, ``bound_max``   as in the forward kernel; each rank passes the bounds of its own rows

    ``use_causal_mask``, ``num_workers`` and ``replica_groups`` are as in the forward kernel; ``striped_attention`` is
    ``striped_input`` of the forward kernel. Invalid arguments raise AssertionError.

    In the example all weights over the 256 keys of two ranks are equal, so dv of a key is the mean of 256 rows of dy:

    >>> import numpy as np
    >>> from nki_impl.sim.machine.launch import run_ranks
    >>> zeros, ones = np.zeros((1, 1, 64, 128), np.float32), np.ones((1, 1, 64, 128), np.float32)
    >>> lse = np.full((1, 1, 128, 1), np.log(256), np.float32)
    >>> rank = (zeros, zeros, zeros, zeros, ones, lse, False, True, None, 2)
    >>> dq, dk, dv = run_ranks(ring_attention_spmd_bwd, [rank] * 2).results[0]
    >>> float(dq.max()), float(dk.max()), round(float(dv[0, 0, 3, 5]), 5)
    (0.0, 0.0, 1.0)
    """
    b, h, d, s = q_ref.shape
    hkv, s_k = k_ref.shape[1], k_ref.shape[3]
    check_groups(replica_groups, num_workers)
    check_tensors((q_ref, o_ref, dy_ref), (b, h, d, s), q_ref.dtype)
    check_tensors((k_ref, v_ref), (b, hkv, d, s_k), q_ref.dtype)
    check_sizes((h, hkv), (s, s_k), d, num_workers, use_causal_mask)
    check_bounds(use_causal_mask, striped_attention, bound_min, bound_max, (num_workers, b, h, s))
    tiles = (b, h, ROWS, tile_count(s))
    assert tuple(lse_ref.shape) == tiles, f"expected lse_ref {tiles}, got {lse_ref.shape}"
    ring = open_ring(replica_groups, num_workers)
    assert lnc_size == ring.cores, f"lnc_size {lnc_size} in a launch on {ring.cores} cores"

    bounds = backward_bounds(ring, bound_min, bound_max)
    backward = Backward(
        ring=ring,
        q=q_ref,
        k=k_ref,
        v=v_ref,
        o=o_ref,
        dy=dy_ref,
        lse=lse_ref,
        mask=Mask(use_causal_mask, striped_attention, bounds),
        scale=given_scale(softmax_scale, d),
        group=h // hkv,
        narrow=nl.float32 if mixed_precision else q_ref.dtype,
        travellers=make_travellers(ring, h // hkv, q_ref),
        positions=position_table(ring) if use_causal_mask and num_workers > 1 else None,
    )
    dq = nl.ndarray((b, h, d, s), dtype=nl.float32, buffer=nl.shared_hbm)
    dk = nl.ndarray((b, hkv, d, s_k), dtype=nl.float32, buffer=nl.shared_hbm)
    dv = nl.ndarray((b, hkv, d, s_k), dtype=nl.float32, buffer=nl.shared_hbm)
    for first in range(0, b * hkv, ring.cores):
        if first + ring.core < b * hkv:
            i, head = (first + ring.core) // hkv, (first + ring.core) % hkv
            dq_heads = dq[i, head * backward.group : (head + 1) * backward.group]
            one_item(backward, (i, head), dq_heads, dk[i, head], dv[i, head])
        else:
            # Both cores must issue every collective: a core without an item repeats the first and drops its results.
            spare = nl.ndarray((2, d, s_k), dtype=nl.float32, buffer=nl.private_hbm)
            one_item(backward, (0, 0), None, spare[0], spare[1])
    return dq, dk, dv


def make_travellers(ring: Ring, group: int, q: Tensor) -> Travellers:
    """Allocate the travelling buffers for one item on each core."""
    _, _, d, s = q.shape
    rows = (ring.cores, group, d, s)
    planes = (ring.cores, 2 * group, ROWS, tile_count(s))
    return Travellers(
        travelling_pair(ring, rows, q.dtype, "ring_queries"),
        travelling_pair(ring, rows, q.dtype, "ring_dy"),
        travelling_pair(ring, planes, nl.float32, "ring_row_data"),
        travelling_pair(ring, rows, nl.float32, "ring_dq"),
        travelling_pair(ring, rows, nl.float32, "dq_block"),
    )


def one_item(backward: Backward, item: Item, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Run the whole ring for one item, and write dq [group, D, S] and dk, dv [D, S] in HBM.

    If ``dq`` is None, dq is computed but not written.
    """
    ring, travellers = backward.ring, backward.travellers
    fill(backward, item)
    mine, owner = None, None
    if backward.positions is not None:
        mine = position_at(ring, backward.positions, 0)
    for step in range(ring.workers):
        if step + 1 < ring.workers:
            pass_on(ring, travellers.q, step)
            pass_on(ring, travellers.dy, step)
            pass_on(ring, travellers.planes, step)
        if backward.positions is not None and step > 0:
            owner = position_at(ring, backward.positions, step)
        go_over_keys(backward, at_hand(backward, step, item, owner, mine), item, dk, dv)
        if ring.workers > 1:
            pass_dq_on(backward, step)
    home = travellers.dq_block if ring.workers == 1 else travellers.dq
    total = held(home, ring.workers - 1)
    if dq is not None:
        nisa.dma_copy(dst=dq, src=total[ring.core])
    # A collective of the next item fills the buffer of both cores, and either core may issue it first.
    wait_for_both_cores(ring, (total,))


def fill(backward: Backward, item: Item) -> None:
    """Copy an item's queries and dY into the travelling buffers, and compute its row data."""
    i, head = item
    core, group, travellers = backward.ring.core, backward.group, backward.travellers
    first, end = head * group, (head + 1) * group
    q, dy, planes = held(travellers.q, 0), held(travellers.dy, 0), held(travellers.planes, 0)
    nisa.dma_copy(dst=q[core], src=backward.q[i, first:end])
    nisa.dma_copy(dst=dy[core], src=backward.dy[i, first:end])
    o, lse, narrow = backward.o[i, first:end], backward.lse[i, first:end], backward.narrow
    fill_planes(planes[core], o, backward.dy[i, first:end], lse, narrow)
    wait_for_both_cores(backward.ring, (q, dy, planes))


def at_hand(backward: Backward, step: int, item: Item, owner: Tensor, mine: Tensor) -> Block:
    """Return the data that this rank holds at step ``step``.

    ``owner`` is the ring position of the rank that owns the queries, and ``mine`` that of this rank.
    """
    core, travellers = backward.ring.core, backward.travellers
    return Block(
        step=step,
        q=held(travellers.q, step)[core],
        dy=held(travellers.dy, step)[core],
        planes=held(travellers.planes, step)[core],
        dq=held(travellers.dq_block, step)[core],
        ranges=visible_ranges(backward, step, item, owner, mine),
        is_triangle=is_triangle(backward.mask, step),
    )


def visible_ranges(backward: Backward, step: int, item: Item, owner: Tensor, mine: Tensor) -> Any:
    """Compute the range of visible keys, (low, high), of each query head of an item; both are None without a mask."""
    mask, (i, key_head), high = backward.mask, item, None
    if mask.causal:
        high = row_limits(mask, backward.q.shape[3], owner, mine)
    ranges = []
    for g in range(backward.group):
        if g == 0 or (mask.bounds is not None and mask.bounds.per_head):
            head, heads = key_head * backward.group + g, backward.q.shape[1]
            bounds = bounds_at(backward.ring, mask.bounds, step, i, head, heads)
            ranges.append(visible_range(high, bounds))
        else:
            ranges.append(ranges[0])
    return tuple(ranges)


def pass_dq_on(backward: Backward, step: int) -> None:
    """Add this step's contribution to the travelling sum of dq, and send the sum to the successor."""
    ring, travellers = backward.ring, backward.travellers
    block, target = held(travellers.dq_block, step), held(travellers.dq, step)
    wait_for_both_cores(ring, (block,))
    if step == 0:
        ncc.collective_permute_implicit(
            srcs_by_channel=[[block]],
            dsts_by_channel=[[target]],
            replica_group=ring.group,
            channel_ids=[0],
        )
    else:
        ncc.collective_permute_implicit_reduce(
            srcs0_by_channel=[[block]],
            srcs1_by_channel=[[held(travellers.dq, step - 1)]],
            dsts_by_channel=[[target]],
            replica_group=ring.group,
            op=nl.add,
            channel_ids=[0],
        )


def go_over_keys(backward: Backward, block: Block, item: Item, dk: Tensor, dv: Tensor) -> None:
    """Compute one step: all queries in ``block`` against this rank's keys, stretch by stretch."""
    i, head = item
    rows, length = backward.q.shape[3], backward.k.shape[3]
    narrow, is_begun = backward.narrow, block.step > 0
    for start in range(0, length, STRETCH):
        stop = min(start + STRETCH, length)
        n = stop - start
        k = load_columns(backward.k[i, head], start, stop)
        v = load_columns(backward.v[i, head], start, stop)
        dk_sum = load_sum(dk, start, stop, narrow, is_begun)
        dv_sum = load_sum(dv, start, stop, narrow, is_begun)
        keys = Keys(start, k[:, :n], columns_to_rows(k), v[:, :n], dk_sum[:, :n], dv_sum[:, :n])
        for g in range(backward.group):
            for first in range(0, rows, STRETCH):
                end = min(first + STRETCH, rows)
                # Otherwise entirely above the diagonal: all keys are masked, and dq has been initialised.
                if not block.is_triangle or start < end:
                    one_stretch(backward, block, keys, g, first, end)
        nisa.dma_copy(dst=dk[:, start:stop], src=keys.dk)
        nisa.dma_copy(dst=dv[:, start:stop], src=keys.dv)


def one_stretch(backward: Backward, block: Block, keys: Keys, g: int, first: int, end: int) -> None:
    """Compute rows first..end-1 of query head ``g`` against one stretch of keys.

    The gradients are added to dq of the rows, and to dk and dv of the keys.
    """
    q = load_columns(block.q[g], first, end)
    dy = load_columns(block.dy[g], first, end)
    bias = load_plane(block.planes, 2 * g, first, end)
    delta = load_plane(block.planes, 2 * g + 1, first, end)
    low, high = block.ranges[g]
    if high is not None:
        low = low[:, first // ROWS : tile_count(end)]
        high = high[:, first // ROWS : tile_count(end)]
    dq = load_sum(block.dq[g], first, end, nl.float32, keys.first > 0)
    rows = (columns_to_rows(q), columns_to_rows(dy))
    queries = Queries(first, q, rows[0], dy, rows[1], bias, delta, low, high, dq)
    block_backward(queries, keys, backward.scale, block.is_triangle)
    nisa.dma_copy(dst=block.dq[g, :, first:end], src=dq[:, : end - first])


def load_sum(head: Tensor, start: int, stop: int, dtype: DType, is_begun: bool) -> Tensor:
    """Load columns start..stop-1 of an accumulator [D, S] in HBM; return zeros unless a step has begun it.

    The tile is padded with zeros to whole tiles.
    """
    length = stop - start
    total = nl.ndarray((head.shape[0], tile_count(length) * ROWS), dtype=dtype, buffer=nl.sbuf)
    if is_begun:
        zero_padding(total, length)
        nisa.dma_copy(dst=total[:, :length], src=head[:, start:stop])
    else:
        nisa.memset(dst=total, value=0.0)
    return total
