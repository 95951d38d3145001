"""A progress bar that counts cases or files, with the time used and an estimate of the rest."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ringspec.cli.output import console_on


@contextmanager
def counting(what: str, wanted: bool = True) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function ``(done, total, name)``; the bar is on stderr where that is a terminal."""
    console = console_on(sys.stderr)
    if not (wanted and console.is_terminal):
        yield lambda done, total, name: None
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, name="")
        yield lambda done, total, name: bar.update(task, completed=done, total=total, name=name)
