"""The examples of "test your kernel in ten minutes" pass what they claim."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspec.cli import main

PAGE = Path(__file__).parents[2] / "docs" / "conform"


def passes(name):
    arguments = ["smoke", f"{PAGE / name}:target"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    passed, claimed = result.stdout.splitlines()[-1].split()[1:4:2]
    assert passed == claimed and int(claimed) >= 2


def test_the_numpy_example_passes():
    passes("example_numpy.py")


@pytest.mark.torch
def test_the_pytorch_example_passes():
    passes("example_torch.py")


@pytest.mark.jax
def test_the_jax_example_passes():
    passes("example_jax.py")
