"""The result of each block: its row maximum, row sum and normalised weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringspec.conformance.readout.faults.choices import DROPS_IN_L, Choices, components
from ringspec.conformance.readout.faults.merges import over_group
from ringspec.conformance.readout.model.arrays import chosen, nonzero, numbers_of_blocks
from ringspec.conformance.readout.model.part_results import begun, with_lse
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import (
    OF_DROP,
    OF_SCORES,
    drop_factors,
    for_values,
    scores_of_pairs,
)
from ringspec.conformance.readout.model.tile_merging import chosen_of, in_tiles, joined, softmax_of
from ringspec.problem.model import Array
from ringspec.spec.online_softmax import finite_shift

OF_WEIGHTS = (
    *OF_SCORES,
    *components("result_of"),
    "value_mask",
    "l_of_group",
    "padded",
    "tiles",
    "begins",
    "part_lse",
    *OF_DROP,
    "drop_l",
)


def blocks(model: Model, c: Choices) -> tuple[Array, Array, Array, Array]:
    """Return m, l [a, b, h, i] and normalised p of each block, and p as the product with v uses it."""

    def compute() -> tuple[Array, Array, Array, Array]:
        s = scores_of_pairs(model, c)
        m = s.max(axis=4)
        e = np.exp(s - finite_shift(m)[..., None]) * c["count"]
        l = in_row_sums(model, e, c).sum(axis=4)
        if c["l_of_group"]:
            l = over_group(l, model.group, 2)
        if c["padded"] is not None:
            l = l + c["padded"] * np.exp(-finite_shift(m))
        p = e / nonzero(l)[..., None]
        p_of_v = for_values(model, c, p, m, l)
        if c["tiles"] and not c["tiles"].through:
            m, l, p = in_tiles(model, s, c["tiles"])
            p_of_v = (
                p if (c["value_mask"] < 0).all() else p * model.masks[int(c["value_mask"].max())]
            )
        p_of_v = model.without_padding(p_of_v * drop_factors(model, c))
        if not (c["tiles"] and c["tiles"].through):
            if c["begins"]:
                m, l, (p, p_of_v) = begun(model, c["begins"], m, l, p, p_of_v)
            if c["part_lse"].any():
                m, l, p, p_of_v = with_wrong_lse(model, c, s, m, l, p, p_of_v)
        if not model.correct(c, "result_of"):
            m, l, p, p_of_v = of_results(model, c, m, l, p, p_of_v)
        return m, l, p, p_of_v

    m, l, p, p_of_v = model.once("blocks", c.several(OF_WEIGHTS), compute)
    return m, l, p, p_of_v


def with_wrong_lse(
    model: Model, c: Choices, s: Array, m: Array, l: Array, p: Array, p_of_v: Array
) -> tuple[Array, Array, Array, Array]:
    """Return the results of blocks as they are merged if the lse of each part is wrong; a part is a block or an own chunk."""
    numbers, run = numbers_of_blocks(model, c["part_lse"]), model.geometry.own_run
    found = with_lse(model, numbers, s, m, l), l, p
    if run == model.geometry.run:
        return *found, p_of_v
    parts = []
    for start in range(0, model.slots, run):
        keys = s[..., start : start + run]
        m, l, p = softmax_of(keys)
        parts.append((with_lse(model, numbers, keys, m, l), l, p))
    own = model.geometry.own_blocks
    m, l, p = chosen_of(own[..., 0], joined(parts), found)
    return m, l, p, np.where(own, p, p_of_v)


def in_row_sums(model: Model, e: Array, c: Choices) -> Array:
    """Return the weights ``e`` as they are added to the row sums, which dropout should not change."""
    if not c["drop_l"].any() or model.geometry.dropout is None:
        return e
    dropped, less = e * drop_factors(model, c), 1 - model.geometry.dropout[0]
    of: dict[str, Callable[[], Array]] = {
        "right": lambda: e, "kept": lambda: less * dropped / c["drop_times"], "kept and divided": lambda: dropped,
    }  # fmt: skip
    return chosen(c["drop_l"], DROPS_IN_L, of)


def of_results(
    model: Model, c: Choices, m: Array, l: Array, p: Array, p_of_v: Array
) -> tuple[Array, Array, Array, Array]:
    """Move each block's results to the rows into which they are merged; a row with slot -1 gets none."""
    worker, head, slot = (
        np.broadcast_to(c[x], (*model.shape[:4], 1))[..., 0] for x in components("result_of")
    )
    b = np.arange(model.workers)[:, None, None]
    here = slot >= 0
    m, l = m[worker, b, head, slot], l[worker, b, head, slot]
    p, p_of_v = p[worker, b, head, slot], p_of_v[worker, b, head, slot]
    return (
        np.where(here, m, -np.inf),
        np.where(here, l, 0.0),
        p * here[..., None],
        p_of_v * here[..., None],
    )
