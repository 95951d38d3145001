"""A badge claims no more than its report shows."""

import json

import pytest
from click.testing import CliRunner
from conformance.report.reports import HOSTILE, TARGET, report

from ringspec.cli import main
from ringspec.conformance.report.badge import LONGEST, badge
from ringspec.conformance.report.records import FAILURES, OUTCOMES, Record
from ringspec.conformance.report.report import Report, ReportWriter, make_header

WHOLE = {"versions": {"python": "3.11", "ringspec": "0.1.0", "torch": "2.13.0"}}


def of(*outcomes, complete=True, profile_cases=None, **header):
    records = [Record(f"ring/{n}", outcome) for n, outcome in enumerate(outcomes)]
    count = len(records) if profile_cases is None else profile_cases
    started = {"started": "2026-11-26T07:15:00+00:00", "cases": {"profile": count}}
    return badge(report(records, complete, **WHOLE | started | header))


def saved(path, *records, footer=True, complete=True, **header):
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        head = make_header(TARGET, spec="mine.py:target", profile="core") | header
        writer = ReportWriter(stream, head)
        for record in records:
            writer(record)
        if footer:
            writer.finish(complete)
    return path


def run(*words):
    return CliRunner().invoke(main, ["badge", *map(str, words)])


def test_it_counts_the_cases_that_passed_of_those_claimed_and_names_profile_versions_and_day():
    assert of("pass", "pass", "not claimed") == {
        "schemaVersion": 1,
        "label": "ringspec 0.1.0 core",
        "message": "2 of 2 cases passed, torch 2.13.0, 2026-11-26",
        "color": "brightgreen",
    }


@pytest.mark.parametrize("outcome", FAILURES)
def test_every_failure_makes_it_red(outcome):
    found = of("pass", outcome)
    assert found["color"] == "red" and found["message"].startswith("1 of 2 cases passed,")


def test_expected_failures_are_counted_and_never_green():
    found = of("pass", "expected failure")
    assert found["message"].startswith("1 of 2 cases passed, 1 known failure,")
    assert found["color"] == "yellow"


def test_it_is_green_only_if_nothing_but_passes_and_unclaimed_cases_are_in_the_report():
    for outcome in OUTCOMES:
        green = of("pass", outcome)["color"] == "brightgreen"
        assert green == (outcome in ("pass", "not claimed")), outcome


def test_an_interrupted_report_is_incomplete():
    for found in (of("pass", "not run"), of("pass", complete=False)):
        assert found["message"].startswith("incomplete: 1 of 1 cases passed so far")
        assert found["color"] == "lightgrey"


def test_a_report_in_which_no_case_was_executed_shows_no_success():
    assert of("not claimed")["message"].startswith("no case was executed")
    assert of("not claimed")["color"] == of()["color"] == "lightgrey"


def test_a_part_of_a_profile_is_not_called_the_profile():
    assert of("pass", profile_cases=2)["label"] == "ringspec 0.1.0 part of core"
    assert of("pass", cases={})["label"] == "ringspec 0.1.0 part of core"


def test_the_versions_that_the_calls_used_replace_those_of_the_header():
    whole = report([Record("a", "pass")], **WHOLE)
    later = Report(whole.header, whole.records, whole.footer | {"versions": {"torch": "2.14.0"}})
    assert "torch 2.14.0" in badge(later)["message"]


def test_texts_are_short_and_have_no_control_characters():
    found = of("pass", versions={"ringspec": HOSTILE, "x": "y" * 500}, profile=HOSTILE)
    for name in ("label", "message"):
        assert found[name].isprintable() and len(found[name]) <= LONGEST
    assert json.loads(json.dumps(found)) == found


def test_the_command_writes_the_same_to_stdout_and_to_a_file_which_it_replaces(tmp_path):
    path = saved(tmp_path / "r.jsonl", Record("a", "pass"))
    shown = run(path)
    (tmp_path / "badge.json").write_text("old")
    written = run(path, "-o", tmp_path / "badge.json")
    assert (shown.exit_code, written.exit_code, written.output) == (0, 0, "")
    assert (tmp_path / "badge.json").read_text() == shown.output
    assert json.loads(shown.output)["color"] == "brightgreen"


@pytest.mark.parametrize("cut", [0, 1, 30])
def test_a_file_that_ends_early_even_within_a_line_is_incomplete(tmp_path, cut):
    path = saved(tmp_path / "r.jsonl", Record("a", "pass"), Record("b", "pass"), footer=False)
    path.write_bytes(path.read_bytes()[: -cut or None])
    assert json.loads(run(path).output)["message"].startswith("incomplete: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no report\n", "a JSON object in line 1"),
        ("", "a header in the first line"),
        ('{"kind": "case", "id": "a", "outcome": "pass"}\n', "a header in the first line"),
    ],
)
def test_another_file_is_refused_in_a_sentence(tmp_path, content, message):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    result = run(path, "-o", tmp_path / "badge.json")
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    assert not (tmp_path / "badge.json").exists()


@pytest.mark.parametrize("cases", [{"profile": -1}, {"profile": "many"}, {"profile": 1.5}, [3]])
def test_a_count_of_cases_that_is_none_is_refused(tmp_path, cases):
    path = saved(tmp_path / "r.jsonl", Record("a", "pass"), cases=cases)
    assert run(path).exit_code == 2


@pytest.mark.parametrize("started", ["yesterday", "", "2026-13-01T00:00:00"])
def test_a_report_without_a_date_is_refused(tmp_path, started):
    path = saved(tmp_path / "r.jsonl", Record("a", "pass"), started=started)
    result = run(path)
    assert result.exit_code == 2 and "date" in result.output


def test_a_missing_report_and_a_missing_folder_are_refused(tmp_path):
    assert run(tmp_path / "none.jsonl").exit_code == 2
    path = saved(tmp_path / "r.jsonl", Record("a", "pass"))
    assert run(path, "-o", tmp_path / "no" / "badge.json").exit_code == 2
