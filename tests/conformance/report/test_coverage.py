"""What a target claims and a run did not test is said in every form of the report."""

import dataclasses
import io
import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from conformance.wrong_targets import Wrong

from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.report.coverage import Coverage, coverage_of, used_by
from ringspec.conformance.report.junit import junit
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import (
    Report,
    ReportWriter,
    counts_of,
    footer_of,
    make_header,
    report_from,
    report_lines,
)
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.errors import FileFormatError
from ringspec.render import page
from ringspec.testing import check

SMOKE = run_cases("smoke")
CLAUSE = "recipe not declared: rounding between steps was not tested"


CORE = {case.id: case for case in run_cases("core")}


def used_in(id, claims):
    return used_by(CORE[id].needs, CORE[id].make(claims))


def test_what_cannot_matter_is_not_used():
    claims = REFERENCES["float32"].capabilities
    one = used_in("attention/float32", claims)
    assert one["workers"] == [1] and not {"layouts", "circulations", "directions"} & set(one)
    two = used_in("ring/contiguous-causal-w2", claims)
    assert two["circulations"] == ["kv"] and "directions" not in two
    three = used_in("ring/contiguous-causal-w3", claims)
    assert three["directions"] == [1] and three["layouts"] == ["contiguous"]
    forward = dataclasses.replace(claims, operations=("ring-forward",))
    dlse = used_in("ring/dlse-w2", claims), used_in("ring/dlse-w2", forward)
    assert dlse[0]["features"] == ["dlse"] and "features" not in dlse[1]
    q_ring = "ring/q-ring-w3"
    assert used_in(q_ring, claims)["circulations"] == ["q"]
    assert "circulations" not in used_in(q_ring, forward)


def test_a_case_that_was_not_executed_uses_nothing():
    used = {"workers": [4], "formats": ["float32"]}
    claims = Capabilities(workers=(4,))
    for outcome in ("not claimed", "not run"):
        assert coverage_of(claims, [Record("a", outcome, used=used)]).untested["workers"] == (4,)
    assert "workers" not in coverage_of(claims, [Record("a", "mismatch", used=used)]).untested


def test_every_kind_of_claim_that_no_case_used_is_listed():
    claims = Capabilities(
        layouts=("zigzag",), circulations=("gather",), directions=(-1,), workers=(64,),
        masks=("dense",), features=("keep",), formats=("float64",), head_ratios=(7,),
    )  # fmt: skip
    assert coverage_of(claims, []).untested == {
        "operations": ("ring-forward", "ring-backward"),
        "workers": (64,),
        "layouts": ("zigzag",),
        "circulations": ("gather",),
        "directions": (-1,),
        "formats": ("float64",),
        "masks": ("dense",),
        "features": ("keep",),
        "head_ratios": (7,),
    }


def test_core_uses_every_value_that_the_reference_names():
    claims = REFERENCES["float64"].capabilities
    records = [
        Record(case.id, "pass", used=used_by(case.needs, case.make(claims)))
        for case in CORE.values()
        if case.why_not(claims) is None and case.id.startswith(("ring/", "block/", "merge/"))
    ]
    assert coverage_of(claims, records).line == ""


def test_the_run_of_a_target_says_what_it_left_out():
    claims = {"workers": (2, 16), "features": ("bias",), "formats": ("float32",)}
    summary = run(Wrong("float32", **claims), SMOKE, only="property/workers/*")
    assert summary.coverage.untested["features"] == ("bias",)
    assert "workers 2" in summary.coverage.line and "16" not in summary.coverage.line


def records(formats=("bfloat16",), workers=2, outcome="pass"):
    used = {"formats": list(formats), "workers": [workers]}
    if workers >= 2:
        used["ring_formats"] = list(formats)
    return [Record("a", outcome, used=used)]


def test_the_verdict_says_that_an_undeclared_recipe_leaves_rounding_between_steps_untested():
    both = Capabilities(formats=("bfloat16", "float16"))
    assert coverage_of(both, records()).clauses == (CLAUSE,)
    assert coverage_of(both, records(("bfloat16", "float16"))).clauses == (CLAUSE,)
    partly = dataclasses.replace(both, recipe={"float16": "fp16"})
    assert coverage_of(partly, records()).clauses == (CLAUSE,)
    assert coverage_of(partly, records(("bfloat16", "float16"))).clauses == (
        CLAUSE.replace("declared", "declared for bfloat16"),
    )


