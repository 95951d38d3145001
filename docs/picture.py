"""The moving picture of the README: the ring on which the page of `ringspec explore` opens.

python docs/picture.py        # writes docs/images/ring.svg

It is a KV ring of four workers and 48 tokens, forward, under a causal mask, contiguous layout. Who computes which
pairs, and who sends what to whom, is read from the recorded run. Browsers play the picture in an ``<img>``, without a
script. A reader who asks for less motion sees step 1 at rest.
"""

import sys
from pathlib import Path

import numpy as np

from ringspec.cli.views.explore_records import LAYOUTS, TOKENS, one_run
from ringspec.render.figures_style import COLOURS, ink_on
from ringspec.rings.run import Run
from ringspec.spec.schedule import CIRCULATIONS

STORED = Path(__file__).parent / "images" / "ring.svg"
W = 4
# The choices of the explorer when it opens (ringspec/render/explore.js).
RING = {
    "workers": W,
    "layout": LAYOUTS[0],
    "mask": "causal",
    "circulation": CIRCULATIONS[0],
    "tokens": TOKENS,
    "seed": 0,
}
SECONDS = 3.0  # of one step
COMPUTE = 0.62  # the part of a step in which nothing travels
RESTING = 1  # the step that a picture without motion shows
WIDTH, HEIGHT = 836, 452
BOX = (180, 118)
# Clockwise, so that r -> r + 1 goes round.
CORNERS = ((20, 60), (236, 60), (236, 236), (20, 236))
CHIP = (84, 32)
# Where the chips lie in a box: queries, keys and values.
STAYS, TRAVELS = (84, 38), (84, 76)
GRID, CELL = (488, 102), 7
SIDE = CELL * TOKENS
BAR = 20  # the strips along the grid that name the owners

STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1c2128; }
.small { fill: #525b66; }
.title { font-weight: 600; font-size: 16px; }
.middle { text-anchor: middle; }
.line { stroke: #8a929c; stroke-width: 2; fill: none; }
.to-come { stroke: #ccd1d8; stroke-width: 1.8; stroke-linecap: round; }
g.said, g.now { opacity: 0; }
"""


def recorded() -> Run:
    """The run that the picture shows."""
    return one_run(**RING)


def keyframes(name: str, places: list[tuple[float, str]]) -> str:
    """A CSS animation from (share of the whole time, properties)."""
    frames = " ".join(f"{100 * at:.2f}% {{ {what} }}" for at, what in places)
    return f"@keyframes {name} {{ {frames} }}\n"


def shown_between(name: str, first: float, last: float, after: float) -> str:
    """Opacity 0 before ``first``, 1 until ``last``, then ``after``; both are shares of the whole time."""
    edge = 0.004
    places = [] if first <= edge else [(0.0, "opacity: 0"), (first - edge, "opacity: 0")]
    places += [(first, "opacity: 1"), (last - edge, "opacity: 1")]
    if last < 1:
        places += [(last, f"opacity: {after}"), (1.0, f"opacity: {after}")]
    else:
        places[-1] = (1.0, "opacity: 1")
    return keyframes(name, places)


def travel(owner: int, visitors: list[tuple[int | None, ...]]) -> str:
    """The path of the keys and values of one owner: at the worker that uses them, then to the next one."""
    steps = len(visitors)
    whole = steps + 1
    x0, y0 = CORNERS[owner]
    places = []
    for step, uses in enumerate(visitors):
        x, y = CORNERS[uses.index(owner)]
        moved = f"transform: translate({x - x0}px, {y - y0}px)"
        stays = step + (COMPUTE if step < steps - 1 else 2)
        places += [(step / whole, moved), (min(stays / whole, 1.0), moved)]
    return keyframes(f"travel{owner}", places)


def chip(x: float, y: float, owner: int, words: str, extra: str = "") -> str:
    """A small coloured box with the names of its arrays and the number of their owner."""
    (width, height), colour, ink = CHIP, COLOURS[owner], ink_on(owner)
    return (
        f'<g {extra}><rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{colour}"/>'
        f'<text class="middle title" x="{x + width / 2:g}" y="{y + 22}" style="fill:{ink}">{words}</text></g>'
    )


def worker(r: int) -> str:
    """The box of one worker, with its queries, which stay, and the place for a visiting block."""
    (x, y), (width, height) = CORNERS[r], BOX
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#f5f6f8" '
        f'stroke="{COLOURS[r]}" stroke-width="3"/>'
        f'<text class="title" x="{x + 14}" y="{y + 25}">worker {r}</text>'
        f'<text class="small" x="{x + 14}" y="{y + STAYS[1] + 21}">stays</text>'
        f'<text class="small" x="{x + 14}" y="{y + TRAVELS[1] + 21}">travels</text>'
        + chip(x + STAYS[0], y + STAYS[1], r, f"q {r}")
    )


def arrows() -> str:
    """From each worker to the next one, round the ring."""
    drawn = ""
    for r, (x, y) in enumerate(CORNERS):
        to_x, to_y = CORNERS[(r + 1) % W]
        width, height = BOX
        dx, dy = np.sign(to_x - x), np.sign(to_y - y)
        start = (x + width / 2 + dx * width / 2, y + height / 2 + dy * height / 2)
        end = (to_x + width / 2 - dx * (width / 2 + 9), to_y + height / 2 - dy * (height / 2 + 9))
        line = f"M {start[0]:g} {start[1]:g} L {end[0]:g} {end[1]:g}"
        drawn += f'<path class="line" d="{line}" marker-end="url(#head)"/>'
    return drawn


def strips() -> str:
    """Along the grid: whose queries the rows are, and whose keys and values the columns."""
    (x, y), length = GRID, SIDE // W
    drawn = ""
    for r in range(W):
        near = f'rx="4" fill="{COLOURS[r]}"'
        text = f'class="middle title" style="fill:{ink_on(r)}"'
        left, top, middle = x + r * length + 1, y + r * length + 1, (r + 0.5) * length
        drawn += (
            f'<rect x="{left}" y="{y - BAR - 4}" width="{length - 2}" height="{BAR}" {near}/>'
            f'<text {text} x="{x + middle:g}" y="{y - 9}">k v {r}</text>'
            f'<rect x="{x - BAR - 4}" y="{top}" width="{BAR}" height="{length - 2}" {near}/>'
            f'<text {text} transform="translate({x - 9} {y + middle:g}) rotate(-90)">q {r}</text>'
        )
    return drawn


def pairs_of(run: Run, step: int) -> list[list[tuple[int, int]]]:
    """The visible (query, key) pairs that each worker computes in a step."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(W)]
    for r, (a, b) in run.schedule.pairs(step):
        queries, keys = run.layout_q.table[a], run.layout_k.table[b]
        found[r] = [(int(i), int(j)) for i in queries for j in keys if j <= i]
    return found


def tile(r: int, pairs: list[tuple[int, int]]) -> str:
    """The pairs that one worker computes in a step, as cells; the number of the worker is on them."""
    if not pairs:
        return ""
    (x, y), side = GRID, CELL - 1
    cells = "".join(
        f"M{x + CELL * j + 0.5:g} {y + CELL * i + 0.5:g}h{side}v{side}h-{side}z" for i, j in pairs
    )
    row, column = np.mean(pairs, axis=0) + 0.5
    at_x, at_y = x + CELL * column, y + CELL * row
    colour = COLOURS[r]
    return (
        f'<path d="{cells}" fill="{colour}"/>'
        f'<circle cx="{at_x:g}" cy="{at_y:g}" r="14" fill="{colour}"/>'
        f'<text class="middle title" x="{at_x:g}" y="{at_y + 6:g}" style="fill:{ink_on(r)}">{r}</text>'
    )


def grid(run: Run) -> str:
    """Queries down, keys across: dots for the pairs to come, and the pairs of each step in a group."""
    (x, y), length = GRID, SIDE // W
    drawn = f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="#fff" stroke="#ccd1d8"/>'
    lines = "".join(
        f"M{x + n * length} {y}v{SIDE}M{x} {y + n * length}h{SIDE}" for n in range(1, W)
    )
    drawn += f'<path d="{lines}" stroke="#ccd1d8"/>'
    words, where = f"keys 0 to {TOKENS - 1}", f'x="{x + SIDE / 2:g}" y="{y - BAR - 12}"'
    drawn += f'<text class="small middle" {where}>{words}</text>'
    where = f'transform="translate({x - BAR - 12} {y + SIDE / 2:g}) rotate(-90)"'
    drawn += f'<text class="small middle" {where}>queries 0 to {TOKENS - 1}</text>'
    half = CELL / 2
    dots = "".join(
        f"M{x + CELL * j + half:g} {y + CELL * i + half:g}h0"
        for i in range(TOKENS)
        for j in range(i + 1)
    )
    drawn += f'<path class="to-come" d="{dots}"/>' + strips()
    for step in range(len(run.schedule.steps)):
        tiles = "".join(tile(r, pairs) for r, pairs in enumerate(pairs_of(run, step)))
        drawn += f'<g class="now" id="pairs{step}">{tiles}</g>'
    return drawn


def named(workers: list[int]) -> str:
    """Words for some workers.

    >>> named([0]), named([0, 1, 2])
    ('worker 0', 'workers 0, 1 and 2')
    """
    if len(workers) == 1:
        return f"worker {workers[0]}"
    return f"workers {', '.join(map(str, workers[:-1]))} and {workers[-1]}"


def work_of(counts: list[int]) -> str:
    """How many pairs the workers compute in a step, and which of them wait."""
    waiting = [r for r, count in enumerate(counts) if not count]
    (pairs,) = {count for count in counts if count}
    each = " each" if len(counts) - len(waiting) > 1 else ""
    idle = f"; {named(waiting)} {'waits' if len(waiting) == 1 else 'wait'}" if waiting else ""
    return f"{pairs} pairs{each}{idle}."


def said(run: Run) -> str:
    """Two lines below the ring for each step and for the end; idle workers are marked in their boxes."""
    steps = [[len(pairs) for pairs in pairs_of(run, n)] for n in range(len(run.schedule.steps))]
    lines = []
    for step, counts in enumerate(steps):
        whose = "its own keys" if step == 0 else f"the keys of r - {step}"
        lines.append((f"Step {step}: worker r attends to {whose}:", work_of(counts)))
    total = [sum(counts) for counts in zip(*steps, strict=True)]
    end = f"{total[0]} pairs on worker 0, {total[-1]} on worker {W - 1}."
    lines.append(("Done: all visible pairs are computed.", end))
    drawn = ""
    for n, (first, second) in enumerate(lines):
        idle = [r for r, count in enumerate(steps[n]) if not count] if n < len(steps) else []
        waits = "".join(
            f'<text class="small" x="{CORNERS[r][0] + 104}" y="{CORNERS[r][1] + 25}">waits</text>'
            for r in idle
        )
        drawn += (
            f'<g class="said" id="said{n}"><text class="title" x="20" y="{HEIGHT - 48}">{first}</text>'
            f'<text x="20" y="{HEIGHT - 24}">{second}</text>{waits}</g>'
        )
    return drawn


def animations(run: Run) -> str:
    """The whole style sheet: the times at which parts are shown, and the paths of the blocks."""
    visitors = [step.uses for step in run.schedule.steps]
    steps, whole = len(visitors), len(visitors) + 1
    play, rules = f"{SECONDS * whole:g}s linear infinite", ""
    for n in range(whole):
        rules += shown_between(f"said{n}", n / whole, (n + 1) / whole, 0)
    for n in range(steps):
        rules += shown_between(f"pairs{n}", n / whole, (n + 1) / whole, 0.38)
    rules += "".join(travel(owner, visitors) for owner in range(W))
    used = [f"said{n}" for n in range(whole)] + [f"pairs{n}" for n in range(steps)]
    used += [f"travel{n}" for n in range(W)]
    moving = "".join(f"#{name} {{ animation: {name} {play}; }}\n" for name in used)
    rest = f"#said{RESTING}, #pairs{RESTING} {{ opacity: 1; }}\n"
    rest += "".join(f"#pairs{n} {{ opacity: 0.38; }}\n" for n in range(RESTING))
    for owner in range(W):
        (x0, y0), (x, y) = CORNERS[owner], CORNERS[visitors[RESTING].index(owner)]
        rest += f"#travel{owner} {{ transform: translate({x - x0}px, {y - y0}px); }}\n"
    return f"{STYLE}{rest}{rules}@media (prefers-reduced-motion: no-preference) {{\n{moving}}}\n"


def draw() -> str:
    """The picture as SVG text."""
    run = recorded()
    blocks = "".join(
        chip(x + TRAVELS[0], y + TRAVELS[1], r, f"k v {r}", f'id="travel{r}"')
        for r, (x, y) in enumerate(CORNERS)
    )
    words = (
        f"A ring of four workers with {TOKENS} tokens, contiguous layout, causal mask, step by step"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{words}">'
        f"<style>{animations(run)}</style>"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" '
        'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#8a929c"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>'
        '<text class="title" x="20" y="36">Queries stay, keys and values are passed on</text>'
        f'<text class="middle" x="{GRID[0] + SIDE / 2:g}" y="36">'
        f"{TOKENS} tokens, {RING['layout']} layout, {RING['mask']} mask</text>"
        + "".join(worker(r) for r in range(W))
        + arrows()
        + blocks
        + grid(run)
        + said(run)
        + "</svg>\n"
    )


def main(path: Path) -> None:
    """Write the picture."""
    path.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else STORED)
