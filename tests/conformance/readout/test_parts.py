"""Faults inside the blocks of a kernel that computes them in tiles and merges their o by their lse; and values in 16 bits."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from conformance.readout.tiled_ring import inputs_of, over_group

from ringspec.conformance.explain.read_problems import run_problem
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.faults.merge_formulas import LSES_MERGED, WEIGHTS
from ringspec.conformance.readout.faults.product_kinds import kept_tiles, overwritten_kinds
from ringspec.conformance.readout.faults.tile_rules import Tiling, rules_of_tiles
from ringspec.conformance.readout.problem.chosen import problem_of
from ringspec.conformance.readout.problem.geometry import Geometry, positions
from ringspec.conformance.readout.problem.settings import Setting
from ringspec.conformance.readout.search.rounding import Values, how_rounded, is_rounding
from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result

ROWS, KEYS = 3, 5  # of a tile; neither divides the 8 tokens of a worker


def narrow(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class Ring:
    """A causal, contiguous KV ring in float32: the o of blocks are merged by lse, and blocks are computed in tiles.

    ``stale``: lse has the maximum from before the last tile of keys. ``uncleared``: the m and l of a tile of queries
    stay for the next. ``first_head``: which head's lse is used. ``half``: delta over half of the dimension.
    ``mean``: delta is a mean. ``last_dq``: each tile of keys overwrites the dq of its block.
    ``rounded``: the results rounded to bfloat16.
    ``merge``: the merged lse as a function of the running one and of the block's, from which the weights are also taken.
    ``given``: the returned lse as a function of the row's maximum and sum.
    ``row_from``: queries are counted from the tile's first in the mask of the backward pass. ``dv_times``: a factor on dv.
    """

    name = "ring in tiles"
    capabilities = Capabilities(
        circulations=("kv",), directions=(1,), workers=(3,), head_ratios=(2,), only_causal=True, batch=(1,), layouts=("contiguous",)
    )  # fmt: skip

    def __init__(self, **faults):
        self.faults = faults

    def has(self, name):
        return self.faults.get(name, False)

    def tiles(self, n, masked):
        """Yield (first query, first key) of the tiles that are not wholly masked."""
        for row, key in itertools.product(range(0, n, ROWS), range(0, n, KEYS)):
            if not masked or key <= min(row + ROWS, n) - 1:
                yield row, key

    def scores(self, q, k, row, key, masked, counted_from=0):
        s = q[:, row : row + ROWS] @ k[:, key : key + KEYS].swapaxes(1, 2)
        i, j = (row - counted_from + np.arange(s.shape[1]))[:, None], key + np.arange(s.shape[2])
        return np.where(j > i, -np.inf, s).astype(np.float32) if masked else s

    def block(self, q, k, v, masked):
        H, n, _ = q.shape
        o, lse = np.zeros((H, n, v.shape[2]), np.float32), np.zeros((H, n), np.float32)
        m, l = np.full((H, ROWS), -np.inf, np.float32), np.zeros((H, ROWS), np.float32)
        for row in range(0, n, ROWS):
            size = min(ROWS, n - row)
            m, l = m[:, :size], l[:, :size]
            if not self.has("uncleared"):
                m, l = np.full_like(m, -np.inf), np.zeros_like(l)
            acc, old = np.zeros((H, size, v.shape[2]), np.float32), m
            for _, key in (tile for tile in self.tiles(n, masked) if tile[0] == row):
                s = self.scores(q, k, row, key, masked)
                old, m = m, np.maximum(m, s.max(axis=2))
                p, c = np.exp(s - m[..., None]), np.exp(old - m)
                l = c * l + p.sum(axis=2)
                acc = c[..., None] * acc + p @ v[:, key : key + KEYS]
            o[:, row : row + size] = acc / l[..., None]
            top = np.where(np.isneginf(old), m, old) if self.has("stale") else m
            lse[:, row : row + size] = top + np.log(l)
        return o, lse

    def run(self, call):
        W = call.workers
        scale, group, (q, k, v, dy) = inputs_of(call)
        o, lse = [], []
        for r in range(W):
            each = [self.block(q[r], k[b], v[b], b == r) for b in range(r + 1)]
            first = np.arange(len(q[r])) // group * group if self.has("first_head") else slice(None)
            of_block = np.stack([one[1][first] for one in each])
            top = of_block.max(axis=0)
            lse.append(top + np.log(np.exp(of_block - top).sum(axis=0)))
            o.append(
                sum(
                    np.exp(x - lse[r])[..., None] * one[0]
                    for x, one in zip(of_block, each, strict=True)
                )
            )
            if self.has("merge"):
                o[r], lse[r] = each[r]
                for o_b, lse_b in each[:r][::-1]:  # in the order of the steps
                    new = self.faults["merge"](lse[r], lse_b)
                    o[r] = (
                        np.exp(lse[r] - new)[..., None] * o[r]
                        + np.exp(lse_b - new)[..., None] * o_b
                    )
                    lse[r] = new
            if self.has("given"):
                n = q[r].shape[1]
                visible = np.tri(n, (r + 1) * n, r * n, dtype=bool)
                s = np.where(visible, q[r] @ np.concatenate(k[: r + 1], 1).swapaxes(1, 2), -np.inf)
                top = s.max(axis=2)
                lse[r] = self.faults["given"](top, np.exp(s - top[..., None]).sum(axis=2)).astype(
                    np.float32
                )
        if "o" in self.faults.get("rounded", ()):
            o = [narrow(x) for x in o]
        found = self.backward(q, k, v, dy, o, lse)
        for name in set(self.faults.get("rounded", ())) & {"dk", "dv"}:
            found[name] = [narrow(x) for x in found[name]]
        for name in ("dk", "dv"):
            found[name] = [over_group(x, group) for x in found[name]]
        found["dq"] = [scale * x for x in found["dq"]]
        found["dv"] = [np.float32(self.faults.get("dv_times", 1)) * x for x in found["dv"]]
        results = {"o": o, "lse": lse, **found}
        return Result(**{name: [x[None] for x in shards] for name, shards in results.items()})

    def backward(self, q, k, v, dy, o, lse):
        n = q[0].shape[1]
        found = {
            name: [np.zeros_like(x) for x in y] for name, y in (("dq", q), ("dk", k), ("dv", v))
        }
        for r, b in itertools.product(range(len(q)), repeat=2):
            if b > r:
                continue
            of_delta = narrow(o[r]) if "o in delta" in self.faults.get("rounded", ()) else o[r]
            part = of_delta * dy[r]
            delta = part[..., : part.shape[2] // 2 if self.has("half") else None].sum(axis=2)
            delta = delta / np.float32(part.shape[2]) if self.has("mean") else delta
            delta = narrow(delta) if "delta" in self.faults.get("rounded", ()) else delta
            dq = np.zeros_like(q[r])
            for row, key in self.tiles(n, b == r):
                rows, keys = slice(row, row + ROWS), slice(key, key + KEYS)
                whole = key + KEYS - 1 <= row or b != r
                s = self.scores(q[r], k[b], row, key, not whole, row if self.has("row_from") else 0)
                p = np.exp(s - lse[r][:, rows, None])
                ds = p * (dy[r][:, rows] @ v[b][:, keys].swapaxes(1, 2) - delta[:, rows, None])
                dq[:, rows] = ds @ k[b][:, keys] + (0 if self.has("last_dq") else dq[:, rows])
                found["dk"][b][:, keys] += ds.swapaxes(1, 2) @ q[r][:, rows]
                found["dv"][b][:, keys] += p.swapaxes(1, 2) @ dy[r][:, rows]
            found["dq"][r] += dq
        return found


def kinds_read(**faults):
    """Return the kinds of all faults that are read from one problem; each set of them explains everything."""
    ring = Ring(**faults)
    reading = run_problem(
        ring, problem_of(Setting("causal", "contiguous"), ring.capabilities)
    ).reading
    if reading.right:
        return []
    assert reading.explained, reading
    return [[fault.kind for one in part.sets for fault in one] for part in reading.passes]


def test_a_right_kernel_in_tiles_is_right():
    assert kinds_read() == []


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"stale": True}, f"the new block's lse has the maximum from before its last tile of {KEYS} keys, in tiles of {ROWS} queries"),
        ({"uncleared": True}, f"m and l are not cleared between tiles of {ROWS} queries within a block"),
        ({"first_head": True}, "the new block's lse is that of the first query head of each key head"),
        ({"half": True}, "delta is summed over only the first half of the head dimension"),
        ({"last_dq": True}, f"of dq, each block keeps only the shares of its last tile of {KEYS} keys, in tiles of {ROWS} queries"),
        ({"rounded": ("o",)}, "o is rounded to bfloat16"),
        ({"rounded": ("delta",)}, "delta, or the o from which it is computed, is rounded to bfloat16"),
        ({"rounded": ("o in delta",)}, "delta, or the o from which it is computed, is rounded to bfloat16"),
    ],
)  # fmt: skip
def test_a_fault_inside_the_blocks_is_read(faults, said):
    assert any(said in kinds for kinds in kinds_read(**faults))


def test_a_small_delta_is_not_taken_for_one_that_is_left_out_and_rounded():
    """A tolerance with room for rounding does not tell a small delta from none; the usual one does."""
    kinds = sum(kinds_read(mean=True), [])
    assert "delta is a mean over the head dimension, not a sum" in kinds
    assert not any(map(is_rounding, kinds))


def test_of_tiles_with_the_same_results_one_for_all_queries_of_a_block_is_told_first():
    geometry = Geometry(
        3, "kv", 1, "contiguous", positions("contiguous", 3, 8), True, None, 4, 2, 0.3
    )
    kinds = overwritten_kinds(geometry, masks_of(geometry)[0].pattern, True)
    first = "of dq, each block keeps only the shares of its last tile of 6 keys"
    of_dq = [one for one in kinds if one.words.startswith(first)]
    (right,) = (one for one in of_dq if one.words == f"{first}, in tiles of 8 queries")
    alike = [one for one in of_dq if np.array_equal(one.changes[0][1], right.changes[0][1])]
    assert [one.words for one in alike] == [right.words, f"{first}, in tiles of 7 queries"]


MERGED = {
    "the larger of the two + log(1 + exp(lse_block - lse_old)), not log": lambda x, y: np.maximum(x, y) + np.log1p(np.exp(y - x)),
    "the smaller of the two, not": np.minimum,
    "the logarithm of the mean": lambda x, y: np.log((np.exp(x) + np.exp(y)) / 2),
    "lse_block + log(1 + exp(-abs(": lambda x, y: y + np.log1p(np.exp(-np.abs(x - y))),
}  # fmt: skip
GIVEN = {
    "the maximum in lse is in base 2 (not multiplied by ln 2)": lambda m, l: m / np.log(2) + np.log(l),
    "the log l in lse is multiplied by ln 2": lambda m, l: m + np.log(2) * np.log(l),
}  # fmt: skip


@pytest.mark.parametrize("words", MERGED)
def test_a_wrong_formula_of_the_merged_lse_is_read(words):
    forward, *_ = kinds_read(merge=MERGED[words])
    assert any(x.startswith(f"lse becomes {words}") and "relative to it" in x for x in forward)


@pytest.mark.parametrize("words", GIVEN)
def test_a_returned_lse_with_a_part_in_the_wrong_base_is_read(words):
    forward, *_ = kinds_read(given=GIVEN[words])
    assert any(x.startswith(words) for x in forward)


def test_each_wrong_formula_of_a_merge_differs_from_the_others():
    x, y = np.random.default_rng(3).normal(size=(2, 40))
    right = np.log(np.exp(x) + np.exp(y))
    lses = {name: formula(x, y) for name, (_, formula) in LSES_MERGED.items()}
    weights = {name: np.stack(formula(x, y, right)) for name, (_, formula) in WEIGHTS.items()}
    for found, correct in ((lses, right), (weights, np.exp(np.stack([x, y]) - right))):
        for one, other in itertools.combinations([("right", correct), *found.items()], 2):
            assert not np.allclose(one[1], other[1], rtol=0, atol=1e-5), (one[0], other[0])


def test_a_rounded_tensor_does_not_hide_another_fault():
    forward, backward = kinds_read(stale=True, rounded=("dk",), dv_times=2)
    assert any(kind.startswith("the new block's lse has the maximum") for kind in forward)
    assert (
        "dv is too large by a factor of 2" in backward and "dk is rounded to bfloat16" in backward
    )


def test_only_differences_that_look_like_rounding_are_told_as_rounding():
    random = np.random.default_rng(0)
    x = np.exp(random.normal(size=400))
    every = np.ones(x.shape, bool)

    def told(seen):
        return how_rounded(Values(seen, x, every), "", "p", {})

    rounded = x.astype(ml_dtypes.bfloat16).astype(float)
    assert told(rounded) == "p is rounded to bfloat16"
    assert told(x.astype(np.float16).astype(float)) == "p is rounded to float16"
    assert (
        told(x * (1 + random.uniform(-1, 1, x.shape) / 400))
        == "p is only about as precise as bfloat16"
    )
    assert is_rounding(told(rounded)) and not is_rounding("dk is negated")
    assert told(1.002 * x) is None  # a factor
    assert told(x**1.001) is None  # a scale
    assert told(x + random.normal(size=x.shape)) is None
    assert how_rounded(Values(rounded[:5], x[:5], every[:5]), "", "p", {}) is None


@pytest.mark.parametrize(("rows", "keys"), [(3, 2), (5, 3), (7, 5)])
def test_rules_about_tiles_show_what_loops_over_tiles_show(rows, keys):
    n = 8
    right = np.tri(n, dtype=bool)[None, None, None]
    rules = {words: pattern[0, 0, 0] for words, pattern, _ in rules_of_tiles(right, n, True)}
    tile = f"tiles of {rows} queries and {keys} keys"
    counted, skipped = np.zeros((n, n), bool), np.zeros((n, n), bool)
    for row, key in itertools.product(range(0, n, rows), range(0, n, keys)):
        last_row, last_key = min(row + rows, n) - 1, min(key + keys, n) - 1
        for i, j in itertools.product(range(row, last_row + 1), range(key, last_key + 1)):
            if key <= last_row:  # the tile is computed
                in_part = last_key > row
                counted[i, j] = j <= i - row if in_part else True
                skipped[i, j] = j <= i and key <= row
    assert np.array_equal(
        rules[f"{tile} that are masked in part count queries from the tile's first"], counted
    )
    assert np.array_equal(
        rules[f"{tile} whose first query does not see their first key are skipped"], skipped
    )


def test_the_last_and_first_tiles_of_a_block_are_those_that_loops_find():
    n, rows, keys = 8, 3, 5
    visible = np.tri(n, k=-1, dtype=bool)[None, None, None]
    last, first = kept_tiles(Tiling(n, n, rows, keys), visible, "keys")
    for i in range(n):
        row = i - i % rows
        computed = [
            key
            for key in range(0, n, keys)
            if visible[0, 0, 0, row : row + rows, key : key + keys].any()
        ]
        for found, at in ((last, computed[-1:]), (first, computed[:1])):
            expected = np.isin(np.arange(n) // keys * keys, at)
            assert np.array_equal(found[0, 0, 0, i], expected)


def test_a_striped_window_that_counts_within_the_visible_part_of_a_block_is_known():
    W, n, left = 3, 8, 4
    geometry = Geometry(
        W, "kv", 1, "striped", positions("striped", W, n), True, (left, None), 4, 2, 0.5
    )
    words = "the window counts queries and keys within the visible part of a block"
    (mask,) = (one for one in masks_of(geometry) if one.words == words)
    for a, b in itertools.product(range(W), repeat=2):
        first = 1 if b > a else 0  # query 0 sees no key of a later worker
        expected = np.zeros((n, n), bool)
        for i, j in itertools.product(range(n - first), repeat=2):
            expected[first + i, j] = 0 <= i - j <= left
        np.testing.assert_array_equal(mask.pattern[a, b, 0], expected)


def test_a_window_that_counts_within_pairs_of_workers_is_known():
    W, n, left = 4, 6, 3
    geometry = Geometry(
        W, "kv", 1, "contiguous", positions("contiguous", W, n), True, (left, None), 4, 2, 0.5
    )
    words = "the window counts tokens within pairs of workers (0 and 1, 2 and 3)"
    (mask,) = (one for one in masks_of(geometry) if one.words == words)
    pairs = np.broadcast_to(mask.pattern, (W, W, 1, n, n))
    for query, key in itertools.product(range(W * n), repeat=2):
        seen = key <= query and query % (2 * n) - key % (2 * n) <= left
        assert pairs[query // n, key // n, 0, query % n, key % n] == seen
