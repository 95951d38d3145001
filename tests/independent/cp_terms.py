"""Bias, dropout and sinks for ``cp_program.py``, by the global numbers of tokens and heads; nothing from ringspec."""

import numpy as np

LOW = np.uint64(0xFFFFFFFF)


def philox(key, counter):
    """Word 0 of Philox4x32-10 (https://doi.org/10.1145/2063384.2063405) for arrays of four counter words."""
    c0, c1, c2, c3 = (np.asarray(x, np.uint64) for x in counter)
    k0, k1 = (np.uint64(x) for x in key)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        high = np.uint64(32)
        c0, c1, c2, c3 = (b >> high) ^ c1 ^ k0, b & LOW, (a >> high) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    return c0


def whole(job, name):
    """[1|H, Sq, Sk] of a tensor of which each rank has its own rows and heads, all keys; None if there is none."""
    if job.get(name) is None:
        return None
    first = job[name][0]
    heads = 1 if first.shape[0] == 1 else 1 + max(h for row in job["heads_q"] for h in row)
    found = np.zeros((heads, 1 + max(t for row in job["index_q"] for t in row), first.shape[2]))
    for x, tokens, own in zip(job[name], job["index_q"], job["heads_q"], strict=True):
        for slot, token in enumerate(tokens):
            if token >= 0:
                found[own if heads > 1 else [0], token] = x[:, slot]
    return found


class Extra:
    """Terms of one element of a batch: ``batch`` is its number."""

    def __init__(self, job, fault):
        self.fault, terms = fault, job["terms"]
        self.p, self.seed = terms.get("dropout_p", 0.0), terms.get("dropout_seed", 0)
        self.batch = job.get("batch", 0)
        self.bias, self.keep = whole(job, "bias"), whole(job, "keep")
        self.given = job.get("sinks") is not None and fault != "sinks-ignored"
        self.sinks = {}
        for x, own in zip(job.get("sinks") or (), job["heads_q"], strict=False):
            self.sinks |= dict(zip(own, x, strict=True))
        order = [t for row in job["index_k"] for t in row if t >= 0]
        self.column = {t: s if fault == "columns-are-slots" else t for s, t in enumerate(order)}

    def numbers(self, heads):
        """The numbers by which terms of heads are found."""
        return list(range(len(heads))) if self.fault == "terms-of-local-heads" else list(heads)

    def of(self, x, rows, keys):
        heads = self.numbers(rows.heads) if x.shape[0] > 1 else [0]
        columns = [self.column.get(int(t), 0) for t in keys.tokens]
        return x[np.ix_(heads, np.maximum(rows.tokens, 0), columns)]

    def scores(self, rows, keys):
        """What is added to the scores."""
        return 0.0 if self.bias is None else self.of(self.bias, rows, keys)

    def factor(self, rows, keys):
        """By what the weights of values are multiplied."""
        if self.keep is not None:
            return self.of(self.keep, rows, keys) / (1 - self.p)
        if not self.p:
            return 1.0
        places = rows.place, keys.place
        if self.fault == "dropout-by-slots":
            places = np.arange(len(rows.tokens)), np.arange(len(keys.tokens))
        heads = np.array(self.numbers(rows.heads))[:, None, None]
        counter = np.broadcast_arrays(
            places[1][None, None], places[0][None, :, None], heads, self.batch
        )
        word = philox((self.seed & 0xFFFFFFFF, self.seed >> 32), counter)
        return np.where(word >= int(self.p * 2.0**32), 1.0, 0.0) / (1 - self.p)

    def with_sinks(self, part, heads):
        """o and lse with the sinks of these heads in the denominator."""
        if not self.given:
            return part
        o, lse = part
        own = np.stack([self.sinks[h] for h in self.numbers(heads)])  # [h, N]
        together = np.logaddexp(lse, np.logaddexp.reduce(own, axis=1)[:, None])
        return o * np.exp(lse - together)[..., None], together

    def sink_gradient(self, heads, o, lse, dy, dlse):
        """dsinks [h, N] of some rows."""
        term = (dy * o).sum(axis=2) - dlse
        own = np.stack([self.sinks[h] for h in heads])
        return -(np.exp(own[:, :, None] - lse[:, None]) * term[:, None]).sum(axis=2)
