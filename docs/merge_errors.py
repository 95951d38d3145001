"""Measure what each form of merge loses and which bits are certain, and write the tables and the figure of learn/merges.md.

python docs/merge_errors.py        # takes about 30 seconds

The reference is the exact merge of the same partial results, in float64. Errors are rms(error) / rms(o). The third table
compares errors of whole rings with exact blocks, from dense inputs, with the prediction of the noise model.
"""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np

import ringspec as rs
from ringspec.compare.noise.predict import predict
from ringspec.compare.noise.problem import Geometry
from ringspec.conformance.judge.noise_inputs import attention_of
from ringspec.formats import load, round_to, store
from ringspec.merges import MERGES, Part, certain, merge, with_merges
from ringspec.problem.options import check
from ringspec.recipes import RECIPES
from ringspec.truth.dense import results_of
from ringspec.truth.problem import Upstream

PAGE = Path(__file__).parent / "learn" / "merges.md"
FIGURE = Path(__file__).parent / "images" / "merge_errors.svg"
START, END = "<!-- table -->\n", "<!-- end of the table -->\n"
CERTAIN_START, CERTAIN_END = "<!-- certain -->\n", "<!-- end of certain -->\n"
PREDICTED_START, PREDICTED_END = "<!-- predicted -->\n", "<!-- end of predicted -->\n"
# One recipe for each form and rounding.
SHOWN = {
    "torch_cp": "#1b7837",
    "te_p2p": "#d6604d",
    "te_p2p_2_20": "#b2182b",
    "te_thd": "#ef8a62",
    "vllm_merge": "#2166ac",
    "vllm_dcp_ag_rs": "#67a9cf",
    "vllm_dcp_a2a": "#762a83",
    "fa3": "#7fbc41",
    "nki_ring": "#8c510a",
}
WORKERS = (1, 2, 4, 8, 16, 32, 64)


def parts_of(workers: int, fmt: str, level: float) -> list[Part]:
    """Random parts of 16384 elements of o; lse has a standard deviation of 1 around ``level``."""
    random = np.random.default_rng(0)
    return [
        Part(
            store(random.normal(0, 1, (1, 16, 64, 16)), fmt),
            random.normal(level, 1, (1, 16, 64)).astype(np.float32),
        )
        for _ in range(workers)
    ]


def exact(parts: list[Part]) -> np.ndarray:
    lse = np.array([part.lse for part in parts], np.float64)
    weights = np.exp(lse - lse.max(axis=0))
    products = [
        w[..., None] * part.o.astype(np.float64) for w, part in zip(weights, parts, strict=True)
    ]
    return np.sum(products, axis=0) / weights.sum(axis=0)[..., None]


def error(name: str, workers: int, fmt: str, level: float, unit: float = 1.0) -> float:
    """The error of a recipe; ``unit``: a factor of the lse that it is given, which stands for a wrong base."""
    parts = parts_of(workers, fmt, level)
    given = [Part(part.o, (part.lse * unit).astype(np.float32)) for part in parts]
    want = exact(parts)
    difference = merge(given, name)[0].astype(np.float64) - want
    return float(np.sqrt((difference**2).mean() / (want**2).mean()))


def empty(name: str, which: tuple[int, ...]) -> str:
    """What a recipe gives for a row of three parts, of which those in ``which`` saw no key: o and lse, in words."""
    o = [np.full((1, 1, 1, 1), 0.0 if n in which else 1.0, np.float32) for n in range(3)]
    lse = [np.full((1, 1, 1), -np.inf if n in which else 0.0, np.float32) for n in range(3)]
    found, total = (float(x.ravel()[0]) for x in merge(list(zip(o, lse, strict=True)), name))
    if math.isnan(found) and math.isnan(total):
        return "NaN"
    exact = -math.inf if len(which) == 3 else math.log(3 - len(which))
    right = found == (len(which) < 3) and (total == exact or abs(total - exact) < 1e-6)
    return "right" if right else f"{found:g}, {total:g}".replace("nan", "NaN")


def row(name: str) -> list[str]:
    cells = [f"{error(name, w, 'bfloat16', 5):.1e}" for w in (2, 8, 64)]
    cells.append(f"{error(name, 64, 'float32', 5):.1e}")
    cells += [f"{error(name, w, 'float32', 1000):.1e}" for w in (2, 64)]
    cells.append(f"{error(name, 8, 'float32', 5, unit=1 / math.log(2)):.1e}")
    label = f"`{name}`" if MERGES[name].compared_with else f"`{name}` (not compared)"
    return [
        label,
        MERGES[name].form,
        *cells,
        *(empty(name, which) for which in ((0,), (0, 1), (0, 1, 2))),
    ]


