"""The pictures of known bugs, from what :mod:`bug_runs` read, with a caption and a text for who sees none.

matplotlib draws them when the pages are made. Colours are those of all figures of this package; no
meaning hangs on a colour alone.
"""

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from bug_pictures_words import Picture
from bug_runs import Pattern, Ratios, RowErrors, WorstErrors, factors, pairs_of
from matplotlib import rc_context
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ringspec.render.figures_style import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    HIDDEN,
    MARKERS,
    PALE,
    STYLE,
    VERMILLION,
    ticks_of,
)

SMALL = {
    "font.size": 8.0, "axes.titlesize": 8.0, "axes.labelsize": 8.0, "legend.fontsize": 7.5,
    "xtick.labelsize": 7.0, "ytick.labelsize": 7.0,
}  # fmt: skip
DPI = 110
NAN = "#CC79A7"
# Each worker has its own colour: blue and vermillion say what becomes of a pair.
OF_WORKERS = ("#555555", "#E69F00", "#56B4E9", "#F0E442", "#009E73", "#BBBBBB")
MOST_LABELLED = 8
# The colours end at a factor of 1.25, 2 or 4, whichever holds all factors; beyond 4 it is the last colour.
LIMITS = (float(np.log2(1.25)), 1.0, 2.0)


def draw(picture: Picture, path: Path) -> None:
    """Write the picture as PNG."""
    with rc_context(STYLE | SMALL):
        if isinstance(picture, Pattern):
            figure = weights_figure(picture) if picture.weights else pairs_figure(picture)
        elif isinstance(picture, RowErrors):
            figure = errors_figure(picture)
        else:
            figure = bars_figure(picture)
        # The version of matplotlib in a file would make every build another one.
        figure.savefig(path, dpi=DPI, metadata={"Software": None})


def pairs_figure(picture: Pattern) -> Any:
    """Two panels: visible pairs by the specification, and with the bug."""
    want, seen = pairs_of(picture)
    bad = ~np.isfinite(picture.got)
    figure, panels = two_panels(picture)
    for axes, cells, title in zip(panels, (want, seen), ("expected", "with the bug"), strict=True):
        colours = np.empty((*want.shape, 3))
        colours[...] = to_rgb(PALE)
        colours[cells & want] = to_rgb(BLUE)
        if cells is seen:
            colours[seen & ~want] = to_rgb(VERMILLION)
            colours[want & ~seen] = 1.0
            colours[bad] = to_rgb(NAN)
        show(axes, picture, title, colours)
    marks(panels[1], picture, seen & ~want & ~bad, "x", "white")
    marks(panels[1], picture, want & ~seen, ".", BLACK)
    marks(panels[1], picture, bad, "*", BLACK)
    handles = [Patch(facecolor=BLUE, label="visible")]
    if (seen & ~want & ~bad).any():
        handles.append(marked(VERMILLION, "x", "should be masked", "white"))
    if (want & ~seen).any():
        handles.append(marked("white", ".", "missing", BLACK))
    if bad.any():
        handles.append(marked(NAN, "*", "not finite", BLACK))
    legend(figure, handles)
    return figure


