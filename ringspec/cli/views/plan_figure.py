"""The figure of ``ringspec plan``: the timeline of the recommended ring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspec.plan import Plan

DRAWN_WORKERS = 8


def draw(one: Plan, path: Path) -> None:
    """Draw the timeline of the recommended ring (forward pass, then backward pass) and write it to a file."""
    from ringspec.plan import ring_spans
    from ringspec.render.figures_style import matplotlib_module

    matplotlib_module("matplotlib").use("Agg")
    pyplot = matplotlib_module("matplotlib.pyplot")
    from ringspec.render.figures import cost_timeline

    best = one.best
    work = one.work.resized(min(one.work.workers, DRAWN_WORKERS), one.work.tokens)
    bars, now, steps = [], 0.0, 0
    for backward in range(len(best.passes)):
        spans = ring_spans(
            best.layout, best.circulation, bool(backward), work, one.hardware, one.link
        )
        bars += [
            (s.worker, s.step + steps, s.what, 1e3 * (s.start + now), 1e3 * (s.stop + now))
            for s in spans
        ]
        now += max(s.stop for s in spans)
        steps += 1 + max(s.step for s in spans)
    figure = cost_timeline(bars, unit="ms")
    figure.axes[0].set_title(title(one, work.workers))
    figure.savefig(path)
    pyplot.close(figure)


def title(one: Plan, workers: int) -> str:
    """Return the title of the drawing. If only some of the plan's workers are drawn, the title says how many."""
    best, work = one.best, one.work
    small = "" if workers == work.workers else f" (drawn with {workers} workers)"
    passes = "forward, then backward" if best.backward is not None else "forward"
    return (
        f"{best.layout}, {best.circulation}, {passes}: {work.workers} workers{small}, "
        f"{work.tokens} tokens each, {one.hardware.name}, {one.link.name}"
    )
