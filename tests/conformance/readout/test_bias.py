"""Faults of an additive bias, planted in a ring that shares no code with the model of the readouts, are told in sentences."""

import numpy as np
import pytest
from conformance.readout.feature_ring import Target, columns, right_bias, right_dbias
from conformance.readout.told_features import marked, named, told_of

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.targets.reference import REFERENCES

LN2 = np.log(2).astype(np.float32)


def of_columns(owner):
    """The bias with the columns of the worker ``owner(r, step)`` in both passes."""
    return lambda bias, r, step, n, **s: columns(bias[r], owner(r, step) % 3, n)


def changed(change):
    return lambda bias, r, step, n, scale, **s: change(right_bias(bias, r, step, n), scale)


def only(phase, wrong):
    def found(bias, r, step, n, **state):
        return (wrong if state["phase"] == phase else right_bias)(bias, r, step, n, **state)

    return found


def transposed(bias, r, step, n, **state):
    return columns(bias[r - step], r, n).swapaxes(1, 2)


def row_of_next_worker(bias, r, step, n, workers, **state):
    return columns(bias[(r + 1) % workers], r - step, n)


def rows_of_visitor(bias, r, step, n, **state):
    return columns(bias[r - step], r - step, n)


def left_out_after_step_0(bias, r, step, n, **state):
    return right_bias(bias, r, step, n) * (step == 0)


left_out = changed(lambda x, scale: 0 * x)
FORWARD = {
    "local-columns": (of_columns(lambda r, step: 0), "the columns of the bias are those of worker 0"),
    "own-columns": (of_columns(lambda r, step: r), "the columns of the bias are those of the worker that computes"),
    "previous-columns": (of_columns(lambda r, step: r - step + 1), "the columns of the bias are those of the previous step's visitor"),
    "next-columns": (of_columns(lambda r, step: r - step - 1), "the columns of the bias are those of the next step's visitor"),
    "visitor-rows": (rows_of_visitor, "the rows of the bias are those of the visitor"),
    "next-rows": (row_of_next_worker, "the rows of the bias are those of the next worker"),
    "before-scale": (changed(lambda x, scale: scale * x), "the bias is multiplied by the scale"),
    "divided": (changed(lambda x, scale: x / scale), "the bias is divided by the scale"),
    "twice": (changed(lambda x, scale: 2 * x), "the bias is too large by a factor of 2"),
    "base-2": (changed(lambda x, scale: LN2 * x), "the bias is multiplied by ln 2"),
    "negated": (changed(lambda x, scale: -x), "the bias is negated"),
    "left-out": (left_out, "the bias is left out"),
    "left-out-in-steps": (left_out_after_step_0, "from step 1 on, the bias is left out"),
    "next-head": (changed(lambda x, scale: np.roll(x, -1, axis=0)), "the rows of the bias are those of the next head"),
    "head-0": (changed(lambda x, scale: x[:1]), "the rows of the bias are those of head 0"),
    "transposed": (transposed, "the bias is transposed"),
}  # fmt: skip


def dbias_of(change):
    def add(dbias, ds, r, step, n, scale):
        right_dbias(dbias, change(ds, scale=scale, step=step, r=r), r, step, n)

    return {"dbias": add}


def to_columns(owner):
    def add(dbias, ds, r, step, n, scale):
        columns(dbias, owner(r, step) % 3, n)[...] += ds

    return {"dbias": add}


BACKWARD = {
    "left-out": ({"bias": only("backward", left_out)}, "the bias is left out"),
    "scaled-again": ({"bias": only("backward", changed(lambda x, scale: scale * x))}, "the bias is multiplied by the scale"),
    "local-columns": ({"bias": only("backward", of_columns(lambda r, step: 0))}, "the columns of the bias are those of worker 0"),
    "dbias-scaled": (dbias_of(lambda ds, scale, **s: scale * ds), "dbias is multiplied by the scale"),
    "dbias-negated": (dbias_of(lambda ds, **s: -ds), "dbias is negated"),
    "dbias-of-step-0": (dbias_of(lambda ds, step, **s: ds * (step == 0)), "from step 1 on, the share of dbias is lost"),
    "dbias-of-last-step": (dbias_of(lambda ds, step, r, **s: ds * (step == r)), "in all but the last block that a query sees, the share of dbias is lost"),
    "dbias-none": (dbias_of(lambda ds, **s: 0 * ds), "the share of dbias is lost"),
    "dbias-transposed": (dbias_of(lambda ds, **s: ds.swapaxes(1, 2)), "dbias is transposed within each block"),
    "dbias-local-columns": (to_columns(lambda r, step: 0), "the columns of dbias are added to those of worker 0"),
    "dbias-next-columns": (to_columns(lambda r, step: r - step - 1), "the columns of dbias are added to those of the next step's visitor"),
    "dbias-next-head": (dbias_of(lambda ds, **s: np.roll(ds, 1, axis=0)), "the rows of dbias are added to those of the next head"),
}  # fmt: skip
FEW = ("own-columns", "left-out-in-steps", "dbias-transposed", "dbias-local-columns")


def test_a_ring_with_a_bias_is_right():
    found = explain_target(Target())
    assert found.right and "readout/bias-contiguous" in [one.problem.id for one in found.runs]


@pytest.mark.parametrize("name", marked(FORWARD, FEW))
def test_a_fault_of_the_bias_in_both_passes_is_named(name):
    bias, words = FORWARD[name]
    found = told_of(Target(bias=bias), "bias")
    assert found.explained
    assert words in [named(x) for x in found.forward.sets[0]]


@pytest.mark.parametrize("name", marked(BACKWARD, FEW))
def test_a_fault_of_the_bias_in_the_backward_pass_is_named(name):
    faults, words = BACKWARD[name]
    found = told_of(Target(**faults), "bias")
    assert found.explained and not found.forward.sets
    assert [words] == [named(x) for x in found.backward.sets[0]]


def test_a_dbias_that_no_fault_gives_is_not_explained():
    def add(dbias, ds, r, step, n, scale):
        right_dbias(dbias, ds + 0.1 * np.sqrt(np.arange(n, dtype=np.float32)), r, step, n)

    found = told_of(Target(dbias=add), "bias")
    assert not found.right and not found.explained and "dbias in" in found.backward.left


@pytest.mark.parametrize("recipe", ["float32", "bf16", "fp16", "nki_low"])
def test_the_reference_with_a_bias_is_right(recipe):
    assert told_of(REFERENCES[recipe], "bias").right


SENTENCES = {
    "bias-before-scale": "In the forward pass, the bias is multiplied by the scale.",
    "bias-columns-local": "In the forward pass, the columns of the bias are those of worker 0.",
    "bias-gradient-scaled": "In the backward pass, dbias is multiplied by the scale.",
    "bias-gradient-of-first-step": "In the backward pass, from step 1 on, the share of dbias is lost.",
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", SENTENCES)
def test_a_known_bug_of_the_bias_is_explained(bug):
    found = told_of(MutantTarget(MUTANTS[bug], "float32"), "bias")
    named = [x.sentence() for part in found.passes for x in (part.sets or [()])[0]]
    assert found.explained and SENTENCES[bug] in named
