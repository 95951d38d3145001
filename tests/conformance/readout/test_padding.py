"""Faults of padding slots, planted in a ring that shares no code with the model of the readouts, are told in sentences."""

from functools import partial

import numpy as np
import pytest
from conformance.readout.told_features import Planted, marked, named, told_of

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.targets.reference import REFERENCES


def right(index, r, owner, phase):
    """The visible pairs [n, n] of the queries of worker r and the keys of another worker."""
    of_q, of_k = index[r][:, None], index[owner][None, :]
    return (of_k >= 0) & (of_k <= of_q)


def ring(call, visible=right, score=0.0, moved=None, skipped=()):
    """The results of a causal KV ring in float32.

    ``visible``: as :func:`right`. ``score``: what is added to the scores of padded keys. ``moved``: for the names of
    inputs and results, a function of a worker's slots that gives the slots in another order. ``skipped``: blocks.
    """
    W, scale, index = call.workers, np.float32(call.terms["scale"]), call.index_q
    moved = moved or {}

    def order(name, r):
        return moved[name](index[r]) if name in moved else np.arange(len(index[r]))

    q, k, v, dy = (
        [np.asarray(x, np.float32)[0][:, order(name, r)] for r, x in enumerate(call.tensors[name])]
        for name in ("q", "k", "v", "dy")
    )
    group, found = len(q[0]) // len(k[0]), {name: [] for name in ("o", "lse", "dq")}
    k, v = ([np.repeat(x, group, axis=0) for x in shards] for shards in (k, v))
    dk, dv = ([np.zeros_like(x) for x in shards] for shards in (k, v))

    def block(r, owner, phase):
        s = scale * q[r] @ k[owner].swapaxes(1, 2) + score * (index[owner] < 0)
        shown = visible(index, r, owner, phase) & ((r, owner) not in skipped)
        return np.where(shown, s, -np.inf).astype(np.float32)

    for r in range(W):
        owners = [(r - step) % W for step in range(W)]
        s = np.concatenate([block(r, owner, "forward") for owner in owners], axis=2)
        m = np.maximum(s.max(axis=2, keepdims=True), np.float32(-100))
        e = np.exp(s - m)
        l = e.sum(axis=2, keepdims=True)
        o = e @ np.concatenate([v[owner] for owner in owners], axis=1) / np.where(l == 0, 1, l)
        lse = np.where(l == 0, -np.inf, m + np.log(np.where(l == 0, 1, l)))
        delta, dq = (o * dy[r]).sum(axis=2, keepdims=True), np.zeros_like(q[r])
        for owner in owners:
            s = block(r, owner, "backward")
            p = np.where(
                np.isinf(lse) | np.isinf(s), 0, np.exp(s - np.where(np.isinf(lse), 0, lse))
            )
            ds = scale * p * (dy[r] @ v[owner].swapaxes(1, 2) - delta)
            dq += ds @ k[owner]
            dk[owner] += ds.swapaxes(1, 2) @ q[r]
            dv[owner] += p.swapaxes(1, 2) @ dy[r]
        for name, x in (("o", o), ("lse", lse[..., 0]), ("dq", dq)):
            found[name].append(x[None][:, :, order(name, r)].astype(np.float32))
    for name, shards in (("dk", dk), ("dv", dv)):
        sums = [x.reshape(-1, group, *x.shape[1:]).sum(axis=1)[None] for x in shards]
        found[name] = [x[:, :, order(name, r)] for r, x in enumerate(sums)]
    return Result(**found)


PADDING = "padding", "table"
Target = partial(Planted, ring, "table", ("padding-slots", "empty-rows"))


def seen(where=lambda r, owner, W: True, by_slot=False, phases=("forward", "backward")):
    """Padded keys are visible in some blocks, to all queries or to those of later slots."""

    def visible(index, r, owner, phase):
        slots = np.arange(index.size).reshape(index.shape)
        shown = slots[owner][None] <= slots[r][:, None] if by_slot else True
        padded = (index[owner] < 0)[None] & (index[r] >= 0)[:, None] & shown
        here = where(r, owner, len(index)) and phase in phases
        return right(index, r, owner, phase) | (padded & here)

    return {"visible": visible}


def taken(of_k, queries=False, by_slot=False, phases=("forward", "backward")):
    """Other slots are taken for padding: those where ``of_k(index, owner, r)`` is False."""

    def visible(index, r, owner, phase):
        if phase not in phases:
            return right(index, r, owner, phase)
        slots = np.arange(index.size).reshape(index.shape)
        at = slots if by_slot else index
        pairs = at[owner][None] <= at[r][:, None]
        of_q = of_k(index, r, r) if queries else index[r] >= 0
        return pairs & of_k(index, owner, r)[None] & of_q[:, None]

    return {"visible": visible}


def at_end(index, owner, r):
    return np.arange(index.shape[1]) < (index[owner] >= 0).sum()


def at_start(index, owner, r):
    return at_end(index, owner, r)[::-1]


def at_end_of_ring(index, owner, r):
    return (np.arange(index.size) < (index >= 0).sum()).reshape(index.shape)[owner]


def of_own(index, owner, r):
    return index[r] >= 0


def causal_ignored(index, r, owner, phase):
    return (index[r] >= 0)[:, None] & (index[owner] >= 0)[None]


def by_local_slot(index, r, owner, phase):
    return np.tri(index.shape[1], dtype=bool) & causal_ignored(index, r, owner, phase)


def all_seen(index, r, owner, phase):
    return np.ones((index.shape[1],) * 2, bool)


def first(index):
    return np.argsort(index < 0, kind="stable")


def last(index):
    return np.argsort(index >= 0, kind="stable")


def unpacked(index):
    return np.argsort(first(index))


def moved(order, *names):
    return {"moved": dict.fromkeys(names, order)}


