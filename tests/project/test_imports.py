"""Who imports whom, read from the sources. The leg `lint` of .ci/run asks import-linter as well."""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from project.import_graph import nodes_of

PACKAGE = Path(__file__).parents[2] / "ringspec"
NKI_IMPL = PACKAGE.parent / "nki_impl"
# What the specification may import, beside its own files and the standard library.
BELOW_SPEC = {
    "numpy",
    "ringspec.errors",
    "ringspec.formats",
    "ringspec.problem.model",
    "ringspec.recipes",
}
# A reader of the specification meets no input, output, threads or clock.
KEPT_OUT = {"asyncio", "ctypes", "multiprocessing", "pickle", "random", "socket", "subprocess"}
KEPT_OUT |= {"threading", "time"}
# What targets and their adapters need, and what pytest alone reads.
OPTIONAL = {
    "deepspeed",
    "diffusers",
    "flash_attn",
    "jax",
    "pytest",
    "ring_attention_pytorch",
    "ring_flash_attn",
    "transformer_engine",
    "torch",
    "xfuser",
    "yunchang",
}
OF_PYTEST = {"conftest.py", "plugin.py", "test_conformance.py"}


@cache
def imported(path: Path, inside: bool = True) -> frozenset[str]:
    """Modules that a file imports, with the module that a name of ringspec comes from.

    ``inside``: also those that it imports inside functions and conditions.
    """
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in nodes_of(tree, with_types=True) if inside else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            module = node.module or ""
            is_folder = (PACKAGE.parent / module.replace(".", "/")).is_dir()
            is_ours = module.split(".")[0] in ("ringspec", "nki_impl")
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= names if is_folder and is_ours else {module}
    return frozenset(found)


def outside(modules: Iterable[str]) -> set[str]:
    """Top-level names that are neither ours nor of the standard library."""
    tops = {module.split(".")[0] for module in modules}
    return {top for top in tops if top not in sys.stdlib_module_names} - {"ringspec", "nki_impl"}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent))


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("spec/*.py")), ids=name_of)
def test_a_file_of_the_specification_imports_only_what_lies_below(path):
    for module in imported(path):
        ours = module.startswith("ringspec.spec.")
        below = any(module == name or module.startswith(name + ".") for name in BELOW_SPEC)
        standard = module.split(".")[0] in sys.stdlib_module_names
        assert ours or below or standard, f"{path.name} imports {module}"
        assert module.split(".")[0] not in KEPT_OUT


def test_ml_dtypes_is_imported_by_formats_alone():
    importers = [path for path in PACKAGE.rglob("*.py") if "ml_dtypes" in outside(imported(path))]
    assert [name_of(path) for path in importers] == ["ringspec/formats.py"]


def test_comparing_never_imports_the_specification():
    for path in PACKAGE.glob("compare/*.py"):
        assert not any(module.startswith("ringspec.spec") for module in imported(path))


def test_click_and_rich_are_imported_by_the_command_line_alone():
    for path in PACKAGE.rglob("*.py"):
        if "cli" not in path.relative_to(PACKAGE).parts:
            assert not outside(imported(path)) & {"click", "rich"}, path.name


def test_jinja2_is_imported_by_one_file_which_makes_pages():
    importers = [path for path in PACKAGE.rglob("*.py") if "jinja2" in outside(imported(path))]
    assert [name_of(path) for path in importers] == ["ringspec/render/environment.py"]


def test_ringspec_imports_its_declared_dependencies_and_nothing_else(pyproject):
    declared = {name.partition(">=")[0] for name in pyproject["project"]["dependencies"]}
    for path in PACKAGE.rglob("*.py"):
        foreign = outside(imported(path)) - declared
        room = path.relative_to(PACKAGE).parts[0]
        foreign -= {"conformance": OPTIONAL, "standins": {"torch"}}.get(room, set())
        assert not foreign, path.name


def test_what_is_optional_is_imported_inside_functions_alone():
    for path in PACKAGE.rglob("*.py"):
        allowed = {"pytest"} if path.name in OF_PYTEST else set()
        assert not outside(imported(path, inside=False)) & OPTIONAL - allowed, path.name


def test_kernels_and_simulator_import_nothing_of_ringspec():
    for path in NKI_IMPL.rglob("*.py"):
        if path.name != "target.py":
            assert not any(module.split(".")[0] == "ringspec" for module in imported(path))


def test_the_oracle_imports_nothing_of_ringspec():
    for path in (PACKAGE.parent / "tests" / "oracle").rglob("*.py"):
        assert not any(module.split(".")[0] == "ringspec" for module in imported(path)), path.name
