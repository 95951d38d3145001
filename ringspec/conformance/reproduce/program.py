"""The text of a reproducer: one program, without ringspec, that shows one wrong result of one call.

It contains the inputs, the call of the function under test and a dense check in float64. It prints each wrong number
beside the correct one, and ends with exit status 1 while any of them is wrong.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.conformance.adapters.numpy_lists import NumPyTarget, arguments
from ringspec.conformance.adapters.torch_processes import TorchTarget
from ringspec.conformance.report.records import Finding
from ringspec.conformance.reproduce.dense_text import back, dense_lines, is_masked, visible_lines
from ringspec.conformance.reproduce.literals import input_lines, source, wrapped
from ringspec.conformance.reproduce.standalone import place_of, standalone
from ringspec.conformance.reproduce.torch_text import torch_lines
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import EVERY_TABLE, Call
from ringspec.errors import OptionError

MOST_LINES = 100
MORE_LINES = 20  # of a scheme, whose functions exchange tensors before and after the attention
MOST_PLACES = 3
GENEROUS = 1e-2  # relative tolerance for a result that is NaN or infinite, whose bound is not known
Writable = NumPyTarget | TorchTarget


@dataclass(frozen=True)
class Place:
    """One element of a result that is wrong, and the largest error that rounding can explain."""

    tensor: str
    worker: int
    where: tuple[int, ...]
    bound: float
    want: float


def places_of(findings: Sequence[Finding]) -> list[Place]:
    """Return the worst element of each wrong tensor, the worst tensor first, each worker's first."""
    wrong = [one for one in findings if one.kind != "ok" and one.want is not None]
    wrong.sort(key=lambda one: not math.isfinite(one.error))
    found = []
    for one in wrong[:MOST_PLACES]:
        assert one.want is not None and one.got is not None
        found.append(Place(one.tensor, one.worker, one.where, bound_of(one), one.want))
    return found


def bound_of(one: Finding) -> float:
    """Return the largest permitted error of an element, rounded up; 0 if only one value is right."""
    assert one.want is not None and one.got is not None
    if math.isfinite(one.error) and one.error > 0 and math.isfinite(one.got):
        return float(f"{1.01 * abs(one.got - one.want) / one.error:.3g}")
    if one.kind == "not zero" or not math.isfinite(one.want):
        return 0.0
    return GENEROUS * max(1.0, abs(one.want))


def supported(target: Any) -> Writable:
    """Return the target if its call can be written; raise OptionError otherwise."""
    if isinstance(target, NumPyTarget | TorchTarget):
        if getattr(target, "device", "cpu") == "cpu":
            return target
    raise OptionError(
        "a target made by NumPyTarget(function, ...), or by TorchTarget(function, ...) on a CPU",
        f"a {type(target).__name__}",
        "use ringspec replay --shrink --json, which prints the inputs, and write the call by hand",
    )


def program(target: Writable, call: Call, places: Sequence[Place], title: str) -> str:
    """Return the text of a reproducer; raise OptionError if it would have more than 100 lines, or 120 of a scheme."""
    seen = as_seen(call, target.capabilities)
    function = standalone(place_of(target.function))
    work = working(target, seen, places, function)
    used = "\n".join(work)
    tables = [name for name in EVERY_TABLE if re.search(rf"\b{name}\b", used)]
    body = [
        "# Inputs: one array for each worker.", *input_lines(seen, tables),
        "# Tensor, worker, element (batch, head, token, d), and the largest error that rounding explains.",
        *work,
    ]  # fmt: skip
    head = [
        '"""' + title,
        "",
        *wrapped(about(seen, isinstance(target, TorchTarget)), ""),
        '"""',
        "",
    ]
    head += ["from __future__ import annotations", "", *imports(function, body)]
    most = MOST_LINES + (MORE_LINES if call.scheme else 0)
    own = [line for line in function if not is_import(line)]
    lines = short([*head, *own, "", "", *body], most)
    if len(lines) > most:
        raise OptionError(
            f"a reproducer of at most {most} lines",
            f"{len(lines)} lines, {len(function)} of them the function under test",
            "define the function in a module of its own, and import it in the file of the target; or let the "
            "search take longer (--shrink-time)",
        )
    return "\n".join(lines) + "\n"


