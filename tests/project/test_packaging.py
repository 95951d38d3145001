"""pyproject.toml, the files beside it, and what they promise to pip, git and the wheel."""

import hashlib
import importlib
import importlib.metadata
import re
import subprocess

import pytest

import ringspec

# https://www.apache.org/licenses/LICENSE-2.0.txt
APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_licence_is_apache_2_unmodified(root, pyproject):
    assert hashlib.sha256((root / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert pyproject["project"]["license"] == "Apache-2.0"


def test_the_wheel_has_both_packages(pyproject):
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["ringspec", "nki_impl"]}


def test_python_3_11_is_enough(pyproject):
    assert pyproject["project"]["requires-python"] == ">=3.11"


def test_the_dependencies_are_these(pyproject):
    dependencies = pyproject["project"]["dependencies"]
    names = sorted(requirement.partition(">=")[0] for requirement in dependencies)
    assert names == [
        "click",
        "jinja2",
        "jsonschema",
        "ml_dtypes",
        "numpy",
        "platformdirs",
        "rich",
        "scipy",
        "threadpoolctl",
    ]
    assert "numpy>=2.1.3" in dependencies


def test_the_extras_are_these(pyproject):
    extras = pyproject["project"]["optional-dependencies"]
    assert sorted(extras) == [
        "coverage",
        "docs",
        "fuzz",
        "jax",
        "lint",
        "mpi",
        "neuron",
        "notebooks",
        "test",
        "torch",
    ]
    assert extras["torch"] == ["torch>=2.6"]
    assert extras["mpi"] == ["mpi4py>=4.1", "mpich>=5.0"]
    assert extras["neuron"] == ["neuronx-cc>=2.24", "nki>=0.3"]


def test_every_dependency_has_a_floor_and_no_ceiling(pyproject):
    project = pyproject["project"]
    extras = project["optional-dependencies"].values()
    stated = [*project["dependencies"], *(one for extra in extras for one in extra)]
    assert [one for one in stated if not re.fullmatch(r"[\w.-]+>=\d+(\.\d+)*", one)] == []


def test_the_test_suite_needs_nothing_heavy(pyproject):
    needed = " ".join(pyproject["project"]["optional-dependencies"]["test"])
    for heavy in ("torch", "jax", "mpi", "matplotlib", "jupyter", "sphinx", "playwright"):
        assert heavy not in needed


def test_the_installed_version_is_the_package_s():
    try:
        installed = importlib.metadata.version("ringspec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ringspec is not installed but imported from its folder: pip install -e .")
    assert installed == ringspec.__version__


def test_the_citation_has_the_version_and_the_licence_of_the_package(root, pyproject):
    text = (root / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.M) == [ringspec.__version__]
    assert re.findall(r"^license: (.*)$", text, re.M) == [pyproject["project"]["license"]]


def test_the_command_ringspec_is_the_click_group(pyproject):
    assert pyproject["project"]["scripts"] == {"ringspec": "ringspec.cli:main"}
    assert callable(importlib.import_module("ringspec.cli").main)


def test_gitignore_names_only_top_level_paths_and_bytecode(root):
    """Hatchling leaves out of the wheel what git ignores, so no pattern may reach a package."""
    for line in (root / ".gitignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#") and line not in ("__pycache__/", "*.py[co]"):
            assert line.startswith("/")
            assert not line.startswith(("/ringspec", "/nki_impl", "/*"))


@pytest.mark.parametrize(
    "path",
    [
        "ringspec/build/a.py",
        "ringspec/dist/a.py",
        "ringspec/render/templates/a.html",
        "ringspec/vectors/data/a.safetensors",
        "ringspec/vectors/format/schemas/a.json",
        "nki_impl/sim/lib/a.so",
        "nki_impl/.venv/a",
    ],
)
def test_git_ignores_no_file_of_the_packages(root, path):
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", "-q", path], cwd=root, check=False
    )
    if ignored.returncode == 128:
        pytest.skip("this is not a git checkout")
    assert ignored.returncode == 1


def test_golden_vectors_are_never_converted(root):
    """A checkout that turned line ends would change their bytes."""
    path = "ringspec/vectors/data/a.json"
    shown = subprocess.run(
        ["git", "check-attr", "text", path], cwd=root, check=False, capture_output=True, text=True
    )
    if shown.returncode == 128:
        pytest.skip("this is not a git checkout")
    assert shown.stdout == f"{path}: text: unset\n"


def test_tests_are_no_package(files):
    assert not [name for name in files if name.startswith("tests/") and "__init__" in name]
