"""The list of expected failures is strict both ways."""

from types import SimpleNamespace

import pytest
from conformance import faulty_targets
from refusals import refuses

from ringspec.conformance.cases import golden
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.words import record_text
from ringspec.conformance.run.expected import Expectation, Several, expected_from, read_expected
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.errors import FileFormatError, OptionError

IDS = ("ring/float32-zigzag-w4", "attention/float32", "ring/float64-w3")
CASES = [case for case in golden.cases("core") if case.id in IDS]
LIST = b"""
["ring/float32-zigzag-w4"]
reason = "o of worker 1 has a NaN"
"""


def test_a_list_gives_reasons_by_id(tmp_path):
    (tmp_path / "list.toml").write_bytes(LIST)
    assert read_expected(tmp_path / "list.toml") == {
        "ring/float32-zigzag-w4": "o of worker 1 has a NaN"
    }


def outcomes(target, expected):
    summary = run(target, CASES, expected_failures=expected)
    return {record.id: record for record in summary.records}, summary


def test_a_listed_case_that_fails_is_an_expected_failure_and_the_run_succeeds():
    records, summary = outcomes(faulty_targets.nan, expected_from(LIST))
    record = records["ring/float32-zigzag-w4"]
    assert record.outcome == "expected failure" and record.reason == "o of worker 1 has a NaN"
    assert record.message.startswith("mismatch: o of worker 1")
    assert summary.exit_code == 0 and summary.counts["pass"] == 1


def test_a_listed_case_that_passes_is_a_failure():
    records, summary = outcomes(faulty_targets.right, expected_from(LIST))
    assert records["ring/float32-zigzag-w4"].outcome == "unexpected pass"
    assert summary.exit_code == 1


def test_unknown_ids_and_cases_that_are_not_claimed_are_refused():
    with pytest.raises(OptionError, match="ring/float32-zigzag-w4"):
        run(faulty_targets.right, CASES, expected_failures={"ring/float32-zigzag-w5": "why"})
    with pytest.raises(OptionError, match="not claimed"):
        run(faulty_targets.right, CASES, expected_failures={"ring/float64-w3": "why"})


