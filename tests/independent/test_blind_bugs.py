"""Each bug of blind_bugs.py changes its problem far beyond noise, where it applies and nowhere else."""

import importlib.util

import pytest

pytestmark = pytest.mark.torch
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    import torch
    from independent import target
    from independent.blind_bugs import BLIND, FORMATS, blind_target
    from independent.noise import measured, noise, relative, seen
    from independent.problems import PROBLEMS, results, ring_of

    from ringspec.conformance.target.protocol import Call

NAMES = list(BLIND) if HAS_TORCH else ["any"]
SHOWN_BY = sorted({bug.shown_by for bug in BLIND.values()}) if HAS_TORCH else ["any"]
# Tensors that are wrong on ``shown_by`` with seed 0. Row 0 alone has a negative lse there; a row of one
# key has dp = delta, so that its ds is 0 whatever p is, and the floor at zero is seen in dv alone.
CHANGED = {
    "lazy_rescale_shrinks_l": "o lse dq dk dv",
    "exp2_fraction_truncated": "o lse dq dk dv",
    "skip_by_last_slot": "o lse dq dk dv",
    "first_order_log1p": "o lse dq dk dv",
    "last_worker_next_value_head": "o dq dk",
    "short_tile_reads_early_values": "o dq dk",
    "saved_lse_floored_at_zero": "dv",
    "dv_from_first_buffer": "dv",
    "own_dq_scaled_twice": "dq",
    "dz_quads_exchanged": "dk",
    "worker_zero_sends_early": "dk dv",
    "q_ring_keeps_forward_masks": "dq dk dv",
}
# Problems on which the condition of a bug never holds.
QUIET = [
    ("skip_by_last_slot", "striped"),
    ("skip_by_last_slot", "zigzag"),
    ("dv_from_first_buffer", "causal"),
    ("dv_from_first_buffer", "zigzag"),
    ("worker_zero_sends_early", "causal"),
    ("worker_zero_sends_early", "q-ring"),
    ("last_worker_next_value_head", "one-key-head"),
    ("q_ring_keeps_forward_masks", "causal"),
    ("q_ring_keeps_forward_masks", "striped"),
]


def test_there_are_twelve_of_which_six_are_in_the_forward():
    assert set(BLIND) == set(CHANGED) and len(BLIND) == 12
    assert sum("o" in changed.split() for changed in CHANGED.values()) == 6
    assert all(bug.what for bug in BLIND.values())


@pytest.mark.parametrize("name", SHOWN_BY)
def test_the_right_ring_is_truth_and_noise_on_their_problems(name):
    problem = PROBLEMS[name]
    assert problem.causal and problem.W >= 3 and 24 <= problem.S <= 64
    assert seen(name, torch.bfloat16) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_blind_bug_changes_its_tensors_far_beyond_noise_and_no_others(name):
    bug = BLIND[name]
    usual = noise(bug.shown_by, torch.bfloat16)
    found = measured(bug.shown_by, torch.bfloat16, 0, bug.parts)
    size = {key: relative(*pair) / usual[key] for key, pair in found.items()}
    changed = CHANGED[name].split()
    assert max(size[key] for key in changed) > 5.0, size
    assert {key for key, x in size.items() if not x <= 1.5} == set(changed), size


@pytest.mark.parametrize("name, problem", QUIET)
def test_a_blind_bug_is_silent_where_its_condition_does_not_hold(name, problem):
    assert seen(problem, torch.bfloat16, BLIND[name].parts) == []


def call_of(ring, seeds, layout):
    """The call of ringspec that asks for the same as a ring."""
    tensors = {"q": ring.q, "k": ring.k, "v": ring.v, "dy": seeds["dy"]}
    format = str(ring.narrow).removeprefix("torch.")
    tokens = [torch.stack(x).numpy() for x in (ring.token_q, ring.token_k)]
    places = [torch.stack(x).numpy() for x in (ring.position_q, ring.position_k)]
    return Call(
        "blind",
        "ring",
        ("forward", "backward"),
        ring.workers,
        {key: tuple(map(target.to_numpy, x)) for key, x in tensors.items()},
        {"scale": ring.scale, "causal": ring.causal},
        {"inputs": format, "outputs": format, "statistics": "float32"},
        layout,
        ring.circulation,
        ring.direction,
        *tokens,
        *places,
    )


@pytest.mark.parametrize("name", NAMES)
def test_its_target_gives_the_results_of_the_ring_with_the_bug(name):
    made, bug = blind_target(name), BLIND[name]
    assert made.capabilities.formats == FORMATS and made.capabilities.recipe == "bf16"
    assert name in made.name and made.notes == (bug.what,)
    for format in FORMATS:
        dtype = getattr(torch, format)
        layout = PROBLEMS[bug.shown_by].layout
        got = made.run(call_of(*ring_of(bug.shown_by, dtype), layout))
        want = results(*ring_of(bug.shown_by, dtype, bug.parts))
        for key in ("o", "lse", "dq", "dk", "dv"):
            for one, other in zip(getattr(got, key), want[key], strict=True):
                assert torch.equal(target.to_torch(one), other.contiguous()), key
