"""The lse, delta and dlse that a backward pass uses for each pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ringspec.conformance.readout.faults.choices import (
    DELTAS,
    KEY_TILES,
    LSES,
    Choices,
    Tiles,
    components,
)
from ringspec.conformance.readout.faults.merge_formulas import LN2
from ringspec.conformance.readout.faults.merges import over_group
from ringspec.conformance.readout.model.arrays import chosen, log_of, nonzero
from ringspec.conformance.readout.model.forward import Forward
from ringspec.conformance.readout.model.merging import ends
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import scores_of_pairs
from ringspec.problem.model import Array
from ringspec.spec.online_softmax import finite_shift

# Properties of the forms of delta in DELTAS, looked up by the number of a form.
OF_SAVED_DELTA = (
    "right",
    "times p",
    "times l",
    "block's p dp twice",
    "of the group",
    "of all heads",
    "mean of all heads",
)
KEEPS_DLSE = np.array([name in OF_SAVED_DELTA for name in DELTAS])


def delta_of(model: Model, c: Choices, products: Array) -> Array:
    """Return <dy, o> of the rows of o and dy that ``delta_o`` and ``delta_dy`` select, [a, b, h, i, 1 or j].

    If ``delta_dims`` selects a part of the head dimension, ``products`` are those over this part, unless each dy has only
    one entry.
    """
    W, H, n = model.workers, model.heads, model.slots
    start, end = c["delta_dims"]
    if (start, end) != (0.0, 1.0) and model.pairs.dy_at is not None:
        products = products * ((model.pairs.dy_at >= start) & (model.pairs.dy_at < end))
    flat = products.reshape(W * H * n, H, W, n)
    dy = np.broadcast_arrays(*(c[x] for x in components("delta_dy")))
    return np.asarray(flat[model.index(c, "delta_o"), dy[1], dy[0], dy[2]])


def row_lse(
    model: Model, c: Choices, s: Array, forward: Forward, lse: Array, delta: Array
) -> Array:
    """Return the lse, or what is used in its place, [a, b, h, i, 1 or j]."""
    at = model.index(c, "lse_of")
    saved = np.asarray(model.part("lse", (lse, at), lambda: lse.reshape(-1)[at]))
    if not c["lse"].any():
        return saved
    # A block's lse comes from its forward pass, so tiles that the backward pass skips count in it.
    mask = forward.choices["mask"]
    masked = s if mask is c["mask"] else scores_of_pairs(model, Choices({**c.of, "mask": mask}))

    def local() -> Array:
        shift = finite_shift(masked.max(axis=4))
        return log_of(shift, np.exp(masked - shift[..., None]).sum(axis=4))[..., None]

    def of_row(x: Array) -> Array:
        return x.reshape(-1)[at]

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: saved, "block": local, "base 2": lambda: saved / LN2, "times ln 2": lambda: saved * LN2,
        "maximum": lambda: of_row(forward.maximum), "zero": lambda: np.zeros_like(saved), "delta": lambda: delta,
        "log l": lambda: saved - of_row(forward.maximum), "last block": lambda: of_row(forward.ends[0]),
        "first block": lambda: of_row(forward.ends[1]), "so far": lambda: forward.running[..., None],
        "negative": lambda: -saved, "block's maximum": lambda: finite_shift(s.max(axis=4))[..., None],
        "times scale": lambda: saved * model.geometry.scale, "divided by scale": lambda: saved / model.geometry.scale,
        "without the sinks": lambda: of_row(forward.bare), "chunk": lambda: lse_of_tiles(model, s, model.geometry.run),
        "zero if empty": lambda: finite_shift(saved),
        "before the last step": lambda: of_row(forward.running[model.rows, model.order[:, -2]]),
    }  # fmt: skip
    of |= {name: partial(lse_of_tiles, model, s, size) for name, size in KEY_TILES.items()}
    return chosen(c["lse"], LSES, of)


def so_far(model: Model, x: Array) -> Array:
    """Return the sum of ``x`` [a, b, h, i, 1] over the blocks of each query up to each one, in the steps of the backward pass."""
    order = model.rows[:, None], np.argsort(model.geometry.steps("backward"), axis=1)
    found = np.empty_like(x)
    found[order] = x[order].cumsum(axis=1)
    return found


def lse_of_tiles(model: Model, s: Array, size: int) -> Array:
    """Return the lse over each tile of a block's keys, [a, b, h, i, j]."""
    m = finite_shift(over_tiles(model, s, np.maximum, size))
    return log_of(m, over_tiles(model, np.exp(s - m), np.add, size))


