"""The smallest defect that the whole-tensor tests see, beside tolerance rules in use elsewhere.

    python tests/benchmarks/power.py
    python tests/benchmarks/power.py --tokens 512 --head-dim 64
    python tests/benchmarks/power.py --recipe float32 --tokens 1024 --forward-only

One random problem is drawn, its rounding noise predicted from the recipe, and a correct kernel simulated. For
each kind of defect the table gives the smallest size that the whole-tensor tests detect with the probability
given by --power, and the smallest that fails each tolerance rule. The bounds of single rows, which the suite has
as well, are left out. docs/conform/power.md shows the table and explains it. 2048 tokens take minutes and 1.6 GB.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

from benchmarks.power_measure import Outcome, Power, Row, measure  # noqa: E402
from benchmarks.power_problem import Asked  # noqa: E402

from ringspec.cli.shared.output import bands  # noqa: E402
from ringspec.errors import RingspecError  # noqa: E402
from ringspec.recipes import RECIPES  # noqa: E402
from ringspec.spec.layout import LAYOUTS  # noqa: E402

WIDTH = 100
TITLES = {"forward": "forward alone: o", "gradients": "with gradients: o, dq, dk, dv"}
# A table per document (layouts of packed documents) has nothing to act on here.
NAMED_LAYOUTS = [name for name in LAYOUTS if name != "zigzag_per_document"]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="bf16", choices=RECIPES, help="default: bf16")
    parser.add_argument("--tokens", type=int, default=2048, help="queries and keys; default: 2048")
    parser.add_argument("--head-dim", type=int, default=128, help="D of q, k, v; default: 128")
    parser.add_argument("--heads", type=int, default=1, help="default: 1")
    parser.add_argument("--workers", type=int, default=4, help="W, the ring; default: 4")
    parser.add_argument("--layout", default="zigzag", choices=NAMED_LAYOUTS, help="default: zigzag")
    parser.add_argument("--no-causal", dest="causal", action="store_false", help="no mask")
    parser.add_argument(
        "--forward-only", dest="gradients", action="store_false", help="no backward pass"
    )
    parser.add_argument(
        "--power", type=float, default=0.999, help="probability of detection; default: 0.999"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the problem; default: 0")
    parser.add_argument(
        "--no-confirm", dest="confirm", action="store_false",
        help="do not put each defect into a correct kernel at its size and make all tests",
    )  # fmt: skip
    given = vars(parser.parse_args(words))
    confirm = given.pop("confirm")
    try:
        power = measure(Asked(**given), confirm=confirm)
    except RingspecError as error:
        parser.error(str(error))
    print("\n".join(text(power, WIDTH)))


def text(power: Power, width: int) -> list[str]:
    """The tables as lines."""
    asked = power.asked
    mask = "causal" if asked.causal else "no mask"
    lines = [
        f"smallest defect that is detected with a probability of {100 * asked.power:g} %",
        f"recipe {asked.recipe}, {asked.tokens} tokens, {asked.heads} x {asked.head_dim}, {mask}, "
        f"{asked.layout} on {asked.workers} workers, seed {asked.seed}",
    ]
    for passes, title in TITLES.items():
        rows = [row for row in power.rows if row.passes == passes]
        if rows:
            lines += ["", title, *table(rows, [rule.name for rule in power.rules], width)]
    return [*lines, "", *legend(power)]


def table(rows: list[Row], rules: list[str], width: int) -> list[str]:
    """One column for each defect; one line for ringspec, one with its lse, one for each rule."""
    labels = ["", "ringspec", "ringspec, lse too", *rules]
    columns = [
        [
            row.name,
            size_text(row.size, row),
            size_text(row.with_lse, row),
            *(outcome_text(row.rivals[rule], row) for rule in rules),
        ]
        for row in rows
    ]
    return bands(labels, columns, width)


def size_text(size: float | None, row: Row) -> str:
    """
    >>> row = Row("scale", "", "x", "forward", 1e-4, "o", None, {}, {})
    >>> size_text(0.000123, row), size_text(None, row)
    ('1.2e-04', '-')
    """
    if size is None:
        return "-"
    return f"{size:.0f}" if row.unit == "n" else f"{size:.1e}"


def outcome_text(found: Outcome, row: Row) -> str:
    return "x" if found.refuses else size_text(found.size, row)


def legend(power: Power) -> list[str]:
    """What the columns, signs and lines are."""
    lines = ["-: at no size; x: the rule refuses the correct kernel"]
    last = {row.name: row for row in power.rows}
    lines += [f"{name}: {row.words}{more_text(row)}" for name, row in last.items()]
    lines += ["", *(f"{rule.name}: {rule.words} ({rule.source})" for rule in power.rules), ""]
    lines.append(confirmed_text(power))
    return lines


def more_text(row: Row) -> str:
    """What a column's number does not say."""
    if row.unit == "n":
        return ": the larger n, the finer"
    if row.mass is not None:
        return f", which holds {100 * row.mass:.1f} % of the softmax"
    if row.name == "truncation" and row.deviations is not None:
        return f"; all of them make {row.deviations:.0f} predicted standard deviations"
    return ""


def confirmed_text(power: Power) -> str:
    """What injecting the defects showed."""
    tried = [row for row in power.rows if row.confirmed is not None]
    if not tried:
        return "not confirmed by injecting"
    missed = [f"{row.words} ({row.passes})" for row in tried if not row.confirmed]
    correct = "no alarm" if power.correct else "AN ALARM"
    found = f"{len(tried) - len(missed)} of {len(tried)} found"
    return (
        f"injected: {found}{': missed ' + ', '.join(missed) if missed else ''}; {correct} without"
    )


if __name__ == "__main__":
    main()
