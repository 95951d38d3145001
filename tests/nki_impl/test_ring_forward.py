"""The forward ring kernel against attention over all ranks in float64, every rank compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nki_impl.kernels import ring_attention_spmd_fwd
from nki_impl.lang import nl
from nki_impl.sim.machine.launch import run_ranks
from ringspec.interfaces import nkilib

from .reference import DTYPES, Case, Inputs, draw, forward, worst
from .running import errors_of_forward, order, rows, run_forward, turned, wrong

# The kernels leave no order of two cores to the compiler.
pytestmark = pytest.mark.filterwarnings("error::nki_impl.sim.errors.RaceWarning")

LAYOUTS = {
    "full": {},
    "contiguous": {"causal": True},
    "striped": {"causal": True, "striped": True},
    "packed": {"causal": True, "striped": True, "packed": True},
}


def case(layout: str = "full", **sizes: Any) -> Case:
    return Case(**LAYOUTS[layout], **sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_o_and_lse_of_every_rank(layout: str, workers: int) -> None:
    one = case(layout, workers=workers, length=256, batch=2, seed=workers)
    assert not wrong(errors_of_forward(one, run_forward(one, draw(one))))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_head_dimensions(layout: str, width: int, dtype: str) -> None:
    one = case(layout, workers=3, width=width, dtype=dtype)
    run = run_forward(one, draw(one))
    assert run.o.dtype == DTYPES[dtype]
    assert run.lse.dtype == np.float32
    assert not wrong(errors_of_forward(one, run))


@pytest.mark.parametrize("length", [128, 384, 640])
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_two_cores_give_the_bits_of_one(length: int, heads: int) -> None:
    one = case("packed", workers=2, length=length, heads=heads)
    given = draw(one)
    single = run_forward(one, given)
    double = run_forward(one, given, launch={"lnc": 2, "interleave": heads})
    assert not wrong(errors_of_forward(one, single))
    assert (single.o == double.o).all()
    assert (single.lse == double.lse).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 5, 127, 130, 300])
def test_any_length_on_a_rank(layout: str, length: int) -> None:
    if layout == "packed" and length < 5:
        pytest.skip("no three documents")
    one = case(layout, workers=3, length=length, seed=length)
    run = run_forward(one, draw(one))
    assert run.lse.shape[-1] == length
    assert not wrong(errors_of_forward(one, run))


def test_the_lse_of_padding_is_zero_and_its_tiles_are_whole() -> None:
    one = case("striped", workers=2, length=130)
    given = draw(one)
    result = run_forward(one, given).outcome.results[0][1]
    assert result.shape == (1, 1, 128, 2)
    assert (result[0, 0, 2:, 1] == 0).all() and (result[0, 0, :2, 1] != 0).all()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("length", [60, 130, 300])
def test_two_cores_give_the_bits_of_one_for_any_length(length: int, heads: int) -> None:
    one = case("packed", workers=2, length=length, heads=heads)
    given = draw(one)
    single = run_forward(one, given)
    double = run_forward(one, given, launch={"lnc": 2, "interleave": heads})
    assert (single.o == double.o).all()
    assert (single.lse == double.lse).all()


@pytest.mark.parametrize("tp_q", [False, True])
@pytest.mark.parametrize("tp_k", [False, True])
def test_rows_or_columns_first_give_the_same_bits(tp_q: bool, tp_k: bool) -> None:
    one = case(workers=2, length=330)
    given = draw(one)
    plain = run_forward(one, given)
    turned_run = run_forward(one, given, tp_q=tp_q, tp_k=tp_k)
    assert not wrong(errors_of_forward(one, turned_run))
    assert (plain.o == turned_run.o).all() and (plain.lse == turned_run.lse).all()


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_without_keys_give_zero_and_minus_infinity(workers: int) -> None:
    one = case("packed", workers=workers, length=256)
    given = draw(one)
    run, truth = run_forward(one, given), forward(one, given)
    empty = np.isneginf(truth.value["lse"])
    assert empty.sum() >= 5 * workers
    assert (np.isneginf(run.lse) == empty).all()
    assert (run.o[empty] == 0).all()


def test_all_rows_without_keys() -> None:
    one = case("packed", workers=2)
    given = draw(one)
    nothing = dataclasses.replace(given, bound_max=given.bound_min)
    run = run_forward(one, nothing)
    assert np.isneginf(run.lse).all() and (run.o == 0).all()


def test_a_length_beyond_what_is_on_chip_at_a_time() -> None:
    one = case("contiguous", workers=1, length=2304, dtype="float32")
    run = run_forward(one, draw(one))
    assert not wrong(errors_of_forward(one, run))
    assert run.outcome.sbuf_high < 64 * 1024


@pytest.mark.parametrize("layout", ["full", "packed"])
def test_key_heads_that_are_shared_give_the_bits_of_repeated_ones(layout: str) -> None:
    one = case(layout, workers=2, heads=4, group=2, batch=2)
    given = draw(one)
    repeated = dataclasses.replace(
        given, k=np.repeat(given.k, 2, axis=2), v=np.repeat(given.v, 2, axis=2)
    )
    shared = run_forward(one, given)
    copies = run_forward(dataclasses.replace(one, group=1), repeated)
    assert not wrong(errors_of_forward(one, shared))
    assert (shared.o == copies.o).all() and (shared.lse == copies.lse).all()
    sent = [run.outcome.total.of_engine("collective").bytes for run in (shared, copies)]
    assert 2 * sent[0] == sent[1] > 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_keys_and_values_hop_one_time_less_than_there_are_ranks(workers: int) -> None:
    one = case("striped", workers=workers)
    total = run_forward(one, draw(one)).outcome.ranks[0]
    assert total.hops == 2 * (workers - 1)
    assert total.of_engine("collective").bytes == 2 * (workers - 1) * one.length * one.width * 2


def test_permutes_are_issued_before_the_step_that_they_run_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = case("contiguous", workers=3)
    assert order(monkeypatch, lambda: run_forward(one, draw(one))) == "PPMPPM"


@pytest.mark.parametrize("ids", ["rank", "position"])
@pytest.mark.parametrize("layout", ["contiguous", "packed"])
def test_two_groups_side_by_side(layout: str, ids: str) -> None:
    one = case(layout, workers=2, groups=((0, 1), (2, 3)))
    run = run_forward(one, draw(one), launch={"ring_ids": ids, "lnc": 2})
    assert not wrong(errors_of_forward(one, run))


def test_groups_go_by_the_order_of_their_lists() -> None:
    one = case("contiguous", workers=3, groups=((4, 0, 2), (1, 5, 3)))
    assert not wrong(errors_of_forward(one, run_forward(one, draw(one))))


@pytest.mark.parametrize("seed", range(3))
def test_no_interleaving_changes_a_bit(seed: int) -> None:
    one = case("packed", workers=3, heads=3)
    given = draw(one)
    plain = run_forward(one, given)
    other = run_forward(one, given, launch={"lnc": 2, "interleave": seed})
    assert (plain.o == other.o).all() and (plain.lse == other.lse).all()


@pytest.mark.parametrize("layout", ["full", "striped"])
def test_the_error_does_not_grow_with_the_number_of_ranks(layout: str) -> None:
    """The same 1024 tokens on 1 and on 8 ranks, in units of what is allowed: rms within 5 %."""
    whole = case(layout, workers=1, length=1024)
    given = draw(whole)
    rms = []
    for workers in (1, 8):
        one = case(layout, workers=workers, length=1024 // workers)
        parts = deal(given, one)
        truth = forward(one, parts)
        error = run_forward(one, parts).o.astype(np.float64) - truth.value["o"]
        rms.append(np.sqrt(np.mean((error / truth.allowed["o"]) ** 2)))
    assert rms[1] < 1.05 * rms[0]


def deal(given: Inputs, one: Case) -> Inputs:
    """The rows of one rank dealt to several."""

    def part(x: Any) -> Any:
        cut = [x[0][:, :, r :: one.workers] for r in range(one.workers)]
        return np.stack(cut if one.striped else np.split(x[0], one.workers, axis=2))

    return Inputs(*(part(x) for x in (given.q, given.k, given.v, given.dy)), None, None)


@pytest.mark.parametrize("lse_dtype", [nl.bfloat16, nl.float16])
def test_lse_is_rounded_once_to_its_dtype(lse_dtype: Any) -> None:
    one = case("packed", workers=2, length=256)
    given = draw(one)
    wide, narrow = run_forward(one, given), run_forward(one, given, lse_dtype=lse_dtype)
    kind = ml_dtypes.bfloat16 if lse_dtype == nl.bfloat16 else np.float16
    assert narrow.lse.dtype == kind
    assert (narrow.lse == wide.lse.astype(kind)).all()


def test_without_training_o_alone_comes_back() -> None:
    one = case("striped", workers=2)
    given = draw(one)
    arguments = [
        {
            "q": turned(given.q[r]),
            "k": turned(given.k[r]),
            "v": given.v[r],
            "num_workers": 2,
            "use_causal_mask": True,
            "striped_input": True,
        }
        for r in range(2)
    ]
    got = run_ranks(ring_attention_spmd_fwd, arguments).results
    assert (np.stack(got) == run_forward(one, given).o).all()


def test_a_scale_of_zero_or_none_is_the_default_and_any_other_counts() -> None:
    one = case(workers=2)
    given = draw(one)
    default = run_forward(one, given)
    for scale in (None, 0, 0.0, 0.125):
        assert (run_forward(one, given, softmax_scale=scale).o == default.o).all()
    negated = dataclasses.replace(given, q=-given.q)
    assert (run_forward(one, negated, softmax_scale=-0.125).o == default.o).all()
    assert not wrong(errors_of_forward(one, default))


def test_scores_of_any_size_overflow_nothing(recwarn: pytest.WarningsRecorder) -> None:
    one = case("contiguous", workers=3, dtype="float32")
    given = draw(one)
    huge = dataclasses.replace(given, q=given.q * np.float32(1e30))
    run = run_forward(one, huge)
    assert np.isfinite(run.o.astype(np.float64)).all() and np.isfinite(run.lse).all()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("dtype", [np.int32, ml_dtypes.bfloat16])
def test_bounds_come_in_any_dtype_that_holds_them(dtype: Any) -> None:
    one = case("packed", workers=2)
    given = draw(one)
    plain = run_forward(one, given)
    arguments = [
        {
            "q": turned(given.q[r]),
            "k": turned(given.k[r]),
            "v": given.v[r],
            "num_workers": 2,
            "use_causal_mask": True,
            "striped_input": True,
            "bound_min": given.bound_min[r].astype(dtype),
            "bound_max": given.bound_max[r].astype(dtype),
        }
        for r in range(2)
    ]
    got = run_ranks(ring_attention_spmd_fwd, arguments).results
    assert (np.stack(got) == plain.o).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_model_of_the_interface_gives_the_same(layout: str) -> None:
    one = case(layout, workers=3, heads=2, dtype="float32")
    given = draw(one)
    o, lse = nkilib.ring_attention_spmd_fwd(
        turned(given.q),
        turned(given.k),
        given.v,
        num_workers=3,
        use_causal_mask=one.causal,
        striped_input=one.striped,
        training=True,
        bound_min=given.bound_min,
        bound_max=given.bound_max,
    )
    run, allowed = run_forward(one, given), forward(one, given).allowed
    assert worst(run.o, o.astype(np.float64), allowed["o"]) <= 1
    assert worst(run.lse, rows(lse).astype(np.float64), allowed["lse"]) <= 1


REFUSED = {
    "a head dimension above 128": ({"width": 144}, {}, "d <= 128"),
    "striped without causal": ({"striped": True}, {}, "causal"),
    "a scale under a causal mask": ({"causal": True}, {"softmax_scale": 0.5}, "multiply q"),
    "two heads": ({"heads": 3}, {}, "do not divide"),
    "columns for k": ({}, {"tp_k": True}, "expected shape"),
    "one bound": ({"causal": True, "striped": True}, {}, "together"),
    "bounds without striped": (
        {"causal": True, "packed": True},
        {},
        "need a causal mask and striped",
    ),
    "float16 for v": ({}, {}, "as q has"),
    "a group of another size": ({}, {"replica_groups": ((0,),)}, "2 ranks"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_kernel_refuses(what: str) -> None:
    sizes, options, message = REFUSED[what]
    one = Case(**{"workers": 2, **sizes})
    given = draw(one)
    instead = {
        "columns for k": {"k": turned(given.k[0])},
        "float16 for v": {"v": given.v[0].astype(np.float16)},
        "two heads": {"k": turned(given.k[0, :, :2]), "v": given.v[0, :, :2]},
        "one bound": {"bound_max": np.full((1, one.length), one.length, np.float32)},
    }
    options = {**options, **instead.get(what, {})}
    with pytest.raises(AssertionError, match=message):
        run_forward(one, given, **options)
