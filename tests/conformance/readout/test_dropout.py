"""Faults of dropout, planted in a ring that shares no code with the model of the readouts, are told in sentences."""

import dataclasses

import numpy as np
import pytest
from conformance.readout.feature_ring import Target, columns, right_drop
from conformance.readout.told_features import marked, named, told_of

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.settings import Setting
from ringspec.conformance.targets.reference import REFERENCES


def block_of(row, column):
    """Dropout with the block of the mask at (row, column), functions of the worker and the step."""

    def drop(masks, r, step, n, use, **s):
        if use in ("l", "p"):
            return 1
        found = columns(masks[row(r, step) % 3], column(r, step) % 3, n)
        return found / np.float32(1 - s["p"])

    return drop


def changed(change):
    def drop(masks, r, step, n, use, **s):
        x = right_drop(masks, r, step, n, use, **s)
        return x if use in ("l", "p") else change(x, p=np.float32(s["p"]), r=r, step=step)

    return drop


def only(wrong, *uses, phases=("forward", "backward")):
    """``wrong``, a factor or a function, for these uses in these passes."""

    def drop(masks, r, step, n, use, phase, **s):
        if use not in uses or phase not in phases:
            return right_drop(masks, r, step, n, use, phase=phase, **s)
        return wrong(masks, r, step, n, use=use, phase=phase, **s) if callable(wrong) else wrong

    return drop


def kept(masks, r, step, n, **s):
    return columns(masks[r], r - step, n)


def kept_and_divided(masks, r, step, n, p, **s):
    return columns(masks[r], r - step, n) / np.float32(1 - p)


def transposed(masks, r, step, n, use, p, **s):
    if use in ("l", "p"):
        return 1
    return columns(masks[r - step], r, n).swapaxes(1, 2) / np.float32(1 - p)


LOCAL = "the dropout mask is taken at the {} slot within the worker, not at the global position"
FORWARD = {
    "local-keys": (block_of(lambda r, t: r, lambda r, t: 0), LOCAL.format("key")),
    "local-queries": (block_of(lambda r, t: 0, lambda r, t: r - t), LOCAL.format("query")),
    "local": (block_of(lambda r, t: 0, lambda r, t: 0), LOCAL.format("query and key")),
    "own-columns": (block_of(lambda r, t: r, lambda r, t: r), "the columns of the dropout mask are those of the worker that computes"),
    "next-columns": (block_of(lambda r, t: r, lambda r, t: r - t - 1), "the columns of the dropout mask are those of the next step's visitor"),
    "visitor-rows": (block_of(lambda r, t: r - t, lambda r, t: r - t), "the rows of the dropout mask are those of the visitor"),
    "head-0": (changed(lambda x, **s: x[:1]), "the rows of the dropout mask are those of head 0"),
    "next-head": (changed(lambda x, **s: np.roll(x, -1, axis=0)), "the rows of the dropout mask are those of the next head"),
    "inverted": (changed(lambda x, p, **s: 1 / (1 - p) - x), "the dropout mask is inverted"),
    "transposed": (transposed, "the dropout mask is transposed"),
    "missing": (changed(lambda x, **s: np.ones_like(x)), "dropout is left out"),
    "not-divided": (changed(lambda x, p, **s: x * (1 - p)), "kept weights are not divided by 1 - dropout_p"),
    "divided-twice": (changed(lambda x, p, **s: x / (1 - p)), "kept weights are divided by 1 - dropout_p twice"),
    "in-row-sums": (only(kept, "l"), "the row sums are those of the kept weights"),
    "in-row-sums-divided": (only(kept_and_divided, "l"), "the row sums are those of the kept weights, divided by 1 - dropout_p"),
    "masked-before-softmax": (only(kept, "l", "o"), "the row sums are those of the kept weights, and o is not divided by 1 - dropout_p"),
    "missing-after-step-0": (changed(lambda x, step, **s: x if step == 0 else np.ones_like(x)), "from step 1 on, dropout is left out"),
}  # fmt: skip
BACKWARD = {
    "missing": ({"drop": only(1, "dp", "dv")}, "dropout is left out"),
    "missing-in-dp": ({"drop": only(1, "dp")}, "dp lacks dropout"),
    "missing-in-dv": ({"drop": only(1, "dv")}, "the product for dv lacks dropout"),
    "in-p-too": ({"drop": only(kept_and_divided, "p")}, "dS is p (dp - delta) with dropout in p as well as in dp"),
    "in-p-alone": ({"drop": lambda *a, use, **s: right_drop(*a, use={"p": "dp", "dp": "p"}.get(use, use), **s)}, "dS is p (dp - delta) with dropout in p, not in dp"),
    "next-seed": ({"seed": lambda seed: seed + 1}, "the dropout mask is that of the seed + 1"),
    "local-keys": (
        {"drop": only(block_of(lambda r, t: r, lambda r, t: 0), "dp", "dv")}, LOCAL.format("key"),
    ),
    "not-divided": ({"drop": only(kept, "dp", "dv")}, "kept weights are not divided by 1 - dropout_p"),
    "inverted": ({"drop": only(changed(lambda x, p, **s: 1 / (1 - p) - x), "dp", "dv")}, "the dropout mask is inverted"),
}  # fmt: skip
FEW = ("local", "not-divided", "in-row-sums-divided", "missing-in-dp")


