"""A failure that many cases share is shown once, and a wrong dtype with a claim under which the cases pass."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner

from ringspec.cli.commands.smoke import smoke_command
from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.shared import (
    same_message,
    shared_dtype_lines,
    with_shared_dtype,
)
from ringspec.conformance.run.check import check
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import reference_bf16
from ringspec.formats import load

NAMES = ("o", "lse", "dq", "dk", "dv")
ONLY = ("ring/*", "property/workers/causal-*")
CLAIMS = Capabilities(formats=("bfloat16",), layouts=("contiguous", "striped", "zigzag"))


def wide(call):
    """Results of the reference in float32, whatever a call asks for."""
    result = reference_bf16.run(call)
    arrays = {name: getattr(result, name) for name in NAMES}
    return {
        name: [load(x).astype(np.float32) for x in given]
        for name, given in arrays.items()
        if given is not None
    }


def checked(recipe=None):
    target = NumPyTarget(wide, dataclasses.replace(CLAIMS, recipe=recipe))
    return run(target, run_cases("smoke"), only=ONLY)


@pytest.mark.parametrize("recipe", [None, "bf16_partials", {"bfloat16": {"tile_k": 512}}])
def test_under_the_suggested_claim_the_cases_pass(recipe):
    found = checked(recipe)
    assert {one.outcome for one in found.failures} == {"wrong dtype"}
    *_, claim = shared_dtype_lines(found.failures, recipe)
    suggested = json.loads(claim.strip().removeprefix("recipe="))
    if isinstance(recipe, dict):
        assert suggested["bfloat16"]["tile_k"] == 512
    passed = checked(suggested)
    assert passed.counts == {"pass": len(found.failures)} | {
        "not claimed": found.counts["not claimed"]
    }


def test_check_counts_the_cases_once():
    text = str(check(NumPyTarget(wide, CLAIMS), only=ONLY))
    assert text.count("cases fail for one reason") == 1
    assert "o, dq, dk and dv are float32, expected bfloat16" in " ".join(text.split())


def test_no_claim_is_suggested_for_a_dtype_that_no_recipe_has():
    message = "o of worker 0 is int32, expected bfloat16"
    records = [Record(id, "wrong dtype", {"inputs": "bfloat16"}, message=message) for id in "abc"]
    assert shared_dtype_lines(records)[1:] == ["  Fix: return bfloat16"]


def test_few_wrong_dtypes_and_other_failures_are_not_explained_together():
    two = [Record(id, "wrong dtype", message="o of worker 0 is int32") for id in "ab"]
    assert with_shared_dtype([*two, *(Record(id, "error") for id in "cdef")]) == []


def test_mismatches_are_never_alike():
    alike = [Record(id, "mismatch", message="o is wrong") for id in "abc"]
    assert same_message(alike) == {}


def test_smoke_shows_the_message_of_many_cases_once(tmp_path):
    file = tmp_path / "refusing.py"
    file.write_text(
        "from ringspec.conformance.adapters.numpy_lists import NumPyTarget\n"
        "from ringspec.conformance.target.protocol import Refused\n"
        "def ring(q, k, v, call):\n    raise Refused('no device')\n"
        "target = NumPyTarget(ring)\n"
    )
    result = CliRunner().invoke(smoke_command, [f"{file}:target"])
    failed = int(result.output.rpartition("passed 0 of ")[2].split()[0])
    assert result.output.count("refused: no device") == 1
    assert f"{failed - 1} more cases fail with this message" in result.output
