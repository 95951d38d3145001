"""Masks: every term, alone and together, against a loop over pairs written from the definition.

The loop below works on Python integers, one pair at a time; the specification works on arrays. Then
the offsets that layouts derive (cp_offset, zigzag_offsets) against the mask of global positions.
"""

import numpy as np
import pytest
from covering import covering
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

import ringspec as rs
from ringspec.errors import OptionError
from ringspec.problem.model import Problem
from ringspec.problem.options import check
from ringspec.rings.layouts import from_table
from ringspec.rings.schedules import cp_offset, zigzag_offsets
from ringspec.spec.layout import contiguous, striped, zigzag
from ringspec.spec.masks import visible

B, H, HKV, SQ, SK = 2, 4, 2, 7, 9


def problem_of(options: dict, n_q: int = SQ, n_k: int = SK) -> Problem:
    """A problem whose values do not matter."""
    return check(
        np.ones((B, H, n_q, 2)), np.ones((B, HKV, n_k, 2)), np.ones((B, HKV, n_k, 2)), options
    )


def mask_of(options: dict, n_q: int = SQ, n_k: int = SK) -> np.ndarray:
    """What the specification lets through, written out to [B, H, Sq, Sk]."""
    problem = problem_of(options, n_q, n_k)
    allowed = visible(problem.rows, problem.columns, problem.terms)
    return np.broadcast_to(allowed, (B, H, n_q, n_k))


def per_token(x, b: int, i: int) -> int:
    """Entry of an option of shape [S] or [B, S]."""
    x = np.asarray(x)
    return int(x[i]) if x.ndim == 1 else int(x[b, i])


def per_pair(x, b: int, h: int, i: int, j: int):
    """Entry of an option that broadcasts to [B, H, Sq, Sk]."""
    x = np.asarray(x)
    place = (b, h, i, j)[4 - x.ndim :]
    return x[tuple(0 if n == 1 else p for p, n in zip(place, x.shape, strict=True))]


def document(starts, token: int) -> int:
    """Number of the packed document that holds a token; -1 behind the last."""
    for number in range(len(starts) - 1):
        if starts[number] <= token < starts[number + 1]:
            return number
    return -1


def sees(options: dict, b: int, h: int, i: int, j: int) -> bool:
    """The conjunction of the terms, over global positions."""
    pq = i + options.get("q_offset", 0)
    pk = j
    if "positions_q" in options:
        pq = per_token(options["positions_q"], b, i)
    if "positions_k" in options:
        pk = per_token(options["positions_k"], b, j)
    if options.get("causal", False) and not pk <= pq:
        return False
    if options.get("window") is not None:
        window = options["window"]
        left, right = window if isinstance(window, tuple) else (window, window)
        if left is not None and not -left <= pk - pq:
            return False
        if right is not None and not pk - pq <= right:
            return False
    if "segments_q" in options:
        of_q = per_token(options["segments_q"], b, i)
        of_k = per_token(options.get("segments_k", options["segments_q"]), b, j)
        if of_q != of_k or of_q < 0 or of_k < 0:
            return False
    if "cu_seqlens" in options:
        of_q = document(options["cu_seqlens"], i)
        of_k = document(options.get("cu_seqlens_k", options["cu_seqlens"]), j)
        if of_q != of_k or of_q < 0 or of_k < 0:
            return False
    if "bound_min" in options:
        low = per_token(options["bound_min"], b, i)
        high = per_token(options["bound_max"], b, i)
        if not low <= pk < high:
            return False
    if "mask" in options and not per_pair(options["mask"], b, h, i, j):
        return False
    return not ("bias" in options and per_pair(options["bias"], b, h, i, j) == -np.inf)


def by_loops(options: dict, n_q: int = SQ, n_k: int = SK) -> np.ndarray:
    allowed = np.zeros((B, H, n_q, n_k), dtype=bool)
    for b in range(B):
        for h in range(H):
            for i in range(n_q):
                for j in range(n_k):
                    allowed[b, h, i, j] = sees(options, b, h, i, j)
    return allowed


RANDOM = np.random.default_rng(7)
POSITIONS_Q = RANDOM.integers(-5, 15, (B, SQ))
POSITIONS_K = RANDOM.integers(-5, 15, (B, SK))

