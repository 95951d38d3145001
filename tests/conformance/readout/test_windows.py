"""Windows that rings pass to each block unchanged, as public rings do, planted in a ring that shares no code with the readouts.

It computes the visible part of each block as flash-attn does: a window is counted within the part, with the last query
at the place of the last key; a row without a visible key gets o = 0 and lse = +infinity.
"""

import dataclasses

import numpy as np
import pytest
from conformance.readout.tiled_ring import TiledRing

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.targets.reference import REFERENCES

pytestmark = pytest.mark.usefixtures("no_catalogue")

INFINITE = (
    "In the forward pass, where a row sees no key of the new block, the merge gets +infinity as the "
    "block's lse (o becomes 0)."
)
GRADIENT = "The backward pass is the gradient of this wrong forward pass."


def held(ring, members, tokens):
    """Return the tokens of each member of a ring with the layout ``ring``."""
    size = tokens // members
    if ring == "contiguous":
        return [list(range(r * size, (r + 1) * size)) for r in range(members)]
    if ring == "striped":
        return [list(range(r, tokens, members)) for r in range(members)]
    if ring == "every other quarter":
        quarter = tokens // 4
        first = [list(range(x * quarter, (x + 1) * quarter)) for x in range(4)]
        return [first[0] + first[2], first[1] + first[3]]
    half = size // 2
    chunks = [list(range(x * half, (x + 1) * half)) for x in range(2 * members)]
    return [chunks[r] + chunks[2 * members - 1 - r] for r in range(members)]


