"""``ringspec.replay_as``: what the number of workers changes, element by element, with the merge of a public ring."""

from __future__ import annotations

import numpy as np
import pytest
from merges.partials import same_bits

import ringspec as rs
from ringspec.errors import OptionError, ShapeError
from ringspec.formats import load, round_to, store
from ringspec.merges import MERGES, Functions, merge
from ringspec.merges.enclosures import ROUNDED

S, N = 32, 8  # tokens, and tokens of each of 4 workers
RINGS = ("te_p2p", "te_p2p_2_20", "te_thd", "torch_cp", "ring_flash_attn", "diffusers")


def tensors(heads: int = 2, seed: int = 5):
    return np.random.default_rng(seed).normal(0, 1, (4, 1, heads, S, 8))


def replayed(name: str, workers: int, **options):
    q, k, v, dy = tensors()
    return rs.replay_as(q, k, v, dy, recipe=name, workers=workers, **options)


@pytest.mark.parametrize("name", RINGS)
def test_rows_that_see_one_block_keep_their_bits_and_others_change_with_workers(name):
    one, four = (replayed(name, workers, causal=True) for workers in (1, 4))
    changes = one.changes(four)
    # Contiguous and causal: the rows of worker 0 see its own keys alone, whatever the number of workers.
    assert not changes["o"].changed[:, :, :N].any() and not changes["lse"].changed[:, :, :N].any()
    assert changes["o"].changed[:, :, N:].any()
    assert (changes["o"].changed == (changes["o"].steps != 0)).all()


