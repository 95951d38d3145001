"""Layouts: each constructor against its formula written as loops, and sharding as a permutation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

import ringspec as rs
from ringspec.errors import LayoutError, OptionError, ShapeError
from ringspec.rings.layouts import from_table, lse_from_tiles, lse_to_tiles, make_layout
from ringspec.spec.layout import contiguous, striped, zigzag, zigzag_per_document

WORKERS = (1, 2, 3, 4, 5, 8)

EVERY_W = pytest.mark.parametrize("workers", WORKERS)
EVERY_CHUNK = pytest.mark.parametrize("chunk", [1, 2, 3])


# --- the named layouts ------------------------------------------------------------------------


@pytest.mark.rule("LAYOUT-1")
@EVERY_W
@EVERY_CHUNK
def test_contiguous_slot_t_of_worker_r_holds_token_r_n_plus_t(workers, chunk):
    table = contiguous(workers * chunk, workers).table
    assert table.shape == (workers, chunk) and table.dtype == np.int64
    for r in range(workers):
        for t in range(chunk):
            assert table[r, t] == r * chunk + t


@pytest.mark.rule("LAYOUT-2")
@EVERY_W
@EVERY_CHUNK
def test_striped_slot_t_of_worker_r_holds_token_t_w_plus_r(workers, chunk):
    table = striped(workers * chunk, workers).table
    assert table.shape == (workers, chunk) and table.dtype == np.int64
    for r in range(workers):
        for t in range(chunk):
            assert table[r, t] == t * workers + r


@pytest.mark.rule("LAYOUT-3")
@EVERY_W
@EVERY_CHUNK
def test_zigzag_worker_r_holds_chunks_r_and_2w_minus_1_minus_r(workers, chunk):
    table = zigzag(2 * workers * chunk, workers).table
    assert table.shape == (workers, 2 * chunk) and table.dtype == np.int64
    for r in range(workers):
        for t in range(chunk):
            assert table[r, t] == r * chunk + t
            assert table[r, chunk + t] == (2 * workers - 1 - r) * chunk + t


def zigzag_by_loops(documents: list[range], workers: int) -> list[list[int]]:
    """Each document filled up to a multiple of 2W, its chunk c on worker min(c, 2W - 1 - c)."""
    rows: list[list[int]] = [[] for _ in range(workers)]
    for tokens in documents:
        chunk = 0
        while 2 * workers * chunk < len(tokens):
            chunk += 1
        for c in range(2 * workers):
            worker = c if c < workers else 2 * workers - 1 - c
            for place in range(c * chunk, (c + 1) * chunk):
                rows[worker].append(tokens[place] if place < len(tokens) else -1)
    return rows


DOCUMENT_LENGTHS = ([12], [3, 9], [0, 5, 0, 7], [0, 0, 5], [1, 1, 1], [80, 40], [16, 7, 33], [])


@pytest.mark.rule("LAYOUT-4")
@EVERY_W
@pytest.mark.parametrize("lengths", DOCUMENT_LENGTHS, ids=str)
@pytest.mark.parametrize("behind", [0, 1, 10])
def test_zigzag_per_document_is_a_zigzag_of_each_document(workers, lengths, behind):
    """Tokens behind the last document are dealt like one more document."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    total = starts[-1] + behind
    documents = [range(a, b) for a, b in zip(starts[:-1], starts[1:], strict=True)]
    want = zigzag_by_loops([*documents, range(starts[-1], total)], workers)
    layout = zigzag_per_document(total, workers, starts)
    assert layout.table.tolist() == want
    assert layout.length == total and layout.workers == workers


@pytest.mark.rule("LAYOUT-4")
@EVERY_W
@pytest.mark.parametrize("lengths", [lengths for lengths in DOCUMENT_LENGTHS if lengths], ids=str)
def test_every_worker_holds_equally_many_slots_of_every_document(workers, lengths):
    """Slots, with padding: tokens differ by the document's padding only, which is below 2W."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    table = zigzag_per_document(int(starts[-1]), workers, starts).table
    used = 0
    for start, length in zip(starts[:-1], lengths, strict=True):
        slots = 2 * -(-length // (2 * workers))
        for r in range(workers):
            held = table[r, used : used + slots]
            real = held[held >= 0]
            assert ((start <= real) & (real < start + length)).all()
            if length % (2 * workers) == 0:
                assert real.size == length // workers
        used += slots
    assert used == table.shape[1]


@pytest.mark.rule("LAYOUT-4")
@EVERY_W
def test_zigzag_per_document_gives_every_worker_equal_work(workers):
    """Causal pairs inside documents of multiples of 2W tokens, counted pair by pair."""
    lengths = [2 * workers, 6 * workers, 4 * workers]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    table = zigzag_per_document(int(starts[-1]), workers, starts).table
    work = []
    for r in range(workers):
        pairs = 0
        for token in table[r]:
            start = max(s for s in starts if s <= token)
            pairs += int(token - start) + 1  # keys start..token
        work.append(pairs)
    assert len(set(work)) == 1
    assert sum(work) == sum(n * (n + 1) // 2 for n in lengths)


def test_documents_of_4_and_12_tokens_give_two_workers_44_pairs_each():
    """A public balancer gave 26 and 62: https://github.com/pytorch/pytorch/pull/189902."""
    table = zigzag_per_document(16, 2, [0, 4, 16]).table
    assert [sum(t + 1 if t < 4 else t - 3 for t in row) for row in table.tolist()] == [44, 44]


