"""One block against one block: shares of whole rows, from lse and delta as given."""

import numpy as np
import pytest
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs
from ringspec.errors import NonFiniteError, ShapeError
from ringspec.problem.model import Tile
from ringspec.problem.options import check
from ringspec.recipes import recipe
from ringspec.spec.block import block_backward
from ringspec.spec.dense_backward import dy_o_sum

EXACT = recipe("float64")
BOUND = 1e-14


def tensors(seed: int = 0, n_q: int = 6, n_k: int = 9, H: int = 4, Hkv: int = 2):
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(2, H, n_q, 3)), random.normal(size=(2, Hkv, n_k, 3)),
        random.normal(size=(2, Hkv, n_k, 5)), random.normal(size=(2, H, n_q, 5)),
    )  # fmt: skip


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 3},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": np.random.default_rng(5).normal(size=(4, 6, 9))},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "sinks": {"sinks": np.array([1.0, -1.0, 3.0, 0.0])},
    "empty rows": {"bound_min": np.full(6, 9), "bound_max": np.full(6, 9)},
}


@pytest.mark.rule(
    "BWD-1", "BWD-2", "BWD-3", "BWD-4", "BWD-5", "BWD-6", "BWD-7", "BWD-8", "BWD-10", "BWD-11"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_shares_of_key_blocks_add_up_to_the_whole(name):
    """Both the dense block function and the ring's block, over three key blocks."""
    q, k, v, dy = tensors()
    options = OPTIONS[name]
    forward = rs.attention(q, k, v, **options)
    want = rs.attention_backward(q, k, v, dy, **options)
    scale = row_scale(q, k, v, dy, **options)
    delta = dy_o_sum(dy, forward.o, EXACT)
    whole = check(q, k, v, options)
    dq, dense_dq, dk, dv, dense_dk = 0, 0, [], [], []
    for block in range(3):
        index = np.arange(3 * block, 3 * block + 3)
        columns = whole.columns.take(index)
        share = block_backward(
            q, k[:, :, index], v[:, :, index], dy, forward.lse, delta,
            Tile(whole.rows, columns, whole.terms, EXACT),
        )  # fmt: skip
        inside = dict(options, positions_k=index, positions_q=whole.rows.position)
        if name == "bias":
            inside["bias"] = options["bias"][:, :, index]
        dense = rs.attention_block_backward(
            q, k[:, :, index], v[:, :, index], dy, lse=forward.lse, delta=delta, **inside
        )
        dq, dense_dq = dq + share.dq, dense_dq + dense.dq
        dk.append(share.dk)
        dv.append(share.dv)
        dense_dk.append(dense.dk)
    for got in (dq, dense_dq):
        assert worst_row_error(got, want.dq, scale.dq) <= BOUND
    for got in (dk, dense_dk):
        assert worst_row_error(np.concatenate(got, axis=2), want.dk, scale.dk) <= BOUND
    assert worst_row_error(np.concatenate(dv, axis=2), want.dv, scale.dv) <= BOUND


@pytest.mark.rule("BWD-11")
def test_lse_is_used_as_given_and_p_is_not_renormalised():
    q, k, v, dy = tensors()
    lse = rs.attention(q, k, v).lse
    delta = np.zeros(lse.shape)
    one = rs.attention_block_backward(q, k, v, dy, lse=lse, delta=delta)
    half = rs.attention_block_backward(q, k, v, dy, lse=lse + np.log(2.0), delta=delta)
    whole = check(q, k, v, {})
    ring_half = block_backward(q, k, v, dy, lse + np.log(2.0), delta, whole.tile)
    for got in (half, ring_half):
        assert np.abs(2 * got.dv - one.dv).max() <= 1e-14
        assert np.abs(2 * got.dq - one.dq).max() <= 1e-14


@pytest.mark.rule("BWD-10")
def test_an_empty_row_sends_no_gradient_even_with_a_huge_delta():
    q, k, v, dy = tensors()
    lse, delta = np.full((2, 4, 6), -np.inf), np.full((2, 4, 6), 1e300)
    got = rs.attention_block_backward(q, k, v, dy, lse=lse, delta=delta)
    whole = check(q, k, v, {})
    block = block_backward(q, k, v, dy, lse, delta, whole.tile)
    for share in (got, block):
        assert not share.dq.any() and not share.dk.any() and not share.dv.any()


@pytest.mark.rule("SOFT-2", "SOFT-3", "SOFT-4")
def test_partial_results_merge_into_the_whole():
    """Three key blocks, of which the first sees nothing."""
    q, k, v, _ = tensors()
    mask = np.random.default_rng(1).random((2, 1, 6, 9)) < 0.6
    mask[:, :, :, :3], mask[0, 0, 2] = False, False
    want = rs.attention(q, k, v, mask=mask)
    parts = []
    for block in range(3):
        index = slice(3 * block, 3 * block + 3)
        part = rs.attention(q, k[:, :, index], v[:, :, index], mask=mask[..., index])
        parts.append((part.o, part.lse))
    scale = row_scale(q, k, v, mask=mask)
    for order in (parts, parts[::-1]):
        got = rs.merge_partials(order)
        assert worst_row_error(got.o, want.o, scale.o) <= BOUND
        assert worst_row_error(got.lse, want.lse, scale.lse) <= BOUND
    assert (got.lse[0, :, 2] == -np.inf).all() and (got.o[0, :, 2] == 0).all()


@pytest.mark.rule("SOFT-2")
def test_merging_two_empty_partials_is_empty():
    o, lse = np.zeros((1, 1, 2, 3)), np.full((1, 1, 2), -np.inf)
    got = rs.merge_partials([(o, lse), (o, lse)])
    assert (got.o == 0).all() and (got.lse == -np.inf).all()


def test_bad_partials_are_refused():
    o, lse = np.zeros((1, 1, 2, 3)), np.zeros((1, 1, 2))
    with pytest.raises(ShapeError):
        rs.merge_partials([])
    with pytest.raises(ShapeError):
        rs.merge_partials([(o, lse), (o[:, :, :1], lse[:, :, :1])])
    with pytest.raises(ShapeError):
        rs.merge_partials([(o, lse[:, :, :1])])
    with pytest.raises(NonFiniteError):
        rs.merge_partials([(o, lse + np.inf)])