def merged_row(q, k, v, row, blocks, narrow):
    """One row of a causal ring, from the formulas alone: o in bf16 at every step (``narrow``), or the sigmoid form."""
    o = lse = None
    parts = []
    for keys in blocks:
        keys = keys[keys <= row]
        if not keys.size:
            continue
        s = (k[keys] @ q[row]) / np.sqrt(q.shape[1])
        total = s.max() + np.log(np.exp(s - s.max()).sum())
        part = round_to(np.exp(s - total) @ v[keys], "bfloat16").astype(np.float32)
        parts.append((part, np.float32(total)))
    if narrow:
        lse = parts[0][1]
        for _, new in parts[1:]:
            high, low = max(lse, new), min(lse, new)
            lse = high + ROUNDED.log1p(ROUNDED.exp(np.float32([low - high])))[0]
        for number, (part, own) in enumerate(parts):
            share = part * ROUNDED.exp(np.float32([own - lse]))
            o = round_to(share if number == 0 else o + share, "bfloat16").astype(np.float32)
        return o
    o, lse = parts[0]
    for part, own in parts[1:]:
        o = o - ROUNDED.sigmoid(np.float32([own - lse])) * (o - part)
        lse = lse - ROUNDED.logsigmoid(np.float32([lse - own]))[0]
    return round_to(o, "bfloat16").astype(np.float32)


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("name", ["te_p2p", "torch_cp"])
def test_the_elements_that_change_with_workers_are_those_of_a_merge_row_by_row(name, workers):
    """The set of changed elements, exactly: each row is merged here without the code of a ring."""
    q, k, v, _ = (round_to(x, "bfloat16") for x in tensors(heads=1))
    options = {"recipe": name, "causal": True, "functions": ROUNDED}
    one, many = (rs.replay_as(q, k, v, workers=w, **options) for w in (1, workers))
    size, expected = S // workers, np.zeros((S, 8), bool)
    for row in range(S):
        order = [(row // size - t) % workers for t in range(workers)]
        found = [
            merged_row(*(x[0, 0] for x in (q, k, v)), row, blocks, name == "te_p2p")
            for blocks in ([np.arange(S)], [np.arange(b * size, (b + 1) * size) for b in order])
        ]
        expected[row] = found[0] != found[1]
    changed = one.changes(many)["o"].changed[0, 0]
    assert changed.any() and (changed == expected).all()


@pytest.mark.parametrize("name", RINGS)
def test_documents_that_are_shards_give_the_same_bits_for_every_number_of_workers(name):
    # With a document on each worker nothing is merged; gradients of dq, dk, dv are one contribution.
    segments = np.arange(S) // N
    options = {"segments_q": segments, "segments_k": segments}
    one, four = (replayed(name, workers, **options) for workers in (1, 4))
    assert not any(change.changed.any() for change in one.changes(four).values())


@pytest.mark.parametrize("name", sorted(MERGES))
def test_a_worker_alone_gives_the_dense_result_rounded_once(name):
    q, k, v, _ = tensors()
    one = rs.replay_as(q, k, v, recipe=name, workers=1, causal=True, format="float32")
    dense = rs.attention(*(round_to(x, "float32") for x in (q, k, v)), causal=True)
    assert np.abs(one.o - dense.o).max() <= 4e-7 * np.abs(dense.o).max()
    assert (
        np.abs(one.lse * MERGES[name].result_unit - dense.lse).max()
        <= 1e-6 * np.abs(dense.lse).max()
    )
    if MERGES[name].form in ("sigmoid", "rescaling"):
        assert same_bits(one.o, store(dense.o, "float32"))
        assert same_bits(one.lse, store(dense.lse, "float32"))


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("name", RINGS)
def test_every_number_of_workers_is_close_to_the_gradients_of_dense_attention(name, layout):
    q, k, v, dy = (round_to(x, "bfloat16") for x in tensors())
    exact = rs.attention_backward(q, k, v, dy, causal=True)
    for workers in (2, 4):
        got = replayed(name, workers, causal=True, layout=layout)
        for tensor in ("dq", "dk", "dv"):
            found, want = getattr(got, tensor), getattr(exact, tensor)
            if found is None:
                assert name == "diffusers" and tensor != "dq"
                continue
            # At most 2 W roundings to 8 bits of a sum whose terms are of the size of the tensor's norm.
            error = np.linalg.norm(load(found) - want) / np.linalg.norm(want)
            assert error <= 2 * workers * 2.0**-8, (tensor, workers)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_replay_is_the_merge_of_its_recorded_parts(layout):
    whole = replayed("te_p2p", 4, causal=True, layout=layout)
    shards = rs.shard(whole.o, rs.make_layout(layout, S, 4))
    for worker, parts in enumerate(whole.parts):
        assert same_bits(merge(list(parts), "te_p2p")[0], shards[worker].astype(whole.o.dtype))
    halves = [part.rows is not None for parts in whole.parts for part in parts]
    assert any(halves) is (layout == "zigzag")


def test_the_elementary_functions_of_a_replay_are_those_supplied():
    calls = []
    functions = Functions(exp=lambda x: calls.append(x.shape) or np.exp(x))
    replayed("te_p2p", 2, functions=functions)
    assert calls


def test_changes_count_steps_between_numbers_of_the_format():
    from ringspec.rings.replay_as import changes

    a = store([1.0, -0.0, 1.0, np.nan, np.nan], "bfloat16")
    b = store([1.0 + 3 * 2.0**-7, 0.0, np.nan, np.nan, 1.0], "bfloat16")
    found = changes(a, b, "o")
    assert found.steps.tolist() == [3, 1, -1, 0, -1]
    assert found.changed.tolist() == [True, True, True, False, True]
    assert str(found).startswith("4 of 5 elements (80.0%), at most 3 steps")


def test_a_wrong_argument_of_a_replay_is_refused_with_a_remedy():
    q, k, v, _ = tensors()
    with pytest.raises(OptionError, match="format"):
        rs.replay_as(q, k, v, recipe="te_p2p", workers=2, format="float64")
    with pytest.raises(OptionError, match="sinks"):
        rs.replay_as(q, k, v, recipe="te_p2p", workers=2, sinks=np.zeros(2))
    with pytest.raises(OptionError, match="merge recipe"):
        rs.replay_as(q, k, v, recipe="bf16", workers=2)
    one = rs.replay_as(q, k, v, recipe="te_p2p", workers=2)
    with pytest.raises(ShapeError, match="replay the same problem"):
        one.changes(rs.replay_as(q, k, v, recipe="te_p2p", workers=2, format="float32"))
