"""The result of one part of a row, a block or a chunk of its keys, with the mistakes that it can have before it is merged."""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.faults.merge_formulas import LN2
from ringspec.conformance.readout.faults.part_results import OF_HEADS, PART_LSES, Begins, PartLse
from ringspec.conformance.readout.model.arrays import log_of, nonzero
from ringspec.conformance.readout.model.ring import Model
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift


def with_lse(model: Model, number: Integers, s: Array, m: Array, l: Array) -> Array:
    """Return the maxima [.., h, i] with which parts are merged as if they had the lse that ``number`` selects.

    ``s`` [.., h, i, j]: the scores. ``m`` and ``l`` [.., h, i]: the maxima and sums. ``number`` [.., h, i] has indices of
    PART_LSES. A part is then merged with the weight exp(m) l.
    """
    found, right = m, log_of(m, l)
    for one in np.unique(number[number != 0]):
        lse = wrong_lse(model, PART_LSES[one], s, m, l)
        at = (number == one) & (l != 0) & np.isfinite(lse)
        found = np.where(at, m + lse - np.where(l == 0, 0.0, right), found)
    return found


def wrong_lse(model: Model, one: PartLse, s: Array, m: Array, l: Array) -> Array:
    """Return a wrong lse [.., h, i] of parts; -inf where the kernel has none."""
    right, log_l = log_of(m, l), np.log(nonzero(l))
    if one.form in OF_HEADS:
        h = np.arange(model.heads)
        leader = h // model.group * model.group
        heads = {
            "first head": leader, "last head": leader + model.group - 1, "head 0": 0 * h,
            "next head": (h + 1) % len(h), "previous head": h - 1,
        }  # fmt: skip
        return np.asarray(right[..., heads[one.form], :])
    if one.form in ("first rows", "rows before"):
        i = np.arange(right.shape[-1])
        inside = i % model.geometry.run
        before = np.where(inside >= one.rows, i - one.rows, i)
        rows = i - inside + inside % one.rows if one.form == "first rows" else before
        return np.asarray(right[..., rows])
    if not one.keys:
        scale = model.geometry.scale
        plain = {
            "divided by ln 2": right / LN2, "times ln 2": right * LN2, "maximum": m, "log l": log_l, "log2 l": m + log_l / LN2,
            "scaled maximum": scale * m + log_l, "unscaled maximum": m / scale + log_l, "maximum in base 2": m / LN2 + log_l,
            "maximum times ln 2": m * LN2 + log_l, "unscaled maximum in base 2": m / scale / LN2 + log_l,
            "log l times ln 2": m + log_l * LN2, "maximum plus l": m + l, "maximum minus log l": m - log_l,
            "log1p l": m + np.log1p(l), "sum": l,
        }  # fmt: skip
        return np.where(l == 0, -np.inf, plain[one.form])
    first, old, last = statistics_of_tiles(model, one, s)
    of = {
        "old maximum": old[0] + log_l, "last maximum": last[0] + log_l, "first maximum": first[0] + log_l,
        "old sum": m + np.log(nonzero(old[1])), "last sum": m + np.log(nonzero(last[1])),
        "before the last": log_of(*old), "last": log_of(*last), "first": log_of(*first),
    }  # fmt: skip
    empty = {"old sum": old[1] == 0, "last sum": last[1] == 0}.get(one.form, False)
    return np.where(empty, -np.inf, of[one.form])


def statistics_of_tiles(
    model: Model, one: PartLse, s: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array], tuple[Array, Array]]:
    """Return m and l [.., h, i] of the first tile of keys that is computed, of all but the last, and of the last."""
    tiles = [s[..., x : x + one.keys] for x in range(0, s.shape[-1], one.keys)]
    m = np.stack([x.max(axis=-1) for x in tiles])
    l = np.stack([np.exp(x - finite_shift(x.max(axis=-1))[..., None]).sum(axis=-1) for x in tiles])
    computed = in_tiles_of_rows(model, one.rows, ~np.isneginf(m))
    count, number = len(tiles), np.arange(len(tiles)).reshape(-1, *[1] * (m.ndim - 1))
    at_last = np.where(computed, number, -1).max(axis=0)
    at_first = np.where(computed, number, count).min(axis=0)

    def joined(which: Booleans) -> tuple[Array, Array]:
        top = np.where(which, m, -np.inf).max(axis=0)
        weight = np.exp(m - finite_shift(top)) * l
        return top, np.where(which, weight, 0.0).sum(axis=0)

    return joined(number == at_first), joined(number < at_last), joined(number == at_last)


def in_tiles_of_rows(model: Model, rows: int, some: Booleans) -> Booleans:
    """Return [.., i]: whether ``some`` is true for any query of the tile of query i; everywhere if ``rows`` is 0."""
    if not rows:
        return np.ones_like(some)
    i = np.arange(some.shape[-1])
    run = model.geometry.run
    starts = np.flatnonzero(i % run % rows == 0)
    tile = np.searchsorted(starts, i, "right") - 1
    return np.asarray(np.logical_or.reduceat(some, starts, axis=-1)[..., tile])


def begun(
    model: Model, begins: Begins, m: Array, l: Array, *each: Array
) -> tuple[Array, Array, list[Array]]:
    """Return m, l [.., h, i] and normalised weights [.., h, i, j] if a query begins with the state of the tile before.

    ``each``: the normalised weights of the same parts, as o or lse has them.
    """
    m, l = m.copy(), l.copy()
    each_new = [p.copy() for p in each]
    for i in range(m.shape[-1]):
        before = i - begins.rows
        if i % model.geometry.run < begins.rows:
            continue
        top = np.maximum(m[..., i], m[..., before])
        shift = finite_shift(top)
        new, old = (np.exp(m[..., x] - shift) * l[..., x] for x in (i, before))
        total = new + old if "l" in begins.what else new
        for p in each_new:
            kept = (old / nonzero(total))[..., None] * p[..., before, :]
            p[..., i, :] *= (new / nonzero(total))[..., None]
            if "o" in begins.what:
                p[..., i, :] += kept
        m[..., i], l[..., i] = top, total
    return m, l, each_new