EVERY, LATER = (
    "padded keys are visible to every query",
    "padded keys are visible to the queries of later slots",
)
FIRST = "without padding between them, in a worker's first slots"
UNPACKED = "as if they were without padding between them in a worker's first slots"
MASKS = {
    "all": (seen(), EVERY),
    "all-forward": (seen(phases=("forward",)), EVERY),
    "own": (seen(lambda r, owner, W: r == owner), f"in the blocks of a worker's own keys (step 0), {EVERY}"),
    "remote": (seen(lambda r, owner, W: r != owner), f"from step 1 on, {EVERY}"),
    "step-2": (seen(lambda r, owner, W: (r - owner) % W == 2), f"in the last step, {EVERY}"),
    "worker-1": (seen(lambda r, owner, W: owner == 1), f"for keys of worker 1, {EVERY}"),
    "slot": (seen(by_slot=True), LATER),
    "slot-own": (seen(lambda r, owner, W: r == owner, True), f"in the blocks of a worker's own keys (step 0), {LATER}"),
    "slot-remote": (seen(lambda r, owner, W: r != owner, True), f"from step 1 on, {LATER}"),
    "end-for-keys": (taken(at_end), "padding is taken to be at the end of each worker, for keys"),
    "end-for-keys-by-slot": (taken(at_end, by_slot=True), "padding is taken to be at the end of each worker, for keys (masked by slot)"),
    "end": (taken(at_end, True), "padding is taken to be at the end of each worker"),
    "end-by-slot": (taken(at_end, True, True), "padding is taken to be at the end of each worker (masked by slot)"),
    "start": (taken(at_start, True), "padding is taken to be at the start of each worker"),
    "start-for-keys-by-slot": (taken(at_start, False, True), "padding is taken to be at the start of each worker, for keys (masked by slot)"),
    "end-of-ring": (taken(at_end_of_ring, True, True), "padding is taken to be at the end of the last worker (masked by slot)"),
    "own-worker's": (taken(of_own), "the padding is that of the keys of the worker that computes"),
    "own-worker's-by-slot": (taken(of_own, False, True), "the padding is that of the keys of the worker that computes (masked by slot)"),
    "causal-ignored": ({"visible": causal_ignored}, "the causal mask is ignored, and padding hidden"),
    "local-slots": ({"visible": by_local_slot}, "the mask compares slot numbers within a worker, not global positions"),
    "no-mask": ({"visible": all_seen}, "no pair is masked"),
    "skipped": ({"skipped": ((2, 0),)}, "in the last step, the block is not computed"),
    "keys-first": (moved(first, "k", "v"), f"keys and values are taken {FIRST}"),
    "keys-last": (moved(last, "k", "v"), "keys and values are taken without padding between them, in a worker's last slots"),
    "keys-unpacked": (moved(unpacked, "k", "v"), f"keys and values are taken {UNPACKED}"),
    "o-first": (moved(first, "o"), f"the returned o is taken {FIRST}"),
    "lse-first": (moved(first, "lse"), f"the returned lse is taken {FIRST}"),
    "o-and-lse-first": (moved(first, "o", "lse"), f"the returned lse and o are taken {FIRST}"),
}  # fmt: skip
BACKWARD = {
    "end": (taken(at_end, phases=("backward",)), "padding is taken to be at the end of each worker, for keys"),
    "start": (taken(at_start, True, phases=("backward",)), "padding is taken to be at the start of each worker"),
    "own-worker's": (taken(of_own, phases=("backward",)), "the padding is that of the keys of the worker that computes"),
    "dq-first": (moved(first, "dq"), f"the share of dq is added {FIRST}"),
    "dk-dv-first": (moved(first, "dk", "dv"), f"the shares of dk and dv are added {FIRST}"),
    "dv-last": (moved(last, "dv"), "the share of dv is added without padding between them, in a worker's last slots"),
    "dk-unpacked": (moved(unpacked, "dk"), f"the share of dk is added {UNPACKED}"),
}  # fmt: skip
FEW = ("all", "slot-own", "end-for-keys", "o-and-lse-first", "dk-dv-first")


def test_a_ring_with_padding_is_right():
    found = explain_target(Target())
    assert found.right and [one.problem.id for one in found.runs] == ["readout/padding-table"]


@pytest.mark.parametrize("name", marked(MASKS, FEW))
def test_a_fault_of_padding_in_the_forward_pass_is_named(name):
    faults, words = MASKS[name]
    found = told_of(Target(**faults), *PADDING)
    assert found.explained
    assert [words] == [named(x) for x in found.forward.sets[0]]


@pytest.mark.parametrize("name", marked(BACKWARD, FEW))
def test_a_fault_of_padding_in_the_backward_pass_is_named(name):
    faults, words = BACKWARD[name]
    found = told_of(Target(**faults), *PADDING)
    assert found.explained and not found.forward.sets
    assert words in [named(x) for one in found.backward.sets for x in one]


@pytest.mark.slow
def test_padded_keys_with_another_score_are_not_explained():
    found = told_of(Target(**seen(), score=1.5), *PADDING)
    assert (
        not found.right and not found.explained and "the softmax weights in o" in found.forward.left
    )


@pytest.mark.parametrize("recipe", ["float32", "bf16", "fp16", "nki_low"])
def test_the_reference_with_padding_is_right(recipe):
    assert told_of(REFERENCES[recipe], *PADDING).right


@pytest.mark.parametrize("recipe", ["float32", "bf16"])
def test_the_known_bug_of_padding_is_explained(recipe):
    found = told_of(MutantTarget(MUTANTS["padding-slots-counted"], recipe), *PADDING)
    assert found.explained
    assert [[EVERY]] == [[named(x) for x in one] for one in found.forward.sets[:1]]
