"""A ring over matrices of pairs, in which every choice that a kernel makes is data (``choices``).

The right choice everywhere gives softmax attention and its gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ringspec.conformance.readout.choices import (
    DELTAS,
    FINISHES,
    HEAD_MAPS,
    LSES,
    LSES_GIVEN,
    Choices,
    right_choices,
)
from ringspec.conformance.readout.merges import AT_FIRST, LN2, MERGES, State, merge
from ringspec.conformance.readout.pairs import Pairs
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.spec.online_softmax import finite_shift


@dataclass(frozen=True)
class Forward:
    """``weights`` [a, b, h, i, j], as they are stored, ``lse`` [a, h, i]; of each block its lse and normalised p.

    ``maximum``, ``last``, ``first`` [a, h, i]: the row maximum, the lse of the last and of the first block that a row sees;
    ``running`` [a, b, h, i]: lse after each block. ``through`` [a, h, i, x]: the columns of o that hold products with G.
    """

    weights: Array
    lse: Array
    block_lse: Array
    block_p: Array
    maximum: Array
    last: Array
    first: Array
    running: Array
    through: Array


class Model:
    """The model of one problem.

    ``masks``: the patterns [a, b, 1, i, j] that choices number, the correct one first; ``tokens``: the orders of tokens
    that they number (:func:`ringspec.conformance.readout.geometry.dealt_otherwise`).
    """

    def __init__(self, pairs: Pairs, masks: Sequence[Booleans], tokens: Sequence[Integers]) -> None:
        self.pairs, self.masks = pairs, np.stack(masks)
        geometry = pairs.geometry
        self.workers, self.heads, self.group = geometry.workers, geometry.heads, geometry.group
        self.order = np.argsort(geometry.steps("forward"), axis=1)
        self.rows = np.arange(self.workers)
        self.blocks = np.indices((self.workers, self.workers))[..., None]
        self.each_head = np.arange(self.heads)
        self.kept: dict[tuple[str, int], Array] = {}
        self.slot_maps = slot_maps(geometry.slots)
        self.token_maps = list(tokens)

    @cached_property
    def right(self) -> Choices:
        return right_choices(self.workers)

    def head_map(self, kind: int) -> Integers:
        """The key head that each query head reads."""
        h, kv = self.each_head, self.heads // self.group
        maps = {
            "right": h // self.group, "modulo": h % kv, "first": 0 * h, "own number": np.minimum(h, kv - 1),
            "last reads first": np.where(h == h.max(), 0, h // self.group),
        }  # fmt: skip
        return maps[HEAD_MAPS[kind]]

    def of_heads(self, name: str, kind: int) -> Array:
        """S or G [a, b, h, i, j] under a map of heads."""
        if (name, kind) not in self.kept:
            x = getattr(self.pairs, name)
            heads = self.head_map(kind)
            self.kept[name, kind] = np.stack(
                [x[heads[h], :, :, h] for h in range(self.heads)], axis=2
            )
        return self.kept[name, kind]

    def scores(self, c: Choices) -> Array:
        """s where a pair is computed and visible, else -inf."""
        s = self.of_heads("s", c.map_of_heads)[c.q, c.k, self.each_head]
        s = self.permuted(self.permuted(s, c.q_slots, 3), c.k_slots, 4)
        s = np.where(self.shown(c.mask), c.times * s, c.hidden_score)
        return np.where(c.count != 0, s, -np.inf)

    def for_values(self, c: Choices, p: Array, m: Array, l: Array) -> Array:
        """p as the product with v, or with dy, gets it: under another mask where ``value_mask`` says so."""
        if (c.value_mask < 0).all():
            return p
        free = self.scores(
            dataclasses.replace(c, mask=np.where(c.value_mask < 0, c.mask, c.value_mask))
        )
        return np.exp(free - finite_shift(m)[..., None]) * c.count / nonzero(l)[..., None]

    def permuted(self, x: Array, slots: Integers, axis: int) -> Array:
        """Rows (axis 3) or columns (4) taken from other slots of the same block, where ``slots`` says which map."""
        for number in np.unique(slots[slots != 0]):
            x = np.where(slots == number, np.take(x, self.slot_maps[number], axis=axis), x)
        return x

    def shown(self, mask: Integers) -> Booleans:
        """The patterns that ``mask`` numbers."""
        numbers = np.unique(mask)
        pattern = self.masks[numbers[0]]
        for number in numbers[1:]:
            pattern = np.where(mask == number, self.masks[number], pattern)
        return pattern

    def forward(self, c: Choices) -> Forward:
        s = self.scores(c)
        m = s.max(axis=4)
        e = np.exp(s - finite_shift(m)[..., None]) * c.count
        l = e.sum(axis=4)
        p = e / nonzero(l)[..., None]
        block_lse = log_of(m, l)
        p_of_v = self.for_values(c, p, m, l)
        omega, run_m, run_l, last_l, running = self.merged(m, l, block_lse, c)
        total = nonzero(run_l)
        if c.finish.any():
            early = self.merged(m, l, block_lse, c, self.workers - 1)
            totals = {
                "right": total, "not divided": np.ones_like(total), "divided twice": total**2,
                "divided by the last block's l": last_l, "before the last merge": nonzero(early[2]),
            }  # fmt: skip
            kind = c.finish[:, None, None]
            total = chosen(kind, FINISHES, totals)
            omega = np.where(kind == FINISHES.index("before the last merge"), early[0], omega)
        weight = np.zeros(s.shape[:4])
        for t in range(self.workers):
            weight[self.rows, self.order[:, t]] = omega[t] / total
        weights = weight[..., None] * p_of_v * c.o_times[:, None, None, None, None]
        weights = self.scattered(weights, c.v_slots, 4)
        if not np.array_equal(c.v, self.right.v):
            weights = moved(weights, self.right.q, c.v)
        last, first = self.ends(block_lse)
        last_m, _ = self.ends(m)
        lse = self.lse_out(c, log_of(run_m, run_l), run_m, run_l, last, first, last_m)
        if c.put_back[0] == "o":
            weights = of_rows(weights, np.argsort(self.token_maps[c.put_back[1]]))
        if not np.array_equal(c.o_to, self.right.o_to):
            stored, stored_lse = np.zeros_like(weights), np.full_like(lse, np.nan)
            stored[c.o_to], stored_lse[c.o_to] = weights, lse
            weights, lse = stored, stored_lse
        return Forward(
            weights, lse, block_lse, p, run_m, last, first, running, self.through(c, weights)
        )

    def through(self, c: Choices, weights: Array) -> Array:
        """[a, h, i, (g, x, y)]: the weights times the G of query y of worker x in head g, which tells the head of v."""
        g = self.pairs.g[self.head_map(c.map_of_values)]  # [h, x, b, g, y, j]
        a, b, h, n, m = weights.shape
        flat = weights.transpose(2, 0, 3, 1, 4).reshape(h, a * n, b * m)
        values = g.transpose(0, 3, 1, 4, 2, 5).reshape(h, -1, b * m)
        return (flat @ values.swapaxes(1, 2)).reshape(h, a, n, -1).transpose(1, 0, 2, 3)

    def scattered(self, x: Array, slots: Integers, axis: int) -> Array:
        """Rows (axis 3) or columns (4) added at other slots of the same block."""
        for number in np.unique(slots[slots != 0]):
            place = np.eye(x.shape[axis])[self.slot_maps[number]]
            there = x @ place if axis == 4 else (x.swapaxes(3, 4) @ place).swapaxes(3, 4)
            x = np.where(slots == number, there, x)
        return x

    def ends(self, of_block: Array) -> tuple[Array, Array]:
        """[a, h, i]: of the last and of the first block that a row sees, -inf where it sees none."""
        last = np.full(of_block[:, 0].shape, -np.inf)
        first = last.copy()
        for t in range(self.workers):
            here = of_block[self.rows, self.order[:, t]]
            seen = ~np.isneginf(here)
            first = np.where(np.isneginf(first) & seen, here, first)
            last = np.where(seen, here, last)
        return last, first

    def lse_out(
        self, c: Choices, lse: Array, m: Array, l: Array, last: Array, first: Array, last_m: Array
    ) -> Array:
        if not c.lse_out.any():
            return lse
        log_l = np.log(nonzero(l))
        of = {
            "right": lse, "maximum": m, "log l": log_l, "base 2": lse / LN2, "last block": last, "first block": first,
            "log2 l": m + log_l / LN2, "read token first": by_token(lse), "written token first": of_token(lse),
            "base 2 twice": lse / LN2 / LN2, "times ln 2": lse * LN2, "negative": -lse,
            "last maximum": last_m + log_l, "first of group": self.of_other_heads(lse)[0],
        }  # fmt: skip
        return chosen(c.lse_out[:, None, None], LSES_GIVEN, of)

    def merged(
        self, m: Array, l: Array, block_lse: Array, c: Choices, steps: int = 0
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Weights [step, a, h, i] of the blocks' normalised results, running m and l, l of the last block, running lse."""
        run_m = np.full(m[:, 0].shape, 0.0 if c.started else -np.inf)
        run_l = np.full(run_m.shape, float(c.started))
        omega = np.zeros((self.workers, *run_m.shape))
        last_l, running = np.ones_like(run_l), np.full(m.shape, -np.inf)
        wrong = bool(c.merge.any())
        back = -self.pairs.geometry.direction
        for t in range(steps or self.workers):
            b = self.order[:, t]
            m_b, l_b = m[self.rows, b], l[self.rows, b]
            here, fresh = l_b != 0, run_l == 0
            new = merge("right", run_m, run_l, omega, m_b, l_b, t)
            if wrong:
                kinds = c.merge[self.rows, b]
                joins = here | c.hidden_merge
                for kind in np.unique(kinds[kinds != 0]):
                    other = merge(MERGES[kind], run_m, run_l, omega, m_b, l_b, t)
                    changed = (kinds == kind) & joins
                    if MERGES[kind] not in AT_FIRST:
                        changed = changed & (t > 0) & (~fresh | c.hidden_merge)
                    new = where_changed(changed, other, new)
                run_m, run_l = (
                    np.where(joins, x, y) for x, y in zip(new[:2], (run_m, run_l), strict=True)
                )
                omega = np.where(joins, new[2], omega)
            else:
                run_m, run_l, omega = new
            if "n" in c.stays:
                run_m, omega, run_l = (
                    log_of(run_m, run_l),
                    omega / nonzero(run_l),
                    (run_l != 0).astype(float),
                )
                run_m = np.roll(run_m, back, axis=0)
            if "l" in c.stays:
                run_l = np.roll(run_l, back, axis=0)
            if "m" in c.stays:
                run_m = np.roll(run_m, back, axis=0)
            if "o" in c.stays:
                omega = np.roll(omega, back, axis=1)
            last_l = np.where(here, l_b, last_l)
            running[self.rows, b] = log_of(run_m, run_l)
        return omega, run_m, run_l, last_l, running

    def backward(
        self, c: Choices, forward: Forward, lse: Array, delta: Array
    ) -> tuple[Array, Array, Array]:
        """P, dS as dq saw it and as dk saw it, from what the forward saved: ``lse``, ``delta`` [a, h, i]."""
        s, g = (
            self.scores(c),
            self.of_heads("g", c.map_of_values)[c.dy, c.v, self.each_head],
        )
        g = self.permuted(self.permuted(g, c.dy_slots, 3), c.v_slots, 4)
        if c.dy_ones:
            g, delta = self.summed(forward)
        if c.dy_tokens:
            rows = self.token_maps[c.dy_tokens]
            g = of_rows(g, rows)
            delta = (forward.weights * of_rows(self.of_heads("g", 0), rows)).sum(axis=(1, 4))
        used = self.row_lse(c, s, forward, lse)
        with np.errstate(over="ignore", invalid="ignore"):
            p = np.exp(s - used[..., None])
            p = np.where(np.isneginf(s), 0.0, p)
            d = c.delta_times * self.row_delta(c, p, g, forward, delta)
            p = p * c.count
            ds = c.ds_times * p * (g - d[..., None])
        of_dv, of_dk = p, ds
        if (c.value_mask >= 0).any():
            of_dv = self.for_values(c, p, used, np.ones_like(used))
        if c.dy_tokens:
            of_dv = of_rows(p, np.argsort(rows))
        if c.turned & 1:
            of_dk = of_dk.swapaxes(3, 4)
        if c.turned & 2:
            of_dv = of_dv.swapaxes(3, 4)
        if c.dy_ones:
            columns = of_dv.sum(axis=(0, 3), keepdims=True)
            columns = columns.reshape(1, self.workers, -1, self.group, 1, columns.shape[4]).sum(
                axis=3, keepdims=True
            )
            shape = (1, self.workers, columns.shape[2], self.group, 1, columns.shape[5])
            columns = np.broadcast_to(columns, shape).reshape(1, self.workers, self.heads, 1, -1)
            of_dv = np.broadcast_to(columns, p.shape)
        return (
            self.back(
                "dv",
                c,
                self.placed(
                    of_dv,
                    c.dv_count,
                    moved_by(c.dy, c.dv_dy, self.right.q),
                    c.dv_to,
                    c.dy_slots,
                    c.dv_slots,
                ),
            ),
            self.back(
                "dq",
                c,
                self.placed(
                    ds,
                    c.dq_count,
                    c.dq_to,
                    moved_by(c.k, c.dq_k, self.right.k),
                    c.dq_slots,
                    c.k_slots,
                ),
            ),
            self.back(
                "dk",
                c,
                self.placed(
                    of_dk,
                    c.dk_count,
                    moved_by(c.q, c.dk_q, self.right.q),
                    c.dk_to,
                    c.q_slots,
                    c.dk_slots,
                ),
            ),
        )

    def back(self, name: str, c: Choices, x: Array) -> Array:
        """A gradient whose tokens are put back into their order by another layout."""
        if c.put_back[0] != name:
            return x
        rows = np.argsort(self.token_maps[c.put_back[1]])
        if name == "dq":
            return of_rows(x, rows)
        return of_rows(x.transpose(1, 0, 2, 4, 3), rows).transpose(1, 0, 2, 4, 3)

    def summed(self, forward: Forward) -> tuple[Array, Array]:
        """<1, v> [a, b, h, i, j] and <1, o> [a, h, i]: what dy of ones makes of G and delta."""
        every = self.pairs.g.sum(axis=(1, 3, 4))  # [c, b, j]
        heads = self.head_map(0)
        g = 1.0 + np.broadcast_to(
            every[heads].transpose(1, 0, 2)[None, :, :, None, :], forward.weights.shape
        )
        return g, (forward.weights * g).sum(axis=(1, 4))

    def row_lse(self, c: Choices, s: Array, forward: Forward, lse: Array) -> Array:
        """Row constants [a, b, h, i]."""
        saved = lse[c.lse_of, self.each_head]
        if not c.lse.any():
            return saved
        m = s.max(axis=4)
        local = log_of(m, np.exp(s - finite_shift(m)[..., None]).sum(axis=4))
        top, last, first, turned, written, of_group, next_head, group_first, halves = (
            x[c.lse_of, self.each_head]
            for x in (
                forward.maximum,
                forward.last,
                forward.first,
                by_token(lse),
                of_token(lse),
                *self.of_other_heads(lse),
            )
        )
        of = {
            "right": saved, "block": local, "base 2": saved / LN2, "times ln 2": saved * LN2, "maximum": top,
            "zero": np.zeros_like(saved), "log l": saved - top, "last block": last, "read token first": turned,
            "written token first": written, "first block": first, "so far": forward.running,
            "first of group": of_group, "next head": next_head, "group first": group_first,
            "halves exchanged": halves,
        }  # fmt: skip
        return chosen(c.lse, LSES, of)

    def row_delta(self, c: Choices, p: Array, g: Array, forward: Forward, delta: Array) -> Array:
        """Row constants [a, b, h, i]."""
        saved = delta[c.delta_of, self.each_head]
        if not c.delta.any():
            return saved
        local, mass = (p * g).sum(axis=4), p.sum(axis=4)
        of_block = (forward.block_p * g).sum(axis=4)
        last, first = self.ends(np.where(np.isneginf(forward.block_lse), -np.inf, of_block))
        first, last, turned, written, of_group, next_head, group_first, halves = (
            x[c.delta_of, self.each_head]
            for x in (first, last, by_token(delta), of_token(delta), *self.of_other_heads(delta))
        )
        of = {
            "right": saved, "block": local, "none": np.zeros_like(saved), "block's own p": local / nonzero(mass),
            "times p": saved * mass, "first block": first, "last block": last, "read token first": turned,
            "written token first": written, "block's own o": of_block, "first of group": of_group,
            "next head": next_head, "used dy": self.of_used_dy(c, forward), "group first": group_first,
            "halves exchanged": halves,
        }  # fmt: skip
        return chosen(c.delta, DELTAS, of)

    def of_other_heads(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """[a, h, i]: of the first query head of each group; of the next head; of another order of heads; of other rows."""
        h, group = self.each_head, self.group
        order = h % group * (self.heads // group) + h // group
        return (
            x[:, h // group * group],
            np.roll(x, -1, axis=1),
            x[:, order],
            x[:, :, self.slot_maps[1]],
        )

    def of_used_dy(self, c: Choices, forward: Forward) -> Array:
        """[a, b, h, i]: <dy, o> of the dy that the block uses and the o of ``delta_of``."""
        weights, g = forward.weights, self.of_heads("g", 0)
        found = np.empty((self.workers, self.workers, *weights.shape[2:4]))
        for a in range(self.workers):
            for other in range(self.workers):
                found[a, other] = (weights[a] * g[other]).sum(axis=(0, 3))
        return found[c.delta_of, c.dy, self.each_head]

    def placed(
        self,
        x: Array,
        count: Array,
        a_to: Integers,
        b_to: Integers,
        rows: Integers,
        columns: Integers,
    ) -> Array:
        """Shares where they are stored: block [a, b] goes to [a_to, b_to], its rows and columns to other slots."""
        x = self.scattered(self.scattered(count * x, rows, 3), columns, 4)
        if np.array_equal(a_to, self.right.q) and np.array_equal(b_to, self.right.k):
            return x
        return moved(x, a_to, b_to)

    def gradient_of_forward(self, c: Choices) -> tuple[Array, Array, Array]:
        """P, dS, dS of the derivative of the forward with these choices, by central differences of the scores."""
        kind = c.map_of_heads
        base, s = self.forward(c).weights, self.of_heads("s", kind)
        g = self.of_heads("g", kind)
        ds, step = np.zeros_like(base), 1e-5
        for b in range(self.workers):
            for j in range(s.shape[4]):
                value = []
                for sign in (1, -1):
                    changed = s.copy()
                    changed[:, b, :, :, j] += sign * step
                    self.kept["s", kind] = changed
                    value.append((self.forward(c).weights * g).sum(axis=(1, 4)))
                ds[:, b, :, :, j] = (value[0] - value[1]) / (2 * step)
        self.kept["s", kind] = s
        return base, ds, ds


def chosen(number: Integers, names: Sequence[str], of: Mapping[str, Array]) -> Array:
    """For each element, its value in the array that ``number`` names."""
    return np.select([number == x for x in range(len(names))], [of[name] for name in names])


def where_changed(changed: Booleans, other: State, right: State) -> State:
    """``other`` where ``changed``, else ``right``."""
    return (
        np.where(changed, other[0], right[0]),
        np.where(changed, other[1], right[1]),
        np.where(changed, other[2], right[2]),
    )


def nonzero(l: Array) -> Array:
    return np.where(l == 0, 1.0, l)


def log_of(m: Array, l: Array) -> Array:
    """m + log l, -inf where l is 0."""
    return np.where(l == 0, -np.inf, finite_shift(m) + np.log(np.abs(nonzero(l))))


def by_token(x: Array) -> Array:
    """[a, h, i] whose memory is read as [a, i, h]."""
    a, h, n = x.shape
    return x.reshape(a, n, h).swapaxes(1, 2)


def of_token(x: Array) -> Array:
    """[a, h, i] that was written as [a, i, h]."""
    return x.swapaxes(1, 2).reshape(x.shape)


def moved_by(source: Integers, last: Integers, right: Integers) -> Integers:
    """Whose block the last product uses: that of ``last`` where it is not the correct one, else ``source``."""
    return np.where(last == right, source, last)


def of_rows(x: Array, rows: Integers) -> Array:
    """[a, b, h, i, j] with rows (a, i) taken from others, counted over all workers."""
    a, b, h, n, m = x.shape
    flat = x.transpose(0, 3, 1, 2, 4).reshape(a * n, b, h, m)[rows]
    return flat.reshape(a, n, b, h, m).transpose(0, 2, 3, 1, 4)


def moved(x: Array, a_to: Integers, b_to: Integers) -> Array:
    """Blocks [a, b] added up at [a_to, b_to], head by head."""
    result = np.zeros_like(x)
    np.add.at(result, (a_to, b_to, np.arange(x.shape[2])), x)
    return result


def slot_maps(n: int) -> Integers:
    """[map, slot]: the slot that stands for each slot of a block, in the order of SLOT_MAPS."""
    i, half = np.arange(n), max(n // 2, 1)
    return np.array(
        [
            i,
            (i + half) % n,
            i % half,
            half + i % half if n > 1 else i,
            (i + 1) % n,
            (i - 1) % n,
            i[::-1],
        ]
    )