TERMS = {
    "causal": [{}, {"causal": True}],
    "window": [
        {}, {"window": 0}, {"window": (2, 1)}, {"window": (0, None)}, {"window": (None, 3)},
        {"window": 4}, {"window": (None, None)}, {"window": (3, 0)}, {"window": 100},
    ],
    "documents": [
        {},
        {"segments_q": RANDOM.integers(-1, 2, SQ), "segments_k": RANDOM.integers(-1, 2, (B, SK))},
        {"segments_q": RANDOM.integers(-2, 3, (B, SQ)), "segments_k": RANDOM.integers(-2, 3, SK)},
        {"cu_seqlens": [0, 3, 7], "cu_seqlens_k": [0, 4, 9]},
        {"cu_seqlens": [0, 0, 2, 2, 5], "cu_seqlens_k": [0, 3, 3, 6, 6]},
        {"cu_seqlens": [0], "cu_seqlens_k": [0, 9]},
        {"cu_seqlens": [0, 5]},
    ],
    "bounds": [
        {},
        {"bound_min": RANDOM.integers(-3, 8, SQ), "bound_max": RANDOM.integers(0, 15, (B, SQ))},
        {"bound_min": np.zeros((B, SQ), int), "bound_max": np.full(SQ, SK)},
        {"bound_min": np.full(SQ, 4), "bound_max": np.full(SQ, 4)},
    ],
    "mask": [
        {},
        {"mask": RANDOM.random((B, H, SQ, SK)) < 0.6},
        {"mask": RANDOM.random((SQ, SK)) < 0.6},
        {"mask": RANDOM.random((B, 1, 1, SK)) < 0.6},
        {"mask": RANDOM.random((H, SQ, 1)) < 0.6},
        {"mask": np.array(True)},
        {"mask": np.array(False)},
    ],
    "bias": [
        {},
        {"bias": np.where(RANDOM.random((B, H, SQ, SK)) < 0.3, -np.inf, 1.0)},
        {"bias": np.where(RANDOM.random((H, 1, SK)) < 0.3, -np.inf, -1e300)},
        {"bias": np.where(RANDOM.random((1, 1, SQ, 1)) < 0.3, -np.inf, 0.0)},
    ],
    "positions": [
        {},
        {"q_offset": 3},
        {"q_offset": -4},
        {"positions_q": POSITIONS_Q},
        {"positions_k": POSITIONS_K[1]},
        {"positions_q": POSITIONS_Q[0], "positions_k": POSITIONS_K, "q_offset": 3},
    ],
}  # fmt: skip
RULES = {
    "causal": ("MASK-1",),
    "window": ("MASK-2",),
    "documents": ("MASK-3", "MASK-5"),
    "bounds": ("MASK-4",),
    "mask": ("MASK-6",),
    "bias": ("MASK-7",),
    "positions": ("MASK-8",),
}
ALONE = [
    pytest.param(term, number, marks=pytest.mark.rule(*RULES[term]), id=f"{term}{number}")
    for term, values in TERMS.items()
    for number in range(1, len(values))
]
TOGETHER = covering({term: list(range(len(values))) for term, values in TERMS.items()})


# --- the terms --------------------------------------------------------------------------------


@pytest.mark.rule("MASK-9")
@pytest.mark.parametrize(("term", "number"), ALONE)
def test_a_term_alone_is_what_the_loop_says(term, number):
    """Under each choice of positions, so that indices cannot take their place."""
    for positions in TERMS["positions"]:
        options = positions | TERMS[term][number]
        assert (mask_of(options) == by_loops(options)).all(), positions


@pytest.mark.rule(
    "MASK-1", "MASK-2", "MASK-3", "MASK-4", "MASK-5", "MASK-6", "MASK-7", "MASK-8", "MASK-9"
)
@pytest.mark.parametrize("number", range(len(TOGETHER)))
def test_terms_together_are_what_the_loop_says(number):
    """Every pair of values of any two terms occurs in some row."""
    options = {}
    for term, value in TOGETHER[number].items():
        options |= TERMS[term][value]
    assert (mask_of(options) == by_loops(options)).all()


@pytest.mark.rule("MASK-9")
def test_the_mask_of_terms_is_the_conjunction_of_their_masks():
    for row in TOGETHER:
        together, each = {}, np.ones((B, H, SQ, SK), dtype=bool)
        positions = TERMS["positions"][row["positions"]]
        for term, value in row.items():
            together |= TERMS[term][value]
            each &= mask_of(positions | TERMS[term][value])
        assert (mask_of(together) == each).all()


