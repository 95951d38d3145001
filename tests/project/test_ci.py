"""The scripts of .ci: their helpers do what they say, and every leg is there."""

import doctest
import importlib.util
import re
import shutil
import subprocess
import sys

import pytest

HELPERS = (
    "add_up",
    "arrangements",
    "blas_matrix",
    "float_tests",
    "lowest",
    "readme_commands",
    "release",
    "wheel_files",
)


@pytest.fixture
def helper(root, monkeypatch):
    """A function that imports a file of .ci as a script there would be: its neighbours are on the path."""
    monkeypatch.syspath_prepend(root / ".ci")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, root / ".ci" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_every_helper_is_tested(root):
    assert {path.stem for path in (root / ".ci").glob("*.py")} == set(HELPERS)


@pytest.mark.parametrize("name", HELPERS)
def test_the_examples_of_a_helper_hold(helper, name):
    assert doctest.testmod(helper(name)).failed == 0


def test_the_tests_that_the_leg_floats_leaves_out_are_there_and_multiply_no_matrices(root, helper):
    """tests/exact and tests/vectors are left out whole: the leg vectors generates their truth.

    Only the files in PLANTED multiply matrices: their planted faults change results far more than roundings do.
    """
    floats = helper("float_tests")
    assert not {"tests/compare", "tests/fast", "tests/nki_impl"} & set(floats.LEFT_OUT)
    assert set(floats.REPEATED_WITH_THREADS) < set(floats.REPEATED)
    for name in (*floats.LEFT_OUT, *floats.REPEATED):
        assert (root / name).exists(), name
    for name in floats.LEFT_OUT:
        if name.endswith(".py"):
            products = re.findall(r" @ \w|matmul|einsum", (root / name).read_text("utf-8"))
            assert bool(products) == (name in floats.PLANTED), (name, products)


def test_an_arrangement_that_is_not_in_force_fails(helper):
    arrangements = helper("arrangements")
    wanted = arrangements.Arrangement("x", {}, "Nehalem", 1)
    assert not arrangements.faults(wanted, {"blas": [("Nehalem", 1)] * 2, "dispatch": []})
    for blas in ([("Haswell", 1)], [("Nehalem", 1), ("Haswell", 1)], [("Nehalem", 2)], []):
        assert arrangements.faults(wanted, {"blas": blas, "dispatch": []}), blas


def test_every_leg_has_its_script(root):
    text = (root / ".ci" / "run").read_text(encoding="utf-8")
    (legs,) = re.findall(r"ALL_LEGS=\((.*)\)", text)
    scripts = {path.stem for path in (root / ".ci" / "legs").iterdir()}
    assert {leg for leg in legs.split() if leg not in ("torch", "jax", "mpi")} | {
        "marked"
    } == scripts


@pytest.mark.parametrize("mark", ["torch", "jax", "mpi"])
def test_a_mark_that_has_a_leg_is_given_in_test_files_only(root, mark):
    """The leg collects only the test files in which it finds the mark."""
    files = [
        path for room in ("tests", "ringspec", "nki_impl") for path in (root / room).rglob("*.py")
    ]
    giving = [path for path in files if re.search(rf"mark\.{mark}\b", path.read_text("utf-8"))]
    assert giving and all(path.name.startswith("test_") for path in giving), giving
    assert all(path.is_relative_to(root / "tests") for path in giving), giving


def groups_of(workflow):
    """The legs of each call of .ci/run in the workflow, in their order."""
    listed = re.search(r"^ +legs:\n((?: +- .*\n)+)", workflow, re.M)[1]
    alone = re.findall(r"\.ci/run (\w[\w ]*)$", workflow, re.M)
    return [line.split() for line in re.findall(r"- (.*)", listed) + alone]


def test_the_workflow_runs_every_leg_and_tests_before_those_that_need_it(root):
    groups = groups_of((root / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    text = (root / ".ci" / "run").read_text(encoding="utf-8")
    (legs,) = re.findall(r"ALL_LEGS=\((.*)\)", text)
    assert {leg for group in groups for leg in group} == set(legs.split())
    for group in groups:
        assert group[0] == "tests" or set(group) <= {"lowest", "pythons", "readme", "wheel"}, group


def test_the_workflow_pins_the_version_of_each_action(root):
    workflow = (root / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (.*)", workflow)
    assert used and all(re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", one) for one in used), used


def test_the_hooks_before_a_commit_are_those_of_the_leg_lint(root):
    hooks = (root / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    leg = (root / ".ci" / "legs" / "lint.sh").read_text(encoding="utf-8")
    tools = re.findall(r"^\.venv/bin/([\w-]+)(?! -m)(?= |$)", leg, re.M)
    assert {"ruff", "mypy", "lint-imports"} <= set(tools)
    assert set(re.findall(r"entry: \.venv/bin/([\w-]+)", hooks)) == set(tools) - {"python"}


def test_ci_run_is_executable(root):
    assert (root / ".ci" / "run").stat().st_mode & 0o111


def test_every_shell_script_is_well_formed_and_stops_at_the_first_error(root):
    if shutil.which("bash") is None:
        pytest.skip("bash is not on the path")
    for script in [root / ".ci" / "run", *(root / ".ci" / "legs").iterdir()]:
        assert "\nset -euo pipefail\n" in script.read_text(encoding="utf-8")
        subprocess.run(["bash", "-n", str(script)], check=True)