def working(
    target: Writable, call: Call, places: Sequence[Place], function: Sequence[str]
) -> list[str]:
    """Return the source after the inputs: the places, the dense check, the call and the comparison."""
    claims = target.capabilities
    per_worker = {side: call.tensors[side][0].shape[claims.axes.index("S")] for side in "qk"}
    rows = [(p.tensor, p.worker, row_of(p, per_worker), p.bound) for p in places]
    name = place_of(target.function).rpartition(":")[2]
    if isinstance(target, TorchTarget):
        imported = not any(line.startswith(f"def {name}(") for line in function)
        tables = [one for one in EVERY_TABLE if imported or one in "\n".join(function)]
        calling = [*torch_lines(name, call, target.options, tables)]
    else:
        calling = numpy_lines(name, target, call)
    visible = [*visible_lines(call), "", ""] if is_masked(call) else []
    return [
        *wrapped(f"PLACES = {rows}"), "", "", *visible, *dense_lines(call, claims), "", "", *calling,
        "", "", *main_lines(claims),
    ]  # fmt: skip


def row_of(place: Place, per_worker: Mapping[str, int]) -> tuple[int, ...]:
    """Return the index of an element in the arrays of all workers, one after another."""
    b, h, slot, *d = place.where
    tokens = per_worker["k" if place.tensor in ("dk", "dv") else "q"]
    return (b, h, place.worker * tokens + slot, *d)


def short(lines: list[str], limit: int = MOST_LINES) -> list[str]:
    """Keep at most two empty lines in a row; at most one, or none, if there would be too many lines."""
    for most in (2, 1, 0):
        kept, empty = [], 0
        for line in lines:
            empty = 0 if line else empty + 1
            if empty <= most:
                kept.append(line)
        if len(kept) <= limit:
            break
    return kept


def about(call: Call, torch: bool) -> str:
    """Describe what the program needs and how it ends."""
    needs = "NumPy" + (", ml_dtypes" if "bfloat16" in call.formats.values() else "")
    needs += " and PyTorch" if torch else ""
    what = f"A ring of {call.workers} workers"
    if call.scheme:
        mesh = " x ".join(f"{axis} {size}" for axis, size in call.mesh)
        what = f"Attention split by {call.scheme} over {call.workers} ranks, mesh {mesh}"
    return (
        f"{what} ({' and '.join(call.passes)}), compared with dense attention in float64. "
        f"Needs {needs}. Exit status: 1 while a number below is wrong, 0 once all are right."
    )


def imports(function: Sequence[str], body: Sequence[str]) -> list[str]:
    """Return the imports of the program: those that its text needs, and those of the function under test."""
    text = "\n".join(body)
    own = [
        line
        for line, used in (
            ("import sys", r"\bsys\."),
            ("import tempfile", r"\btempfile\."),
            ("from types import SimpleNamespace", "SimpleNamespace"),
            ("import ml_dtypes  # defines bfloat16 for NumPy", "'bfloat16'"),
            ("import numpy as np", ""),
            ("import torch", r"\btorch\."),
            ("import torch.distributed as dist", r"\bdist\."),
            ("from numpy import inf, nan", r"(?<![.\w])(inf|nan)\b"),
        )
        if re.search(used, text)
    ]
    return [*dict.fromkeys([*own, *filter(is_import, function)])]


def is_import(line: str) -> bool:
    return line.startswith(("import ", "from "))


def numpy_lines(name: str, target: NumPyTarget, call: Call) -> list[str]:
    """Return the source that calls a function of lists of arrays."""
    given = arguments(target.function, call)
    order = [*inspect.signature(target.function).parameters, *given]
    given = {key: given[key] for key in dict.fromkeys(order) if key in given}
    words = ", ".join(f"{key}={source(value, call)}" for key, value in given.items())
    lines = wrapped(f"found = {name}({words})")
    return [
        "def results():",
        *(f"    {line}" for line in lines),
        '    names = ("o", "lse", "dq", "dk", "dv")',
        "    return found if isinstance(found, dict) else dict(zip(names, found))",
    ]


def main_lines(claims: Capabilities) -> Iterator[str]:
    """Yield the source that compares the results and prints the numbers that differ."""
    batch = "" if "B" in claims.axes else "[None]"
    yield 'if __name__ == "__main__":'
    yield "    found, right, wrong = results(), dense(), 0"
    yield "    for name, worker, place, bound in PLACES:"
    if back(claims.axes) == batch:
        yield "        got, want = whole(found[name])[place], right[name][place]"
    else:
        rows = f"np.concatenate([np.float64(x){batch} for x in found[name]], axis=2)"
        yield f"        got = whole(found[name]) if name != 'lse' else {rows}"
        yield "        got, want = got[place], right[name][place]"
    yield "        bad = not (got == want or abs(got - want) <= bound)"
    yield "        print(f\"{'WRONG' if bad else 'right'}: {name} of worker {worker}, element {list(place)}:\","
    yield '              f"got {got:.9g}, dense float64 gives {want:.17g}")'
    yield "        wrong += bad"
    yield "    sys.exit(1 if wrong else 0)"
