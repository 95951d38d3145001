"""The style of all figures: colours, marks and hatches; and functions that all figures use.

Colours are those of Okabe and Ito (https://jfly.uni-koeln.de/color/), which colour-blind readers can distinguish. A
worker also has a hatch and a mark, for printing in greyscale. Every drawn element has a ``gid``, which is its name, so
that a test can read a figure as data.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringspec.errors import MissingPackageError, ShapeError

BLUE, VERMILLION, GREEN, YELLOW = "#0072B2", "#D55E00", "#009E73", "#F0E442"
ORANGE, SKY, PURPLE, BLACK = "#E69F00", "#56B4E9", "#CC79A7", "#000000"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, BLACK)
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "----", "oooo")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":")
HIDDEN, PALE, GREY = "#DDDDDD", "#F4F4F4", "#555555"

STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
    "figure.dpi": 110.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 5.0,
    "mathtext.fontset": "cm",
}


def matplotlib_module(name: str) -> Any:
    """Import a module of matplotlib; raise MissingPackageError if matplotlib is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            "matplotlib, which draws the figures",
            "no such package",
            "pip install 'ringspec[notebooks]' installs it",
        ) from error


@contextmanager
def sheet(rows: int, columns: int, width: float, height: float, **options: Any) -> Iterator[Any]:
    """Yield a new pyplot figure of ``width`` x ``height`` inches in the common style, and its panels [rows, columns].

    The style applies inside the ``with`` statement; afterwards the former settings of matplotlib are restored.
    """
    pyplot = matplotlib_module("matplotlib.pyplot")
    with pyplot.rc_context(STYLE):
        yield pyplot.subplots(
            rows,
            columns,
            figsize=(width, height),
            layout="constrained",
            squeeze=False,
            **options,
        )


def rectangle(
    axes: Any, left: float, bottom: float, width: float, height: float, **look: Any
) -> None:
    """Draw one rectangle; the keyword ``gid`` names it."""
    patches = matplotlib_module("matplotlib.patches")
    axes.add_patch(patches.Rectangle((left, bottom), width, height, **look))


def look_of(number: int) -> dict[str, Any]:
    """Return the face colour, edge colour and hatch of worker ``number``; they repeat after eight workers.

    >>> look_of(1)["facecolor"], look_of(1)["hatch"], look_of(9) == look_of(1)
    ('#E69F00', '////', True)
    """
    n = number % len(COLOURS)
    return {"facecolor": COLOURS[n], "edgecolor": "white", "hatch": HATCHES[n], "linewidth": 0.4}


def ink_on(number: int) -> str:
    """Return a colour in which text is readable on the colour of worker ``number``.

    >>> ink_on(0), ink_on(1)
    ('white', 'black')
    """
    return "white" if COLOURS[number % len(COLOURS)] in (BLUE, BLACK, VERMILLION) else "black"


def label(axes: Any, x: float, y: float, words: str, **look: Any) -> None:
    """Draw centred text."""
    axes.text(x, y, words, **({"ha": "center", "va": "center"} | look))


def ticks_of(count: int, most: int = 16) -> list[int]:
    """Return at most ``most`` evenly spaced whole numbers from 0 to count - 1, beginning with 0.

    >>> ticks_of(4), ticks_of(64)
    ([0, 1, 2, 3], [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60])
    """
    return list(range(0, count, max(1, -(-count // most))))


def want_shape(what: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise ShapeError unless the shapes are equal."""
    if shape != expected:
        raise ShapeError(f"{what} of shape {expected}", f"shape {shape}", "pass arrays that fit")
