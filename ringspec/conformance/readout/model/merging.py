"""Merge the results of the blocks into the running softmax, step by step."""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.faults.choices import Choices
from ringspec.conformance.readout.faults.merges import AT_FIRST, MERGES, State, merge
from ringspec.conformance.readout.model.arrays import (
    log_of,
    nonzero,
    numbers_of_blocks,
    where_changed,
)
from ringspec.conformance.readout.model.blocks import blocks
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift


def merge_numbers(model: Model, c: Choices) -> Integers:
    """Return the numbers of the merges of all blocks in MERGES, [a, b, h, i]."""
    return numbers_of_blocks(model, c["merge"])


def merged(
    model: Model, m: Array, l: Array, c: Choices, kinds: Integers
) -> tuple[Array, Array, Array]:
    """Merge all blocks of one ring, or of several: then every array has a first axis for the rings.

    ``m``, ``l`` and ``kinds`` [.., a, b, h, i]: the row maxima and row sums of the blocks, and how they are merged,
    as numbers in MERGES. Return the weights [step, .., a, h, i] of the blocks' normalised results, and the final m and l.
    """
    if kinds.any() or c["started"] or c["stays"] or c["resets"] or c["not_home"]:
        return merged_in_steps(model, m, l, c, kinds, model.workers)
    top = m.max(axis=-3)
    weights = np.exp(m - finite_shift(top)[..., None, :, :]) * l
    in_steps = weights[..., model.rows[:, None], model.order, :, :]
    return np.moveaxis(in_steps, -3, 0), top, weights.sum(axis=-3)


def merged_in_steps(
    model: Model,
    m: Array,
    l: Array,
    c: Choices,
    kinds: Integers,
    steps: int,
    running: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Merge the blocks of the first ``steps`` steps one after the other, as :func:`merged` does.

    ``running`` [a, b, h, i], if given, receives the lse after each block.
    """
    run_m = np.full(m[..., 0, :, :].shape, 0.0 if c["started"] else -np.inf)
    run_l = np.full(run_m.shape, float(c["started"]))
    omega = np.zeros((model.workers, *run_m.shape))
    wrong, stays = bool(kinds.any()), c["stays"]
    back = -model.geometry.direction
    for t in range(steps):
        b = model.order[:, t]
        m_b, l_b = (x[..., model.rows, b, :, :] for x in (m, l))
        kind_b = kinds[..., model.rows, b, :, :]
        here, fresh = l_b != 0, run_l == 0
        hidden_merge = c["hidden_merge"]
        if hidden_merge == "rows":
            hidden_merge = here.any(axis=(-2, -1), keepdims=True)
        elif hidden_merge == "computed":
            hidden_merge = model.computed_rows[model.rows, b]
        new = merge("right", run_m, run_l, omega, m_b, l_b, t, model.geometry)
        if wrong:
            joins = here | hidden_merge
            for kind in np.unique(kind_b[kind_b != 0]):
                other = merge(MERGES[kind], run_m, run_l, omega, m_b, l_b, t, model.geometry)
                changed = (kind_b == kind) & joins
                if MERGES[kind] not in AT_FIRST:
                    changed = changed & (t > 0) & (~fresh | hidden_merge)
                new = where_changed(changed, other, new)
            run_m, run_l = (
                np.where(joins, x, y) for x, y in zip(new[:2], (run_m, run_l), strict=True)
            )
            omega = np.where(joins, new[2], omega)
        else:
            run_m, run_l, omega = new
        if c["resets"] and (c["resets"][1] or t + 1 < model.workers):
            run_m, run_l, omega = nothing_of(c["resets"][0], run_m, run_l, omega)
        if "n" in stays:
            run_m, omega, run_l = (
                log_of(run_m, run_l),
                omega / nonzero(run_l),
                (run_l != 0).astype(float),
            )
            run_m = np.roll(run_m, back, axis=-3)
        if "l" in stays:
            run_l = np.roll(run_l, back, axis=-3)
        if "m" in stays:
            run_m = np.roll(run_m, back, axis=-3)
        if "o" in stays:
            omega = np.roll(omega, back, axis=-3)
        if running is not None:
            running[model.rows, b] = log_of(run_m, run_l)
    if "l" in c["not_home"]:
        run_l = np.roll(run_l, back, axis=-3)
    if "m" in c["not_home"]:
        run_m = np.roll(run_m, back, axis=-3)
    return omega, run_m, run_l


def running_lse(model: Model, c: Choices) -> Array:
    """Return the lse after each block [a, b, h, i]."""
    m, l, _, _ = blocks(model, c)
    found = np.full(m.shape, -np.inf)
    merged_in_steps(model, m, l, c, merge_numbers(model, c), model.workers, found)
    return found


def ends(model: Model, of_block: Array) -> tuple[Array, Array]:
    """Return the values [a, h, i] of the last and the first block in which a row sees a key; -inf if there is none."""
    last = np.full(of_block[:, 0].shape, -np.inf)
    first = last.copy()
    for t in range(model.workers):
        here = of_block[model.rows, model.order[:, t]]
        seen = ~np.isneginf(here)
        first = np.where(np.isneginf(first) & seen, here, first)
        last = np.where(seen, here, last)
    return last, first


def weights_of_blocks(
    model: Model, c: Choices, other: Choices, there: Booleans, slots: slice
) -> tuple[Array, Array, Array, list[bytes]]:
    """Return what is merged in each of several rings, whose choices are those of ``c``, or of ``other`` in some blocks.

    ``there`` [x, a, b, 1, 1]: the blocks with the choices of ``other``, for each ring x. ``slots``: of queries, whose rows
    alone are merged; all of them if a merge depends on other rows. The result is the sum over
    keys of each block's p [x, a, b, h, i], the weight [x, a, b, h, i] with which it is added to o, lse [x, a, h, i],
    and for each ring a key that is equal only if the merges are bitwise the same.
    """
    here, changed = (
        (m[..., slots], l[..., slots], p[..., slots, :].sum(axis=4))
        for m, l, _, p in (blocks(model, x) for x in (c, other))
    )
    there = there if there.shape[-1] == 1 else there[..., slots]
    m, l, p = (np.where(there, x, y) for x, y in zip(changed, here, strict=True))
    kinds = np.where(there, *(merge_numbers(model, x)[..., slots] for x in (other, c)))
    omega, run_m, run_l = merged(model, m, l, other, kinds)
    weight = np.zeros(m.shape)
    for t in range(model.workers):
        weight[:, model.rows, model.order[:, t]] = omega[t] / nonzero(run_l)
    parts = np.moveaxis(omega, 1, 0), run_m, run_l
    keys = [b"".join(x[number].tobytes() for x in parts) for number in range(len(there))]
    return p, weight, log_of(run_m, run_l), keys


def nothing_of(name: str, m: Array, l: Array, omega: Array) -> State:
    """Return the state of the running softmax with 'm', 'l' or 'o' set to 0."""
    return (
        np.zeros_like(m) if name == "m" else m,
        np.zeros_like(l) if name == "l" else l,
        np.zeros_like(omega) if name == "o" else omega,
    )
