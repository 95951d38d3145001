"""A model of ring attention that works on matrices over pairs of tokens, in which every choice of a kernel is data.

With the correct :class:`Choices` it computes softmax attention and its gradient; with others, what a wrong kernel does.

A *pair* [a, b, h, i, j] is query i of worker a with key j of worker b in query head h. The matrix S contains the
scores before the mask, G = <dy, v>, P the weights in the backward pass, and dS the gradient of the scores. A *row* is
one query in one head. A *block* [a, b] contains all pairs of two workers. It is computed in one *step*, and its result
is merged into a running softmax with the maximum m and the sum l of each row. p is a pair's weight within its block or
row. A *share* is what one pair adds to a row of o or of a gradient. The index (g, x, y) counts the rows of dy: query y
of worker x in head g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from ringspec.conformance.readout.choices import (
    CAP_SLOPES,
    CAPS,
    DELTAS,
    DROPS,
    DROPS_IN_DS,
    DROPS_IN_L,
    DS_FORMS,
    DSINKS,
    DV_FORMS,
    FINISHES,
    KERNELS,
    LSES,
    LSES_GIVEN,
    OF_KEYS,
    SINKS,
    Choices,
    Tiles,
    components,
    right_choices,
)
from ringspec.conformance.readout.merges import AT_FIRST, LN2, MERGES, State, merge, over_group
from ringspec.conformance.readout.pairs import ELSEWHERE, Pairs, kept
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift

MERGED = 3  # the work of merging all blocks, in evaluations of a table over all pairs
OF_SCORES = (
    *components("q"),
    *components("k"),
    "centred",
    "times",
    *components("bias_q"),
    *components("bias_k"),
    "bias_times",
    "cap",
    "mask",
    "hidden_score",
    "count",
)
OF_DROP = (*components("drop_q"), *components("drop_k"), "drop", "drop_times")
OF_CORE = (
    *OF_SCORES, *components("dy"), *components("v"), *components("lse_of"), *components("delta_dy"),
    *components("delta_o"), "lse", "delta", "delta_times", "dy_ones", "dlse_times", *components("dlse_of"),
    *OF_DROP, "drop_ds",
)  # fmt: skip
OF_DELTA = (*components("delta_dy"), *components("delta_o"))
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
OF_DQ = ("dq_form", "dq_count", "ds_times", "dq_of_group", "cap_slope", *OF_DROP, "drop_ds")
OF_DK = ("dk_form", "dk_count", "ds_times", "turned", "cap_slope", *OF_DROP, "drop_ds")
# Properties of the forms of delta in DELTAS and of dropout in DROPS_IN_DS, looked up by the number of a form.
OF_SAVED_DELTA = ("right", "times p", "times l", "block's p dp twice", "of the group")
KEEPS_DLSE = np.array([name in OF_SAVED_DELTA for name in DELTAS])
NOT_IN_DP = np.array(["not in dp" in name for name in DROPS_IN_DS])
IN_P = np.array(["in p" in name for name in DROPS_IN_DS])
OF_WEIGHTS = (
    *OF_SCORES,
    *components("result_of"),
    "value_mask",
    "l_of_group",
    "tiles",
    *OF_DROP,
    "drop_l",
)

Core = tuple[Array, Array, Array, Array, Array]  # scores, p, dp, delta and lse of the pairs


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
        return self.model.ends(self.block_lse)

    @cached_property
    def running(self) -> Array:
        """The lse [a, b, h, i] after each block."""
        return self.model.running(self.choices)


class Shares(NamedTuple):
    """What each pair [a, b, h, i, j] adds to the gradients, before it is known to which row; dbias is None without a bias."""

    dv: Array
    dq: Array
    dk: Array
    dbias: Array | None = None


class Gradients(NamedTuple):
    """The matrices [a, b, h, i, j] of a backward pass: P and dS for dq, for dk and for dbias; and dsinks [a, h, sink].

    The last two are None without a bias and without sinks.
    """

    p: Array
    ds_of_dq: Array
    ds_of_dk: Array
    ds_of_bias: Array | None = None
    dsinks: Array | None = None


class Model:
    """The model of the ring of one problem.

    ``masks`` are the patterns [a, b, 1, i, j] from which the choice ``mask`` selects by number, the correct one first.
    ``tokens`` are the orders of tokens from which ``o_tokens`` selects
    (:func:`ringspec.conformance.readout.geometry.dealt_otherwise`).
    """

    def __init__(self, pairs: Pairs, masks: Sequence[Booleans], tokens: Sequence[Integers]) -> None:
        self.pairs, self.masks = pairs, np.stack(masks)
        self.geometry = geometry = pairs.geometry
        self.workers, self.heads, self.group = geometry.workers, geometry.heads, geometry.group
        self.slots, self.key_heads = geometry.slots, geometry.heads // geometry.group
        self.shape = (self.workers, self.workers, self.heads, self.slots, self.slots)
        self.order = np.argsort(geometry.steps("forward"), axis=1)
        self.rows = np.arange(self.workers)
        self.s, self.g = (by_token(x) for x in (pairs.s, pairs.g))
        # [c, (b, j), (g, x, y)]: G of query y of worker x in head g, with key j of worker b in key head c
        self.columns = pairs.g.transpose(0, 2, 5, 3, 1, 4).reshape(
            self.key_heads, geometry.tokens, -1
        )
        self.tokens, self.sinks = list(tokens), pairs.sinks
        self.next_keep = kept(self.geometry, 1)
        self.kept: dict[str, tuple[tuple[Any, ...], Any]] = {}
        # What this model has computed so far, in tables over all pairs. It bounds a search in place of a time, which
        # would let an explanation depend on the machine.
        self.evaluations, self.most = 0, math.inf

    def may_go_on(self, kind: object = None) -> bool:
        """Return whether the search may still compute something; ``kind`` is not used."""
        return self.evaluations <= self.most

    @cached_property
    def right(self) -> Choices:
        return right_choices(self.geometry)

    def once(self, name: str, given: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Return the value kept under ``name`` if it was computed from the same objects, else ``compute()``.

        ``given`` has the objects that the value depends on.
        """
        kept = self.kept.get(name)
        if kept is not None and all(map(is_, kept[0], given)):
            return kept[1]
        self.evaluations += 1
        return compute()

    def part(self, name: str, given: Sequence[Any], compute: Callable[[], Any]) -> Any:
        """Return a part of a table as :meth:`once` does, without counting it; the first value is kept until :meth:`keep`."""
        kept = self.kept.get(name)
        if kept is not None and all(map(is_, kept[0], given)):
            return kept[1]
        value = compute()
        self.kept.setdefault(name, (tuple(given), value))
        return value

    def keep(self, choices: Choices) -> None:
        """Keep the scores and blocks of these choices, so that similar choices are computed faster."""
        self.kept.clear()
        self.kept["scores"] = choices.several(OF_SCORES), self.scores(choices)
        self.kept["blocks"] = choices.several(OF_WEIGHTS), self.blocks(choices)

    def keep_backward(self, c: Choices, forward: Forward, lse: Array, products: Array) -> None:
        """Keep the results of the backward pass with these choices."""
        self.keep(c)
        given = forward, lse, products
        of_q, of_kv = (c.in_kernel(kernel) for kernel in KERNELS)
        core = self.core(of_q, *given)
        core_kv = core if of_kv is of_q else self.core(of_kv, *given)
        for kernel, x, now in zip(KERNELS, (of_q, of_kv), (core, core_kv), strict=True):
            self.kept[f"core of {kernel}"] = (*given, *x.several(OF_CORE)), now
        dv, dq, dk, _ = self.shares(c, *given)
        self.kept["dv"] = (core_kv, *of_kv.several(OF_DV)), dv
        self.kept["dq"] = (core, *of_q.several(OF_DQ)), dq
        self.kept["dk"] = (core_kv, *of_kv.several(OF_DK)), dk

    def index(self, c: Choices, name: str) -> Integers:
        """Return the index, over workers, heads and slots, of the token that the choice ``name`` selects for each pair."""

        def compute() -> Integers:
            heads = self.key_heads if name in OF_KEYS else self.heads
            return np.asarray((given[0] * heads + given[1]) * self.slots + given[2])

        given = c.several(components(name))
        found: Integers = self.part(f"index of {name}", given, compute)
        return found

    def row_index(self, c: Choices, name: str) -> Integers:
        """Return the index of the row that the choice ``name`` gives each row, [a, h, i]."""
        at = np.broadcast_to(self.index(c, name), (self.workers, 1, *self.shape[2:4], 1))
        return at[:, 0, :, :, 0]

    def correct(self, c: Choices, *names: str) -> bool:
        of, right = c.of, self.right.of
        return all(of[x] is right[x] for name in names for x in components(name))

    def of_heads(self, name: str) -> Array:
        """Return S ('s') or G ('g') as [a, b, h, i, j], for each query head with its key head."""
        table = self.s if name == "s" else self.g
        return table[self.index(self.right, "q"), self.index(self.right, "k")]

    def scores(self, c: Choices) -> Array:
        """Return the scores of the pairs: ``hidden_score`` where a pair is masked, -inf where it is not computed."""

        def compute() -> Array:
            s = self.capped(self.uncapped(c), c["cap"])
            s = np.where(self.shown(c["mask"]), s, c["hidden_score"])
            return np.where(c["count"] != 0, s, -np.inf)

        return np.asarray(self.once("scores", c.several(OF_SCORES), compute))

    def uncapped(self, c: Choices) -> Array:
        """Return the scores of the pairs with the bias, before the soft cap and the mask."""
        s = self.s[self.index(c, "q"), self.index(c, "k")]
        if c["centred"].any():
            s = np.where(c["centred"], s - s.mean(axis=4, keepdims=True), s)
        s = c["times"] * s
        if self.pairs.bias is None:
            return np.asarray(s)
        return np.asarray(s + c["bias_times"] * self.entries(self.pairs.bias, c, "bias"))

    def entries(self, table: Array, c: Choices, name: str) -> Array:
        """Return the entries of ``table`` [a, h, i, (b, j)] in the rows and columns that the choices of ``name`` give."""
        column = c[f"{name}_k.worker"] * self.slots + c[f"{name}_k.slot"]
        rows = table.reshape(-1, self.geometry.tokens)
        return np.asarray(rows[self.index(c, f"{name}_q"), column])

    def drop(self, c: Choices) -> Array | float:
        """Return the factors of dropout on the weights of pairs; 1 without dropout."""
        if self.geometry.dropout is None or self.pairs.keep is None:
            return 1.0
        more = 1 / (1 - self.geometry.dropout[0])
        mask = more * self.entries(self.pairs.keep, c, "drop")
        of = {"right": mask, "none": np.ones_like(mask), "inverted": more - mask}
        if self.next_keep is not None:
            of["next seed"] = more * self.entries(self.next_keep, c, "drop")
        return c["drop_times"] * chosen(c["drop"], DROPS, of)

    def capped(self, s: Array, form: Integers) -> Array:
        """Return scores under the soft cap, in the form that ``form`` numbers."""
        cap, scale = self.geometry.softcap, self.geometry.scale
        if cap is None:
            return s
        once = cap * np.tanh(s / cap)
        of = {
            "right": once, "none": s, "before the scale": cap * scale * np.tanh(s / scale / cap),
            "not multiplied back": np.tanh(s / cap), "not divided": cap * np.tanh(s), "twice": cap * np.tanh(once / cap),
        }  # fmt: skip
        return chosen(form, CAPS, of)

    def slope(self, c: Choices) -> Array | float:
        """Return the derivative of the soft cap as dS is multiplied by it; 1 without a soft cap."""
        cap = self.geometry.softcap
        if cap is None:
            return 1.0
        t = np.tanh(self.uncapped(c) / cap)
        of = {
            "right": 1 - t**2, "none": np.ones_like(t), "of the capped score": 1 - np.tanh(t) ** 2,
            "not squared": 1 - t, "capped score not divided": 1 - (cap * t) ** 2,
        }  # fmt: skip
        return chosen(c["cap_slope"], CAP_SLOPES, of)

    def shown(self, mask: Integers) -> Booleans:
        """Return the pattern of visible pairs, where ``mask`` gives the number of the pattern for each pair."""
        if mask.size == 1:
            return self.masks[int(mask.flat[0])]
        numbers = np.unique(mask)
        pattern = self.masks[numbers[0]]
        for number in numbers[1:]:
            pattern = np.where(mask == number, self.masks[number], pattern)
        return pattern

    def for_values(self, c: Choices, p: Array, m: Array, l: Array) -> Array:
        """Return p as the product with v or dy uses it, with another mask where ``value_mask`` selects one."""
        if (c["value_mask"] < 0).all():
            return p
        free = self.scores(
            Choices(
                {**c.of, "mask": np.where(c["value_mask"] < 0, c["mask"], c["value_mask"])},
            )
        )
        return np.exp(free - finite_shift(m)[..., None]) * c["count"] / nonzero(l)[..., None]

    def blocks(self, c: Choices) -> tuple[Array, Array, Array, Array]:
        """Return m, l [a, b, h, i] and normalised p of each block, and p as the product with v uses it."""

        def compute() -> tuple[Array, Array, Array, Array]:
            s = self.scores(c)
            m = s.max(axis=4)
            e = np.exp(s - finite_shift(m)[..., None]) * c["count"]
            l = self.in_row_sums(e, c).sum(axis=4)
            if c["l_of_group"]:
                l = over_group(l, self.group, 2)
            p = e / nonzero(l)[..., None]
            p_of_v = self.for_values(c, p, m, l)
            if c["tiles"] and not c["tiles"].through:
                m, l, p = self.in_tiles(s, c["tiles"])
                p_of_v = p
            p_of_v = self.without_padding(p_of_v * self.drop(c))
            if not self.correct(c, "result_of"):
                m, l, p, p_of_v = self.of_results(c, m, l, p, p_of_v)
            return m, l, p, p_of_v

        m, l, p, p_of_v = self.once("blocks", c.several(OF_WEIGHTS), compute)
        return m, l, p, p_of_v

    def in_row_sums(self, e: Array, c: Choices) -> Array:
        """Return the weights ``e`` as they are added to the row sums, which dropout should not change."""
        if not c["drop_l"].any() or self.geometry.dropout is None:
            return e
        dropped, less = e * self.drop(c), 1 - self.geometry.dropout[0]
        of = {"right": e, "kept": less * dropped / c["drop_times"], "kept and divided": dropped}
        return chosen(c["drop_l"], DROPS_IN_L, of)

    def of_results(
        self, c: Choices, m: Array, l: Array, p: Array, p_of_v: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Move each block's results to the rows into which they are merged; a row with slot -1 gets none."""
        worker, head, slot = (
            np.broadcast_to(c[x], (*self.shape[:4], 1))[..., 0] for x in components("result_of")
        )
        b = np.arange(self.workers)[:, None, None]
        here = slot >= 0
        m, l = m[worker, b, head, slot], l[worker, b, head, slot]
        p, p_of_v = p[worker, b, head, slot], p_of_v[worker, b, head, slot]
        return (
            np.where(here, m, -np.inf),
            np.where(here, l, 0.0),
            p * here[..., None],
            p_of_v * here[..., None],
        )

    def weights_of_blocks(
        self, c: Choices, other: Choices, there: Booleans
    ) -> tuple[Array, Array, Array, list[bytes]]:
        """Return what is merged in each of several rings, whose choices are those of ``c``, or of ``other`` in some blocks.

        ``there`` [x, a, b, 1, 1]: the blocks with the choices of ``other``, for each ring x. The result is the sum over
        keys of each block's p [x, a, b, h, i], the weight [x, a, b, h, i] with which it is added to o, lse [x, a, h, i],
        and for each ring a key that is equal only if the merges are bitwise the same.
        """
        here, changed = ((m, l, p.sum(axis=4)) for m, l, _, p in map(self.blocks, (c, other)))
        m, l, p = (np.where(there, x, y) for x, y in zip(changed, here, strict=True))
        kinds = np.where(there, self.merges(other), self.merges(c))
        omega, run_m, run_l = self.merged(m, l, other, kinds)
        weight = np.zeros(m.shape)
        for t in range(self.workers):
            weight[:, self.rows, self.order[:, t]] = omega[t] / nonzero(run_l)
        parts = np.moveaxis(omega, 1, 0), run_m, run_l
        keys = [b"".join(x[number].tobytes() for x in parts) for number in range(len(there))]
        return p, weight, log_of(run_m, run_l), keys

    def merges(self, c: Choices) -> Integers:
        """Return the numbers of the merges of all blocks in MERGES, [a, b, h, i]."""
        return np.broadcast_to(c["merge"], (*self.shape[:4], 1))[..., 0]

    def running(self, c: Choices) -> Array:
        """Return the lse after each block [a, b, h, i]."""
        m, l, _, _ = self.blocks(c)
        found = np.full(m.shape, -np.inf)
        self.merged_in_steps(m, l, c, self.merges(c), self.workers, found)
        return found

    def forward(self, c: Choices) -> Forward:
        self.evaluations += MERGED
        m, l, p, p_of_v = self.blocks(c)
        block_lse = log_of(m, l)
        omega, run_m, run_l = self.merged(m, l, c, self.merges(c))
        total = nonzero(run_l)
        early = None
        before = FINISHES.index("before the last merge")
        if c["finish"].any() or c["lse_out"].any():
            early = self.merged_in_steps(m, l, c, self.merges(c), self.workers - 1)
        if c["finish"].any():
            assert early is not None
            last_l, first_l = (
                np.where(np.isneginf(x), 1.0, x) for x in self.ends(np.where(l == 0, -np.inf, l))
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
        weights = self.weights_of(omega / total, p_of_v, "o" in c["stays"]) * c["o_times"]
        if c["tiles"] and c["tiles"].through:
            run_m, run_l, weights = self.through_tiles(self.scores(c), c["tiles"])
            weights = weights * c["o_times"] * self.drop(c)
        bare = log_of(run_m, run_l)
        weights, lse = self.with_sinks(c, weights, bare, run_m, block_lse)
        parts = self.of_key_heads(c, weights)
        if c["lse_out"].any():
            assert early is not None
            running = np.where(l == 0, -np.inf, self.running(c))
            of = {
                "right": lse, "maximum": run_m, "base 2": lse / LN2, "last block": self.ends(block_lse)[0],
                "negative": -lse, "l": run_l, "first block": self.ends(running)[1], "base 2 twice": lse / LN2 / LN2,
                "times ln 2": lse * LN2, "before the last merge": log_of(early[1], early[2]),
                **maxima(run_m, np.log(nonzero(run_l)), *self.ends(m), self.geometry.scale), "maximum plus l": run_m + run_l,
            }  # fmt: skip
            lse = chosen(of_workers(c["lse_out"]), LSES_GIVEN, of)
        if not self.correct(c, "lse_row"):
            lse = lse.reshape(-1)[self.row_index(c, "lse_row")]
        if not self.correct(c, "o_row"):
            if len(parts) == 1:
                head = np.arange(self.heads)[:, None, None] // self.group
                parts = [parts[0] * (head == number) for number in range(self.key_heads)]
            parts = [of_tokens(x, self.row_index(c, "o_row")) for x in parts]
        order = None
        if c["o_tokens"]:
            order = np.argsort(self.tokens[c["o_tokens"]])
        stored = []
        for weights in parts:
            if order is not None:
                weights = of_rows(weights, order)
            if c["o_to"] is not self.right["o_to"]:
                weights = placed(weights, c["o_to"], 0.0)
            stored.append(self.without_padding(weights))
        if c["o_to"] is not self.right["o_to"]:
            lse = placed(lse, c["o_to"], np.nan)
        weights = stored[0] if len(stored) == 1 else np.sum(stored, axis=0)
        lse = self.geometry.without_padding(lse)
        return Forward(weights, lse, block_lse, p, run_m, self.through(stored), bare, self, c)

    def with_sinks(
        self, c: Choices, weights: Array, bare: Array, maximum: Array, block_lse: Array
    ) -> tuple[Array, Array]:
        """Return the weights of pairs and lse with the sinks, given those without (``weights`` and ``bare``)."""
        if self.sinks is None:
            return weights, bare
        of_o, lse = (
            np.logaddexp(bare, log_sum(self.sink_logits(c, name, maximum, block_lse)))
            for name in ("sink_o", "sink_lse")
        )
        share = np.where(np.isneginf(bare), 0.0, np.exp(finite_shift(bare) - finite_shift(of_o)))
        return weights * share[:, None, ..., None], lse

    def sink_logits(self, c: Choices, name: str, maximum: Array, block_lse: Array) -> Array:
        """Return the sinks of each row, [a, h, i, sink], in the form that the choice ``name`` selects."""
        assert self.sinks is not None
        head = np.broadcast_to(c["sink_of.head"], (self.workers, 1, *self.shape[2:4], 1))
        x = self.sinks[head[:, 0, :, :, 0]]
        seen = (~np.isneginf(block_lse)).sum(axis=1)[..., None]
        scale, first = self.geometry.scale, np.arange(x.shape[3]) == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            of = {
                "right": x, "none": np.full_like(x, -np.inf), "every step": x + np.log(self.workers),
                "every block": x + np.log(seen), "times scale": x * scale, "divided by scale": x / scale,
                "times ln 2": x * LN2, "divided by ln 2": x / LN2, "first": np.where(first, x, -np.inf),
                "unshifted": x + maximum[..., None], "not exponentiated": np.log(x) + maximum[..., None], "negated": -x,
            }  # fmt: skip
        return chosen(of_workers(c[name])[..., None], SINKS, of)

    def dsinks(self, c: Choices, forward: Forward, lse: Array, products: Array) -> Array | None:
        """Return the gradient of the sinks [a, h, sink] from what the forward pass saved, as ``backward`` takes it.

        None if there are no sinks.
        """
        if self.sinks is None:
            return None
        row = self.delta_of(self.right, products)[:, 0, :, :, 0]
        if self.pairs.dlse is not None:
            row = row - self.pairs.dlse
        logits = self.sink_logits(c, "sink_o", forward.maximum, forward.block_lse)

        def summed(lse: Array, row: Array, power: float = 0.0) -> Array:
            p = np.exp(logits - finite_shift(lse)[..., None])
            return np.asarray(-(p * (1 - power * p) * row[..., None]).sum(axis=2))

        found = summed(lse, row)
        of = {
            "right": found, "lse without the sinks": summed(forward.bare, row), "of p (1 - p)": summed(lse, row, 1.0),
            "without delta": summed(lse, -np.ones_like(row)),
            "of all workers": np.broadcast_to(found.sum(axis=0), found.shape),
        }  # fmt: skip
        whole = (self.workers, 1, self.heads, 1, 1)
        form, times, head = (
            np.broadcast_to(c[x], (*whole[:3], *c[x].shape[3:]))[:, 0, :, 0]
            for x in ("dsink", "dsink_times", "dsink_of.head")
        )
        found = times * chosen(form, DSINKS, of)
        there = np.zeros_like(found)
        np.add.at(there, (self.rows[:, None], head[..., 0]), found)
        return there

    def without_padding(self, x: Array) -> Array:
        """Return [a, b, h, i, j] with 0 in the rows and columns of padding slots, which results do not show."""
        return x * self.geometry.real_pairs if self.geometry.padding else x

    def weights_of(self, omega: Array, p_of_v: Array, stays: bool) -> Array:
        """Return the weights of pairs in o from ``omega`` [step, a, h, i], the weights of the blocks.

        ``stays``: in a ring that sends queries, each worker keeps its o and merges the results of all visiting queries
        into it.
        """
        found, shift = np.zeros(p_of_v.shape), self.geometry.direction * stays
        for t in range(self.workers):
            visitor = (self.rows - shift * t) % self.workers
            keys = self.rows if stays else self.order[:, t]
            found[self.rows, keys] += omega[t][..., None] * p_of_v[visitor, keys]
        return found

    def of_key_heads(self, c: Choices, weights: Array) -> list[Array]:
        """Return the weights of pairs, moved to the columns of o that the choice of v gives them.

        The result is one array, or one array for each key head if v comes from a wrong head.
        """
        if self.correct(c, "v"):
            return [weights]
        worker, head, slot = (c[x] for x in components("v"))
        if head is self.right["v.head"]:
            return [self.landed(weights, "q", c, worker, slot)]
        return [
            self.landed(weights * (head == number), "q", c, worker, slot)
            for number in range(self.key_heads)
        ]

    def landed(self, x: Array, row: str, c: Choices, b: Integers, j: Integers) -> Array:
        """Return the shares ``x``, moved to the rows that the choice ``row`` gives and to key j of worker b."""
        if row == "q":
            worker, head, slot = (self.right[x] for x in components("q"))
        else:
            worker, head, slot = (c[x] for x in components(row))
        W, H, n = self.workers, self.heads, self.slots
        at = (((worker * W + b) * H + head) * n + slot) * n + j
        at = np.broadcast_to(at, self.shape)
        x = np.broadcast_to(x, self.shape)
        landed = np.bincount(at.ravel(), x.ravel().astype(float), x.size)
        return np.asarray(landed.reshape(self.shape), float)

    def through(self, parts: Sequence[Array]) -> Array:
        """Return [a, h, i, (g, x, y)]: the products of the weights with G, which show from which head v was taken."""
        W, H, n = self.workers, self.heads, self.slots
        flat = [x.transpose(2, 0, 3, 1, 4).reshape(H, W * n, W * n) for x in parts]
        if len(flat) == 1:
            found = flat[0] @ self.columns[np.arange(H) // self.group]
        else:
            found = np.sum([x @ self.columns[c] for c, x in enumerate(flat)], axis=0)
        return np.asarray(found.reshape(H, W, n, -1).transpose(1, 0, 2, 3))

    def ends(self, of_block: Array) -> tuple[Array, Array]:
        """Return the values [a, h, i] of the last and the first block in which a row sees a key; -inf if there is none."""
        last = np.full(of_block[:, 0].shape, -np.inf)
        first = last.copy()
        for t in range(self.workers):
            here = of_block[self.rows, self.order[:, t]]
            seen = ~np.isneginf(here)
            first = np.where(np.isneginf(first) & seen, here, first)
            last = np.where(seen, here, last)
        return last, first

    def merged(self, m: Array, l: Array, c: Choices, kinds: Integers) -> tuple[Array, Array, Array]:
        """Merge all blocks of one ring, or of several: then every array has a first axis for the rings.

        ``m``, ``l`` and ``kinds`` [.., a, b, h, i]: the row maxima and row sums of the blocks, and how they are merged,
        as numbers in MERGES. Return the weights [step, .., a, h, i] of the blocks' normalised results, and the final m and l.
        """
        if kinds.any() or c["started"] or c["stays"] or c["resets"] or c["not_home"]:
            return self.merged_in_steps(m, l, c, kinds, self.workers)
        top = m.max(axis=-3)
        weights = np.exp(m - finite_shift(top)[..., None, :, :]) * l
        in_steps = weights[..., self.rows[:, None], self.order, :, :]
        return np.moveaxis(in_steps, -3, 0), top, weights.sum(axis=-3)

    def merged_in_steps(
        self,
        m: Array,
        l: Array,
        c: Choices,
        kinds: Integers,
        steps: int,
        running: Array | None = None,
    ) -> tuple[Array, Array, Array]:
        """Merge the blocks of the first ``steps`` steps one after the other, as :meth:`merged` does.

        ``running`` [a, b, h, i], if given, receives the lse after each block.
        """
        run_m = np.full(m[..., 0, :, :].shape, 0.0 if c["started"] else -np.inf)
        run_l = np.full(run_m.shape, float(c["started"]))
        omega = np.zeros((self.workers, *run_m.shape))
        wrong, stays, hidden_merge = bool(kinds.any()), c["stays"], c["hidden_merge"]
        back = -self.geometry.direction
        for t in range(steps):
            b = self.order[:, t]
            m_b, l_b = (x[..., self.rows, b, :, :] for x in (m, l))
            kind_b = kinds[..., self.rows, b, :, :]
            here, fresh = l_b != 0, run_l == 0
            new = merge("right", run_m, run_l, omega, m_b, l_b, t, self.geometry)
            if wrong:
                joins = here | hidden_merge
                for kind in np.unique(kind_b[kind_b != 0]):
                    other = merge(MERGES[kind], run_m, run_l, omega, m_b, l_b, t, self.geometry)
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
            if c["resets"] and (c["resets"][1] or t + 1 < self.workers):
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
                running[self.rows, b] = log_of(run_m, run_l)
        if "l" in c["not_home"]:
            run_l = np.roll(run_l, back, axis=-3)
        if "m" in c["not_home"]:
            run_m = np.roll(run_m, back, axis=-3)
        return omega, run_m, run_l

    def in_tiles(self, s: Array, tiles: Tiles) -> State:
        """Return m, l [a, b, h, i] and p [a, b, h, i, j] of blocks if tiles of keys are merged wrongly within a block."""
        parts = tiles.of(self.geometry)
        state = empty_state(s.shape[:-1], len(parts))
        p = np.zeros(s.shape)
        for u, keys in enumerate(parts):
            p[..., keys], state = self.tile_merged(s[..., keys], tiles.merge, state, u)
        m, l, omega = state
        for u, keys in enumerate(parts):
            p[..., keys] *= (omega[u] / nonzero(l))[..., None]
        return m, l, p

    def through_tiles(self, s: Array, tiles: Tiles) -> State:
        """Return the final m and l [a, h, i] and the weights of pairs if the tiles of all blocks are merged wrongly."""
        every = [(t, keys) for t in range(self.workers) for keys in tiles.of(self.geometry, t)]
        state = empty_state(s[:, 0].shape[:-1], len(every))
        p = np.zeros(s.shape)
        for number, (t, keys) in enumerate(every):
            of_tile = s[self.rows, self.order[:, t]][..., keys]
            found, state = self.tile_merged(of_tile, tiles.merge, state, number)
            p[self.rows, self.order[:, t], ..., keys] = found
        m, l, omega = state
        for number, (t, keys) in enumerate(every):
            weight = omega[number] / nonzero(l)
            p[self.rows, self.order[:, t], ..., keys] *= weight[..., None]
        return m, l, p

    def tile_merged(self, s: Array, kind: str, state: State, number: int) -> tuple[Array, State]:
        """Merge a tile with the scores ``s`` [.., i, j] into the running state; return its normalised p and the new state."""
        m = s.max(axis=-1)
        e = np.exp(s - finite_shift(m)[..., None])
        l = e.sum(axis=-1)
        new = merge("right", *state, m, l, number, self.geometry)
        other = merge(kind, *state, m, l, number, self.geometry)
        changed = (l != 0) & ((state[1] != 0) | (kind in AT_FIRST))
        return e / nonzero(l)[..., None], where_changed(changed, other, new)

    def backward(self, c: Choices, forward: Forward, lse: Array, products: Array) -> Gradients:
        """Return the matrices of the gradients from what the forward pass saved.

        ``lse`` has the axes [a, h, i]. ``products`` [a, h, i, (g, x, y)] is <dy, o> of each row of o with each row of
        dy.
        """
        given = forward, lse, products
        return self.gradients(c, self.shares(c, *given), *given)

    def shares(self, c: Choices, forward: Forward, lse: Array, products: Array) -> Shares:
        """Return the shares of the gradients; the arguments are those of :meth:`backward`."""
        given = forward, lse, products

        def core_of(kernel: str, c: Choices) -> Core:
            deps = (*given, *c.several(OF_CORE))
            found: Core = self.once(f"core of {kernel}", deps, lambda: self.core(c, *given))
            return found

        of_q, of_kv = (c.in_kernel(kernel) for kernel in KERNELS)
        core = core_of(KERNELS[0], of_q)
        core_kv = core if of_kv is of_q else core_of(KERNELS[1], of_kv)

        def of_dv() -> Array:
            x = self.for_dv(of_kv, *core_kv)
            if c["turned"] & 2:
                x = x.swapaxes(3, 4)
            x = self.with_ones(x) if c["dy_ones"] else x
            return np.asarray(x * c["dv_count"])

        def of_dq() -> Array:
            x = self.of_group(self.ds_of(c["dq_form"], of_q, *core[1:]), c)
            return np.asarray(x * c["dq_count"])

        def of_dk() -> Array:
            x = self.ds_of(c["dk_form"], of_kv, *core_kv[1:])
            if c["turned"] & 1:
                x = x.swapaxes(3, 4)
            return np.asarray(x * c["dk_count"])

        dv, dq, dk = (
            self.once(name, (core, *c.several(slots)), compute)
            for name, core, c, slots, compute in (
                ("dv", core_kv, of_kv, OF_DV, of_dv),
                ("dq", core, of_q, OF_DQ, of_dq),
                ("dk", core_kv, of_kv, OF_DK, of_dk),
            )
        )
        return Shares(dv, dq, dk, self.share_of_bias(of_q, core))

    def gradients(
        self, c: Choices, shares: Shares, forward: Forward, lse: Array, products: Array
    ) -> Gradients:
        """Return the matrices of the gradients if these are the shares; the other arguments are those of :meth:`backward`."""
        of_q, of_kv = (c.in_kernel(kernel) for kernel in KERNELS)
        dv = self.stored("dv", of_kv, shares.dv, "dv_dy", "dv_to")
        dq = self.stored("dq", of_q, shares.dq, "dq_to", "dq_k")
        dk = self.stored("dk", of_kv, shares.dk, "dk_q", "dk_to")
        if c["exchanged"].any():
            dv, dk = self.exchanged(c, dv, dk)
        elif c["stacked"]:
            dv, dk = self.stacked(dv, dk)
        dbias = shares.dbias
        if dbias is not None:
            dbias = self.stored("dbias", of_q, dbias, "dbias_to", "dbias_k")
        return Gradients(dv, dq, dk, dbias, self.dsinks(c, forward, lse, products))

    def share_of_bias(self, c: Choices, core: Core) -> Array | None:
        """Return the shares of dbias; None without a bias."""
        if not self.geometry.bias:
            return None
        x = self.ds_of(c["dbias_form"], c, *core[1:])
        x = x.swapaxes(3, 4) if c["turned"] & 4 else x
        return np.asarray(x * c["dbias_count"])

    def core(self, c: Choices, forward: Forward, lse: Array, products: Array) -> Core:
        """Return scores, p, dp, delta and lse of each pair."""
        s = self.scores(c)
        at = self.index(c, "dy"), self.index(c, "v")
        g = self.part("dp", at, lambda: self.g[at])
        dropped = g * self.drop(c)
        g = np.where(NOT_IN_DP[c["drop_ds"]], g, dropped)
        if c["dy_ones"]:
            g, ones = self.summed(forward)
            delta = ones[:, None, :, :, None]
        else:
            rows = (products, *c.several(OF_DELTA))
            delta = self.part("delta", rows, lambda: self.delta_of(c, products))
        used = self.row_lse(c, s, forward, lse, delta)
        with np.errstate(over="ignore", invalid="ignore"):
            p = self.part("p", (s, used), lambda: weights_of(s, used))
            row = self.row_delta(c, p, g, forward, delta, used)
            if self.pairs.dlse is not None:
                row = row - self.dlse(c, self.pairs.dlse)
            return s, p * c["count"], g, c["delta_times"] * row, used

    def dlse(self, c: Choices, given: Array) -> Array:
        """Return what is subtracted from delta, [a, b, h, i, 1 or j].

        A kernel that takes delta from a wrong row does the same with dlse, and one that replaces delta loses dlse.
        """
        of = "dlse_of" if not self.correct(c, "dlse_of") else "delta_o"
        kept = KEEPS_DLSE[c["delta"]]
        return np.asarray(c["dlse_times"] * given.reshape(-1)[self.index(c, of)] * kept)

    def ds_of(self, form: Integers, c: Choices, p: Array, g: Array, d: Array, used: Array) -> Array:
        """Return dS, or what is used in its place; ``form`` has numbers in DS_FORMS."""
        slope = self.slope(c)
        too = IN_P[c["drop_ds"]]
        p = np.where(too, p * self.drop(c), p) if too.any() else p
        ds = c["ds_times"] * p * (g - d) * slope
        if not form.any():
            return np.asarray(ds)
        computed = self.shown(c["mask"]).any(axis=(3, 4), keepdims=True) & (c["count"] != 0)
        of = {
            "right": ds, "p dp - delta": (p * g - d) * computed, "dp - delta": (g - d) * computed, "p": p,
            "p dp": p * g, "p delta": p * d, "p (dp + delta)": p * (g + d), "dp": g * computed,
            "p (1 - p) dp": p * (1 - p) * g, "p p (dp - delta)": p * p * (g - d),
        }  # fmt: skip
        hidden = DS_FORMS.index("hidden pairs")
        if (form == hidden).any():
            everything = next(x for x, mask in enumerate(self.masks) if mask.all())
            free = self.scores(Choices({**c.of, "mask": np.full_like(c["mask"], everything)}))
            with np.errstate(over="ignore"):
                of["hidden pairs"] = np.exp(free - used) * c["count"] * (g - d) * computed
        return chosen(
            form,
            DS_FORMS,
            {name: c["ds_times"] * x * slope for name, x in of.items()} | {"right": ds},
        )

    def for_dv(self, c: Choices, s: Array, p: Array, g: Array, d: Array, used: Array) -> Array:
        """Return the matrix in the product for dv: p, or what ``dv_form`` selects in its place."""
        of_dv, drop = p, np.where(c["drop_dv"] > 0, 1.0, self.drop(c))
        if (c["value_mask"] >= 0).any():
            row = np.broadcast_to(used, (*self.shape[:4], used.shape[4])).max(axis=4)
            of_dv = self.for_values(c, p, row, np.ones_like(row))
        if not c["dv_form"].any():
            return np.asarray(of_dv * drop)
        m = s.max(axis=4, keepdims=True)
        free = np.where(np.isneginf(s), 0.0, np.exp(s - finite_shift(m))) * c["count"]
        top = m.max(axis=1, keepdims=True)
        of = {
            "right": of_dv, "block's maximum": free,
            "row maximum": np.where(np.isneginf(s), 0.0, np.exp(s - finite_shift(top))) * c["count"],
            "block's lse": free / nonzero(free.sum(axis=4, keepdims=True)), "dS": c["ds_times"] * p * (g - d),
            "p dp": p * g, "dp": np.broadcast_to(g, p.shape),
        }  # fmt: skip
        return chosen(c["dv_form"], DV_FORMS, of) * drop

    def delta_of(self, c: Choices, products: Array) -> Array:
        """Return <dy, o> of the rows of o and dy that ``delta_o`` and ``delta_dy`` select, [a, b, h, i, 1 or j]."""
        W, H, n = self.workers, self.heads, self.slots
        flat = products.reshape(W * H * n, H, W, n)
        dy = np.broadcast_arrays(*(c[x] for x in components("delta_dy")))
        return np.asarray(flat[self.index(c, "delta_o"), dy[1], dy[0], dy[2]])

    def row_lse(self, c: Choices, s: Array, forward: Forward, lse: Array, delta: Array) -> Array:
        """Return the lse, or what is used in its place, [a, b, h, i, 1 or j]."""
        at = self.index(c, "lse_of")
        saved = np.asarray(self.part("lse", (lse, at), lambda: lse.reshape(-1)[at]))
        if not c["lse"].any():
            return saved
        m = s.max(axis=4)
        local = log_of(m, np.exp(s - finite_shift(m)[..., None]).sum(axis=4))[..., None]
        top, last, first = (x.reshape(-1)[at] for x in (forward.maximum, *forward.ends))
        of = {
            "right": saved, "block": local, "base 2": saved / LN2, "times ln 2": saved * LN2, "maximum": top,
            "zero": np.zeros_like(saved), "delta": delta, "log l": saved - top, "last block": last, "first block": first,
            "so far": forward.running[..., None], "negative": -saved, "block's maximum": finite_shift(m)[..., None],
            "times scale": saved * self.geometry.scale, "divided by scale": saved / self.geometry.scale,
            "without the sinks": forward.bare.reshape(-1)[at],
        }  # fmt: skip
        return chosen(c["lse"], LSES, of)

    def row_delta(
        self, c: Choices, p: Array, g: Array, forward: Forward, saved: Array, lse: Array
    ) -> Array:
        """Return delta, or what is used in its place, [a, b, h, i, 1 or j]."""
        if not c["delta"].any():
            return saved
        local, mass = (p * g).sum(axis=4, keepdims=True), p.sum(axis=4, keepdims=True)
        of_block = (forward.block_p * g).sum(axis=4)
        last, first = (
            x[:, None, ..., None]
            for x in self.ends(np.where(np.isneginf(forward.block_lse), -np.inf, of_block))
        )
        of = {
            "right": saved, "block": local, "none": np.zeros_like(saved), "block's own p": local / nonzero(mass),
            "lse": lse, "times l": saved * np.exp(forward.lse - finite_shift(forward.maximum))[:, None, ..., None],
            "times p": saved * mass, "first block": first, "last block": last,
            "block's own o": of_block[..., None], "block's p dp twice": saved + local,
            "of the group": over_group(saved, self.group, 2) if saved.shape[4] == 1 else saved,
        }  # fmt: skip
        return chosen(c["delta"], DELTAS, of)

    def stored(self, name: str, c: Choices, share: Array, row: str, column: str) -> Array:
        """Return the shares of a gradient at the rows and columns to which they are added."""
        if not self.correct(c, row, column):
            worker, head, slot = (c[x] for x in components(column))
            if name in ("dk", "dv") and not (
                c[f"{row}.head"] is self.right[f"{row}.head"]
                and head is self.right[f"{column}.head"]
            ):
                share = share * np.where(c[f"{row}.head"] // self.group == head, 1.0, ELSEWHERE)
            share = self.landed(share, row, c, worker, slot)
        if name in c["over_heads"]:
            if name == "dq":
                share = over_group(share, self.heads, 2)
            else:  # the results of each key head show the share once, beside those of its own queries
                share = share * (1 + ELSEWHERE * (self.key_heads - 1))
        return self.without_padding(self.held(name, c, share))

    def held(self, name: str, c: Choices, share: Array) -> Array:
        """Return the shares of a gradient as its buffers hold them at the end."""
        if name in c["adds"]:
            share = self.adding(name, share)
        if name in c["uncleared"]:
            *_, of, number = c["uncleared"]
            uncleared = self.uncleared if of == "steps" else self.uncleared_tiles
            share = uncleared(name, share, number)
        return share

    def uncleared(self, name: str, share: Array, every: int) -> Array:
        """Return the shares if a block's buffer is used again after ``every`` steps without being cleared.

        The buffer then still holds the shares of all its earlier uses.
        """
        step = self.geometry.steps("backward")
        by_query = self.geometry.travels("backward") == "queries"
        found = share.copy()
        for a, b in np.ndindex(step.shape):
            for other in range(self.workers):
                at = (other, b) if by_query else (a, other)
                gap = step[a, b] - step[at]
                if gap > 0 and gap % every == 0:
                    found[a, b] += share[at]
        return found

    def uncleared_tiles(self, name: str, share: Array, size: int) -> Array:
        """Return the shares if the buffer of a tile of ``size`` rows is not cleared before the next tile uses it.

        The buffer then still holds the shares of earlier tiles. Only tiles in the same range of tokens (``run`` of
        :class:`Geometry`) use the same buffer.
        """
        axis = 3 if name == "dq" else 4
        x, found = np.moveaxis(share, axis, 0), np.moveaxis(share.copy(), axis, 0)
        for row in range(self.slots):
            for other in range(row - size, row - row % self.geometry.run - 1, -size):
                found[row] += x[other]
        return np.moveaxis(found, 0, axis)

    def of_group(self, ds: Array, c: Choices) -> Array:
        """Return dS for dq: summed over the query heads of a key head if ``dq_of_group`` says so."""
        if not c["dq_of_group"]:
            return ds
        return over_group(ds, self.group, 2)

    def adding(self, name: str, share: Array) -> Array:
        """Return the shares if a worker adds each arriving gradient to the one that it has already sent on."""
        W, geometry = self.workers, self.geometry
        a, b = np.indices((W, W))
        step, stays = geometry.steps("backward"), b if name == "dq" else a
        found = np.zeros_like(share)
        for hops in range(W + 1):
            to = (stays + geometry.direction * hops) % W
            times = np.array([comb(int(W - t), hops) for t in step.ravel()]).reshape(W, W)
            there = (to, b) if name == "dq" else (a, to)
            np.add.at(found, there, share * times[:, :, None, None, None])
        return found

    def exchanged(self, c: Choices, of_dv: Array, of_dk: Array) -> tuple[Array, Array]:
        """Return P and the dS of dk as they are read if dk and dv are exchanged.

        The columns of dv begin one head later than those of dk, so the entries of a head appear in the next or previous
        head.
        """
        here = c["exchanged"]
        dv, dk = self.in_other(of_dv, of_dk)
        return np.where(here, dv, of_dv), np.where(here, dk, of_dk)

    def stacked(self, of_dv: Array, of_dk: Array) -> tuple[Array, Array]:
        """Return P and the dS of dk as they are read if dk + dv is returned as dk, and that of the next worker as dv."""
        dv, dk = self.in_other(of_dv, of_dk)
        return np.roll(of_dv + dv, -self.geometry.direction, axis=1), of_dk + dk

    def in_other(self, of_dv: Array, of_dk: Array) -> tuple[Array, Array]:
        """Return what is read as P from dk in place of dv, and as the dS of dk from dv in place of dk."""
        scale = self.geometry.scale
        dk, dv = np.zeros_like(of_dk), np.zeros_like(of_dv)
        group = np.arange(self.heads) // self.group
        for h in range(1, self.heads):
            weight = 1.0 if group[h] == group[h - 1] else ELSEWHERE
            dk[:, :, h] = weight * of_dv[:, :, h - 1] / scale
            dv[:, :, h - 1] = weight * of_dk[:, :, h] * scale
        return dv, dk

    def with_ones(self, of_dv: Array) -> Array:
        """Return P as dv shows it if dy is 1 everywhere: sums over all queries and all query heads of a key head."""
        sums = of_dv.sum(axis=(0, 3), keepdims=True)
        shape = (1, self.workers, self.key_heads, self.group, 1, self.slots)
        of_group = sums.reshape(shape).sum(axis=3, keepdims=True)
        others = of_group.sum(axis=2, keepdims=True) - of_group
        sums = np.broadcast_to(of_group + ELSEWHERE * others, shape)
        return np.broadcast_to(
            sums.reshape(1, self.workers, self.heads, 1, self.slots), of_dv.shape
        )

    def summed(self, forward: Forward) -> tuple[Array, Array]:
        """Return <1, v> [a, b, h, i, j] and <1, o> [a, h, i], which replace G and delta if dy is 1 everywhere."""
        every = self.pairs.g.sum(axis=(1, 3, 4))  # [c, b, j]
        heads = np.arange(self.heads) // self.group
        g = 1.0 + np.broadcast_to(
            every[heads].transpose(1, 0, 2)[None, :, :, None, :], forward.weights.shape
        )
        return g, (forward.weights * g).sum(axis=(1, 4))

    def gradient_of_forward(self, c: Choices) -> Gradients:
        """Return the matrices of the gradients if the backward pass is the gradient of the forward pass ``c``.

        The gradient is computed by central differences of the scores.
        """
        base, right = self.forward(c).weights, self.s
        g = self.g[self.index(self.right, "q"), self.index(c, "v")]
        ds, step = np.zeros(self.shape), 1e-5
        dlse = self.pairs.dlse

        def goal() -> Array:
            """Return the sums [a, h, i] whose gradient is taken."""
            self.kept.clear()
            now = self.forward(c)
            of_o = (now.weights * g).sum(axis=(1, 4))
            return of_o if dlse is None else of_o + dlse * finite_shift(now.lse)

        keys = right.reshape(-1, self.workers, self.key_heads, self.slots)
        for b in range(self.workers):
            for j in range(self.slots):
                value = []
                for sign in (1, -1):
                    changed = keys.copy()
                    changed[:, b, :, j] += sign * step
                    self.s = changed.reshape(right.shape)
                    value.append(goal())
                ds[:, b, :, :, j] = (value[0] - value[1]) / (2 * step)
        self.s = right
        dbias = (
            self.stored("dbias", c, c["bias_times"] * ds, "bias_q", "bias_k")
            if self.geometry.bias
            else None
        )
        if self.sinks is None:
            self.kept.clear()
            ds = self.without_padding(ds)
            return Gradients(base, ds, ds, dbias)
        sinks, dsinks = self.sinks, np.zeros((self.workers, *self.sinks.shape))
        for h, number in np.ndindex(sinks.shape):
            value = []
            for sign in (1, -1):
                self.sinks = sinks.copy()
                self.sinks[h, number] += sign * step
                value.append(goal().sum(axis=(1, 2)))
            dsinks[:, h, number] = (value[0] - value[1]) / (2 * step)
        self.sinks = sinks
        self.kept.clear()
        return Gradients(base, ds, ds, dbias, dsinks)


def weights_of(s: Array, lse: Array) -> Array:
    """Return p = exp(s - lse); a row that saw no key in the forward pass has no p."""
    return np.where(np.isneginf(s) | np.isneginf(lse), 0.0, np.exp(s - lse))


def by_token(x: Array) -> Array:
    """Rearrange [c, a, b, h, i, j] to [(a, h, i), (b, c, j)], where c is a key head."""
    c, a, b, h, i, j = x.shape
    return x.transpose(1, 3, 4, 2, 0, 5).reshape(a * h * i, b * c * j)


def of_workers(x: Integers) -> Integers:
    """Rearrange [a, 1, h, i, 1] to [a, h, i]."""
    return x[:, 0, :, :, 0]


def chosen(number: Integers, names: Sequence[str], of: Mapping[str, Array]) -> Array:
    """Take each element from one of the arrays in ``of``; ``number`` selects the array's name from ``names``."""
    if number.size == 1:
        return of[names[int(number.flat[0])]]
    found = of["right"]
    for x in np.unique(number[number != 0]):
        found = np.where(number == x, of[names[x]], found)
    return np.asarray(found)


def where_changed(changed: Booleans, other: State, right: State) -> State:
    """Take each element from ``other`` where ``changed``, else from ``right``."""
    return (
        np.where(changed, other[0], right[0]),
        np.where(changed, other[1], right[1]),
        np.where(changed, other[2], right[2]),
    )


def maxima(m: Array, log_l: Array, last: Array, first: Array, scale: float) -> dict[str, Array]:
    """Return wrong values of lse by name; ``last`` and ``first`` are the maxima of a row's last and first blocks."""
    return {
        "log l": log_l, "log2 l": m + log_l / LN2, "last maximum": last + log_l, "first maximum": first + log_l,
        "twice the maximum": 2 * m + log_l, "scaled maximum": scale * m + log_l, "unscaled maximum": m / scale + log_l,
        "maximum minus log l": m - log_l,
    }  # fmt: skip


def empty_state(shape: tuple[int, ...], parts: int) -> State:
    """Return the state of the running softmax before any of its ``parts`` parts (blocks or tiles) is merged."""
    return np.full(shape, -np.inf), np.zeros(shape), np.zeros((parts, *shape))


def nothing_of(name: str, m: Array, l: Array, omega: Array) -> State:
    """Return the state of the running softmax with 'm', 'l' or 'o' set to 0."""
    return (
        np.zeros_like(m) if name == "m" else m,
        np.zeros_like(l) if name == "l" else l,
        np.zeros_like(omega) if name == "o" else omega,
    )


def log_sum(x: Array) -> Array:
    """Return the log-sum-exp along the last axis; -inf if all elements are -inf."""
    return np.asarray(np.logaddexp.reduce(x, axis=-1))


def nonzero(l: Array) -> Array:
    return np.where(l == 0, 1.0, l)


def log_of(m: Array, l: Array) -> Array:
    """Return m + log l; -inf where l is 0."""
    return np.where(l == 0, -np.inf, finite_shift(m) + np.log(np.abs(nonzero(l))))


def of_tokens(x: Array, rows: Integers) -> Array:
    """Return ``x`` [a, b, h, i, j] with other rows; ``rows`` [a, h, i] has the index of the row to take."""
    return (
        x.swapaxes(1, 2)
        .swapaxes(2, 3)
        .reshape(rows.size, x.shape[1], -1)[rows]
        .transpose(0, 3, 1, 2, 4)
    )


def of_rows(x: Array, rows: Integers) -> Array:
    """Reorder the rows (a, i) of [a, b, h, i, j]; ``rows`` has the numbers of the rows in their new order."""
    a, b, h, n, m = x.shape
    flat = x.transpose(0, 3, 1, 2, 4).reshape(a * n, b, h, m)[rows]
    return flat.reshape(a, n, b, h, m).transpose(0, 2, 3, 1, 4)


def placed(x: Array, workers: Integers, empty: float) -> Array:
    """Return what the workers hold after each has given ``x`` [a, ...] to one of ``workers``; ``empty`` without any."""
    there = np.full_like(x, empty)
    there[workers] = x
    return there
