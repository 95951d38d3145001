"""The two levels of bit-tolerance: what they let pass, and what they see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringspec.formats import load, product, round_to, row_sum
from ringspec.recipes import RECIPES
from ringspec.rings.layouts import unshard
from ringspec.spec.block import block_forward
from ringspec.spec.dense_forward import scores
from ringspec.spec.online_softmax import SoftmaxState, finite_shift, start

from . import tolerance
from .prediction import (
    GRADIENTS,
    backward,
    forward,
    of_backward,
    predicted,
    recipe_for,
    results,
    rings_of,
)
from .reference import Case, draw
from .running import run_forward
from .tolerance import (
    Measured,
    broken,
    broken_any_order,
    broken_same_order,
    compared,
    measure,
    ulp,
)

EIGHT = Case(workers=8, length=128)
SMALL = Case(workers=3, length=128, causal=True, seed=1)
NARROW = ["bfloat16", "float16"]
DTYPES = [*NARROW, "float32"]


def against_recipe(
    case: Case, noise: bool, later: Any = None, block: Any = block_forward, **changes: Any
) -> list[Measured]:
    """A ring whose recipe differs by ``changes``, and by ``later`` in the backward, as the kernel."""
    recipe = recipe_for(case.dtype)
    (ring,) = rings_of(case, draw(case))
    other = recipe.replace(**changes)
    ahead = forward(ring, other, block)
    got = {name: np.stack([getattr(one, name) for one in ahead]) for name in ("o", "lse")}
    back = backward(ring, of_backward(other).replace(**(later or {})), got["o"], got["lse"])
    want = predicted(ring, recipe, got["o"], got["lse"])
    got |= {name: np.stack([getattr(one, name) for one in back]) for name in GRADIENTS}
    return compared(ring, recipe, got, want, noise)


def tensors(sentences: list[str]) -> set[str]:
    return {sentence.split()[0] for sentence in sentences}


def truncated(q: Any, k: Any, v: Any, block: Any) -> Any:
    """A block whose P is cut to bfloat16 instead of rounded."""
    s, _ = scores(q, k, block)
    m = s.max(axis=3)
    e = round_to(np.exp(s - finite_shift(m)[..., None]), "float32")
    p = (e.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    return SoftmaxState(m, row_sum(e, "float32"), product(p.astype(np.float64), v, "float32"))


def dropped(q: Any, k: Any, v: Any, block: Any) -> Any:
    """A block that misses the keys of the last worker at the first one: a hop that did not come."""
    if block.rows.index[0] == 0 and block.columns.index[-1] == EIGHT.workers * EIGHT.length - 1:
        return start(*q.shape[:3], v.shape[3])
    return block_forward(q, k, v, block)


def test_the_recipes_of_the_kernels_are_the_named_ones():
    for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")):
        named = RECIPES[f"nki_impl_{name}"]
        assert recipe_for(dtype).replace(name=named.name) == named


def test_without_mixed_precision_four_points_are_of_the_input_type():
    mixed, low = recipe_for("float16").as_dict(), recipe_for("float16", False).as_dict()
    different = {name for name in mixed if mixed[name] != low[name]}
    assert different == {"dy_o_products", "backward_lse", "delta", "carried_dkv"}
    assert {low[name] for name in different} == {"float16"}


def test_an_ulp_is_the_spacing_in_the_binade_of_the_value():
    at = np.array([1.0, 1.99, 2.0, 0.0, 2.0**-30])
    assert ulp("bfloat16", at).tolist() == [2.0**-7, 2.0**-7, 2.0**-6, 0.0, 2.0**-37]
    assert ulp("float16", at)[-1] == 2.0**-24
    assert np.spacing(np.float32(1.5)) == ulp("float32", np.array([1.5]))[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_breaks_both_levels(bad: float) -> None:
    want = np.ones((1, 1, 128, 4))
    got = want.copy()
    got[0, 0, 5, 2] = bad
    rows = np.ones((1, 1, 128))
    one = measure("dq", 0, got, want, ("bfloat16", "float32"), rows, rows, want)
    assert broken([one], broken_same_order) and broken([one], broken_any_order)


def test_a_row_of_no_summands_must_be_exact() -> None:
    want, rows = np.zeros((1, 1, 128, 4)), np.zeros((1, 1, 128))
    formats = ("bfloat16", "float32")
    assert not broken([measure("dv", 0, want, want, formats, rows, rows, want)], broken_any_order)
    almost = want + 1e-30
    assert broken([measure("dv", 0, almost, want, formats, rows, rows, want)], broken_any_order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_any_order_holds_between_two_tile_sizes(dtype: str, causal: bool) -> None:
    case = Case(workers=8, length=128, dtype=dtype, causal=causal)
    found = against_recipe(case, False, {"tile_k": None}, tile_q=64)
    different = {one.tensor for one in found if one.equal < 1}
    assert different >= {"dk", "dv"}
    assert broken(found, broken_any_order) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_order_holds_between_float32_and_exact_sums(dtype: str) -> None:
    found = against_recipe(Case(workers=8, length=128, dtype=dtype), False, products="float64")
    assert {one.tensor for one in found if one.equal < 1} == {"o", "lse", *GRADIENTS}
    assert broken(found, broken_any_order) == []


@pytest.mark.parametrize("dtype", NARROW)
def test_a_row_maximum_over_other_keys_keeps_the_bound_and_not_the_bits(dtype: str) -> None:
    found = against_recipe(Case(workers=8, length=128, dtype=dtype), False, tile_k=64)
    assert all(one.beyond <= 1 for one in found)
    assert all(0.7 < one.equal < 0.9 for one in found if one.tensor == "o")


def test_any_order_sees_a_bfloat16_merge_of_eight_workers() -> None:
    found = against_recipe(EIGHT, False, merge="bfloat16", carried_o="bfloat16")
    assert tensors(broken(found, broken_any_order)) == {"o"}
    assert all(one.equal < 0.5 for one in found if one.tensor == "o")


def test_any_order_sees_a_p_that_is_truncated() -> None:
    found = against_recipe(EIGHT, False, block=truncated)
    wrong = broken(found, broken_any_order)
    assert tensors(wrong) == {"o"}
    assert sum("bit-equal" in sentence for sentence in wrong) == EIGHT.workers


def test_any_order_sees_a_hop_that_is_dropped_on_its_rank_alone() -> None:
    found = against_recipe(EIGHT, False, block=dropped)
    assert {sentence.split(":")[0] for sentence in broken(found, broken_any_order)} == {
        "o of rank 0",
        "lse of rank 0",
    }


SEEN = {
    "P stays in float32": ({"p": "float32"}, {"o", "dv"}),
    "dS stays in float32": ({"ds": "float32"}, {"dq", "dk"}),
    "a block's o is rounded": ({"block_o": "bfloat16"}, {"o"}),
    "the merge is in bfloat16": ({"merge": "bfloat16"}, {"o"}),
    "dk and dv are carried in bfloat16": ({"carried_dkv": "bfloat16"}, {"dk", "dv"}),
    "dq is carried in bfloat16": ({"carried_dq": "bfloat16"}, {"dq"}),
    "dy_o_sum is rounded": ({"delta": "bfloat16"}, {"dq", "dk"}),
    "the backward reads lse in bfloat16": ({"backward_lse": "bfloat16"}, set(GRADIENTS)),
    # Not dv: it reads P, which is of bfloat16 in either case.
    "statistics are in bfloat16": ({"statistics": "bfloat16"}, {"o", "lse", "dq", "dk"}),
}


@pytest.mark.parametrize("what", SEEN)
def test_the_same_order_sees_a_rounding_that_is_not_the_recipes(what: str) -> None:
    changes, expected = SEEN[what]
    assert tensors(broken(against_recipe(SMALL, True, **changes), broken_same_order)) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_recipe_itself_is_within_both_levels(dtype: str) -> None:
    found = against_recipe(Case(workers=2, length=128, dtype=dtype), True)
    assert all(one.equal == 1 for one in found)
    assert broken(found, broken_same_order) + broken(found, broken_any_order) == []


def test_both_yardsticks_of_noise_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def rms(tokens: int) -> dict[str, list[float]]:
        monkeypatch.setattr(tolerance, "PREDICTED", tokens)
        found = against_recipe(SMALL, True, p="float32", ds="float32")
        return {n: [one.rms for one in found if one.tensor == n and one.rms] for n in GRADIENTS}

    model, stand_in = rms(SMALL.workers * SMALL.length), rms(0)
    for name in GRADIENTS:
        ratio = np.array(stand_in[name]) / np.array(model[name])
        assert ratio.size == SMALL.workers
        assert ratio.min() > 0.7 and ratio.max() < 1.4


def test_the_error_of_o_grows_with_a_bfloat16_merge_and_not_with_these_kernels() -> None:
    def errors(workers: int) -> list[float]:
        case = Case(workers, heads=2, length=1024 // workers)
        given = draw(case)
        (ring,) = rings_of(case, given)
        truth, low = (
            results(ring.layout, forward(ring, RECIPES[name]))["o"] for name in ("float64", "nki")
        )
        o = unshard([load(x) for x in run_forward(case, given).o], ring.layout)
        least = np.sqrt(((round_to(truth, "bfloat16") - truth) ** 2).mean())
        return [float(np.sqrt(((x - truth) ** 2).mean()) / least) for x in (o, low)]

    alone, eight = errors(1), errors(8)
    assert eight[0] < 1.02 * alone[0]
    assert eight[1] > 1.5 * alone[1]
    assert eight[1] > 2 * eight[0]
