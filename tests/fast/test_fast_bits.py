"""Bits of the fast path: the same for any number of threads, and untouched by keys that are not seen."""

import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

import ringspec as rs
from ringspec import fast
from ringspec.errors import NonFiniteError
from ringspec.fast.backward import Seeds
from ringspec.fast.job import head_of, make_job, pattern_of
from ringspec.fast.kept import Kept
from ringspec.fast.passes import backward_result
from ringspec.fast.plan import Run, kinds
from ringspec.fast.team import run_tasks
from ringspec.problem.model import Tile
from ringspec.problem.options import check
from ringspec.spec.masks import visible

TILES = fast.TileSizes(rows=16, keys=32, granule=16, chunk=32)
TINY = fast.TileSizes(rows=2, keys=4, granule=2, chunk=4)
RECIPES = ("float64", "float32")


def tensors(seed, H=2, Hkv=1, n_q=100, n_k=100, D=8, B=1):
    random = np.random.default_rng(seed)
    shapes = ((B, H, n_q, D), (B, Hkv, n_k, D), (B, Hkv, n_k, D), (B, H, n_q, D))
    return [random.normal(size=shape) for shape in shapes]


def bits(*results) -> list[bytes]:
    return [x.tobytes() for result in results for x in vars(result).values() if x is not None]


@pytest.mark.parametrize(
    "sizes",
    [TILES, pytest.param(fast.TileSizes(), marks=pytest.mark.slow)],
    ids=["small", "real"],
)
@pytest.mark.parametrize("dtype", RECIPES)
def test_any_number_of_threads_gives_the_same_bits(dtype, sizes):
    n = 100 if sizes == TILES else 1100
    q, k, v, dy = tensors(1, H=3, n_q=n, n_k=n)
    bias = np.random.default_rng(2).normal(size=(1, 1, 1, n))
    for options in ({"causal": True, "sinks": np.ones((3, 2))}, {"bias": bias}):
        seen = set()
        for threads in (1, 2, 3, 5):
            keywords = {"dtype": dtype, "sizes": sizes, "threads": threads, **options}
            forward = fast.attention(q, k, v, **keywords)
            back = fast.attention_backward(q, k, v, dy, **keywords)
            seen.add(tuple(bits(forward, back)))
        assert len(seen) == 1


