"""Values kept of immutable arrays: found again, never those of arrays that can change, gone when these are."""

import gc

import numpy as np
import pytest

import ringspec as rs
from ringspec import fast
from ringspec.fast.kept import Kept
from ringspec.problem.model import Tile
from ringspec.problem.options import check
from ringspec.rings.lockstep import read_only


def a_view(x):
    """A read-only view of x, which says nothing of x."""
    x = x.view()
    x.flags.writeable = False
    return x


def made_read_only(x):
    x.flags.writeable = False
    return x


def test_a_value_is_made_once_for_the_same_immutable_arrays_and_key():
    kept, made = Kept(), []

    def make():
        made.append(1)
        return len(made)

    x, y = read_only(np.ones(3)), read_only(np.ones(3))
    assert [kept.get((x,), "a", make), kept.get((x,), "a", make)] == [1, 1]
    assert kept.get((y,), "a", make) == 2 and kept.get((x,), "b", make) == 3
    assert kept.get((x, y), "a", make) == 4 and kept.get((y, x), "a", make) == 5
    assert kept.get((x, y), "a", make) == 4


@pytest.mark.parametrize("given", [np.array, a_view, made_read_only, lambda x: a_view(x)[1:]])
def test_of_arrays_that_somebody_can_write_to_nothing_is_kept(given):
    kept, x = Kept(), given(np.ones(3))
    assert kept.get((x,), "a", lambda: 1) == 1 and kept.get((x,), "a", lambda: 2) == 2
    assert kept.get((read_only(x), x), "a", lambda: 3) == 3 and not kept.made


def test_what_is_kept_of_an_array_is_kept_of_a_view_of_it_too():
    kept, x = Kept(), read_only(np.ones(3))[1:]
    assert kept.get((x,), "a", lambda: 1) == 1 and kept.get((x,), "a", lambda: 2) == 1


def test_a_value_goes_with_the_first_of_its_arrays():
    kept, x, y = Kept(), read_only(np.ones(3)), read_only(np.ones(3))
    kept.get((x, y), "a", lambda: 1)
    kept.get((y,), "a", lambda: 2)
    del x
    gc.collect()
    assert [value for _, value in kept.made.values()] == [2]
    del y
    gc.collect()
    assert kept.made == {}


def test_an_array_with_the_number_of_one_that_is_gone_is_another(monkeypatch):
    kept = Kept()
    monkeypatch.setattr("ringspec.fast.kept.id", lambda x: 7, raising=False)
    x, y = read_only(np.ones(3)), read_only(np.ones(3))
    assert kept.get((x,), "a", lambda: 1) == 1
    assert kept.get((y,), "a", lambda: 2) == 2
    del x  # which must not take y's value with it
    gc.collect()
    assert kept.get((y,), "a", lambda: 3) == 2


@pytest.mark.parametrize("recipe", ["float64", "float32"])
@pytest.mark.parametrize("given", [lambda x: x, a_view], ids=["arrays", "read-only views"])
def test_blocks_see_what_was_written_between_two_calls(recipe, given):
    random = np.random.default_rng(0)
    buffers = [*random.normal(size=(4, 1, 2, 16, 4)), *np.zeros((2, 1, 2, 16))]
    q, k, v, dy, lse, row_term = map(given, buffers)
    p = check(q, k, v, {})
    tile = Tile(p.rows, p.columns, p.terms, rs.RECIPES[recipe])
    forward, backward = fast.blocks(threads=1)
    first = forward(q, k, v, tile), backward(q, k, v, dy, lse, row_term, tile)
    for x in buffers:
        x += 0.5
    second = forward(q, k, v, tile), backward(q, k, v, dy, lse, row_term, tile)
    fresh = fast.blocks(threads=1)
    want = fresh[0](q, k, v, tile), fresh[1](q, k, v, dy, lse, row_term, tile)
    for one, two, three in zip(first, second, want, strict=True):
        for name in ("l", "o", "dq", "dk", "dv"):
            if hasattr(one, name):
                a, b, c = (getattr(x, name) for x in (one, two, three))
                assert (a != b).any() and b.tobytes() == c.tobytes()


@pytest.mark.parametrize("recipe", ["float64", "float32"])
def test_after_a_ring_nothing_of_it_is_kept_and_within_it_every_input_is_prepared_once(recipe):
    q, k, v, dy = np.random.default_rng(0).normal(size=(4, 1, 2, 24, 4))
    pieces = fast.pieces(threads=2)
    kept, most = pieces["block_forward"].keywords["kept"], []
    assert kept is pieces["block_backward"].keywords["kept"]
    rs.ring(
        q, k, v, dy, workers=3, recipe=recipe, observer=lambda _: most.append(len(kept.made)),
        **pieces,
    )  # fmt: skip
    # Of a worker and head: forward q, |k| and, converted, k and v; backward four operands.
    a_head = 2 if recipe == "float64" else 4
    assert most[2] == most[8] == 3 * 2 * a_head
    assert most[11] == most[17] == 3 * 2 * 4
    gc.collect()
    assert kept.made == {}
