"""Describe the verdict on one tensor of one worker in a sentence: how many rows fail, and the worst element.

>>> verdict = TensorVerdict("dk", 2, "beyond bound", 412.3, (0, 1, 5, 3), 0.53, 0.12, 37, 64)
>>> print(explain(verdict))
dk of worker 2: 37 of 64 rows beyond their bound; worst at batch 0, head 1, slot 5, d 3: got 0.53, \
want 0.12 (412 times the bound)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ringspec.compare.verdict import TensorVerdict

__all__ = ["explain", "explain_all"]

AXES = {
    "o": ("batch", "head", "slot", "d"),
    "lse": ("batch", "head", "slot"),
    "dq": ("batch", "head", "slot", "d"),
    "dk": ("batch", "head", "slot", "d"),
    "dv": ("batch", "head", "slot", "d"),
    "dsinks": ("head", "sink"),
    "dbias": ("batch", "head", "slot", "key"),
}
WHAT_FAILED = {
    "NaN": "with NaN or beyond their bound; first NaN",
    "-inf where finite is due": "wrong; -inf where a finite number is expected",
    "finite where -inf is due": "wrong; a finite number where -inf is expected",
    "infinite": "wrong; infinite where it must not be",
    "not zero": "wrong; not zero where nothing contributes, worst",
    "beyond bound": "beyond their bound; worst",
}
WITHOUT_PLACE = {
    "missing": "missing",
    "wrong shape": "wrong shape",
    "wrong dtype": "wrong dtype",
}


def explain(verdict: TensorVerdict) -> str:
    """Return a sentence that describes a verdict, without a full stop."""
    whose = f"{verdict.tensor} of worker {verdict.worker}"
    if verdict.tensor.endswith("_sum"):
        whose = f"{verdict.tensor.removesuffix('_sum')}, summed over all workers"
    if verdict.kind in WITHOUT_PLACE:
        return f"{whose}: {WITHOUT_PLACE[verdict.kind]}"
    if verdict.kind == "ok":
        most = f", at most {times(verdict.error)} its bound" if verdict.of else ""
        return f"{whose}: all {rows_of(verdict.of)} within their bound{most}"
    what = WHAT_FAILED.get(verdict.kind, verdict.kind)
    got, want = number(verdict.got), number(verdict.want)
    sentence = f"{whose}: {verdict.rows} of {rows_of(verdict.of)} {what} at {place(verdict)}"
    sentence += f": got {got}, want {want}"
    if verdict.kind == "beyond bound":
        sentence += f" ({times(verdict.error)} the bound)"
    return sentence


def explain_all(verdicts: Iterable[TensorVerdict], most: int = 8) -> str:
    """Describe the failures among ``verdicts``, one line for each tensor and worker; '' if all pass.

    If there are more than ``most`` such lines, one last line says how many are left out.
    """
    failing = grouped(v for v in verdicts if v.kind != "ok")
    lines = [line_of(group) for group in failing[:most]]
    if len(failing) > most:
        lines.append(f"and {len(failing) - most} more results, one for each tensor and worker")
    return "\n".join(lines)


def grouped(verdicts: Iterable[TensorVerdict]) -> list[list[TensorVerdict]]:
    """Group the verdicts by tensor and worker; in each group NaN comes first, then the largest error.

    A group has several verdicts if the kernel was called several times.
    """
    found: dict[tuple[str, int], list[TensorVerdict]] = {}
    for one in verdicts:
        found.setdefault((one.tensor, one.worker), []).append(one)
    for group in found.values():
        group.sort(key=lambda one: (one.kind != "NaN", -one.error))
    return list(found.values())


def line_of(group: Sequence[TensorVerdict]) -> str:
    """Describe the first verdict of a group; if several calls are wrong, add how many."""
    return explain(group[0]) + (f"; wrong in {len(group)} calls" if len(group) > 1 else "")


def place(verdict: TensorVerdict) -> str:
    """Return the index of the worst element as text, such as 'batch 0, head 1, slot 5, d 3'."""
    axes = AXES.get(verdict.tensor.removesuffix("_sum"), ())
    if len(axes) != len(verdict.where):
        return f"index {list(verdict.where)}"
    return ", ".join(f"{axis} {i}" for axis, i in zip(axes, verdict.where, strict=True))


def rows_of(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def number(x: float | None) -> str:
    return "nothing" if x is None else f"{x:.7g}"


def times(error: float) -> str:
    """Return a ratio as text: '412 times', '1.04 times', or 'infinitely many times'.

    >>> times(412.3), times(1.04), times(math.inf), times(3.2e20)
    ('412 times', '1.04 times', 'infinitely many times', '3.2e+20 times')
    """
    if not math.isfinite(error):
        return "infinitely many times"
    return f"{error:.0f} times" if 100 <= error < 1e6 else f"{error:.3g} times"
