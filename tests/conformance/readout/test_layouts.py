"""Faults of sinks, a bias and dropout in a zigzag or striped ring, planted in a ring that shares no code with the readouts."""

import numpy as np
import pytest
from conformance.readout.feature_ring import columns, right_bias, right_drop, with_layout
from conformance.readout.told_features import named, told_of

from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.problem.chosen import settings_for
from ringspec.conformance.targets.reference import REFERENCES


def no_sinks(x, worker, **state):
    return x if worker == 0 else np.full_like(x, -np.inf)


def own_columns(bias, r, step, n, **state):
    return columns(bias[r], r, n)


def scaled(bias, r, step, n, scale, **state):
    return scale * right_bias(bias, r, step, n)


def not_divided(masks, r, step, n, use, phase, p, seed):
    right = right_drop(masks, r, step, n, use, phase, p, seed)
    return right if use in ("l", "p") else right * np.float32(1 - p)


def mask_of_next_step(masks, r, step, n, use, **state):
    return right_drop(masks, r, step + 1, n, use, **state) if use in ("o", "dv", "dp") else 1


FAULTS = {
    "sinks": ({"of_o": no_sinks, "of_lse": no_sinks}, "on all workers but 0, the sinks are left out"),
    "bias-columns": ({"bias": own_columns}, "the columns of the bias are those of the worker that computes"),
    "bias-scaled": ({"bias": scaled}, "the bias is multiplied by the scale"),
    "dropout-factor": ({"drop": not_divided}, "kept weights are not divided by 1 - dropout_p"),
    "dropout-columns": ({"drop": mask_of_next_step}, "the columns of the dropout mask are those of the next step's visitor"),
}  # fmt: skip
FEW = {("zigzag", "bias-columns"), ("striped", "sinks"), ("zigzag", "dropout-factor")}
BOTH = [
    (layout, name) if (layout, name) in FEW else pytest.param(layout, name, marks=pytest.mark.slow)
    for layout in ("zigzag", "striped")
    for name in FAULTS
]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_ring_with_features_in_another_layout_is_right(layout):
    found = explain_target(with_layout(layout))
    ids = [one.problem.id for one in found.runs]
    assert found.right
    assert [f"readout/{x}-{layout}" for x in ("sinks", "bias", "dropout")] == ids[-3:]


@pytest.mark.parametrize(("layout", "name"), BOTH)
def test_a_fault_of_a_feature_in_another_layout_is_named(layout, name):
    faults, words = FAULTS[name]
    found = told_of(with_layout(layout, **faults), name.split("-")[0], layout)
    assert found.explained
    assert words in [named(x) for x in found.forward.sets[0]]


def test_a_target_with_several_layouts_is_read_in_two_of_them():
    settings, _ = settings_for(REFERENCES["float32"].capabilities)
    layouts = [one.layout for one in settings if one.mask == "sinks"]
    assert layouts == ["contiguous", "zigzag"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("feature", ["sinks", "bias", "dropout"])
@pytest.mark.parametrize("recipe", ["float32", "bf16", "fp16", "nki_low"])
def test_the_reference_with_a_feature_in_another_layout_is_right(layout, feature, recipe):
    assert told_of(REFERENCES[recipe], feature, layout).right
