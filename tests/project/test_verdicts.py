"""The verdict tables are what the stored reports say, and their commands exist."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "docs" / "conform" / "verdicts.json").read_text(encoding="utf-8"))


def program(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_made_of_the_stored_verdicts():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "conform" / "verdicts.md").read_text(encoding="utf-8")
    assert program("verdicts").front_table(ROWS) in readme
    assert program("verdicts").table(ROWS) in page


def test_every_row_has_a_day_versions_and_a_command_that_this_version_knows():
    with open(ROOT / "pyproject.toml", "rb") as file:
        registered = tomllib.load(file)["project"]["entry-points"]["ringspec.targets"]
    for row in ROWS:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert row["versions"] and all(row["versions"].values())
        assert row["target"] in registered
        assert row["command"].startswith(f"ringspec check {row['target']}")
        for path in [row["install"], *re.findall(r"--expected-failures (\S+)", row["command"])]:
            assert path is None or (ROOT / path).is_file(), path


def test_every_bug_that_a_row_names_is_a_known_bug_and_every_count_is_positive():
    for row in ROWS:
        assert all(count > 0 for count in row["counts"].values()) and row["counts"].get("pass")
        found = row["diagnosis"]
        assert found is None or found["id"] is None or found["id"] in MUTANTS
        # A failure is never called "nothing found".
        failed = set(row["counts"]) - {"pass", "not claimed", "expected failure"}
        assert bool(failed) == bool(row["failed_in"]), row["target"]


def test_a_report_without_a_footer_makes_no_row():
    class Partial:
        header = {"target": {"spec": "haoliuhl"}}
        complete = False

    with pytest.raises(ValueError, match="run the check again"):
        program("verdicts").row_of(Partial())


def test_the_picture_of_the_readme_is_the_one_that_its_program_draws():
    stored = ROOT / "docs" / "images" / "ring.svg"
    assert program("picture").draw() == stored.read_text(encoding="utf-8")
    assert stored.stat().st_size < 300_000
    assert "docs/images/ring.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
