"""The same problem gives the same result for every scheme, degree, order of axes and interleave; and exact identities."""

from dataclasses import replace

import numpy as np
import pytest
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs
from ringspec.schemes.api import context_parallel
from ringspec.schemes.exchanges import usp
from ringspec.schemes.gathers import dcp
from ringspec.schemes.mesh import Mesh
from ringspec.schemes.sharding import by_tables

BOUND = 2e-15  # of the row scale, between two results


def tensors(n_q, n_k=None, heads=(8, 2), seed=0):
    """Return q, k, v, dy with D = 5 and Dv = 3."""
    generator = np.random.default_rng(seed)
    n_k = n_q if n_k is None else n_k
    shapes = [
        (1, heads[0], n_q, 5),
        (1, heads[1], n_k, 5),
        (1, heads[1], n_k, 3),
        (1, heads[0], n_q, 3),
    ]
    return [generator.standard_normal(shape) for shape in shapes]


TRAINED = [
    ("ring", {"ring": 2}, {}),
    ("ring", {"ring": 8}, {"layout": "striped"}),
    ("double_ring", {"outer": 2, "inner": 4}, {"layout": "zigzag"}),
    ("all_gather", {"cp": 4}, {}),
    ("ulysses", {"ulysses": 8}, {}),
    ("usp", {"ring": 2, "ulysses": 4}, {"layout": "zigzag"}),
    ("usp", {"ulysses": 4, "ring": 2}, {"layout": "zigzag"}),
    ("usp", {"ulysses": 2, "ring": 4}, {}),
    ("joint", {"ring": 2, "ulysses": 2}, {"text": [0, 1, 2, 3]}),
]


def test_results_do_not_depend_on_scheme_degree_or_order_of_axes():
    q, k, v, dy = tensors(16)
    scale = row_scale(q, k, v, dy, None, causal=True)
    first = rs.ring(q, k, v, dy, workers=1, causal=True)
    for scheme, mesh, keywords in TRAINED:
        run = context_parallel(q, k, v, dy, mesh=mesh, scheme=scheme, causal=True, **keywords)
        for name in ("o", "lse", "dq", "dk", "dv"):
            error = worst_row_error(getattr(run, name), getattr(first, name), getattr(scale, name))
            assert error <= BOUND, (scheme, mesh, name, error)


def test_decoding_does_not_depend_on_interleave_degree_or_groups():
    q, k, v, _ = tensors(3, 21)
    options = {"causal": True, "q_offset": 18}
    scale, first = row_scale(q, k, v, **options), rs.attention(q, k, v, **options)
    for mesh in ({"dcp": 2}, {"dcp": 4}, {"tp": 2, "dcp": 2}, {"tp": 2, "dcp": 4}):
        for interleave in (1, 2, 4, 21):
            run = context_parallel(
                q, k, v, mesh=mesh, scheme="dcp", interleave=interleave, **options
            )
            for name in ("o", "lse"):
                error = worst_row_error(
                    getattr(run, name), getattr(first, name), getattr(scale, name)
                )
                assert error <= BOUND, (mesh, interleave, name, error)


@pytest.mark.rule("CP-6")
@pytest.mark.parametrize("mean", [-3, 0, 3], ids=lambda mean: f"mean score {mean}")
def test_ranks_without_keys_change_no_bit(mean):
    q, k, v, _ = tensors(2, 13)
    q, k = q + 1, k + mean / 3
    options = {"causal": True, "q_offset": 11}
    one = rs.ring(q, k, v, workers=1, **options)
    run = context_parallel(q, k, v, mesh={"dcp": 4}, scheme="dcp", interleave=13, **options)
    assert [len(result.key.tokens) for result in run.ranks] == [13, 0, 0, 0]
    for name in ("o", "lse"):
        np.testing.assert_array_equal(getattr(run, name), getattr(one, name), strict=True)


