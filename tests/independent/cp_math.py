"""Attention of some rows and some keys on one rank, for ``cp_program.py``: dense float64, nothing from ringspec."""

import math
from dataclasses import dataclass, replace

import numpy as np


@dataclass
class Pile:
    """Tokens times heads on one rank: ``x`` has arrays [heads, tokens, ...] by name."""

    tokens: np.ndarray
    place: np.ndarray
    document: np.ndarray
    heads: list
    x: dict

    def rows(self, at):
        return replace(
            self,
            tokens=self.tokens[at],
            place=self.place[at],
            document=self.document[at],
            x={name: x[:, at] for name, x in self.x.items()},
        )

    def of_heads(self, heads):
        at = [self.heads.index(h) for h in heads]
        return replace(self, heads=list(heads), x={name: x[at] for name, x in self.x.items()})


def along_tokens(piles):
    """Piles with the same heads, one after another."""
    join = np.concatenate
    return Pile(
        join([p.tokens for p in piles]),
        join([p.place for p in piles]),
        join([p.document for p in piles]),
        piles[0].heads,
        {name: join([p.x[name] for p in piles], axis=1) for name in piles[0].x},
    )


def along_heads(piles):
    """Piles with the same tokens, one after another."""
    heads = [h for p in piles for h in p.heads]
    x = {name: np.concatenate([p.x[name] for p in piles]) for name in piles[0].x}
    return replace(piles[0], heads=heads, x=x)


def seen(rows, keys, terms, fault=None, same_block=True, own=True):
    """Which row sees which key, [rows, keys]."""
    pq, pk = rows.place[:, None], keys.place[None, :]
    allowed = np.ones((len(rows.tokens), len(keys.tokens)), bool)
    if fault != "padding-attended" or terms.get("causal"):  # padding comes after all rows
        allowed &= keys.tokens[None, :] >= 0
    if fault == "positions-are-slots":
        pq, pk = np.arange(len(rows.tokens))[:, None], np.arange(len(keys.tokens))[None, :]
    if fault == "exchanged-in-token-order":
        pq, pk = in_order(rows), in_order(keys)[:, 0][None, :]
    if fault == "gathered-in-token-order":
        pk = in_order(keys)[:, 0][None, :]
    causal = terms.get("causal", False)
    if causal and fault == "blocks-by-coordinate":
        return allowed & ((pk <= pq) if same_block else own)
    if causal:
        allowed &= pk <= pq
    left, right = terms.get("window") or (None, None)
    if left is not None:
        allowed &= pq - pk <= left
    if right is not None:
        allowed &= pk - pq <= right
    if "cu_seqlens" in terms and fault != "documents-ignored":
        allowed &= rows.document[:, None] == keys.document[None, :]
    if fault == "right-aligned-triangle" and causal:
        allowed = right_aligned(rows, keys)
    return allowed


def in_order(pile):
    """The positions that the slots would have if they were in the order of tokens, padding last."""
    real = pile.tokens >= 0
    place = pile.place.copy()
    place[np.flatnonzero(real)] = np.sort(pile.place[real])
    return place[:, None]


def right_aligned(rows, keys):
    """The last row of each document sees all local keys, the row before all but one, and so on."""
    allowed = np.zeros((len(rows.tokens), len(keys.tokens)), bool)
    for d in set(rows.document.tolist()):
        mine = np.flatnonzero(rows.document == d)
        local = np.flatnonzero((keys.document == d) & (keys.tokens >= 0))
        for number, row in enumerate(mine):
            allowed[row, local[: max(len(local) - len(mine) + 1 + number, 0)]] = True
    return allowed


def key_heads(heads, keys, key_head):
    """The slot in ``keys`` of the key head of each query head; the first one if it is not there."""
    return [keys.heads.index(key_head(h)) if key_head(h) in keys.heads else 0 for h in heads]


