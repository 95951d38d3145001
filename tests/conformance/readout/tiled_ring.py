"""A KV ring in float32 that computes the visible part of each block in tiles, with faults as kernel authors make them.

It is the program under test, and uses nothing of ringspec but the call that it gets and the result that it returns.
"""

from itertools import chain

import numpy as np

from ringspec.conformance.target import Capabilities
from ringspec.conformance.target.protocol import Result

WORKERS = 3


def hides(i, j, row, key):
    """Return which pairs of query i and key j a tile that begins at ``row`` and ``key`` must mask."""
    return j > i


def is_skipped(row, last_row, key, last_key):
    """Return whether a tile of a causal block has no visible pair."""
    return key > last_row


def alpha(old, new, scale):
    """Return the factor of the running o when its maximum rises from ``old`` to ``new``."""
    return np.exp(old - new)


def lse_of(m, l):
    return m + np.log(l)


def p_of(s, lse):
    return np.exp(s - lse)


def ds_of(p, dp, delta):
    return p * (dp - delta)


def add(total, share, first):
    """Add a block's gradient to what the blocks before gave; ``first``: whether there is none."""
    total += share


def same(x):
    return x


def inputs_of(call):
    """Return the scale, the query heads of a key head, and q, k, v and dy of all workers, [H, n, D] in float32.

    q is multiplied by the scale. k and v have a copy for each query head. There is one batch entry.
    """
    scale = np.float32(call.terms["scale"])
    q, k, v, dy = (
        [np.asarray(x, np.float32)[0] for x in call.tensors[name]] for name in ("q", "k", "v", "dy")
    )
    group = len(q[0]) // len(k[0])
    k, v = ([np.repeat(x, group, axis=0) for x in shards] for shards in (k, v))
    return scale, group, ([scale * x for x in q], k, v, dy)