def test_prefill_does_not_depend_on_where_the_prefix_ends_and_decoding_continues_it():
    q, k, v, _ = tensors(16)
    scale, whole = row_scale(q, k, v, causal=True), rs.attention(q, k, v, causal=True)
    for prefix in (0, 4, 8, 12):
        new = q[:, :, prefix:]
        options = {"causal": True, "q_offset": prefix}
        run = context_parallel(new, k, v, mesh={"pcp": 2}, scheme="pcp", **options)
        decoded = context_parallel(new, k, v, mesh={"dcp": 4}, scheme="dcp", **options)
        for result in (run, decoded):
            for name in ("o", "lse"):
                want, unit = (
                    getattr(whole, name)[:, :, prefix:],
                    getattr(scale, name)[:, :, prefix:],
                )
                error = worst_row_error(getattr(result, name), want, unit)
                assert error <= BOUND, (prefix, name, error)


@pytest.mark.rule("CP-4")
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (12, 3)])
def test_the_forward_of_ulysses_equals_that_of_one_rank_bit_for_bit(layout, heads):
    q, k, v, _ = tensors(16, heads=heads)
    one = rs.ring(q, k, v, workers=1, causal=True)
    for parts in (1, 2, 4, 8):
        if heads[0] % parts:
            continue
        run = context_parallel(
            q, k, v, mesh={"ulysses": parts}, scheme="ulysses", layout=layout, causal=True
        )
        np.testing.assert_array_equal(run.o, one.o, strict=True)
        np.testing.assert_array_equal(run.lse, one.lse, strict=True)


def test_copies_of_text_rows_agree_within_rounding():
    q, k, v, dy = tensors(15)
    scale = row_scale(q, k, v, dy, None)
    run = context_parallel(q, k, v, dy, mesh={"ring": 3}, scheme="joint", text=[0, 7, 14])
    first, *others = run.ranks
    for other in others:
        assert other.query.tokens[:3] == first.query.tokens[:3] == (0, 7, 14)
        for name in ("o", "lse", "dq", "dk", "dv"):
            unit = getattr(scale, name)[:, :, [0, 7, 14]]
            got, want = getattr(other, name)[:, :, :3], getattr(first, name)[:, :, :3]
            assert worst_row_error(got, want, unit) <= BOUND, (other.rank, name)


def test_each_recipe_rounds_only_where_ulysses_computes():
    q, k, v, _ = tensors(16)
    for recipe in ("bf16", "fp8_e4m3", "bf16_partials"):
        one = rs.ring(q, k, v, workers=1, recipe=recipe, causal=True)
        run = context_parallel(
            q, k, v, mesh={"ulysses": 4}, scheme="ulysses", recipe=recipe, causal=True
        )
        np.testing.assert_array_equal(run.o, one.o)


def test_new_keys_beside_the_cache_are_merged_after_the_heads_have_returned():
    """The path in which the cache is used with all heads of the group, and new tokens with each rank's own."""
    q, k, v, _ = tensors(3, 13)
    options = {"causal": True, "q_offset": 10}
    cache = [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    mesh = Mesh((("tp", 2), ("dcp", 2)))
    scheme = dcp(mesh, 3, cache, heads=8, kv_heads=2, new=(10, 11, 12))
    run = context_parallel(q, k, v, scheme=scheme, **options)
    scale, want = row_scale(q, k, v, **options), rs.attention(q, k, v, **options)
    for name in ("o", "lse"):
        error = worst_row_error(getattr(run, name), getattr(want, name), getattr(scale, name))
        assert error <= BOUND, (name, error)


def test_a_forward_pass_may_end_in_another_layout_than_it_began():
    q, k, v, _ = tensors(8, heads=(4, 4))
    scheme = usp(Mesh((("ulysses", 4),)), [[r, 7 - r] for r in range(4)], heads=4, kv_heads=4)
    elsewhere = by_tables([[2 * r, 2 * r + 1] for r in range(4)], [range(4)] * 4)
    first, last = scheme.forward
    back = replace(last, transfers=(replace(last.transfers[0], to=elsewhere),))
    scheme = replace(scheme, forward=(first, back), home_o=elsewhere, backward=None)
    run = context_parallel(q, k, v, scheme=scheme, causal=True)
    assert run.ranks[1].query.tokens == (2, 3)
    np.testing.assert_array_equal(run.o, rs.ring(q, k, v, workers=1, causal=True).o)
    np.testing.assert_array_equal(run.ranks[1].o, run.o[:, :, 2:4])
