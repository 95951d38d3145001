"""The limits of a run: the smallest errors that its cases detect, by input format; smaller errors may pass.

The limits are computed from the records of a report. Cases detect errors in two ways. The record of a noise case gives
the smallest errors that its statistical tests detect with probability :data:`POWER`. Other cases compare each row of a
tensor with an error bound, and their records give the smallest error that exceeds a bound. An error that a kernel makes
in every call of a format is detected by the most sensitive case, so the limit of a run is the smallest limit of all
passing cases. A run with a failure has no limits. A tensor that fails as expected has no limit either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringspec.compare.statistics.power import POWER
from ringspec.conformance.report.records import FAILURES, TENSORS, Record

NOISE, BOUNDS = "noise", "bounds"
# The kind of error that the bounds of a tensor limit: relative, except the absolute error of lse.
OF_BOUNDS = dict.fromkeys(TENSORS, "factor") | {"lse": "shift"}
FORMATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Limit:
    """The smallest detected error of one kind.

    ``size``: the error. ``case``: the id of the case that detects it. ``by``: 'noise' if statistical tests detect it,
    'bounds' if the error bounds of rows do.
    """

    size: float
    case: str
    by: str


@dataclass(frozen=True)
class FormatLimits:
    """The limits of a run for one input ``format``, by tensor and by kind of error.

    :mod:`ringspec.compare.statistics.power` lists the kinds. ``recipe``: the rounding that the noise cases assume, None
    if no noise case passed. ``declared``: whether the program under test declares that recipe. ``found``: the limits.
    """

    format: str
    recipe: str | None = None
    declared: bool = False
    found: Mapping[str, Mapping[str, Limit]] = field(default_factory=dict)

    def size(self, tensor: str, kind: str) -> float | None:
        """Return the smallest detected error of this kind in a tensor; None if there is no limit."""
        limit = self.found.get(tensor, {}).get(kind)
        return None if limit is None else limit.size

    def least(self, kind: str) -> float | None:
        """Return the smallest detected error of this kind in any tensor; None if there is no limit."""
        sizes = [self.size(name, kind) for name in self.found]
        return min((x for x in sizes if x is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the footer of a report."""
        tensors = {
            name: {kind: vars(limit) for kind, limit in kinds.items()}
            for name, kinds in self.found.items()
        }
        return {
            "format": self.format,
            "recipe": self.recipe,
            "declared": self.declared,
            "tensors": tensors,
        }


def limits_of(records: Iterable[Record]) -> tuple[FormatLimits, ...]:
    """Return the limits of a run by input format; an empty tuple if a case failed or was not run.

    >>> seen = {"recipe": "bf16", "declared": True, "limits": {"o": {"factor": 1e-4}}}
    >>> record = Record("noise/a", "pass", {"inputs": "bfloat16"}, noise=seen)
    >>> [one.size("o", "factor") for one in limits_of([record])]
    [0.0001]
    >>> limits_of([record, Record("ring/a", "mismatch")])
    ()
    """
    every = list(records)
    if any(one.outcome in FAILURES or one.outcome == "not run" for one in every):
        return ()
    of_format = [
        limits_of_format(name, [one for one in every if one.needs.get("inputs") == name])
        for name in FORMATS
    ]
    return tuple(one for one in of_format if one.found)


def limits_of_format(format: str, records: Iterable[Record]) -> FormatLimits:
    """Return the smallest limits of the passing cases of one format."""
    found: dict[str, dict[str, Limit]] = {}
    failing: set[str] = set()
    recipe, declared = None, False
    for record in records:
        if record.outcome == "expected failure":
            wrong = {one.tensor for one in record.findings if not one.ok}
            failing |= wrong or set(TENSORS)
        if record.outcome != "pass":
            continue
        noise = record.noise or {}
        if noise.get("limits"):
            recipe, declared = noise["recipe"], noise["declared"]
        for tensor, kind, size, by in sizes_of(record):
            limit, known = Limit(size, record.id, by), found.setdefault(tensor, {})
            if kind not in known or size < known[kind].size:
                known[kind] = limit
    kept = {name: found[name] for name in TENSORS if name in found and name not in failing}
    return FormatLimits(format, recipe, declared, kept)


def sizes_of(record: Record) -> Iterable[tuple[str, str, float, str]]:
    """Yield each limit of one passing case as (tensor, kind of error, size, 'noise' or 'bounds')."""
    for tensor, kinds in (record.noise or {}).get("limits", {}).items():
        for kind, size in kinds.items():
            yield tensor, kind, size, NOISE
    bounds: dict[str, float] = {}
    for one in record.findings:
        if one.limit is not None and one.tensor in OF_BOUNDS:
            bounds[one.tensor] = min(one.limit, bounds.get(one.tensor, math.inf))
    for tensor, size in bounds.items():
        yield tensor, OF_BOUNDS[tensor], size, BOUNDS


def as_data(limits: Iterable[FormatLimits]) -> dict[str, Any]:
    """Return the limits as plain data for the footer of a report."""
    return {"power": POWER, "formats": [one.as_dict() for one in limits]}
