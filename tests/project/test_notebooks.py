"""How the notebooks are stored. The leg `docs` of .ci/run executes them."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from project import public

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAY_IMPORT = {"dataclasses", "inspect", "matplotlib", "nki_impl", "numpy", "ringspec"}
MOST_CELLS = 27
# Words of text in all notebooks; questions are counted apart.
MOST_WORDS = 8530
# A reader new to ring attention works through these.
FIRST = [path for path in NOTEBOOKS if path.stem < "06"]

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in read(path)["cells"] if cell["cell_type"] == "code"]


def syntax(cell: dict[str, Any]) -> ast.Module:
    return ast.parse("".join(cell["source"]))


def test_the_first_look_for_students_is_there() -> None:
    assert "03_the_ring_forward.ipynb" in [path.name for path in NOTEBOOKS]


@every_notebook
def test_a_notebook_is_stored_without_outputs_and_execution_counts(path: Path) -> None:
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@every_notebook
def test_a_notebook_names_the_kernel_that_every_jupyter_has(path: Path) -> None:
    assert read(path)["metadata"]["kernelspec"]["name"] == "python3"


@every_notebook
def test_every_cell_has_a_name_of_its_own(path: Path) -> None:
    ids = [cell["id"] for cell in read(path)["cells"]]
    assert len(set(ids)) == len(ids)


@every_notebook
def test_a_notebook_is_short(path: Path) -> None:
    assert len(read(path)["cells"]) <= MOST_CELLS


@every_notebook
def test_a_notebook_imports_what_the_extra_installs_and_nothing_else(path: Path) -> None:
    for cell in code_cells(path):
        for node in ast.walk(syntax(cell)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            assert {module.partition(".")[0] for module in modules} <= MAY_IMPORT


@every_notebook
def test_a_notebook_ends_in_an_assertion(path: Path) -> None:
    last = read(path)["cells"][-1]
    assert last["cell_type"] == "code"
    # The last statement may be a loop over what is asserted.
    statement = syntax(last).body[-1]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def texts(path: Path) -> dict[str, str]:
    """The text cells by their names."""
    cells = [cell for cell in read(path)["cells"] if cell["cell_type"] == "markdown"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def test_the_notebooks_together_are_short() -> None:
    words = [
        len(text.split())
        for path in NOTEBOOKS
        for id, text in texts(path).items()
        if id != "questions"
    ]
    assert sum(words) <= MOST_WORDS


@pytest.mark.parametrize("path", FIRST, ids=lambda path: path.stem)
def test_a_first_notebook_asks_five_questions_and_breaks_something(path: Path) -> None:
    questions, _, task = texts(path)["questions"].partition("## Break it")
    assert [line[:2] for line in questions.splitlines() if line[:1].isdigit()] == [
        "1.", "2.", "3.", "4.", "5.",
    ]  # fmt: skip
    answer = "<details><summary>Answer</summary>"
    assert questions.count(answer) == 5 and task.count(answer) == 1
    # An HTML block ends at a blank line, and so an answer is one line.
    assert all("</details>" in line for line in (questions + task).splitlines() if answer in line)


# The simulator that one notebook shows is not public.
@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.stem != "09_nki"], ids=lambda path: path.stem
)
def test_a_notebook_imports_public_names(path: Path) -> None:
    modules, objects = {*public.WHOLE, *public.SHOWN}, public.described()
    for cell in code_cells(path):
        for node in ast.walk(syntax(cell)):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "ringspec"
            ):
                continue
            for alias in node.names:
                if f"{node.module}.{alias.name}" in modules:
                    continue
                value = public.value_of(str(node.module), alias.name)
                value = getattr(value, "__wrapped__", value)
                assert any(value is one for one in objects.values()), alias.name
