"""The independent program of context parallelism: right programs pass, each fault fails a named case and is named."""

import ast
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from independent import cp_backward, cp_command, cp_math, cp_program
from independent.cp_faults import FAULTS
from independent.cp_target import CLAIMS, right, target

from ringspec.conformance.adapters.command import CommandTarget
from ringspec.conformance.adapters.offline import OfflineTarget
from ringspec.conformance.adapters.wire import Claims
from ringspec.conformance.cases.schemes import cases
from ringspec.conformance.cases.write import write_cases
from ringspec.conformance.diagnose.scheme_bugs import BUGS
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.check import check
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import capabilities_from
from ringspec.conformance.target.protocol import Result

WIRE = ("scheme/ulysses/gqa-w4", "scheme/usp/ring-outer-causal-w4", "scheme/dcp/gqa-group-w4")
CASES = {case.id: case for case in cases()}
NAMED = [case for case in cases() if any(case.id == f"scheme/{id}" for id, _ in FAULTS.values())]


def test_the_program_shares_no_code_with_ringspec():
    for module in (cp_math, cp_program, cp_backward, cp_command):
        tree = ast.parse(Path(module.__file__).read_text())
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(name.startswith("ringspec") for name in names)


def test_a_right_program_passes_every_case():
    summary = run(right, list(CASES.values()))
    assert summary.counts == {"pass": len(CASES)} and len(CASES) >= 140
    assert summary.coverage.untested == {}


@pytest.mark.parametrize("variant", [
    {"chunk": 2, "backwards": True, "dtype": np.float32},
    {"chunk": 3},
], ids=str)  # fmt: skip
def test_right_programs_with_other_chunks_and_orders_are_not_accused(variant):
    assert run(target(**variant), NAMED).counts == {"pass": len(NAMED)}


def test_every_known_bug_is_planted():
    assert {bug for _, bug in FAULTS.values()} == {bug.id for bug in BUGS}
    assert len(BUGS) >= 40


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_case_and_is_named(fault):
    id, bug = FAULTS[fault]
    record = run_case(target(fault), CASES[f"scheme/{id}"], Diagnoser())
    assert record.outcome == "mismatch" and record.diagnosis is not None
    assert (record.diagnosis["id"], record.diagnosis["alike"]) == (bug, [])
    assert most_likely([record])["id"] == bug


def scaled(name, factor):
    """The right program with one result multiplied by a factor."""

    class Scaled:
        capabilities = CLAIMS

        def run(self, call):
            result = right.run(call)
            setattr(result, name, [factor * x for x in getattr(result, name)])
            return result

    Scaled.name = "scaled"
    return Scaled()


@pytest.mark.parametrize("name,factor", [("o", 1.01), ("lse", 2.0), ("dq", -1.0), ("dk", 0.5)])
@pytest.mark.parametrize("id", ["ring/zigzag-causal-w3", "joint/backward-w4", "ulysses/gqa-w4"])
def test_a_fault_that_is_not_known_is_not_named(name, factor, id):
    record = run_case(scaled(name, np.float32(factor)), CASES[f"scheme/{id}"], Diagnoser())
    assert record.outcome == "mismatch" and record.diagnosis["id"] is None


def test_results_of_zeros_and_of_nan_are_not_named():
    class Empty:
        name, capabilities = "empty", CLAIMS

        def __init__(self, value):
            self.value = np.float32(value)

        def run(self, call):
            result = right.run(call)
            names = ("o", "lse", "dq", "dk", "dv")
            given = {name: getattr(result, name) for name in names}
            return Result(
                **{n: x and [np.full_like(y, self.value) for y in x] for n, x in given.items()}
            )

    for value in (0.0, np.nan):
        for id in ("usp/every-row-far-w4", "dcp/two-empty-w4", "joint/front-w4"):
            record = run_case(Empty(value), CASES[f"scheme/{id}"], Diagnoser())
            assert record.outcome == "mismatch" and record.diagnosis["id"] is None


@pytest.mark.parametrize("fault", [None, "heads-interleaved"])
def test_a_program_of_the_command_protocol_passes_or_is_named(fault):
    command = [sys.executable, cp_command.__file__, *([fault] if fault else [])]
    program = CommandTarget(command)
    try:
        summary = run(program, cases("smoke"), only=WIRE, diagnose=Diagnoser())
    finally:
        program.close()
    assert summary.counts == ({"mismatch": 2, "pass": 1} if fault else {"pass": 3})
    if fault:
        assert most_likely(summary.records)["id"] == FAULTS[fault][1]


def test_calls_and_results_of_another_machine_are_judged(tmp_path):
    chosen = [case for case in cases("smoke") if case.id in WIRE]
    claims = Claims("command", capabilities_from(cp_command.CLAIMS))
    write_cases(tmp_path / "calls", chosen, claims=claims)
    for path in sorted((tmp_path / "calls").rglob("call.json")):
        message = json.loads(path.read_text())
        folder = {"inputs": "inputs.safetensors", "result": "result.safetensors"}
        cp_command.answer(message | {name: path.parent / x for name, x in folder.items()})
    assert run(OfflineTarget(tmp_path / "calls"), chosen).counts == {"pass": 3}


def test_a_target_in_another_process_gets_meshes_and_heads():
    checked = check(
        f"{Path(cp_command.__file__).parent / 'cp_target.py'}:right", only=WIRE, timeout=60
    )
    assert str(checked) == "passed 3 of 3 claimed, 0 not claimed"


def test_the_page_lists_every_known_bug_with_the_case_that_finds_it():
    page = (Path(__file__).parents[2] / "docs" / "conform" / "schemes.md").read_text()
    case_of = {bug: case for case, bug in FAULTS.values()}
    for bug in BUGS:
        assert f"| `{bug.id}` | {bug.title} | `scheme/{case_of[bug.id]}` |" in page
        assert all(f"]({link})" in page for link in bug.links)
