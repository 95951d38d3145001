"""A target may declare that it merges as a public ring does; its noise is then judged as that of these merges."""

import dataclasses

import pytest
from refusals import refuses

from ringspec.compare.statistics.types import RATE
from ringspec.conformance.cases.noise import noise_call
from ringspec.conformance.judge import noise as noise_judge
from ringspec.conformance.judge.noise_inputs import question_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.declared import declared_recipe
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.target.results import due_of
from ringspec.conformance.targets.reference import REFERENCES, arrays_of, options_of, tables_of
from ringspec.errors import OptionError
from ringspec.formats import load
from ringspec.merges import MERGES
from ringspec.problem.options import check
from ringspec.recipes import RECIPES
from ringspec.rings.layouts import shard
from ringspec.rings.replay_as import replayed


class Merging:
    """A correct ring with bf16 blocks and the merges ``real``, which declares ``declared``."""

    def __init__(self, real, declared):
        self.real, self.name, self.notes = MERGES[real], "merging", ()
        self.capabilities = dataclasses.replace(
            REFERENCES["bf16"].capabilities,
            recipe=declared, circulations=("kv",), directions=(1,), formats=("bfloat16",),
        )  # fmt: skip

    def run(self, call):
        q, k, v, dy, _ = arrays_of(call)
        layouts = tables_of(call)
        problem = check(q, k, v, options_of(call))
        got = replayed(problem, layouts, dy, self.real, "bfloat16", blocks=RECIPES["bf16"])
        sides = {"dk": layouts[1], "dv": layouts[1]}
        return Result(
            **{name: [x.astype(getattr(got, name).dtype) for x in shard(load(getattr(got, name)), sides.get(name, layouts[0]))] for name in due_of(call)}
        )  # fmt: skip


def judged(monkeypatch, real, said, workers, layout="contiguous", mask="full"):
    monkeypatch.setattr(noise_judge, "inferred", lambda *given: ())
    monkeypatch.setattr(noise_judge, "limits_of", lambda *given: {})
    target = Merging(real, declared(said))
    call = noise_call("small", "bf16", workers, layout, mask, tokens=96, head_dim=32)
    call = dataclasses.replace(call, circulation="kv", direction=1)
    outputs = {name: getattr(target.run(call), name) for name in due_of(call)}
    return noise_judge.examined(target.capabilities, question_of(call), call, outputs, RATE)


def declared(name):
    """With the maximum that P is relative to; if it is open, readings are tried, which takes most of the time."""
    return {"bfloat16": {"base": "bf16", "merge_recipe": name, "p_relative_to": "block"}}


@pytest.mark.parametrize(
    ("name", "where"),
    [("te_p2p", (4, "zigzag", "causal")), ("te_p2p", (8,)), ("ring_flash_attn", (8,))],
)
def test_a_ring_that_merges_as_it_declares_passes(monkeypatch, name, where):
    found = judged(monkeypatch, name, name, *where)
    assert not found.alarms and found.declared and found.count > 100, found.message()
    assert all(0.9 < found.rms[tensor] < 1.1 for tensor in ("o", "dq", "dk", "dv")), found.rms


@pytest.mark.parametrize(
    ("real", "said"), [("te_p2p", "ring_flash_attn"), ("te_p2p_2_20", "te_p2p")]
)
def test_a_ring_that_rounds_more_often_than_it_declares_fails(monkeypatch, real, said):
    assert "variance" in judged(monkeypatch, real, said, 8).message()


def test_a_merge_recipe_is_declared_by_its_name_for_formats_that_it_is_defined_for():
    one = declared_recipe("te_p2p", "float16")
    assert (one.merge_recipe, one.block_o, one.carried_o, one.p) == ("te_p2p", *["float16"] * 3)
    assert declared_recipe("te_p2p", "float32").carried_dq == "float32"
    assert declared_recipe("te_p2p", "float64") is None
    own = {"bfloat16": {"merge_recipe": "tokamax", "p": "float32"}}
    one = declared_recipe(own, "bfloat16")
    assert (one.gradients, one.p, one.merge_order) == ("float32", "float32", "state")
    with refuses((OptionError, "unknown-name"), match="write 'te_p2p'"):
        Capabilities(recipe="te_p2")
    with refuses((OptionError, "unknown-name"), match="write 'te_thd'"):
        Capabilities(recipe={"bfloat16": {"merge_recipe": "te_thdd"}})
