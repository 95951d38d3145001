"""One self-contained HTML page from the feed of verdicts: implementations by features.

The page is a table that needs no script. A script adds filters. All text of the feed is escaped, and links lead only to
https addresses and to files beside the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from ringspec.render.environment import asset, filled_in

# The CSS class of a verdict, and the sign in front of it.
KINDS = {"passed": "good", "wrong": "bad", "failed": "open", "known failure": "known"}
SIGNS = {"good": "\u2713", "bad": "\u2717", "open": "?", "known": "!", "neutral": "\u2013"}
SHORT = {"known failure": "known"}
SAFE_LINK = re.compile(r"https://[^\s]+|[A-Za-z0-9_][\w./#-]*")


def verdicts_page(feed: Mapping[str, Any]) -> str:
    """Return the page of a feed, whose format docs/conform/verdicts.schema.json describes.

    >>> column = {"id": "forward", "group": "pass", "title": "forward", "meaning": "o and lse."}
    >>> row = {"id": "a", "title": "<a>", "date": None, "cut": "", "cells": {"forward": {"verdict": "passed", "counts": {}}}}
    >>> text = verdicts_page({"columns": [column], "verdicts": {"passed": "All pass."}, "rows": [row]})
    >>> "&lt;a&gt;" in text, "<a>" in text, "passed" in text
    (True, False, True)
    """
    columns = feed["columns"]
    return filled_in(
        "verdicts.html",
        asset("verdicts.js"),
        asset("verdicts.css"),
        columns=columns,
        groups=[(name, len(list(some))) for name, some in groupby(columns, lambda x: x["group"])],
        firsts={next(some)["id"] for _, some in groupby(columns, lambda x: x["group"])},
        legend=[(kind_of(name), name, words) for name, words in feed["verdicts"].items()],
        rows=[row(one, columns) for one in feed["rows"]],
        dates=sorted({one["date"] for one in feed["rows"] if one.get("date")}),
        verdict_signs=SIGNS,
    )


def kind_of(verdict: str) -> str:
    """Return the CSS class of a verdict."""
    return KINDS.get(verdict, "neutral")


def safe_link(address: Any) -> str | None:
    """Return an address that a page may link to; None for any other.

    >>> safe_link("https://example.org/a"), safe_link("reports/a.html"), safe_link("javascript:alert(1)")
    ('https://example.org/a', 'reports/a.html', None)
    """
    text = str(address or "")
    return text if SAFE_LINK.fullmatch(text) and ".." not in text else None


def row(one: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the template shows of a row."""
    versions = one.get("versions") or {}
    return {
        "id": one["id"],
        "title": one["title"],
        "link": safe_link(one.get("link")),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "date": one.get("date"),
        "profile": one.get("profile", ""),
        "ringspec": one.get("ringspec", ""),
        "cut": one["cut"],
        "report": safe_link(one.get("report_page")),
        "data": safe_link(one.get("report")),
        "command": one.get("command", ""),
        "install": one.get("install"),
        "notes": one.get("notes") or (),
        "wrong": [confirmed(x) for x in one.get("wrong") or () if x["cases"] or not one["date"]],
        "unchecked": one.get("unchecked", 0),
        "known_failures": one.get("known_failures") or (),
        "sentences": (one.get("diagnosis") or {}).get("sentences") or (),
        "silent": silent(one["cells"], columns),
        "verdicts": sorted({x["verdict"] for x in one["cells"].values()}),
        "cells": [cell(one["cells"][column["id"]], column) for column in columns],
    }


def silent(
    cells: Mapping[str, Mapping[str, Any]], columns: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return (verdict and reason, names of the columns) of the features of which no case was run."""
    found: dict[str, list[str]] = {}
    for column in columns:
        one = cells[column["id"]]
        if one["verdict"] in ("not claimed", "not run"):
            key = ": ".join(filter(None, (one["verdict"], one.get("why"))))
            found.setdefault(key, []).append(f"{column['group']} {column['title']}")
    return [(key, ", ".join(names)) for key, names in found.items()]


def confirmed(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return a confirmed failure, with links that are safe; the text for an issue lies beside the reproducer."""
    links = {name: safe_link(one.get(name)) for name in ("public_report", "reproducer")}
    program = links["reproducer"] or ""
    text = f"{program.removesuffix('.py')}.md" if program.endswith(".py") else None
    return {**one, **links, "issue_text": text}


def cell(one: Mapping[str, Any], column: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template shows of a cell: the verdict, the number of cases and an explanation.

    >>> found = cell({"verdict": "wrong", "counts": {"passed": 3, "wrong": 1, "not claimed": 9}}, {"id": "w2"})
    >>> found["count"], found["why"]
    ('1 of 4', 'passed 3, wrong 1, not claimed 9')
    """
    counts, verdict = one["counts"], one["verdict"]
    run = sum(n for name, n in counts.items() if name not in ("not claimed", "not run"))
    bad = sum(counts.get(name, 0) for name in ("wrong", "failed", "known failure"))
    so_far = " so far" if run and counts.get("not run") else ""
    counted = ", ".join(f"{name} {n}" for name, n in counts.items())
    return {
        "column": column["id"],
        "verdict": verdict,
        "short": SHORT.get(verdict, verdict),
        "kind": kind_of(verdict),
        "count": ("" if not run else f"{bad} of {run}" if bad else str(run)) + so_far,
        "why": "; ".join(filter(None, (one.get("why"), counted))),
    }
