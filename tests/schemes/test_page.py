"""The page "Every way to split attention": its pictures come from runs."""

import importlib
import sys
from pathlib import Path

import pytest

from ringspec.schemes.build import BUILDERS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def page():
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module("split_attention")
    sys.path.remove(str(DOCS))


def test_the_stored_pictures_are_those_of_the_runs(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run python docs/split_attention.py"


def test_every_scheme_has_a_picture(page):
    text = page.PAGE.read_text(encoding="utf-8")
    assert set(page.PICTURES) == set(BUILDERS)
    assert {name for _, name, _ in page.BLOCK.findall(text)} == {*BUILDERS, "choice", "costs"}
