"""Show progress on stderr: a spinner, or a bar with a count, the time used and an estimate of the time left."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
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
Count = Callable[[int, int, str], None]
Tick = Callable[[], None]


@contextmanager
def counting(what: str, wanted: bool = True) -> Iterator[Count]:
    """Show progress over cases or files: yield a function ``(done, total, name)`` to call after each case or file.

    If stderr is not a terminal, for example in a build log, a line is printed every 30 seconds.
    """
    console = console_on(sys.stderr)
    if not wanted:
        yield lambda done, total, name: None
    elif console.is_terminal:
        with bar(what, console) as count:
            yield count
    else:
        with lines(what) as count:
            yield count


@contextmanager
def stepping(what: str, total: int, wanted: bool) -> Iterator[Tick]:
    """Show progress over ``total`` steps: yield a function to call after each step. Without a terminal, do nothing."""
    console = console_on(sys.stderr)
    if not (wanted and console.is_terminal):
        yield lambda: None
        return
    numbers = itertools.count(1)
    with bar(what, console) as count:
        yield lambda: count(next(numbers), total, "")


@contextmanager
def working(what: str, wanted: bool) -> Iterator[None]:
    """Show a spinner during work that cannot be counted. Without a terminal, show nothing."""
    console = console_on(sys.stderr)
    if not (wanted and console.is_terminal):
        yield
        return
    with console.status(what):
        yield


@contextmanager
def trying(what: str, wanted: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of text until the next call replaces it. Without a terminal, show nothing."""
    console = console_on(sys.stderr)
    if not (wanted and console.is_terminal):
        yield lambda text: None
        return
    with console.status(what) as status:
        yield lambda text: status.update(f"{what}: {text}")


@contextmanager
def bar(what: str, console: Console) -> Iterator[Count]:
    """Show a progress bar, which is erased at the end."""
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[name]}"),
    )
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(what, total=None, name="")
        yield lambda done, total, name: shown.update(task, completed=done, total=total, name=name)


@contextmanager
def lines(what: str) -> Iterator[Count]:
    """Print progress lines instead of a bar. A thread prints them, so that they also appear during a long case."""
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
