"""An attention pattern that differs from the expected one, as an SVG picture.

The picture has three panels: expected, got, difference. A cell is the pair of one query (row) and one key (column).
Shape and colour show the kind of a difference. Hollow square: the pair should be visible and is hidden. Full square:
the pair should be hidden and is visible. Half a square: the pair has a wrong weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 1024
MOST_DRAWN = 96
PANEL = 240
# A smaller weight counts as 0, and a smaller difference as rounding error.
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


@dataclass(frozen=True)
class Panel:
    """One panel: ``rows`` x ``columns`` cells on ``width`` x ``height`` pixels; each kind of cell is one SVG path."""

    title: str
    rows: int
    columns: int
    width: int
    height: int
    paths: list[tuple[str, str]]


@dataclass(frozen=True)
class Picture:
    """The content that ``templates/picture.html`` draws.

    ``key``: the legend, with (kind, SVG path, meaning) of each sign. ``lines``: the SVG path of the lines between
    blocks, in units of cells.
    """

    caption: str | None
    panels: list[Panel]
    sentence: str
    key: list[tuple[str, str, str]]
    lines: str = ""


def picture(data: Any) -> Picture | None:
    """Return the picture of ``data``, {"expected": rows, "got": rows}; None if ``data`` is not of this form.

    Optional keys of ``data``: "caption"; "block", the number of cells between lines; "origin", the numbers of the first
    query and the first key.

    >>> drawn = picture({"expected": [[1, 0], [1, 1]], "got": [[1, 1], [0, 1]]})
    >>> drawn.sentence
    '1 pair missing, 1 pair too many. The first: query 0, key 1.'
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
    there = {kind for row in difference for kind in row}
    words = data.get("caption")
    return Picture(
        words if isinstance(words, str) else None,
        [
            panel("expected", kinds(expected)),
            panel("got", kinds(got)),
            panel("difference", difference),
        ],
        sentence(difference, data.get("origin")),
        [(kind, path_of([[kind]], kind), MEANINGS[kind]) for kind in MEANINGS if kind in there],
        between_blocks(data.get("block"), *shape(expected)),
    )


def between_blocks(block: Any, rows: int, columns: int) -> str:
    """Return the SVG path of lines after every ``block`` cells.

    The path is empty if ``block`` is not a whole number, or if one cell stands for several pairs.
    """
    if type(block) is not int or block < 1 or max(rows, columns) > MOST_DRAWN:
        return ""
    across = "".join(f"M0 {i}h{columns}" for i in range(block, rows, block))
    return across + "".join(f"M{j} 0v{rows}" for j in range(block, columns, block))


def grid(rows: Any) -> Grid | None:
    """Return ``rows`` as lists of numbers, all of equal length; None if that is not possible."""
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
    """Return the kind of cell for a pair with the expected weight ``want`` and the actual weight ``have``.

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
    """Say how many pairs are wrong and which comes first; ``origin`` has the numbers of the first query and key."""
    top, left = origin if is_pair(origin) else (0, 0)
    flat = [kind for row in difference for kind in row]
    counts = {kind: flat.count(kind) for kind in KINDS}
    words = {
        "missing": "missing",
        "extra": "too many",
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
    """Return whether ``value`` is a list of two whole numbers >= 0."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(type(x) is int and 0 <= x < 1 << 53 for x in value)


def panel(title: str, cells: Sequence[Sequence[str]]) -> Panel:
    cells = reduced(cells)
    rows, columns = len(cells), len(cells[0])
    width, height = (max(PANEL * n // max(rows, columns), 24) for n in (columns, rows))
    paths = [(kind, outline) for kind in KINDS if (outline := path_of(cells, kind))]
    return Panel(title, rows, columns, width, height, paths)


def reduced(cells: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Reduce a pattern to at most MOST_DRAWN cells a side.

    A cell that then stands for several pairs is drawn like the most important of these pairs.
    """
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
    """Return a single SVG path that draws all cells of one kind."""
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
