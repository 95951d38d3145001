"""The running state: start, absorb, merge, finish, and its empty rows."""

import mpmath
import numpy as np
import pytest

from ringspec.recipes import recipe
from ringspec.spec.online_softmax import (
    SoftmaxState,
    absorb,
    finish,
    merge,
    merge_normalised,
    normalised,
    start,
)

EXACT = recipe("float64")


def state_of(s: list[float], v: list[float]) -> SoftmaxState:
    """The state of one row that saw scores s and values v (width 1)."""
    scores, values = np.array(s).reshape(1, 1, 1, -1), np.array(v).reshape(1, 1, -1, 1)
    return absorb(start(1, 1, 1, 1), scores, values, 1.0, EXACT)


def result(state: SoftmaxState) -> tuple[float, float]:
    o, lse = finish(state, None, EXACT)
    return float(o[0, 0, 0, 0]), float(lse[0, 0, 0])


def exact(s: list[float], v: list[float]) -> tuple[float, float]:
    with mpmath.workdps(400):
        e = [mpmath.exp(x) for x in s]
        total = mpmath.fsum(e)
        o = mpmath.fsum(a * b for a, b in zip(e, v, strict=True)) / total
        return float(o), float(mpmath.log(total))


@pytest.mark.rule("SOFT-2", "FWD-8")
@pytest.mark.parametrize("merged", [merge, merge_normalised])
def test_merging_empty_states_gives_the_empty_state(merged):
    empty = start(1, 1, 1, 1)
    both = merged(empty, empty, EXACT)
    assert float(both.m[0, 0, 0]) == -np.inf and float(both.l[0, 0, 0]) == 0
    assert float(both.lse[0, 0, 0]) == -np.inf
    assert result(both) == (0.0, -np.inf)


@pytest.mark.rule("SOFT-2")
@pytest.mark.parametrize("merged", [merge, merge_normalised])
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_state_changes_nothing_on_either_side(merged, first):
    full = normalised(state_of([1.0, -2.0], [3.0, 4.0]), EXACT)
    empty = start(1, 1, 1, 1)
    pair = (empty, full) if first else (full, empty)
    assert result(merged(*pair, EXACT)) == result(full)


@pytest.mark.rule("SOFT-2")
def test_a_first_tile_that_is_wholly_masked_does_not_pin_the_maximum():
    """flash-attention issue 2082: the maximum stayed 0 and rows near -200 underflowed."""
    state = state_of([-np.inf, -np.inf], [5.0, 6.0])
    state = absorb(
        state, np.array([-200.0, -201.0]).reshape(1, 1, 1, 2), np.array([1.0, 2.0]).reshape(1, 1, 2, 1),
        1.0, EXACT,
    )  # fmt: skip
    want_o, want_lse = exact([-200.0, -201.0], [1.0, 2.0])
    assert abs(result(state)[0] - want_o) <= 1e-15 and abs(result(state)[1] - want_lse) <= 1e-13


@pytest.mark.rule("SOFT-4", "SOFT-1")
@pytest.mark.parametrize("merged", [merge, merge_normalised])
@pytest.mark.parametrize("gap", [0.0, 90.0, 1e3, 1e5, -1e5])
def test_no_gap_between_two_blocks_overflows(merged, gap):
    """ring-flash-attention PR 30, TransformerEngine PR 716: exp(lse) and log(1 + exp(gap))."""
    a = normalised(state_of([800.0], [1.0]), EXACT)
    b = normalised(state_of([800.0 + gap], [3.0]), EXACT)
    with np.errstate(over="raise", invalid="raise"):
        got = result(merged(a, b, EXACT))
    want = exact([800.0, 800.0 + gap], [1.0, 3.0])
    assert abs(got[0] - want[0]) <= 4e-15
    assert abs(got[1] - want[1]) <= 1e-15 * abs(want[1])


@pytest.mark.rule("SOFT-3")
def test_normalised_partials_merge_in_natural_base():
    """A published pair: sums of exp 2 and 8, second shard's o = 10, so o = 8 (sglang PR 33065)."""
    a = SoftmaxState(np.log(np.full((1, 1, 1), 2.0)), np.ones((1, 1, 1)), np.zeros((1, 1, 1, 1)))
    b = SoftmaxState(
        np.log(np.full((1, 1, 1), 8.0)), np.ones((1, 1, 1)), np.full((1, 1, 1, 1), 10.0)
    )
    o, lse = result(merge_normalised(a, b, EXACT))
    assert abs(o - 8.0) <= 2e-15 and abs(lse - float(np.log(10.0))) <= 1e-15


@pytest.mark.rule("FWD-5", "FWD-9")
def test_sinks_join_once_at_the_end():
    row = state_of([0.0, 0.0], [1.0, 3.0])
    o, lse = finish(row, np.log(np.array([[1.0, 1.0]])), EXACT)
    assert abs(float(o[0, 0, 0, 0]) - 1.0) <= 1e-15
    assert abs(float(lse[0, 0, 0]) - float(np.log(4.0))) <= 1e-15


@pytest.mark.rule("FWD-9")
@pytest.mark.parametrize("sink", [-1e4, 0.0, 100.0, 1e4])
def test_a_row_with_a_sink_alone_has_its_logit_as_lse(sink):
    o, lse = finish(start(1, 1, 1, 1), np.array([[sink]]), EXACT)
    assert float(o[0, 0, 0, 0]) == 0.0 and float(lse[0, 0, 0]) == sink


@pytest.mark.rule("SOFT-1")
def test_absorbing_tiles_equals_absorbing_the_whole():
    random = np.random.default_rng(0)
    s, v = random.normal(size=(1, 1, 1, 9)) * 30, random.normal(size=(1, 1, 9, 1))
    tiles = start(1, 1, 1, 1)
    for first in range(0, 9, 2):
        tiles = absorb(tiles, s[..., first : first + 2], v[:, :, first : first + 2], 1.0, EXACT)
    want = exact(s.ravel().tolist(), v.ravel().tolist())
    for state in (tiles, state_of(s.ravel().tolist(), v.ravel().tolist())):
        assert abs(result(state)[0] - want[0]) <= 1e-15 * np.abs(v).max()
        assert abs(result(state)[1] - want[1]) <= 1e-15 * abs(want[1])