# Squares and products of these leave the type's range.
HUGE = {"float64": 1e300, "float32": 1e30}
FUTURES = {
    "causal": ({"causal": True}, 60),
    "bounds": ({"bound_min": np.zeros(100, int), "bound_max": np.arange(100) // 2 + 1}, 30),
    "mask": ({"mask": np.tril(np.ones((100, 100), bool))}, 60),
    "softcap": ({"causal": True, "softcap": 5.0}, 60),
    "dropout": ({"causal": True, "dropout_p": 0.2}, 60),
    "bias": ({"causal": True, "bias": np.random.default_rng(0).normal(size=(100, 100))}, 60),
}


@pytest.mark.parametrize("change", ["huge", "nan", "infinite"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FUTURES)
def test_a_row_keeps_its_bits_whatever_the_keys_are_that_it_does_not_see(name, recipe, change):
    """Rows that do not see key ``first`` and those behind it; the blocks take values as they are."""
    options, first = FUTURES[name]
    q, k, v, dy = tensors(3)
    problem = check(q, k, v, options)
    parts = (problem.rows, problem.columns, problem.terms, rs.RECIPES[recipe])
    blind = ~visible(*parts[:3])[0, 0, :, first:].any(axis=1)
    assert 30 <= blind.sum() < 100
    other_k, other_v = k.copy(), v.copy()
    value = {"huge": HUGE[recipe], "nan": np.nan, "infinite": np.inf}[change]
    other_k[:, :, first + 1 :: 2], other_v[:, :, first::2] = value, -value
    forward, backward = fast.blocks(threads=2, sizes=TILES)
    tile = Tile(*parts)
    one, two = forward(q, k, v, tile), forward(q, other_k, other_v, tile)
    for x, y in zip(vars(one).values(), vars(two).values(), strict=True):
        assert np.isfinite(x[:, :, blind]).all()
        assert x[:, :, blind].tobytes() == y[:, :, blind].tobytes()
    assert one.o[:, :, ~blind].tobytes() != two.o[:, :, ~blind].tobytes()
    gradients = []
    for keys, values in ((k, v), (other_k, other_v)):
        job = make_job(q, keys, values, *parts[:3], recipe, TILES)
        seeds = Seeds(dy, one.lse, np.zeros(one.lse.shape))
        gradients.append(backward_result(job, seeds, 2).dq)  # the blocks refuse overflow and NaN
    assert gradients[0][:, :, blind].tobytes() == gradients[1][:, :, blind].tobytes()


def test_a_ring_keeps_the_bits_of_rows_before_a_change():
    q, k, v, _ = tensors(4, n_q=96, n_k=96)
    forward, _ = fast.blocks(sizes=TILES)
    other = k.copy()
    other[:, :, 50:] *= 50.0
    for layout in ("contiguous", "striped", "zigzag"):
        a, b = (
            rs.ring(q, x, v, workers=3, layout=layout, causal=True, block_forward=forward).o
            for x in (k, other)
        )
        assert a[:, :, :50].tobytes() == b[:, :, :50].tobytes() and (a != b).any()


@settings(max_examples=40)
@given(st.data())
def test_the_plan_never_calls_a_hidden_pair_visible_or_a_visible_one_hidden(data):
    seed = data.draw(st.integers(0, 10**6))
    random = np.random.default_rng(seed)
    n_q, n_k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    some = st.booleans()
    options = {"causal": data.draw(some)}
    if data.draw(some):
        options["window"] = data.draw(st.tuples(st.none() | st.integers(0, 9), st.integers(0, 9)))
    if data.draw(some):
        options |= {
            "segments_q": np.sort(random.integers(-1, 3, n_q)),
            "segments_k": np.sort(random.integers(-1, 3, n_k)),
        }
    if data.draw(some):
        low = random.integers(0, n_k, n_q)
        options |= {"bound_min": low, "bound_max": low + random.integers(0, n_k + 1, n_q)}
    if data.draw(some):
        options |= {"positions_q": random.permutation(20)[:n_q], "positions_k": np.arange(n_k) * 2}
    p = check(*(np.ones((1, 1, n, 1)) for n in (n_q, n_k, n_k)), options)
    rows, columns = p.rows, p.columns
    if data.draw(some):  # as in a ring: padding, in any order
        rows = rows.take(np.where(random.random(n_q) < 0.3, -1, random.permutation(n_q)))
        columns = columns.take(np.where(random.random(n_k) < 0.3, -1, random.permutation(n_k)))
    seen = visible(rows, columns, p.terms)[0, 0]
    sizes = fast.TileSizes(rows=3, keys=4, granule=2, chunk=4)
    some_pair, every_pair = kinds(rows, columns, p.terms, sizes)
    for a in range(0, n_q, 3):
        for b in range(0, n_k, 2):
            tile = seen[a : a + 3, b : b + 2]
            assert some_pair[0, a // 3, b // 2] or not tile.any()
            assert not every_pair[0, a // 3, b // 2] or tile.all()


@settings(max_examples=40)
@given(st.data())
def test_a_tile_that_is_like_another_hides_the_same_pairs(data):
    """Patterns are made once for all tiles that are alike: here over many problems at once."""
    kept = Kept()
    for _ in range(4):
        seed, n = data.draw(st.integers(0, 10**6)), data.draw(st.integers(1, 12))
        random = np.random.default_rng(seed)
        low, document = random.integers(0, 6, n), np.sort(random.integers(0, 2, n))
        options = data.draw(
            st.sampled_from(
                [
                    {"causal": True},
                    {"causal": True, "q_offset": -2},
                    {"window": (2, 0)},
                    {"causal": True, "segments_q": document, "segments_k": document},
                    {"bound_min": low, "bound_max": low + random.integers(0, 5, n)},
                ]
            )
        )
        p = check(*(np.ones((1, 1, n, 1)) for _ in range(3)), options)
        order = np.where(random.random(n) < 0.2, -1, np.roll(np.arange(n), seed % 3))
        rows, columns = p.rows.take(order), p.columns.take(order)
        tensors = [np.ones((1, 1, n, 1))] * 3
        job = make_job(*tensors, rows, columns, p.terms, "float64", TINY, kept=kept)
        head, seen = head_of(job, 0, 0), visible(rows, columns, p.terms)[0, 0]
        for q0 in range(0, n, 2):
            for start in range(0, n, 4):
                tile = seen[q0 : q0 + 2, start : start + 4]
                whole = tile.shape[1] if tile.all() else int((~tile).any(axis=0).argmax())
                mixed = start + data.draw(st.integers(0, min(whole, tile.shape[1] - 1)))
                run = Run(start, min(start + 4, n), mixed)
                some, hidden, first = pattern_of(head, q0, min(q0 + 2, n), run)
                assert some == tile.any()
                assert (~hidden == tile).all() if hidden is not None else tile.all()
                assert tile[:, :first].all()


def test_the_tiles_on_the_diagonal_of_a_causal_mask_are_all_alike():
    p = check(*(np.ones((1, 1, 64, 1)) for _ in range(3)), {"causal": True})
    job = make_job(*[np.ones((1, 1, 64, 1))] * 3, p.rows, p.columns, p.terms, "float64", TILES)
    head = head_of(job, 0, 0)
    for q0 in (0, 16, 32, 48):
        pattern_of(head, q0, q0 + 16, Run(q0, q0 + 16, q0))
    assert len(job.kept.patterns) == 1


UNITS = (1.0, math.log2(math.e))


@pytest.mark.parametrize("dtype", RECIPES)
@pytest.mark.parametrize("size", [1.0, 30.0, 2000.0])
@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 9.0}, {"window": (40, 3)}])
def test_scores_in_units_of_log_2_give_the_same_as_natural_ones(monkeypatch, dtype, size, options):
    """What a machine without a fast exp2 computes, and one with it; with a shift and without one."""
    q, k, v, _ = tensors(6)
    q *= size * np.geomspace(1e-3, 1.0, 100)[:, None]  # rows within the bound beside others
    bias = np.random.default_rng(1).normal(size=(100, 100))
    want = {}
    for more in ({}, {"bias": bias}):
        for unit in UNITS:
            monkeypatch.setattr("ringspec.fast.job.unit_of", lambda dtype, unit=unit: unit)
            got = fast.attention(q, k, v, sizes=TILES, dtype=dtype, **options, **more)
            want[unit] = got
        exact = rs.attention(q, k, v, **options, **more)
        bound = {"float64": 1e-15, "float32": 1e-6}[dtype] * max(size, 10.0)
        for got in want.values():
            assert not (np.abs(got.o - exact.o) > bound).any()
            assert not (np.abs(got.lse - exact.lse) > bound * (1 + np.abs(exact.lse))).any()
        assert want[UNITS[0]].o.tobytes() != want[UNITS[1]].o.tobytes()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("change", ["huge", "nan", "infinite"])
def test_in_either_unit_a_row_keeps_its_bits(monkeypatch, unit, recipe, change):
    monkeypatch.setattr("ringspec.fast.job.unit_of", lambda dtype: unit)
    test_a_row_keeps_its_bits_whatever_the_keys_are_that_it_does_not_see("causal", recipe, change)


def test_plain_causal_tiles_are_all_decided_but_the_diagonal():
    p = check(*(np.ones((1, 1, 64, 1)) for _ in range(3)), {"causal": True})
    some, every = kinds(p.rows, p.columns, p.terms, fast.TileSizes(8, 8, 8, 8))
    assert (some[0] & ~every[0] == np.eye(8, dtype=bool)).all()


def test_blas_has_its_threads_back_afterwards_also_after_an_error():
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    def fail() -> None:
        assert threads() == [1] * len(threads())
        raise KeyError("broken")

    with threadpool_limits(2, user_api="blas"):
        before = threads()
        with pytest.raises(KeyError):
            run_tasks([fail, fail, fail], 2)
        assert threads() == before


def test_calls_from_several_threads_at_once_do_not_disturb_each_other():
    q, k, v, _ = tensors(5)
    want = fast.attention(q, k, v, sizes=TILES).o
    got: list = []
    callers = [
        threading.Thread(target=lambda: got.append(fast.attention(q, k, v, sizes=TILES, threads=2)))
        for _ in range(6)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(got) == 6 and all(x.o.tobytes() == want.tobytes() for x in got)


@pytest.mark.parametrize("dtype", RECIPES)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_in_the_type_that_is_computed_in_are_looked_through_in_the_pass(dtype, which, value):
    given = [x.astype(dtype) for x in tensors(7)[:3]]
    given[which][0, 0, 99, 3] = value  # of keys, one that no tile has: the last, under this mask
    with pytest.raises(NonFiniteError, match=f"in {'qkv'[which]}"):
        fast.attention(*given, dtype=dtype, sizes=TILES, window=(None, 0), q_offset=-50)
    given[which][0, 0, 99, 3] = 1e19 if dtype == "float32" else 1e160  # its square leaves the type
    if which != 1:
        fast.attention(*given, dtype=dtype, sizes=TILES, causal=True)
