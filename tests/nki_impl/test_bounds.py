"""Bounds of three shapes, and the arguments of the forward kernel that AWS's kernel does not have."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nki_impl.packing import bounds_by_position, document_ranges, position_ranges

from .altered import altered
from .reference import Case, Inputs, draw, forward
from .running import (
    Backward,
    Forward,
    both,
    errors_of_backward,
    errors_of_forward,
    run_backward,
    run_forward,
    wrong,
)

LAYOUTS: dict[str, dict[str, bool]] = {
    "zigzag": {"causal": True, "zigzag": True},
    "documents, contiguous": {"causal": True, "documents": True},
    "documents, striped": {"causal": True, "striped": True, "documents": True},
    "documents, zigzag": {"causal": True, "zigzag": True, "documents": True},
    "documents, full": {"documents": True},
}
PACKED = Case(workers=2, batch=2, heads=2, length=150, causal=True, striped=True, packed=True)


def correct(one: Case, ahead: Forward, back: Backward) -> bool:
    return not (wrong(errors_of_forward(one, ahead)) or wrong(errors_of_backward(one, ahead, back)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("workers", "length", "lnc"), [(1, 6, 1), (3, 130, 1), (4, 40, 2)])
def test_both_passes_in_every_layout(layout: str, workers: int, length: int, lnc: int) -> None:
    one = Case(workers, 2, 2, 2, length, **LAYOUTS[layout], seed=length)
    assert correct(one, *both(one, launch={"lnc": lnc}))


@pytest.mark.parametrize("layout", ["zigzag", "documents, striped"])
def test_lengths_beyond_what_is_on_chip_at_a_time(layout: str, tmp_path: Path) -> None:
    module = altered(tmp_path, ("tiles.py", "STRETCH = 2048", "STRETCH = 128"))
    one = Case(2, length=300, dtype="float32", **LAYOUTS[layout])
    assert correct(one, *both(one, module))


@pytest.mark.parametrize("ids", ["rank", "position"])
def test_two_groups_side_by_side(ids: str) -> None:
    one = Case(2, length=40, groups=((0, 1), (2, 3)), **LAYOUTS["documents, zigzag"])
    assert correct(one, *both(one, launch={"ring_ids": ids, "lnc": 2}))


def test_groups_go_by_the_order_of_their_lists() -> None:
    one = Case(3, length=40, groups=((4, 0, 2), (1, 5, 3)), **LAYOUTS["documents, zigzag"])
    assert correct(one, *both(one))


def run_with(one: Case, given: Inputs, change: Any, **launch: Any) -> tuple[Forward, Backward]:
    """Both passes with the bounds [ranks, b, s] in another shape; ``change`` gets those of one rank."""
    ahead_of: list[Any] = []
    for run in (run_forward, run_backward):
        low, high = given.bound_min, given.bound_max
        assert low is not None and high is not None
        changed = dataclasses.replace(
            given,
            bound_min=np.stack([change(x) for x in low]),
            bound_max=np.stack([change(x) for x in high]),
        )
        more = () if run is run_forward else (ahead_of[0].o, ahead_of[0].lse)
        ahead_of.append(run(one, changed, *more, launch=launch))
    return ahead_of[0], ahead_of[1]


@pytest.mark.parametrize("lnc", [1, 2])
def test_bounds_of_each_head_or_position_give_the_bits_of_equal_ones(lnc: int) -> None:
    given = draw(PACKED)
    plain = run_with(PACKED, given, lambda x: x, lnc=lnc)
    assert correct(PACKED, *plain)
    by_head = run_with(PACKED, given, lambda x: np.repeat(x, 2, axis=0)[..., None], lnc=lnc)
    by_position = run_with(PACKED, given, lambda x: np.stack([x, x])[..., None], lnc=lnc)
    for other in (by_head, by_position):
        assert (other[0].o == plain[0].o).all() and (other[0].lse == plain[0].lse).all()
        for name in ("dq", "dk", "dv"):
            assert (getattr(other[1], name) == getattr(plain[1], name)).all()


def test_each_query_head_has_its_own_bounds() -> None:
    """Head h sees key h + 1 alone, in groups of two that share a key head."""
    one = Case(workers=2, heads=4, group=2, length=20, causal=True, striped=True, dtype="float32")
    low = np.broadcast_to(np.arange(1, 5)[:, None, None], (4, 20, 1)).copy()
    given = draw(one)
    bounded = dataclasses.replace(
        given, bound_min=np.stack([low] * 2), bound_max=np.stack([low + 1] * 2)
    )
    ahead = run_forward(one, bounded)
    back = run_backward(one, bounded, ahead.o, ahead.lse)
    for head in range(4):
        assert np.isneginf(ahead.lse[0, 0, head, : head + 1]).all()
        assert np.isfinite(ahead.lse[0, 0, head, head + 1 :]).all()
    seen = [np.flatnonzero(np.abs(back.dv[0, 0, i]).max(axis=1)).tolist() for i in range(2)]
    assert seen == [[1, 2], [3, 4]]


def test_rows_without_keys_have_an_lse_of_zero_if_asked_and_the_backward_takes_it() -> None:
    given = draw(PACKED)
    plain, zero = (run_forward(PACKED, given, zero_lse=x) for x in (False, True))
    empty = np.isneginf(plain.lse)
    assert empty.sum() >= 5
    assert (zero.lse[empty] == 0).all() and (zero.lse[~empty] == plain.lse[~empty]).all()
    assert (zero.o == plain.o).all()
    assert (np.isneginf(forward(PACKED, given).value["lse"]) == empty).all()
    backs = [run_backward(PACKED, given, x.o, x.lse) for x in (plain, zero)]
    for name in ("dq", "dk", "dv"):
        assert (getattr(backs[0], name) == getattr(backs[1], name)).all()


def test_a_scale_under_a_causal_mask_is_ignored_with_a_warning_if_asked() -> None:
    one = Case(workers=2, length=20, causal=True)
    given = draw(one)
    with pytest.warns(UserWarning, match="softmax_scale=0.5 is ignored under a causal mask"):
        ignored = run_forward(one, given, softmax_scale=0.5, causal_scale="ignore")
    assert (ignored.o == run_forward(one, given).o).all()


@pytest.mark.parametrize("scale", [None, 0, 1.0])
def test_a_default_scale_is_ignored_without_a_warning(
    scale: float | None, recwarn: pytest.WarningsRecorder
) -> None:
    one = Case(length=20, causal=True)
    run_forward(one, draw(one), softmax_scale=scale, causal_scale="ignore")
    assert len(recwarn) == 0


@pytest.mark.parametrize("striped", [False, True])
def test_a_scale_under_a_causal_mask_is_applied_if_asked(striped: bool) -> None:
    one = Case(workers=3, length=40, causal=True, striped=striped, dtype="float32")
    given = draw(one)
    quarter = dataclasses.replace(given, q=given.q * np.float32(0.25))
    applied = run_forward(one, given, softmax_scale=0.25, causal_scale="apply")
    expected = run_forward(one, quarter)
    assert (applied.o == expected.o).all() and (applied.lse == expected.lse).all()
    default = run_forward(one, given, softmax_scale=None, causal_scale="apply")
    eighth = run_forward(one, given, softmax_scale=0.125, causal_scale="apply")
    assert (default.o == eighth.o).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal_scale": "drop"}, "expected causal_scale to be one of"),
        ({"bound_min": np.zeros((3, 1, 20, 1)), "bound_max": np.zeros((3, 1, 20, 1))}, "bound_min"),
        ({"bound_min": np.zeros((1, 20)), "bound_max": np.zeros((1, 20, 1))}, "bound_max"),
        ({"bound_min": np.zeros((1, 20, 1)), "bound_max": np.zeros((1, 20, 1))}, "striped"),
    ],
)
def test_what_the_kernel_refuses(options: dict[str, Any], message: str) -> None:
    one = Case(workers=2, length=20, causal=True)
    numbers = {n: x.astype(np.float32) if n.startswith("b") else x for n, x in options.items()}
    with pytest.raises(AssertionError, match=message):
        run_forward(one, draw(one), **numbers)


def test_a_query_in_no_document_sees_nothing_and_windows_are_cut() -> None:
    first, last = document_ranges([-1, 0, 4, 5, 9], (0, 5, 9))
    assert (last - first).tolist() == [0, 5, 5, 4, 0]
    first, last = position_ranges([0, 5], window=(2, 1))
    assert (first.tolist(), last.tolist()) == ([0, 3], [2, 7])
    first, last = document_ranges([0, 5], (0, 5, 9), (0, 2, 9))
    assert (first.tolist(), last.tolist()) == ([0, 2], [2, 9])


def test_tokens_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValueError, match="Fix: sort"):
        bounds_by_position(np.zeros((1, 2)), np.ones((1, 2)), [[0, 1], [3, 2]])
