"""The dropout keep mask against an independent Philox4x32-10 (oracle/philox.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.philox import KNOWN_ANSWERS, first_word_array, keep_one
from oracle.philox import philox4x32_10 as oracle_philox

import ringspec as rs
from ringspec.spec.dropout import keep_mask, philox4x32_10

WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(0, 2**64 - 1)


def mask_of(positions_q, positions_k, heads, batches, dropout_p: float, seed: int) -> np.ndarray:
    """`keep_mask` for lists of integers; positions are [B or 1][S]."""
    return keep_mask(
        np.array(positions_q, dtype=np.int64),
        np.array(positions_k, dtype=np.int64),
        heads=np.array(heads),
        batches=np.array(batches),
        dropout_p=dropout_p,
        dropout_seed=seed,
    )


def one_pair(pq: int, pk: int, head: int, batch: int, dropout_p: float, seed: int) -> bool:
    mask = mask_of([[pq]], [[pk]], [head], [batch], dropout_p, seed)
    assert mask.shape == (1, 1, 1, 1) and mask.dtype == np.bool_
    return bool(mask[0, 0, 0, 0])


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers_of_random123(counter, key, answer):
    assert oracle_philox(counter, key) == answer
    got = philox4x32_10(np.array(counter, dtype=np.uint32), np.array(key, dtype=np.uint32))
    assert got.dtype == np.uint32
    assert tuple(int(word) for word in got) == answer


def test_philox_on_arrays_of_counters_and_keys_equals_the_oracle():
    generator = np.random.default_rng(1)
    counter = generator.integers(0, 2**32, (5, 3, 4), dtype=np.uint32)
    key = generator.integers(0, 2**32, (5, 3, 2), dtype=np.uint32)
    counter[0, 0], key[0, 0] = 0, 0xFFFFFFFF
    got = philox4x32_10(counter, key)
    assert got.shape == (5, 3, 4)
    for index in np.ndindex(5, 3):
        words = tuple(int(word) for word in counter[index])
        want = oracle_philox(words, tuple(int(word) for word in key[index]))
        assert tuple(int(word) for word in got[index]) == want


@given(WORDS, WORDS, WORDS, WORDS, SEEDS)
def test_the_oracle_on_arrays_equals_the_oracle_on_integers(c0, c1, c2, c3, seed):
    want = oracle_philox((c0, c1, c2, c3), (seed % 2**32, seed >> 32))[0]
    assert int(first_word_array(c0, c1, c2, c3, seed)) == want


@pytest.mark.rule("DROP-1", "DROP-2")
@given(
    data=st.data(),
    dropout_p=st.floats(0.0, 1.0, exclude_max=True),
    seed=SEEDS,
    batched=st.booleans(),
)
def test_keep_mask_equals_the_oracle(data, dropout_p, seed, batched):
    heads = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    batches = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=2))
    rows = len(batches) if batched else 1
    positions_q = data.draw(positions(rows))
    positions_k = data.draw(positions(rows))
    got = mask_of(positions_q, positions_k, heads, batches, dropout_p, seed)
    assert got.shape == (len(batches), len(heads), len(positions_q[0]), len(positions_k[0]))
    for b, h, i, j in np.ndindex(got.shape):
        row = b if batched else 0
        want = keep_one(
            positions_q[row][i], positions_k[row][j], heads[h], batches[b], dropout_p, seed
        )
        assert bool(got[b, h, i, j]) == want


def positions(rows: int):
    """Lists [rows][2] of token positions: small, negative, up to the last that a word holds."""
    position = st.one_of(st.integers(-9, 40), WORDS)
    return st.lists(st.lists(position, min_size=2, max_size=2), min_size=rows, max_size=rows)


@pytest.mark.rule("DROP-1")
@pytest.mark.parametrize("exchanged", ("positions", "head and batch", "halves of the seed"))
def test_every_counter_and_key_word_has_its_own_place(exchanged):
    """With 400 pairs an exchange of two words gives another mask, and the oracle's own."""
    pq, pk, head, batch, seed = 3, 17, 5, 9, (0x1234 << 32) | 0x9876
    want = [keep_one(pq + n, pk, head, batch, 0.5, seed) for n in range(400)]
    got = mask_of([[pq + n for n in range(400)]], [[pk]], [head], [batch], 0.5, seed)
    assert got[0, 0, :, 0].tolist() == want
    if exchanged == "positions":
        other = [keep_one(pk, pq + n, head, batch, 0.5, seed) for n in range(400)]
    elif exchanged == "head and batch":
        other = [keep_one(pq + n, pk, batch, head, 0.5, seed) for n in range(400)]
    else:
        swapped = (0x9876 << 32) | 0x1234
        other = [keep_one(pq + n, pk, head, batch, 0.5, swapped) for n in range(400)]
    assert want != other