def over_group(x, group):
    """Return a gradient [H, n, D] summed over the query heads of each key head."""
    return x.reshape(len(x) // group, group, *x.shape[1:]).sum(axis=1)


def without_last_block(lse_of_part, call):
    """Return lse of each worker over the blocks of all steps but the last."""
    W = call.workers
    every = [
        [
            lse_of_part[r, b, 0]
            for b in range(W)
            if (r, b, 0) in lse_of_part and b != (r + call.direction) % W
        ]
        for r in range(W)
    ]
    return [np.logaddexp.reduce(x) for x in every]


def merged(blocks, lse_of=np.logaddexp):
    """Return o and lse of a worker from those of its visible parts, a list of (o, lse, whether it is visible)."""
    (o, lse, _), *others = (block for block in blocks if block[2])
    for o_of_block, lse_of_block, _ in others:
        total = np.logaddexp(lse, lse_of_block)
        o = np.exp(lse - total) * o + np.exp(lse_of_block - total) * o_of_block
        lse = lse_of(lse, lse_of_block)
    return o.astype(np.float32), lse.astype(np.float32)


class TiledRing:
    """A ring with tiles of ``rows`` queries and ``keys`` keys in all blocks.

    ``only_causal`` False: it claims calls without a mask, too.

    The functions of this module can be replaced: ``hides`` and ``is_skipped`` in ``passes``, ``alpha``, and ``ds_of``.
    ``returned``: the order of the heads of o. ``filled``: keys of zeros fill up the last tile. ``whole``: of 'queries' or
    'keys', only whole tiles are computed, in ``passes``. ``own_lse``: the backward pass takes the lse of each block.
    ``uncleared``: the gradients whose tile still holds the tiles before. ``uncleared_steps``: the number of steps of which
    a block's dk and dv still hold the sums. ``skipped``: what a step without a visible pair does with the arriving dk and
    dv: 'kept', 'lost' or 'not sent'. ``last_change``: a function that changes the results, lists of arrays by name.

    Of the forward pass: ``merged`` merges a worker's parts of blocks as the function of this name does. ``p_of_product`` and
    ``kept_o`` round p and the running o. ``within``: ``alpha`` is of blocks with a mask (True) or without.
    ``from_the_last``: tiles of keys from the last to the first. ``clamped``: of 'queries' or 'keys', a short last tile begins
    earlier, in ``passes``; ``clamped_at``: the number of keys at which it ends, if not that of the part. ``no_wrap``: no
    keys and values arrive over the link between the last and the first worker.
    ``own_chunks``: a worker computes its own zigzag block as three parts: each half with itself, and the second half with
    the first. ``l_too``: ``alpha`` is the factor of l, too. ``lse_of``: a function of the m and l of a part. ``one_later``:
    a striped block of a later worker begins at key 1. ``scaled_again``: each part multiplies its queries by the scale.
    ``values_of``: the worker whose values a step uses, in ``passes``. ``sent``: a function on the keys and values that
    arrive from another worker, in ``passes``.
    Of the backward pass: ``add`` adds up a block's ``added`` gradients. ``uncleared_in``: the same for ``uncleared``.
    ``dv_before_mask``, ``dp_of_k``: the product for dv without the mask, and dp with k. ``delta_of``: a function on delta.
    ``early``: dk and dv are added before those of the visitor arrive. ``last_hop``: 'lost' if the last step and hop are.
    ``exchanged``: dk arrives as dv and dv as dk. ``p_of``: the function of this module. ``last_block``: False if the lse that
    it gets lacks the last step's block. ``copied``: copies of the last key fill up a tile of the forward pass. ``delta_so_far``:
    delta adds up p dp of the blocks up to each one.
    """

    name = "ring in tiles"

    def __init__(
        self,
        layouts=("contiguous",),
        rows=8,
        keys=3,
        passes=("forward", "backward"),
        last_change=None,
        directions=(1,),
        only_causal=True,
        **faults,
    ):
        self.rows, self.keys, self.passes, self.last_change = rows, keys, passes, last_change
        self.capabilities = Capabilities(
            circulations=("kv",), directions=directions, workers=(WORKERS,), head_ratios=(2,), only_causal=only_causal, batch=(1,), layouts=layouts
        )  # fmt: skip
        self.faults = faults

    def run(self, call):
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.ring(call)

    def fault(self, name, usual=None, phase=None):
        return self.faults.get(name, usual) if phase is None or phase in self.passes else usual

    def parts(self, call, r, b):
        """Return the queries, the keys and whether they are masked, of each visible part of a block."""
        n = call.worker("q", 0).shape[2]
        whole, first, second = slice(0, n), slice(0, n // 2), slice(n // 2, n)
        if not call.terms.get("causal"):
            return [(whole, whole, False)]
        if call.layout == "striped" and b > r:
            return [
                (slice(1, n), slice(1, n) if self.fault("one_later") else slice(0, n - 1), True)
            ]
        if call.layout == "zigzag" and b != r:
            return [(whole, first, False) if b < r else (second, whole, False)]
        if b > r:
            return []
        if call.layout == "zigzag" and self.fault("own_chunks"):
            return [(first, first, True), (second, first, False), (second, second, True)]
        return [(whole, whole, b == r or call.layout == "striped")]

    def tiles(self, rows, keys, masked, phase):
        """Yield the queries and the keys of each tile of a range of so many rows and keys."""
        whole = self.fault("whole", "", phase)
        rows = rows // self.rows * self.rows if whole == "queries" else rows
        keys = keys // self.keys * self.keys if whole == "keys" else keys
        clamped = self.fault("clamped", "", phase)
        keys_of_tiles = range(0, keys, self.keys)
        for key in reversed(keys_of_tiles) if self.fault("from_the_last") else keys_of_tiles:
            if clamped == "keys":
                key = max(0, min(key, self.fault("clamped_at", keys) - self.keys))
            for row in range(0, rows, self.rows):
                row = max(0, min(row, rows - self.rows)) if clamped == "queries" else row
                last_row, last_key = min(row + self.rows, rows) - 1, min(key + self.keys, keys) - 1
                skipped = self.fault("is_skipped", is_skipped, phase)
                if not (masked and skipped(row, last_row, key, last_key)):
                    yield slice(row, last_row + 1), slice(key, last_key + 1)

    def scores(self, q, k, tile, masked, phase):
        """Return the scores of a tile, for which q has the scale."""
        rows, keys = tile
        s = q[:, rows] @ k[:, keys].swapaxes(1, 2)
        if masked and keys.stop - 1 > rows.start:
            i, j = np.ogrid[rows, keys]
            s = np.where(
                self.fault("hides", hides, phase)(i, j, rows.start, keys.start), -np.inf, s
            )
        elif self.fault("filled"):
            s = np.pad(s, ((0, 0), (0, 0), (0, self.keys - s.shape[2])))
        if self.fault("copied") and phase == "forward":
            s = np.pad(s, ((0, 0), (0, 0), (0, self.keys - s.shape[2])), mode="edge")
        return s.astype(np.float32)

    def forward(self, running, q, k, v, masked, scale):
        """Merge the tiles of a block into the running maximum, sum and o."""
        m, l, acc = running
        for tile in self.tiles(q.shape[1], k.shape[1], masked, "forward"):
            rows, keys = tile
            s = self.scores(q, k, tile, masked, "forward")
            new = np.maximum(m[:, rows], s.max(axis=2, keepdims=True))
            finite = np.where(np.isneginf(new), 0, new)  # a row without a visible key so far
            p = np.exp(s - finite)
            wrong = self.fault("within", masked) == masked
            factor = self.fault("alpha", alpha) if wrong else alpha
            l[:, rows] *= (factor if self.fault("l_too") else alpha)(m[:, rows], finite, scale)
            l[:, rows] += p.sum(axis=2, keepdims=True)
            acc[:, rows] *= factor(m[:, rows], finite, scale)
            number = keys.stop - keys.start
            if self.fault("copied"):
                p[:, :, number - 1] += p[:, :, number:].sum(axis=2)
            p = self.fault("p_of_product", same)(p[:, :, :number])
            acc[:, rows] = self.fault("kept_o", same)(acc[:, rows] + p @ v[:, keys])
            m[:, rows] = new

    def backward(self, q, k, v, dy, lse, delta, masked):
        """Return dq, dk and dv of a block, without the scale in dq; each is added up in the buffer of one tile."""
        shares = []
        for tile in self.tiles(q.shape[1], k.shape[1], masked, "backward"):
            rows, keys = tile
            s = self.scores(q, k, tile, masked, "backward")[:, :, : keys.stop - keys.start]
            p = self.fault("p_of", p_of)(s, lse[:, rows])
            dp = dy[:, rows] @ (k if self.fault("dp_of_k") else v)[:, keys].swapaxes(1, 2)
            ds = self.fault("ds_of", ds_of)(p, dp, delta[:, rows])
            if self.fault("dv_before_mask"):
                s = self.scores(q, k, tile, False, "backward")[:, :, : keys.stop - keys.start]
                p = np.exp(s - lse[:, rows])
            ds_t, p_t = ds.swapaxes(1, 2), p.swapaxes(1, 2)
            shares.append((rows, keys, ds @ k[:, keys], ds_t @ q[:, rows], p_t @ dy[:, rows]))
        found = []
        uncleared = (
            self.fault("uncleared", ()) if self.fault("uncleared_in", masked) == masked else ()
        )
        for name, like, side, number in (("dq", q, 0, 2), ("dk", k, 1, 3), ("dv", v, 1, 4)):
            size = self.keys if side else self.rows
            total, buffer = np.zeros_like(like), np.zeros_like(like[:, :size])
            for start in sorted({one[side].start for one in shares}):
                if name not in uncleared:
                    buffer[:] = 0
                for one in shares:
                    if one[side].start == start:
                        buffer[:, : one[number].shape[1]] += one[number]
                stop = min(start + size, like.shape[1])
                total[:, start:stop] = buffer[:, : stop - start]
            found.append(total)
        return found

    def ring(self, call):
        scale, group, (q, k, v, dy) = inputs_of(call)
        o, lse, lse_of_part = self.forward_ring(call, q, k, v)
        delta = [(x * y).sum(axis=2, keepdims=True) for x, y in zip(o, dy, strict=True)]
        delta = [self.fault("delta_of", same)(x) for x in delta]
        of_rows = lse if self.fault("last_block", True) else without_last_block(lse_of_part, call)
        dq, of_k = self.backward_ring(call, (q, k, v, dy), of_rows, lse_of_part, delta)
        results = {"o": o, "lse": lse, "dq": [scale * x for x in dq]}
        for name, at in (("dk", 0), ("dv", 1)):
            results[name] = [over_group(x[at], group) for x in of_k]
        if (order := self.fault("returned")) is not None:
            results["o"] = [x[order] for x in o]
        results["lse"] = [x[..., 0] for x in lse]
        if self.last_change is not None:
            self.last_change(results)
        return Result(**{name: [x[None] for x in shards] for name, shards in results.items()})

    def arriving(self, call, shards, r, b, phase):
        """Return the keys and the values of worker b at worker r."""
        lost = self.fault("no_wrap") and (b - r) * call.direction > 0
        values_of = self.fault("values_of", lambda call, r, b: b, phase)
        sent = same if b == r else self.fault("sent", same, phase)
        return [
            sent(x[a]) * (0 if lost else 1)
            for x, a in zip(shards, (b, values_of(call, r, b)), strict=True)
        ]

    def forward_ring(self, call, q, k, v):
        """Return o and lse of each worker, and lse of each block."""
        W, n, scale = call.workers, q[0].shape[1], np.float32(call.terms["scale"])

        def empty(r):
            m = np.full((len(q[r]), n, 1), -np.inf, np.float32)
            return m, np.zeros_like(m), np.zeros((*m.shape[:2], v[r].shape[2]), np.float32)

        o, lse, lse_of_part = [], [], {}
        merged = self.fault("merged")
        for r in range(W):
            running, blocks, of_worker = empty(r), [], q[r].copy()
            for b in [(r - call.direction * step) % W for step in range(W)]:
                visible = self.parts(call, r, b)
                hidden = [(slice(0, n), slice(0, n), False)] if merged and not visible else []
                of_k, of_v = self.arriving(call, (k, v), r, b, "forward")
                for part, (rows, keys, masked) in enumerate(visible or hidden):
                    own = empty(r)
                    for state in (running, own) if visible else (own,):
                        self.forward(
                            [x[:, rows] for x in state],
                            of_worker[:, rows],
                            of_k[:, keys],
                            of_v[:, keys],
                            masked,
                            scale,
                        )
                    if self.fault("scaled_again"):
                        of_worker[:, rows] *= scale
                    m, l, acc = own
                    lse_of_part[r, b, part] = self.fault("lse_of", lse_of)(m, l)
                    o_of_part = np.divide(acc, l, out=np.zeros_like(acc), where=l > 0)
                    blocks.append((o_of_part, lse_of_part[r, b, part], bool(visible)))
            m, l, acc = running
            results = (acc / l, m + np.log(l)) if merged is None else merged(blocks)
            o.append(results[0])
            lse.append(results[1])
        return o, lse, lse_of_part

    def backward_ring(self, call, inputs, lse, lse_of_part, delta):
        """Return dq of each worker without the scale, and dk and dv of each worker for each query head."""
        q, k, v, dy = inputs
        W = call.workers
        dq = [np.zeros_like(x) for x in q]
        # A worker adds its dk and dv to those that have arrived with the keys, and sends them on.
        held, arrived = (
            [(np.zeros_like(k[r]), np.zeros_like(v[r])) for r in range(W)] for _ in range(2)
        )
        earlier, summed = [[] for _ in range(W)], {}
        skipped, added = self.fault("skipped", ""), self.fault("added", ())
        adding = {name: self.fault("add") if name in added else add for name in ("dq", "dk", "dv")}

        def block(r, step):
            """Return the range of keys, dk and dv of each part of a block; none if it is skipped."""
            b, found = (r - call.direction * step) % W, []
            parts = self.parts(call, r, b) if step < W else ()
            for part, (rows, keys, masked) in enumerate(parts):
                of_row = lse_of_part[r, b, part] if self.fault("own_lse") else lse[r]
                of_k, of_v = self.arriving(call, (k, v), r, b, "backward")
                of_delta = delta[r]
                if self.fault("delta_so_far"):
                    s = self.scores(q[r], of_k, (rows, keys), masked, "backward")
                    sums = (p_of(s, of_row) * (dy[r] @ of_v.swapaxes(1, 2))).sum(axis=2)[..., None]
                    summed[r] = of_delta = summed.get(r, 0) + sums
                of_dq, of_dk, of_dv = self.backward(
                    q[r][:, rows],
                    of_k[:, keys],
                    of_v[:, keys],
                    dy[r][:, rows],
                    of_row[:, rows],
                    of_delta[:, rows],
                    masked,
                )
                adding["dq"](dq[r][:, rows], of_dq, step == 0)
                found.append((keys, of_dk, of_dv))
            return found

        if early := self.fault("early", False):
            for r in range(W):
                block(r, 0)
        for step in range(W - (self.fault("last_hop") == "lost")):
            sent = [True] * W
            for r in range(W):
                found = block(r, step + early)
                if not found:
                    if skipped == "lost":
                        held[r] = (np.zeros_like(k[r]), np.zeros_like(v[r]))
                    elif skipped != "kept":
                        held[r] = arrived[r]
                    sent[r] = skipped != "not sent"
                    continue
                earlier[r].append(found)
                held[r] = tuple(x.copy() for x in arrived[r])
                for there, *of_block in chain(*earlier[r][-1 - self.fault("uncleared_steps", 0) :]):
                    for name, total, share in zip(("dk", "dv"), held[r], of_block, strict=True):
                        adding[name](total[:, there], share, step == 0)
            before = [(r - call.direction) % W for r in range(W)]
            arrived = [held[b] if sent[b] else arrived[r] for r, b in enumerate(before)]
            arrived = [x[::-1] for x in arrived] if self.fault("exchanged") else arrived
        if self.fault("last_hop") == "lost":
            arrived = held
            for r in range(W):
                block(r, W - 1)
        return dq, arrived
