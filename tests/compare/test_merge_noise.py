"""The noise model predicts the errors of rings that merge as public implementations do."""

import numpy as np
import pytest
from compare.noise_problems import attention_of, draw, geometry_of, run_merged, truth

from ringspec.compare.noise.predict import predict
from ringspec.merges import MERGES, with_merges
from ringspec.merges.enclosures import ROUNDED
from ringspec.recipes import RECIPES

TENSORS = ("o", "lse", "dq", "dk", "dv")
NAMED = ("te_p2p", "ring_flash_attn", "tokamax", "vllm_dcp_ag_rs")
# Blocks are exact, so that merges and sums of gradients alone round.
EXACT = RECIPES["float64"].replace(
    name="exact blocks", inputs="bfloat16", outputs="bfloat16", gradients="bfloat16", lse="float32"
)


def compared(name, workers, seeds=(0,), predicted=None, **drawn):
    """The second moment of error / sd of each tensor, and the largest error in units of its bound, over some problems."""
    used = with_merges(EXACT, name)
    squares, worst = {}, 0.0
    for seed in seeds:
        case = draw(np.random.default_rng((seed, workers)), used, workers, **drawn)
        attention = attention_of(case)
        want, got = truth(attention), run_merged(case, used, case.options, ROUNDED)
        noise = predict(
            attention,
            used if predicted is None else with_merges(EXACT, predicted),
            geometry_of(case),
        )
        for tensor in TENSORS:
            if getattr(got, tensor) is None:
                continue
            error, sd = getattr(got, tensor) - want[tensor], noise.sd[tensor]
            assert (error[sd == 0] == 0).all(), tensor
            ratio = error[sd > 0] / sd[sd > 0]
            squares.setdefault(tensor, []).append(np.mean(ratio**2))
            bound = noise.bound[tensor]
            worst = max(worst, (np.abs(error) / np.where(bound > 0, bound, 1.0)).max())
    return {tensor: float(np.mean(found)) for tensor, found in squares.items()}, worst


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, w) for name in NAMED for w in (2, 8)), ("te_p2p", 16)]
)
def test_errors_of_a_merge_recipe_are_as_large_as_predicted(name, workers):
    """The limits of lse, which is float32, and of gradients, whose errors are shared, are wide for these few rows."""
    found, worst = compared(name, workers, range(8 // workers or 1), n=48, heads=(1, 1), width=32)
    assert 0.9 <= found["o"] <= 1.1, found
    for tensor in set(found) - {"o"}:
        assert 0.6 <= found[tensor] <= 1.6, found
    assert worst <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("name", NAMED)
def test_errors_of_many_rows_are_as_large_as_predicted(name, workers):
    """rms of error / predicted: 0.95 to 1.05 of o and dv, 0.9 to 1.15 of the others."""
    found, worst = compared(name, workers, range(6), n=64, heads=(2, 2), width=32)
    for tensor, square in found.items():
        low, high = (0.95, 1.05) if tensor in ("o", "dv") else (0.9, 1.15)
        assert low <= np.sqrt(square) <= high, found
    assert worst <= 1.0


@pytest.mark.parametrize("name", sorted(set(MERGES) - set(NAMED)))
def test_errors_of_every_merge_recipe_are_within_limits_and_bounds(name):
    found, worst = compared(name, 3, range(2), n=48, heads=(1, 1), width=16, layout="striped")
    assert 0.85 <= found["o"] <= 1.15, found
    # The lse of flashinfer_merge is rounded in base 2, which is not predicted.
    assert all(0.5 <= found[tensor] <= 1.8 for tensor in found), found
    assert worst <= 1.0


def test_only_a_merge_that_rounds_o_at_every_step_is_predicted_to_lose_more_with_more_workers():
    case = draw(np.random.default_rng(5), EXACT, 8, n=32, width=16, features=())
    attention = attention_of(case)
    sizes = {}
    for workers in (2, 8):
        case.workers = workers
        for name in ("te_p2p", "ring_flash_attn"):
            noise = predict(attention, with_merges(EXACT, name), geometry_of(case))
            sizes[name, workers] = np.sqrt(np.mean(noise.sd["o"] ** 2))
    assert sizes["te_p2p", 8] > 1.4 * sizes["te_p2p", 2]
    assert sizes["ring_flash_attn", 8] < 1.1 * sizes["ring_flash_attn", 2]


@pytest.mark.parametrize(
    ("real", "predicted", "tensor"),
    [
        ("te_p2p", "ring_flash_attn", "o"),
        ("te_p2p", "torch_cp", "dv"),
        ("te_p2p_2_20", "te_p2p", "o"),
        ("vllm_dcp_ag_rs", "vllm_dcp_a2a", "o"),
        ("te_thd", "te_p2p", "o"),
    ],
)
def test_a_merge_recipe_that_rounds_less_than_the_ring_is_contradicted(real, predicted, tensor):
    options = {"n": 32, "heads": (1, 1), "width": 32, "features": ()}
    right, _ = compared(real, 8, (1,), **options)
    wrong, _ = compared(real, 8, (1,), predicted, **options)
    assert 0.85 <= right[tensor] <= 1.15 and wrong[tensor] >= 1.25


def test_the_order_of_the_merge_recipe_decides_not_that_of_the_geometry():
    case = draw(np.random.default_rng(2), EXACT, 4, n=32, width=16, features=())
    attention, geometry = attention_of(case), geometry_of(case)
    turned = type(geometry)(**(vars(geometry) | {"order": geometry.order[:, ::-1]}))
    one, two = (
        predict(attention, with_merges(EXACT, "te_p2p"), g).sd["o"] for g in (geometry, turned)
    )
    assert (one == two).all()
    rank_order = predict(attention, with_merges(EXACT, "vllm_dcp_ag_rs"), geometry).sd["o"]
    thd = predict(attention, with_merges(EXACT, "te_thd"), geometry).sd["o"]
    assert np.median(np.abs(rank_order / thd - 1)) > 0.01
