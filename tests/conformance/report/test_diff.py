"""Two reports compared: what is worse, what is repaired, what else changed, and when no answer is given."""

import dataclasses
import json
import math

import pytest
from click.testing import CliRunner
from conformance.report.reports import HOSTILE, TARGET

from ringspec.cli import main
from ringspec.conformance.report.diff import compare, ratio
from ringspec.conformance.report.records import OUTCOMES, Finding, Record
from ringspec.conformance.report.report import (
    Report,
    ReportWriter,
    counts_of,
    footer_of,
    make_header,
)

HEADER = make_header(TARGET, spec="mine.py:target", profile="core")


def report(*records, **header):
    return Report(HEADER | header, records, footer_of(counts_of(records), True))


def finding(tensor, error, worker=0, kind="ok"):
    return Finding(
        tensor, worker, kind, error, (0, 0, 0, 0), 0.5, 0.25, 0 if kind == "ok" else 1, 4
    )


def passing(id, **errors):
    return Record(id, "pass", findings=tuple(finding(name, x) for name, x in errors.items()))


def failing(id, *tensors, bug=None):
    diagnosis = None if bug is None else {"id": bug, "title": bug, "text": bug}
    wrong = tuple(finding(name, 40.0, kind="beyond bound") for name in tensors)
    return Record(id, "mismatch", findings=wrong, diagnosis=diagnosis)


def saved(path, *records, complete=True, footer=True, **header):
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        writer = ReportWriter(stream, HEADER | header)
        for record in records:
            writer(record)
        if footer:
            writer.finish(complete)
    return path


def run(*words):
    return CliRunner().invoke(main, ["diff", *map(str, words)])


def ids(changes):
    return [one.id for one in changes]


@pytest.mark.parametrize("outcome", [x for x in OUTCOMES if x not in ("pass", "unexpected pass")])
def test_a_passed_case_that_no_longer_passes_is_worse_whatever_it_does_now(outcome):
    found = compare(report(Record("a", "pass")), report(Record("a", outcome)))
    assert ids(found.worse) == ["a"]
    assert not found.repaired and not found.changed


@pytest.mark.parametrize("outcome", [x for x in OUTCOMES if x not in ("pass", "unexpected pass")])
def test_a_case_that_did_not_pass_before_is_never_worse(outcome):
    for now in OUTCOMES:
        assert compare(report(Record("a", outcome)), report(Record("a", now))).worse == ()


def test_a_failure_that_passes_is_repaired_and_a_case_that_is_newly_claimed_is_not():
    old = report(failing("a", "dk"), Record("b", "expected failure"), Record("c", "not claimed"))
    new = report(Record("a", "pass"), Record("b", "unexpected pass"), Record("c", "pass"))
    found = compare(old, new)
    assert ids(found.repaired) == ["a", "b"]
    assert ids(found.changed) == ["c"]


def test_a_failure_in_other_tensors_or_with_another_bug_is_listed_and_the_same_failure_is_not():
    old = report(failing("a", "dk"), failing("b", "dv", bug="stale-keys"), failing("c", "o"))
    new = report(failing("a", "dk", "dv"), failing("b", "dv", bug="wrong-delta"), failing("c", "o"))
    found = compare(old, new)
    assert ids(found.failing) == ["a", "b"]
    assert found.failing[0].wrong == (("dk",), ("dk", "dv"))
    assert found.failing[1].diagnosis == ("stale-keys", "wrong-delta")
    assert found.same == 1


def test_cases_of_one_report_only_are_listed_and_never_worse(tmp_path):
    old = saved(tmp_path / "old", Record("a", "pass"), Record("b", "pass"))
    new = saved(tmp_path / "new", Record("a", "pass"), Record("c", "mismatch"))
    result = run(old, new)
    assert result.exit_code == 0, result.output
    assert "only in OLD: 1 case (1 pass)\n  b\n" in result.stdout
    assert "only in NEW: 1 case (1 mismatch)\n  c\n" in result.stdout


def test_an_error_is_listed_if_its_worst_worker_changed_by_more_than_the_factor():
    two = (finding("dk", 0.02), finding("dk", 0.10, worker=1))
    more = (finding("dk", 0.02), finding("dk", 0.35, worker=1))
    old = report(Record("a", "pass", findings=two), passing("b", o=0.10, lse=0.5))
    new = report(Record("a", "pass", findings=more), passing("b", o=0.19, lse=0.04))
    found = compare(old, new, 2.0)
    assert [(one.id, one.tensor, one.error) for one in found.figures] == [
        ("a", "dk", (0.10, 0.35)),
        ("b", "lse", (0.5, 0.04)),
    ]
    assert found.compared == 3
    assert found.worst == {"dk": (0.10, 0.35), "lse": (0.5, 0.04), "o": (0.10, 0.19)}
    assert ids(compare(old, new, 1.5).figures) == ["a", "b", "b"]


