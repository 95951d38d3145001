"""The fast path gives the results of the specification: dense and in rings, every feature.

The problems are those of test_ring_against_dense, which hold every pair of values of all factors.
Tiles are a few tokens long, so that each problem has whole, masked and mixed ones.
"""

import numpy as np
import pytest
from oracle.row_scale import row_scale, worst_row_error
from refusals import refuses
from rings.test_ring_against_dense import BOUND, ROWS, case

import ringspec as rs
from ringspec import fast
from ringspec.errors import NonFiniteError, OptionError, RingspecError
from ringspec.formats import round_to
from ringspec.spec.online_softmax import SoftmaxState, merge, start
from ringspec.spec.ring_backward import plus

TILES = fast.TileSizes(rows=3, keys=4, granule=2, chunk=4)
LONGER = fast.TileSizes(rows=8, keys=16, granule=8, chunk=16)
# Every fifth problem in the ordinary run.
NUMBERS = [pytest.param(n, marks=[] if n % 5 == 0 else pytest.mark.slow) for n in range(len(ROWS))]
# u is 2**29 times that of float64, and a sum of float32 has few terms here.
FLOAT32_BOUND = 2e-6
NAMES = ("dq", "dk", "dv", "dsinks", "dbias")


def tiles_for(q) -> fast.TileSizes:
    return TILES if q.shape[2] <= 12 else LONGER


def worst(got, want, scale) -> dict[str, float]:
    found = {}
    for name in ("o", "lse", *NAMES):
        mine, theirs = (getattr(x, name, None) for x in (got, want))
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            found[name] = worst_row_error(mine, theirs, getattr(scale, name))
    return found


@pytest.mark.parametrize("number", NUMBERS)
def test_dense_equals_the_specification(number):
    q, k, v, dy, dlse, options, _ = case(number)
    scale = row_scale(q, k, v, dy, dlse, **options)
    want = rs.attention(q, k, v, **options)
    want_back = rs.attention_backward(q, k, v, dy, dlse=dlse, **options)
    for dtype, bound in (("float64", BOUND), ("float32", FLOAT32_BOUND)):
        keywords = {"dtype": dtype, "sizes": tiles_for(q), "threads": 2, **options}
        got = fast.attention(q, k, v, **keywords)
        back = fast.attention_backward(q, k, v, dy, dlse=dlse, **keywords)
        assert got.o.dtype == got.lse.dtype == back.dq.dtype == dtype
        errors = worst(got, want, scale) | worst(back, want_back, scale)
        assert all(error <= bound for error in errors.values()), (dtype, errors)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_ring_with_fast_blocks_equals_the_definition_on_every_worker(number):
    q, k, v, dy, dlse, options, ring = case(number)
    pieces = fast.pieces(threads=1, sizes=tiles_for(q))
    run = rs.ring(q, k, v, dy, dlse=dlse, **pieces, **ring, **options)
    plain = rs.ring(q, k, v, dy, dlse=dlse, **ring, **options)
    scale = row_scale(q, k, v, dy, dlse, **options)
    assert all(error <= BOUND for error in worst(run, plain, scale).values())
    for mine, theirs in zip(run.workers, plain.workers, strict=True):
        for name, index in (("o", mine.index_q), ("lse", mine.index_q), ("dq", mine.index_q),
                            ("dk", mine.index_k), ("dv", mine.index_k)):  # fmt: skip
            real = index >= 0
            got, want = (getattr(w, name)[:, :, real] for w in (mine, theirs))
            assert worst_row_error(got, want, getattr(scale, name)[:, :, index[real]]) <= BOUND


def test_a_wrong_tile_would_be_seen():
    """The comparison can fail: one key too few in the last tile is far outside the bound."""
    q, k, v, _, _, options, _ = case(0)
    scale, want = row_scale(q, k, v, **options), rs.attention(q, k, v, **options)
    n = k.shape[2]
    mask = np.broadcast_to(np.arange(n) < n - 1, (q.shape[2], n))
    got = fast.attention(q, k, v, sizes=TILES, **{**options, "mask": mask})
    assert not worst_row_error(got.o, want.o, scale.o) <= 1e6 * BOUND


def tensors(seed, H, Hkv, n_q, n_k, D=16, B=1, size=1.0):
    random = np.random.default_rng(seed)
    shapes = ((B, H, n_q, D), (B, Hkv, n_k, D), (B, Hkv, n_k, D), (B, H, n_q, D))
    q, k, v, dy = (random.normal(size=shape) for shape in shapes)
    return size * q, k, v, dy


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float64", 300.0),
        ("float32", 1.0),
        pytest.param("float64", 1.0, marks=pytest.mark.slow),
        pytest.param("float32", 20.0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (290, 40)}], ids=str)
