"""nkilib's interface against the dense definition of the gathered problem.

Shards are made here by the layouts' formulas, not by ringspec: position r of a ring holds tokens
r*s + t (contiguous) or t*W + r (striped).
"""

import inspect

import numpy as np
import pytest
from interfaces.given import dense_given, worst_rounded_error
from oracle.row_scale import row_scale, worst_row_error
from refusals import refuses

import ringspec as rs
from ringspec.errors import (
    DtypeError,
    LayoutError,
    NonFiniteError,
    OptionError,
    RefusedError,
    ShapeError,
)
from ringspec.formats import FORMATS, load, store
from ringspec.interfaces import nkilib
from ringspec.recipes import RECIPES

BFLOAT16 = FORMATS["bfloat16"].dtype
BOUND = 1e-14
S = 128


class Case:
    """A global problem [B, H, W*s, D] and its shards."""

    def __init__(self, workers, batch=1, heads=2, width=4, striped=False, seed=0, local=S):
        random = np.random.default_rng(seed)
        shape = (batch, heads, workers * local, width)
        self.q, self.k, self.v, self.dy = (random.standard_normal(shape) for _ in range(4))
        self.workers, self.local = workers, local
        tokens = np.arange(workers * local)
        self.index = tokens.reshape(local, workers).T if striped else tokens.reshape(workers, local)

    def rounded(self, name):
        """The same problem with all values rounded to a format."""
        for tensor in ("q", "k", "v", "dy"):
            setattr(self, tensor, load(store(getattr(self, tensor), name)))
        return self

    def shards(self, x, axis=2):
        return np.stack([np.take(x, self.index[r], axis) for r in range(self.workers)])

    def columns(self, x):
        """[W, B, H, D, s], the kernels' own layout."""
        return self.shards(x).swapaxes(3, 4)

    def tiles(self, lse):
        """[W, B, H, 128, s // 128] with row t at [t % 128, t // 128]."""
        local = self.shards(lse)
        out = np.zeros((*local.shape[:3], 128, self.local // 128), local.dtype)
        for t in range(self.local):
            out[..., t % 128, t // 128] = local[..., t]
        return out


def forward(case, **arguments):
    return nkilib.ring_attention_spmd_fwd(
        case.columns(case.q),
        case.columns(case.k),
        case.shards(case.v),
        num_workers=case.workers,
        **arguments,
    )


def backward(case, o, lse, **arguments):
    return nkilib.ring_attention_spmd_bwd(
        case.columns(case.q),
        case.columns(case.k),
        case.columns(case.v),
        case.columns(o),
        case.columns(case.dy),
        case.tiles(lse),
        num_workers=case.workers,
        **arguments,
    )


def test_signatures_are_those_of_the_library():
    def described(function):
        return [
            (p.name, p.default)
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD
        ]

    none = inspect.Parameter.empty
    assert described(nkilib.ring_attention_spmd_fwd) == [
        ("q", none),
        ("k", none),
        ("v", none),
        ("replica_groups", None),
        ("num_workers", 1),
        ("softmax_scale", None),
        ("use_causal_mask", False),
        ("striped_input", False),
        ("training", False),
        ("lse_dtype", np.float32),
        ("tp_q", False),
        ("tp_k", False),
        ("bound_min", None),
        ("bound_max", None),
    ]
    assert described(nkilib.ring_attention_spmd_bwd) == [
        ("q_ref", none),
        ("k_ref", none),
        ("v_ref", none),
        ("o_ref", none),
        ("dy_ref", none),
        ("lse_ref", none),
        ("use_causal_mask", False),
        ("mixed_precision", True),
        ("softmax_scale", None),
        ("num_workers", 1),
        ("lnc_size", 1),
        ("replica_groups", None),
        ("striped_attention", False),
        ("bound_min", None),
        ("bound_max", None),
    ]
    assert described(nkilib.ring_attention_unpermute) == [
        ("x", none),
        ("replica_groups", None),
        ("num_workers", 1),
    ]
    for function in (nkilib.ring_attention_spmd_fwd, nkilib.ring_attention_spmd_bwd):
        assert (
            inspect.signature(function).parameters["recipe"].kind is inspect.Parameter.KEYWORD_ONLY
        )


# --- forward


@pytest.mark.rule("LAYOUT-7")
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", ["full", "causal", "striped"])
def test_forward_is_dense_attention_of_the_gathered_problem(workers, mask):
    causal, striped = mask != "full", mask == "striped"
    local = 256 if workers < 3 else S  # two columns of lse tiles
    case = Case(workers, striped=striped, local=local, seed=workers)
    o, lse = forward(
        case,
        use_causal_mask=causal,
        striped_input=striped,
        training=True,
        lse_dtype="float64",
        softmax_scale=1.0 if causal else 0.3,
    )
    options = {"causal": causal, "scale": 1.0 if causal else 0.3}
    want = rs.attention(case.q, case.k, case.v, **options)
    scale = row_scale(case.q, case.k, case.v, **options)
    assert o.shape == (workers, 1, 2, local, 4)
    assert lse.shape == (workers, 1, 2, 128, local // 128)
    assert worst_row_error(o, case.shards(want.o), case.shards(scale.o)) <= BOUND
    assert worst_row_error(lse, case.tiles(want.lse), case.tiles(scale.lse)) <= BOUND


def test_causal_forward_of_a_prescaled_q_is_causal_attention_with_the_default_scale():
    case = Case(3)
    want = rs.attention(case.q, case.k, case.v, causal=True)
    scale = row_scale(case.q, case.k, case.v, causal=True)
    case.q = case.q / 2.0  # 1/sqrt(4), exact
    for softmax_scale in (None, 1.0, 1):
        o = forward(case, use_causal_mask=True, softmax_scale=softmax_scale)
        assert worst_row_error(o, case.shards(want.o), case.shards(scale.o)) <= BOUND


def test_scale_defaults_to_one_over_root_d_and_zero_counts_as_not_given():
    case = Case(2, width=5)
    want = case.shards(rs.attention(case.q, case.k, case.v, scale=5**-0.5).o)
    scale = case.shards(row_scale(case.q, case.k, case.v).o)
    for softmax_scale in (None, 0, 0.0):
        assert worst_row_error(forward(case, softmax_scale=softmax_scale), want, scale) <= BOUND
    other = forward(case, softmax_scale=0.9)
    assert not (worst_row_error(other, want, scale) <= 1e-3)


@pytest.mark.parametrize("tp_q", [False, True])
@pytest.mark.parametrize("tp_k", [False, True])
def test_tp_flags_say_whether_rows_come_before_columns(tp_q, tp_k):
    case = Case(2, width=S)  # d == s: a wrong flag cannot be seen by shape
    q, k = case.shards(case.q), case.shards(case.k)
    o = nkilib.ring_attention_spmd_fwd(
        q if tp_q else q.swapaxes(3, 4),
        k if tp_k else k.swapaxes(3, 4),
        case.shards(case.v),
        num_workers=2,
        tp_q=tp_q,
        tp_k=tp_k,
    )
    want = case.shards(rs.attention(case.q, case.k, case.v).o)
    scale = case.shards(row_scale(case.q, case.k, case.v).o)
    assert worst_row_error(o, want, scale) <= BOUND


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_o_is_the_float64_result_rounded_once_to_the_dtype_of_q(name):
    case = Case(3).rounded(name)
    arrays = [store(x, name) for x in (case.columns(case.q), case.columns(case.k))]
    o = nkilib.ring_attention_spmd_fwd(*arrays, store(case.shards(case.v), name), None, 3)
    want = store(case.shards(rs.attention(case.q, case.k, case.v).o), name)
    assert o.dtype == FORMATS[name].dtype
    if name == "float64":
        assert np.abs(o - want).max() <= 1e-14
    else:
        assert np.array_equal(o, want)


@pytest.mark.parametrize(
    ("lse_dtype", "expected"),
    [
        ("bfloat16", BFLOAT16),
        (BFLOAT16, BFLOAT16),
        (np.float32, np.float32),
        ("float16", np.float16),
        (np.dtype(np.float64), np.float64),
    ],
)
def test_lse_has_the_asked_dtype_rounded_once(lse_dtype, expected):
    case = Case(2)
    _, lse = forward(case, training=True, lse_dtype=lse_dtype)
    assert lse.dtype == np.dtype(expected)
    want = case.tiles(rs.attention(case.q, case.k, case.v).lse)
    assert np.abs(lse.astype(np.float64) - want).max() <= np.abs(want).max() * 2.0**-8
    if lse.dtype != np.float64:
        name = next(n for n, f in FORMATS.items() if f.dtype == lse.dtype)
        assert np.array_equal(lse, store(want, name))


def test_lse_is_float32_by_default_and_absent_without_training():
    case = Case(2)
    o, lse = forward(case, training=True)
    assert lse.dtype == np.float32
    alone = forward(case)
    assert isinstance(alone, np.ndarray) and np.array_equal(alone, o)


def random_bounds(case, batch, seed):
    """Bounds [W, B, s] that differ from row to row, batch to batch and rank to rank."""
    random = np.random.default_rng(seed)
    low = random.integers(-2, case.local // 2, (case.workers, batch, case.local))
    return low, low + random.integers(0, case.local, low.shape)


def dense_mask(case, low, high):
    """[B, 1, S, S]: key with local index j is visible iff low <= j < high of the query's row."""
    keys = np.zeros(case.workers * case.local, dtype=int)
    for r in range(case.workers):
        keys[case.index[r]] = np.arange(case.local)
    mask = np.zeros((low.shape[1], 1, keys.size, keys.size), dtype=bool)
    for r in range(case.workers):
        for t in range(case.local):
            row = (low[r, :, t, None] <= keys) & (keys < high[r, :, t, None])
            mask[:, 0, case.index[r, t]] = row
    return mask


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_bounds_are_local_half_open_key_indices_of_the_query_row(workers):
    case = Case(workers, batch=2, heads=1, striped=True, seed=5)
    low, high = random_bounds(case, 2, seed=workers)
    options = {"causal": True, "scale": 1.0, "mask": dense_mask(case, low, high)}
    want = rs.attention(case.q, case.k, case.v, **options)
    assert np.isneginf(want.lse).any() and np.isfinite(want.lse).any()
    truth = rs.attention_backward(case.q, case.k, case.v, case.dy, **options)
    scale = row_scale(case.q, case.k, case.v, case.dy, **options)
    flags = {"use_causal_mask": True, "bound_min": low, "bound_max": high}
    o, lse = forward(case, striped_input=True, training=True, lse_dtype="float64", **flags)
    assert worst_row_error(o, case.shards(want.o), case.shards(scale.o)) <= BOUND
    assert worst_row_error(lse, case.tiles(want.lse), case.tiles(scale.lse)) <= BOUND
    got = backward(case, want.o, want.lse, striped_attention=True, softmax_scale=1.0, **flags)
    for gradient, expected, unit in zip(
        got, (truth.dq, truth.dk, truth.dv), (scale.dq, scale.dk, scale.dv), strict=True
    ):
        error = worst_rounded_error(
            gradient.swapaxes(3, 4), case.shards(expected), case.shards(unit), 2.0**-24
        )
        assert error <= BOUND


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.int64])
def test_bounds_may_be_whole_numbers_in_any_dtype(dtype):
    case = Case(2, striped=True)
    low = np.broadcast_to(np.arange(S) // 32 * 32, (2, 1, S))
    flags = {"use_causal_mask": True, "striped_input": True}
    want = forward(case, bound_min=low, bound_max=low + 32, **flags)
    got = forward(case, bound_min=low.astype(dtype), bound_max=(low + 32).astype(dtype), **flags)
    assert np.array_equal(got, want)


def test_two_replica_groups_are_two_independent_rings_in_the_order_of_their_members():
    groups = ((3, 1, 4), (0, 5, 2))
    cases = [Case(3, striped=True, seed=n) for n in range(2)]

    def spread(pick):
        out = [None] * 6
        for case, group in zip(cases, groups, strict=True):
            for position, rank in enumerate(group):
                out[rank] = pick(case)[position]
        return np.stack(out)

    flags = {"replica_groups": groups, "num_workers": 3, "use_causal_mask": True}
    o, lse = nkilib.ring_attention_spmd_fwd(
        spread(lambda c: c.columns(c.q)),
        spread(lambda c: c.columns(c.k)),
        spread(lambda c: c.shards(c.v)),
        striped_input=True,
        training=True,
        **flags,
    )
    alone = [forward(c, use_causal_mask=True, striped_input=True, training=True) for c in cases]
    back = nkilib.ring_attention_spmd_bwd(
        *(spread(lambda c, n=n: c.columns(getattr(c, n))) for n in ("q", "k", "v")),
        o.swapaxes(3, 4),
        spread(lambda c: c.columns(c.dy)),
        lse,
        striped_attention=True,
        **flags,
    )
    for case, group, (own_o, own_lse) in zip(cases, groups, alone, strict=True):
        want = rs.attention(case.q, case.k, case.v, causal=True, scale=1.0)
        assert np.abs(own_o - case.shards(want.o)).max() <= 1e-12
        own_back = nkilib.ring_attention_spmd_bwd(
            case.columns(case.q),
            case.columns(case.k),
            case.columns(case.v),
            own_o.swapaxes(3, 4),
            case.columns(case.dy),
            own_lse,
            use_causal_mask=True,
            striped_attention=True,
            num_workers=3,
        )
        for position, rank in enumerate(group):
            assert np.array_equal(o[rank], own_o[position])
            assert np.array_equal(lse[rank], own_lse[position])
            for gradient, own in zip(back, own_back, strict=True):
                assert np.array_equal(gradient[rank], own[position])


def test_a_recipe_takes_the_place_of_float64():
    case = Case(3).rounded("bfloat16")
    q, k = (store(case.columns(x), "bfloat16") for x in (case.q, case.k))
    v = store(case.shards(case.v), "bfloat16")
    o, lse = nkilib.ring_attention_spmd_fwd(q, k, v, None, 3, training=True, recipe="nki")
    run = rs.ring(case.q, case.k, case.v, workers=3, recipe="nki")
    assert np.array_equal(load(o), case.shards(run.o))
    assert np.array_equal(load(lse), case.tiles(run.lse))
    default = nkilib.ring_attention_spmd_fwd(q, k, v, None, 3)
    assert not np.array_equal(o, default)


# --- backward


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("mask", ["full", "causal", "striped"])
def test_backward_is_the_gradient_of_the_gathered_problem(workers, mask):
    causal, striped = mask != "full", mask == "striped"
    local = 256 if workers == 2 else S  # two columns of lse tiles
    case = Case(workers, heads=1, striped=striped, local=local, seed=10 + workers)
    options = {"causal": causal, "scale": 0.4}
    want = rs.attention(case.q, case.k, case.v, **options)
    truth = rs.attention_backward(case.q, case.k, case.v, case.dy, **options)
    scale = row_scale(case.q, case.k, case.v, case.dy, **options)
    got = backward(
        case,
        want.o,
        want.lse,
        use_causal_mask=causal,
        striped_attention=striped,
        softmax_scale=0.4,
    )
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        assert gradient.dtype == np.float32
        assert gradient.shape == (workers, 1, 1, 4, local)
        expected, unit = case.shards(getattr(truth, name)), case.shards(getattr(scale, name))
        error = worst_rounded_error(gradient.swapaxes(3, 4), expected, unit, 2.0**-24)
        assert error <= BOUND, name


@pytest.mark.rule("BWD-11")
def test_backward_uses_o_and_lse_as_given():
    case = Case(3, seed=3)
    random = np.random.default_rng(4)
    forward_of = rs.attention(case.q, case.k, case.v, causal=True, scale=1.0)
    o = forward_of.o + 0.1 * random.standard_normal(forward_of.o.shape)
    lse = forward_of.lse + 0.1 * random.standard_normal(forward_of.lse.shape)
    got = backward(case, o, lse, use_causal_mask=True, softmax_scale=1.0)
    allowed = np.tri(3 * S, dtype=bool)
    want = dense_given(case.q, case.k, case.v, case.dy, o, lse, scale=1.0, allowed=allowed)
    scale = row_scale(case.q, case.k, case.v, case.dy, causal=True, scale=1.0)
    for gradient, expected, unit in zip(got, want, (scale.dq, scale.dk, scale.dv), strict=True):
        shards = case.shards(expected), 4 * case.shards(unit)
        assert worst_rounded_error(gradient.swapaxes(3, 4), *shards, 2.0**-24) <= BOUND


def test_a_row_with_lse_minus_infinity_sends_no_gradient():
    case = Case(3, seed=6)
    forward_of = rs.attention(case.q, case.k, case.v)
    silent = np.arange(3 * S) % 5 == 0
    lse = np.where(silent, -np.inf, forward_of.lse)
    dq, dk, dv = backward(case, forward_of.o, lse)
    hidden = rs.attention_backward(
        case.q, case.k, case.v, case.dy, mask=np.broadcast_to(~silent[:, None], (3 * S, 3 * S))
    )
    for gradient, expected in ((dq, hidden.dq), (dk, hidden.dk), (dv, hidden.dv)):
        assert np.isfinite(gradient).all()
        assert np.abs(gradient.swapaxes(3, 4) - case.shards(expected)).max() <= 1e-5
    assert (dq.swapaxes(3, 4)[:, :, :, :][case.shards(silent[None, None]).repeat(2, 2)] == 0).all()


def test_backward_scale_is_one_over_root_d_even_under_a_causal_mask():
    case = Case(2, width=128, heads=1)
    want = rs.attention(case.q, case.k, case.v, causal=True)
    given = [
        backward(case, want.o, want.lse, use_causal_mask=True, softmax_scale=scale)
        for scale in (None, 0, float(1 / np.sqrt(np.longdouble(128))))
    ]
    for others in given[1:]:
        for gradient, other in zip(given[0], others, strict=True):
            assert np.array_equal(gradient, other)
    truth = rs.attention_backward(case.q, case.k, case.v, case.dy, causal=True)
    assert np.abs(given[0][0].swapaxes(3, 4) - case.shards(truth.dq)).max() <= 1e-6


def test_default_scales_of_forward_and_backward_scale_a_causal_problem_twice():
    case = Case(3, width=4, heads=1, seed=8)
    original = case.q
    truth = rs.attention_backward(original, case.k, case.v, case.dy, causal=True)
    case.q = original / 2.0  # the forward wants q pre-scaled by 1/sqrt(4)
    o, lse = forward(case, use_causal_mask=True, training=True, lse_dtype="float64")
    arrays = [case.columns(x) for x in (case.q, case.k, case.v)]
    arrays += [o.swapaxes(3, 4), case.columns(case.dy), lse]
    right = nkilib.ring_attention_spmd_bwd(
        *arrays, use_causal_mask=True, softmax_scale=1.0, num_workers=3
    )
    # dq is with respect to the pre-scaled q: the chain rule is the caller's.
    expected = (truth.dq * 2.0, truth.dk, truth.dv)
    for gradient, want in zip(right, expected, strict=True):
        assert np.abs(gradient.swapaxes(3, 4) - case.shards(want)).max() <= 1e-6

    mixed = nkilib.ring_attention_spmd_bwd(*arrays, use_causal_mask=True, num_workers=3)
    prescaled = rs.attention(case.q, case.k, case.v, causal=True, scale=1.0)
    twice = dense_given(
        case.q,
        case.k,
        case.v,
        case.dy,
        prescaled.o,
        prescaled.lse,
        scale=0.5,
        allowed=np.tri(3 * S, dtype=bool),
    )
    for gradient, wrong, want in zip(mixed, twice, expected, strict=True):
        assert np.abs(gradient.swapaxes(3, 4) - case.shards(wrong)).max() <= 1e-6
        assert not (np.abs(gradient.swapaxes(3, 4) - case.shards(want)).max() <= 1e-2)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_gradients_are_float32_and_rounded_once_for_every_input_dtype(name):
    case = Case(3, heads=1).rounded(name)
    run = rs.attention(case.q, case.k, case.v)
    o, lse = load(store(run.o, name)), load(store(run.lse, "float32"))
    got = nkilib.ring_attention_spmd_bwd(
        *(store(case.columns(x), name) for x in (case.q, case.k, case.v, o, case.dy)),
        store(case.tiles(lse), "float32"),
        num_workers=3,
    )
    want = dense_given(case.q, case.k, case.v, case.dy, o, lse, scale=0.5, allowed=True)
    scale = row_scale(case.q, case.k, case.v, case.dy)
    for gradient, expected, unit in zip(got, want, (scale.dq, scale.dk, scale.dv), strict=True):
        assert gradient.dtype == np.float32
        shards = case.shards(expected), case.shards(unit)
        assert worst_rounded_error(gradient.swapaxes(3, 4), *shards, 2.0**-24) <= BOUND


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_mixed_precision_false_keeps_accumulators_in_the_input_type(name):
    low = nkilib.low_precision_recipe(name)
    narrow = ("p", "ds", "backward_lse", "delta", "tile_dkv", "carried_dkv", "dy_o_products")
    assert [getattr(low, point) for point in narrow] == [name] * len(narrow)
    assert low.gradients == "float32" and low.tile_q == 128
    if name == "bfloat16":
        assert low == RECIPES["nki_low"]

    case = Case(3, heads=1).rounded(name)
    run = rs.attention(case.q, case.k, case.v)
    arrays = [store(case.columns(x), name) for x in (case.q, case.k, case.v, run.o, case.dy)]
    arrays.append(store(case.tiles(run.lse), "float32"))
    got = nkilib.ring_attention_spmd_bwd(*arrays, mixed_precision=False, num_workers=3)
    same = nkilib.ring_attention_spmd_bwd(*arrays, recipe=low, num_workers=3)
    exact = nkilib.ring_attention_spmd_bwd(*arrays, num_workers=3)
    for gradient, other, true in zip(got, same, exact, strict=True):
        assert gradient.dtype == np.float32
        assert np.array_equal(gradient, other)
        assert not np.array_equal(gradient, true)
        error = np.abs(gradient.astype(np.float64) - true).max()
        assert error <= 64 * 2.0 ** -FORMATS[name].precision
    # The accumulators of dk and dv hold numbers of the input type; dq travels in float32.
    for gradient in got[1:]:
        assert np.array_equal(gradient, load(store(gradient, name)))
    if name != "float32":
        assert not np.array_equal(got[0], load(store(got[0], name)))


def test_an_explicit_recipe_takes_the_place_of_mixed_precision():
    case = Case(2, heads=1).rounded("bfloat16")
    run = rs.attention(case.q, case.k, case.v)
    given = [
        backward(case, run.o, run.lse, recipe="nki", mixed_precision=flag) for flag in (True, False)
    ]
    for one, other in zip(*given, strict=True):
        assert np.array_equal(one, other)


def test_backward_is_a_q_ring():
    case = Case(3, seed=12).rounded("bfloat16")
    options = {"workers": 3, "recipe": "nki_low"}
    runs = [rs.ring(case.q, case.k, case.v, case.dy, circulation=c, **options) for c in ("q", "kv")]
    got = backward(case, runs[0].o, runs[0].lse, recipe="nki_low")
    for name, gradient in zip(("dq", "dk", "dv"), got, strict=True):
        want, other = (case.columns(getattr(run, name)) for run in runs)
        assert np.array_equal(gradient, want)
        assert not np.array_equal(want, other)  # the order of additions shows


@pytest.mark.parametrize("items", [1, 2, 3, 4, 5])
def test_the_deal_gives_every_item_once_and_the_spare_core_a_repetition(items):
    assert [t.item for t in nkilib.deal(items, 1)] == list(range(items))
    turns = nkilib.deal(items, 2)
    assert [t.item for t in turns if not t.is_duplicate] == list(range(items))
    assert [(t.round, t.core) for t in turns] == [
        (n, core) for n in range((items + 1) // 2) for core in range(2)
    ]
    spare = [t for t in turns if t.is_duplicate]
    assert len(spare) == items % 2
    for turn in spare:
        assert (turn.core, turn.item, turn.round) == (1, 0, items // 2)


@pytest.mark.parametrize(("batch", "heads"), [(1, 3), (3, 1), (2, 1)])
def test_two_cores_give_the_same_bits_as_one(batch, heads):
    case = Case(3, batch=batch, heads=heads, striped=True, seed=9)
    low, high = random_bounds(case, batch, seed=2)
    run = rs.attention(case.q, case.k, case.v, causal=True)
    flags = {"use_causal_mask": True, "striped_attention": True}
    flags |= {"bound_min": low, "bound_max": high}
    one, two = (backward(case, run.o, run.lse, lnc_size=n, **flags) for n in (1, 2))
    for gradient, other in zip(one, two, strict=True):
        assert np.array_equal(gradient, other)
        assert (np.abs(gradient).max(axis=(0, 3, 4)) > 0).all()


def test_as_many_heads_as_tokens_on_a_rank_are_not_confused_with_them():
    case = Case(1, heads=S, width=2, seed=11)
    want = rs.attention(case.q, case.k, case.v)
    o, lse = forward(case, training=True, lse_dtype="float64")
    assert np.abs(o - case.shards(want.o)).max() <= 1e-13
    assert np.abs(lse - case.tiles(want.lse)).max() <= 1e-13
    truth = rs.attention_backward(case.q, case.k, case.v, case.dy)
    got = backward(case, want.o, want.lse)
    for gradient, expected in zip(got, (truth.dq, truth.dk, truth.dv), strict=True):
        assert np.abs(gradient.swapaxes(3, 4) - case.shards(expected)).max() <= 1e-5


# --- unpermute


@pytest.mark.rule("LAYOUT-6")
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.float16, np.float32])
def test_unpermute_makes_striped_shards_contiguous(workers, dtype):
    s = 2 * workers
    x = np.random.default_rng(workers).standard_normal((workers, 2, s, 3)).astype(dtype)
    got = nkilib.ring_attention_unpermute(x, num_workers=workers)
    assert got.dtype == np.dtype(dtype) and got.shape == x.shape
    for r in range(workers):
        for t in range(s):
            token = r * s + t
            assert np.array_equal(got[r][:, t], x[token % workers][:, token // workers])


def test_unpermute_works_in_each_replica_group_by_position_in_the_group():
    groups = ((2, 0, 5), (4, 1, 3))
    x = np.arange(6 * 6.0).reshape(6, 1, 6, 1)
    got = nkilib.ring_attention_unpermute(x, groups, 3)
    for group in groups:
        own = nkilib.ring_attention_unpermute(x[list(group)], None, 3)
        assert np.array_equal(got[list(group)], own)


# --- refusals


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def good(workers=2, b=1, h=1, d=4, s=S):
    return [zeros(workers, b, h, d, s), zeros(workers, b, h, d, s), zeros(workers, b, h, s, d)]


BOUNDS = {"bound_min": zeros(2, 1, S), "bound_max": zeros(2, 1, S) + S}
STRIPED = {"use_causal_mask": True, "striped_input": True}

FORWARD_REFUSALS = [
    ("d above 128", good(d=129), {}, RefusedError),
    ("s not divisible by 128", good(s=130), {}, RefusedError),
    ("s of zero", good(s=0), {}, RefusedError),
    (
        "fewer key heads",
        [zeros(2, 1, 2, 4, S), zeros(2, 1, 1, 4, S), zeros(2, 1, 1, S, 4)],
        {},
        RefusedError,
    ),
    ("striped without causal", good(), {"striped_input": True}, RefusedError),
    ("a scale under a causal mask", good(), {"use_causal_mask": True, "softmax_scale": 0.5}, RefusedError),
    ("zero under a causal mask", good(), {"use_causal_mask": True, "softmax_scale": 0}, RefusedError),
    ("bounds without causal", good(), BOUNDS, RefusedError),
    ("bounds without striped", good(), BOUNDS | {"use_causal_mask": True}, RefusedError),
    ("only bound_min", good(), STRIPED | {"bound_min": BOUNDS["bound_min"]}, RefusedError),
    ("only bound_max", good(), STRIPED | {"bound_max": BOUNDS["bound_max"]}, RefusedError),
    ("fractional bounds", good(), STRIPED | BOUNDS | {"bound_min": zeros(2, 1, S) + 0.5}, (OptionError, "bounds")),
    ("NaN bounds", good(), STRIPED | BOUNDS | {"bound_min": zeros(2, 1, S) + np.nan}, (OptionError, "bounds")),
    ("bounds without ranks", good(), STRIPED | BOUNDS | {"bound_min": zeros(1, S)}, ShapeError),
    ("bool bounds", good(), STRIPED | BOUNDS | {"bound_min": zeros(2, 1, S, dtype=bool)}, DtypeError),
    ("groups of another length", good(), {"replica_groups": ((0,), (1,))}, RefusedError),
    ("overlapping groups", good(4), {"replica_groups": ((0, 1), (1, 2))}, RefusedError),
    ("groups that miss a rank", good(4), {"replica_groups": ((0, 1),)}, ShapeError),
    ("groups with a strange rank", good(), {"replica_groups": ((0, 7),)}, ShapeError),
    ("groups of names", good(), {"replica_groups": (("a", "b"),)}, RefusedError),
    ("groups that are no groups", good(), {"replica_groups": (0, 1)}, RefusedError),
    ("another leading axis", good(3), {}, ShapeError),
    ("no workers", good(), {"num_workers": 0}, (LayoutError, "worker-count")),
    ("half a worker", good(), {"num_workers": 2.0}, (LayoutError, "worker-count")),
    ("no axis of ranks", [x[0] for x in good()], {}, ShapeError),
    ("v in the layout of k", [good()[0], good()[1], good()[1]], {}, ShapeError),
    ("k of another length", [good()[0], good(s=256)[1], good()[2]], {}, ShapeError),
    ("integer q", [good()[0].astype(int), *good()[1:]], {}, DtypeError),
    ("object q", [good()[0].astype(object), *good()[1:]], {}, DtypeError),
    ("8-bit q", [good()[0].astype(FORMATS["float8_e5m2"].dtype), *good()[1:]], {}, DtypeError),
    ("NaN in q", [good()[0] + np.nan, *good()[1:]], {}, NonFiniteError),
    ("an integer lse", good(), {"lse_dtype": np.int32}, DtypeError),
    ("an lse without infinity", good(), {"lse_dtype": "float8_e4m3fn"}, DtypeError),
    ("an lse dtype that is none", good(), {"lse_dtype": "fp32x"}, DtypeError),
    ("a causal flag that is none", good(), {"use_causal_mask": 1}, OptionError),
    ("an infinite scale", good(), {"softmax_scale": np.inf}, OptionError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "arguments", "error"),
    [case[1:] for case in FORWARD_REFUSALS],
    ids=[case[0] for case in FORWARD_REFUSALS],
)
def test_forward_refuses(arrays, arguments, error):
    with refuses(error) as caught:
        nkilib.ring_attention_spmd_fwd(*arrays, **({"num_workers": 2} | arguments))
    assert "expected" in str(caught.value) and "Fix: " in str(caught.value)


def good_backward(workers=2, n=1, d=4, s=S, lse=None):
    five = [zeros(workers, 1, n, d, s) for _ in range(5)]
    return [*five, zeros(workers, 1, n, 128, s // 128) if lse is None else lse]


def with_one(place, x, **arguments):
    arrays = good_backward(**arguments)
    arrays[place] = x
    return arrays


BACK = {"use_causal_mask": True, "striped_attention": True}
BACKWARD_REFUSALS = [
    ("striped without causal", good_backward(), {"striped_attention": True}, RefusedError),
    ("bounds without striped", good_backward(), BOUNDS | {"use_causal_mask": True}, RefusedError),
    ("bounds without causal", good_backward(), BOUNDS, RefusedError),
    ("only bound_min", good_backward(), BACK | {"bound_min": BOUNDS["bound_min"]}, RefusedError),
    ("only bound_max", good_backward(), BACK | {"bound_max": BOUNDS["bound_max"]}, RefusedError),
    ("S not divisible by 128", good_backward(s=130), {}, RefusedError),
    ("S above 512 and no multiple", good_backward(s=640), {}, RefusedError),
    ("fewer key heads", with_one(1, zeros(2, 1, 1, 4, S), n=2), {}, RefusedError),
    ("three cores", good_backward(), {"lnc_size": 3}, RefusedError),
    ("no core", good_backward(), {"lnc_size": 0}, RefusedError),
    ("o as the forward returns it", with_one(3, zeros(2, 1, 1, S, 4)), {}, ShapeError),
    ("lse not in tiles", with_one(5, zeros(2, 1, 1, S)), {}, ShapeError),
    ("lse tiles transposed", with_one(5, zeros(2, 1, 1, 2, 128), s=256), {}, ShapeError),
    ("NaN in lse", with_one(5, zeros(2, 1, 1, 128, 1) + np.nan), {}, NonFiniteError),
    ("an infinite lse", with_one(5, zeros(2, 1, 1, 128, 1) + np.inf), {}, NonFiniteError),
    ("NaN in o", with_one(3, zeros(2, 1, 1, 4, S) + np.nan), {}, NonFiniteError),
    ("infinity in dy", with_one(4, zeros(2, 1, 1, 4, S) + np.inf), {}, NonFiniteError),
    ("integer dy", with_one(4, zeros(2, 1, 1, 4, S, dtype=int)), {}, DtypeError),
    ("another leading axis", good_backward(3), {}, ShapeError),
    ("overlapping groups", good_backward(4), {"replica_groups": ((0, 1), (1, 2))}, RefusedError),
    ("a precision flag that is none", good_backward(), {"mixed_precision": "no"}, OptionError),
]  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "arguments", "error"),
    [case[1:] for case in BACKWARD_REFUSALS],
    ids=[case[0] for case in BACKWARD_REFUSALS],
)
def test_backward_refuses(arrays, arguments, error):
    with refuses(error) as caught:
        nkilib.ring_attention_spmd_bwd(*arrays, **({"num_workers": 2} | arguments))
    assert "expected" in str(caught.value) and "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("x", "arguments", "error"),
    [
        (zeros(2, 1, 3, 4), {"num_workers": 2}, RefusedError),
        (zeros(2, 4, 4), {"num_workers": 2}, ShapeError),
        (zeros(3, 1, 4, 4), {"num_workers": 2}, ShapeError),
        (zeros(2, 1, 4, 4), {"num_workers": 2, "replica_groups": ((0, 0),)}, RefusedError),
        (zeros(2, 1, 4, 4), {}, ShapeError),
        ([[1], [1, 2]], {}, DtypeError),
    ],
)
def test_unpermute_refuses(x, arguments, error):
    with refuses(error):
        nkilib.ring_attention_unpermute(x, **arguments)


@pytest.mark.parametrize("lnc_size", [0, 3, 2.0, True, np.array([1, 2]), "2"])
def test_other_numbers_of_cores_are_refused(lnc_size):
    case = Case(1, heads=1)
    arrays = [case.columns(x) for x in (case.q, case.k, case.v, case.q, case.dy)]
    lse = case.tiles(rs.attention(case.q, case.k, case.v).lse)
    with pytest.raises(RefusedError, match="lnc_size"):
        nkilib.ring_attention_spmd_bwd(*arrays, lse, lnc_size=lnc_size)
