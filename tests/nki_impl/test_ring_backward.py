"""The backward ring kernel, fed by the forward kernel's own o and lse, against float64 on every rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nki_impl.kernels import ring_attention_spmd_bwd
from nki_impl.sim.machine.launch import run_ranks
from ringspec.interfaces import nkilib

from .altered import altered
from .reference import DTYPES, Case, backward, draw, forward, worst
from .running import (
    Backward,
    Forward,
    both,
    errors_of_backward,
    errors_of_forward,
    order,
    run_backward,
    run_forward,
    tiles,
    turned,
    wrong,
)
from .test_ring_forward import LAYOUTS, case

# The kernels leave no order of two cores to the compiler.
pytestmark = pytest.mark.filterwarnings("error::nki_impl.sim.errors.RaceWarning")

NAMES = ("dq", "dk", "dv")


def check(one: Case, launch: Any = None) -> tuple[Forward, Backward]:
    """Run both passes and compare every rank's gradients."""
    ahead, back = both(one, launch=launch)
    assert all(getattr(back, name).dtype == np.float32 for name in NAMES)
    assert not wrong(errors_of_backward(one, ahead, back))
    return ahead, back


def same_bits(a: Backward, b: Backward) -> bool:
    return all((getattr(a, name) == getattr(b, name)).all() for name in NAMES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_gradients_of_every_rank(layout: str, workers: int) -> None:
    check(case(layout, workers=workers, length=256, batch=2, seed=workers))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_head_dimensions(layout: str, width: int, dtype: str) -> None:
    check(case(layout, workers=3, width=width, dtype=dtype))


@pytest.mark.parametrize("length", [128, 384])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_two_cores_give_the_bits_of_one(length: int, heads: int) -> None:
    one = case("packed", workers=2, length=length, heads=heads)
    ahead, single = check(one)
    double = run_backward(
        one, draw(one), ahead.o, ahead.lse, launch={"lnc": 2, "interleave": heads}
    )
    assert same_bits(single, double)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [5, 127, 130, 300])
def test_any_length_on_a_rank_and_no_value_from_the_padding_of_lse(
    layout: str, length: int
) -> None:
    """The padding of lse is NaN here: see :func:`running.tiles`."""
    check(case(layout, workers=3, length=length, seed=length))


@pytest.mark.parametrize("length", [60, 300])
def test_two_cores_give_the_bits_of_one_for_any_length(length: int) -> None:
    one = case("packed", workers=2, length=length, heads=3)
    ahead, single = check(one)
    double = run_backward(one, draw(one), ahead.o, ahead.lse, launch={"lnc": 2, "interleave": 1})
    assert same_bits(single, double)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lnc", [1, 2])
def test_lengths_beyond_what_is_on_chip_at_a_time(layout: str, lnc: int, tmp_path: Path) -> None:
    module = altered(tmp_path, ("tiles.py", "STRETCH = 2048", "STRETCH = 128"))
    one = case(layout, workers=2, length=330, heads=2, group=2, dtype="float32")
    ahead, back = both(one, module, launch={"lnc": lnc})
    assert not wrong(errors_of_forward(one, ahead))
    assert not wrong(errors_of_backward(one, ahead, back))


