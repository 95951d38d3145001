"""The scripts of .ci: their helpers do what they say, and every leg is there."""

import doctest
import importlib.util
import re
import shutil
import subprocess

import pytest


@pytest.mark.parametrize("name", ["add_up", "blas_matrix", "readme_commands", "wheel_files"])
def test_the_examples_of_a_helper_hold(root, name):
    spec = importlib.util.spec_from_file_location(name, root / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert doctest.testmod(module).failed == 0


def test_every_leg_has_its_script(root):
    text = (root / ".ci" / "run").read_text(encoding="utf-8")
    (legs,) = re.findall(r"ALL_LEGS=\((.*)\)", text)
    scripts = {path.stem for path in (root / ".ci" / "legs").iterdir()}
    assert {leg for leg in legs.split() if leg not in ("torch", "jax", "mpi")} | {
        "marked"
    } == scripts


def test_ci_run_is_executable(root):
    assert (root / ".ci" / "run").stat().st_mode & 0o111


def test_every_shell_script_is_well_formed_and_stops_at_the_first_error(root):
    if shutil.which("bash") is None:
        pytest.skip("bash is not on the path")
    for script in [root / ".ci" / "run", *(root / ".ci" / "legs").iterdir()]:
        assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
        subprocess.run(["bash", "-n", str(script)], check=True)