def weights_figure(picture: Pattern) -> Any:
    """Two panels: the expected magnitude, and the factor by which the result is wrong."""
    want, seen = pairs_of(picture)
    ratio, bad = factors(picture), ~np.isfinite(picture.got)
    figure, panels = two_panels(picture, room=True)
    size = np.where(want, np.abs(picture.expected), np.nan)
    show(panels[0], picture, "expected: size", np.sqrt(size), cmap=map_of("Blues"), vmin=0.0)
    with np.errstate(all="ignore"):
        logs = np.log2(np.abs(ratio))
    far = np.abs(logs[np.isfinite(logs)]).max(initial=0.0)
    most = next((limit for limit in LIMITS if far <= limit), LIMITS[-1])
    look = {"cmap": map_of("PuOr"), "vmin": -most, "vmax": most}
    right = show(
        panels[1], picture, "with the bug: factor", np.where(want & seen, logs, np.nan), **look
    )
    ticks = [-most, -most / 2, 0, most / 2, most]
    bar = figure.colorbar(right, ax=panels[1], shrink=0.85, ticks=ticks)
    bar.ax.set_yticklabels([f"{2.0**tick:.2g}" for tick in ticks])
    marks(panels[1], picture, want & seen & (ratio < 0), "_", BLACK)
    marks(panels[1], picture, seen & ~want & ~bad, "x", VERMILLION)
    marks(panels[1], picture, want & ~seen, ".", BLACK)
    handles = []
    for cells, mark, colour, words in (
        (want & seen & (ratio < 0), "_", BLACK, "wrong sign"),
        (seen & ~want & ~bad, "x", VERMILLION, "should be 0"),
        (want & ~seen, ".", BLACK, "missing"),
    ):
        if cells.any():
            handles.append(Line2D([], [], linestyle="none", marker=mark, color=colour, label=words))
    legend(figure, handles)
    return figure


def map_of(name: str) -> Any:
    """A colour map of matplotlib that shows masked pairs in grey."""
    return importlib.import_module("matplotlib").colormaps[name].with_extremes(bad=HIDDEN)


def two_panels(picture: Pattern, room: bool = False) -> tuple[Any, list[Any]]:
    rows, columns = picture.expected.shape
    height = min(3.4, max(2.0, 1.3 + 2.1 * rows / columns))
    figure = Figure(figsize=(6.2 if room else 5.8, height), layout="constrained")
    return figure, list(figure.subplots(1, 2))