def test_what_is_on_chip_does_not_grow_with_the_length() -> None:
    high = []
    for length in (2048, 4096):
        shape = (1, 1, 64, length)
        given = [np.zeros(shape, DTYPES["bfloat16"])] * 5
        arguments = [(*given, np.zeros((1, 1, 128, length // 128), np.float32), True)]
        run = run_ranks(ring_attention_spmd_bwd, arguments)
        high.append(run.sbuf_high)
    # 4 bytes for each tile of 128 rows: which keys a row sees.
    assert high[1] <= high[0] + 16 * 16 < 64 * 1024


@pytest.mark.parametrize("layout", ["full", "packed"])
@pytest.mark.parametrize("lnc", [1, 2])
def test_key_heads_that_are_shared(layout: str, lnc: int) -> None:
    check(case(layout, workers=3, heads=4, group=2), launch={"lnc": lnc})
    check(case(layout, workers=2, heads=3, group=3), launch={"lnc": lnc})


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_queries_hop_one_time_less_than_there_are_ranks_and_dq_comes_home(workers: int) -> None:
    one = case("striped", workers=workers, dtype="float32")
    _, back = check(one)
    counters = back.outcome.ranks[0]
    hops = workers - 1
    # q, dy and row data; dq makes W hops, and none on a ring of one.
    assert counters.hops == 3 * hops + (workers if hops else 0)
    rows = one.length * one.width * 4
    numbers = 2 * one.length * 4
    sent = hops * (2 * rows + numbers) + (workers * rows if hops else 0)
    assert counters.of_engine("collective").bytes == sent


def test_permutes_are_issued_before_the_step_that_they_run_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First the products of dy_o_sum; then q, dy and row data go on before, dq after each block."""
    one = case("contiguous", workers=3)
    ahead = run_forward(one, draw(one))
    issued = order(monkeypatch, lambda: run_backward(one, draw(one), ahead.o, ahead.lse))
    assert issued == "M" + "PPPMP" + "PPPMR" + "MR"


@pytest.mark.parametrize("ids", ["rank", "position"])
@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_two_groups_side_by_side(layout: str, ids: str) -> None:
    one = case(layout, workers=2, groups=((0, 1), (2, 3)))
    check(one, launch={"ring_ids": ids, "lnc": 2})


def test_groups_go_by_the_order_of_their_lists() -> None:
    check(case("contiguous", workers=3, groups=((4, 0, 2), (1, 5, 3))))


@pytest.mark.parametrize("seed", range(3))
def test_no_interleaving_changes_a_bit(seed: int) -> None:
    one = case("packed", workers=3, heads=3)
    ahead, plain = both(one)
    other = run_backward(one, draw(one), ahead.o, ahead.lse, launch={"lnc": 2, "interleave": seed})
    assert same_bits(plain, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_precision_keeps_its_bounds_and_float32_its_bits(layout: str, dtype: str) -> None:
    one = case(layout, workers=3, heads=2, group=2, dtype=dtype)
    given = draw(one)
    ahead = run_forward(one, given)
    mixed = run_backward(one, given, ahead.o, ahead.lse)
    low = run_backward(one, given, ahead.o, ahead.lse, mixed_precision=False)
    assert not wrong(errors_of_backward(one, ahead, low, mixed_precision=False))
    if dtype == "float32":
        assert same_bits(mixed, low)
        return
    kept = [x.astype(DTYPES[dtype]).astype(np.float32) for x in (low.dk, low.dv)]
    assert (kept[0] == low.dk).all() and (kept[1] == low.dv).all()
    assert not same_bits(mixed, low)


@pytest.mark.parametrize("scale", [0.125, -0.3, 1.0, 2.0])
@pytest.mark.parametrize("layout", ["full", "contiguous"])
def test_the_scale_counts_under_a_causal_mask_too(layout: str, scale: float) -> None:
    """lse is made for this scale in float64, so that P are the weights of a softmax."""
    one = case(layout, workers=3)
    given = draw(one)
    bare = one.scale
    scaled = dataclasses.replace(
        given, q=(given.q.astype(np.float64) * scale / bare).astype(np.float64)
    )
    truth = forward(one, scaled)
    o, lse = truth.value["o"].astype(DTYPES[one.dtype]), truth.value["lse"].astype(np.float32)
    back = run_backward(one, given, o, lse, softmax_scale=scale)
    ahead = Forward(o, lse, back.outcome)
    assert not wrong(errors_of_backward(one, ahead, back, scale=scale))


@pytest.mark.parametrize("layout", ["full", "striped"])
def test_no_scale_or_zero_is_the_default_in_every_layout(layout: str) -> None:
    one = case(layout, workers=2)
    given = draw(one)
    ahead = run_forward(one, given)
    default = run_backward(one, given, ahead.o, ahead.lse, softmax_scale=0.125)
    for scale in (None, 0, 0.0):
        got = run_backward(one, given, ahead.o, ahead.lse, softmax_scale=scale)
        assert same_bits(default, got)


@pytest.mark.parametrize("layout", ["full", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_lse_of_minus_infinity_send_no_gradient(layout: str, dtype: str) -> None:
    one = case(layout, workers=3, dtype=dtype)
    given = draw(one)
    ahead = run_forward(one, given)
    lse = ahead.lse.copy()
    lse[:, :, :, ::3] = -np.inf
    silent = np.isneginf(lse)
    changed = Forward(ahead.o, lse, ahead.outcome)
    for mixed in (True, False):
        back = run_backward(one, given, ahead.o, lse, mixed_precision=mixed)
        assert not wrong(errors_of_backward(one, changed, back, mixed_precision=mixed))
        assert (back.dq[silent] == 0).all()


def test_bounds_travel_with_their_rows() -> None:
    """Each rank's bounds leave its rows one key, a different one on every rank."""
    one = case("packed", workers=4, dtype="float32")
    given = draw(one)
    low = np.zeros((4, 1, 128), np.int64)
    low += 7 * np.arange(4)[:, None, None]
    one_key = dataclasses.replace(given, bound_min=low, bound_max=low + 1)
    ahead = run_forward(one, one_key)
    back = run_backward(one, one_key, ahead.o, ahead.lse)
    for rank in range(4):
        seen = np.flatnonzero(np.abs(back.dv[rank, 0, 0]).max(axis=1))
        assert seen.tolist() == [0, 7, 14, 21]


def test_lse_in_a_narrow_dtype_is_used_as_given() -> None:
    one = case("contiguous", workers=2)
    given = draw(one)
    ahead = run_forward(one, given)
    narrow = ahead.lse.astype(DTYPES["bfloat16"])
    back = run_backward(one, given, ahead.o, narrow)
    assert not wrong(errors_of_backward(one, Forward(ahead.o, narrow, ahead.outcome), back))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_of_the_interface_gives_the_same(layout: str) -> None:
    one = case(layout, workers=3, heads=2, dtype="float32")
    given = draw(one)
    ahead = run_forward(one, given)
    model = nkilib.ring_attention_spmd_bwd(
        *(turned(x) for x in (given.q, given.k, given.v, ahead.o, given.dy)),
        tiles(ahead.lse),
        use_causal_mask=one.causal,
        softmax_scale=one.scale,
        num_workers=3,
        striped_attention=one.striped,
        bound_min=given.bound_min,
        bound_max=given.bound_max,
    )
    back = run_backward(one, given, ahead.o, ahead.lse)
    allowed = backward(one, given, ahead.o, ahead.lse).allowed
    for name, value in zip(NAMES, model, strict=True):
        assert worst(getattr(back, name), turned(value).astype(np.float64), allowed[name]) <= 1


REFUSED = {
    "lse of another shape": ({}, {"lse_ref": np.zeros((1, 1, 1, 128), np.float32)}, "lse_ref"),
    "another number of cores": ({}, {"lnc_size": 2}, "1 cores"),
    "striped without causal": ({"striped": True}, {}, "causal"),
    "o by rows": ({}, {"o_ref": "rows"}, "expected shape"),
    "mixed dtypes": ({}, {"o_ref": "float32"}, "as q has"),
    "bounds of another shape": (
        {"causal": True, "striped": True, "packed": True},
        {"bound_min": np.zeros((1, 127), np.float32)},
        "bound_min",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_kernel_refuses(what: str) -> None:
    sizes, options, message = REFUSED[what]
    one = Case(**{"workers": 2, **sizes})
    given = draw(one)
    o, lse = np.zeros(given.q.shape, given.q.dtype), np.zeros(given.q.shape[:-1], np.float32)
    other_o = {"rows": o[0], "float32": np.zeros((1, 1, 64, 128), np.float32)}
    if "o_ref" in options:
        options = {"o_ref": other_o[options["o_ref"]]}
    with pytest.raises(AssertionError, match=message):
        run_backward(one, given, o, lse, **options)
