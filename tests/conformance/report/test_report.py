"""Reports: JSON Lines written and read back, what is refused, JUnit XML, and the words of a failure."""

import io
import json
import math
import random
from xml.etree import ElementTree

import pytest
from conformance.report.reports import (
    HOSTILE,
    LINK,
    STALE,
    TARGET,
    diagnosed_records,
    findings,
    needs,
    records,
    report,
)

from ringspec.conformance.report.junit import junit
from ringspec.conformance.report.lines import read_record
from ringspec.conformance.report.records import FAILURES, OUTCOMES, Finding, Record
from ringspec.conformance.report.report import (
    ReportWriter,
    case_line,
    counts_of,
    headline,
    make_header,
    read_report,
    report_from,
    report_lines,
)
from ringspec.conformance.report.words import record_text
from ringspec.conformance.run.suite import Summary
from ringspec.errors import FileFormatError


def written(of=None, complete=True):
    """The bytes of a report as a run writes them."""
    stream = io.StringIO()
    chosen = report(of, complete)
    writer = ReportWriter(stream, chosen.header)
    for record in chosen.records:
        writer(record)
    writer.finish(complete)
    return stream.getvalue().encode()


def changed(line, **fields):
    """A written report with other fields in one line."""
    lines = written().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | fields).encode()
    return b"\n".join(lines) + b"\n"


def test_a_report_is_read_back_as_it_was_written():
    data = written()  # once: it holds the time of day
    chosen = report_from(data, "memory")
    assert report_lines(chosen) == [json.loads(line) for line in data.splitlines()]
    assert [record.id for record in chosen.records] == [record.id for record in records()]
    assert chosen.records[1:] == records_as_lists()[1:]
    assert chosen.complete


def records_as_lists():
    """The records as JSON keeps them: lists in needs, which has no tuples here."""
    return tuple(records())


def test_numbers_that_json_does_not_have_come_back_as_numbers():
    strange = Finding("o", 0, "NaN", math.inf, (0, 0, 0, 0), math.nan, -math.inf, 1, 1)
    data = written([Record("a", "mismatch", needs(), findings=(strange,))])
    assert b"NaN," not in data.replace(b'"NaN",', b"") and b"Infinity," not in data.replace(
        b'Infinity",', b""
    )
    [record] = report_from(data, "memory").records
    [found] = record.findings
    assert math.isnan(found.got) and found.error == math.inf and found.want == -math.inf


def test_a_report_without_a_footer_is_no_complete_report():
    data = b"\n".join(written().splitlines()[:-1]) + b"\n"
    with pytest.raises(FileFormatError, match="footer"):
        report_from(data, "memory")
    partial = report_from(data, "memory", partial=True)
    assert not partial.complete and len(partial.records) == len(records())


@pytest.mark.parametrize("cut", range(1, 2000, 97))
def test_a_cut_report_is_refused_and_read_only_where_it_may_be_partial(cut):
    data = written()[:-cut]
    with pytest.raises(FileFormatError):
        report_from(data, "memory")
    assert not report_from(data, "memory", partial=True).complete


def test_an_interrupted_run_leaves_a_report_that_is_not_complete():
    of = [Record("a", "pass", needs()), Record("b", "not run", needs())]
    chosen = report_from(written(of, complete=True), "memory")
    assert chosen.footer["complete"] is False and not chosen.complete
    assert chosen.footer["headline"] == "passed 1 of 1 claimed, 0 not claimed; 1 not run"


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (0, {"format": "ringspec-report-9"}),
        (0, {"kind": "case"}),
        (0, {"target": "a"}),
        (1, {"outcome": "fine"}),
        (1, {"kind": "header"}),
        (1, {"surplus": 1}),
        (1, {"id": 5}),
        (1, {"id": "merge/two"}),
        (1, {"seconds": "fast"}),
        (1, {"seconds": True}),
        (1, {"findings": [{"tensor": "o", "worker": 0}]}),
        (1, {"findings": [{"tensor": "o", "worker": 0.5, "kind": "ok"}]}),
        (1, {"findings": [{"tensor": "o", "worker": 0, "kind": "ok", "error": []}]}),
        (1, {"findings": [{"tensor": "o", "worker": 0, "kind": "ok", "where": {}}]}),
        (1, {"findings": 7}),
        (1, {"picture": [1]}),
        (1, {"message": "x" * (1 << 21)}),
        (-1, {"complete": "yes"}),
        (-1, {"summary": {"pass": 99}}),
        (-1, {"headline": "passed everything"}),
    ],
)
def test_a_report_that_is_none_or_contradicts_itself_is_refused(line, fields):
    with pytest.raises(FileFormatError):
        report_from(changed(line, **fields), "memory")


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"{", b"\xff", b'{"a":1,"a":2}', b'{"seconds": NaN}', b"[" * 100_000, b"1" * 5000],
)
def test_a_line_that_is_no_json_object_is_refused(line):
    lines = written().splitlines()
    lines[2] = line
    with pytest.raises(FileFormatError):
        report_from(b"\n".join(lines) + b"\n", "memory")


def test_random_damage_is_refused_or_harmless():
    data, drawn = written(), random.Random(4)
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(drawn.randint(1, 3)):
            damaged[drawn.randrange(len(data))] = drawn.randrange(256)
        try:
            chosen = report_from(bytes(damaged), "memory")
        except FileFormatError:
            continue
        assert all(record.outcome in OUTCOMES for record in chosen.records)


def test_a_missing_cases_line_is_seen_by_the_footer():
    lines = written().splitlines()
    with pytest.raises(FileFormatError, match="footer"):
        report_from(b"\n".join(lines[:3] + lines[4:]) + b"\n", "memory")


