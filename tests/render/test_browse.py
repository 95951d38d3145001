"""The filter of the documentation's tables (docs/_static/browse.js), in a browser."""

from pathlib import Path

import pytest
from render.browser import Browser

STATIC = Path(__file__).parents[2] / "docs" / "_static"
ROW = '<tr><td id="{0}">{0}</td><td><details><summary>{1}</summary>{2}</details></td></tr>'
TABLE = '<table class="browse"><thead><tr><th>rule</th></tr></thead><tbody>{}</tbody></table>'
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