def attend(rows, keys, allowed, slots, scale, extra):
    """o and lse of the rows over these keys; o = 0 and lse = -inf where nothing is seen."""
    k, v = keys.x["k"][slots], keys.x["v"][slots]
    s = rows.x["q"] @ k.transpose(0, 2, 1) * scale + extra.scores(rows, keys)
    s = np.where(allowed, s, -np.inf)
    m = s.max(axis=2, initial=-np.inf)
    w = np.exp(s - np.where(np.isfinite(m), m, 0.0)[..., None])
    total = w.sum(axis=2)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isfinite(m), m, 0.0) + np.log(total)
    dropped = w * extra.factor(rows, keys)
    return dropped @ v / np.where(total > 0, total, 1.0)[..., None], lse


def merge(parts, fault=None):
    """Merge partial results by their lse."""
    o, lse = (np.stack(one) for one in zip(*parts, strict=True))
    if (
        fault == "merge-garbage" and np.isneginf(lse).any()
    ):  # 0 times what an empty part left unwritten
        o = np.where(np.isneginf(lse)[..., None], np.nan, o)
    if fault == "merge-tree-nan":
        return tree(list(parts))
    if fault == "merge-empty-counts":
        lse = np.where(np.isneginf(lse), 0.0, lse)
    # Kernels return log2 sums and the merge takes natural ones, or the other way round.
    base = {"merge-base2-lse": 1 / math.log(2), "merge-natural-as-base2": math.log(2)}.get(
        fault, 1.0
    )
    lse = lse * base
    top = lse.max(axis=0)
    w = np.exp(lse - np.where(np.isfinite(top), top, 0.0))
    total = w.sum(axis=0)
    with np.errstate(divide="ignore"):
        together = (np.where(np.isfinite(top), top, 0.0) + np.log(total)) / base
    if fault == "merge-sum":
        return o.sum(axis=0), together
    if fault == "merge-plain-mean":
        return o.mean(axis=0), together
    if fault == "lse-of-last-block":
        together = lse[-1]
    return (w[..., None] * o).sum(axis=0) / np.where(total > 0, total, 1.0)[..., None], together


def tree(parts):
    """Merge pairs, then pairs of pairs; exp(-inf - -inf) of two empty parts is NaN."""
    while len(parts) > 1:
        pairs = [parts[n : n + 2] for n in range(0, len(parts), 2)]
        parts = [pair[0] if len(pair) == 1 else two(*pair) for pair in pairs]
    return parts[0]


def two(one, other):
    with np.errstate(invalid="ignore"):
        top = np.maximum(one[1], other[1])
        a, b = np.exp(one[1] - top), np.exp(other[1] - top)
        o = (a[..., None] * one[0] + b[..., None] * other[0]) / (a + b)[..., None]
        return o, top + np.log(a + b)


def gradients(rows, keys, allowed, slots, scale, lse, o, extra):
    """dq of the rows, and dk, dv of the keys in the heads of the rows, from o and lse of whole rows."""
    q, dy = rows.x["q"], rows.x["dy"]
    k, v = keys.x["k"][slots], keys.x["v"][slots]
    s = q @ k.transpose(0, 2, 1) * scale + extra.scores(rows, keys)
    finite = np.where(np.isfinite(lse), lse, 0.0)[..., None]
    p = np.where(allowed & np.isfinite(lse)[..., None], np.exp(np.minimum(s - finite, 700.0)), 0.0)
    dlse = rows.x.get("dlse", np.zeros(1))[..., None] if extra.fault != "dlse-ignored" else 0.0
    delta = (dy * o).sum(axis=2, keepdims=True) - dlse
    factor = extra.factor(rows, keys)
    ds = p * (dy @ v.transpose(0, 2, 1) * factor - delta) * scale
    p = p * factor
    dk, dv = np.zeros_like(keys.x["k"]), np.zeros_like(keys.x["v"])
    for head, slot in enumerate(slots):
        dk[slot] += ds[head].T @ q[head]
        dv[slot] += p[head].T @ dy[head]
    return ds @ k, dk, dv
