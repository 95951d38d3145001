"""Targets that are right but for one thing, each a public kind of bug.

Each changes what the reference is asked, or what it answers, and is otherwise the reference.
"""

import dataclasses

import numpy as np

from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import load, name_of, store


class Wrong:
    """The reference with its calls and its results changed."""

    def __init__(self, recipe="float64", ask=None, answer=None, **claims):
        self.inner = REFERENCES[recipe]
        self.name = "wrong"
        self.capabilities = dataclasses.replace(self.inner.capabilities, **claims)
        self.ask, self.answer = ask, answer

    def run(self, call):
        result = self.inner.run(call if self.ask is None else self.ask(call))
        if self.answer is not None:
            self.answer(call, result)
        return result


def replaced(call, **tensors):
    """A call with some tensors changed; None takes one away."""
    changed = {**call.tensors, **tensors}
    return dataclasses.replace(call, tensors={n: x for n, x in changed.items() if x is not None})


def without_terms(call, *names):
    return dataclasses.replace(call, terms={n: x for n, x in call.terms.items() if n not in names})


def like(x, values):
    """float64 values in the storage dtype of x."""
    return store(values, name_of(x.dtype))


def sees_next_key(call):
    """The diagonal off by one."""
    return dataclasses.replace(call, position_q=call.position_q + 1)


def local_indices(call):
    """Masks by the slot in the worker's own block."""
    local = [
        np.broadcast_to(np.arange(p.shape[-1]), p.shape) for p in (call.position_q, call.position_k)
    ]
    return dataclasses.replace(call, position_q=local[0], position_k=local[1])


def window_per_block(call):
    """Each block has the window round its own diagonal; the triangle stays global."""
    if "window" not in call.terms:
        return call
    left, right = call.terms["window"]
    token_of_key = call.index_k.ravel()
    slot_of_key = np.empty(call.index_k.size, dtype=int)
    slot_of_key[token_of_key] = np.tile(np.arange(call.index_k.shape[1]), call.workers)
    distance = slot_of_key[None] - np.arange(call.index_q.shape[1])[:, None]
    near = np.ones(distance.shape, dtype=bool)
    if left is not None:
        near &= distance >= -left
    if right is not None:
        near &= distance <= right
    return replaced(without_terms(call, "window"), mask=(near[None, None],) * call.workers)


def no_documents(call):
    return replaced(
        without_terms(call, "cu_seqlens", "cu_seqlens_k"), segments_q=None, segments_k=None
    )


def no_bounds(call):
    return replaced(call, bound_min=None, bound_max=None)


def no_mask(call):
    return replaced(call, mask=None)


def no_window(call):
    return without_terms(call, "window")


def no_sinks(call):
    return replaced(call, sinks=tuple(np.full_like(x, -1e4) for x in call.tensors["sinks"])) if (
        "sinks" in call.tensors
    ) else call  # fmt: skip


def ones_for_dy(call):
    if "dy" not in call.tensors:
        return call
    return replaced(call, dy=tuple(like(x, np.ones(x.shape)) for x in call.tensors["dy"]))


def heads_dealt_round(call):
    """Query head h reads key head h mod Hkv."""
    if "q" not in call.tensors:
        return call
    heads, kv_heads = call.worker("q", 0).shape[1], call.worker("k", 0).shape[1]
    order = np.argsort(np.arange(heads) % kv_heads, kind="stable")
    return replaced(call, q=tuple(x[:, order] for x in call.tensors["q"]))


def heads_put_back(call, result):
    if "q" in call.tensors and result.o is not None:
        heads, kv_heads = call.worker("q", 0).shape[1], call.worker("k", 0).shape[1]
        order = np.argsort(np.arange(heads) % kv_heads, kind="stable")
        result.o = [x[:, np.argsort(order)] for x in result.o]


def dq_of_next_worker(call, result):
    if result.dq is not None:
        result.dq = [*result.dq[1:], result.dq[0]]


def dk_one_hop_short(call, result):
    if result.dk is not None:
        result.dk = [*result.dk[1:], result.dk[0]]


def base_2_lse(call, result):
    if call.operation != "merge" and result.lse is not None:
        result.lse = [like(x, load(x) / np.log(2.0)) for x in result.lse]


def scale_twice(call, result):
    if result.dq is not None and call.operation == "ring":
        result.dq = [like(x, load(x) * call.terms["scale"]) for x in result.dq]


def leaks(call, result):
    """A millionth of the last token's value reaches every row, as a finite sentinel lets it."""
    if call.operation == "ring":
        last = load(call.worker("v", call.workers - 1))[:, :, -1:, :].mean()
        result.o = [like(x, load(x) + 1e-6 * last) for x in result.o]


class Unsteady:
    """The last bit of every fourth o depends on how often it was called."""

    def __init__(self):
        self.count = 0

    def __call__(self, call, result):
        self.count += 1
        if call.operation == "ring" and self.count % 2:
            result.o = [like(x, load(x) * (1 + 2.0**-22)) for x in result.o]


def larger_on_four(call, result):
    if call.workers == 4 and result.o is not None:
        result.o = [like(x, load(x) * 1.25) for x in result.o]


def delta_of_block(call, result):
    """dq does not cancel where all values are alike."""
    if result.dq is not None and call.workers > 1:
        result.dq = [like(x, load(x) + 0.05) for x in result.dq]


def plus_infinity_for_empty(call, result):
    if result.lse is not None:
        result.lse = [like(x, np.where(np.isneginf(load(x)), np.inf, load(x))) for x in result.lse]


def nan_in_empty_rows(call, result):
    if result.o is not None and result.lse is not None:
        pairs = zip(result.o, result.lse, strict=True)
        result.o = [
            like(o, np.where(np.isneginf(load(lse))[..., None], np.nan, load(o)))
            for o, lse in pairs
        ]


def low_rows_lost(call, result):
    """A maximum that is kept at 0: exp underflows."""
    if result.o is not None and result.lse is not None:
        pairs = zip(result.o, result.lse, strict=True)
        result.o = [
            like(o, np.where(load(lse)[..., None] < -104, 0.0, load(o))) for o, lse in pairs
        ]


def high_rows_overflow(call, result):
    if result.o is not None and result.lse is not None:
        pairs = zip(result.o, result.lse, strict=True)
        result.o = [
            like(o, np.where(load(lse)[..., None] > 88, np.nan, load(o))) for o, lse in pairs
        ]


def never_zero(call, result):
    for name in ("dq", "dk", "dv", "o"):
        if getattr(result, name) is not None:
            setattr(result, name, [like(x, load(x) + 1e-30) for x in getattr(result, name)])


def cubic_in_dy(call, result):
    if result.dv is not None:
        result.dv = [like(x, load(x) * np.abs(load(x))) for x in result.dv]
