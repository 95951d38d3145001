"""Describe the picture of a known bug in one sentence with its numbers: caption and alternative text."""

import numpy as np
from bug_runs import Pattern, Ratios, RowErrors, WorstErrors, factors, pairs_of
from numpy.typing import NDArray

Picture = Pattern | RowErrors | WorstErrors | Ratios
READ_FROM = {
    "o": "P of the forward pass, read from o with one-hot values",
    "dv": "P of the backward pass, read from dv with one-hot dy",
    "dq": "dZ, read from dq with one-hot keys and zero queries",
    "dk": "dZ, read from dk with one-hot queries and zero keys",
}


def caption(picture: Picture) -> str:
    """One sentence on the picture, with its numbers; also the alternative text."""
    if isinstance(picture, Pattern):
        where = f"{picture.case}, batch {picture.head[0]}, head {picture.head[1]}, in float64"
        words = weights_words(picture) if picture.weights else pairs_words(picture)
        return f"{READ_FROM[picture.tensor]}: {words} ({where})."
    if isinstance(picture, RowErrors):
        return errors_words(picture)
    if isinstance(picture, WorstErrors):
        worst = ", ".join(
            f"{n} {e:.3g}" for n, e in zip(picture.tensors, picture.errors, strict=True)
        )
        return f"Largest error of each tensor in units of its bound: {worst} ({picture.case}, in {picture.recipe})."
    ratios = ", ".join(f"{n} {r:.2f}" for n, r in zip(picture.tensors, picture.got, strict=True))
    return (
        f"Root mean square of error / predicted noise with the bug: {ratios}. Every single value is within its "
        f"bound. First alarm: {picture.alarm} ({picture.case}, in {picture.recipe})."
    )


def counts(picture: Pattern) -> tuple[int, int, int, int]:
    """Numbers of pairs: visible by the specification, extra, missing, not finite."""
    want, seen = pairs_of(picture)
    bad = ~np.isfinite(picture.got)
    return (
        int(want.sum()),
        int((seen & ~want & ~bad).sum()),
        int((want & ~seen).sum()),
        int(bad.sum()),
    )


def pairs_words(picture: Pattern) -> str:
    want, extra, missing, bad = counts(picture)
    if want == 0:
        return f"no pair should be visible, and {extra + bad} are"
    parts = [
        f"{what}: {n}"
        for n, what in ((extra, "extra"), (missing, "missing"), (bad, "not finite"))
        if n
    ]
    return f"{want} pairs should be visible; {', '.join(parts)}"


def weights_words(picture: Pattern) -> str:
    ratio = factors(picture)
    ratio = ratio[~np.isnan(ratio)]
    off = ~(np.abs(ratio - 1) <= 1e-9)
    _, extra, missing, bad = counts(picture)
    wrong = ratio[off & np.isfinite(ratio)]
    words = f"{int(off.sum())} of {ratio.size} numbers are wrong{by_factors(wrong)}"
    more = [
        f"{what}: {n}"
        for n, what in (
            (extra, "nonzero but expected 0"),
            (missing, "missing"),
            (bad, "not finite"),
        )
        if n
    ]
    return f"{words}{'; ' if more else ''}{', '.join(more)}"


def by_factors(wrong: NDArray[np.float64]) -> str:
    """The range of the wrong numbers divided by the correct ones.

    >>> by_factors(np.array([-1.0, -1.0])), by_factors(np.array([2.0, 0.5]))
    (' by the factor -1', ' by factors from 0.5 to 2')
    """
    if not wrong.size:
        return ""
    least, most = f"{wrong.min():.3g}", f"{wrong.max():.3g}"
    return f" by the factor {least}" if least == most else f" by factors from {least} to {most}"


def errors_words(picture: RowErrors) -> str:
    errors, bad = picture.errors, ~np.isfinite(picture.errors)
    failing = int((~(errors <= 1)).sum())
    rows = "elements" if picture.axis.startswith("element") else "rows"
    worst = (
        f"the largest is {errors[~bad].max(initial=0.0):.3g}" if (~bad).any() else "none is finite"
    )
    if bad.any():
        worst += f", {int(bad.sum())} infinite or NaN"
    where = f"{picture.case}, in {picture.recipe}"
    if rows == "rows":
        where += f", batch {picture.head[0]}, head {picture.head[1]}"
    others = [name for name in picture.failing if name != picture.tensor]
    also = f" {', '.join(others)} {'fails' if len(others) == 1 else 'fail'} too." if others else ""
    return (
        f"Error of {picture.tensor} in units of its bound: {failing} of {errors.size} {rows} exceed 1, "
        f"{worst} ({where}).{also}"
    )
