"""The limits of a run (the smallest errors that it detects) as text: a table, and what its numbers mean."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringspec.compare.statistics.power import POWER
from ringspec.conformance.report.limits import BOUNDS, FormatLimits

FACTORS = ("o", "dq", "dk", "dv")
HEADS = {
    "inputs": "",
    "scale": "softmax scale times 1 + x",
    "o": "o times 1 + x",
    "dq": "dq times 1 + x",
    "dk": "dk times 1 + x",
    "dv": "dv times 1 + x",
    "lse": "lse + x",
    "bias": "mean error of rounding o, in units in the last place, towards 0",
    "wrong": "share of elements of o that are wrong by one unit in the last place",
}
NONE = "-"
BY_BOUNDS, UNDECLARED = "*", "+"
MARKS = {
    UNDECLARED: "no recipe is declared: how the kernel rounds is not tested",
    BY_BOUNDS: "not tested by noise cases: the limit is the bound of a single element",
}


def limit_rows(limits: Sequence[FormatLimits]) -> list[list[str]]:
    """Return the rows of the table, starting with the column heads; a column without any limit is left out.

    >>> from ringspec.conformance.report.limits import Limit
    >>> found = {"o": {"factor": Limit(1.63e-4, "noise/a", "noise")}}
    >>> limit_rows([FormatLimits("bfloat16", "bf16", True, found)])
    [['inputs', 'o'], ['bfloat16', '1.7e-4']]
    """
    rows = [list(HEADS), *(cells_of(one) for one in limits)]
    used = [n for n in range(len(HEADS)) if any(row[n] != NONE for row in rows[1:])]
    return [[row[n] for n in used] for row in rows]


def cells_of(one: FormatLimits) -> list[str]:
    """Return the cells of one format, in the order of :data:`HEADS`."""
    by_bounds = all(x.by == BOUNDS for kinds in one.found.values() for x in kinds.values())
    mark = BY_BOUNDS if by_bounds else "" if one.declared else UNDECLARED
    first = next((name for name in FACTORS if one.size(name, "bias") is not None), "o")
    shift, bias, share = one.size("lse", "shift"), one.size(first, "bias"), one.size(first, "share")
    return [
        one.format + mark,
        figure(one.least("scale")),
        *(figure(one.size(name, "factor")) for name in FACTORS),
        NONE if shift is None else f"+{figure(shift)}",
        figure(bias),
        NONE if share is None else f"1 in {math.floor(1 / share)}",
    ]


def figure(x: float | None) -> str:
    """Format a size with two digits. It is rounded up, so that an error of the printed size is detected.

    >>> figure(1.61e-4), figure(0.0431), figure(9.95e-5), figure(0.5), figure(11.2), figure(None)
    ('1.7e-4', '0.044', '1.0e-4', '0.50', '12', '-')
    """
    if x is None:
        return NONE
    if x >= 10:
        return f"{math.ceil(x)}"
    exponent = math.floor(math.log10(x))
    digits = math.ceil(x / 10.0 ** (exponent - 1) - 1e-9)
    if digits >= 100:
        digits, exponent = 10, exponent + 1
    if exponent >= -2:
        return f"{digits * 10.0 ** (exponent - 1):.{1 - exponent}f}"
    return f"{digits // 10}.{digits % 10}e{exponent}"


def limit_lines(limits: Sequence[FormatLimits], run: str = "this run") -> list[str]:
    """Return the text of the limits in lines of at most 80 characters; no lines if there are no limits.

    ``run``: how the heading names the run or profile that has these limits.
    """
    if not limits:
        return []
    rows = limit_rows(limits)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    table = [
        "  " + " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [heading(run), *table, *(f"  {line}" for line in explanation(limits))]


def heading(run: str = "this run") -> str:
    """Return the heading, which says what the numbers in the table mean."""
    return f"not seen by {run}: errors below these (found with {100 * POWER:g} % probability)"


def explanation(limits: Sequence[FormatLimits]) -> list[str]:
    """Explain one number of the table as an example, then the last columns and the marks in the first column."""
    heads, marks = limit_rows(limits)[0], {cells_of(one)[0][-1] for one in limits}
    lines = [meaning(limits)]
    if "bias" in heads:
        lines.append("bias: mean error of rounding o towards 0, in units in the last place (ulp)")
    if "wrong" in heads:
        lines.append("wrong: elements of o that are wrong by 1 ulp")
    return lines + [f"{mark} {words}" for mark, words in MARKS.items() if mark in marks]


def meaning(limits: Sequence[FormatLimits]) -> str:
    """Explain the first relative error in the table in a sentence.

    >>> from ringspec.conformance.report.limits import Limit
    >>> found = {"o": {"factor": Limit(1.63e-4, "noise/a", "noise")}}
    >>> meaning([FormatLimits("bfloat16", "bf16", True, found)])
    'so a bfloat16 kernel whose o is too large by less than 0.017 % may pass'
    """
    sizes = [(one, name, one.size(name, "factor")) for one in limits for name in FACTORS]
    example = next(((one, name, x) for one, name, x in sizes if x is not None), None)
    if example is None:
        return "lse: a constant that is added to all its elements"
    one, name, size = example
    below = f"less than {figure(100 * size)} %"
    return f"so a {one.format} kernel whose {name} is too large by {below} may pass"
