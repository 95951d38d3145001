"""What the commands print: the same text everywhere, with colour on a terminal.

Results go to stdout, everything else to stderr. Into a pipe or a file goes plain ASCII text.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, TextIO

import click
from rich.console import Console
from rich.text import Text

from ringspec.cli.shared.ranks import launched
from ringspec.conformance.report.words import folded

PLAIN_WIDTH = 100
# Parts that a terminal shows in a style: headings, cells without a visible pair, the verdict.
STYLES = (
    (r"^(worker .*|((KV|Q) ring|gathered keys)[^:]*:|verdict:|legend:)", "bold"),
    (r"(q\d+ x k\d+ \(0\)|(?<= )-(?= |$))", "dim"),
    (r"\bagrees\b", "bold green"),
    (r"\bDISAGREES\b", "bold red"),
)


def console_on(stream: TextIO) -> Console:
    """A console that is a terminal if the stream is one, whatever FORCE_COLOR says.

    Never a terminal under an MPI launcher: Open MPI gives ranks its own, wherever the output goes.
    """
    terminal = stream.isatty() and launched() is None
    return Console(file=stream, force_terminal=terminal, markup=False, highlight=False, emoji=False)


def width() -> int:
    """Columns of the terminal, or 100 if stdout is not a terminal."""
    console = console_on(sys.stdout)
    return console.width if console.is_terminal else PLAIN_WIDTH


def show(lines: list[str], width: int) -> None:
    """Print lines to stdout, prose folded at ``width``; tables fit already (see bands)."""
    console = console_on(sys.stdout)
    for line in folded(lines, width):
        text = Text(line)
        if console.is_terminal:
            for pattern, style in STYLES:
                text.highlight_regex(pattern, style)
            console.print(text, soft_wrap=True)
        else:
            click.echo(text.plain)


def show_json(document: dict[str, Any]) -> None:
    """One JSON document to stdout; JSON has no NaN and no infinity, so these become strings."""
    click.echo(json.dumps(plain(document), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """Make a document plain JSON data; a number that is not finite becomes text.

    >>> plain({"error": [1.0, float("inf")]})
    {'error': [1.0, 'inf']}
    """
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def bands(
    labels: list[str], columns: list[list[str]], width: int, *, numbers: bool = False
) -> list[str]:
    """A table as lines; columns that exceed ``width`` continue below.

    Entries are aligned on the left, or on the right if they are ``numbers``.

    >>> bands(["", "a"], [["one", "1"], ["longer", "2"]], 100)
    ['   one  longer', 'a  1    2']
    >>> bands(["", "a"], [["one", "1"], ["two", "2"]], 8, numbers=True)
    ['   one', 'a    1', '   two', 'a    2']
    """
    margin = max(map(len, labels))
    done: list[str] = []
    lines: list[str] = []
    used = width
    for column in columns:
        size = max(map(len, column))
        if used + 2 + size > width:
            done += lines
            lines, used = [label.rjust(margin) for label in labels], margin
        entries = [entry.rjust(size) if numbers else entry.ljust(size) for entry in column]
        lines = [f"{line}  {entry}" for line, entry in zip(lines, entries, strict=True)]
        used += 2 + size
    return [line.rstrip() for line in done + lines]
