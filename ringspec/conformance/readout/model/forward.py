"""The forward pass: the weights of pairs as they appear in o, and lse."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.faults.choices import FINISHES, LSES_GIVEN, Choices, components
from ringspec.conformance.readout.faults.merge_formulas import LN2
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
    before_last = functools.cache(functools.partial(merged_before_last, model, m, l, c))
    if c["finish"].any():
        omega, total = finished(model, c, l, omega, run_l, before_last)
    else:
        total = nonzero(run_l)
    weights = weights_of_pairs(model, omega / total, l, p_of_v, c) * c["o_times"]
    if c["tiles"] and c["tiles"].through:
        run_m, run_l, weights = through_tiles(model, scores_of_pairs(model, c), c)
        weights = weights * c["o_times"] * drop_factors(model, c)
    bare = log_of(run_m, run_l)
    weights, lse = with_sinks(model, c, weights, bare, run_m, block_lse)
    parts = of_key_heads(model, c, weights)
    if c["lse_out"].any():
        lse = lse_given(model, c, (m, l, block_lse), (run_m, run_l, lse), before_last)
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


def merged_before_last(model: Model, m: Array, l: Array, c: Choices) -> tuple[Array, Array, Array]:
    """Return the weights of the blocks [step, a, h, i], m and l [a, h, i] before the last merge."""
    return merged_in_steps(model, m, l, c, merge_numbers(model, c), model.workers - 1)


def finished(
    model: Model,
    c: Choices,
    l: Array,
    omega: Array,
    run_l: Array,
    before_last: Callable[[], tuple[Array, Array, Array]],
) -> tuple[Array, Array]:
    """Return the weights of the blocks, and what o is divided by at the end, in the form that ``finish`` selects.

    ``l`` [a, b, h, i]: row sums of the blocks. ``omega`` and ``run_l``: the weights and row sums after the last merge.
    """
    total = nonzero(run_l)

    def of_end(number: int) -> Array:
        found = ends(model, np.where(l == 0, -np.inf, l))[number]
        return np.where(np.isneginf(found), 1.0, found)

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: total, "not divided": lambda: np.ones_like(total), "divided twice": lambda: total**2,
        "divided by the last block's l": lambda: of_end(0), "divided by the first block's l": lambda: of_end(1),
        "before the last merge": lambda: nonzero(before_last()[2]), "multiplied by l": lambda: 1.0 / total,
        "divided by l before the last merge": lambda: nonzero(before_last()[2]),
    }  # fmt: skip
    kind = of_workers(c["finish"])
    early = kind == FINISHES.index("before the last merge")
    if early.any():
        omega = np.where(early, before_last()[0], omega)
    return omega, chosen(kind, FINISHES, of)


def lse_given(
    model: Model,
    c: Choices,
    of_blocks: tuple[Array, Array, Array],
    merged: tuple[Array, Array, Array],
    before_last: Callable[[], tuple[Array, Array, Array]],
) -> Array:
    """Return lse in the form that ``lse_out`` selects.

    ``of_blocks``: m, l and lse of the blocks [a, b, h, i]. ``merged``: those of the rows [a, h, i].
    """
    (m, l, block_lse), (run_m, run_l, lse), scale = of_blocks, merged, model.geometry.scale

    def running() -> Array:
        return np.where(l == 0, -np.inf, running_lse(model, c))

    def log_l(l: Array = run_l) -> Array:
        return np.log(nonzero(l))

    of: dict[str, Callable[[], Array]] = {
        "right": lambda: lse, "maximum": lambda: run_m, "base 2": lambda: lse / LN2, "negative": lambda: -lse,
        "last block": lambda: ends(model, block_lse)[0], "first block": lambda: ends(model, running())[1],
        "l": lambda: run_l, "base 2 twice": lambda: lse / LN2 / LN2, "times ln 2": lambda: lse * LN2,
        "before the last merge": lambda: log_of(*before_last()[1:]), "maximum plus l": lambda: run_m + run_l,
        "old maximum": lambda: before_last()[1] + log_l(), "old l": lambda: run_m + log_l(before_last()[2]),
        "last l": lambda: run_m + log_l(ends(model, np.where(l == 0, -np.inf, l))[0]),
        "log1p l": lambda: run_m + np.log1p(run_l), "log l": lambda: log_l(), "log2 l": lambda: run_m + log_l() / LN2,
        "times scale": lambda: lse * scale, "divided by scale": lambda: lse / scale,
        "last maximum": lambda: ends(model, m)[0] + log_l(), "first maximum": lambda: ends(model, m)[1] + log_l(),
        "twice the maximum": lambda: 2 * run_m + log_l(), "maximum minus log l": lambda: run_m - log_l(),
        "scaled maximum": lambda: scale * run_m + log_l(), "unscaled maximum": lambda: run_m / scale + log_l(),
        "maximum in base 2": lambda: run_m / LN2 + log_l(), "maximum times ln 2": lambda: run_m * LN2 + log_l(),
        "unscaled maximum in base 2": lambda: run_m / scale / LN2 + log_l(),
        "log l times ln 2": lambda: run_m + log_l() * LN2,
    }  # fmt: skip
    return chosen(of_workers(c["lse_out"]), LSES_GIVEN, of)


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
