"""The page "Which merge loses what": its table is that of the program, as far as NumPy's last bits allow."""

import importlib
import sys
from pathlib import Path

import pytest

from ringspec.merges import MERGES

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("merge_errors")
    sys.path.remove(str(DOCS))


def stored_rows(program, start="START", end="END"):
    text = program.PAGE.read_text(encoding="utf-8")
    lines = (
        text.partition(getattr(program, start))[2].partition(getattr(program, end))[0].splitlines()
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].partition("`")[2].partition("`")[0]: row for row in rows[2:]}


def test_the_table_has_a_row_for_each_shown_recipe_and_marks_those_from_reading(program):
    rows = stored_rows(program)
    assert list(rows) == list(program.SHOWN)
    for name, row in rows.items():
        assert ("(not compared)" in row[0]) is (MERGES[name].compared_with is None), name


def test_the_table_is_what_the_program_measures(program):
    for name, row in stored_rows(program).items():
        for cell, (workers, fmt, level) in (
            (row[2], (2, "bfloat16", 5)),
            (row[3], (8, "bfloat16", 5)),
            (row[6], (2, "float32", 1000)),
        ):
            # Two digits, and elementary functions that differ in the last bit between processors.
            assert program.error(name, workers, fmt, level) == pytest.approx(float(cell), rel=0.2)
        assert row[9:] == [program.empty(name, one) for one in ((0,), (0, 1), (0, 1, 2))], name


def test_the_shares_of_certain_elements_are_what_the_program_measures(program):
    rows = stored_rows(program, "CERTAIN_START", "CERTAIN_END")
    assert list(rows) == list(program.SHOWN)
    for name, row in rows.items():
        printed = [float(cell.rstrip(" %")) / 100 for cell in row[1:]]
        # The stored shares have three digits; an enclosure hardly depends on the processor.
        assert printed == pytest.approx(program.shares(name), abs=2e-3), name


def test_the_figure_names_each_shown_recipe(program):
    text = program.FIGURE.read_text(encoding="utf-8")
    assert all(f">{name}</text>" in text for name in program.SHOWN)


def test_the_table_of_predictions_has_the_recipes_and_each_measured_error_is_near_its_prediction(
    program,
):
    rows = stored_rows(program, "PREDICTED_START", "PREDICTED_END")
    assert list(rows) == [*program.SHOWN, "ring_flash_attn", "tokamax"]
    for name, row in rows.items():
        assert ("(not compared)" in row[0]) is (MERGES[name].compared_with is None), name
        for cell in filter(None, row[1:]):
            predicted, measured = map(float, cell.split("/"))
            assert 0.9 <= measured / predicted <= 1.1, (name, cell)
    again = program.predictions("te_p2p")
    for stored, computed in zip(rows["te_p2p"][1:], again, strict=True):
        pairs = zip(stored.split("/"), computed.split("/"), strict=True)
        assert all(float(a) == pytest.approx(float(b), rel=0.05) for a, b in pairs), again
