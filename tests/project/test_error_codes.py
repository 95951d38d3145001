"""Every code of an error that the package raises is in the table of docs/reference/errors.md, and no other; every class
has an example that raises it."""

import ast
import copy
import importlib
import re

import pytest
from project.public import ROOT

from ringspec import errors
from ringspec.errors import OptionError, ScheduleError

ROW = re.compile(r"^\| `(\w+)` \| `([a-z-]+)` \|", re.M)
KINDS = {name: getattr(errors, name) for name in errors.__all__}
# Functions that raise VectorError with the code that they are given.
PASS_THE_CODE_ON = {"check_items", "check_schema", "parse"}

Pairs = set[tuple[str, str]]


def documented() -> list[tuple[str, str]]:
    """(class, code) of the table's rows."""
    return ROW.findall((ROOT / "docs/reference/errors.md").read_text(encoding="utf-8"))


def codes_in(source: str) -> Pairs:
    """(class, code) of all errors that a source makes.

    >>> sorted(codes_in('raise OptionError("a", "b", "c"); raise OptionError("a", "b", "c", code="window")'))
    [('OptionError', 'option'), ('OptionError', 'window')]
    >>> codes_in('parse(text, "a file", 100, code="manifest")')
    {('VectorError', 'manifest')}
    """
    found = set()
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        given = next((k.value for k in call.keywords if k.arg == "code"), None)
        if name in PASS_THE_CODE_ON and isinstance(given, ast.Constant):
            found.add(("VectorError", given.value))
        elif name in KINDS and given is None:
            found.add((name, KINDS[name].code))
        elif name in KINDS and isinstance(given, ast.Constant):
            found.add((name, given.value))
    return found


def raised() -> Pairs:
    files = (ROOT / "ringspec").rglob("*.py")
    return set().union(*(codes_in(file.read_text(encoding="utf-8")) for file in files))


def test_the_table_has_every_code_that_is_raised_and_no_other():
    assert sorted(documented()) == sorted(raised())


def test_no_code_belongs_to_two_classes():
    codes = [code for _, code in documented()]
    assert len(codes) == len(set(codes))


def test_every_class_is_in_the_table_and_has_a_code_of_its_own():
    assert {name for name, _ in documented()} == set(KINDS)
    codes = [kind.__dict__["code"] for kind in KINDS.values()]
    assert len(codes) == len(set(codes))


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("generate_errors")


@pytest.mark.parametrize("name", KINDS)
def test_the_page_of_a_class_shows_an_example_that_raises_it_and_its_codes(name, pages):
    page = pages.error_page(KINDS[name], pages.load_examples())
    codes = [code for kind, code in documented() if kind == name]
    assert "expected" in page and "Fix:" in page and "How to fix it" in page
    assert all(f"* - ``{code}``" in page for code in codes)
    used = re.search(r"This raises ``(\w+)`` with the code ``([a-z-]+)``", page)
    assert used is not None and used.groups() in documented()


def test_an_example_that_raises_another_class_or_nothing_ends_the_build(pages):
    examples = pages.load_examples()
    with pytest.raises(AssertionError, match="raises ShapeError"):
        pages.raised(OptionError, examples.shape_error)
    with pytest.raises(AssertionError, match="raises nothing"):
        pages.raised(OptionError, lambda: None)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])  # what a process pool does, too
def test_an_error_keeps_its_code_and_its_problems_when_it_is_copied(again):
    error = again(OptionError("a window", "-1", "pass None", code="window"))
    assert (error.code, error.fix, type(error)) == ("window", "pass None", OptionError)
    assert str(error) == "expected a window; got -1. Fix: pass None."
    assert again(ScheduleError("a", "b", "c", ("d",), code="e")).problems == ("d",)
    assert again(ScheduleError("a", "b", "c", ("d",))).code == "schedule"
