"""An attention pattern that differs from the expected one, as an SVG picture.

Three panels: expected, got, difference. A cell is one query (row) and one key (column). The difference
says it by shape as well as by colour: a hollow square is a pair that should be visible and is not, a
full one a pair that should be hidden and is not, half a square a pair with another weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ringspec.render.html import Html, element

MOST = 1024
MOST_DRAWN = 96
PANEL = 240
# A weight below this is no weight, and so small a difference is rounding.
THRESHOLD = 1e-3
KINDS = ("seen", "missing", "extra", "weight", "nan")
MEANINGS = {
    "seen": "as expected",
    "missing": "should be visible, is not",
    "extra": "should be hidden, is visible",
    "weight": "visible with another weight",
    "nan": "not finite",
}

Grid = list[list[float]]


def picture(data: Any) -> Html | None:
    """The picture of {"expected": rows, "got": rows}, with an optional "caption"; None: no such data.

    >>> drawn = picture({"expected": [[1, 0], [1, 1]], "got": [[1, 1], [0, 1]]})
    >>> "1 pair missing, 1 pair too much" in drawn
    True
    >>> picture({"expected": [[1]], "got": "<script>"}) is None
    True
    """
    if not isinstance(data, dict):
        return None
    expected, got = grid(data.get("expected")), grid(data.get("got"))
    if expected is None or got is None or shape(expected) != shape(got):
        return None
    difference = [
        [kind_of(want, have) for want, have in zip(row, other, strict=True)]
        for row, other in zip(expected, got, strict=True)
    ]
    panels = [
        panel("expected", kinds(expected)),
        panel("got", kinds(got)),
        panel("difference", difference),
    ]
    told = element(
        "figcaption",
        sentence(difference, data.get("origin")),
        key(difference),
        class_="pattern-text",
    )
    words = data.get("caption")
    extra = element("p", words) if isinstance(words, str) else None
    return element("figure", extra, *panels, told, class_="pattern")


def key(difference: list[list[str]]) -> Html:
    """What the signs in the difference mean, as far as they are there."""
    there = {kind for row in difference for kind in row}
    signs = [
        element(
            "span",
            element(
                "svg",
                element("path", class_=kind, d=path_of([[kind]], kind)),
                viewBox="-0.05 -0.05 1.1 1.1",
                width=13,
                height=13,
                aria_hidden="true",
            ),
            words,
        )
        for kind, words in MEANINGS.items()
        if kind in there
    ]
    return element("div", *signs, element("span", "rows: queries, columns: keys"), class_="key")


def grid(rows: Any) -> Grid | None:
    """Nested lists of numbers, all rows of one length; None where they are not."""
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST:
        return None
    if any(not isinstance(row, list) or not 0 < len(row) <= MOST for row in rows):
        return None
    if len({len(row) for row in rows}) != 1:
        return None
    try:
        return [[number(x) for x in row] for row in rows]
    except (TypeError, ValueError, OverflowError):
        return None


def number(x: Any) -> float:
    if x in ("NaN", "Infinity", "-Infinity"):
        return math.nan
    if not isinstance(x, (int, float)):
        raise TypeError
    return float(x)


def shape(rows: Grid) -> tuple[int, int]:
    return len(rows), len(rows[0])


def seen(x: float) -> bool:
    return abs(x) > THRESHOLD


def kind_of(want: float, have: float) -> str:
    """What became of one pair.

    >>> [kind_of(1, 0), kind_of(0, 0.5), kind_of(0.5, 0.25), kind_of(0, 0), kind_of(1, float("nan"))]
    ['missing', 'extra', 'weight', 'hidden', 'nan']
    """
    if not math.isfinite(have) or not math.isfinite(want):
        return "nan"
    if seen(want) and not seen(have):
        return "missing"
    if seen(have) and not seen(want):
        return "extra"
    if abs(have - want) > THRESHOLD + 0.02 * abs(want):
        return "weight"
    return "seen" if seen(want) else "hidden"


def kinds(rows: Grid) -> list[list[str]]:
    return [[kind_of(x, x) for x in row] for row in rows]


def sentence(difference: list[list[str]], origin: Any = None) -> str:
    """How many pairs are wrong, and the first of them; the first cell is of query and key ``origin``."""
    top, left = origin if is_pair(origin) else (0, 0)
    flat = [kind for row in difference for kind in row]
    counts = {kind: flat.count(kind) for kind in KINDS}
    words = {
        "missing": "missing",
        "extra": "too much",
        "weight": "with another weight",
        "nan": "not finite",
    }
    parts = [
        f"{counts[kind]} pair{'' if counts[kind] == 1 else 's'} {word}"
        for kind, word in words.items()
        if counts[kind]
    ]
    if not parts:
        return "No pair differs visibly."
    row, column = next(
        (i, j) for i, line in enumerate(difference) for j, kind in enumerate(line) if kind in words
    )
    return f"{', '.join(parts)}. The first: query {top + row}, key {left + column}."


def is_pair(value: Any) -> bool:
    """Two whole numbers from 0 on."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(x) is int and 0 <= x < 1 << 53 for x in value)


def panel(title: str, cells: Sequence[Sequence[str]]) -> Html:
    cells = reduced(cells)
    rows, columns = len(cells), len(cells[0])
    paths = [
        element("path", class_=kind, d=outline)
        for kind in KINDS
        if (outline := path_of(cells, kind))
    ]
    size = max(rows, columns)
    svg = element(
        "svg",
        element("rect", class_="ground", width=columns, height=rows),
        *paths,
        viewBox=f"-0.05 -0.05 {columns + 0.1} {rows + 0.1}",
        width=max(PANEL * columns // size, 24),
        height=max(PANEL * rows // size, 24),
        role="img",
        aria_label=f"{title}: {rows} queries (rows) by {columns} keys (columns)",
    )
    return element("div", element("div", title, class_="panel-title"), svg, class_="panel")


def reduced(cells: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """At most MOST_DRAWN cells a side: of several pairs in one cell the most telling one is drawn."""
    step = -(-max(len(cells), len(cells[0])) // MOST_DRAWN)
    if step == 1:
        return cells
    rank = ("hidden", "seen", "weight", "missing", "extra", "nan")
    return [
        [
            max((kind for row in cells[i : i + step] for kind in row[j : j + step]), key=rank.index)
            for j in range(0, len(cells[0]), step)
        ]
        for i in range(0, len(cells), step)
    ]


def path_of(cells: Sequence[Sequence[str]], kind: str) -> str:
    """One SVG path of all cells of a kind."""
    shapes: dict[str, Callable[[int, int], str]] = {
        "seen": lambda i, j: f"M{j} {i}h1v1h-1z",
        "extra": lambda i, j: f"M{j} {i}h1v1h-1z",
        "nan": lambda i, j: f"M{j} {i}l1 1M{j + 1} {i}l-1 1",
        "missing": lambda i, j: f"M{j + 0.14:g} {i + 0.14:g}h.72v.72h-.72z",
        "weight": lambda i, j: f"M{j} {i}h1l-1 1z",
    }
    return "".join(
        shapes[kind](i, j)
        for i, row in enumerate(cells)
        for j, one in enumerate(row)
        if one == kind
    )
