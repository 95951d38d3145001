"""What each pair adds to the gradients: p and dp, and from them the shares of dv, dq, dk and dbias."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ringspec.conformance.readout.faults.choices import (
    DROPS_IN_DS,
    DS_FORMS,
    DV_FORMS,
    KERNELS,
    Choices,
    components,
)
from ringspec.conformance.readout.faults.merges import over_group
from ringspec.conformance.readout.faults.tile_rules import visible_part
from ringspec.conformance.readout.model.arrays import chosen, nonzero
from ringspec.conformance.readout.model.forward import Forward
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import (
    OF_DROP,
    OF_SCORES,
    cap_slope,
    drop_factors,
    for_values,
    scores_of_pairs,
    shown,
)
from ringspec.conformance.readout.model.statistics import (
    delta_of,
    dlse_used,
    row_delta,
    row_lse,
    summed,
)
from ringspec.conformance.readout.problem.pairs import ELSEWHERE
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift

OF_CORE = (
    *OF_SCORES, *components("dy"), *components("v"), *components("lse_of"), *components("delta_dy"),
    *components("delta_o"), "lse", "delta", "dp_of_k", "delta_times", "dy_ones", "dlse_times", *components("dlse_of"),
    *OF_DROP, "drop_ds", "delta_dims",
)  # fmt: skip
OF_DELTA = (*components("delta_dy"), *components("delta_o"), "delta_dims")
OF_DV = (
    "dv_form",
    "dv_count",
    "value_mask",
    "ds_times",
    "turned",
    "dy_ones",
    "mask",
    *OF_DROP,
    "drop_dv",
)
OF_DQ = (
    "dq_form",
    "computed",
    "dq_count",
    "ds_times",
    "dq_of_group",
    "cap_slope",
    *OF_DROP,
    "drop_ds",
)
OF_DK = ("dk_form", "computed", "dk_count", "ds_times", "turned", "cap_slope", *OF_DROP, "drop_ds")
# Properties of dropout in DROPS_IN_DS, looked up by the number of a form.
NOT_IN_DP = np.array(["not in dp" in name for name in DROPS_IN_DS])
IN_P = np.array(["in p" in name for name in DROPS_IN_DS])
Core = tuple[Array, Array, Array, Array, Array]  # scores, p, dp, delta and lse of the pairs


class Shares(NamedTuple):
    """What each pair [a, b, h, i, j] adds to the gradients, before it is known to which row; dbias is None without a bias."""

    dv: Array
    dq: Array
    dk: Array
    dbias: Array | None = None


def shares_of_pairs(
    model: Model, c: Choices, forward: Forward, lse: Array, products: Array
) -> Shares:
    """Return the shares of the gradients; the arguments are those of :func:`ringspec.conformance.readout.model.backward.backward_pass`."""
    given = forward, lse, products

    def core_of(kernel: str, c: Choices) -> Core:
        deps = (*given, *c.several(OF_CORE))
        found: Core = model.once(f"core of {kernel}", deps, lambda: core_of_pairs(model, c, *given))
        return found

    of_q, of_kv = (c.in_kernel(kernel) for kernel in KERNELS)
    core = core_of(KERNELS[0], of_q)
    core_kv = core if of_kv is of_q else core_of(KERNELS[1], of_kv)

    def of_dv() -> Array:
        x = for_dv(model, of_kv, *core_kv)
        if c["turned"] & 2:
            x = x.swapaxes(3, 4)
        x = with_ones(model, x) if c["dy_ones"] else x
        return np.asarray(x * c["dv_count"])

    def of_dq() -> Array:
        x = of_group(model, ds_of(model, c["dq_form"], of_q, *core[1:]), c)
        return np.asarray(x * c["dq_count"])

    def of_dk() -> Array:
        x = ds_of(model, c["dk_form"], of_kv, *core_kv[1:])
        if c["turned"] & 1:
            x = x.swapaxes(3, 4)
        return np.asarray(x * c["dk_count"])

    dv, dq, dk = (
        model.once(name, (core, *c.several(slots)), compute)
        for name, core, c, slots, compute in (
            ("dv", core_kv, of_kv, OF_DV, of_dv),
            ("dq", core, of_q, OF_DQ, of_dq),
            ("dk", core_kv, of_kv, OF_DK, of_dk),
        )
    )
    return Shares(dv, dq, dk, share_of_bias(model, of_q, core))


def core_of_pairs(model: Model, c: Choices, forward: Forward, lse: Array, products: Array) -> Core:
    """Return scores, p, dp, delta and lse of each pair."""
    s = scores_of_pairs(model, c)
    at = model.index(c, "dy"), model.index(c, "v")
    g = model.part("dp", at, lambda: model.g[at])
    if c["dp_of_k"].any():
        g = np.where(c["dp_of_k"], model.dy_k[at[0], model.index(c, "k")], g)
    dropped = g * drop_factors(model, c)
    g = np.where(NOT_IN_DP[c["drop_ds"]], g, dropped)
    if c["dy_ones"]:
        g, ones = summed(model, forward)
        delta = ones[:, None, :, :, None]
    else:
        rows = (products, *c.several(OF_DELTA))
        delta = model.part("delta", rows, lambda: delta_of(model, c, products))
    used = row_lse(model, c, s, forward, lse, delta)
    with np.errstate(over="ignore", invalid="ignore"):
        p = model.part("p", (s, used), lambda: weights_of(s, used))
        row = row_delta(model, c, p, g, forward, delta, used)
        if model.pairs.dlse is not None:
            row = row - dlse_used(model, c, model.pairs.dlse)
        return s, p * c["count"], g, c["delta_times"] * row, used


def for_dv(model: Model, c: Choices, s: Array, p: Array, g: Array, d: Array, used: Array) -> Array:
    """Return the matrix in the product for dv: p, or what ``dv_form`` selects in its place."""
    of_dv, drop = p, np.where(c["drop_dv"] > 0, 1.0, drop_factors(model, c))
    if (c["value_mask"] >= 0).any():
        row = np.broadcast_to(used, (*model.shape[:4], used.shape[4])).max(axis=4)
        of_dv = for_values(model, c, p, row, np.ones_like(row))
    if not c["dv_form"].any():
        return np.asarray(of_dv * drop)
    m = s.max(axis=4, keepdims=True)

    def free(maximum: Array) -> Array:
        return np.where(np.isneginf(s), 0.0, np.exp(s - finite_shift(maximum))) * c["count"]

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: of_dv, "block's maximum": lambda: free(m),
        "row maximum": lambda: free(m.max(axis=1, keepdims=True)),
        "block's lse": lambda: free(m) / nonzero(free(m).sum(axis=4, keepdims=True)),
        "dS": lambda: c["ds_times"] * p * (g - d), "p dp": lambda: p * g, "dp": lambda: g * computed_pairs(model, c),
    }  # fmt: skip
    return chosen(c["dv_form"], DV_FORMS, of) * drop


def computed_pairs(model: Model, c: Choices) -> Booleans:
    """Return the pairs that a kernel computes although a mask hides some of them: those of blocks with a visible pair."""
    seen = shown(model, c["mask"])
    computed = seen.any(axis=(3, 4), keepdims=True)
    if model.geometry.of_visible_parts:
        computed = visible_part(seen)
    if (c["computed"] >= 0).any():
        pairs = shown(model, np.maximum(c["computed"], 0))
        computed = np.where(c["computed"] < 0, computed, pairs)
    return np.asarray(computed & (c["count"] != 0))


def ds_of(
    model: Model, form: Integers, c: Choices, p: Array, g: Array, d: Array, used: Array
) -> Array:
    """Return dS, or what is used in its place; ``form`` has numbers in DS_FORMS."""
    slope = cap_slope(model, c)
    too = IN_P[c["drop_ds"]]
    p = np.where(too, p * drop_factors(model, c), p) if too.any() else p
    ds = c["ds_times"] * p * (g - d) * slope
    if not form.any():
        return np.asarray(ds)
    computed = computed_pairs(model, c)

    def hidden() -> Array:
        everything = next(x for x, mask in enumerate(model.masks) if mask.all())
        all_pairs = Choices({**c.of, "mask": np.full_like(c["mask"], everything)})
        with np.errstate(over="ignore"):
            free = np.exp(scores_of_pairs(model, all_pairs) - used)
        return free * c["count"] * (g - d) * computed

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: p * (g - d), "p dp - delta": lambda: (p * g - d) * computed,
        "dp - delta": lambda: (g - d) * computed, "p": lambda: p, "p dp": lambda: p * g, "p delta": lambda: p * d,
        "p (dp + delta)": lambda: p * (g + d), "dp": lambda: g * computed, "p (1 - p) dp": lambda: p * (1 - p) * g,
        "p p (dp - delta)": lambda: p * p * (g - d), "hidden pairs": hidden,
    }  # fmt: skip
    return np.asarray(c["ds_times"] * chosen(form, DS_FORMS, of) * slope)


def share_of_bias(model: Model, c: Choices, core: Core) -> Array | None:
    """Return the shares of dbias; None without a bias."""
    if not model.geometry.bias:
        return None
    x = ds_of(model, c["dbias_form"], c, *core[1:])
    x = x.swapaxes(3, 4) if c["turned"] & 4 else x
    return np.asarray(x * c["dbias_count"])


def of_group(model: Model, ds: Array, c: Choices) -> Array:
    """Return dS for dq: summed over the query heads of a key head if ``dq_of_group`` says so."""
    if not c["dq_of_group"]:
        return ds
    return over_group(ds, model.group, 2)


def with_ones(model: Model, of_dv: Array) -> Array:
    """Return P as dv shows it if dy is 1 everywhere: sums over all queries and all query heads of a key head."""
    sums = of_dv.sum(axis=(0, 3), keepdims=True)
    shape = (1, model.workers, model.key_heads, model.group, 1, model.slots)
    of_group = sums.reshape(shape).sum(axis=3, keepdims=True)
    others = of_group.sum(axis=2, keepdims=True) - of_group
    sums = np.broadcast_to(of_group + ELSEWHERE * others, shape)
    return np.broadcast_to(sums.reshape(1, model.workers, model.heads, 1, model.slots), of_dv.shape)


def weights_of(s: Array, lse: Array) -> Array:
    """Return p = exp(s - lse); a row that saw no key in the forward pass has no p."""
    return np.where(np.isneginf(s) | np.isneginf(lse), 0.0, np.exp(s - lse))
