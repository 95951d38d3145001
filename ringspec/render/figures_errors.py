"""Figures of errors: attention patterns, errors against the number of workers, errors by row, noise scores.

Each public function takes float or bool arrays and returns a matplotlib Figure of pyplot; no function writes a file.
Errors are in units of the row scale (``ringspec.compare.row_scale``), or of the predicted noise, which is the standard
deviation of rounding errors (docs/conform/noise.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.errors import OptionError
from ringspec.render.figures_style import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    LINES,
    MARKERS,
    PALE,
    SKY,
    VERMILLION,
    matplotlib_module,
    rectangle,
    sheet,
    ticks_of,
    want_shape,
)

MOST_POINTS = 2000
BINS = 12


def pattern_beside(
    expected: ArrayLike, got: ArrayLike, origin: tuple[int, int] = (0, 0), block: int | None = None
) -> Any:
    """Draw the attention pattern found in a kernel's results, next to the pattern that the mask requires.

    ``expected`` and ``got`` are bool [queries, keys] of one head. ``origin``: the numbers of the first query and the
    first key. ``block``: draw a line after every ``block`` tokens; None: no lines. A cross marks a pair that is visible
    but should be hidden. An empty frame with a dot marks a pair that is hidden but should be visible.
    """
    want, seen = np.asarray(expected, dtype=bool), np.asarray(got, dtype=bool)
    want_shape("got", seen.shape, want.shape)
    extra, missing = int((seen & ~want).sum()), int((want & ~seen).sum())
    titles = ("expected", f"recovered: {extra} too many, {missing} missing")
    with sheet(1, 2, 7.2, 4.2) as (figure, panels):
        for axes, cells, title in zip(panels[0], (want, seen), titles, strict=True):
            for (i, j), one in np.ndenumerate(cells):
                pattern_cell(axes, i + origin[0], j + origin[1], bool(want[i, j]), bool(one))
            frame(axes, want.shape, origin, block)
            axes.set(title=title, xlabel="key (token number)")
        panels[0][0].set_ylabel("query (token number)")
        patches = matplotlib_module("matplotlib.patches")
        words = {
            (True, True): "seen",
            (False, True): "seen, should be hidden",
            (True, False): "missing, should be seen",
        }
        handles = [patches.Patch(label=text, **LOOKS[key]) for key, text in words.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        return figure


# By (should be visible, is visible).
LOOKS: dict[tuple[bool, bool], dict[str, Any]] = {
    (True, True): {"facecolor": BLUE, "edgecolor": "white", "linewidth": 0.4},
    (False, True): {"facecolor": VERMILLION, "edgecolor": "white", "hatch": "xxxx"},
    (True, False): {"facecolor": "white", "edgecolor": BLACK, "hatch": "..", "linewidth": 1.0},
    (False, False): {"facecolor": PALE, "edgecolor": "white", "linewidth": 0.4},
}
NAMES = {
    (True, True): "seen",
    (False, True): "extra",
    (True, False): "missing",
    (False, False): "hidden",
}


def pattern_cell(axes: Any, i: int, j: int, want: bool, seen: bool) -> None:
    gid, look = NAMES[want, seen], LOOKS[want, seen]
    rectangle(axes, j - 0.5, i - 0.5, 1, 1, gid=gid, **look)


def frame(axes: Any, shape: tuple[int, ...], origin: tuple[int, int], block: int | None) -> None:
    """Set the limits and the ticks of a panel, and draw lines between blocks."""
    (top, left), (rows, columns) = origin, shape
    axes.set(xlim=(left - 0.5, left + columns - 0.5), ylim=(top + rows - 0.5, top - 0.5))
    axes.set(aspect="equal", xticks=[left + n for n in ticks_of(columns, 8)])
    axes.set_yticks([top + n for n in ticks_of(rows, 8)])
    if block is not None:
        for edge in range(-(-left // block) * block, left + columns + 1, block):
            axes.axvline(edge - 0.5, color=GREY, linewidth=0.8, gid="edge")
        for edge in range(-(-top // block) * block, top + rows + 1, block):
            axes.axhline(edge - 0.5, color=GREY, linewidth=0.8, gid="edge")


def error_against_workers(
    workers: Sequence[int],
    errors: Mapping[str, ArrayLike],
    quantity: str = "largest error / row scale (1)",
) -> Any:
    """Draw errors against the number of workers on logarithmic axes, one line for each recipe (where a kernel rounds).

    ``workers`` [N]: ascending numbers of workers. ``errors``: float [N] for the name of each recipe; raises OptionError
    unless all errors are > 0. ``quantity``: the label of the error axis, with its unit. Each line is labelled with the
    name of its recipe.
    """
    with sheet(1, 1, 6.4, 3.8) as (figure, panels):
        axes = panels[0][0]
        for n, (name, given) in enumerate(errors.items()):
            values = np.asarray(given, dtype=float)
            want_shape(f"errors of {name}", values.shape, (len(workers),))
            if not (values > 0).all():
                raise OptionError(
                    "errors > 0 on a logarithmic axis", str(values), "leave zeros out"
                )
            look = {"color": line_colour(n), "marker": MARKERS[n % 8], "linestyle": LINES[n % 4]}
            axes.plot(workers, values, gid=name, label=name, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(workers), [str(count) for count in workers])
        plain_numbers_within_a_decade(axes, errors)
        axes.set(xlabel="W, number of workers", ylabel=quantity)
        axes.grid(axis="y", color=PALE, linewidth=0.8)
        figure.legend(loc="outside right center", title="recipe")
        return figure


def error_by_row(
    errors: Mapping[str, ArrayLike],
    limits: Mapping[str, ArrayLike],
    quantity: str = "largest error of the row (1)",
) -> Any:
    """Draw the error of every row and the limits of several tolerance rules on a logarithmic axis.

    ``errors`` maps the name of each kernel to [rows] numbers >= 0, drawn as marks (a 0 is not drawn). ``limits`` maps
    the name of each rule to [rows] numbers or to one number for all rows, drawn as lines. ``quantity`` is the label of
    the error axis, with its unit. Later kernels are drawn over earlier kernels.
    """
    with sheet(1, 1, 7.2, 3.8) as (figure, panels):
        axes = panels[0][0]
        rows = len(np.asarray(next(iter(errors.values()), ())))
        axes.set_yscale("log")
        for n, (name, given) in enumerate(errors.items()):
            values = heights(name, given, rows)
            look = {"color": COLOURS[n % 8], "marker": SMALL_MARKERS[n % 4], "markersize": 2.5}
            axes.plot(values, linestyle="none", gid=name, label=name, zorder=3, **look)
        for n, (name, given) in enumerate(limits.items()):
            values = np.broadcast_to(np.asarray(given, dtype=float), (rows,))
            look = {"color": (BLACK, VERMILLION, GREY)[n % 3], "linestyle": LINES[n % 4]}
            axes.plot(heights(name, values, rows), gid=name, label=name, linewidth=1.0, **look)
        # Limits near 0 in a row with one key would take most of the height of the figure.
        drawn = np.concatenate([heights(name, x, rows) for name, x in errors.items()])
        if np.isfinite(drawn).any():
            axes.set_ylim(bottom=0.5 * float(np.nanmin(drawn)))
        axes.set(xlabel="row (token number)", ylabel=quantity, xlim=(0, rows))
        axes.grid(axis="y", color=PALE, linewidth=0.8)
        figure.legend(loc="outside lower center", ncols=2, markerscale=2.5)
        return figure


def plain_numbers_within_a_decade(axes: Any, errors: Mapping[str, ArrayLike]) -> None:
    """Use ticks such as 1.5 and 2 if all errors are within one decade, which contains few powers of ten."""
    values = np.concatenate([np.asarray(x, dtype=float) for x in errors.values()] or [np.ones(1)])
    if values.max() < 10 * values.min() and 0.1 < values.min() < 10:
        ticker = matplotlib_module("matplotlib.ticker")
        axes.yaxis.set_major_locator(ticker.MaxNLocator(9, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_locator(ticker.NullLocator())


SMALL_MARKERS = ("x", ".", "+", "1")


def heights(name: str, given: ArrayLike, rows: int) -> NDArray[Any]:
    """Return numbers [rows] for a logarithmic axis, with NaN (not drawn) in place of 0.

    >>> heights("right", [0.0, 2.0], 2).tolist()
    [nan, 2.0]
    """
    values = np.asarray(given, dtype=float)
    want_shape(f"numbers of {name}", values.shape, (rows,))
    if not (values >= 0).all():
        raise OptionError("numbers >= 0 on a logarithmic axis", str(values), "leave NaN out")
    return np.where(values > 0, values, np.nan)


def line_colour(number: int) -> str:
    """Return the colour of line ``number``, with dark grey in place of yellow, which is too pale.

    >>> line_colour(6)
    '#555555'
    """
    colour = COLOURS[number % len(COLOURS)]
    return GREY if colour == "#F0E442" else colour


def noise_scores(z: ArrayLike, size: ArrayLike) -> Any:
    """Draw errors in units of their predicted noise, and show whether they grow with the result.

    ``z`` float [N]: error of each element divided by its predicted standard deviation. ``size`` [N]: the true value
    divided by the same standard deviation. The left panel shows the histogram of z and the standard normal density. The
    right panel shows z against size, the mean of z in each of 12 bins (with bars of two standard errors), and the
    fitted line z = slope * size. If all results are wrong by a factor of 1.001, the slope is 0.001, whatever the noise.
    """
    scores, sizes = np.asarray(z, dtype=float).ravel(), np.asarray(size, dtype=float).ravel()
    want_shape("size", sizes.shape, scores.shape)
    slope, sd = slope_of(scores, sizes)
    with sheet(1, 2, 8.0, 3.6) as (figure, panels):
        histogram(panels[0][0], scores)
        axes = panels[0][1]
        step = -(-len(scores) // MOST_POINTS)
        look = {"linestyle": "none", "marker": ".", "markersize": 2, "color": SKY}
        axes.plot(sizes[::step], scores[::step], gid="elements", label="elements", **look)
        centres, means, errors = binned(sizes, scores)
        axes.errorbar(centres, means, yerr=2 * errors, fmt="s", color=BLACK, label="mean of a bin")
        ends = np.array([sizes.min(), sizes.max()])
        axes.plot(ends, slope * ends, color=VERMILLION, linestyle="--", gid="slope", label="slope")
        axes.set(xlabel="true value / predicted noise (1)", ylabel="z = error / noise (1)")
        axes.set_title(f"slope {slope:.2e}, {slope / sd:+.1f} standard deviations from 0")
        axes.legend(loc="best")
        return figure


def slope_of(z: NDArray[Any], size: NDArray[Any]) -> tuple[float, float]:
    """Return the least-squares slope of z = slope * size, and its standard deviation under z ~ N(0, 1).

    >>> slope_of(np.array([0.5, 1.0]), np.array([1.0, 2.0]))
    (0.5, 0.4472135954999579)
    """
    squares = float((size * size).sum())
    if not squares > 0:
        raise OptionError("sizes that are not all 0", "zeros", "pass true value / noise")
    return float((z * size).sum()) / squares, squares**-0.5


def binned(x: NDArray[Any], y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Divide the points, sorted by x, into equal bins; return mean x, mean y and the standard error of y by bin."""
    parts = [part for part in np.array_split(np.argsort(x, kind="stable"), BINS) if part.size > 1]
    centres = np.array([x[part].mean() for part in parts])
    means = np.array([y[part].mean() for part in parts])
    errors = np.array([y[part].std(ddof=1) / np.sqrt(part.size) for part in parts])
    return centres, means, errors


def histogram(axes: Any, z: NDArray[Any]) -> None:
    """Draw the histogram of z and the standard normal density; values beyond -5 and 5 count in the outer bars."""
    edges = np.linspace(-5, 5, 41)
    counts, _ = np.histogram(np.clip(z, -5, 5), bins=edges)
    width = edges[1] - edges[0]
    for left, count in zip(edges[:-1], counts, strict=True):
        height = count / (len(z) * width)
        rectangle(
            axes, left, 0, width, height, facecolor=SKY, edgecolor="white", linewidth=0.4, gid="z"
        )
    x = np.linspace(-5, 5, 201)
    normal = np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    axes.plot(x, normal, color=BLACK, gid="normal", label="standard normal")
    axes.set(xlim=(-5.1, 5.1), ylim=(0, 1.15 * max(0.4, float(counts.max()) / (len(z) * width))))
    axes.set(xlabel="z = error / predicted noise (1)", ylabel="density (1)")
    axes.set_title(f"{len(z)} elements: mean {z.mean():+.3f}, standard deviation {z.std():.3f}")
    axes.legend(loc="upper right")
