"""Faults of sinks, planted in a ring that shares no code with the model of the readouts, are told in sentences."""

import numpy as np
import pytest
from conformance.readout.feature_ring import Target, right_dsinks
from conformance.readout.told_features import marked, named, told_of

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.targets.reference import REFERENCES

LN2 = np.log(2).astype(np.float32)


def nothing(x, worker, **state):
    return np.full_like(x, -np.inf)


def in_every_step(x, worker, workers, **state):
    return x + np.log(np.float32(workers))


def in_every_block(x, worker, steps, **state):
    return x + np.log(np.float32(steps))


def on_worker_0(x, worker, **state):
    return x if worker == 0 else np.full_like(x, -np.inf)


def unshifted(x, worker, m, **state):
    return x + m


def base_2(x, worker, **state):
    return x * LN2


def scaled(x, worker, scale, **state):
    return x * scale


def unscaled(x, worker, scale, **state):
    return x / scale


def negated(x, worker, **state):
    return -x


def added_itself(x, worker, m, **state):
    return np.log(x) + m


def previous_head(x, worker, **state):
    return np.roll(x, 1, axis=0)


def reversed_on_worker_1(x, worker, **state):
    return x[::-1] if worker == 1 else x


def both(change):
    return {"of_o": change, "of_lse": change}


def dsinks(change):
    return {"dsinks": change}


FORWARD = {
    "missing": (both(nothing), "the sinks are left out"),
    "missing-in-o": ({"of_o": nothing}, "the sinks are left out (lse is correct)"),
    "missing-in-lse": ({"of_lse": nothing}, "the sinks are left out (o is correct)"),
    "every-step": (both(in_every_step), "the sinks are counted once in every step"),
    "every-block": (both(in_every_block), "the sinks are counted once in every block in which a row sees a key"),
    "every-block-in-o": ({"of_o": in_every_block}, "the sinks are counted once in every block in which a row sees a key (lse is correct)"),
    "worker-0": (both(on_worker_0), "on all workers but 0, the sinks are left out"),
    "unshifted": (both(unshifted), "exp(sink) is added to l, not exp(sink - m)"),
    "base-2": (both(base_2), "the sinks are multiplied by ln 2"),
    "scaled": (both(scaled), "the sinks are multiplied by the scale"),
    "unscaled": (both(unscaled), "the sinks are divided by the scale"),
    "negated": (both(negated), "the sinks have the wrong sign"),
    "itself": (both(added_itself), "the sink itself is added to l, not exp(sink - m)"),
    "previous-head": (both(previous_head), "the sinks are those of the previous head"),
    "reversed-on-worker-1": (both(reversed_on_worker_1), "on worker 1, the sinks are those of the heads in reversed order"),
}  # fmt: skip
BACKWARD = {
    "sign": (dsinks(lambda p, row, **s: -right_dsinks(p, row)), "dsinks is negated"),
    "twice": (dsinks(lambda p, row, **s: 2 * right_dsinks(p, row)), "dsinks is too large by a factor of 2"),
    "scaled": (dsinks(lambda p, row, scale, **s: scale * right_dsinks(p, row)), "dsinks is multiplied by the scale"),
    "none": (dsinks(lambda p, row, **s: 0 * right_dsinks(p, row)), "dsinks is 0"),
    "one-worker": (
        dsinks(lambda p, row, worker, **s: (worker == 2) * right_dsinks(p, row)), "on all workers but 2, dsinks is 0",
    ),
    "without-delta": (dsinks(lambda p, row, **s: p.sum(axis=1)), "dsinks is the sum of the sinks' weights, without delta"),
    "next-head": (dsinks(lambda p, row, **s: np.roll(right_dsinks(p, row), 1, axis=0)), "dsinks is added to that of the next head"),
    "bare-lse": (
        dsinks(lambda p, row, lse, sinks, **s: right_dsinks(np.exp(sinks - np.log(np.exp(lse) - np.exp(sinks).sum(2, keepdims=True))), row)),
        "dsinks is computed with an lse that does not include the sinks",
    ),
    "p-with-bare-lse": ({"lse_of_p": lambda lse, bare: bare}, "p is computed with an lse that does not include the sinks (dsinks is correct)"),
}  # fmt: skip
FEW = ("every-block", "previous-head", "one-worker", "p-with-bare-lse")


def test_a_ring_with_sinks_is_right():
    found = explain_target(Target())
    assert found.right and "readout/sinks-contiguous" in [one.problem.id for one in found.runs]


@pytest.mark.parametrize("name", marked(FORWARD, FEW))
def test_a_fault_of_sinks_in_the_forward_pass_is_named(name):
    faults, words = FORWARD[name]
    found = told_of(Target(**faults), "sinks")
    assert found.explained
    assert words in [named(x) for x in found.forward.sets[0]]
    # Faults of the sinks are tried first, and others only if these explain nothing.
    if "worker" not in words:
        assert found.evaluations < 1000


@pytest.mark.parametrize("name", marked(BACKWARD, FEW))
def test_a_fault_of_sinks_in_the_backward_pass_is_named(name):
    faults, words = BACKWARD[name]
    found = told_of(Target(**faults), "sinks")
    assert found.explained and not found.forward.sets
    assert [words] == [named(x) for x in found.backward.sets[0]]


def test_a_dsinks_that_no_fault_gives_is_not_explained():
    def wrong(p, row, worker, **state):
        return right_dsinks(p, row) + np.float32([[0.1], [0.3], [-0.2], [0.7]]) * (worker == 1)

    found = told_of(Target(dsinks=wrong), "sinks")
    assert (
        not found.right
        and not found.explained
        and "the gradient of the sinks" in found.backward.left
    )


@pytest.mark.parametrize("recipe", ["float32", "bf16", "fp16", "nki_low"])
def test_the_reference_with_sinks_is_right(recipe):
    assert told_of(REFERENCES[recipe], "sinks").right


SENTENCES = {
    "sink-dropped": "In the forward pass, the sinks are left out.",
    "sink-per-block": "In the forward pass, the sinks are counted once in every step.",
    "lse-without-sinks": "In the forward pass, the sinks are left out (o is correct).",
    "sink-gradient-local": "In the backward pass, on all workers but 0, dsinks is 0.",
    "sink-gradient-sign": "In the backward pass, dsinks is negated.",
    "sink-scaled": "In the forward pass, the sinks are multiplied by the scale.",
    "first-sink-alone": "In the forward pass, only the first of each head's sinks is counted.",
    "sinks-of-first-head": "In the forward pass, the sinks are those of head 0.",
}


@pytest.mark.parametrize("bug", marked(SENTENCES, FEW))
@pytest.mark.slow
def test_a_known_bug_of_sinks_is_explained(bug):
    found = told_of(MutantTarget(MUTANTS[bug], "float32"), "sinks")
    named = [x.sentence() for part in found.passes for x in (part.sets or [()])[0]]
    assert found.explained and SENTENCES[bug] in named