def show(axes: Any, picture: Pattern, title: str, cells: Any, **look: Any) -> Any:
    """Draw cells with token numbers, and bars with the owner of each row and column."""
    (top, left), (rows, columns) = picture.origin, picture.expected.shape
    extent = (left - 0.5, left + columns - 0.5, top + rows - 0.5, top - 0.5)
    image = axes.imshow(cells, extent=extent, interpolation="nearest", aspect="equal", **look)
    width = 0.0
    if len({*picture.workers_q.tolist(), *picture.workers_k.tolist()}) > 1:
        width = 0.06 * max(rows, columns)
        bars(axes, picture, width)
    axes.set(
        xlim=(left - 0.5 - width, left + columns - 0.5), ylim=(top + rows - 0.5, top - 0.5 - width)
    )
    axes.set(title=title, xlabel="key (token number)")
    axes.set_xticks([left + n for n in ticks_of(columns, 8)])
    axes.set_yticks([top + n for n in ticks_of(rows, 8)])
    if title.startswith("expected"):
        axes.set_ylabel("query (token number)")
    # Between tokens, so that blocks can be counted in print.
    axes.set_xticks(left + np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(top + np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    return image


def bars(axes: Any, picture: Pattern, width: float) -> None:
    """Draw the owner of each row and column; consecutive tokens of one worker share a bar."""
    (top, left), patch = picture.origin, importlib.import_module("matplotlib.patches").Rectangle
    for across, workers in ((False, picture.workers_q), (True, picture.workers_k)):
        edges = [0, *(np.flatnonzero(np.diff(workers)) + 1).tolist(), len(workers)]
        for first, end in pairwise(edges):
            worker, count = int(workers[first]), end - first
            x, y = (
                (left + first - 0.5, top - 0.5 - width)
                if across
                else (left - 0.5 - width, top + first - 0.5)
            )
            size = (count, width * 0.85) if across else (width * 0.85, count)
            face = OF_WORKERS[worker % len(OF_WORKERS)]
            look = {"facecolor": face, "edgecolor": "white", "linewidth": 0.5, "zorder": 3}
            axes.add_patch(patch((x, y), *size, **look))
            axes.text(
                x + size[0] / 2, y + size[1] / 2, str(worker), ha="center", va="center_baseline", fontsize=5.5, zorder=4,
                color="white" if worker % len(OF_WORKERS) in (0, 4) else "black",
            )  # fmt: skip


def marks(axes: Any, picture: Pattern, cells: Any, marker: str, colour: str) -> None:
    rows, columns = np.nonzero(cells)
    if len(rows):
        size = 60.0 / max(cells.shape)
        axes.plot(
            columns + picture.origin[1], rows + picture.origin[0], linestyle="none", marker=marker,
            color=colour, markersize=size, markeredgewidth=min(1.2, size / 4),
        )  # fmt: skip


def marked(face: str, mark: str, label: str, ink: str) -> Any:
    return Line2D(
        [], [], linestyle="none", marker="s", markersize=8, markerfacecolor=face, label=f"{label} ({mark})",
        markeredgecolor=GREY, color=ink,
    )  # fmt: skip


def legend(figure: Any, handles: list[Any]) -> None:
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.2
        )


def errors_figure(picture: RowErrors) -> Any:
    """Plot error / bound of each row; the bound is a line."""
    errors = picture.errors
    finite = np.isfinite(errors)
    # Zeros are drawn at the floor, infinities at the ceiling.
    floor = 1e-3
    ceiling = 10.0 ** (np.ceil(np.log10(max(errors[finite].max(initial=1.0), 10.0))) + 0.7)
    figure = Figure(figsize=(5.8, 2.3), layout="constrained")
    axes = figure.subplots()
    x = np.arange(errors.size)
    for worker in sorted(set(picture.workers.tolist())):
        own = picture.workers == worker
        y = np.where(finite, np.clip(errors, floor, None), ceiling)
        axes.plot(
            x[own], y[own], linestyle="none", marker=MARKERS[worker % 8], markersize=4.5,
            color=COLOURS[worker % 8], label=f"worker {worker}", clip_on=False, zorder=3,
        )  # fmt: skip
    axes.plot(
        x[~finite],
        np.full((~finite).sum(), ceiling),
        "k*",
        markersize=9,
        fillstyle="none",
        zorder=4,
    )
    axes.axhline(1.0, color=BLACK, linewidth=1.0, linestyle="--")
    axes.annotate("bound", (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(3, 0),
                  textcoords="offset points", va="center")  # fmt: skip
    if (~finite).any():
        axes.annotate("not finite", (1.0, ceiling), xycoords=("axes fraction", "data"), xytext=(3, 0),
                      textcoords="offset points", va="center")  # fmt: skip
    axes.set_yscale("log")
    axes.set(
        ylim=(floor * 0.7, ceiling * 1.3),
        xlabel=picture.axis,
        ylabel=f"error of {picture.tensor} / bound (1)",
    )
    axes.set_xticks(ticks_of(errors.size, 16))
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    workers = sorted(set(picture.workers.tolist()))
    if len(workers) > 1:
        figure.legend(
            loc="outside lower center", ncols=min(len(workers), MOST_LABELLED), columnspacing=1.0
        )
    return figure


def bars_figure(picture: WorstErrors | Ratios) -> Any:
    """Draw one bar for each tensor, and the line that a correct program does not exceed."""
    figure = Figure(figsize=(5.8, 1.5 + 0.22 * len(picture.tensors)), layout="constrained")
    axes = figure.subplots()
    y = np.arange(len(picture.tensors))
    if isinstance(picture, Ratios):
        axes.barh(y - 0.2, picture.right, 0.36, color=BLUE, label="without the bug")
        axes.barh(
            y + 0.2,
            picture.got,
            0.36,
            color=VERMILLION,
            hatch="////",
            edgecolor="white",
            label="with the bug",
        )
        axes.set(xlabel="root mean square of error / predicted noise (1)")
        figure.legend(loc="outside lower center", ncols=2)
    else:
        axes.barh(y, picture.errors, 0.6, color=VERMILLION, hatch="////", edgecolor="white")
        axes.set(xlabel="largest error / bound (1)")
    axes.axvline(1.0, color=BLACK, linewidth=1.0, linestyle="--")
    axes.set_yticks(y, picture.tensors)
    axes.invert_yaxis()
    return figure
