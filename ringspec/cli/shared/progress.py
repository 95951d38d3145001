"""A progress bar that counts cases or files, with the time used and an estimate of the rest.

Where stderr is no terminal, such as the log of a build, it is a line every 30 seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ringspec.cli.shared.output import console_on

SECONDS_BETWEEN_LINES = 30.0
Tick = Callable[[int, int, str], None]


@contextmanager
def counting(what: str, wanted: bool = True) -> Iterator[Tick]:
    """Yields a function ``(done, total, name)``; the bar, or the lines, are on stderr."""
    console = console_on(sys.stderr)
    if not wanted:
        yield lambda done, total, name: None
        return
    if not console.is_terminal:
        with lines(what) as tick:
            yield tick
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


@contextmanager
def lines(what: str) -> Iterator[Tick]:
    """The same in lines, printed by a thread: also while one case takes long there is a sign of life."""
    begun, last, ended = time.monotonic(), "nothing done yet", threading.Event()

    def tick(done: int, total: int, name: str) -> None:
        nonlocal last
        last = f"{done} of {total} done, the last was {name}"

    def report() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            click.echo(f"{what}: {last}; {time.monotonic() - begun:.0f} s", err=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield tick
    finally:
        ended.set()
        thread.join()
