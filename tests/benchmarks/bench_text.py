"""What the lines of a benchmark add up to: exponents, ratios to a baseline, and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
from benchmarks.bench_dense import Line

# What a line is, and what was measured of it.
KEYS = ("part", "pass", "dtype", "length", "causal", "workers", "profile", "jobs")


def exponents(lines: list[Line]) -> list[Line]:
    """Slopes of log(seconds) or log(added memory) over log(S), and over log(W), by least squares."""
    found = []
    for axis, name in (("length", "S"), ("workers", "W")):
        groups: dict[tuple[tuple[str, Any], ...], list[Line]] = {}
        for line in lines:
            if axis in line:
                key = tuple((k, line[k]) for k in KEYS if k in line and k != axis)
                groups.setdefault(key, []).append(line)
        for key, members in groups.items():
            measured = "seconds" if "seconds" in members[0] else "added MiB"
            x = [line[axis] for line in members]
            y = [line.get(measured, 0.0) for line in members]
            if len(set(x)) > 1 and min(y) > 0:
                slope = float(np.polyfit(np.log(x), np.log(y), 1)[0])
                found.append(dict(key) | {"of": measured, "in": name, "exponent": slope})
    return found


def against(lines: list[Line], earlier: list[Line]) -> list[Line]:
    """Here over there, of every line that both have: time in units of the bound, else seconds."""
    known = {identity(line): line for line in earlier}
    found = []
    for line in lines:
        other = known.get(identity(line))
        for measured, better in (
            ("share of bound", "higher"), ("peak MiB", "lower"), ("seconds", "lower")
        ):  # fmt: skip
            if other is not None and measured in line and measured in other:
                ratio = line[measured] / other[measured]
                ratio = 1 / ratio if better == "higher" else ratio
                key = {k: line[k] for k in KEYS if k in line}
                found.append(key | {"of": measured, "ratio": ratio})
                break
    return found


def identity(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(key) for key in KEYS)


def table(document: dict[str, Any]) -> list[str]:
    """The report as lines: one table for each part, exponents and ratios below."""
    head = f"{document['threads']} threads, NumPy {document['numpy']}, {document['machine']}"
    lines = [head]
    for part in dict.fromkeys(line["part"] for line in document["lines"]):
        lines += ["", f"{part}:", *rows([x for x in document["lines"] if x["part"] == part])]
    for name, title in (("exponents", "exponents:"), ("baseline", "here / baseline:")):
        if document.get(name):
            lines += ["", title, *rows(document[name])]
    return lines


def rows(entries: list[Line]) -> list[str]:
    """Entries of equal kind as an aligned table.

    >>> rows([{"part": "x", "length": 8, "seconds": 0.25}, {"part": "x", "length": 16, "seconds": 1.0}])
    ['  length  seconds', '  8       0.25', '  16      1']
    """
    names = list(dict.fromkeys(k for entry in entries for k in entry))
    if len({entry.get("part") for entry in entries}) == 1:
        names.remove("part")
    shown = [names, *([cell(entry.get(name)) for name in names] for entry in entries)]
    widths = [max(len(row[n]) for row in shown) for n in range(len(names))]
    return [
        "  " + "  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip()
        for row in shown
    ]


def cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
