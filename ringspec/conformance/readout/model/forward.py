"""The forward pass: the weights of pairs as they appear in o, and lse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.choices import FINISHES, LSES_GIVEN, Choices, components
from ringspec.conformance.readout.merge_formulas import LN2
from ringspec.conformance.readout.model.arrays import (
    chosen,
    log_of,
    nonzero,
    of_rows,
    of_tokens,
    of_workers,
    placed,
)
from ringspec.conformance.readout.model.blocks import blocks
from ringspec.conformance.readout.model.merging import (
    ends,
    merge_numbers,
    merged,
    merged_in_steps,
    running_lse,
)
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import drop_factors, scores_of_pairs
from ringspec.conformance.readout.model.sinks import with_sinks
from ringspec.conformance.readout.model.storing import landed
from ringspec.conformance.readout.model.tile_merging import through_tiles
from ringspec.problem.model import Array, Booleans, Integers

MERGED = 3  # the work of merging all blocks, in evaluations of a table over all pairs


@dataclass(frozen=True)
class Forward:
    """The results of a forward pass: ``weights`` [a, b, h, i, j] as they appear in o, and ``lse`` [a, h, i].

    ``block_lse``, ``block_p``: the lse and the normalised p of each block. ``maximum`` [a, h, i]: the row maximum.
    ``through`` [a, h, i, x]: the columns of o that contain products of the weights with G. ``bare`` [a, h, i]: lse
    without the sinks. ``model`` and ``choices`` are those that computed it.
    """

    weights: Array
    lse: Array
    block_lse: Array
    block_p: Array
    maximum: Array
    through: Array
    bare: Array
    model: Model
    choices: Choices

    @cached_property
    def ends(self) -> tuple[Array, Array]:
        """The lse [a, h, i] of the last and of the first block in which a row sees a key."""
        return ends(self.model, self.block_lse)

    @cached_property
    def running(self) -> Array:
        """The lse [a, b, h, i] after each block."""
        return running_lse(self.model, self.choices)


def forward_pass(model: Model, c: Choices) -> Forward:
    model.evaluations += MERGED
    m, l, p, p_of_v = blocks(model, c)
    block_lse = log_of(m, l)
    omega, run_m, run_l = merged(model, m, l, c, merge_numbers(model, c))
    total = nonzero(run_l)
    early = None
    before = FINISHES.index("before the last merge")
    if c["finish"].any() or c["lse_out"].any():
        early = merged_in_steps(model, m, l, c, merge_numbers(model, c), model.workers - 1)
    if c["finish"].any():
        assert early is not None
        last_l, first_l = (
            np.where(np.isneginf(x), 1.0, x) for x in ends(model, np.where(l == 0, -np.inf, l))
        )
        totals = {
            "right": total, "not divided": np.ones_like(total), "divided twice": total**2,
            "divided by the last block's l": last_l, "before the last merge": nonzero(early[2]),
            "divided by the first block's l": first_l,
            "multiplied by l": 1.0 / total, "divided by l before the last merge": nonzero(early[2]),
        }  # fmt: skip
        kind = of_workers(c["finish"])
        total = chosen(kind, FINISHES, totals)
        omega = np.where(kind == before, early[0], omega)
    weights = weights_of_pairs(model, omega / total, l, p_of_v, c) * c["o_times"]
    if c["tiles"] and c["tiles"].through:
        run_m, run_l, weights = through_tiles(model, scores_of_pairs(model, c), c)
        weights = weights * c["o_times"] * drop_factors(model, c)
    bare = log_of(run_m, run_l)
    weights, lse = with_sinks(model, c, weights, bare, run_m, block_lse)
    parts = of_key_heads(model, c, weights)
    if c["lse_out"].any():
        assert early is not None
        running = np.where(l == 0, -np.inf, running_lse(model, c))
        of = {
            "right": lse, "maximum": run_m, "base 2": lse / LN2, "last block": ends(model, block_lse)[0],
            "negative": -lse, "l": run_l, "first block": ends(model, running)[1], "base 2 twice": lse / LN2 / LN2,
            "times ln 2": lse * LN2, "before the last merge": log_of(*early[1:]),
            **maxima(run_m, np.log(nonzero(run_l)), *ends(model, m), model.geometry.scale), "maximum plus l": run_m + run_l,
            "old maximum": early[1] + np.log(nonzero(run_l)), "old l": run_m + np.log(nonzero(early[2])),
            "last l": run_m + np.log(nonzero(ends(model, np.where(l == 0, -np.inf, l))[0])), "log1p l": run_m + np.log1p(run_l),
            "times scale": lse * model.geometry.scale, "divided by scale": lse / model.geometry.scale,
        }  # fmt: skip
        lse = chosen(of_workers(c["lse_out"]), LSES_GIVEN, of)
    if not model.correct(c, "lse_row"):
        lse = lse.reshape(-1)[model.row_index(c, "lse_row")]
    if not model.correct(c, "o_row"):
        if len(parts) == 1:
            head = np.arange(model.heads)[:, None, None] // model.group
            parts = [parts[0] * (head == number) for number in range(model.key_heads)]
        parts = [of_tokens(x, model.row_index(c, "o_row")) for x in parts]
    order = None
    if c["o_tokens"]:
        order = np.argsort(model.tokens[c["o_tokens"]])
    stored = []
    for weights in parts:
        if order is not None:
            weights = of_rows(weights, order)
        if c["o_to"] is not model.right["o_to"]:
            weights = placed(weights, c["o_to"], 0.0)
        stored.append(model.without_padding(weights))
    if c["o_to"] is not model.right["o_to"]:
        lse = placed(lse, c["o_to"], np.nan)
    weights = stored[0] if len(stored) == 1 else np.sum(stored, axis=0)
    lse = model.geometry.without_padding(lse)
    return Forward(
        weights, lse, block_lse, p, run_m, products_with_g(model, stored), bare, model, c
    )


def weights_of_pairs(model: Model, omega: Array, l: Array, p_of_v: Array, c: Choices) -> Array:
    """Return the weights of pairs in o from ``omega`` [step, a, h, i], the weights of the blocks.

    If o stays, in a ring that sends queries, each worker merges the results of all visiting queries into its own o.
    """
    stays, steps = "o" in c["stays"], range(model.workers)
    found, shift = np.zeros(p_of_v.shape), model.geometry.direction * stays
    other = c["other_o"]
    at = steps_of_o(l[model.rows[:, None], model.order] != 0, other) if other else None
    for t in steps:
        visitor = (model.rows - shift * t) % model.workers
        for step in (t,) if at is None else steps:
            keys = model.rows if stays else model.order[:, step]
            weight = omega[t] if at is None else omega[t] * (at[t] == step)
            found[model.rows, keys] += weight[..., None] * p_of_v[visitor, keys]
    return found


def steps_of_o(seen: Booleans, other: str) -> Integers:
    """Return the step whose o a row merges in each step, [step, a, h, i]; ``other``: a name in OTHER_O.

    ``seen`` [a, step, h, i]: whether the row sees a key in this step. A block does not write to other rows.
    """
    steps = np.arange(seen.shape[1])
    found = np.broadcast_to(steps[:, None, None, None], seen.swapaxes(0, 1).shape).copy()
    computed = seen.any(axis=(2, 3))
    for t in steps:
        if other == "last of later" and t == 0:
            continue
        if other in ("last", "last of later", "previous"):
            for step in range(t) if other == "previous" else range(t, len(steps)):
                found[t] = np.where(seen[:, step], step, found[t])
        elif other == "next" or t == 0:
            later = computed & (steps > t)
            after = np.where(later.any(axis=1), later.argmax(axis=1), t)
            rows = seen[np.arange(len(seen)), after]
            found[t] = np.where(rows, after[:, None, None], t)
    return found


def of_key_heads(model: Model, c: Choices, weights: Array) -> list[Array]:
    """Return the weights of pairs, moved to the columns of o that the choice of v gives them.

    The result is one array, or one array for each key head if v comes from a wrong head.
    """
    if model.correct(c, "v"):
        return [weights]
    worker, head, slot = (c[x] for x in components("v"))
    if head is model.right["v.head"]:
        return [landed(model, weights, "q", c, worker, slot)]
    return [
        landed(model, weights * (head == number), "q", c, worker, slot)
        for number in range(model.key_heads)
    ]


def products_with_g(model: Model, parts: Sequence[Array]) -> Array:
    """Return [a, h, i, (g, x, y)]: the products of the weights with G, which show from which head v was taken."""
    W, H, n = model.workers, model.heads, model.slots
    flat = [x.transpose(2, 0, 3, 1, 4).reshape(H, W * n, W * n) for x in parts]
    if len(flat) == 1:
        found = flat[0] @ model.columns[np.arange(H) // model.group]
    else:
        found = np.sum([x @ model.columns[c] for c, x in enumerate(flat)], axis=0)
    return np.asarray(found.reshape(H, W, n, -1).transpose(1, 0, 2, 3))


def maxima(m: Array, log_l: Array, last: Array, first: Array, scale: float) -> dict[str, Array]:
    """Return wrong values of lse by name; ``last`` and ``first`` are the maxima of a row's last and first blocks."""
    return {
        "log l": log_l, "log2 l": m + log_l / LN2, "last maximum": last + log_l, "first maximum": first + log_l,
        "twice the maximum": 2 * m + log_l, "scaled maximum": scale * m + log_l, "unscaled maximum": m / scale + log_l,
        "maximum minus log l": m - log_l, "maximum in base 2": m / LN2 + log_l, "maximum times ln 2": m * LN2 + log_l,
        "unscaled maximum in base 2": m / scale / LN2 + log_l, "log l times ln 2": m + log_l * LN2,
    }  # fmt: skip
