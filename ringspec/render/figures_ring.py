"""Figures of a ring: computed pairs, transfers, balance of work, the softmax state of a row, and times.

Each public function takes arrays and plain data, which a notebook can read from a recorded run. It returns a matplotlib
Figure of pyplot and writes no file. Sources: Liu et al., https://arxiv.org/abs/2310.01889; Brandon et al.,
https://arxiv.org/abs/2311.09431 (the balance of layouts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringspec.render.figures_style import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    HIDDEN,
    LINES,
    MARKERS,
    PALE,
    VERMILLION,
    ink_on,
    label,
    look_of,
    matplotlib_module,
    rectangle,
    sheet,
    ticks_of,
    want_shape,
)

Pair = tuple[int, int]
Meetings = Sequence[Sequence[tuple[int, Pair]]]
MOST_NUMBERED = 16


def attention_pattern(
    visible: ArrayLike, table_q: ArrayLike, table_k: ArrayLike, steps: Meetings
) -> Any:
    """Draw which worker computes which (query, key) pairs, one panel for each step.

    ``visible`` bool [Sq, Sk]: the mask. ``table_q`` and ``table_k`` int [W, n]: the token in each slot of each worker,
    -1 for padding. ``steps``: for each step, the list of (worker, (owner of the queries, owner of the keys)) that
    ``Schedule.pairs`` returns. A coloured cell is a visible pair; with up to 16 queries and keys, the cell shows the
    number of the worker that computes the pair. A grey, hatched cell is a hidden pair that is computed.
    """
    seen = np.asarray(visible, dtype=bool)
    tokens_q, tokens_k = np.asarray(table_q), np.asarray(table_k)
    n_q, n_k = seen.shape
    numbered = max(n_q, n_k) <= MOST_NUMBERED
    side = 2.5 if len(steps) > 2 else 3.4
    with sheet(1, len(steps), side * len(steps) + 0.4, side + 0.9) as (figure, panels):
        for t, (axes, meetings) in enumerate(zip(panels[0], steps, strict=True)):
            for worker, (a, b) in meetings:
                for i in tokens_q[a][tokens_q[a] >= 0]:
                    for j in tokens_k[b][tokens_k[b] >= 0]:
                        pair_cell(axes, int(i), int(j), worker, bool(seen[i, j]), numbered)
            axes.set(xlim=(-0.5, n_k - 0.5), ylim=(n_q - 0.5, -0.5), aspect="equal")
            axes.set(xticks=ticks_of(n_k, 8), yticks=ticks_of(n_q, 8), title=f"step {t}")
            axes.set_xlabel("key (token number)")
            axes.spines[["top", "right"]].set_visible(True)
        panels[0][0].set_ylabel("query (token number)")
        worker_legend(figure, tokens_q.shape[0], numbered)
        return figure


def pair_cell(axes: Any, i: int, j: int, worker: int, seen: bool, numbered: bool) -> None:
    """Draw the cell of query i and key j, which ``worker`` computes."""
    if not seen:
        look = {"facecolor": HIDDEN, "edgecolor": "white", "hatch": "////", "linewidth": 0.4}
        rectangle(axes, j - 0.5, i - 0.5, 1, 1, gid=f"hidden {worker}", **look)
        return
    look = look_of(worker)
    if numbered:
        look["hatch"] = ""
    rectangle(axes, j - 0.5, i - 0.5, 1, 1, gid=f"seen {worker}", **look)
    if numbered:
        label(axes, j, i, str(worker), color=ink_on(worker), fontsize=7)


def worker_legend(figure: Any, workers: int, numbered: bool) -> None:
    """Draw a legend of the colours and hatches under the panels."""
    patches = matplotlib_module("matplotlib.patches")
    looks = [look_of(r) | ({"hatch": ""} if numbered else {}) for r in range(workers)]
    handles = [patches.Patch(label=f"worker {r}", **look) for r, look in enumerate(looks)]
    hidden = {"facecolor": HIDDEN, "edgecolor": "white", "hatch": "////"}
    handles.append(patches.Patch(label="computed, hidden by the mask", **hidden))
    handles.append(patches.Patch(label="not in this step", facecolor="white", edgecolor=GREY))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


def schedule_diagram(
    uses: Sequence[Sequence[int | None]],
    hops: Sequence[Sequence[tuple[str, Sequence[Pair]]]],
    visitor: str = "k",
    home: str | None = None,
) -> Any:
    """Draw whose block each worker has in each step, and where blocks are sent.

    The visiting block is the block that travels. ``uses`` [steps][W]: the owner of the block that visits each worker;
    None if the worker computes nothing. ``hops`` [steps]: the transfers after each step, as (what travels, pairs
    (source, target)). ``visitor``: the symbols of the visiting block, such as "k" or "k dk". ``home``: the symbol, such
    as "dk", of the tensors that return to their owners after the last step; they are drawn in an additional column.
    None: these transfers are not drawn.
    """
    steps, workers = len(uses), len(uses[0])
    columns = steps + (home is not None)
    with sheet(1, 1, 1.75 * columns + 0.7, 0.62 * workers + 1.0) as (figure, panels):
        axes = panels[0][0]
        for t in range(columns):
            for r in range(workers):
                owner = uses[t][r] if t < steps else r
                held_block(axes, t, r, owner, visitor if t < steps else str(home))
        for t in range(columns - 1):
            for name, pairs in hops[t]:
                for source, target in pairs:
                    arrow(axes, t, source, target, workers, name)
            what = "\n".join(name for name, _ in hops[t])
            label(axes, t + 0.5, -0.5, what, fontsize=7, color=GREY, va="bottom")
        names = [f"step {t}" for t in range(steps)] + (["home"] if home is not None else [])
        axes.set(xlim=(-0.5, columns - 0.5), ylim=(workers - 0.5, -0.95))
        axes.set(xticks=range(columns), yticks=range(workers), xticklabels=names)
        axes.set(xlabel="time (ring steps); above the arrows: what travels", ylabel="worker")
        return figure


def held_block(axes: Any, t: int, worker: int, owner: int | None, symbol: str) -> None:
    """Draw the box of one worker in step ``t``: the visiting block, or a dash if there is none."""
    look = {"facecolor": PALE, "edgecolor": GREY, "linewidth": 0.8}
    words, ink = "–", "black"
    if owner is not None:
        look |= {"facecolor": COLOURS[owner % len(COLOURS)]}
        words = ", ".join(f"{name}{owner}" for name in symbol.split())
        ink = ink_on(owner)
        if owner == worker:  # a worker's own block has a heavy frame
            look |= {"edgecolor": BLACK, "linewidth": 2.0}
    rectangle(axes, t - 0.19, worker - 0.27, 0.38, 0.54, gid=f"block {owner}", **look)
    label(axes, t, worker, words, color=ink, fontsize=8)


def arrow(axes: Any, t: int, source: int, target: int, workers: int, name: str) -> None:
    """Draw an arrow from worker ``source`` in step ``t`` to worker ``target`` in the next step.

    The arrow from the last worker to the first is dashed.
    """
    around = workers > 2 and abs(source - target) == workers - 1
    patches = matplotlib_module("matplotlib.patches")
    drawn = patches.FancyArrowPatch(
        (t + 0.2, source),
        (t + 0.8, target),
        arrowstyle="-|>",
        mutation_scale=9,
        color=GREY,
        linewidth=1.0,
        linestyle="--" if around else "-",
        shrinkA=0,
        shrinkB=0,
        gid=f"{name}: {source} to {target}",
    )
    axes.add_patch(drawn)


def work_balance(pairs: Mapping[str, ArrayLike]) -> Any:
    """Draw, for each layout, the number of visible pairs of each worker in each step and in total.

    ``pairs`` maps the name of each layout to int [steps, W], as in ``Cost.pairs``. The upper panels show the counts by
    step; a darker cell has more pairs. A star marks the busiest worker of a step, for which all other workers wait. The
    lower panels show the totals, with a dashed line at the mean total. ``imbalance`` in a panel is the largest total
    divided by the mean total. ``lockstep`` is the sum over steps of the largest count, divided by the mean total.
    """
    counts = {name: np.asarray(values) for name, values in pairs.items()}
    most = max(1, max(int(one.max()) for one in counts.values()))
    with sheet(2, len(counts), 3.3 * len(counts), 5.0, sharex=False) as (figure, panels):
        for n, (name, one) in enumerate(counts.items()):
            heat(panels[0][n], one, most)
            busiest, mean = one.max(axis=1).sum(), one.mean(axis=1).sum()
            total = one.sum(axis=0)
            panels[0][n].set_title(
                f"{name}\nimbalance {share(total.max(), total.mean()):.2f}, "
                f"lockstep {share(busiest, mean):.2f}"
            )
            axes = panels[1][n]
            for r, height in enumerate(total):
                look = {"facecolor": BLUE, "edgecolor": "white"}
                rectangle(axes, r - 0.35, 0, 0.7, float(height), gid=f"total {r}", **look)
            axes.axhline(total.mean(), color=BLACK, linestyle="--", linewidth=1, gid="mean")
            highest = max(int(one.sum(axis=0).max()) for one in counts.values())
            axes.set(xlim=(-0.6, len(total) - 0.4), ylim=(0, 1.08 * max(highest, 1)))
            axes.set(xticks=ticks_of(len(total)), xlabel="worker")
        panels[0][0].set_ylabel("worker")
        panels[1][0].set_ylabel("visible pairs, all steps (count)")
        return figure


def heat(axes: Any, counts: NDArray[Any], most: int) -> None:
    """Draw counts [steps, W] as coloured cells with numbers."""
    colours = matplotlib_module("matplotlib").colormaps["Blues"]
    steps, workers = counts.shape
    for (t, r), count in np.ndenumerate(counts):
        dark = 0.75 * count / most
        look = {"facecolor": colours(dark), "edgecolor": "white"}
        rectangle(axes, t - 0.5, r - 0.5, 1, 1, gid=f"count {t} {r}", **look)
        star = "*" if count == counts[t].max() > counts[t].min() else ""
        label(axes, t, r, f"{count}{star}", color="white" if dark > 0.45 else "black", fontsize=8)
    axes.set(xlim=(-0.5, steps - 0.5), ylim=(workers - 0.5, -0.5))
    axes.set(xticks=ticks_of(steps), yticks=ticks_of(workers), xlabel="step (* busiest worker)")


def share(part: float, whole: float) -> float:
    """Divide ``part`` by ``whole``; return 1 if the whole is 0.

    >>> share(3, 2), share(0, 0)
    (1.5, 1.0)
    """
    return float(part / whole) if whole else 1.0


def row_state(
    m: ArrayLike,
    l: ArrayLike,
    o: ArrayLike,
    *,
    lse: float | None = None,
    final_o: ArrayLike | None = None,
    counted: str = "steps done",
) -> Any:
    """Draw the running softmax of one query row after each step: m, l, o, m + log l and o / l.

    ``m`` and ``l`` [T], ``o`` [T, Dv] unnormalised, where T is the number of steps + 1. The first entry is the empty
    state, whose m = -inf is not drawn. ``lse`` (nats) and ``final_o`` [Dv] are the final values of m + log l and of o /
    l, drawn as thin horizontal lines; None: no lines. ``counted`` is the label of the horizontal axis.
    """
    m, l, o = (np.asarray(x, dtype=float) for x in (m, l, o))
    want_shape("l", l.shape, m.shape)
    want_shape("o", o.shape[:1], m.shape)
    some = np.where(l == 0, np.nan, l)
    with sheet(2, 3, 8.4, 4.6) as (figure, grid):
        *panels, unused = grid.flat
        unused.remove()
        lines(panels[0], np.where(np.isfinite(m), m, np.nan), "m, maximum (nats)", "m")
        lines(panels[1], l, "l, sum of exp(s - m) (no unit)", "l")
        lines(panels[2], o, "o, unnormalised (units of v)", "o")
        end = "" if lse is None else "; thin line: lse"
        lines(panels[3], m + np.log(some), f"m + log l (nats{end})", "lse")
        end = "" if final_o is None else "; thin lines: final o"
        lines(panels[4], o / some[:, None], f"o / l (units of v{end})", "o / l")
        if lse is not None:
            goal(panels[3], float(lse), 0)
        for column, value in enumerate([] if final_o is None else np.asarray(final_o, dtype=float)):
            goal(panels[4], float(value), column)
        if o.shape[1] > 1:
            panels[2].legend(loc="best")
        for axes in panels:
            axes.set_xlabel(counted)
        return figure


def lines(axes: Any, values: NDArray[Any], title: str, gid: str) -> None:
    """Draw values [T] or [T, columns] against the number of completed steps."""
    done = np.arange(len(values))
    for n, column in enumerate(values.reshape(len(values), -1).T):
        look = {"color": COLOURS[n % 8], "marker": MARKERS[n % 8], "linestyle": LINES[n % 4]}
        axes.plot(done, column, gid=f"{gid} {n}", label=f"column {n}", **look)
    axes.set(title=title, xlim=(-0.3, len(values) - 0.7))
    axes.set(xticks=ticks_of(len(values), 9))


def goal(axes: Any, value: float, column: int) -> None:
    colour = COLOURS[column % len(COLOURS)]
    axes.axhline(value, color=colour, linestyle=(0, (5, 3)), linewidth=1, gid=f"goal {column}")


def cost_timeline(
    spans: Sequence[tuple[int, int, str, float, float]], unit: str = "s", until: float | None = None
) -> Any:
    """Draw when each worker computes and when it sends.

    ``spans``: (worker, step, 'compute' or 'send', start, stop), with times in ``unit``, as
    ``ringspec.rings.cost.timeline`` returns them. Each worker has two bars. The upper bar shows when it computes. The
    lower bar shows when it sends: hatched while the worker also computes, crossed while it does not. Where both bars
    are white, the worker waits. ``until`` is the end of the time axis; pass the same value to compare figures.
    """
    workers = 1 + max(worker for worker, *_ in spans)
    end = max(stop for *_, stop in spans) if until is None else until
    patches = matplotlib_module("matplotlib.patches")
    looks: dict[str, dict[str, Any]] = {
        "compute": {"facecolor": BLUE, "edgecolor": "white"},
        "send, overlapped": {"facecolor": GREEN, "edgecolor": "white", "hatch": "////"},
        "send, not overlapped": {"facecolor": VERMILLION, "edgecolor": "white", "hatch": "xxxx"},
    }
    with sheet(1, 1, 9.0, 0.55 * workers + 1.3) as (figure, panels):
        axes = panels[0][0]
        for worker, step, what, start, stop in spans:
            if stop <= start:
                continue
            if what == "compute":
                bar = (start, worker - 0.38, stop - start, 0.42)
                rectangle(axes, *bar, gid=f"compute {worker} {step}", **looks[what])
                if stop - start > 0.03 * end:
                    label(axes, (start + stop) / 2, worker - 0.17, f"{step}", color="white")
                continue
            for kind, a, b in split_send(worker, start, stop, spans):
                bar = (a, worker + 0.07, b - a, 0.26)
                rectangle(axes, *bar, gid=f"{kind} {worker} {step}", **looks[kind])
        for step in sorted({span[1] for span in spans})[1:]:
            begin = min(start for _, s, what, start, _ in spans if (s, what) == (step, "compute"))
            axes.axvline(begin, color=GREY, linestyle=":", linewidth=1, gid=f"begin {step}")
        handles = [patches.Patch(label=kind, **look) for kind, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        axes.set(xlim=(0, 1.01 * end), ylim=(workers - 0.5, -0.5), yticks=range(workers))
        axes.set(xlabel=f"time ({unit}); the number on a bar is the step", ylabel="worker")
        return figure


def split_send(
    worker: int, start: float, stop: float, spans: Sequence[tuple[int, int, str, float, float]]
) -> list[tuple[str, float, float]]:
    """Split a transfer into the parts during which the worker computes and the parts during which it does not.

    >>> split_send(0, 1.0, 4.0, [(0, 0, "compute", 0.0, 2.0), (1, 0, "compute", 0.0, 9.0)])
    [('send, overlapped', 1.0, 2.0), ('send, not overlapped', 2.0, 4.0)]
    """
    computing = [(a, b) for r, _, what, a, b in spans if (r, what) == (worker, "compute")]
    edges = {start, stop} | {x for span in computing for x in span if start < x < stop}
    cuts = sorted(edges)
    parts = []
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        covered = any(first <= a and b <= last for first, last in computing)
        parts.append(("send, overlapped" if covered else "send, not overlapped", a, b))
    return parts
