"""Layouts of padded documents and of decode: each formula against loops over single tokens."""

import itertools

import numpy as np
import pytest

import ringspec as rs
from ringspec.spec.layout import (
    interleaved,
    interleaved_length,
    local_cu_seqlens,
    positions,
    visible_length,
    zigzag_padded,
)

WORKERS = (1, 2, 3, 5)
# Documents as (tokens, chunks of room): full, partly filled, empty, shorter than one chunk.
DOCUMENTS = (((4, 1),), ((3, 1), (6, 2)), ((0, 1), (7, 3), (1, 2)), ((0, 0), (5, 2)), ())
INTERLEAVES = (1, 2, 4, 16)


def bounds(lengths) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


def packs(workers):
    """Yield (lengths, rooms) in which each room is a multiple of 2W and no shorter than its document."""
    for documents in DOCUMENTS:
        lengths = [min(n, 2 * workers * chunk) for n, chunk in documents]
        yield lengths, [2 * workers * chunk for _, chunk in documents]


@pytest.mark.rule("LAYOUT-8")
@pytest.mark.parametrize("workers", WORKERS)
def test_a_token_of_a_padded_document_is_on_the_worker_of_its_chunk(workers):
    for lengths, rooms in packs(workers):
        table = zigzag_padded(bounds(lengths), bounds(rooms), workers).table
        assert table.shape == (workers, sum(rooms) // workers) and table.dtype == np.int64
        rows = [[] for _ in range(workers)]
        token = 0
        for length, room in zip(lengths, rooms, strict=True):
            chunk = max(room // (2 * workers), 1)
            for slot in range(room):
                rows[min(slot // chunk, 2 * workers - 1 - slot // chunk)].append(
                    token + slot if slot < length else -1
                )
            token += length
        assert table.tolist() == rows


@pytest.mark.rule("LAYOUT-8")
@pytest.mark.parametrize("workers", WORKERS)
def test_without_padding_the_table_lists_the_slots_of_the_padded_pack(workers):
    rooms = [2 * workers, 6 * workers]
    table = zigzag_padded(bounds(rooms), bounds(rooms), workers).table
    same = rs.make_layout("zigzag_per_document", sum(rooms), workers, cu_seqlens=bounds(rooms))
    assert np.array_equal(table, same.table)


@pytest.mark.rule("LAYOUT-9")
@pytest.mark.parametrize("workers,interleave", [*itertools.product(WORKERS, INTERLEAVES)])
def test_blocks_of_i_tokens_go_to_the_workers_in_turn(workers, interleave):
    for lengths in ([], [0], [1], [17], [5, 0, 34]):
        table = interleaved(bounds(lengths), workers, interleave).table
        assert table.dtype == np.int64
        rows = [[] for _ in range(workers)]
        token = 0
        for length in lengths:
            mine = [[] for _ in range(workers)]
            for i in range(length):
                mine[(i // interleave) % workers].append(token + i)
            for row, held in zip(rows, mine, strict=True):
                row.extend(held + [-1] * (len(mine[0]) - len(held)))
            token += length
        assert table.tolist() == rows


@pytest.mark.rule("LAYOUT-9")
def test_token_i_is_in_the_slot_of_the_formula():
    table = interleaved([0, 77], 3, 4).table
    for i in range(77):
        assert table[i // 4 % 3, i // 12 * 4 + i % 4] == i


@pytest.mark.rule("LAYOUT-10", "LAYOUT-13")
@pytest.mark.parametrize("workers,interleave", [*itertools.product(WORKERS, INTERLEAVES)])
def test_the_local_length_and_the_visible_keys_count_single_tokens(workers, interleave):
    for n in range(3 * workers * interleave + 2):
        for r in range(workers):
            mine = [i for i in range(n) if i // interleave % workers == r]
            assert interleaved_length(n, r, workers, interleave) == len(mine)
            for p in range(max(n - 3, 0), n):
                seen = sum(i <= p for i in mine)
                assert visible_length(p, r, workers, interleave) == seen


@pytest.mark.rule("LAYOUT-11")
def test_a_position_is_the_offset_in_the_document_plus_the_prefix():
    # The empty document 1 has a prefix that no token may get.
    cu_seqlens, prefix, workers = [0, 3, 3, 9], [10, 99, 0], 3
    table = zigzag_padded(cu_seqlens, [0, 6, 6, 18], workers).table
    got = positions(table, cu_seqlens, prefix)
    expected = {token: 10 + token if token < 3 else token - 3 for token in range(9)}
    assert got.tolist() == [[expected.get(token, -1) for token in row] for row in table.tolist()]


@pytest.mark.rule("LAYOUT-12")
@pytest.mark.parametrize("workers", WORKERS)
def test_the_cu_seqlens_of_a_worker_count_its_real_tokens(workers):
    for lengths, rooms in packs(workers):
        cu_seqlens = bounds(lengths)
        table = zigzag_padded(cu_seqlens, bounds(rooms), workers).table
        got = local_cu_seqlens(table, cu_seqlens)
        assert got.dtype == np.int64
        for r, row in enumerate(table.tolist()):
            held = [sum(a <= token < b for token in row) for a, b in itertools.pairwise(cu_seqlens)]
            assert got[r].tolist() == bounds(held)


@pytest.mark.parametrize("layout", ["zigzag_padded", "interleaved"])
def test_a_ring_over_these_layouts_equals_dense_attention(layout):
    cu_seqlens, workers = [0, 7, 12], 3
    made = {
        "zigzag_padded": zigzag_padded(cu_seqlens, [0, 12, 18], workers),
        "interleaved": interleaved(cu_seqlens, workers, 2),
    }[layout]
    random = np.random.default_rng(5)
    q, k, v, dy = (random.standard_normal((1, 2, 12, 4)) for _ in range(4))
    run = rs.ring(q, k, v, dy, workers=workers, layout=made, causal=True, cu_seqlens=cu_seqlens)
    whole = rs.attention(q, k, v, causal=True, cu_seqlens=cu_seqlens)
    backward = rs.attention_backward(q, k, v, dy, causal=True, cu_seqlens=cu_seqlens)
    assert run.layout_q.name == layout
    assert np.abs(run.o - whole.o).max() <= 1e-14
    for name in ("dq", "dk", "dv"):
        assert np.abs(getattr(run.gradients, name) - getattr(backward, name)).max() <= 1e-13
