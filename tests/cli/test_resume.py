"""``ringspec check --resume``: a run that was interrupted goes on, and ends as it would have ended."""

import json

import pytest
from click.testing import CliRunner

from ringspec.cli import main
from ringspec.cli.commands import check_run
from ringspec.conformance.report.report import read_report

TARGETS = """
import dataclasses
import numpy as np
from ringspec.conformance.targets.reference import reference_float64 as good

class Counting:
    \"\"\"The reference with wrong dk in zigzag rings; writes a line for each call.\"\"\"

    name, notes = "counting", ()
    capabilities = dataclasses.replace(good.capabilities, workers=(1, 2))

    def run(self, call):
        with open("calls", "a") as calls:
            calls.write(f"{call.operation} {call.layout}\\n")
        result = good.run(call)
        if call.layout == "zigzag" and result.dk is not None:
            result.dk = [2 * np.asarray(x) for x in result.dk]
        return result

mine, other = Counting(), Counting()
other.capabilities = dataclasses.replace(mine.capabilities, workers=(1, 2, 3))
"""
ONLY = ("--only", "ring/*-causal-w2", "--only", "attention/plain")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_run, "Diagnoser", lambda: None)  # names no bug: seconds
    (tmp_path / "mine.py").write_text(TARGETS)
    return tmp_path


def check(*arguments, name="mine", code=1):
    words = ["check", f"mine.py:{name}", "--profile", "smoke", "--timeout", "0", *ONLY, *arguments]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output
    return result


def outcomes(path):
    return {record.id: record.outcome for record in read_report(path).records}


def calls(folder):
    """The calls since the last question."""
    found = (folder / "calls").read_text().splitlines()
    (folder / "calls").write_text("")
    return found


@pytest.mark.parametrize("torn", [b"", b'{"kind": "case", "id": "ri'], ids=["whole", "torn"])
def test_cases_that_passed_before_the_interruption_do_not_run_again(folder, torn):
    check("--report", "r.jsonl")
    every, all_calls = outcomes(folder / "r.jsonl"), calls(folder)
    lines = (folder / "r.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "r.jsonl").write_bytes(b"".join(lines[:3]) + torn)  # the header and two cases
    result = check("--report", "r.jsonl", "--resume")
    assert outcomes(folder / "r.jsonl") == every and len(every) >= 4
    passed = [json.loads(line)["outcome"] for line in lines[1:3]].count("pass")
    assert passed >= 1 and f"{passed} cases passed in r.jsonl" in result.stderr
    assert 0 < len(calls(folder)) < len(all_calls)
    assert not list(folder.glob("*.begun"))


def test_failures_run_again_and_count_once(folder):
    first = check("--report", "r.jsonl")
    calls(folder)
    again = check("--report", "r.jsonl", "--resume")
    assert first.stdout.splitlines()[-1] == again.stdout.splitlines()[-1]
    assert {line.split()[1] for line in calls(folder)} == {"zigzag"}
    (folder / "known.toml").write_text('["ring/zigzag-*"]\ncount = 1\nreason = "known"')
    for _ in range(2):
        check("--report", "r.jsonl", "--resume", "--expected-failures", "known.toml", code=0)


def test_without_a_file_the_run_begins(folder):
    result = check("--report", "new.jsonl", "--resume")
    assert "0 cases passed in new.jsonl" in result.stderr
    assert "pass" in outcomes(folder / "new.jsonl").values()


def test_the_report_of_another_target_is_refused_and_stays(folder):
    check("--report", "r.jsonl")
    before = (folder / "r.jsonl").read_bytes()
    result = check("--report", "r.jsonl", "--resume", name="other", code=2)
    assert "expected the same target in r.jsonl" in result.stderr.replace("\n", " ")
    assert "Fix: run without --resume" in result.stderr
    assert (folder / "r.jsonl").read_bytes() == before


def test_a_file_that_is_no_report_is_refused_and_stays(folder):
    (folder / "r.jsonl").write_text("notes\n")
    check("--report", "r.jsonl", "--resume", code=2)
    assert (folder / "r.jsonl").read_text() == "notes\n"


def test_resume_needs_the_report(folder):
    assert "--report FILE with --resume" in check("--resume", code=2).stderr