class WindowOfBlocks:
    """A ring of ``members`` with the layout ``ring``, whose tokens a call distributes under ``layout`` over W workers.

    ``end``: whether the last query of a part is at the place of its last key, or the first at that of the first.
    """

    def __init__(self, ring, members, workers, layout, end=True, causal=True, infinite=True):
        self.ring, self.members, self.end, self.infinite = ring, members, end, infinite
        self.name = f"{ring} ring with windows of blocks"
        self.capabilities = Capabilities(
            circulations=("kv",), directions=(1,), workers=(workers,), head_ratios=(2,), masks=("causal", "window"),
            only_causal=causal, batch=(1,), layouts=(layout,), features=(), lse="natural",
        )  # fmt: skip

    def parts(self, r, b, n, causal):
        """Return the queries and keys of the part of a block that is computed, and whether it has a causal mask."""
        if not causal:
            return range(n), range(n), False
        if self.ring == "striped":
            return (range(1, n), range(n - 1), True) if b > r else (range(n), range(n), True)
        if b == r:
            return range(n), range(n), True
        if self.ring == "zigzag":
            return (
                (range(n), range(n // 2), False) if b < r else (range(n // 2, n), range(n), False)
            )
        return range(n if b < r else 0), range(n), False

    def visible(self, queries, keys, causal, window):
        shown = np.zeros((len(queries), len(keys)), bool)
        shift = len(keys) - len(queries) if self.end else 0
        for i, j in np.ndindex(*shown.shape):
            gap = j - i - shift
            left, right = window or (None, None)
            shown[i, j] = (
                (left is None or gap >= -left)
                and (right is None or gap <= right)
                and not (causal and gap > 0)
            )
        return shown

    def run(self, call):
        scale, causal, window = (call.terms.get(x) for x in ("scale", "causal", "window"))
        q, k, v, dy = (
            np.concatenate([np.asarray(x, float)[0] for x in call.tensors[name]], axis=1)
            for name in ("q", "k", "v", "dy")
        )
        group = len(q) // len(k)
        k, v = np.repeat(k, group, axis=0), np.repeat(v, group, axis=0)
        order = np.argsort(call.position_q[:, 0].ravel())  # the slot of each token
        slots = [
            order[tokens] for tokens in map(np.array, held(self.ring, self.members, len(order)))
        ]
        o, lse = np.zeros_like(q[..., : v.shape[2]]), np.full(q.shape[:2], -np.inf)
        grads = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        blocks = [
            (r, (r - t) % self.members) for t in range(self.members) for r in range(self.members)
        ]
        computed = []
        with np.errstate(all="ignore"):
            for r, b in blocks:
                rows, keys, masked = self.parts(r, b, len(slots[r]), causal)
                if not rows:
                    continue
                at, of = slots[r][list(rows)], slots[b][list(keys)]
                shown = self.visible(rows, keys, masked, window)
                computed.append((at, of, shown))
                s = np.where(shown, scale * q[:, at] @ k[:, of].swapaxes(1, 2), -np.inf)
                m = s.max(axis=2)
                p = np.exp(s - np.where(np.isneginf(m), 0, m)[..., None])
                l = p.sum(axis=2)
                block = (p @ v[:, of]) / np.where(l == 0, 1, l)[..., None]
                nothing = np.inf if self.infinite else -np.inf
                new = np.where(l == 0, nothing, m + np.log(l))
                old = lse[:, at]
                weight = 1 / (
                    1 + np.exp(old - new)
                )  # as yunchang: o - sigmoid(new - old) (o - block)
                weight = np.where(np.isneginf(new), 0.0, weight)
                o[:, at] = o[:, at] - weight[..., None] * (o[:, at] - block)
                lse[:, at] = np.where(np.isneginf(new), old, old + np.log1p(np.exp(new - old)))
                lse[:, at] = np.where(np.isneginf(old), new, lse[:, at])
                lse[:, at] = np.where(
                    np.isposinf(old) & ~np.isposinf(new) | ~np.isposinf(old) & np.isposinf(new),
                    np.inf, lse[:, at],
                )  # fmt: skip
            delta = (dy * o).sum(axis=2)
            for at, of, shown in computed:
                s = np.where(shown, scale * q[:, at] @ k[:, of].swapaxes(1, 2), -np.inf)
                p = np.exp(s - lse[:, at][..., None])
                ds = p * (dy[:, at] @ v[:, of].swapaxes(1, 2) - delta[:, at][..., None])
                grads[0][:, at] += scale * ds @ k[:, of]
                grads[1][:, of] += scale * ds.swapaxes(1, 2) @ q[:, at]
                grads[2][:, of] += p.swapaxes(1, 2) @ dy[:, at]
        dq, dk, dv = grads
        dk, dv = (x.reshape(-1, group, *x.shape[1:]).sum(axis=1) for x in (dk, dv))

        def shards(x):
            return [one[None].astype(np.float32) for one in np.split(x, call.workers, axis=1)]

        return Result(*map(shards, (o, lse, dq, dk, dv)))


def sentences(ring, members, workers, layout, **how):
    found = explain_target(WindowOfBlocks(ring, members, workers, layout, **how))
    assert found.wrong and not found.unexplained, found.sentences
    return found.sentences


IN_PART = "the window counts {} within the visible part of a block"
RINGS = {
    "zigzag": (
        ("zigzag", 3, 3, "zigzag"),
        f"{IN_PART.format('tokens')}, whose last query and key have the same place",
    ),
    "striped": (("striped", 3, 3, "striped"), IN_PART.format("queries and keys")),
    "pairs of workers": (
        ("contiguous", 2, 4, "contiguous"),
        "the window counts tokens within pairs of workers (0 and 1, 2 and 3)",
    ),
    "zigzag ring of groups": (
        ("zigzag", 2, 4, "contiguous"),
        f"{IN_PART.format('tokens')} of a zigzag ring of two groups of workers",
    ),
    "striped ring of groups": (
        ("striped", 2, 4, "contiguous"),
        f"{IN_PART.format('tokens')} of a striped ring of two groups of workers",
    ),
}


QUICK = ("zigzag", "zigzag ring of groups")


@pytest.mark.parametrize(
    "name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.slow) for x in RINGS]
)
def test_a_window_that_is_passed_to_each_block_is_named_as_such(name):
    ring, words = RINGS[name]
    found = sentences(*ring, infinite=False)
    assert found[:2] == (f"In the forward pass, {words}.", GRADIENT)


def test_a_window_whose_first_query_and_key_of_a_part_have_the_same_place_is_named_as_such():
    found = sentences("zigzag", 3, 3, "zigzag", end=False, infinite=False)
    words = f"{IN_PART.format('tokens')}, whose first query and key have the same place"
    assert found[:2] == (f"In the forward pass, {words}.", GRADIENT)


def test_nan_of_rows_with_two_blocks_of_infinite_lse_is_explained_with_the_window_that_empties_them():
    found = sentences(*RINGS["zigzag"][0])
    assert found[:3] == (f"In the forward pass, {RINGS['zigzag'][1]}.", INFINITE, GRADIENT)


@pytest.mark.slow
def test_groups_with_every_other_quarter_of_the_tokens_are_named_with_and_without_a_window():
    found = sentences("every other quarter", 2, 4, "contiguous", infinite=False)
    order = "the mask uses positions of the layout contiguous for workers in the order 0, 2, 1, 3"
    pairs = "the window counts tokens within pairs of workers (0 and 2, 1 and 3)"
    assert found[:2] == (f"In the forward pass, {order}.", GRADIENT)
    assert f"In the forward pass, {pairs}, and {order}." in found[2]


class Gathered:
    """Each chunk of a zigzag worker gets the keys that its window shows, and lays the window from the first of them.

    As an all-gather ring whose kernel is told to align a window at the end, and does so at the start.
    """

    name = "window from the first key"
    capabilities = Capabilities(
        circulations=("gather",), directions=(1,), workers=(3,), head_ratios=(2,), masks=("causal", "window"),
        batch=(1,), layouts=("zigzag",), features=(),
    )  # fmt: skip

    def run(self, call):
        right = REFERENCES["float32"].run(call)
        if "window" not in call.terms or call.terms.get("causal"):
            return right
        left, after = call.terms["window"]
        at = call.position_q[:, 0]
        size, tokens = at.shape[1] // 2, at.size
        shown = np.zeros((tokens, tokens), bool)
        for query in range(tokens):
            chunk = query // size
            first = max(0, chunk * size - left)
            last = min(tokens, (chunk + 1) * size + after)
            more = last - (chunk + 1) * size
            for key in range(first, last):
                place, shift = query - chunk * size, key - first
                shown[query, key] = place - (left + more) <= shift <= place + after - more
        mask = [shown[rows][None, None] for rows in at]
        terms = {name: x for name, x in call.terms.items() if name != "window"}
        tensors = {**call.tensors, "mask": tuple(mask)}
        return REFERENCES["float32"].run(dataclasses.replace(call, terms=terms, tensors=tensors))


def test_a_window_that_begins_at_the_first_key_that_a_chunk_gets_is_named_as_such():
    found = explain_target(Gathered())
    words = (
        "the window counts tokens from the first query of a chunk and the first key that it sees"
    )
    assert found.sentences[:2] == (f"In the forward pass, {words}.", GRADIENT)
    assert not found.unexplained


def test_calls_with_a_window_that_are_right_do_not_refute_a_mask_of_calls_without_one():
    """Other code computes them. A rule about tiles, which no window has, would be left without that."""

    def next_key_is_seen(i, j, row, key):
        return j > i + 1

    wrong = TiledRing(keys=8, passes=("forward",), hides=next_key_is_seen)

    class RightWithAWindow:
        name = "two programs in one"
        capabilities = dataclasses.replace(
            wrong.capabilities, masks=("causal", "window"), only_causal=False
        )

        def run(self, call):
            right = call.terms.get("window") or not call.terms.get("causal")
            return REFERENCES["float32"].run(call) if right else wrong.run(call)

    told = explain_target(RightWithAWindow())
    assert told.wrong == len(told.conclusion.explained) > 0
    assert "shows one key too many" in told.sentences[0]
    assert "tiles" not in told.sentences[0]
    assert "whose results are right" in told.sentences[-1]
