"""Padded documents and interleaved requests, with the layouts of ringspec.layouts, under every scheme."""

import numpy as np
import pytest
from covering import covering
from oracle.row_scale import row_scale, worst_row_error
from schemes.test_against_dense import BOUND, compare_all, dense, tensors

import ringspec as rs
from ringspec import layouts
from ringspec.errors import LayoutError, OptionError

RESULTS = ("o", "lse", "dq", "dk", "dv")
CU = [0, 3, 9, 9, 14]  # one document is empty; the last of 15 tokens belongs to none
MESHES = {
    "ring": {"ring": 3},
    "double_ring": {"outer": 2, "inner": 3},
    "all_gather": {"cp": 3},
    "ulysses": {"ulysses": 4},
    "usp": {"ring": 3, "ulysses": 2},
    "usp, ulysses outermost": {"ulysses": 2, "ring": 3},
}
FACTORS = {
    "scheme": list(MESHES),
    "make": ["zigzag_padded", "contiguous_padded", "striped_padded"],
    "room": ["least", "one unit more", "different"],
    "mask": [{"causal": True}, {"window": (2, 1)}, {}],
    "heads": [(4, 2), (4, 1), (12, 3)],
}
ROWS = covering(FACTORS)


def padded_layout(make, room, workers, starts):
    """Return a layout in which every document has room for its tokens and, unless ``room`` is 'least', for more."""
    unit = 2 * workers
    lengths = np.diff(starts)
    extra = {"least": 0, "one unit more": 1, "different": np.arange(len(lengths)) % 3}[room]
    rooms = -(-lengths // unit) * unit + unit * extra
    return getattr(layouts, make)(starts, [0, *np.cumsum(rooms).tolist()], workers)


def run_padded(row, arrays, options):
    """Run a scheme with padded documents; the token after the last document is laid out like one more document."""
    mesh = MESHES[row["scheme"]]
    workers = int(np.prod(list(mesh.values())))
    layout = padded_layout(row["make"], row["room"], workers, [*CU, 15])
    *arrays, dlse = arrays
    scheme = row["scheme"].partition(",")[0]
    return rs.context_parallel(
        *arrays, dlse=dlse, mesh=mesh, scheme=scheme, layout=layout, **options
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_padded_documents_equal_dense_attention(row):
    arrays = tensors(row["heads"], (5, 3), 15, 15, ROWS.index(row))
    options = {"cu_seqlens": CU, **row["mask"]}
    run = run_padded(row, arrays, options)
    compare_all(run, dense(*arrays, options), row_scale(*arrays, **options))


@pytest.mark.parametrize("scheme", MESHES)
def test_the_room_of_padded_documents_changes_no_result(scheme):
    arrays = tensors((4, 2), (5, 3), 15, 15, 2)
    options = {"cu_seqlens": CU, "causal": True}
    scale = row_scale(*arrays, **options)
    first, *others = (
        run_padded({"scheme": scheme, "make": "zigzag_padded", "room": room}, arrays, options)
        for room in FACTORS["room"]
    )
    for other in others:
        for name in RESULTS:
            unit = getattr(scale, name)
            error = worst_row_error(getattr(other, name), getattr(first, name), unit)
            assert error <= BOUND, (name, error)


@pytest.mark.rule("CP-6")
def test_ranks_without_a_token_take_part():
    """In 6 slots for each document of 1 or 2 tokens, ranks 0 and 1 of 3 hold everything."""
    arrays = tensors((4, 2), (5, 3), 3, 3, 6)
    options = {"cu_seqlens": [0, 1, 3], "causal": True}
    layout = layouts.zigzag_padded([0, 1, 3], [0, 6, 12], 3)
    assert (layout.table[2] == -1).all()
    for scheme, mesh in (("ring", {"ring": 3}), ("all_gather", {"cp": 3})):
        *inputs, dlse = arrays
        run = rs.context_parallel(
            *inputs, dlse=dlse, mesh=mesh, scheme=scheme, layout=layout, **options
        )
        compare_all(run, dense(*arrays, options), row_scale(*arrays, **options))


# Request 0 has a prefix of 5 and 3 new tokens, request 1 no prefix and 2 new, request 2 a prefix of 4 and 1 new.
PACKED = {
    "cu_seqlens": [0, 3, 5, 6],
    "cu_seqlens_k": [0, 8, 10, 15],
    "positions_q": [5, 6, 7, 0, 1, 4],
    "positions_k": [*range(8), 0, 1, *range(5)],
    "causal": True,
}


@pytest.mark.parametrize("interleave", [1, 2, 16])
def test_the_keys_of_each_request_are_interleaved_from_its_own_first_key(interleave):
    q, k, v, _, _ = tensors((4, 2), (5, 3), 6, 15, 4)
    expected, scale = dense(q, k, v, None, None, PACKED), row_scale(q, k, v, **PACKED)
    keywords = {"interleave": interleave, **PACKED}
    decode = rs.context_parallel(q, k, v, mesh={"dcp": 4}, scheme="dcp", **keywords)
    compare_all(decode, expected, scale)
    padded = layouts.zigzag_padded(PACKED["cu_seqlens"], [0, 6, 18, 24], 3)
    for layout in ("striped", "zigzag_per_document", padded):
        prefill = rs.context_parallel(
            q, k, v, mesh={"pcp": 3}, scheme="pcp", layout=layout, **keywords
        )
        compare_all(prefill, expected, scale)
    starts, lengths = [0, 8, 10], [8, 2, 5]
    for rank, result in enumerate(decode.ranks):
        own = [a + i for a, n in zip(starts, lengths, strict=True) for i in range(n)
               if i // interleave % 4 == rank]  # fmt: skip
        assert result.key.tokens == tuple(own)
        assert len(own) == layouts.interleaved_lengths(lengths, 4, interleave)[rank].sum()


def test_a_prefill_holds_the_prefix_interleaved_and_new_keys_beside_their_queries():
    q, k, v, _, _ = tensors((4, 2), (5, 3), 6, 15, 4)
    table = [[0, 3, -1], [1, 4, -1], [2, 5, -1]]
    run = rs.context_parallel(
        q, k, v, mesh={"pcp": 3}, scheme="pcp", layout=table, interleave=2, **PACKED
    )
    held = [result.key.tokens for result in run.ranks]
    assert held == [(0, 1, 10, 11, 5, 8, -1), (2, 3, 12, 13, 6, 9, -1), (4, 7, 14, -1)]


def test_requests_may_lack_queries_and_tokens_after_the_last_request_are_padding():
    q, k, v, _, _ = tensors((4, 2), (5, 3), 6, 9, 4)
    options = {"cu_seqlens": [0, 4], "cu_seqlens_k": [0, 5, 8], "causal": True, "q_offset": 1}
    expected, scale = dense(q, k, v, None, None, options), row_scale(q, k, v, **options)
    for scheme, mesh in (("dcp", {"dcp": 2}), ("pcp", {"pcp": 3})):
        run = rs.context_parallel(q, k, v, mesh=mesh, scheme=scheme, layout=None if scheme == "dcp" else "striped", **options)  # fmt: skip
        compare_all(run, expected, scale)


def test_a_request_with_fewer_keys_than_queries_and_an_unused_interleave_are_refused():
    q, k, v, _, _ = tensors((4, 2), (5, 3), 6, 15, 4)
    packed = PACKED | {"cu_seqlens_k": [0, 13, 14, 15]}
    with pytest.raises(LayoutError, match="in each request"):
        rs.context_parallel(q, k, v, mesh={"pcp": 1}, scheme="pcp", **packed)
    pair = [list(range(6))], [list(range(15))]
    with pytest.raises(OptionError, match="layout or interleave"):
        rs.context_parallel(
            q, k, v, mesh={"pcp": 1}, scheme="pcp", layout=pair, interleave=2, **PACKED
        )