@pytest.mark.parametrize(
    "text",
    [
        b"[a",
        b"\xff",
        b'a = "why"',
        b'["a"]',
        b'["a"]\nreason = ""',
        b'["a"]\nreason = 3',
        b'["a"]\nreason = "why"\n["a"]\nreason = "twice"',
        b"a = " + b"[" * 5000,
        b'["a*"]\nreason = "no count"',
        b'["a*"]\nreason = "why"\ncount = 0',
        b'["a*"]\nreason = "why"\ncount = true',
        b'["a?"]\nreason = "why"\ncount = "2"',
        b'["a*"]\ncount = 2',
        b'["a"]\nreason = "why"\ncount = 1',
    ],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(FileFormatError):
        expected_from(text)


def test_an_unknown_key_is_refused_with_the_known_one():
    with refuses((OptionError, "unknown-name"), match="reason"):
        expected_from(b'["a"]\nreasons = "why"')


def test_a_file_that_is_too_long_or_not_there_is_refused(tmp_path):
    (tmp_path / "long.toml").write_bytes(b"#" * (1 << 20) + b"#")
    for path in (tmp_path / "long.toml", tmp_path / "none.toml", tmp_path):
        with pytest.raises(FileFormatError):
            read_expected(path)


# Patterns


def test_a_pattern_has_a_count_and_a_reason():
    text = b'["ring/zigzag-*"]\ncount = 12\nreason = "the last chunk is lost"'
    assert expected_from(text) == {"ring/zigzag-*": Several(12, "the last chunk is lost")}


def of_pattern(listed, outcomes):
    """Outcomes after the list was held against cases a/0, a/1, ... and one that no entry names."""
    target = SimpleNamespace(capabilities=Capabilities())
    ids = [f"a/{n}" for n in range(len(outcomes))]
    cases = [RunCase(id, "", needs("contiguous"), None, None) for id in [*ids, "b/0"]]
    cases.append(RunCase("a/unclaimed", "", needs("zigzag"), None, None))
    expectation = Expectation(listed, target, cases)
    assert expectation.settle(Record("b/0", "mismatch")).outcome == "mismatch"
    return [
        expectation.settle(Record(id, outcome, message="wrong"))
        for id, outcome in zip(ids, outcomes, strict=True)
    ]


def needs(layout):
    return {"operation": "ring", "passes": ("forward",), "layout": layout}


FAIL, PASS, KNOWN, UNEXPECTED = "mismatch", "pass", "expected failure", "unexpected pass"


@pytest.mark.parametrize(
    ("outcomes", "settled"),
    [
        ([FAIL, FAIL, PASS], [KNOWN, KNOWN, PASS]),
        ([PASS, FAIL, "timeout"], [PASS, KNOWN, KNOWN]),
        ([FAIL, PASS, PASS], [KNOWN, PASS, UNEXPECTED]),
        ([PASS, PASS, PASS], [PASS, UNEXPECTED, UNEXPECTED]),
        ([FAIL, FAIL, FAIL], [KNOWN, KNOWN, FAIL]),
        ([FAIL, FAIL, "crash"], [KNOWN, KNOWN, "crash"]),
        ([FAIL, FAIL, "not run"], [KNOWN, KNOWN, "not run"]),
    ],
)
def test_exactly_the_count_of_a_pattern_may_and_must_fail(outcomes, settled):
    records = of_pattern({"a/*": Several(2, "known")}, outcomes)
    assert [record.outcome for record in records] == settled
    for record in records:
        if record.outcome == KNOWN:
            assert record.reason == "known" and record.message.endswith(": wrong")
        if record.outcome == UNEXPECTED:
            assert record.reason == "known"
            assert record.message == "2 of the 3 cases a/* are expected to fail"
        if record.outcome in (FAIL, "crash"):
            assert record.reason == "failure 3 of a/*, where 2 are expected"
            assert record.message == "wrong" and record.reason in record_text(record)


def test_where_all_cases_of_a_pattern_must_fail_each_that_passes_is_a_failure():
    for passing in range(3):
        outcomes = [PASS if n == passing else FAIL for n in range(3)]
        settled = [one.outcome for one in of_pattern({"a/*": Several(3, "known")}, outcomes)]
        assert settled == [UNEXPECTED if n == passing else KNOWN for n in range(3)]


def test_a_part_of_the_cases_of_a_pattern_fails_only_where_the_count_cannot_be_met():
    """Two of a/0 to a/3 are expected to fail."""
    target = SimpleNamespace(capabilities=Capabilities())
    cases = [RunCase(f"a/{n}", "", needs("contiguous"), None, None) for n in range(4)]
    for outcomes, settled in (
        ([PASS, PASS], [PASS, PASS]),
        ([FAIL], [KNOWN]),
        ([PASS, PASS, PASS], [PASS, PASS, UNEXPECTED]),
    ):
        held = Expectation({"a/?": Several(2, "known")}, target, cases)
        records = [Record(f"a/{n}", outcome) for n, outcome in enumerate(outcomes)]
        assert [held.settle(record).outcome for record in records] == settled


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        ({"c/*": Several(1, "why")}, "name cases of this profile; got 'c/"),
        ({"*/unclaimed": Several(1, "why")}, "none is claimed .a/unclaimed: layout zigzag"),
        ({"a/*": Several(4, "why")}, "a count of at most 3 for a/"),
        ({"a/*": Several(2, "why"), "a/1": "other"}, "a/1 in 'a/.' and in 'a/1'"),
        ({"a/[01]": Several(2, "why"), "a/[12]": Several(2, "why")}, "a/1 in 'a/.01.' and in"),
    ],
)
def test_a_pattern_that_cannot_hold_is_refused_before_the_run(listed, says):
    with pytest.raises(OptionError, match=says):
        of_pattern(listed, [FAIL, FAIL, PASS])


def test_a_run_with_a_pattern_succeeds_with_exactly_its_count():
    """Two cases match; the target fails the one with several workers."""
    for count, code in ((1, 0), (2, 1)):
        listed = {"*/float32*": Several(count, "o of worker 1 has a NaN")}
        summary = run(faulty_targets.nan, CASES, expected_failures=listed)
        assert summary.exit_code == code, summary.records
        assert ("unexpected pass" in summary.counts) is (code == 1)
