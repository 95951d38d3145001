"""Context parallelism written down once more: rings, Ulysses, USP, joint text, gathered keys, decoding; right or faulty.

Every rank is an entry of a list. Nothing here comes from ringspec: each step is dense attention of what a rank holds,
and each exchange moves arrays between entries. ``fault`` is one of FAULTS of ``cp_faults.py``.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
from independent.cp_math import (
    Pile,
    along_heads,
    along_tokens,
    attend,
    key_heads,
    merge,
    seen,
)
from independent.cp_terms import Extra


class Program:
    """One call: ``job`` has scheme, mesh, terms, tables and per-rank arrays [heads, tokens, width] as plain data."""

    def __init__(self, job, fault=None, chunk=None, backwards=False):
        self.chunk, self.backwards = chunk, backwards  # correct programs differ in these
        self.job, self.fault, self.terms = job, fault, job["terms"]
        self.axes, self.sizes = [a for a, _ in job["mesh"]], [n for _, n in job["mesh"]]
        self.ranks = range(int(np.prod(self.sizes)))
        self.text = len(self.terms.get("text", ()))
        self.heads = 1 + max(h for row in job["heads_q"] for h in row)
        self.group = self.heads // (1 + max(h for row in job["heads_k"] for h in row))
        self.scale = self.terms["scale"]
        if fault == "scale-of-width":
            self.scale = job["q"][0].shape[2] ** -0.5
        starts = self.terms.get("cu_seqlens", ())
        self.extra = Extra(job, fault)
        self.rows = self.piles("q", ("q", "dy", "dlse"), starts)
        self.keys = self.piles("k", ("k", "v"), self.terms.get("cu_seqlens_k", starts))

    def piles(self, side, names, starts):
        tables = [np.array(x) for x in (self.job[f"index_{side}"], self.job[f"position_{side}"])]
        if self.fault == "positions-from-zero" and side == "q":
            tables[1] = tables[1] - self.first_positions(tables)
        found = []
        for r in self.ranks:
            tokens, place = tables[0][r], tables[1][r]
            x = {name: self.job[name][r] for name in names if self.job.get(name) is not None}
            document = np.searchsorted(starts[1:], tokens, side="right") if starts else 0 * tokens
            if "cu_seqlens_padded" in self.terms:
                tokens, document = self.padded(tokens, document)
            found.append(Pile(tokens, place, document, list(self.job[f"heads_{side}"][r]), x))
        return found

    def first_positions(self, tables):
        """The position of the first query of each document, by slot; 0 where a document has no prefix."""
        starts = self.terms.get("cu_seqlens", (0,))
        first = {int(t): int(p) for t, p in zip(tables[0].ravel(), tables[1].ravel(), strict=True)}
        number = np.searchsorted(starts[1:], tables[0], side="right")
        of_k = self.terms.get("cu_seqlens_k", starts)
        return np.array([[first[starts[d]] - of_k[d] for d in row] for row in number])

    def padded(self, tokens, document):
        """Documents of padding slots, which belong to the room of a document; faults in the lengths."""
        rooms = self.terms["cu_seqlens_padded"]
        each = [(b - a) // len(self.ranks) for a, b in pairwise(rooms)]
        of_room = np.repeat(np.arange(len(each)), each)
        document = np.where(tokens < 0, of_room, document)
        if self.fault == "documents-by-padded-starts":
            document = np.searchsorted(rooms[1:], np.maximum(tokens, 0), side="right")
        return tokens, document

    def short(self, keys):
        """Keys of which each document keeps its first n // W slots."""
        lengths = [b - a for a, b in pairwise(self.terms["cu_seqlens"])]
        tokens = keys.tokens.copy()
        rooms = [b - a for a, b in pairwise(self.terms["cu_seqlens_padded"])]
        offset = np.concatenate([np.arange(n // len(self.ranks)) for n in rooms])
        held = np.repeat(
            [n // len(self.ranks) for n in lengths], [n // len(self.ranks) for n in rooms]
        )
        tokens[offset >= held] = -1
        return replace(keys, tokens=tokens)

    def size(self, axis):
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def at(self, rank, axis):
        return (
            int(np.unravel_index(rank, self.sizes)[self.axes.index(axis)])
            if axis in self.axes
            else 0
        )

    def moved(self, rank, axis, by):
        if axis not in self.axes:
            return rank
        where = list(np.unravel_index(rank, self.sizes))
        n = self.axes.index(axis)
        where[n] = (where[n] + by) % self.sizes[n]
        return int(np.ravel_multi_index(where, self.sizes))

    def members(self, rank, axis):
        return [self.moved(rank, axis, n - self.at(rank, axis)) for n in range(self.size(axis))]

    def slice_of(self, rank, axis="ulysses", parts=None, part=None):
        each = self.heads // (parts or self.size(axis))
        first = (self.at(rank, axis) if part is None else part) * each
        return list(range(first, first + each))

    def run(self):
        if self.fault == "floor-length" and "cu_seqlens_padded" in self.terms:
            self.keys = [self.short(pile) for pile in self.keys]
        if self.job["scheme"] == "dcp":
            return self.decode()
        if self.fault == "local-keys-only":
            self.axes, self.sizes = ["none"], [len(self.ranks)]
        axis = {"all_gather": "cp", "pcp": "pcp"}.get(self.job["scheme"])
        return self.pass_over(self.gathered(axis) if axis else self.exchanged(), axis)

    def exchanged(self):
        """Rows, keys, and text keys of each rank after the exchange of tokens for heads."""
        slices = [self.slice_of(r) for r in self.ranks]
        needed = [sorted({self.key_head(h) for h in s}) for s in slices]
        rows, keys, text = [], [], []
        for r in self.ranks:
            front, rest = self.spread(self.rows, r, slices[r])
            rows.append(along_tokens([front, rest]))
            front, rest = self.spread(self.keys, r, needed[r])
            keys.append(rest)
            text.append(front)
        return rows, keys, text

    def key_head(self, h):
        return h % (self.heads // self.group) if self.fault == "kv-tiled" else h // self.group

    def spread(self, piles, rank, heads):
        own = piles[rank].rows(slice(self.text)).of_heads(heads)
        others = [piles[m].rows(slice(self.text, None)) for m in self.members(rank, "ulysses")]
        return own, along_tokens([one.of_heads(heads) for one in others])

    def gathered(self, axis):
        keys = []
        for r in self.ranks:
            everyone = [self.keys[m] for m in self.members(r, axis)]
            if self.fault == "prefix-ignored":
                everyone = [pile.rows(self.new_keys(pile)) for pile in everyone]
            if self.fault == "prefix-not-gathered":
                everyone = [p if p is self.keys[r] else p.rows(self.new_keys(p)) for p in everyone]
            keys.append(along_tokens(everyone))
        nothing = [pile.rows(slice(0)) for pile in self.keys]
        return self.rows, keys, nothing

    def new_keys(self, pile):
        """Which keys are those of queries: the last ones of each request."""
        queries = {
            (int(p), int(d)) for x in self.rows for p, d in zip(x.place, x.document, strict=True)
        }
        return [(int(p), int(d)) in queries for p, d in zip(pile.place, pile.document, strict=True)]

    def visits(self, rank):
        """The ranks whose keys a rank meets, in order."""
        if self.job["scheme"] == "double_ring":
            inner = [(a, b) for a in range(self.size("outer")) for b in range(self.size("inner"))]
            if self.fault == "outer-hop-missing":
                inner = [(0, b) for _, b in inner]
            return [self.moved(self.moved(rank, "outer", -a), "inner", -b) for a, b in inner]
        found = [self.moved(rank, "ring", -t) for t in range(self.size("ring"))]
        if self.fault == "text-without-ring" and self.text:
            return [rank]
        return found[:-1] if self.fault == "last-block-missed" and len(found) > 1 else found

    def blocks(self, rank, wide):
        """(keys, owner, earlier): the blocks that a rank meets; the text is a block of owner None."""
        rows, keys, text = wide
        visits = self.visits(rank)
        found = []
        for step, owner in enumerate(visits):
            block = keys[owner]
            if self.fault == "positions-of-other-neighbour":
                told = keys[self.moved(rank, "ring", step)]
                block = replace(block, place=told.place, tokens=told.tokens)
            found.append((block, owner, self.at(owner, "ring") < self.at(rank, "ring")))
        if self.text and self.fault != "text-never":
            at = {"front": 0, "rear": len(visits)}[self.terms["text_at"]]
            for _ in visits if self.fault == "text-every-step" else (0,):
                found.insert(at, (text[rank], None, False))
        return found

    def allowed(self, rows, block, rank):
        keys, owner, earlier = block
        found = seen(rows, keys, self.terms, self.fault, owner == rank, earlier)
        if self.fault == "text-rows-local" and owner not in (None, rank):
            found[: self.text] = False
        return found

    def pass_over(self, wide, axis):
        rows, keys, text = wide
        parts, results = [], []
        for r in self.ranks:
            parts.append([])
            for block in self.blocks(r, wide):
                slots = key_heads(rows[r].heads, block[0], self.key_head)
                mask = self.allowed(rows[r], block, r)
                parts[r] += self.attended(rows[r], block[0], mask, slots)
            results.append(self.finished(parts[r], rows[r].heads))
        found = {
            "o": self.home([o for o, _ in results], rows, forward=True),
            "lse": self.home([lse for _, lse in results], rows, forward=True),
        }
        if self.job.get("dy") is not None:
            from independent.cp_backward import backward

            found |= backward(self, wide, axis, parts, results)
            if self.job.get("sinks") is not None:
                found["dsinks"] = [self.sink_gradient(r, found) for r in self.ranks]
        return found

    def sink_gradient(self, rank, found):
        heads, dy = self.job["heads_q"][rank], self.job["dy"][rank]
        dlse = self.job["dlse"][rank] if self.job.get("dlse") is not None else 0.0
        return self.extra.sink_gradient(heads, found["o"][rank], found["lse"][rank], dy, dlse)

    def attended(self, rows, keys, mask, slots):
        """Partial results of the rows: one, or one for each chunk of the keys."""
        size = self.chunk or max(len(keys.tokens), 1)
        starts = range(0, max(len(keys.tokens), 1), size)
        chunks = [slice(first, first + size) for first in starts]
        parts = [
            attend(rows, keys.rows(at), mask[:, at], slots, self.scale, self.extra) for at in chunks
        ]
        if self.fault == "sinks-in-every-part":
            parts = [self.extra.with_sinks(part, rows.heads) for part in parts]
        return parts

    def finished(self, parts, heads):
        part = self.merged(parts)
        return part if self.fault == "sinks-in-every-part" else self.extra.with_sinks(part, heads)

    def merged(self, parts):
        return merge(parts[::-1] if self.backwards else parts, self.fault)

    def home(self, x, piles, add=False, forward=False):
        """Arrays [heads, text and tokens, ...] after the exchange, back in the tokens and all heads of each rank."""
        found = []
        count = self.heads if piles[0].heads and not add else self.heads // self.group
        for r in self.ranks:
            members = self.members(r, "ulysses")
            here = members.index(r)
            each = (x[r].shape[1] - self.text) // len(members)
            whole = np.zeros((count, self.text + each, *x[r].shape[2:]))
            for u, m in enumerate(members):
                own = slice(self.text + here * each, self.text + (here + 1) * each)
                piece = np.concatenate([x[m][:, : self.text], x[m][:, own]], axis=1)
                at = piles[m].heads
                if self.fault == "heads-interleaved" and not add:
                    at = list(range(u, count, len(members)))
                if self.fault == "heads-interleaved-forward" and forward:
                    at = list(range(u, count, len(members)))
                if self.fault == "text-heads-not-gathered" and m != r and not add:
                    piece[:, : self.text] = 0
                if self.fault == "dk-of-own-copy" and add and m != r:
                    other = [n for n, h in enumerate(at) if h not in piles[r].heads]
                    at, piece = [at[n] for n in other], piece[other]
                if self.fault == "dk-of-first-copy" and add:
                    new = [n for n, h in enumerate(at) if not whole[h].any()]
                    at, piece = [at[n] for n in new], piece[new]
                whole[at] = piece if self.fault == "dk-of-one-copy" else whole[at] + piece
            found.append(whole)
        return found

    def decode(self):
        """All ranks of a group compute with all heads of the group over their own keys; the merge goes home."""
        axis = "tp" if self.fault == "group-of-wrong-axis" else "dcp"
        partial = []
        for r in self.ranks:
            rows = along_heads([self.rows[m] for m in self.members(r, axis)])
            keys = self.keys[r]
            if self.fault == "cache-slots-as-positions":
                keys = replace(keys, place=self.local_slots(keys))
            mask = seen(rows, keys, self.terms, self.fault)
            slots = key_heads(rows.heads, keys, self.key_head)
            partial.append((rows.heads, self.attended(rows, keys, mask, slots)))
        o, lse = [], []
        for r in self.ranks:
            mine = self.rows[r].heads
            sources = [r] if self.fault == "local-keys-only" else self.members(r, axis)
            parts = []
            for m in sources:
                heads, values = partial[m]
                at = [heads.index(h) for h in mine]
                if self.fault == "heads-interleaved":
                    at = [self.at(r, axis) + n * self.size(axis) for n in range(len(mine))]
                parts += [tuple(x[at] for x in part) for part in values]
            together = self.finished(parts, mine)
            o.append(together[0])
            lse.append(together[1])
        return {"o": o, "lse": lse}

    def local_slots(self, keys):
        """The number of each key among the rank's keys of its request, after the first position of the request."""
        starts = self.terms.get("cu_seqlens_k", self.terms.get("cu_seqlens", (0,)))
        place = keys.place.copy()
        for d in set(keys.document.tolist()):
            mine = keys.document == d
            place[mine] = starts[d] + np.arange(mine.sum())
        return place