@st.composite
def random_options(draw):
    """Any subset of the terms with random values, and lengths from 0."""
    n_q, n_k = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options: dict = {}

    def tokens(low: int, high: int, length: int) -> np.ndarray:
        return random.integers(low, high, (B, length) if random.random() < 0.5 else (length,))

    side = st.none() | st.integers(0, 7)
    if draw(st.booleans()):
        options["causal"] = draw(st.booleans())
    if draw(st.booleans()):
        options["window"] = draw(side | st.tuples(side, side))
    packed = draw(st.sampled_from(["none", "segments", "cu_seqlens"]))
    if packed == "segments":
        options |= {"segments_q": tokens(-2, 3, n_q), "segments_k": tokens(-2, 3, n_k)}
    if packed == "cu_seqlens":
        cuts = [np.sort(random.integers(0, n + 1, 3)).tolist() for n in (n_q, n_k)]
        options |= {"cu_seqlens": [0, *cuts[0]], "cu_seqlens_k": [0, *cuts[1]]}
    if draw(st.booleans()):
        options |= {"bound_min": tokens(-9, 9, n_q), "bound_max": tokens(-9, 9, n_q)}
    if draw(st.booleans()):
        options["mask"] = random.random((B, 1, n_q, n_k)) < 0.7
    if draw(st.booleans()):
        options["bias"] = np.where(random.random((H, n_q, n_k)) < 0.2, -np.inf, 2.0)
    if draw(st.booleans()):
        options["q_offset"] = draw(st.integers(-7, 7))
    if draw(st.booleans()):
        options["positions_q"] = tokens(-9, 9, n_q)
    if draw(st.booleans()):
        options["positions_k"] = tokens(-9, 9, n_k)
    return options, n_q, n_k


@pytest.mark.rule(
    "MASK-1", "MASK-2", "MASK-3", "MASK-4", "MASK-5", "MASK-6", "MASK-7", "MASK-8", "MASK-9"
)
@given(random_options())
def test_random_masks_are_what_the_loop_says(made):
    options, n_q, n_k = made
    assert (mask_of(options, n_q, n_k) == by_loops(options, n_q, n_k)).all()


# --- single facts that implementations get wrong ----------------------------------------------


def one_head(options: dict, n_q: int, n_k: int) -> list[list[int]]:
    return mask_of(options, n_q, n_k)[0, 0].astype(int).tolist()


@pytest.mark.rule("MASK-2")
def test_window_zero_is_self_only():
    assert one_head({"window": 0}, 3, 3) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert one_head({"window": (0, 0), "q_offset": 1}, 2, 3) == [[0, 1, 0], [0, 0, 1]]


@pytest.mark.rule("MASK-2")
def test_both_sides_of_a_window_are_inclusive_and_left_looks_back():
    assert one_head({"window": (2, 1)}, 5, 5)[2] == [1, 1, 1, 1, 0]
    assert one_head({"window": (1, 0)}, 5, 5)[2] == [0, 1, 1, 0, 0]
    assert one_head({"window": (None, 0)}, 3, 3) == one_head({"causal": True}, 3, 3)


@pytest.mark.rule("MASK-3")
def test_padding_does_not_see_padding():
    assert one_head({"segments_q": [-1, 0, -1]}, 3, 3) == [[0, 0, 0], [0, 1, 0], [0, 0, 0]]
    assert one_head({"segments_q": [-2, -1], "segments_k": [-1, -2]}, 2, 2) == [[0, 0], [0, 0]]


@pytest.mark.rule("MASK-3")
def test_segments_need_not_be_sorted_or_together():
    assert one_head({"segments_q": [5, 0, 5]}, 3, 3) == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


@pytest.mark.rule("MASK-4", "MASK-8")
def test_bounds_are_half_open_over_key_positions():
    bounds = {"bound_min": [10, 11], "bound_max": [12, 11]}
    assert one_head(bounds | {"positions_k": [12, 11, 10, 9]}, 2, 4) == [[0, 1, 1, 0], [0, 0, 0, 0]]


@pytest.mark.rule("MASK-5")
def test_tokens_behind_the_last_document_are_padding():
    want = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    assert one_head({"cu_seqlens": [0, 2, 3]}, 4, 4) == want


@pytest.mark.rule("MASK-5", "MASK-8")
def test_documents_are_of_tokens_and_positions_stay_global():
    """cu_seqlens counts tokens, whatever their positions; causality still compares positions."""
    options = {
        "cu_seqlens": [0, 2, 4],
        "causal": True,
        "positions_q": [0, 1, 0, 1],
        "positions_k": [0, 1, 0, 1],
    }
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert one_head(options, 4, 4) == want


