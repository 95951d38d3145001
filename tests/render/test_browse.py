"""The filter of the documentation's tables (docs/_static/browse.js), in a browser."""

from pathlib import Path

import pytest
from render.browser import Browser

STATIC = Path(__file__).parents[2] / "docs" / "_static"
ROW = '<tr><td id="{0}">{0}</td><td><details><summary>{1}</summary>{2}</details></td></tr>'
TABLE = '<table class="browse"><thead><tr><th>rule</th></tr></thead><tbody>{}</tbody></table>'
FOLD = "<details><summary>more</summary>text</details>"
OPEN = "[...document.querySelectorAll('details:not(td details)')].map((d) => d.open)"
VISIBLE = "[...document.querySelectorAll('table.browse tbody tr')].filter((r) => r.checkVisibility()).map((r) => r.cells[0].id)"


@pytest.fixture
def page(tmp_path):
    """Two rules in a section, one case in a group that opens on a click."""
    rules = TABLE.format(
        ROW.format("mask-1", "Causal", "alpha") + ROW.format("mask-2", "Window", "beta")
    )
    cases = TABLE.format(ROW.format("ring/a", "A reason", "beta, MASK-1"))
    text = (
        f'<div class="browse-filter" data-what="words"></div><section>{rules}</section>'
        f"<details><summary>ring</summary>{cases}</details>"
    )
    return written(tmp_path, text)


@pytest.fixture
def folded(tmp_path):
    """A table of Markdown in a fold, and two sections: one fold in the first, a list of two in the second."""
    table = TABLE.format(ROW.format("bug-1", "stale-keys", "gamma")).replace(' class="browse"', "")
    text = (
        '<article><div class="browse-filter" data-what="words"></div><div class="open-all"></div>'
        f'<details class="browse"><summary>family</summary>{table}</details>'
        f'<section><span id="one"></span><h2>one</h2>{FOLD}</section>'
        f'<section id="many"><h2>many</h2>{FOLD}{FOLD}</section></article>'
    )
    return written(tmp_path, text)


def written(tmp_path, text):
    """The address of a page with this body, the style and the script."""
    head = f"<style>{(STATIC / 'pages.css').read_text()}</style>"
    script = f"<script>{(STATIC / 'browse.js').read_text()}</script>"
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{head}{text}{script}")
    return path.as_uri()


def typed(browser, words):
    browser.value(
        f"field = document.querySelector('input'); field.value = {words!r};"
        "field.dispatchEvent(new Event('input')); 0"
    )
    return browser.value(VISIBLE), browser.text("[role=status]")


@pytest.mark.external("chromium")
def test_rows_are_filtered_by_all_words_also_of_what_is_folded(page, tmp_path):
    browser = Browser(tmp_path / "chromium")
    try:
        browser.open(page)
        assert browser.value(VISIBLE) == ["mask-1", "mask-2"]
        assert typed(browser, "BETA") == (["mask-2", "ring/a"], "2 of 3 rows")
        assert typed(browser, "beta mask-1") == (["ring/a"], "1 of 3 rows")
        assert typed(browser, "nothing") == ([], "0 of 3 rows")
        assert typed(browser, "") == (["mask-1", "mask-2"], "3 of 3 rows")
        browser.open(f"{page}#ring/a")  # a link to a row opens what hides it
        assert browser.value("[...document.querySelectorAll('details')].map((d) => d.open)") == [
            False,
            False,
            True,
            True,
        ]
        assert browser.errors == []
    finally:
        browser.close()


@pytest.mark.external("chromium")
def test_a_link_to_a_section_opens_its_only_fold_and_a_button_opens_all(folded, tmp_path):
    browser = Browser(tmp_path / "chromium")
    try:
        browser.open(f"{folded}#one")
        assert browser.value(OPEN) == [False, True, False, False]
        browser.open(f"{folded}#many")
        assert browser.value(OPEN) == [False] * 4
        browser.click(".open-all button")
        assert browser.value(OPEN) == [True] * 4 and browser.text(".open-all button") == "Close all"
        browser.click(".open-all button")
        assert browser.value(OPEN) == [False] * 4
        assert typed(browser, "gamma")[1] == "1 of 1 rows" and browser.value(OPEN)[0]
        assert typed(browser, "nothing")[1] == "0 of 1 rows" and not browser.value(OPEN)[0]
        assert browser.errors == []
    finally:
        browser.close()
