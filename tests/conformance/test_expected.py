"""The list of expected failures is strict both ways."""

import pytest
from conformance import faulty_targets

from ringspec.conformance import golden
from ringspec.conformance.expected import expected_from, read_expected
from ringspec.conformance.runner import run
from ringspec.errors import FileFormatError, OptionError, UnknownNameError

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
    ],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(FileFormatError):
        expected_from(text)


def test_an_unknown_key_is_refused_with_the_known_one():
    with pytest.raises(UnknownNameError, match="reason"):
        expected_from(b'["a"]\nreasons = "why"')


def test_a_file_that_is_too_long_or_not_there_is_refused(tmp_path):
    (tmp_path / "long.toml").write_bytes(b"#" * (1 << 20) + b"#")
    for path in (tmp_path / "long.toml", tmp_path / "none.toml", tmp_path):
        with pytest.raises(FileFormatError):
            read_expected(path)