def test_tiles_of_full_size_give_the_same(options, dtype, size):
    """TileSizes as they are used, ends that fill no tile, and scores too large to go without a shift."""
    q, k, v, dy = tensors(1, 2, 1, 600, 600, size=size)
    want, got = rs.attention(q, k, v, **options), fast.attention(q, k, v, dtype=dtype, **options)
    want_back = rs.attention_backward(q, k, v, dy, **options)
    back = fast.attention_backward(q, k, v, dy, forward=got, dtype=dtype, **options)
    scale = row_scale(q, k, v, dy, **options)
    bound = {"float64": 2e-14, "float32": 4e-6}[dtype]
    errors = worst(got, want, scale) | worst(back, want_back, scale)
    assert all(error <= bound for error in errors.values()), errors


def test_as_many_heads_as_tokens():
    q, k, v, dy = tensors(2, 6, 3, 6, 6, D=4, B=2)
    got, want = fast.attention(q, k, v, sizes=TILES), rs.attention(q, k, v)
    assert worst_row_error(got.o, want.o, row_scale(q, k, v).o) <= BOUND
    back = fast.attention_backward(q, k, v, dy, sizes=TILES)
    assert worst(back, rs.attention_backward(q, k, v, dy), row_scale(q, k, v, dy))["dk"] <= BOUND


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_empty_row_gives_zeros_and_minus_infinity_and_sends_no_gradient(dtype):
    q, k, v, dy = tensors(3, 2, 2, 9, 9)
    seen = np.zeros((9, 9), bool)
    seen[4:, 2:] = True
    got = fast.attention(q, k, v, mask=seen, dtype=dtype, sizes=TILES)
    back = fast.attention_backward(q, k, v, dy, mask=seen, dtype=dtype, sizes=TILES)
    assert (got.o[:, :, :4] == 0).all() and np.isneginf(got.lse[:, :, :4]).all()
    assert (back.dq[:, :, :4] == 0).all() and (back.dk[:, :, :2] == 0).all()
    zeros = np.concatenate([x[x == 0] for x in (got.o, back.dq, back.dk, back.dv)])
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 3), (3, 0), (0, 0)])
def test_no_tokens_are_no_error(n_q, n_k):
    q, k, v, dy = tensors(4, 2, 1, n_q, n_k)
    assert fast.attention(q, k, v).o.shape == q.shape
    assert fast.attention_backward(q, k, v, dy).dk.shape == k.shape


def test_only_recipes_of_one_type_are_followed():
    q, k, v, dy = tensors(5, 2, 1, 12, 12)
    forward, backward = fast.blocks(sizes=TILES)
    for name in ("float64", "float32"):
        run = rs.ring(q, k, v, dy, workers=3, recipe=name, block_forward=forward,
                      block_backward=backward)  # fmt: skip
        plain = rs.ring(q, k, v, dy, workers=3, recipe=name)
        bound = {"float64": BOUND, "float32": FLOAT32_BOUND}[name]
        assert max(worst(run, plain, row_scale(q, k, v, dy)).values()) <= bound
        assert (run.o == run.o.astype(name)).all() and run.o.dtype == np.float64
    tiled = rs.RECIPES["float64"].replace(name="tiled", tile_k=4)
    for recipe in ("bf16", "nki", "nki_impl_fp32", tiled):
        with refuses((OptionError, "fast-recipe"), match="float64 or float32 throughout"):
            rs.ring(q, k, v, workers=3, recipe=recipe, block_forward=forward)
        with refuses((OptionError, "fast-recipe"), match="float64 or float32 throughout"):
            rs.ring(q, k, v, workers=3, recipe=recipe, merge=fast.merge_states)


def bits(x):
    """Of the values, whichever type holds them."""
    return x.astype(np.float64).tobytes()


