"""Output of the commands: results on stdout, everything else on stderr.

The text is plain ASCII. On a terminal it is coloured unless NO_COLOR is set.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import click
from rich.console import Console
from rich.text import Text

from ringspec.cli.shared.ranks import launched
from ringspec.conformance.report.records import FAILURES
from ringspec.conformance.report.words import folded

PLAIN_WIDTH = 80
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
FAILED = "|".join(FAILURES)
# Parts of the text that have a style on a terminal: headings, cells without a visible pair, verdicts, outcomes.
STYLES = (
    (
        r"^(worker .*|((KV|Q) ring|gathered keys)[^:]*:|verdict:|legend:|diagnosis:|passed \d+ of .*)",
        "bold",
    ),
    (r"(q\d+ x k\d+ \(0\)|(?<= )-(?= |$))", "dim"),
    (r"(\bagrees\b|(?<=: )pass$)", "bold green"),
    (rf"(\bDISAGREES\b|(?<=: )({FAILED})(?=:|$)|^[\d.]+ % of the time is wasted)", "bold red"),
)


def console_on(stream: TextIO) -> Console:
    """Return a console for a stream; it counts as a terminal only if the stream is a terminal. FORCE_COLOR is ignored.

    Under an MPI launcher the console never counts as a terminal, because Open MPI gives each rank a terminal even if the
    output goes to a file.
    """
    terminal = stream.isatty() and launched() is None
    return Console(file=stream, force_terminal=terminal, markup=False, highlight=False, emoji=False)


def width() -> int:
    """Return the number of columns of the terminal, or 80 if stdout is not a terminal."""
    console = console_on(sys.stdout)
    return console.width if console.is_terminal else PLAIN_WIDTH


def show(lines: Iterable[str]) -> None:
    """Print lines to stdout; wrap lines that exceed the width of the terminal."""
    echo(folded(list(lines), width()))


def echo(lines: Iterable[str]) -> None:
    """Print lines to stdout without breaking them, with styles if stdout is a terminal and NO_COLOR is not set."""
    console = console_on(sys.stdout)
    for line in lines:
        if not console.is_terminal or console.no_color:
            click.echo(line)
            continue
        text = Text(line)
        for pattern, style in STYLES:
            text.highlight_regex(pattern, style)
        console.print(text, soft_wrap=True)


def show_json(document: dict[str, Any]) -> None:
    """Print one JSON document to stdout; NaN and infinity, which JSON lacks, become strings."""
    click.echo(json.dumps(plain(document), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """Convert a document to plain JSON data; NaN and infinity become text.

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
    """Return a table as lines, with ``labels`` as the first column; columns that exceed ``width`` continue below.

    Entries are aligned on the left, or on the right if ``numbers`` is True.

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


def printable(text: str) -> str:
    r"""Replace control characters and characters outside ASCII by escapes.

    >>> printable("a\x1b[2Jb\u00e9")
    'a\\x1b[2Jb\\xe9'
    """
    visible = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    return visible.encode("ascii", "backslashreplace").decode("ascii")