def table() -> str:
    head = (
        "recipe|form|bf16, lse 5, W = 2|W = 8|W = 64|float32, lse 5, W = 64|float32, lse 1000, W = 2|W = 64"
        "|lse in base 2|part 0 empty|parts 0, 1 empty|all empty"
    ).split("|")
    rows = [head, ["---"] * len(head), *(row(name) for name in SHOWN)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


# Format of o, level of lse and W of each column.
CERTAIN_COLUMNS = (("bfloat16", 5, 2), ("bfloat16", 5, 8), ("bfloat16", 1000, 8), ("float32", 5, 2))
CERTAIN_LSE = ((5, 2), (1000, 2), (1000, 8))


def shares(name: str) -> list[float]:
    """The shares of the elements of o, then of lse, whose bits no elementary function within 4 ulp changes."""
    found = [certain(parts_of(w, fmt, level), name) for fmt, level, w in CERTAIN_COLUMNS]
    values = [one.o_certain.mean() for one in found]
    found = [certain(parts_of(w, "bfloat16", level), name) for level, w in CERTAIN_LSE]
    return [float(x) for x in (*values, *(one.lse_certain.mean() for one in found))]


def certain_table() -> str:
    head = (
        "recipe|o bf16, W = 2|o bf16, W = 8|o bf16, lse about 1000, W = 8|o float32, W = 2|"
        "lse about 5, W = 2|lse about 1000, W = 2|lse about 1000, W = 8"
    ).split("|")
    rows = [head, ["---"] * len(head)]
    for name in SHOWN:
        label = f"`{name}`" if MERGES[name].compared_with else f"`{name}` (not compared)"
        # Rounded down, so that 100 % is all elements.
        rows.append([label, *(f"{math.floor(1000 * share) / 10} %" for share in shares(name))])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


# Recipes without a backward pass have no sums of gradients.
PREDICTED = (("o", 2), ("o", 4), ("o", 8), ("dq", 8), ("dv", 8))
TOKENS, HEADS, DIM = 64, 2, 32


def predictions(name: str) -> list[str]:
    """Predicted and measured rms(error) / rms of the tensors of PREDICTED, in a ring of exact blocks, not causal."""
    random = np.random.default_rng(0)
    q, k, v, dy = (
        round_to(random.normal(size=(1, HEADS, TOKENS, DIM)), "bfloat16") for _ in range(4)
    )
    problem, upstream = check(q, k, v, {}), Upstream(dy, None)
    want = results_of(problem, upstream)
    attention = attention_of(problem, want["o"], upstream)
    blocks = RECIPES["float64"].replace(
        inputs="bfloat16", outputs="bfloat16", gradients="bfloat16", lse="float32"
    )
    cells, made = [], {}
    for tensor, workers in PREDICTED:
        if workers not in made:
            owner = np.repeat(np.arange(workers), TOKENS // workers)
            noise = predict(
                attention, with_merges(blocks, name), Geometry.ring(owner, owner, workers)
            )
            made[workers] = noise, rs.replay_as(q, k, v, dy, recipe=name, workers=workers)
        noise, got = made[workers]
        if getattr(got, tensor) is None:
            cells.append("")
            continue
        error, size = load(getattr(got, tensor)) - want[tensor], (want[tensor] ** 2).mean()
        both = ((noise.sd[tensor] ** 2).mean(), (error**2).mean())
        cells.append(" / ".join(f"{math.sqrt(square / size):.2e}" for square in both))
    return cells


def predicted_table() -> str:
    head = ["recipe", *(f"{tensor}, W = {workers}" for tensor, workers in PREDICTED)]
    rows = [head, ["---"] * len(head)]
    for name in (*SHOWN, "ring_flash_attn", "tokamax"):
        label = f"`{name}`" if MERGES[name].compared_with else f"`{name}` (not compared)"
        rows.append([label, *predictions(name)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


LEFT, TOP, WIDE, HIGH = 64, 20, 470, 260
LOW, TOP_VALUE = 1e-3, 2e-2


def place(workers: int, value: float) -> tuple[float, float]:
    x = LEFT + WIDE * math.log2(workers) / math.log2(WORKERS[-1])
    share = math.log(value / LOW) / math.log(TOP_VALUE / LOW)
    return round(x, 1), round(TOP + HIGH * (1 - share), 1)


def figure() -> str:
    """The error of o in bfloat16 against the number of workers, as SVG with two logarithmic axes."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 330" role="img" font-family="sans-serif" font-size="12">',
        "<title>Error of o in bfloat16 against the number of workers, for each merge</title>",
        '<rect width="680" height="330" fill="#fff"/>',
    ]
    for value in (1e-3, 2e-3, 5e-3, 1e-2, 2e-2):
        y = place(1, value)[1]
        lines.append(f'<path d="M{LEFT} {y}H{LEFT + WIDE}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.0e}</text>')
    for workers in WORKERS:
        x = place(workers, LOW)[0]
        lines.append(f'<text x="{x}" y="{TOP + HIGH + 16}" text-anchor="middle">{workers}</text>')
    middle = LEFT + WIDE / 2
    lines.append(f'<text x="{middle}" y="{TOP + HIGH + 36}" text-anchor="middle">workers W</text>')
    ends = {}
    for name, colour in SHOWN.items():
        points = [place(w, max(error(name, w, "bfloat16", 5), LOW)) for w in WORKERS]
        path = " ".join(f"{x},{y}" for x, y in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        )
        ends[name] = points[-1][1]
    for name, y in apart(ends).items():
        lines.append(f'<text x="{LEFT + WIDE + 8}" y="{y + 4}" fill="{SHOWN[name]}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def apart(ends: dict[str, float]) -> dict[str, float]:
    """Move labels down so that they are 14 apart."""
    names = sorted(ends, key=lambda name: ends[name])
    moved = dict(ends)
    for above, below in pairwise(names):
        moved[below] = max(moved[below], moved[above] + 14)
    return moved


def filled(text: str, start: str, end: str, written: str) -> str:
    """Return the page with the part between two marks replaced."""
    before, _, rest = text.partition(start)
    return before + start + written + end + rest.partition(end)[2]


def main() -> None:
    text = filled(PAGE.read_text(encoding="utf-8"), START, END, table())
    text = filled(text, CERTAIN_START, CERTAIN_END, certain_table())
    text = filled(text, PREDICTED_START, PREDICTED_END, predicted_table())
    PAGE.write_text(text, encoding="utf-8")
    FIGURE.write_text(figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