def test_a_ring_with_dropout_is_right():
    found = explain_target(Target())
    assert found.right and "readout/dropout-contiguous" in [one.problem.id for one in found.runs]


def with_given_masks(target):
    """The target with the claim 'keep' in place of 'dropout'."""
    features = tuple(x for x in target.capabilities.features if x != "dropout")
    target.capabilities = dataclasses.replace(target.capabilities, features=(*features, "keep"))
    return target


def test_a_target_that_takes_masks_gets_the_mask_and_is_read():
    target = with_given_masks(Target())
    problem = problem_for(Setting("dropout", "contiguous", ""), target.capabilities)
    assert "keep" in problem.call.tensors and "dropout_seed" not in problem.call.terms
    assert told_of(target, "dropout").right
    wrong = with_given_masks(Target(drop=FORWARD["own-columns"][0]))
    found = told_of(wrong, "dropout")
    assert found.explained and FORWARD["own-columns"][1] in map(named, found.forward.sets[0])


@pytest.mark.parametrize("name", marked(FORWARD, FEW))
def test_a_fault_of_dropout_in_the_forward_pass_is_named(name):
    drop, words = FORWARD[name]
    found = told_of(Target(drop=drop), "dropout")
    assert found.explained and words in map(named, found.forward.sets[0])


@pytest.mark.parametrize("name", marked(BACKWARD, FEW))
def test_a_fault_of_dropout_in_the_backward_pass_is_named(name):
    faults, words = BACKWARD[name]
    found = told_of(Target(**faults), "dropout")
    assert found.explained and not found.forward.sets
    assert [words] == [named(x) for x in found.backward.sets[0]]


@pytest.mark.parametrize("share", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_a_backward_with_an_unknown_seed_is_not_explained(share):
    found = told_of(Target(seed=lambda seed: seed + 77), "dropout", share=share)
    assert not found.right and not found.explained


@pytest.mark.parametrize("recipe", ["float32", "bf16", "fp16", "nki_low"])
def test_the_reference_with_dropout_is_right(recipe):
    assert told_of(REFERENCES[recipe], "dropout").right


SENTENCES = {
    "dropout-mask-not-replayed": "In the backward pass, the dropout mask is that of the seed + 1.",
    "dropout-missing-in-backward": "In the backward pass, dropout is left out.",
    "dropout-missing-in-dp": "In the backward pass, dp lacks dropout.",
    "dropped-p-in-ds": "In the backward pass, dS is p (dp - delta) with dropout in p, not in dp.",
    "dropout-before-denominator": "In the forward pass, the row sums are those of the kept weights, divided by 1 - dropout_p.",
    "dropout-not-rescaled": "In the forward pass, kept weights are not divided by 1 - dropout_p.",
    "dropout-local-counters": f"In the forward pass, {LOCAL.format('query and key')}.",
    "dropout-of-first-head": "In the forward pass, the rows of the dropout mask are those of head 0.",
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SENTENCES)
def test_a_known_bug_of_dropout_is_explained(bug):
    found = told_of(MutantTarget(MUTANTS[bug], "float32"), "dropout")
    told = [x.sentence() for part in found.passes for x in (part.sets or [()])[0]]
    assert found.explained and SENTENCES[bug] in told
