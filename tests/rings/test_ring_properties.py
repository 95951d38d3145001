"""Laws that hold for every problem, tried on random ones by hypothesis."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs
from ringspec.problem.model import Tile
from ringspec.problem.options import check
from ringspec.recipes import recipe
from ringspec.spec.block import block_forward
from ringspec.spec.online_softmax import finish, merge, start

BOUND = 1e-14
seeds = st.integers(0, 2**32 - 1)


def problem(seed: int, n_q: int = 12, n_k: int = 12, H: int = 4, Hkv: int = 2):
    """Random q, k, v, dy, dlse and options with several features at once."""
    random = np.random.default_rng(seed)
    q, dy = random.normal(size=(2, H, n_q, 3)), random.normal(size=(2, H, n_q, 5))
    k, v = random.normal(size=(2, Hkv, n_k, 3)), random.normal(size=(2, Hkv, n_k, 5))
    options = {"causal": bool(seed % 2)}
    if seed % 3 == 0:
        options["softcap"] = 2.0
    if seed % 5 < 2:
        options["sinks"] = random.normal(size=(H, 2))
    if seed % 7 < 3:
        options["window"] = (int(random.integers(0, n_k)), None)
    if seed % 11 < 5:
        options |= {"dropout_p": 0.25, "dropout_seed": seed}
    return q, k, v, dy, random.normal(size=(2, H, n_q)), options


def close(got, want, scale, bound: float = BOUND) -> None:
    """Every tensor of `got` within the bound of that of `want`, in units of the row scale."""
    for name in ("o", "lse", "dq", "dk", "dv", "dsinks"):
        expected = getattr(want, name)
        if expected is not None:
            assert worst_row_error(getattr(got, name), expected, getattr(scale, name)) <= bound


@pytest.mark.rule("RING-1", "RING-4", "RING-5", "LAYOUT-1", "LAYOUT-2", "LAYOUT-3", "DROP-1")
@given(
    seeds,
    st.sampled_from([1, 2, 3, 6]),
    st.sampled_from(["contiguous", "striped", "zigzag"]),
    st.sampled_from(["kv", "q", "gather"]),
    st.sampled_from([1, -1]),
)
def test_ring_size_layout_direction_and_circulation_do_not_matter(
    seed, workers, layout, circulation, direction
):
    q, k, v, dy, dlse, options = problem(seed)
    one = rs.ring(q, k, v, dy, dlse=dlse, workers=1, **options)
    run = rs.ring(
        q, k, v, dy, dlse=dlse, workers=workers, layout=layout, circulation=circulation,
        direction=direction, **options,
    )  # fmt: skip
    close(run, one, row_scale(q, k, v, dy, dlse, **options))


@pytest.mark.rule("SOFT-1", "SOFT-2")
@given(seeds, st.permutations(range(5)))
def test_blocks_may_be_merged_in_any_order(seed, order):
    q, k, v, _, _, options = problem(seed, n_k=15)
    options.pop("dropout_p", None)
    whole = check(q, k, v, options)
    parts = []
    for b in range(5):
        index = np.arange(3 * b, 3 * b + 3)
        columns = whole.columns.take(index)
        parts.append(
            block_forward(
                q, k[:, :, index], v[:, :, index],
                Tile(whole.rows, columns, whole.terms, recipe("float64")),
            )
        )  # fmt: skip
    state = start(2, 4, 12, 5)
    for b in order:
        state = merge(state, parts[b], recipe("float64"))
    # A tree of merges, the other extreme of the order.
    tree = merge(merge(parts[0], parts[1], recipe("float64")),
                 merge(merge(parts[2], parts[3], recipe("float64")), parts[4], recipe("float64")),
                 recipe("float64"))  # fmt: skip
    want = rs.attention(q, k, v, **options)
    scale = row_scale(q, k, v, **options)
    for merged in (state, tree):
        o, lse = finish(merged, whole.terms.sinks, recipe("float64"))
        assert worst_row_error(o, want.o, scale.o) <= BOUND
        assert worst_row_error(lse, want.lse, scale.lse) <= BOUND


@given(seeds, st.permutations(range(12)))
def test_permuting_keys_permutes_their_gradients_and_nothing_else(seed, order):
    q, k, v, dy, dlse, options = problem(seed)
    order = np.array(order)
    want = rs.attention_backward(q, k, v, dy, dlse=dlse, **options)
    got = rs.attention_backward(
        q, k[:, :, order], v[:, :, order], dy, dlse=dlse, positions_k=order, **options
    )
    scale = row_scale(q, k, v, dy, dlse, **options)
    assert worst_row_error(got.dq, want.dq, scale.dq) <= BOUND
    assert worst_row_error(got.dk, want.dk[:, :, order], scale.dk[:, :, order]) <= BOUND
    assert worst_row_error(got.dv, want.dv[:, :, order], scale.dv[:, :, order]) <= BOUND


@pytest.mark.rule("MASK-1")
@given(
    seeds,
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(["contiguous", "striped", "zigzag"]),
    st.sampled_from(["kv", "q", "gather"]),
)
def test_a_changed_future_key_leaves_earlier_rows_bit_identical(seed, workers, layout, circulation):
    n = 24
    q, k, v, dy, _, options = problem(seed, n, n)
    options["causal"] = True
    key = 1 + seed % (n - 1)
    changed_k, changed_v = k.copy(), v.copy()
    changed_k[:, :, key] += 1e3
    changed_v[:, :, key] -= 1e6

    def dense(k, v):
        f, g = rs.attention(q, k, v, **options), rs.attention_backward(q, k, v, dy, **options)
        return f.o, f.lse, g.dq, g.dv

    def ring(k, v):
        run = rs.ring(
            q, k, v, dy, workers=workers, layout=layout, circulation=circulation, **options
        )
        return run.o, run.lse, run.dq, run.dv

    for function in (dense, ring):
        before, after = function(k, v), function(changed_k, changed_v)
        for x, y in zip(before[:3], after[:3], strict=True):
            assert (x[:, :, :key] == y[:, :, :key]).all()
        assert any(not (x == y).all() for x, y in zip(before, after, strict=True))


@pytest.mark.rule("BWD-1", "BWD-3", "RING-7")
@given(seeds, st.sampled_from(["kv", "q"]))
def test_the_backward_is_linear_in_dy_and_dlse_jointly(seed, circulation):
    q, k, v, dy, dlse, options = problem(seed)
    random = np.random.default_rng(seed + 1)
    dy2, dlse2 = random.normal(size=dy.shape), random.normal(size=dlse.shape)

    def backward(dy, dlse):
        return rs.ring(q, k, v, dy, dlse=dlse, workers=3, circulation=circulation, **options)

    one, two, both = (
        backward(dy, dlse),
        backward(dy2, dlse2),
        backward(2 * dy - dy2, 2 * dlse - dlse2),
    )
    first = row_scale(q, k, v, dy, dlse, **options)
    second = row_scale(q, k, v, dy2, dlse2, **options)
    for name in ("dq", "dk", "dv", "dsinks"):
        if getattr(one, name) is None:
            continue
        scale = 2 * getattr(first, name) + getattr(second, name)
        want = 2 * getattr(one, name) - getattr(two, name)
        assert worst_row_error(getattr(both, name), want, scale) <= BOUND


@pytest.mark.rule("BWD-3", "BWD-8", "BWD-9")
@given(seeds)
def test_ds_and_the_sinks_share_sum_to_dlse_in_every_row(seed):
    """The check of the definition: sum_j ds + sum_n exp(sink - lse) (dlse - delta) = dlse."""
    q, k, v, dy, dlse, options = problem(seed)
    options.pop("softcap", None)
    options["bias"] = np.zeros((2, 4, 12, 12))  # so that dbias is ds itself
    forward = rs.attention(q, k, v, **options)
    gradients = rs.attention_backward(q, k, v, dy, dlse=dlse, **options)
    total = gradients.dbias.sum(axis=3)
    if "sinks" in options:
        delta = (dy * forward.o).sum(axis=3)
        p = np.exp(options["sinks"][None, :, None, :] - forward.lse[..., None])
        total = total + (p * (dlse - delta)[..., None]).sum(axis=3)
    scale = row_scale(q, k, v, dy, dlse, **options).dbias.sum(axis=3) + np.abs(dlse)
    want = np.where(np.isneginf(forward.lse), 0.0, dlse)
    scale = scale * (1 + np.abs(delta).max() if "sinks" in options else 1)
    assert worst_row_error(total, want, scale) <= BOUND


@pytest.mark.rule("BWD-3", "RING-7")
@given(seeds)
def test_the_gradient_of_lse_alone_is_p_k(seed):
    """With dy = 0 and dlse = 1 and no sinks: dq = scale * sum_j p_ij k_j, dv = 0."""
    q, k, v, _, _, options = problem(seed)
    options = {"causal": options["causal"]}
    run = rs.ring(q, k, v, dlse=np.ones((2, 4, 12)), workers=3, layout="striped", **options)
    mean_key = rs.attention(q, k, k, **options).o
    scale = row_scale(q, k, v, np.zeros((2, 4, 12, 5)), np.ones((2, 4, 12)), **options)
    assert worst_row_error(run.dq, mean_key / np.sqrt(3), scale.dq) <= BOUND
    assert (run.dv == 0).all()


@pytest.mark.rule("FWD-1", "BWD-5", "BWD-6")
@given(seeds, st.integers(-3, 3))
def test_the_scale_may_be_moved_into_q_exactly_for_powers_of_two(seed, power):
    q, k, v, dy, dlse, options = problem(seed)
    c = 2.0**power
    one = rs.ring(q, k, v, dy, dlse=dlse, workers=3, scale=c, **options)
    two = rs.ring(c * q, k, v, dy, dlse=dlse, workers=3, scale=1.0, **options)
    assert (one.o == two.o).all() and (one.lse == two.lse).all()
    assert (one.dq == c * two.dq).all() and (one.dk == two.dk).all()


@pytest.mark.rule("FWD-4")
@given(seeds, st.floats(-20, 20))
def test_a_shift_of_all_scores_of_a_row_shifts_lse_and_nothing_else(seed, shift):
    q, k, v, dy, _, options = problem(seed)
    options = {"causal": options["causal"]}
    bias = np.full((1, 1, 12, 1), shift)
    plain = rs.ring(q, k, v, dy, workers=3, **options)
    moved = rs.ring(q, k, v, dy, workers=3, bias=bias, **options)
    scale = row_scale(q, k, v, dy, bias=bias, **options)
    assert worst_row_error(moved.lse, plain.lse + shift, scale.lse) <= BOUND
    for name in ("o", "dq", "dk", "dv"):
        assert (
            worst_row_error(getattr(moved, name), getattr(plain, name), getattr(scale, name))
            <= BOUND
        )


@pytest.mark.rule("FWD-6")
@given(seeds)
def test_values_enter_linearly(seed):
    q, k, v, _, _, options = problem(seed)
    other = np.random.default_rng(seed + 1).normal(size=v.shape)
    o = rs.ring(q, k, v + other, workers=3, **options).o
    parts = rs.attention(q, k, v, **options).o + rs.attention(q, k, other, **options).o
    scale = row_scale(q, k, v, **options).o + row_scale(q, k, other, **options).o
    assert worst_row_error(o, parts, scale) <= BOUND


@pytest.mark.rule("DROP-1")
@given(seeds, st.sampled_from(["contiguous", "striped", "zigzag"]), st.sampled_from([1, 2, 3, 4]))
def test_dropout_drops_the_same_entries_in_every_layout_and_pass(seed, layout, workers):
    """One-hot values read the dropped entries back; dv must see the same ones."""
    n = 24
    random = np.random.default_rng(seed)
    q, k = np.zeros((1, 2, n, 2)), np.zeros((1, 2, n, 2))
    v = np.broadcast_to(np.eye(n), (1, 2, n, n))
    dy = random.normal(size=(1, 2, n, n))
    options = {"dropout_p": 0.5, "dropout_seed": seed}
    run = rs.ring(q, k, v, dy, workers=workers, layout=layout, **options)
    dense = rs.attention(q, k, v, **options).o
    assert ((run.o > 0) == (dense > 0)).all()
    want = dense.swapaxes(2, 3) @ dy
    assert worst_row_error(run.dv, want, np.abs(dense.swapaxes(2, 3)) @ np.abs(dy)) <= BOUND