def test_a_report_file_that_is_too_long_is_refused_unread(tmp_path):
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(FileFormatError, match="at most"):
        read_report(path)


def test_a_report_is_plain_ascii_whatever_a_target_is_called(tmp_path):
    target = type(TARGET)(**vars(TARGET) | {"name": "k\u00e9rnel \ud800 " + HOSTILE})
    stream = io.StringIO()
    writer = ReportWriter(stream, make_header(target, spec=HOSTILE, profile="core"))
    writer(Record("a", "error", needs(), message=HOSTILE + "\ud800"))
    writer.finish(complete=True)
    path = tmp_path / "report.jsonl"
    path.write_text(stream.getvalue(), encoding="ascii")
    assert read_report(path).records[0].message == HOSTILE + "\ud800"


@pytest.mark.parametrize("outcome", FAILURES)
def test_any_failure_makes_a_run_fail(outcome):
    assert Summary((Record("a", "pass"), Record("b", outcome))).exit_code == 1


def test_nothing_executed_is_no_success():
    assert Summary(()).exit_code == Summary((Record("a", "not claimed"),)).exit_code == 3
    assert "no case was executed" in headline({"not claimed": 5})


def test_junit_counts_every_case_and_names_the_outcome():
    suite = ElementTree.fromstring(junit(report())).find("testsuite")
    counts = counts_of(records())
    assert int(suite.get("tests")) == len(records()) == len(suite.findall("testcase"))
    assert int(suite.get("failures")) == counts["mismatch"]
    assert int(suite.get("errors")) == counts["crash"] + counts["timeout"]
    assert int(suite.get("skipped")) == counts["not claimed"] + counts["expected failure"]
    [first] = [case for case in suite if case.get("name") == "ring/zigzag-causal-w4"]
    failure = first.find("failure")
    assert failure.get("type") == "mismatch"
    assert "dk of worker 2: 37 of 64 rows beyond their bound" in failure.text


def test_junit_messages_and_properties_name_the_bug():
    suite = ElementTree.fromstring(junit(report(diagnosed_records()))).find("testsuite")
    messages = {
        case.get("name"): case[0].get("message") for case in suite.iter("testcase") if len(case)
    }
    bug = f"{STALE['title']} [stale-keys]"
    where = "dk of worker 2: 37 of 64 rows beyond their bound"
    assert messages["ring/a"].startswith(f"ring/a: mismatch: {where}")
    assert messages["ring/a"].endswith(f"; diagnosis: {bug}")
    assert messages["ring/c"].endswith(f"; most failures of this run: {bug}")
    assert messages["ring/d"] == "ring/d: crash: worker 1 was ended by SIGSEGV"
    assert not any("\n" in message for message in messages.values())
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert properties["diagnosis"].splitlines() == [
        f"{bug}, in 2 of the 2 diagnosed failures",
        f"  {LINK}",
    ]
    plain = ElementTree.fromstring(junit(report())).find("testsuite")
    assert "diagnosis" not in {one.get("name") for one in plain.iter("property")}


def test_the_lines_for_a_page_have_the_verdict_before_the_footer_and_the_file_has_not():
    chosen = report(diagnosed_records())
    *_, verdict, footer = report_lines(chosen)
    assert verdict["kind"] == "verdict" and footer["kind"] == "footer"
    assert verdict["lines"][0].startswith(f"diagnosis: {STALE['title']} [stale-keys], in 2 of")
    assert not [one for one in report_lines(report()) if one["kind"] == "verdict"]


@pytest.mark.parametrize(
    "diagnosis",
    [{"id": 3}, {"id": "a"}, {"id": ["a"], "title": "A"}, {"title": 3}, {"alike": "ab"}, {"alike": [3]},
     {"links": {}}, {"must_fail": []}, {"must_fail": {"a": "ab"}}, {"text": None}],
)  # fmt: skip
def test_a_diagnosis_of_another_form_is_refused(diagnosis):
    line = case_line(Record("ring/a", "mismatch", needs())) | {"diagnosis": diagnosis}
    with pytest.raises(FileFormatError):
        read_record(line, "line 2")
    assert read_record(line | {"diagnosis": STALE}, "line 2").diagnosis == STALE


def test_junit_of_an_incomplete_run_has_an_error_of_its_own():
    whole = ElementTree.fromstring(junit(report())).find("testsuite")
    cut = ElementTree.fromstring(junit(report(complete=False))).find("testsuite")
    assert int(cut.get("errors")) == int(whole.get("errors")) + 1


def test_junit_holds_hostile_text_as_text():
    of = [Record(HOSTILE, "crash", needs(), message=HOSTILE + "]]>\ud800\uffff")]
    suite = ElementTree.fromstring(junit(report(of)).encode("utf-8", "strict")).find("testsuite")
    [case] = suite.findall("testcase")
    assert case.get("name").startswith("</script>") and len(case) == 1
    assert "onerror=alert(1)" in case.find("error").text and not case.find("error").findall("*")


def test_a_failure_is_told_with_tensor_worker_and_place():
    text = record_text(records()[0])
    assert "dk of worker 2: 37 of 64 rows beyond their bound" in text
    assert "batch 0, head 1, slot 5, d 3: got 0.53, want 0.12 (412 times the bound)" in text
    assert "dv of worker 3: 1 of 24 rows with NaN" in text


def test_many_failing_tensors_are_counted_and_not_all_listed():
    wrong = [Finding(name, n, "NaN") for name in ("o", "lse", "dq", "dk", "dv") for n in range(64)]
    text = record_text(Record("a", "mismatch", needs(workers=64), findings=findings(wrong, 64)))
    assert len(text.splitlines()) == 10 and "and 312 more" in text
