"""The GitHub action: its step keeps the reports, shows the verdict, and fails where it says so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = """
from ringspec.conformance.targets.reference import reference_float64 as good

class Wrong:
    name, notes, capabilities = "wrong", (), good.capabilities

    def run(self, call):
        result = good.run(call)
        result.o = [2 * x for x in result.o]
        return result

wrong = Wrong()
"""


@pytest.fixture
def step(root, tmp_path):
    """A function that runs the step of the action in a folder with two targets; returns its exit status and summary."""
    (tmp_path / "mine.py").write_text(TARGETS)

    def run(name, baseline="", folder="reports"):
        summary = tmp_path / "summary.md"
        summary.write_text("")
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TARGET": f"mine.py:{name}",
            "PROFILE": "smoke",
            "ARGUMENTS": "--only attention/plain --timeout 0",
            "BASELINE": baseline,
            "FOLDER": folder,
            "GITHUB_STEP_SUMMARY": str(summary),
        }
        script = root / ".github" / "actions" / "check" / "run.sh"
        done = subprocess.run(
            ["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2 or not done.stderr, done.stderr
        return done.returncode, summary.read_text()

    return run


def test_the_step_keeps_all_reports_and_with_a_baseline_fails_only_where_a_case_is_worse(
    step, tmp_path
):
    code, summary = step("good", folder="right")
    assert code == 0 and "passed 1 of 1 claimed" in summary
    names = {"report.jsonl", "report.xml", "report.html", "verdict.txt", "badge.json"}
    assert {path.name for path in (tmp_path / "right").iterdir()} == names
    code, summary = step("wrong", baseline="right/report.jsonl", folder="wrong")
    assert code == 1 and summary.count("```text") == 2 and "attention/plain" in summary
    assert step("wrong", baseline="wrong/report.jsonl")[0] == 0


@pytest.mark.slow
def test_without_a_baseline_the_step_fails_where_a_case_fails(step):
    assert step("wrong")[0] == 1


def test_a_target_that_is_not_there_fails_with_or_without_a_baseline(step):
    assert step("nothing")[0] == step("nothing", baseline="old/report.jsonl")[0] == 2


def test_the_action_passes_every_variable_that_its_step_reads(root):
    folder = root / ".github" / "actions" / "check"
    action, script = ((folder / name).read_text("utf-8") for name in ("action.yml", "run.sh"))
    read = set(re.findall(r"\$\{?([A-Z]{2,})\b", script)) - {"PIPESTATUS"}
    passed = set(re.findall(r"^        ([A-Z]+): ", action, re.M))
    assert read <= passed and len(read) == 5
    declared = action.split("\nruns:")[0]
    inputs = set(re.findall(r"^  ([a-z]+):$", declared, re.M))
    assert set(re.findall(r"inputs\.([a-z]+)", action)) == inputs
