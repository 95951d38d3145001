"""Heads, head groups and batch entries that are mapped, mixed or summed wrongly.

A bug replaces one or a few of the functions that compute a ring; these functions are called pieces and are listed in
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. Hkv is the number of key heads. Correctly, each key head
serves a group of consecutive query heads.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import (
    attends,
    backward,
    batches,
    grouped,
    when,
)
from ringspec.conformance.diagnose.mutants.hooks import At
from ringspec.conformance.diagnose.mutants.mutant import mutant
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array, Terms
from ringspec.spec.dense_backward import over_group
from ringspec.spec.worker import KeySide, QuerySide


def dealt_round(x: Array, terms: Terms) -> Array:
    """Copy key heads to query heads round-robin: query head h reads key head h mod Hkv."""
    return np.tile(x, (1, terms.group, 1, 1))


def summed_round(x: Array, terms: Terms) -> Array:
    """Sum the gradients of query heads g, g + Hkv, g + 2 Hkv and so on into key head g."""
    batch, heads, length, width = x.shape
    return x.reshape(batch, terms.group, heads // terms.group, length, width).sum(axis=1)


def first_of_group(x: Array, terms: Terms) -> Array:
    return x[:, :: terms.group]


def half_of_group(x: Array, terms: Terms) -> Array:
    batch, heads, *rest = x.shape
    groups = x.reshape(batch, heads // terms.group, terms.group, *rest)
    some: Array = groups[:, :, : max(terms.group // 2, 1)].sum(axis=2)
    return some


def mean_of_group(x: Array, terms: Terms) -> Array:
    mean: Array = over_group(x, terms.group) / terms.group
    return mean


def first_key_head(x: Array, terms: Terms) -> Array:
    """Copy key heads to query heads correctly, except that the last query head reads key head 0."""
    spread = np.repeat(x, terms.group, axis=1)
    spread[:, -1] = x[:, 0]
    return spread


def batches_and_heads_exchanged(at: At) -> tuple[QuerySide, KeySide]:
    """Read keys and values stored as [Hkv, B, n, D] as if they were [B, Hkv, n, D]."""
    key = at.key
    assert key.k is not None and key.v is not None
    k, v = (x.swapaxes(0, 1).reshape(x.shape) for x in (key.k, key.v))
    return at.query, dataclasses.replace(key, k=k, v=v)


def keys_of_next_batch(at: At) -> tuple[QuerySide, KeySide]:
    """Shift the keys and values of a block from another worker by one batch entry."""
    key = at.key
    if at.own or key.k is None or key.v is None:
        return at.query, key
    k, v = (np.roll(x, -1, axis=0) for x in (key.k, key.v))
    return at.query, dataclasses.replace(key, k=k, v=v)


def several_key_heads(call: Call) -> bool:
    return attends(call) and call.worker("k", 0).shape[1] > 1


BUGS = (
    mutant(
        "gqa-wrong-head",
        "query heads are assigned to key heads round-robin",
        "Query head h reads key head h mod Hkv instead of h // (H / Hkv). With one key head, or "
        "one key head per query head, the bug has no effect.",
        flags=("gqa-wrong-head",),
        applies=when(grouped, several_key_heads),
        to_query_heads=dealt_round,
        over_group=summed_round,
    ),
    mutant(
        "gqa-wrong-head-in-backward",
        "dk and dv are summed over the wrong query heads",
        "The forward pass groups consecutive query heads; the reduction in the backward pass "
        "groups every Hkv-th head. One key head hides the bug.",
        flags=("gqa-wrong-head", "gqa-not-summed"),
        applies=when(grouped, several_key_heads, backward),
        over_group=summed_round,
    ),
    mutant(
        "gqa-not-summed",
        "dk and dv are those of the first query head of each group",
        "The gradients of the other heads of a group are not added.",
        "marin-community/levanter/pull/449", "bigcode-project/Megatron-LM/pull/37",
        flags=("gqa-not-summed",),
        applies=when(grouped, backward),
        over_group=first_of_group,
    ),
    mutant(
        "gqa-half-summed",
        "dk and dv are summed over half of the query heads of each group",
        "The other half is computed on another rank, or in another launch, and is not added.",
        "bigcode-project/Megatron-LM/pull/37",
        flags=("gqa-not-summed",),
        applies=when(grouped, backward),
        over_group=half_of_group,
    ),
    mutant(
        "gqa-averaged",
        "dk and dv are averaged over the query heads of a group",
        "The mean is taken instead of the sum.",
        flags=("gqa-not-summed",),
        applies=when(grouped, backward),
        over_group=mean_of_group,
    ),
    mutant(
        "last-head-reads-first-key-head",
        "the last query head reads the first key head",
        "The other heads are correct. One key head hides the bug.",
        flags=("gqa-wrong-head",),
        applies=several_key_heads,
        to_query_heads=first_key_head,
    ),
    mutant(
        "batches-and-heads-exchanged",
        "the batch and head axes of keys and values are swapped",
        "Memory in the order [Hkv, B] is read as [B, Hkv]. One batch entry, or one key head, "
        "hides the bug.",
        flags=("transposed-kv-heads",),
        applies=when(batches(2), several_key_heads),
        sees=batches_and_heads_exchanged,
    ),
    mutant(
        "keys-of-next-batch",
        "keys and values of other workers are read one batch entry too far",
        "The receive buffer has a different batch stride from the worker's own tensors. One "
        "batch entry, or one worker, hides the bug.",
        applies=when(batches(2), lambda call: call.workers > 1),
        sees=keys_of_next_batch,
    ),
)  # fmt: skip
