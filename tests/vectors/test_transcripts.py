"""What the page on golden vectors shows of a terminal is what the programs print."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

import ringspec.cli
from ringspec.vectors import open_set

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs" / "examples" / "check_case.c"
PAGES = ("docs/vectors/use.md",)


def transcripts(page):
    """(command, what it prints) of the console blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.S)
    return [
        (command, printed)
        for block in blocks
        for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
    ]


SHOWN = [(page, *found) for page in PAGES for found in transcripts(page)]


def shown(program):
    chosen = [found for found in SHOWN if found[1].startswith(f"{program} ")]
    names = [f"{page}: {command}" for page, command, _ in chosen]
    return pytest.mark.parametrize(("page", "command", "printed"), chosen, ids=names)


def test_every_command_that_is_shown_is_run_here():
    assert {command.split()[0] for _, command, _ in SHOWN} == {"ringspec", "check_case"}
    assert {page for page, _, _ in SHOWN} == set(PAGES)


@shown("ringspec")
def test_ringspec_prints_what_the_page_shows(page, command, printed):
    done = CliRunner().invoke(ringspec.cli.main, shlex.split(command)[1:])
    assert (done.exit_code, done.stdout) == (0, printed)


@pytest.mark.external("cc")
@shown("check_case")
def test_the_c_program_prints_what_the_page_shows(tmp_path, page, command, printed):
    program = tmp_path / "check_case"
    subprocess.run(["cc", "-std=c99", "-O2", "-o", str(program), str(SOURCE)], check=True)
    core = open_set("core")
    shutil.copytree(
        core.path / "ring" / "zigzag-causal-w4", tmp_path / "core/ring/zigzag-causal-w4"
    )
    # As the page says: the dk of workers 1 and 2 have changed places.
    dk = core.tensors("ring/zigzag-causal-w4")["out.dk.bfloat16"][[0, 2, 1, 3]]
    (tmp_path / "dk.bin").write_bytes(dk.tobytes())
    arguments = [str(program), *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, printed, "")