@pytest.mark.rule("LAYOUT-1", "LAYOUT-2", "LAYOUT-3")
@pytest.mark.parametrize(("name", "parts"), [("contiguous", 1), ("striped", 1), ("zigzag", 2)])
@EVERY_W
def test_a_length_that_does_not_divide_is_refused(name, parts, workers):
    for length in range(4 * parts * workers + 1):
        if length % (parts * workers) == 0:
            assert sorted(make_layout(name, length, workers).table.ravel().tolist()) == list(
                range(length)
            )
        else:
            with pytest.raises(LayoutError) as caught:
                make_layout(name, length, workers)
            assert str(parts * workers) in caught.value.expected and str(length) in caught.value.got


@pytest.mark.parametrize("length", [0, 12, 24])
def test_a_name_means_its_constructor(length):
    starts = [0, length // 3, length]
    made = {
        "contiguous": contiguous(length, 3),
        "striped": striped(length, 3),
        "zigzag": zigzag(length, 3),
        "zigzag_per_document": zigzag_per_document(length, 3, starts),
    }
    for name, want in made.items():
        got = make_layout(name, length, 3, starts)
        assert got.name == want.name == name
        assert got.table.shape == want.table.shape and (got.table == want.table).all()
    with refuses((OptionError, "packing")):
        make_layout("zigzag_per_document", length, 3)


# --- any table --------------------------------------------------------------------------------


@st.composite
def tables(draw):
    """A table [W, n] of a random permutation with padding anywhere, and its number of tokens."""
    workers, slots = draw(st.integers(1, 8)), draw(st.integers(0, 6))
    length = draw(st.integers(0, workers * slots))
    cells = draw(st.permutations(list(range(length)) + [-1] * (workers * slots - length)))
    return np.array(cells, dtype=np.int64).reshape(workers, slots), length


@pytest.mark.rule("LAYOUT-5")
@given(tables(), st.sampled_from(["<f8", "<f4", "<i8", "?"]), st.integers(0, 2), st.integers())
def test_unshard_undoes_shard_for_any_table(made, dtype, axis, seed):
    table, length = made
    shape = [2, 3]
    shape.insert(axis, length)
    x = np.random.default_rng(seed % 2**32).integers(0, 200, shape).astype(dtype)
    layout = from_table(table, length)
    before = x.copy()
    parts = rs.shard(x, layout, axis)
    assert len(parts) == layout.workers and layout.length == length
    for r, part in enumerate(parts):
        assert part.dtype == x.dtype and part.shape[axis] == layout.slots
        for t in range(layout.slots):
            got = np.take(part, t, axis)
            if table[r, t] < 0:
                assert (got == np.zeros((), x.dtype)).all()
            else:
                assert (got == np.take(x, table[r, t], axis)).all()
    back = rs.unshard(parts, layout, axis)
    assert back.dtype == x.dtype and back.shape == x.shape and (back == before).all()
    assert (x == before).all()


@pytest.mark.rule("LAYOUT-5")
@given(tables(), st.integers(0, 2**32 - 1))
def test_shard_undoes_unshard_up_to_padding(made, seed):
    """What a padding slot holds, NaN included, reaches no token."""
    table, length = made
    layout = from_table(table, length)
    random = np.random.default_rng(seed)
    parts = [random.normal(size=(2, layout.slots)) for _ in range(layout.workers)]
    for r, part in enumerate(parts):
        part[:, table[r] < 0] = np.nan
    x = rs.unshard(parts, layout, 1)
    assert np.isfinite(x).all()
    for r, part in enumerate(rs.shard(x, layout, 1)):
        real = table[r] >= 0
        assert (part[:, real] == parts[r][:, real]).all() and (part[:, ~real] == 0).all()


@pytest.mark.rule("LAYOUT-5")
def test_any_negative_entry_is_padding():
    table = from_table([[0, -7], [-1, 1]], 2).table
    assert table.tolist() == [[0, -1], [-1, 1]]


@pytest.mark.rule("LAYOUT-5")
@pytest.mark.parametrize("dtype", ["i1", "u1", ">i4", "u8", "i8"])
def test_a_table_may_be_of_any_integer_dtype_and_order(dtype):
    table = np.array([[2, 0], [3, 1]], dtype=dtype)
    for given_table in (table, np.asfortranarray(table), table.tolist(), table[::-1][::-1]):
        made = from_table(given_table, 4, 2)
        assert made.table.dtype == np.int64 and made.table.tolist() == [[2, 0], [3, 1]]


@pytest.mark.rule("LAYOUT-5")
@given(tables(), st.data())
def test_a_table_that_is_no_permutation_is_refused_by_name_of_the_token(made, data):
    table, length = made
    if length == 0:
        return
    cells = table.ravel().copy()
    place = data.draw(st.sampled_from(np.flatnonzero(cells >= 0).tolist()))
    lost = int(cells[place])
    cells[place] = data.draw(st.sampled_from([-1, length, (lost + 1) % length]))
    broken = cells.reshape(table.shape)
    if length == 1 and cells[place] == 0:
        return
    with pytest.raises(LayoutError) as caught:
        from_table(broken, length)
    assert f"token {lost} in no slot" in caught.value.got
    assert f"each token 0..{length - 1} " in caught.value.expected


@pytest.mark.rule("LAYOUT-5")
def test_a_doubled_and_a_foreign_token_are_named():
    with pytest.raises(LayoutError) as doubled:
        from_table([[0, 1], [1, 2]], 3)
    assert "token 1 in 2 slots" in doubled.value.got
    with pytest.raises(LayoutError) as foreign:
        from_table([[0, 1], [5, 2]], 3)
    assert "token 5 with S = 3" in foreign.value.got
    with pytest.raises(LayoutError) as one_more:
        from_table([[0, 1], [3, 2]], 3)
    assert "token 3 with S = 3" in one_more.value.got


def test_a_table_given_to_the_ring_is_not_changed_and_not_kept():
    """The caller may reuse the array: neither side sees the other's changes."""
    x = np.random.default_rng(0).normal(size=(1, 1, 4, 2))
    table = np.array([[3, 0], [1, 2]])
    run = rs.ring(x, x, x, workers=2, layout=table)
    table[:] = 0
    assert run.layout_q.table.tolist() == [[3, 0], [1, 2]]


# --- unpermute --------------------------------------------------------------------------------


@pytest.mark.rule("LAYOUT-6", "LAYOUT-1", "LAYOUT-2")
@EVERY_W
@EVERY_CHUNK
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_unpermute_turns_striped_rows_into_contiguous_ones(workers, chunk, axis):
    """Worker r ends with tokens r*n .. r*n + n - 1; token p lay in slot p // W of worker p mod W."""
    shape = [2, 3]
    shape.insert(axis, chunk)
    parts = [np.random.default_rng(r).normal(size=shape) for r in range(workers)]
    got = rs.unpermute(parts, axis)
    assert len(got) == workers
    for r in range(workers):
        for t in range(chunk):
            token = r * chunk + t
            want = np.take(parts[token % workers], token // workers, axis)
            assert (np.take(got[r], t, axis) == want).all()


@pytest.mark.rule("LAYOUT-6")
@EVERY_W
def test_unpermute_agrees_with_sharding_the_whole(workers):
    whole = np.random.default_rng(workers).normal(size=(1, 2, 3 * workers, 4))
    got = rs.unpermute(rs.shard(whole, striped(3 * workers, workers)))
    want = rs.shard(whole, contiguous(3 * workers, workers))
    assert all((g == w).all() for g, w in zip(got, want, strict=True))


# --- LSE tiles --------------------------------------------------------------------------------


@pytest.mark.rule("LAYOUT-7")
@pytest.mark.parametrize("length", [128, 256, 384, 640])
def test_row_t_of_the_lse_stands_at_t_mod_128_and_t_over_128(length):
    lse = np.random.default_rng(length).normal(size=(2, 3, length))
    lse[0, 1, 5] = -np.inf
    tiles = lse_to_tiles(lse)
    assert tiles.shape == (2, 3, 128, length // 128) and tiles.flags.c_contiguous
    for t in range(length):
        assert (tiles[:, :, t % 128, t // 128] == lse[:, :, t]).all()
    back = lse_from_tiles(tiles)
    assert back.shape == lse.shape and (back == lse).all()


@pytest.mark.rule("LAYOUT-7")
@pytest.mark.parametrize("length", [1, 64, 127, 129, 200])
def test_lengths_that_are_no_multiple_of_128_have_no_tiles(length):
    with pytest.raises(ShapeError):
        lse_to_tiles(np.zeros((1, 1, length)))
    with pytest.raises(ShapeError):
        lse_from_tiles(np.zeros((1, 1, length, 2)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: rs.shard(np.zeros((1, 1, 4, 2)), "zigzag"),
        lambda: rs.unshard([np.zeros((1, 1, 4, 2))], "zigzag"),
    ],
    ids=["shard", "unshard"],
)
def test_a_name_in_the_place_of_a_layout_is_refused_and_the_error_says_how_to_make_one(call):
    with pytest.raises(LayoutError, match="make_layout"):
        call()
