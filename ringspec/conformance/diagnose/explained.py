"""Measure how much of the target's deviation from the correct program a known bug explains.

The results of a rounding bug stay within the noise of the correct program, so the distance in units of noise cannot
identify the bug. The rounding errors themselves can: every kernel with the bug makes the same errors, element by
element. A suspect is a program with a known bug, which is run with the rounding that the target declares. Let got,
right and suspect be the results of the target, of the correct program and of the suspect, and let e = got - right and d
= suspect - right. In each tensor::

    slope = <e, d> / <d, d>                    1 if the results deviate as far as the suspect's
    share = <e, d>^2 / (<e, e> <d, d>)         the part of e that the suspect explains

The correct program itself explains nothing, because its d is 0. A target with different tiles or another order of
merging makes additional errors, which are independent of d. Then the share falls, and the slope stays near 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.diagnose.candidates import Array, Suspect, View, rms_of

TOUCHED = 0.05  # a suspect changes a tensor if <d, d> / <e, e> exceeds this
LEAST_SHARE = 0.25  # required in every tensor that the suspect changes, as is LEAST_SLOPE
LEAST_SLOPE = 0.5
NEAR_ONE = 0.8  # slope required in at least one of these tensors
LARGEST_SLOPE = 1.5
ENOUGH = 64.0  # elements times share; from this value on, the slope is at least eight standard errors from 0
EXTRA = 1.25  # an unchanged tensor whose error exceeds the correct program's by this factor has another fault
EXTRA_LSE = (
    4.0  # larger: the float32 error of lse comes from one exp, one log and a sum in any order
)
SAME = 0.95  # two suspects that share this part of their deviations cannot be told apart


@dataclass(frozen=True)
class InTensor:
    """How much of one tensor's error a suspect explains: ``share`` and ``slope`` of ``elements`` numbers.

    ``size``: mean square of e in units of the correct program's noise. ``touched``: whether the suspect changes the
    tensor. ``extra``: rms error of the target's results divided by that of the correct program. A tensor that the
    suspect does not change, but whose ``extra`` exceeds ``most``, has another fault.
    """

    share: float
    slope: float
    elements: int
    size: float
    touched: bool
    extra: float
    most: float = EXTRA

    @property
    def plain(self) -> bool:
        """False if this tensor shows that the suspect is not the bug of the target."""
        if not self.touched:
            return self.extra <= self.most
        return self.share >= LEAST_SHARE and LEAST_SLOPE <= self.slope <= LARGEST_SLOPE


@dataclass(frozen=True)
class Explained:
    """How much of the errors a suspect explains, for each tensor."""

    tensors: Mapping[str, InTensor]

    @property
    def part(self) -> float:
        """The fraction of the squared deviation e, summed over the tensors, that the suspect explains.

        A tensor that the suspect does not change counts only if its error is clearly larger than that of the correct
        program.
        """
        counted = [one for one in self.tensors.values() if one.touched or not one.plain]
        whole = sum(one.size for one in counted)
        found = sum(one.share * one.size for one in counted if one.touched)
        return found / whole if whole > 0 else 0.0

    @property
    def enough(self) -> bool:
        """True if the suspect explains the deviation well enough to be the bug of the target."""
        touched = [one for one in self.tensors.values() if one.touched]
        return (
            all(one.plain for one in self.tensors.values())
            and any(one.slope >= NEAR_ONE for one in touched)
            and sum(one.share * one.elements for one in touched) >= ENOUGH
        )


def explained(views: Sequence[View], suspect: Suspect, right: Suspect | None = None) -> Explained:
    """Measure how much of the results' deviation from ``right`` (None: the correct program) a suspect explains.

    If a result is infinite or NaN where ``right`` is finite, the suspect explains nothing, because rounding cannot
    cause that.
    """
    if any(spoilt(view, right) for view in views):
        return Explained({})
    found = {}
    for name in dict.fromkeys(name for view in views for name in view.formats):
        e, d, own = (
            np.concatenate([part.ravel() for part in parts])
            for parts in zip(
                *(deviations(view, name, suspect, right) for view in views), strict=True
            )
        )
        ee, dd, ed = float(e @ e), float(d @ d), float(e @ d)
        if ee == dd == 0:
            continue
        found[name] = InTensor(
            share=min(1.0, ed * ed / (ee * dd)) if ee > 0 and dd > 0 else 0.0,
            slope=ed / dd if dd > 0 else 0.0,
            elements=e.size,
            size=ee / e.size,
            touched=dd > TOUCHED * ee,
            extra=ratio(float((e + own) @ (e + own)), float(own @ own)),
            most=EXTRA_LSE if name == "lse" else EXTRA,
        )
    return Explained(found)


def deviations(
    view: View, name: str, suspect: Suspect, right: Suspect | None
) -> tuple[Array, Array, Array]:
    """Return e = got - right, d = suspect - right, and right - float64, for one tensor.

    All three are in units of the correct program's noise in the row.
    """
    error = view.error(right, name) if name in view.formats else None
    if error is None:
        return (np.zeros(0),) * 3
    if not suspect.program.applies(view.call):
        return error.e, np.zeros_like(error.e), error.own
    ours = view.flat(view.of(suspect), name)[error.finite]
    with np.errstate(invalid="ignore", over="ignore"):
        d = (ours - error.right) / error.sigma
    finite = np.isfinite(d)
    return error.e[finite], d[finite], error.own[finite]


def spoilt(view: View, right: Suspect | None) -> bool:
    """Tell whether a result of the target is infinite or NaN where that of ``right`` is finite."""
    return any(
        bool((np.isfinite(ours) & ~np.isfinite(got)).any())
        for name in view.formats
        for got, ours in view.pairs(view.of(right), name)
    )


def ratio(square: float, other: float) -> float:
    """Return sqrt(square / other); return 1 if both are 0."""
    if other == 0:
        return 1.0 if square == 0 else math.inf
    return math.sqrt(square / other)


def alike(views: Sequence[View], one: Suspect, other: Suspect) -> bool:
    """Tell whether two suspects deviate from the correct program in the same way, element by element."""
    for view in views:
        right, first, second = view.of(None), view.of(one), view.of(other)
        for name in view.formats:
            base = right[name]
            pairs = [list(zip(x[name], base, strict=True)) for x in (first, second)]
            sizes = [rms_of(x) for x in pairs]
            apart = rms_of(list(zip(first[name], second[name], strict=True)))
            if not apart * apart <= (1 - SAME) * max(sizes) ** 2:
                return False
    return True
