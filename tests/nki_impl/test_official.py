"""The kernels on the official packages, which come from the vendor's index and may be absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nki_impl import lang

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "benchmarks" / "nki_official.py"


def run(backend: str) -> str:
    """What the program prints; a tensor outside the any-order level makes it fail."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "RINGSPEC_NKI": backend, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def needs(*distributions: str) -> None:
    for distribution in distributions:
        try:
            lang.check_package(distribution)
        except lang.BackendError as error:
            pytest.skip(f"not run: {error}")


def test_the_program_passes_on_the_bundled_simulator() -> None:
    printed = run("simulator").splitlines()
    assert len(printed) == 3 * 2 * 5 + 1
    assert printed[-1] == "rank 0: all within the any-order level (simulator)"


def test_one_rank_on_the_official_simulator() -> None:
    needs("nki")
    assert "all within the any-order level (nki-simulate)" in run("nki-simulate")


def test_one_rank_on_trainium() -> None:
    needs("nki", "neuronx-cc")
    pytest.importorskip("torch_xla", reason="not run: needs a Trainium instance with torch-neuronx")
    assert "all within the any-order level (device)" in run("device")
