"""The table of rules: each rule is stated, tested, and its tests fail when the rule is broken."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from oracle.cases import CASES
from rules.mutations import MUTATIONS

import ringspec
from ringspec.spec.rules import RULES, rule

PACKAGE = Path(ringspec.__file__).parent
TESTS = Path(__file__).parent.parent
IDS = [r.id for r in RULES]


def marked_files() -> dict[str, set[Path]]:
    """Test files in which each rule id stands inside a rule mark."""
    files: dict[str, set[Path]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for mark in re.findall(r"mark\.rule\(([^)]*)\)", path.read_text()):
            for name in re.findall(r"[A-Z]+-\d+", mark):
                files.setdefault(name, set()).add(path)
    for case in CASES:  # these marks are made from the case's features
        for name in case.rules:
            files.setdefault(name, set()).add(TESTS / "spec" / "test_attention_oracle.py")
    return files


MARKED = marked_files()


def test_every_rule_has_an_id_of_its_own_under_a_known_prefix():
    assert len(set(IDS)) == len(IDS)
    assert all(re.fullmatch(r"(MASK|FWD|BWD|DROP|SOFT|LAYOUT|RING|CP|NUM)-\d+", i) for i in IDS)
    assert rule("RING-1") in RULES


@pytest.mark.parametrize("which", IDS)
def test_each_module_of_a_rule_names_it(which):
    for module in rule(which).modules:
        path = PACKAGE / f"{module.replace('.', '/')}.py"
        assert re.search(rf"\b{which}\b", path.read_text()), module


@pytest.mark.parametrize("which", IDS)
def test_every_rule_is_marked_on_a_test(which):
    assert MARKED.get(which)


def test_marks_name_only_rules_that_exist():
    assert set(MARKED) <= set(IDS)


def test_every_rule_has_a_mutation_of_one_line_that_is_there():
    assert sorted({which for which, *_ in MUTATIONS}) == sorted(IDS)
    for which, module, line, broken in MUTATIONS:
        assert module.removesuffix(".py").replace("/", ".") in rule(which).modules, which
        assert (PACKAGE / module).read_text().count(line + "\n") >= 1, which
        assert "\n" not in line + broken and line != broken


# Sixty runs of pytest, each in a process of its own: a leg of CI.
@pytest.mark.slow
@pytest.mark.parametrize("which,module,line,broken", MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_the_tests_of_a_rule_fail_when_the_rule_is_broken(which, module, line, broken, tmp_path):
    # With compiled modules: Python compiles only the one that is changed.
    shutil.copytree(PACKAGE, tmp_path / "ringspec")
    path = tmp_path / "ringspec" / module
    path.write_text(path.read_text().replace(line + "\n", broken + "\n"))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    command += ["-m", "not slow and not torch and not jax and not gpu", "--rule", which]
    command += [f"--rootdir={TESTS.parent}", "-c", str(TESTS.parent / "pyproject.toml")]
    command += [str(path) for path in sorted(MARKED[which])]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("RINGSPEC_REQUIRE", None)
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    # 1: tests ran and failed. Any other code means that the mutation was not really tried.
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"\d+ failed", done.stdout), done.stdout[-2000:]
