"""The two set-up commands of the README, which are also what .ci/run takes from it."""

import subprocess
import sys

import pytest

COMMANDS = [
    "python3 -m venv .venv && .venv/bin/python -m pip install ."
    " && .venv/bin/ringspec simulate --workers 4",
    'python3 -m venv .venv && .venv/bin/python -m pip install -e ".[test]"'
    " && .venv/bin/python -m pytest",
]


@pytest.mark.parametrize("number", [1, 2])
def test_ci_takes_this_command_out_of_the_readme(root, number):
    script = root / ".ci" / "readme_commands.py"
    command = [sys.executable, str(script), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (COMMANDS[number - 1] + "\n", "")


def test_the_readme_makes_an_environment_in_no_other_way(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "-m venv" in line or "pip install" in line]
    assert lines == COMMANDS