@pytest.mark.rule("DROP-2")
@given(WORDS, WORDS, st.integers(0, 99), st.integers(0, 99), SEEDS)
def test_a_pair_is_kept_from_the_threshold_on(pq, pk, head, batch, seed):
    word = oracle_philox((pk, pq, head, batch), (seed % 2**32, seed >> 32))[0]
    assert one_pair(pq, pk, head, batch, word / 2**32, seed)  # word >= word
    assert one_pair(pq, pk, head, batch, (word + 0.5) / 2**32, seed)  # floor(word + 0.5) = word
    if word + 1 < 2**32:
        assert not one_pair(pq, pk, head, batch, (word + 1) / 2**32, seed)
    assert one_pair(pq, pk, head, batch, 0.0, seed)
    almost_one = float(np.nextafter(1.0, 0.0))  # the threshold is 2^32 - 1
    assert one_pair(pq, pk, head, batch, almost_one, seed) == (word == 2**32 - 1)


@pytest.mark.parametrize("dropout_p", (0.05, 0.3, 0.5, 0.9))
def test_the_share_of_kept_pairs_is_one_minus_dropout_p(dropout_p):
    """2^18 fixed pairs; six standard deviations of the binomial distribution."""
    S = 256
    row = [list(range(S))]
    mask = mask_of(row, row, [0, 1], [0, 1], dropout_p, 2024)
    for share in mask.mean(axis=(2, 3)).ravel():
        assert abs(share - (1 - dropout_p)) <= 6 * np.sqrt(dropout_p * (1 - dropout_p)) / S
    spread = np.sqrt(dropout_p * (1 - dropout_p) / S)
    assert np.max(np.abs(mask.mean(axis=2) - (1 - dropout_p))) <= 6 * spread
    assert np.max(np.abs(mask.mean(axis=3) - (1 - dropout_p))) <= 6 * spread


def test_heads_batches_and_seeds_drop_independently():
    """Agreement of two independent masks has mean p^2 + (1-p)^2; six standard deviations of it."""
    S, dropout_p = 128, 0.4
    row = [list(range(S))]
    masks = {
        (head, batch, seed): mask_of(row, row, [head], [batch], dropout_p, seed)
        for head in (0, 1)
        for batch in (0, 1)
        for seed in (0, 1, 2**32, 2**63)
    }
    expected = dropout_p**2 + (1 - dropout_p) ** 2
    bound = 6 * np.sqrt(expected * (1 - expected)) / S
    keys = list(masks)
    for n, first in enumerate(keys):
        for second in keys[:n]:
            agreement = float(np.mean(masks[first] == masks[second]))
            assert abs(agreement - expected) <= bound, (first, second)


@pytest.mark.rule("DROP-1", "DROP-3")
@pytest.mark.parametrize("Hkv", (1, 2, 4))
def test_attention_drops_by_query_head_and_global_position(Hkv):
    """The same bits as with the oracle's mask passed in, forward and backward."""
    generator = np.random.default_rng(Hkv)
    B, H, Sq, Sk, D = 2, 4, 5, 7, 3
    q, dy = generator.standard_normal((2, B, H, Sq, D))
    k, v = generator.standard_normal((2, B, Hkv, Sk, D))
    offset, seed, dropout_p = 4, 2**45 + 3, 0.35
    keep = np.zeros((B, H, Sq, Sk), dtype=bool)
    for b, h, i, j in np.ndindex(keep.shape):
        keep[b, h, i, j] = keep_one(i + offset, j, h, b, dropout_p, seed)
    options = {"causal": True, "q_offset": offset, "dropout_p": dropout_p}
    own = rs.attention(q, k, v, dropout_seed=seed, **options)
    given_mask = rs.attention(q, k, v, keep=keep, **options)
    assert np.array_equal(own.o, given_mask.o) and np.array_equal(own.lse, given_mask.lse)
    own_gradients = rs.attention_backward(q, k, v, dy, dropout_seed=seed, **options)
    given_gradients = rs.attention_backward(q, k, v, dy, keep=keep, **options)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(own_gradients, name), getattr(given_gradients, name)), name