@pytest.mark.rule("MASK-7")
def test_a_masking_bias_ends_before_the_soft_cap_and_has_no_gradient():
    """A soft cap of -inf would be -softcap, which is visible."""
    random = np.random.default_rng(3)
    q, k, v, dy = (random.normal(size=(1, 2, 4, 3)) for _ in range(4))
    hidden = random.random((2, 4, 4)) < 0.4
    bias = np.where(hidden, -np.inf, 0.0)
    for options in ({}, {"softcap": 0.8}, {"causal": True, "softcap": 2.0}):
        by_bias = rs.attention(q, k, v, bias=bias, **options)
        by_mask = rs.attention(q, k, v, mask=~hidden, **options)
        assert (by_bias.o == by_mask.o).all() and (by_bias.lse == by_mask.lse).all()
        dbias = rs.attention_backward(q, k, v, dy, bias=bias, **options).dbias
        assert (dbias[hidden] == 0).all() and not np.isnan(dbias).any()


@pytest.mark.rule("MASK-1", "MASK-8")
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 5), (3, 5), (5, 3), (4, 4)])
def test_the_default_aligns_starts_and_sk_minus_sq_aligns_ends(n_q, n_k):
    start = mask_of({"causal": True}, n_q, n_k)[0, 0]
    end = mask_of({"causal": True, "q_offset": n_k - n_q}, n_q, n_k)[0, 0]
    for i in range(n_q):
        for j in range(n_k):
            assert start[i, j] == (j <= i)
            assert end[n_q - 1 - i, n_k - 1 - j] == (j >= i)  # counted from the last rows and keys


@pytest.mark.rule("LAYOUT-5")
def test_a_padding_slot_sees_nothing_and_is_seen_by_nothing():
    problem = problem_of({})
    rows = problem.rows.take(np.array([3, -1, 0]))
    columns = problem.columns.take(np.array([-1, 8]))
    allowed = visible(rows, columns, problem.terms)
    assert np.squeeze(allowed, axis=(0, 1)).tolist() == [
        [False, True],
        [False, False],
        [False, True],
    ]


@pytest.mark.rule("RING-6", "MASK-8", "LAYOUT-5")
@given(random_options(), st.data())
def test_the_mask_of_a_block_is_the_block_of_the_mask(made, data):
    """Any choice of rows and columns, with padding: what travels with a block masks it alike."""
    options, n_q, n_k = made
    problem = problem_of(options, n_q, n_k)
    whole = mask_of(options, n_q, n_k)
    some_q = data.draw(st.lists(st.integers(-1, n_q - 1), max_size=5))
    some_k = data.draw(st.lists(st.integers(-1, n_k - 1), max_size=5))
    rows = problem.rows.take(np.array(some_q, dtype=np.int64))
    columns = problem.columns.take(np.array(some_k, dtype=np.int64))
    allowed = visible(rows, columns, problem.terms)
    allowed = np.broadcast_to(allowed, (B, H, len(some_q), len(some_k)))
    for i, row in enumerate(some_q):
        for j, column in enumerate(some_k):
            want = whole[:, :, row, column] if row >= 0 and column >= 0 else np.zeros((B, H), bool)
            assert (allowed[:, :, i, j] == want).all()


# --- derived offsets --------------------------------------------------------------------------


def causal_block(layout_q, layout_k, a: int, b: int, q_offset: int) -> np.ndarray:
    """[n_q, n_k] of a pair of workers, from the global positions of the two tables."""
    position_q, position_k = layout_q.table[a] + q_offset, layout_k.table[b]
    allowed = np.zeros((len(position_q), len(position_k)), dtype=bool)
    for i, pq in enumerate(position_q):
        for j, pk in enumerate(position_k):
            allowed[i, j] = pk <= pq
    return allowed


def offset_block(n_q: int, n_k: int, offset: int) -> np.ndarray:
    """Visible iff j <= i + offset, local indices."""
    return np.array([[j <= i + offset for j in range(n_k)] for i in range(n_q)]).reshape(n_q, n_k)


W = st.integers(1, 5)
N = st.integers(1, 5)
OFFSET = st.just(0) | st.integers(-30, 30)


@pytest.mark.rule("RING-8")
@given(W, N, N, OFFSET)
def test_contiguous_offset_is_the_mask_of_positions(workers, n_q, n_k, q_offset):
    layout_q, layout_k = contiguous(workers * n_q, workers), contiguous(workers * n_k, workers)
    for a in range(workers):
        for b in range(workers):
            offset = cp_offset(
                "contiguous", a, b, workers=workers, n_q=n_q, n_k=n_k, q_offset=q_offset
            )
            assert offset == a * n_q - b * n_k + q_offset
            want = causal_block(layout_q, layout_k, a, b, q_offset)
            assert (offset_block(n_q, n_k, offset) == want).all(), (a, b)