def test_the_verdict_says_nothing_of_recipes_where_that_does_not_apply():
    claims = Capabilities(formats=("bfloat16",))
    declared = dataclasses.replace(claims, recipe="bf16")
    assert coverage_of(declared, records()).clauses == ()
    assert coverage_of(claims, records(("float32",))).clauses == ()
    assert coverage_of(claims, records(workers=1)).clauses == ()
    assert coverage_of(claims, records(outcome="not claimed")).clauses == ()
    # A run in which no ring passed gives no false confidence.
    assert coverage_of(claims, records(outcome="mismatch")).clauses == ()


def test_the_declaration_that_the_report_advises_is_one_that_ends_the_clause():
    claims = Capabilities(formats=("bfloat16", "float16"))
    found = coverage_of(claims, records(("bfloat16", "float16")))
    [hint] = found.hints
    advised = json.loads(hint[hint.index("{") : hint.index("}") + 1])
    declared = dataclasses.replace(claims, recipe=advised)
    assert coverage_of(declared, records(("bfloat16", "float16"))).clauses == ()


def test_the_verdict_of_a_run_has_the_clause_until_a_recipe_is_declared():
    id = "ring/contiguous-causal-w2"
    silent = Wrong("bf16")
    silent.capabilities = dataclasses.replace(silent.capabilities, recipe=None)
    undeclared = check(silent, "core", only=id)
    assert undeclared.passed
    assert undeclared.headline == f"passed 1 of 1 claimed, 0 not claimed; {CLAUSE}"
    declared = check(Wrong("bf16"), "core", only=id)
    assert declared.headline == "passed 1 of 1 claimed, 0 not claimed"


FOUND = Coverage(
    {"workers": (8,), "features": tuple("abcdef")}, {"workers": 2, "features": 9}, ("bfloat16",)
)
MINE = SimpleNamespace(name="mine", capabilities=Capabilities())


def written(coverage=FOUND):
    stream = io.StringIO()
    writer = ReportWriter(stream, make_header(MINE, spec="mine", profile="core"))
    for record in records():
        writer(record)
    writer.finish(True, coverage)
    return stream.getvalue().encode()


def test_the_report_as_a_file_has_all_values_and_is_read_back():
    found = report_from(written(), "memory")
    assert found.footer["coverage"]["untested"] == {"workers": [8], "features": list("abcdef")}
    assert found.footer["headline"] == f"passed 1 of 1 claimed, 0 not claimed; {CLAUSE}"
    assert found.records[0].used == records()[0].used


def test_a_report_of_an_older_version_without_coverage_is_read():
    assert report_from(written(None), "memory").complete


@pytest.mark.parametrize(
    "coverage",
    [
        [],
        {},
        {"untested": {}, "untested_line": "", "clauses": [], "hints": []},
        {"untested": [], "untested_line": "", "clauses": [CLAUSE], "hints": []},
        {"untested": {"workers": 8}, "untested_line": "", "clauses": [CLAUSE], "hints": []},
        {"untested": {"workers": [0.5]}, "untested_line": "", "clauses": [CLAUSE], "hints": []},
        {"untested": {}, "untested_line": 1, "clauses": [CLAUSE], "hints": []},
        {"untested": {}, "untested_line": "", "clauses": [CLAUSE], "hints": [1]},
    ],
)
def test_a_report_whose_coverage_is_no_coverage_is_refused(coverage):
    lines = written().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"coverage": coverage}).encode()
    with pytest.raises(FileFormatError):
        report_from(b"\n".join(lines) + b"\n", "memory")


def made():
    header = make_header(MINE, spec="mine", profile="core")
    footer = footer_of(counts_of(records()), True, FOUND.as_dict())
    return Report(header, tuple(records()), footer)


def test_page_and_junit_say_it_too():
    text = page(report_lines(made()))
    assert CLAUSE in text and "workers: 8" in text and "features: a, b, c, d, e, f" in text
    assert "for example recipe=" in text
    suite = ElementTree.fromstring(junit(made())).find("testsuite")
    values = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert values["verdict"].endswith(CLAUSE) and "recipe=" in values["hint"]
    assert values["not tested"].endswith("workers 8; features 6 of 9")


@pytest.mark.parametrize(
    ("operations", "hints"),
    [
        (("block-forward",), 1),
        (("block-forward", "block-backward", "merge"), 1),
        (("ring-backward", "block-forward"), 0),
        (("merge",), 0),
    ],
)
def test_a_target_of_single_blocks_is_referred_to_explain(operations, hints):
    """No readout is a single block, so that check cannot say what a block computes."""
    found = coverage_of(Capabilities(operations), []).hints
    assert len(found) == hints
    assert all("ringspec explain" in hint for hint in found)
