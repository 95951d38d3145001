"""The commands of README.md: the two for set-up, which .ci/run takes from it, and what the others print."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

import ringspec.cli

SETUP = "python3 -m venv .venv && . .venv/bin/activate && python -m pip install "
COMMANDS = [
    SETUP + ". && ringspec simulate --workers 4",
    SETUP + '-e ".[test]" && python -m pytest',
]


@pytest.fixture(scope="module")
def commands(root):
    spec = importlib.util.spec_from_file_location("c", root / ".ci" / "readme_commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def readme(root):
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [1, 2])
def test_ci_takes_this_command_out_of_the_readme(root, number):
    script = root / ".ci" / "readme_commands.py"
    command = [sys.executable, str(script), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (COMMANDS[number - 1] + "\n", "")


def test_the_readme_makes_an_environment_in_no_other_way(readme):
    lines = [line for line in readme.splitlines() if "-m venv" in line or "pip install" in line]
    assert lines == COMMANDS


def test_the_readme_shows_what_its_commands_print(root, readme, commands, monkeypatch):
    monkeypatch.chdir(root)
    shown = commands.transcripts(readme)
    assert len(shown) == readme.count("```console")
    for command, printed in shown:
        done = CliRunner().invoke(ringspec.cli.main, shlex.split(command)[1:])
        assert commands.agrees(printed, done.stdout), done.stdout
        assert not commands.agrees(printed, done.stdout.replace("dkv-not-home", "stale-keys"))


def test_ci_runs_every_command_of_the_readme_but_the_tests(readme, commands):
    script = commands.script(readme).splitlines()
    shown = [line for _, body in commands.blocks(readme) for line in body.splitlines()]
    for command in [
        line.removeprefix("$ ") for line in shown if re.match(r"(\$ )?ringspec ", line)
    ]:
        assert any(line.startswith(command) for line in script), command
    assert COMMANDS[0] in script and COMMANDS[1] not in script


def test_the_readme_is_short(readme):
    before_links = readme.partition("## Where to start")[0]
    prose = re.sub(r"```.*?```|^\|.*?$", "", before_links, flags=re.S | re.M)
    assert len(prose.split()) <= 700
    assert before_links.count("\n| [") == 3  # what was found in public implementations
