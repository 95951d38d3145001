"""The examples of "test your kernel in ten minutes" print what the page shows, and pass what they claim."""

import os
import re
import shlex
import sys
from doctest import ELLIPSIS, OutputChecker
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspec.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "conform" / "index.md"


def transcripts():
    """What the console blocks of the page print, by command; those without output are left out."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    shown = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", "".join(blocks), re.M)
    return {command: printed for command, printed in shown if printed}


SHOWN = transcripts()
MARKS = {
    "docs/conform/example_numpy.py:target": (),
    "docs/conform/example_torch.py:target": pytest.mark.torch,
    "docs/conform/example_jax.py:target": pytest.mark.jax,
    "docs/conform/example_nki.py:target": pytest.mark.slow,
    "cmd:python docs/examples/naive_ring.py": pytest.mark.slow,
}


def ringspec(*arguments):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def without_errors(shown):
    """Leave out a kernel's own errors: they differ between processors, and so between BLAS kernels."""
    return re.sub(r"(largest error in units of the bound: ).*", r"\1...", shown)


@pytest.fixture
def at_the_root(monkeypatch):
    """As a reader would be: in the checkout, and `python` is the one that has NumPy."""
    monkeypatch.chdir(ROOT)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    monkeypatch.setenv("PATH", path)


@pytest.mark.usefixtures("at_the_root")
@pytest.mark.parametrize(
    "target", [pytest.param(target, marks=marks) for target, marks in MARKS.items()]
)
def test_an_example_prints_what_the_page_shows_and_passes(target):
    command = f"ringspec smoke {shlex.quote(target)}"
    printed = ringspec(*shlex.split(command)[1:])
    assert OutputChecker().check_output(without_errors(SHOWN[command]), printed, ELLIPSIS), printed
    passed, claimed = printed.splitlines()[-1].split()[1:4:2]
    assert passed == claimed and int(claimed) >= 2


def test_every_transcript_of_the_page_is_run_here():
    smoked = {command for command in SHOWN if command.startswith("ringspec smoke ")}
    assert smoked == {f"ringspec smoke {shlex.quote(target)}" for target in MARKS}


@pytest.mark.usefixtures("at_the_root")
def test_the_nki_example_passes_one_case():
    case = "kernel-shape/float32-causal-w2"
    printed = ringspec("replay", "docs/conform/example_nki.py:target", case)
    assert printed.splitlines()[-1].startswith("passed 1 of 1 claimed")
