"""The operation 'layout': a right program passes every case, and each planted bug is found and named."""

import sys

import numpy as np
import pytest
from conformance.cases import integer_program
from conformance.cases.integer_program import BUGS, answer
from refusals import refuses

from ringspec import strictjson
from ringspec.conformance.adapters.command import CommandTarget
from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.adapters.offline import OfflineTarget
from ringspec.conformance.adapters.wire import Claims
from ringspec.conformance.cases.layouts import NAMED, cases
from ringspec.conformance.cases.profiles import cases_for, run_cases
from ringspec.conformance.cases.write import write_cases
from ringspec.conformance.diagnose.layouts import BUGS as KNOWN
from ringspec.conformance.diagnose.summary import Diagnoser, most_likely
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import (
    DOCUMENT_LAYOUTS,
    INTEGER_OPERATIONS,
    Capabilities,
)
from ringspec.conformance.target.protocol import Result
from ringspec.conformance.targets.reference import reference_float64
from ringspec.errors import OptionError

CLAIMS = Capabilities(operations=INTEGER_OPERATIONS, layouts=DOCUMENT_LAYOUTS, features=("prefix",))
CASES = cases()


def target(bug=None, claims=CLAIMS):
    def integers(call):
        given = {"layout": call.layout, "workers": call.workers, "passes": call.passes}
        found = answer(**given, **call.terms, bug=bug)
        return {name: [np.array(x, dtype=np.int32) for x in rows] for name, rows in found.items()}

    return NumPyTarget(integers, claims)


def test_a_right_program_passes_every_case():
    summary = run(target(), CASES)
    assert summary.counts == {"pass": len(CASES)} and len(CASES) > 100
    assert summary.coverage.untested == {}


@pytest.mark.parametrize("bug", BUGS)
def test_each_planted_bug_fails_a_case_and_is_named(bug):
    summary = run(target(bug), CASES, diagnose=Diagnoser())
    killers = [one for one in summary.failures if one.outcome == "mismatch"]
    assert killers and len(killers) == len(summary.failures)
    assert {one.id.rsplit("/", 1)[1].replace("-", "_") for one in killers} <= set(BUGS[bug])
    named = [
        one for one in killers if bug in (one.diagnosis["id"], *one.diagnosis.get("alike", []))
    ]
    assert len(named) == len(killers), [one.id for one in killers if one not in named]
    assert any(one.diagnosis["id"] == bug and not one.diagnosis["alike"] for one in killers)
    assert most_likely(summary.records)["id"] == bug
    # A case of a published bug alone would have found it.
    assert any(one.id.split("/")[1] in {pack.id for pack in NAMED} for one in killers)


def test_every_known_bug_is_planted_in_a_program_without_ringspec():
    assert [bug.id for bug in KNOWN] == list(BUGS)
    assert "ringspec" not in " ".join(name for name in vars(integer_program) if name[0] != "_")


def test_the_cases_run_only_for_a_target_that_claims_an_integer():
    usual = [case.id for case in run_cases("smoke")]
    assert not any(id.startswith("layout/") for id in usual)
    assert [case.id for case in cases_for("smoke", Capabilities())] == usual
    assert "layout-lengths" not in reference_float64.capabilities.operations
    more = [case.id for case in cases_for("smoke", Capabilities(operations="layout-lengths"))]
    assert more == [*usual, *(case.id for case in CASES)]


def test_a_target_of_lengths_alone_is_asked_for_lengths_alone():
    claims = Capabilities(operations="layout-lengths", layouts="interleaved", workers=(2, 4))
    summary = run(target(claims=claims), CASES)
    ran = [one.id for one in summary.records if one.outcome != "not claimed"]
    assert set(summary.counts) == {"pass", "not claimed"}
    assert ran and all(id.endswith("/lengths") for id in ran)


@pytest.mark.parametrize("change,outcome", [
    (lambda x: x.astype(float), "wrong dtype"),
    (lambda x: x[:-1], "wrong shape"),
    (lambda x: None, "missing"),
    (lambda x: x + 1, "mismatch"),
])  # fmt: skip
def test_a_wrong_form_is_its_own_outcome(change, outcome):
    class Wrong:
        name, capabilities = "wrong", CLAIMS

        def run(self, call):
            return Result(
                lengths=[
                    change(np.array(x))
                    for x in answer(call.layout, call.workers, call.passes, **call.terms)["lengths"]
                ]
            )

    case = next(one for one in CASES if one.id == "layout/thd-w2/lengths")
    record = run_case(Wrong(), case)
    assert record.outcome == outcome, record.message


def test_a_result_that_was_not_asked_for_is_refused():
    class More:
        name, capabilities = "more", CLAIMS

        def run(self, call):
            found = answer(call.layout, call.workers, call.passes, **call.terms)
            return Result(**found, o=[np.zeros(1)])

    assert run_case(More(), CASES[0]).outcome == "garbage"


@pytest.mark.parametrize("bug", [None, "layout-floor-length"])
def test_a_program_in_another_process_passes_or_is_named(bug):
    command = [sys.executable, integer_program.__file__, *([bug] if bug else [])]
    program = CommandTarget(command)
    try:
        summary = run(program, CASES, only="layout/thd-*", diagnose=Diagnoser())
    finally:
        program.close()
    assert set(summary.counts) - {"pass"} == ({"mismatch"} if bug else set())
    assert all(one.diagnosis["id"] == bug for one in summary.failures)


def test_calls_and_results_of_another_machine_are_judged(tmp_path):
    chosen = [case for case in CASES if case.id.startswith("layout/documents-")]
    write_cases(tmp_path / "calls", chosen, claims=Claims("integers", CLAIMS))
    for path in sorted((tmp_path / "calls").rglob("call.json")):
        message = strictjson.loads(path.read_bytes())
        [name] = message["passes"]
        found = answer(message["layout"], message["workers"], [name], **message["terms"])[name]
        integer_program.write(path.parent / "result.safetensors", name, found)
    summary = run(OfflineTarget(tmp_path / "calls"), chosen)
    assert summary.counts == {"pass": len(chosen)}


def test_a_claim_of_an_unknown_result_is_refused():
    with refuses((OptionError, "unknown-name"), match="layout-table"):
        Capabilities(operations="layout-tabel")
