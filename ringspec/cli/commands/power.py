"""``ringspec power``: the smallest defect that the suite sees, beside tolerance rules in use elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

import ringspec
from ringspec.cli.shared import output
from ringspec.cli.shared.options import choice, in_range
from ringspec.recipes import RECIPES
from ringspec.spec.layout import LAYOUTS

if TYPE_CHECKING:
    from ringspec.conformance.power import Outcome, Power, Row

LONG = 1 << 16  # pairs of a query and a key that take long enough for a progress bar
TITLES = {"forward": "forward alone: o", "gradients": "with gradients: o, dq, dk, dv"}
# A table per document (layouts of packed documents) has nothing to act on here.
NAMED_LAYOUTS = tuple(name for name in LAYOUTS if name != "zigzag_per_document")

EPILOG = """\b
Examples:
  ringspec power --tokens 512 --head-dim 64
  ringspec power --recipe float32 --tokens 1024 --forward-only --json

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
The keys of --json: ringspec/cli/power.schema.json.
"""


@click.command("power", epilog=EPILOG, short_help="Show the smallest defect that is detected.")
@click.option(
    "--recipe", default="bf16", show_default=True, metavar=choice(RECIPES),
    help="How the kernel computes.",
)  # fmt: skip
@click.option("--tokens", default=2048, show_default=True, metavar="N", help="Queries and keys.")
@click.option("--head-dim", default=128, show_default=True, metavar="N", help="D of q, k and v.")
@click.option("--heads", default=1, show_default=True, metavar="N", help="Heads.")
@click.option(
    "--workers", default=4, show_default=True, metavar="N", help="W, the size of the ring."
)
@click.option(
    "--layout", default="zigzag", show_default=True, metavar=choice(NAMED_LAYOUTS),
    help="Which worker holds which tokens.",
)  # fmt: skip
@click.option("--causal/--no-causal", default=True, show_default=True, help="The mask.")
@click.option("--forward-only", is_flag=True, help="Without the backward pass.")
@click.option(
    "--power", default=0.999, show_default=True, metavar="P",
    help="Probability with which a defect is to be detected.",
)  # fmt: skip
@click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the problem.")
@click.option(
    "--confirm/--no-confirm", default=True, show_default=True,
    help="Put each defect into a correct kernel at its size, and make all tests.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of text.")
def power_command(**given: Any) -> None:
    """Show the smallest defect that is detected in a problem of some size.

    One random problem is drawn, its rounding noise predicted from the recipe, and a correct kernel
    simulated. For each kind of defect the table gives the smallest size that the whole-tensor tests
    detect with the probability asked for, and the smallest that fails each tolerance rule. The
    bounds of single rows, which the suite has as well, are left out.
    """
    from ringspec.conformance.power import measure, steps
    from ringspec.conformance.power_problem import Asked

    for name in ("tokens", "head_dim", "heads", "workers"):
        in_range(given[name], name, 1)
    in_range(given["seed"], "seed", 0, (1 << 63) - 1)
    confirm, as_json = given.pop("confirm"), given.pop("as_json")
    asked = Asked(gradients=not given.pop("forward_only"), **given)
    wanted = asked.heads * asked.tokens**2 >= LONG
    with output.progress("power", steps(asked), wanted=wanted) as tick:
        power = measure(asked, confirm=confirm, tick=tick)
    if as_json:
        output.show_json(document(power))
    else:
        width = output.width()
        output.show(text(power, width), width)


def document(power: Power) -> dict[str, Any]:
    """All of it, as plain data."""
    asked = power.asked
    problem = {
        name: getattr(asked, name)
        for name in ("recipe", "tokens", "head_dim", "heads", "workers", "layout", "causal", "seed")
    }
    return {
        "command": "power",
        "version": ringspec.__version__,
        "specification": ringspec.SPEC_VERSION,
        "problem": problem | {"gradients": asked.gradients},
        "power": asked.power,
        "rate": power.rate,
        "tests": power.tests,
        "correct": power.correct,
        "rules": [
            {"name": rule.name, "words": rule.words, "source": rule.source} for rule in power.rules
        ],
        "defects": [row_data(row) for row in power.rows],
    }


def row_data(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "words": row.words,
        "unit": row.unit,
        "passes": row.passes,
        "mass": row.mass,
        "deviations": row.deviations,
        "ringspec": {
            "size": row.size,
            "tensor": row.tensor,
            "with_lse": row.with_lse,
            "by_tensor": dict(row.by_tensor),
            "confirmed": row.confirmed,
        },
        "rivals": {
            name: {"size": found.size, "refuses_correct": found.refuses}
            for name, found in row.rivals.items()
        },
    }


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
    return output.bands(labels, columns, width)


def size_text(size: float | None, row: Row) -> str:
    """
    >>> from ringspec.conformance.power import Row
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
