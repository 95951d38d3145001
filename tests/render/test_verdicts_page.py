"""The page of verdicts in a browser: its filters, and the whole table without scripts."""

import pytest
from render.browser import Browser

from ringspec.render.verdicts import verdicts_page

COLUMNS = [
    {"id": name, "group": group, "title": name, "meaning": f"{name}."}
    for group, name in (("pass", "forward"), ("pass", "backward"), ("mask", "window"))
]
VERDICTS = {name: f"It is {name}." for name in ("passed", "wrong", "not claimed")}
ROWS = "[...document.querySelectorAll('#matrix tbody tr')].filter((r) => r.checkVisibility()).map((r) => r.dataset.row)"
HEADS = "[...document.querySelectorAll('#matrix thead [data-column]')].filter((r) => r.checkVisibility()).map((r) => r.dataset.column)"


def row(id, *verdicts):
    cells = {
        column["id"]: {"verdict": verdict, "counts": {verdict: 2}}
        for column, verdict in zip(COLUMNS, verdicts, strict=True)
    }
    return {"id": id, "title": f"Ring {id}", "date": "2026-11-26", "cut": "", "cells": cells}


@pytest.fixture
def page(tmp_path):
    rows = [row("one", "passed", "wrong", "not claimed"), row("two", "passed", "passed", "wrong")]
    path = tmp_path / "page.html"
    feed = {"columns": COLUMNS, "verdicts": VERDICTS, "rows": rows}
    path.write_text(verdicts_page(feed), encoding="utf-8")
    return path.as_uri()


def chosen(browser, **values):
    for id, value in values.items():
        browser.value(
            f"field = document.getElementById({id!r}); field.value = {value!r};"
            "field.dispatchEvent(new Event('input', {bubbles: true})); 0"
        )
    return browser.value(ROWS), browser.text("#shown")


@pytest.mark.external("chromium")
def test_the_filters_show_the_rows_and_the_column_that_fit(page, tmp_path):
    browser = Browser(tmp_path / "chromium")
    try:
        browser.open(page)
        assert chosen(browser) == (["one", "two"], "2 of 2 rows")
        assert chosen(browser, words="ring TWO") == (["two"], "1 of 2 rows")
        assert chosen(browser, words="", verdict="wrong")[0] == ["one", "two"]
        assert chosen(browser, feature="backward")[0] == ["one"]
        assert browser.value(HEADS) == ["backward"]
        assert chosen(browser, feature="", verdict="not claimed")[0] == ["one"]
        assert browser.value(HEADS) == ["forward", "backward", "window"]
    finally:
        browser.close()


def test_without_scripts_the_table_is_complete_and_the_filters_are_hidden(page, tmp_path):
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<form id="filter" hidden>' in text
    table = text[text.index("<table") : text.index("</table>")]
    assert table.count("<td ") == 6 and " hidden" not in table
    for word in ("passed", "wrong", "not claimed"):
        assert f'<span class="word">{word}</span>' in table
    # Heads say of which row and column they are; the sign is not read out.
    assert table.count('scope="row"') == 2 and table.count('aria-hidden="true"') == 6
    assert "<caption>" in table