@pytest.mark.rule("SOFT-1", "SOFT-2")
@pytest.mark.parametrize("recipe", ["float64", "float32"])
@pytest.mark.parametrize("n", [1, 5, 3000])
def test_a_merge_has_the_bits_of_the_specification_also_with_empty_rows(recipe, n):
    random = np.random.default_rng(n)

    def state(empty):
        m, l = random.standard_normal((1, 2, n)), 1 + random.random((1, 2, n))
        o = random.standard_normal((1, 2, n, 3))
        m[..., empty], l[..., empty], o[..., empty, :] = -np.inf, 0, 0
        return SoftmaxState(*(round_to(x, recipe) for x in (m, l, o)))

    a, b = state([0]), state([0, n // 2])
    want = merge(a, b, rs.RECIPES[recipe])
    for threads in (1, 3):
        got = fast.merge_states(a, b, rs.RECIPES[recipe], threads=threads)
        assert (
            n == 1 or got.o.dtype == recipe
        )  # n = 1: all rows are empty, and b itself is returned
        assert all(bits(getattr(got, x)) == bits(getattr(want, x)) for x in "mlo")
    nothing = start(1, 2, n, 3)
    assert fast.merge_states(nothing, b, rs.RECIPES[recipe]) is b


@pytest.mark.rule("NUM-2")
@pytest.mark.parametrize("accumulator", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(0, 1, 2, 3), (1, 2, 5, 3), (1, 2, 1200, 128)])
def test_an_addition_has_the_bits_of_the_specification(accumulator, shape):
    total, share = np.random.default_rng(2).standard_normal((2, *shape))
    total = round_to(total, accumulator)
    want = plus(total, share, accumulator)
    for threads in (1, 3):
        assert bits(fast.accumulate(total, share, accumulator, threads=threads)) == bits(want)
    if accumulator != "bfloat16":
        narrow = fast.accumulate(total.astype(accumulator), round_to(share, accumulator).astype(accumulator), accumulator)  # fmt: skip
        assert narrow.dtype == accumulator
        assert bits(narrow) == bits(plus(total, round_to(share, accumulator), accumulator))


def test_bad_input_is_refused_as_the_specification_refuses_it():
    q, k, v, dy = tensors(6, 2, 1, 4, 4)
    broken = k.copy()
    broken[0, 0, 1, 3] = np.nan  # not in the first column
    for bad in ((q, broken, v), (q, k[..., :3], v), (q[0], k, v), (q, k, v.astype(int)), (q, k[:, :, :2], v)):  # fmt: skip
        with pytest.raises(RingspecError) as theirs:
            rs.attention(*bad)
        with pytest.raises(type(theirs.value)) as mine:
            fast.attention(*bad)
        assert str(mine.value) == str(theirs.value)
    with pytest.raises(NonFiniteError):
        fast.attention(1e200 * q, 1e200 * k, v)
    with pytest.raises(NonFiniteError, match="float32"):
        fast.attention(1e200 * q, k, v, dtype="float32")
    for keywords in ({"dtype": "float16"}, {"threads": 0}, {"casual": True}):
        with pytest.raises(RingspecError):
            fast.attention(q, k, v, **keywords)
    with pytest.raises(RingspecError):
        fast.TileSizes(rows=4, keys=3, granule=2)
    with pytest.raises(RingspecError):
        fast.attention_backward(q, k, v, dy, forward=fast.attention(q[:, :, :2], k, v))


@pytest.mark.torch
@pytest.mark.parametrize("causal", [False, True])
def test_torch_agrees_at_a_real_length(causal):
    import torch

    q, k, v, dy = (x.astype(np.float32) for x in tensors(7, 4, 2, 1500, 1500, D=64))
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    o.backward(torch.from_numpy(dy))
    got = fast.attention(q, k, v, causal=causal, dtype="float32")
    back = fast.attention_backward(q, k, v, dy, causal=causal, dtype="float32")
    scale = row_scale(q, k, v, dy, causal=causal)
    assert worst_row_error(got.o, o.detach().numpy(), scale.o) <= 2e-6
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        assert worst_row_error(getattr(back, name), leaf.grad.numpy(), getattr(scale, name)) <= 2e-6


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("options", [{"softcap": 9.0}, {}], ids=["softcap", "plain"])
def test_an_empty_tile_hides_nothing_of_what_lies_far_below_zero(options, dtype):
    """A row that sees no key in one tile and scores of -500 in another, or sinks there alone."""
    q, k = np.full((1, 1, 8, 1), 1.0), np.full((1, 1, 8, 1), -500.0)
    k[:, :, :4] = 1.0
    v = np.arange(8.0)[None, None, :, None]
    seen = np.ones((8, 8), bool)
    seen[2:, :4] = False
    seen[6:] = False
    keywords = {"scale": 1.0, "mask": seen, "sinks": [[-800.0]], **options}
    got = fast.attention(q, k, v, dtype=dtype, sizes=fast.TileSizes(8, 4, 4, 4), **keywords)
    want = rs.attention(q, k, v, **keywords)
    assert np.allclose(got.lse, want.lse, rtol=1e-6) and np.allclose(got.o, want.o, rtol=1e-6)
