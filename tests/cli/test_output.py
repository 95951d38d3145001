"""What every command prints: at most 80 columns into a pipe, and colours on a terminal unless NO_COLOR is set."""

import os
import subprocess
import sys

import click
import pytest
from cli.commands import call
from click.testing import CliRunner

from ringspec.cli import main

COLUMNS = 80
TABLES = [
    ("simulate", "--workers", 8, "--batch", 3, "--sinks", 1),
    ("simulate", "--workers", 17, "--length", 34, "--no-backward"),
    ("schedule", "--workers", 16, "--layout", "zigzag", "--length", 4096),
    ("schedule", "--workers", 4, "--layout", "zigzag_per_document", "--documents", "40,24"),
    ("plan", "--workers", "2,64", "--kv-heads", 8),
    ("plan", "--workers", 512, "--length", 4096),
    ("vectors", "list"),
    ("vectors", "list", "kernel"),
    ("vectors", "show", "ring/everything-striped-w3", "--tensors"),
    ("vectors", "list", "merge"),
    ("vectors", "list", "cp"),
    ("vectors", "show", "schedule/gather-w3", "--tensors"),
    ("vectors", "show", "partials/nan-first-w2-float32", "--tensors"),
    ("vectors", "show", "padded/usp-w4", "--tensors"),
    ("vectors", "diff", "core", "kernel"),
    ("smoke", "reference-bf16", "--timeout", 0),
]


def pages(command: click.Command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The words that print the help of a command and of all commands below it."""
    below = command.commands.items() if isinstance(command, click.Group) else ()
    return [(*words, "--help")] + [
        page for name, one in below for page in pages(one, (*words, name))
    ]


@pytest.mark.parametrize("words", TABLES, ids=lambda words: " ".join(map(str, words)))
def test_every_table_fits_80_columns(words):
    result = call(*words[1:], command=words[0])
    assert result.exit_code in (0, 1), result.output
    assert [line for line in result.stdout.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.parametrize("words", pages(main), ids=" ".join)
def test_every_help_page_fits_80_columns(words):
    result = CliRunner().invoke(main, words, terminal_width=COLUMNS)
    assert [line for line in result.stdout.splitlines() if len(line) > COLUMNS] == []


def on_a_terminal(words, **environment):
    """What a command writes to a pseudo-terminal."""
    import pty

    terminal, end = pty.openpty()
    plain = {k: x for k, x in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ringspec", *map(str, words)],
        env=plain
        | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color"}
        | environment,
        stdout=end,
        stderr=subprocess.DEVNULL,
    )
    os.close(end)
    shown = b""
    try:
        while part := os.read(terminal, 1 << 16):
            shown += part
    except OSError:  # Linux says so when the other end is closed
        pass
    process.wait(timeout=600)
    os.close(terminal)
    return shown


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("words", "styled"),
    [
        (("simulate", "--workers", 3), b"agrees"),
        (("schedule", "--workers", 3), b"(0)"),
        (("plan", "--workers", 512, "--length", 4096), b"of the time is wasted"),
        (("replay", "reference-bf16", "attention/plain", "--timeout", 0), b"pass"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else "",
)
def test_a_terminal_gets_colours_and_none_where_NO_COLOR_is_set(words, styled):
    coloured, plain = on_a_terminal(words), on_a_terminal(words, NO_COLOR="1")
    assert b"\x1b[" in coloured and styled in coloured
    assert b"\x1b" not in plain and styled in plain