def test_errors_below_a_hundredth_of_the_bound_are_no_change():
    found = compare(report(passing("a", o=0.0, dq=1e-9)), report(passing("a", o=0.009, dq=1e-4)))
    assert found.figures == ()


def test_an_error_that_became_nan_or_infinite_is_an_infinite_change():
    for bad in (math.nan, math.inf):
        old = report(failing("a", "o"))
        new = report(
            dataclasses.replace(failing("a", "o"), findings=(finding("o", bad, 0, "NaN"),))
        )
        assert [one.ratio for one in compare(old, new).figures] == [math.inf]
    assert ratio(math.inf, 0.5) == 0.0


def test_versions_are_those_that_the_calls_used():
    changed = {"versions": HEADER["versions"] | {"torch": "2.12.0"}}
    old = report(Record("a", "pass"), **changed)
    new = report(Record("a", "pass"), **changed)
    new.footer["versions"] = {"torch": "2.13.0"}
    assert compare(old, new).versions == {"torch": ("2.12.0", "2.13.0")}


def test_the_text_says_what_is_worse_and_both_versions_and_the_exit_code_is_1(tmp_path):
    versions = HEADER["versions"] | {"torch": "2.13.0"}
    old = saved(tmp_path / "old", passing("a", o=0.02), passing("b", o=0.02))
    new = saved(
        tmp_path / "new",
        failing("a", "dk", bug="stale-keys"),
        passing("b", o=0.9),
        versions=versions,
    )
    result = run(old, new)
    assert result.exit_code == 1, result.output
    assert "versions: torch none -> 2.13.0\n" in result.stdout
    assert f"ringspec {versions['ringspec']}" in result.stdout
    assert "  a: pass -> mismatch; wrong: dk; diagnosis: stale-keys\n" in result.stdout
    assert "  b: o 0.02 -> 0.9 (45 times)\n" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith("1 worse, 0 repaired, 0 otherwise changed")
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_json_has_every_list_in_full(tmp_path):
    names = [f"ring/{n}" for n in range(50)]
    old = saved(tmp_path / "old", *(Record(id, "pass") for id in names))
    new = saved(tmp_path / "new", *(Record(id, "crash") for id in names))
    assert "and 30 more; --json lists all" in run(old, new).stdout
    result = run(old, new, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [one["id"] for one in found["worse"]] == names
    assert found["headline"].startswith("50 worse")


def test_two_equal_reports_are_the_same(tmp_path):
    both = saved(
        tmp_path / "x", passing("a", o=0.5), failing("b", "dk"), Record("c", "not claimed")
    )
    result = run(both, both)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(
        "0 worse, 0 repaired, 0 otherwise changed, 0 only in OLD, 0 only in NEW; 3 the same\n"
    )


def test_reports_without_a_common_case_are_bad_input(tmp_path):
    old, new = saved(tmp_path / "old", passing("a")), saved(tmp_path / "new", passing("b"))
    result = run(old, new)
    assert result.exit_code == 2
    assert "none of them in both" in result.stderr and result.stdout == ""


def test_a_report_that_ends_early_is_bad_input_and_an_interrupted_one_is_worse(tmp_path):
    old = saved(tmp_path / "old", passing("a"))
    cut = saved(tmp_path / "cut", passing("a"), footer=False)
    assert run(old, cut).exit_code == run(cut, old).exit_code == 2
    stopped = saved(tmp_path / "stopped", Record("a", "not run"), complete=False)
    result = run(old, stopped)
    assert result.exit_code == 1
    assert "the run was interrupted" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    "change",
    [
        {"target": {"spec": "x"}},
        {"target": {"name": ["x"], "spec": "x"}},
        {"profile": None},
        {"versions": {"torch": 2}},
        {"format": "ringspec-report-9"},
    ],
)
def test_a_damaged_header_is_bad_input(tmp_path, change):
    old = saved(tmp_path / "old", passing("a"))
    result = run(old, saved(tmp_path / "new", passing("a"), **change))
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_hostile_text_reaches_the_terminal_as_escapes(tmp_path):
    target = {"name": HOSTILE, "spec": HOSTILE, "notes": []}
    old = saved(tmp_path / "old", Record(HOSTILE, "pass"), target=target)
    new = saved(
        tmp_path / "new",
        Record(HOSTILE, "not claimed", reason=HOSTILE),
        target=target,
        versions={HOSTILE: HOSTILE},
        capabilities={HOSTILE: [HOSTILE]},
    )
    result = run(old, new)
    assert result.exit_code == 1, result.output
    assert "\x1b" not in result.stdout and "\x00" not in result.stdout
    assert json.loads(run(old, new, "--json").stdout)["worse"][0]["id"] == HOSTILE


def test_a_factor_that_is_no_number_above_1_is_bad_input(tmp_path):
    both = saved(tmp_path / "x", passing("a"))
    for factor in ("1", "0", "nan", "-2", "x"):
        assert run(both, both, "--factor", factor).exit_code == 2, factor
