"""The moving picture of the README: a KV ring of four workers, forward, under a causal mask, zigzag layout.

python docs/picture.py        # writes docs/images/ring.svg

Who computes which pairs, and who sends what to whom, is read from a recorded run of ``ringspec.ring``. Browsers
play the picture in an ``<img>``, without a script. A reader who asks for less motion sees step 1 at rest.
"""

import sys
from pathlib import Path

import numpy as np

import ringspec as rs
from ringspec.render.figures_style import COLOURS, ink_on
from ringspec.rings.run import Run

STORED = Path(__file__).parent / "images" / "ring.svg"
W, S, D = 4, 16, 4
SECONDS = 3.0  # of one step
COMPUTE = 0.62  # the part of a step in which nothing travels
RESTING = 1  # the step that a picture without motion shows
WIDTH, HEIGHT = 836, 390
BOX = (176, 104)
# Clockwise, so that r -> r + 1 goes round.
CORNERS = ((24, 62), (262, 62), (262, 226), (24, 226))
GRID, CELL = (536, 72), 17

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2128; }
.small { font-size: 11.5px; fill: #525b66; }
.title { font-weight: 600; }
.cell { font-size: 9.5px; text-anchor: middle; }
.middle { text-anchor: middle; }
.line { stroke: #8a929c; stroke-width: 1.5; fill: none; }
g.said, g.now { opacity: 0; }
"""


def recorded() -> Run:
    """The run that the picture shows."""
    q, k, v = np.sin(np.arange(3.0 * S * D)).reshape(3, 1, 1, S, D)
    return rs.ring(q, k, v, workers=W, layout="zigzag", causal=True, record=True)


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
    colour, ink = COLOURS[owner], ink_on(owner)
    return (
        f'<g {extra}><rect x="{x}" y="{y}" width="70" height="26" rx="5" fill="{colour}"/>'
        f'<text class="middle title" x="{x + 35}" y="{y + 18}" style="fill:{ink}">{words}</text></g>'
    )


def worker(r: int) -> str:
    """The box of one worker, with its queries, which stay, and the place for a visiting block."""
    (x, y), (width, height) = CORNERS[r], BOX
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="#f5f6f8" '
        f'stroke="{COLOURS[r]}" stroke-width="3"/>'
        f'<text class="title" x="{x + 12}" y="{y + 22}">worker {r}</text>'
        f'<text class="small" x="{x + 12}" y="{y + 51}">stays</text>'
        f'<text class="small" x="{x + 12}" y="{y + 85}">travels</text>'
        + chip(x + 62, y + 33, r, f"q {r}")
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


def cell(query: int, key: int, owner: int) -> str:
    """One pair that a worker computes, with the worker's number."""
    x, y = GRID[0] + CELL * key, GRID[1] + CELL * query
    return (
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" fill="{COLOURS[owner]}"/>'
        f'<text class="cell" x="{x + CELL / 2}" y="{y + 12.5}" style="fill:{ink_on(owner)}">{owner}</text>'
    )


def owner(x: float, y: float, r: int) -> str:
    """The number of the worker that owns a token, at the edge of the grid."""
    return (
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" rx="7" fill="none" '
        f'stroke="{COLOURS[r]}" stroke-width="1.5"/>'
        f'<text class="cell" x="{x + CELL / 2}" y="{y + 12.5}">{r}</text>'
    )


def pairs_of(run: Run, step: int) -> list[list[tuple[int, int]]]:
    """The visible (query, key) pairs that each worker computes in a step."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(W)]
    for r, (a, b) in run.schedule.pairs(step):
        queries, keys = run.layout_q.table[a], run.layout_k.table[b]
        found[r] = [(int(i), int(j)) for i in queries for j in keys if j <= i]
    return found


def grid(run: Run) -> str:
    """Queries down, keys across: dots for the pairs to come, and the pairs of each step in a group."""
    (x, y), side = GRID, CELL * S
    drawn = f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="#fff" stroke="#ccd1d8"/>'
    words = f"keys 0 to {S - 1}, and who owns them"
    drawn += f'<text class="small middle" x="{x + side / 2}" y="{y - 26}">{words}</text>'
    words, where = (
        f"queries 0 to {S - 1}, and who owns them",
        f"rotate(-90 {x - 26} {y + side / 2})",
    )
    drawn += f'<text class="small middle" x="{x - 26}" y="{y + side / 2}" transform="{where}">{words}</text>'
    owners = {int(token): r for r in range(W) for token in run.layout_q.table[r]}
    for token, r in sorted(owners.items()):
        drawn += owner(x + CELL * token, y - CELL - 4, r) + owner(x - CELL - 4, y + CELL * token, r)
    for i in range(S):
        for j in range(i + 1):
            at = f'cx="{x + CELL * j + CELL / 2}" cy="{y + CELL * i + CELL / 2}"'
            drawn += f'<circle {at} r="1.6" fill="#c3c9d1"/>'
    for step in range(len(run.schedule.steps)):
        cells = "".join(
            cell(i, j, r) for r, pairs in enumerate(pairs_of(run, step)) for i, j in pairs
        )
        drawn += f'<g class="now" id="pairs{step}">{cells}</g>'
    return drawn


def said(run: Run) -> str:
    """One line below the ring for each step, and one for the end."""
    lines = []
    for step in range(len(run.schedule.steps)):
        counts = {len(pairs) for pairs in pairs_of(run, step)}
        whose = "its own keys" if step == 0 else f"the keys of worker r - {step}"
        work = f"{counts.pop()} pairs each" if len(counts) == 1 else "unequal work"
        lines.append(f"Step {step}: worker r attends to {whose} ({work}).")
    lines.append("Done: each query has met every key at or before its position (zigzag layout).")
    return "".join(
        f'<g class="said" id="said{n}"><text class="title" x="24" y="{HEIGHT - 14}">{line}</text></g>'
        for n, line in enumerate(lines)
    )


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
        chip(x + 62, y + 67, r, f"k v {r}", f'id="travel{r}"') for r, (x, y) in enumerate(CORNERS)
    )
    words = "A ring of four workers, zigzag layout, causal mask, step by step"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{words}">'
        f"<style>{animations(run)}</style>"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#8a929c"/></marker></defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>'
        '<text class="title" x="24" y="34">Four workers: queries stay, keys and values are passed on</text>'
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
