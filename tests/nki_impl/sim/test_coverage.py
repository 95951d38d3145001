"""What the simulator offers of the public names."""

from __future__ import annotations

import inspect
import json
import types
from importlib import resources
from pathlib import Path

import pytest

from nki_impl.sim import collectives as ncc
from nki_impl.sim import isa as nisa
from nki_impl.sim import language as nl
from nki_impl.sim.coverage import coverage, is_offered
from nki_impl.sim.machine import launch
from nki_impl.sim.public_names import public_names

NEEDED = (
    "ReplicaGroup", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute",
    "collective_permute_implicit", "collective_permute_implicit_reduce",
    "collective_permute_implicit_current_processing_rank_id", "rank_id",
)  # fmt: skip


def test_every_public_name_is_either_offered_or_missing():
    found = coverage()
    _, names = public_names()
    assert sum(map(len, names.values())) == 216
    for module, members in names.items():
        assert sorted(found.offered[module] + found.missing[module]) == sorted(members)
    assert found.counts == (sum(map(len, found.offered.values())), 216)


def test_the_collectives_that_ring_attention_needs_are_offered():
    found = coverage()
    assert set(NEEDED) <= set(found.offered["nki.collectives"])
    assert found.missing["nki.collectives"] == ()
    assert found.offered["nki"] == ("jit", "simulate")
    assert {"core_barrier", "sendrecv"} <= set(found.offered["nki.isa"])


def test_the_report_says_what_is_missing():
    text = str(coverage())
    assert text.splitlines()[0].endswith("of 216 names of nki 0.6.0 (Neuron 2.32)")
    assert "  not offered: average, prelu," in text


def test_the_report_lists_the_new_names_of_nki_0_7():
    later = coverage().later
    assert later.version.startswith("nki 0.7.0 (Neuron 2.33)")
    assert later.missing == {
        "nki.isa": (),
        "nki.collectives": (),
    }
    assert "8 of 8 names of nki 0.7.0" in str(coverage())


def test_a_name_that_only_raises_is_not_offered():
    module = types.ModuleType("stub")
    module.refused = lambda: None
    module.refused.not_modelled = True
    assert not is_offered(module, "refused")
    assert not is_offered(ncc, "no_such_name")
    assert is_offered(ncc, "all_to_all_v")


@pytest.mark.parametrize("module", [nl, nisa], ids=["nki.language", "nki.isa"])
def test_a_missing_name_is_said_to_be_one_of_nki(module):
    name = coverage().missing[f"nki.{module.__name__.rpartition('.')[2]}"][0]
    with pytest.raises(AttributeError, match=rf"{name} is a name of nki 0\.6\.0 .*coverage\(\)"):
        getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        getattr(module, "no_such_name")  # noqa: B009


def test_the_list_names_its_public_source():
    text = resources.files("nki_impl.sim").joinpath("api_names.json").read_text("utf-8")
    source = json.loads(text)["source"]
    assert source["repository"] == "https://github.com/aws-neuron/aws-neuron-sdk"
    assert len(source["commit"]) == 40


def table():
    """The official signatures, by kind and module."""
    return json.loads((Path(__file__).parent / "signatures.json").read_text())


def test_every_function_with_an_official_signature_is_a_public_name():
    _, names = public_names()
    for module, functions in table()["functions"].items():
        assert set(functions) <= set(names[module])


@pytest.mark.parametrize("name", ["jit", "simulate"])
def test_the_entry_points_have_the_official_signatures(name):
    parameters = inspect.signature(getattr(launch, name)).parameters.values()
    bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    assert str(bare) == table()["functions"]["nki"][name]