@pytest.mark.rule("RING-8")
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_equal_contiguous_blocks_are_all_triangle_or_none(workers):
    n = 4
    for a in range(workers):
        for b in range(workers):
            offset = cp_offset("contiguous", a, b, workers=workers, n_q=n, n_k=n)
            block = offset_block(n, n, offset)
            if a == b:
                assert (block == np.tri(n, dtype=bool)).all()
            else:
                assert block.all() if a > b else not block.any()


@pytest.mark.rule("RING-9")
@given(W, N, N, OFFSET)
def test_striped_offset_is_the_mask_of_positions(workers, n_q, n_k, q_offset):
    layout_q, layout_k = striped(workers * n_q, workers), striped(workers * n_k, workers)
    for a in range(workers):
        for b in range(workers):
            offset = cp_offset(
                "striped", a, b, workers=workers, n_q=n_q, n_k=n_k, q_offset=q_offset
            )
            want = causal_block(layout_q, layout_k, a, b, q_offset)
            assert (offset_block(n_q, n_k, offset) == want).all(), (a, b)
            if q_offset == 0:
                assert offset == (0 if a >= b else -1)
                assert offset == cp_offset("striped", a, b, workers=workers, n_q=n_q, n_k=n_k)


@pytest.mark.rule("RING-10")
@given(W, N, N, OFFSET)
def test_zigzag_offsets_are_the_mask_of_positions(workers, chunk_q, chunk_k, q_offset):
    n_q, n_k = 2 * chunk_q, 2 * chunk_k
    layout_q, layout_k = zigzag(workers * n_q, workers), zigzag(workers * n_k, workers)
    for a in range(workers):
        for b in range(workers):
            offsets = zigzag_offsets(a, b, workers=workers, n_q=n_q, n_k=n_k, q_offset=q_offset)
            got = np.block([[offset_block(chunk_q, chunk_k, o) for o in row] for row in offsets])
            if q_offset == 0:
                assert offsets == zigzag_offsets(a, b, workers=workers, n_q=n_q, n_k=n_k)
            want = causal_block(layout_q, layout_k, a, b, q_offset)
            assert (got == want).all(), (a, b)


@pytest.mark.rule("RING-8", "RING-9", "RING-10")
@pytest.mark.parametrize("name", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("q_offset", [-5, 0, 4])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_the_ring_masks_each_block_as_its_offset_says(name, q_offset, workers):
    """`visible` on the shards of the problem, as the ring calls it, n_q != n_k."""
    n_q, n_k = 2, 4
    make = {"contiguous": contiguous, "striped": striped, "zigzag": zigzag}[name]
    layout_q, layout_k = make(workers * n_q, workers), make(workers * n_k, workers)
    problem = problem_of({"causal": True, "q_offset": q_offset}, workers * n_q, workers * n_k)
    sizes = {"workers": workers, "n_q": n_q, "n_k": n_k, "q_offset": q_offset}
    for a in range(workers):
        for b in range(workers):
            rows = problem.rows.take(layout_q.table[a])
            columns = problem.columns.take(layout_k.table[b])
            got = np.squeeze(visible(rows, columns, problem.terms), axis=(0, 1))
            if name == "zigzag":
                offsets = zigzag_offsets(a, b, **sizes)
                want = np.block([[offset_block(1, 2, o) for o in row] for row in offsets])
            else:
                want = offset_block(n_q, n_k, cp_offset(name, a, b, **sizes))
            assert (got == want).all(), (a, b)


@pytest.mark.parametrize("name", ["zigzag", "zigzag_per_document", "stripped", "table", None])
def test_layouts_without_one_offset_are_refused(name):
    with refuses((OptionError, "unknown-name")):
        cp_offset(name, 0, 0, workers=2, n_q=2, n_k=2)


def test_the_block_of_a_table_follows_positions():
    """A reversed table turns the triangle round; no offset could."""
    problem = problem_of({"causal": True}, 3, 3)
    reversed_table = from_table([[2, 1, 0]], 3)
    rows = problem.rows.take(reversed_table.table[0])
    columns = problem.columns.take(reversed_table.table[0])
    got = np.squeeze(visible(rows, columns, problem.terms), axis=(0, 1)).astype(int)
    assert got.tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
