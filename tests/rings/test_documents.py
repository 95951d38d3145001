"""`ringspec.layouts`: what it refuses, and its functions on layouts of every kind."""

import itertools

import numpy as np
import pytest
from refusals import refuses

import ringspec as rs
from ringspec import layouts
from ringspec.errors import DtypeError, LayoutError, OptionError


@pytest.mark.parametrize(
    "make,unit",
    [(layouts.zigzag_padded, 6), (layouts.contiguous_padded, 3), (layouts.striped_padded, 3)],
)
def test_a_room_must_hold_its_document_and_divide_evenly(make, unit):
    assert make([0, 2], [0, unit], 3).length == 2
    with refuses(LayoutError, match=f"document 1.*= {unit}.*{unit + 1} slots.*to {unit} slots"):
        make([0, 2, 4], [0, unit, 2 * unit + 1], 3)
    with refuses(LayoutError, match=f"to {2 * unit} slots"):
        make([0, unit + 1], [0, unit], 3)


@pytest.mark.parametrize("wrong", [[1, 4], [0, 4, 2], [], [0.0, 4.0], 4, None, [[0, 4]], "cu"])
def test_cu_seqlens_begin_with_0_and_never_decrease(wrong):
    for given in ((wrong, [0, 4]), ([0, 4], wrong)):
        with pytest.raises((OptionError, DtypeError)):
            layouts.zigzag_padded(*given, 2)


def test_the_two_lists_have_the_same_documents():
    with refuses(LayoutError, match="same length.*2 and 3"):
        layouts.zigzag_padded([0, 4], [0, 4, 8], 2)


@pytest.mark.parametrize("interleave", [0, -1, 1.0, True, None, "4"])
def test_the_interleave_is_an_integer_of_at_least_1(interleave):
    for function in (layouts.interleaved, layouts.interleaved_lengths):
        with refuses(LayoutError, match="interleave >= 1"):
            function(5, 2, interleave)


@pytest.mark.parametrize("lengths", [-1, [3, -1], 2.5, ["3"], None])
def test_lengths_are_integers_of_at_least_0(lengths):
    for function in (layouts.interleaved, layouts.interleaved_lengths):
        with pytest.raises((LayoutError, DtypeError)):
            function(lengths, 2)


def test_a_prefix_is_one_number_or_one_per_document():
    layout = layouts.zigzag_padded([0, 4, 8], [0, 4, 8], 2)
    one, each = (layouts.positions(layout, [0, 4, 8], prefix) for prefix in (7, [7, 7]))
    assert one.tolist() == each.tolist() == [[7, 10, 7, 10], [8, 9, 8, 9]]
    with refuses(LayoutError, match="one integer or 2"):
        layouts.positions(layout, [0, 4, 8], [1, 2, 3])


def test_cu_seqlens_of_a_layout_end_at_its_number_of_tokens():
    layout = layouts.zigzag_padded([0, 3], [0, 4], 2)
    for function in (layouts.positions, layouts.local_lengths, layouts.local_cu_seqlens):
        with refuses(LayoutError, match="end at 3"):
            function(layout, [0, 4])
    with refuses(LayoutError, match="a Layout"):
        layouts.positions([[0, 1]])
    with refuses(LayoutError, match="0..2"):
        layouts.visible_lengths(layout, [3])


MADE = {
    "contiguous": rs.make_layout("contiguous", 12, 3),
    "striped": rs.make_layout("striped", 12, 3),
    "zigzag": rs.make_layout("zigzag", 12, 3),
    "zigzag_per_document": rs.make_layout("zigzag_per_document", 12, 3, cu_seqlens=[0, 5, 5, 12]),
    "zigzag_padded": layouts.zigzag_padded([0, 5, 5, 12], [0, 6, 12, 24], 3),
    "contiguous_padded": layouts.contiguous_padded([0, 5, 5, 12], [0, 6, 9, 18], 3),
    "striped_padded": layouts.striped_padded([0, 5, 5, 12], [0, 6, 9, 18], 3),
    "interleaved": layouts.interleaved([5, 0, 7], 3, 2),
    "table": layouts.from_table([[11, 0, -1, 5, 2, 9], [-1] * 6, [1, 3, 4, 6, 7, 8], [10] + [-1] * 5], 12),
}  # fmt: skip
CU_SEQLENS = [0, 5, 5, 12]


@pytest.mark.parametrize("name", MADE)
def test_owner_length_and_visible_keys_count_single_tokens(name):
    layout = MADE[name]
    owner, slot = layouts.owner_and_slot(layout)
    assert layout.length == 12
    assert [layout.table[r, t] for r, t in zip(owner, slot, strict=True)] == list(range(12))
    document = [next(d for d in range(3) if x < CU_SEQLENS[d + 1]) for x in range(12)]
    lengths = layouts.local_lengths(layout, CU_SEQLENS)
    seen = layouts.visible_lengths(layout, range(12), CU_SEQLENS)
    for r, d in itertools.product(range(layout.workers), range(3)):
        assert lengths[r, d] == sum(owner[x] == r and document[x] == d for x in range(12))
    for r, x in itertools.product(range(layout.workers), range(12)):
        keys = [y for y in range(x + 1) if owner[y] == r and document[y] == document[x]]
        assert seen[r, x] == len(keys)


def test_in_an_interleaved_layout_the_visible_keys_are_the_length_up_to_the_query():
    for workers, interleave in itertools.product((1, 2, 3), (1, 2, 5)):
        layout = layouts.interleaved([9, 23], workers, interleave)
        seen = layouts.visible_lengths(layout, range(9, 32), [0, 9, 32])
        expected = layouts.interleaved_lengths(np.arange(23) + 1, workers, interleave)
        assert seen.tolist() == expected.tolist()


def test_lengths_of_any_shape_keep_it():
    got = layouts.interleaved_lengths([[5, 6], [0, 7]], 2, 4)
    assert got.shape == (2, 2, 2) and got.sum(axis=0).tolist() == [[5, 6], [0, 7]]


@pytest.mark.parametrize("name", MADE)
def test_a_ring_runs_over_every_layout_that_the_module_makes(name):
    layout = MADE[name]
    random = np.random.default_rng(3)
    q, k, v, dy = (random.standard_normal((1, 1, 12, 4)) for _ in range(4))
    told = {"causal": True, "cu_seqlens": CU_SEQLENS}
    run = rs.ring(q, k, v, dy, workers=layout.workers, layout=layout, **told)
    assert np.abs(run.o - rs.attention(q, k, v, **told).o).max() <= 1e-14
    gradients = rs.attention_backward(q, k, v, dy, **told)
    assert np.abs(run.gradients.dk - gradients.dk).max() <= 1e-13
