"""What the tests of the project itself look at."""

import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def files() -> list[str]:
    """Paths of all files of the repository, whether committed yet or not, but no ignored ones."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout, so nothing says which files belong to it")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return sorted(name for name in listing.stdout.split("\0") if name and (ROOT / name).exists())