def over_tiles(model: Model, x: Array, which: np.ufunc, size: int) -> Array:
    """Reduce [a, b, h, i, j] over each tile of ``size`` of a block's keys, and repeat the result for all its keys."""
    tiles = Tiles(size, "", False).in_ranges(model.slots, model.geometry.run)
    starts = [one.start for one in tiles]
    return np.repeat(which.reduceat(x, starts, axis=4), np.diff([*starts, model.slots]), axis=4)


def row_delta(
    model: Model, c: Choices, p: Array, g: Array, forward: Forward, saved: Array, lse: Array
) -> Array:
    """Return delta, or what is used in its place, [a, b, h, i, 1 or j]."""
    if not c["delta"].any():
        return saved
    local, mass = (p * g).sum(axis=4, keepdims=True), p.sum(axis=4, keepdims=True)

    def of_block() -> Array:
        return np.asarray((forward.block_p * g).sum(axis=4))

    def of_heads(group: int, part: float = 1.0) -> Array:
        return part * over_group(saved, group, 2) if saved.shape[4] == 1 else saved

    def of_end(number: int) -> Array:
        seen = np.where(np.isneginf(forward.block_lse), -np.inf, of_block())
        return ends(model, seen)[number][:, None, ..., None]

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: saved, "block": lambda: local, "none": lambda: np.zeros_like(saved), "lse": lambda: lse,
        "times l": lambda: saved * np.exp(forward.lse - finite_shift(forward.maximum))[:, None, ..., None],
        "block's own p": lambda: local / nonzero(mass), "times p": lambda: saved * mass,
        "first block": lambda: of_end(1), "last block": lambda: of_end(0),
        "block's own o": lambda: of_block()[..., None], "block's p dp twice": lambda: saved + local,
        "chunk": lambda: over_tiles(model, p * g, np.add, model.geometry.run), "so far": lambda: so_far(model, local),
        "of the group": lambda: of_heads(model.group), "of all heads": lambda: of_heads(model.heads),
        "mean of all heads": lambda: of_heads(model.heads, 1 / model.heads),
    }  # fmt: skip
    of |= {
        name: partial(over_tiles, model, p * g, np.add, size) for name, size in KEY_TILES.items()
    }
    return chosen(c["delta"], DELTAS, of)


def dlse_used(model: Model, c: Choices, given: Array) -> Array:
    """Return what is subtracted from delta, [a, b, h, i, 1 or j].

    A kernel that takes delta from a wrong row does the same with dlse, and one that replaces delta loses dlse.
    """
    of = "dlse_of" if not model.correct(c, "dlse_of") else "delta_o"
    kept = KEEPS_DLSE[c["delta"]]
    return np.asarray(c["dlse_times"] * given.reshape(-1)[model.index(c, of)] * kept)


def summed(model: Model, forward: Forward) -> tuple[Array, Array]:
    """Return <1, v> [a, b, h, i, j] and <1, o> [a, h, i], which replace G and delta if dy is 1 everywhere."""
    every = model.pairs.g.sum(axis=(1, 3, 4))  # [c, b, j]
    heads = np.arange(model.heads) // model.group
    g = 1.0 + np.broadcast_to(
        every[heads].transpose(1, 0, 2)[None, :, :, None, :], forward.weights.shape
    )
    return g, (forward.weights * g).sum(axis=(1, 4))
