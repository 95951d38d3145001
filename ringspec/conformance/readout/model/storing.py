"""Where each share is added, and what the buffers of the gradients hold at the end."""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.faults.choices import BY_CAUSAL, OPEN, Choices, components, mixing
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.problem.pairs import ELSEWHERE
from ringspec.problem.model import Array, Booleans, Integers


def stored(model: Model, name: str, c: Choices, share: Array, row: str, column: str) -> Array:
    """Return the shares of a gradient at the rows and columns to which they are added."""
    if not model.correct(c, row, column):
        worker, head, slot = (c[x] for x in components(column))
        if name in ("dk", "dv") and not (
            c[f"{row}.head"] is model.right[f"{row}.head"] and head is model.right[f"{column}.head"]
        ):
            share = share * np.where(c[f"{row}.head"] // model.group == head, 1.0, ELSEWHERE)
        share = landed(model, share, row, c, worker, slot)
    if name in c["mixed"]:
        share = mixed(model, name, share, *c["mixed"][-2:])
    return model.without_padding(held(model, name, c, share))


def landed(model: Model, x: Array, row: str, c: Choices, b: Integers, j: Integers) -> Array:
    """Return the shares ``x``, moved to the rows that the choice ``row`` gives and to key j of worker b."""
    if row == "q":
        worker, head, slot = (model.right[x] for x in components("q"))
    else:
        worker, head, slot = (c[x] for x in components(row))
    W, H, n = model.workers, model.heads, model.slots
    at = (((worker * W + b) * H + head) * n + slot) * n + j
    at = np.broadcast_to(at, model.shape)
    x = np.broadcast_to(x, model.shape)
    landed = np.bincount(at.ravel(), x.ravel().astype(float), x.size)
    return np.asarray(landed.reshape(model.shape), float)


def held(model: Model, name: str, c: Choices, share: Array) -> Array:
    """Return the shares of a gradient as its buffers hold them at the end."""
    if name in c["routed"]:
        share = routed(model, name, share, c["routed"][-1])
    if name in c["uncleared"]:
        *_, of, number = c["uncleared"]
        if of in ("steps", "all steps"):
            return uncleared_steps(model, name, share, number, of == "all steps")
        blocks = "" if of == "tiles" else of
        share = uncleared_tiles(model, name, share, number, blocks)
    return share


def mixed(model: Model, name: str, share: Array, of: str, how: str) -> Array:
    """Return the shares of a gradient that is mixed over 'heads' or 'workers', as they are read."""
    if of == "workers":
        axis, times = 0 if name == "dq" else 1, mixing(how, model.workers)
    elif name == "dq":
        axis, times = 2, mixing(how, model.heads)
    else:  # the results of each other key head show the share as well
        times = mixing(how, model.key_heads)
        own = times.diagonal()
        seen = own + ELSEWHERE * (times.sum(axis=0) - own)
        return share * np.repeat(seen, model.group)[:, None, None]
    whole = np.broadcast_to(share, model.shape)
    return np.moveaxis(np.tensordot(times, whole, (1, axis)), 0, axis)


def uncleared_steps(model: Model, name: str, share: Array, every: int, skipped: bool) -> Array:
    """Return the shares if a block's buffer is used again after ``every`` steps without being cleared.

    The buffer then still holds the shares of all its earlier uses. ``skipped``: also in steps whose block the mask hides.
    """
    step = model.geometry.steps("backward")
    by_query = model.geometry.travels("backward") == "queries"
    found = share.copy()
    for a, b in np.ndindex(step.shape):
        for other in range(model.workers):
            at = (other, b) if by_query else (a, other)
            gap = step[a, b] - step[at]
            used = skipped or model.masks[0][a, b].any()
            if gap > 0 and gap % every == 0 and used:
                found[a, b] += share[at]
    return found


def uncleared_tiles(model: Model, name: str, share: Array, size: int, blocks: str = "") -> Array:
    """Return the shares if the buffer of a tile of ``size`` rows is not cleared before the next tile uses it.

    The buffer then still holds the shares of earlier tiles. Only tiles in the same range of tokens (``run`` of
    :class:`Geometry`) use the same buffer. ``blocks``: as in :class:`Tiles`.
    """
    axis = 3 if name == "dq" else 4
    x, found = np.moveaxis(share, axis, 0), np.moveaxis(share.copy(), axis, 0)
    rows = computed_rows(model, axis)
    if blocks:
        rows = rows & model.blocks_with(blocks)[..., None]
    computed = np.moveaxis(np.broadcast_to(rows, share.shape), axis, 0)
    for row in range(model.slots):
        for other in range(row - size, row - row % model.geometry.run - 1, -size):
            found[row] += x[other] * computed[row]
    return np.moveaxis(found, 0, axis)


def computed_rows(model: Model, axis: int) -> Booleans:
    """Return which rows along ``axis`` of a block [a, b, h, i, j] a kernel computes: those in its visible part."""
    geometry = model.geometry
    if not geometry.of_visible_parts:
        return np.ones((1,) * 5, bool)
    seen = np.asarray(model.masks[0].any(axis=7 - axis, keepdims=True))
    if geometry.layout == "striped":
        return seen
    chunks = np.split(seen, 2, axis)
    return np.concatenate(
        [np.broadcast_to(x.any(axis, keepdims=True), x.shape) for x in chunks], axis
    )


def routed(model: Model, name: str, share: Array, way: str) -> Array:
    """Return the shares if a travelling gradient takes a wrong ``way``, one of ROUTES, from worker to worker."""
    times, found = routes(model, name == "dq", way), np.zeros(model.shape)
    share = np.broadcast_to(share, model.shape)
    for a, b, to in zip(*np.nonzero(times), strict=True):
        there = (to, b) if name == "dq" else (a, to)
        found[there] += times[a, b, to] * share[a, b]
    return found


def routes(model: Model, of_q: bool, way: str) -> Array:
    """Return [a, b, worker]: how often a block's shares are in the gradient that each worker has at the end.

    Every worker takes the gradient that has arrived, adds its share, and sends the gradient on. In *skipped* steps, the
    mask hides the whole block; if ``way`` ends in BY_CAUSAL, the causal mask without a window. ``of_q``: the gradient is
    that of the queries.
    """
    W, on = model.workers, model.geometry.direction
    computed = model.masks[0].any(axis=(2, 3, 4)) | (way == OPEN)
    if way.endswith(BY_CAUSAL):
        way, position = way.removesuffix(BY_CAUSAL), model.geometry.position
        computed = position.max(axis=1)[:, None] >= position.min(axis=1)[None, :]
        computed |= not model.geometry.causal
    held, arrived = np.zeros((2, W, W, W))
    for step in range(W + 1):  # after the last step, they have arrived at home
        for r in range(W):
            owner = (r - on * step) % W
            at = (owner, r) if of_q else (r, owner)
            skipped = step < W and not computed[at]
            if not (skipped and way == "kept if skipped"):
                held[r] = arrived[r] + (held[r] if way == "added" else 0)
            if skipped and way == "lost if skipped":
                held[r] = 0
            if step < W and not skipped:
                held[r][at] += 1
        for r in range(W):
            owner = (r - on * step) % W
            at = (owner, r) if of_q else (r, owner)
            if step < W and (computed[at] or way != "not sent if skipped"):
                arrived[(r + on) % W] = held[r]
        if way == OPEN:
            end = 0 if on == 1 else W - 1
            arrived[end] = held[end]
    return np.moveaxis(held, 0, 2)


def exchanged(model: Model, c: Choices, of_dv: Array, of_dk: Array) -> tuple[Array, Array]:
    """Return P and the dS of dk as they are read if dk and dv are exchanged.

    The columns of dv begin one head later than those of dk, so the entries of a head appear in the next or previous
    head.
    """
    here = c["exchanged"]
    dv, dk = in_other(model, of_dv, of_dk)
    return np.where(here, dv, of_dv), np.where(here, dk, of_dk)


def stacked(model: Model, of_dv: Array, of_dk: Array) -> tuple[Array, Array]:
    """Return P and the dS of dk as they are read if dk + dv is returned as dk, and that of the next worker as dv."""
    dv, dk = in_other(model, of_dv, of_dk)
    return np.roll(of_dv + dv, -model.geometry.direction, axis=1), of_dk + dk


def in_other(model: Model, of_dv: Array, of_dk: Array) -> tuple[Array, Array]:
    """Return what is read as P from dk in place of dv, and as the dS of dk from dv in place of dk."""
    scale = model.geometry.scale
    dk, dv = np.zeros_like(of_dk), np.zeros_like(of_dv)
    group = np.arange(model.heads) // model.group
    for h in range(1, model.heads):
        weight = 1.0 if group[h] == group[h - 1] else ELSEWHERE
        dk[:, :, h] = weight * of_dv[:, :, h - 1] / scale
        dv[:, :, h - 1] = weight * of_dk[:, :, h] * scale
    return dv, dk
