"""The documentation, as far as it can be held to the code without Sphinx."""

import doctest
import re
from pathlib import Path

import pytest

import ringspec
import ringspec.exact

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)


def reading_order() -> list[str]:
    """Modules in the order of the docstrings of ringspec.spec, ringspec.problem and ringspec.rings."""
    text = "\n".join(
        package.__doc__ for package in (ringspec.spec, ringspec.problem, ringspec.rings)
    )
    lines = re.findall(r"^\d+\. (.*)$", text, re.M)
    names = [name for line in lines for name in re.findall(r"``(\w+)``", line)]
    return [name for name in names if name != "recipes"]  # reference/recipes.md is its page


def test_the_reading_order_names_every_file_of_the_specification_once():
    package = DOCS.parent / "ringspec"
    rooms = ("spec", "problem", "rings")
    modules = {path.stem for room in rooms for path in (package / room).glob("[a-z]*.py")}
    assert sorted(reading_order()) == sorted(modules)


def test_the_specification_pages_stand_in_the_reading_order():
    text = (DOCS / "spec" / "index.md").read_text(encoding="utf-8")
    assert re.findall(r"^generated/(\w+)$", text, re.M) == reading_order()


def test_the_files_of_exact_stand_in_the_order_of_its_docstring():
    folder = DOCS.parent / "ringspec" / "exact"
    named = re.findall(r"``(\w+)``", ringspec.exact.__doc__)
    order = [name for name in named if (folder / f"{name}.py").exists()]
    text = (DOCS / "vectors" / "truth.md").read_text(encoding="utf-8")
    assert re.findall(r"^generated/(\w+)$", text, re.M) == order
    assert sorted(order) == sorted(path.stem for path in folder.glob("[a-z]*.py"))


def test_the_reference_documents_every_public_name():
    pages = sorted((DOCS / "reference" / "api").glob("*.md"))
    text = "".join(path.read_text(encoding="utf-8") for path in pages)
    elsewhere = {"__version__", "SPEC_VERSION", "RECIPES", "Recipe", "RingspecError"}
    documented = set(re.findall(r"^\.\. auto\w+:: ringspec\.(\w+)$", text, re.M))
    assert documented == set(ringspec.__all__) - elsewhere


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_the_examples_of_a_page_hold(path):
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
        runner.run(parser.get_doctest(block, {}, path.name, str(path), 0))
    assert runner.failures == 0
