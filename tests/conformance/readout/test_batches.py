"""Kernels that take batch entries for one another are told so in sentences."""

import dataclasses

import numpy as np
import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, MutantTarget
from ringspec.conformance.explain.explain import explain_target
from ringspec.conformance.targets.reference import REFERENCES

BATCHES = "readout/batches-contiguous"


class Exchanged:
    """The reference on inputs whose batch entries are taken in another order; ``results`` in yet another."""

    name = "exchanged"

    def __init__(self, inputs=(), order=None, results=(), recipe="float32"):
        self.reference, self.inputs, self.results = REFERENCES[recipe], inputs, results
        self.order = order
        self.capabilities = dataclasses.replace(
            self.reference.capabilities,
            layouts=("contiguous",),
            circulations=("kv",),
            masks=("causal",),
            features=(),
        )

    def run(self, call):
        def ordered(shards):
            return tuple(x[self.order(np.arange(len(x)))] for x in shards)

        changed = {name: ordered(call.tensors[name]) for name in self.inputs}
        found = self.reference.run(dataclasses.replace(call, tensors={**call.tensors, **changed}))
        changed = {name: ordered(getattr(found, name)) for name in self.results}
        return dataclasses.replace(found, **changed)


def following(entry):
    return np.roll(entry, -1)


def preceding(entry):
    return np.roll(entry, 1)


def first(entry):
    return 0 * entry


def backwards(entry):
    return entry[::-1]


FAULTS = {
    "next": (("k", "v"), following, (), "batch entry b reads the next batch entry"),
    "previous": (("k", "v"), preceding, (), "batch entry b reads the previous batch entry"),
    "first": (("k", "v"), first, (), "batch entry b reads batch entry 0"),
    "reversed": (("k", "v"), backwards, (), "batch entry b reads the batch entries in reversed order"),
    "queries": (("q",), first, (), "queries are those of batch entry 0"),
    "o": ((), backwards, ("o",), "the returned o is that of the batch entries in reversed order"),
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["float32", "bf16", "fp16", "nki_low"])
def test_the_reference_is_right_with_a_batch(recipe):
    found = explain_target(Exchanged(recipe=recipe))
    assert found.right and found.runs[-1].problem.id == BATCHES


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, "float32") for name in ("queries", "o")),
        ("previous", "bf16"),
        *(
            pytest.param(x, "float32", marks=pytest.mark.slow)
            for x in ("previous", "next", "first", "reversed")
        ),
        *(pytest.param(x, "bf16", marks=pytest.mark.slow) for x in FAULTS if x != "previous"),
    ],
)
def test_batch_entries_that_are_exchanged_are_named_as_such(name, recipe, no_catalogue):
    inputs, order, results, words = FAULTS[name]
    found = explain_target(Exchanged(inputs, order, results, recipe))
    assert found.conclusion.explained == (BATCHES,)
    assert found.sentences[0] == f"In the forward pass, {words}."
    assert "batch entry" in found.hint and not any("head" in x for x in found.sentences)


class Mixed(Exchanged):
    """The reference, with gradients that are mixed over the batch."""

    def __init__(self, mix, *names):
        super().__init__()
        self.mix, self.names = mix, names

    def run(self, call):
        found = super().run(call)
        mixed = {
            name: [
                np.broadcast_to(self.mix(x), x.shape).astype(x.dtype) for x in getattr(found, name)
            ]
            for name in self.names
        }
        return dataclasses.replace(found, **mixed)


def summed(x):
    return x.sum(axis=0)


def averaged(x):
    return x.mean(axis=0)


SUMS = {
    "dk-dv": (summed, ("dk", "dv"), "dk and dv are summed over all batch entries, and every batch entry gets the sum"),
    "dq": (summed, ("dq",), "dq is summed over all batch entries, and every batch entry gets the sum"),
    "dv": (averaged, ("dv",), "dv is averaged over all batch entries, and every batch entry gets the average"),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["dk-dv", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dq", "dv"))]
)
def test_a_gradient_that_is_summed_over_the_batch_is_told_as_such(name, no_catalogue):
    mix, names, words = SUMS[name]
    found = explain_target(Mixed(mix, *names))
    assert found.conclusion.explained == (BATCHES,)
    assert found.sentences == (f"In the backward pass, {words}.",)
    assert "batch entry" in found.hint


@pytest.mark.slow
def test_a_gradient_that_is_a_weighted_sum_over_the_batch_is_not_explained():
    found = explain_target(Mixed(lambda x: np.tensordot(0.8 ** np.arange(len(x)), x, 1), "dk"))
    assert found.wrong == 1 and not found.conclusion.explained


def test_a_target_of_one_batch_entry_or_of_other_head_ratios_is_not_given_a_batch():
    for claims in ({"batch": (1,)}, {"head_ratios": (2,)}):
        target = Exchanged()
        target.capabilities = dataclasses.replace(target.capabilities, **claims)
        found = explain_target(target)
        assert found.right and BATCHES not in [one.problem.id for one in found.runs]


def test_a_fault_of_heads_is_not_refuted_by_batch_entries_of_one_head():
    target = MutantTarget(MUTANTS["lse-layout"], "float32")
    target.capabilities = dataclasses.replace(
        target.capabilities, circulations=("kv",), directions=(1,), layouts=("contiguous",)
    )
    found = explain_target(target)
    (batches,) = (one for one in found.runs if "batches" in one.problem.id)
    assert batches.right
    words = "the returned lse is taken as if written in the order (token, head)"
    assert found.sentences == (f"In the forward pass, {words}.", "The gradients are right.")
