"""Say which values a kernel rounds to a 16-bit format although the call asks for more precision.

Such a kernel is first explained with a tolerance that leaves room for this rounding. What is left are the differences
between its results and those of a ring with its faults. They are told as *rounding* only if they look like it: either the
values are numbers of a 16-bit format, or the relative differences are as large as those of such a format, have no
preferred sign, and do not depend on the value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.matches import ZERO, Match, near
from ringspec.formats import load, round_to, unit_roundoff
from ringspec.problem.model import Array, Booleans

LOOSE = 0.02  # relative to the sizes of a number's parts: room for 16-bit partial results and lse
# Of the numbers that agree loosely, those that do not agree finely, if values are rounded.
SUSPECTED = 0.2
FEW = 20  # from fewer differences, rounding is not recognised
NARROW = ("bfloat16", "float16")  # every number of the first with few digits is one of the second
ON_GRID, NEARLY_ALL = 1e-6, 0.98
OF_DELTA = 1e-6  # absolute error of a delta that is read from dS
# Mean / root mean square of differences; their correlation with the logarithm of the value.
BIASED, DEPENDENT = 0.6, 0.4
MOST_UNITS = 4  # the largest difference that several roundings give, in unit roundoffs
ROUNDED, CUT, COARSE = "rounded to", "cut, not rounded, to", "only about as precise as"
WORDS = (ROUNDED, CUT, COARSE)
OF_DELTA_OR_O = "delta, or the o from which it is computed,"
OF_PRODUCTS = "p in the product with v, or the running o before its division by l,"


@dataclass(frozen=True)
class Values:
    """Values that were read (``seen``) and predicted (``ours``); ``wrong``: where they do not agree finely.

    ``error``: the absolute error with which they were read.
    """

    seen: Array
    ours: Array
    wrong: Booleans
    error: float = 0.0


def is_rounding(kind: str) -> bool:
    """Return whether a fault of this kind is the rounding of values."""
    return any(f" {words} {name}" in kind for words in WORDS for name in NARROW)


def rounded_values(match: Match, loose: Match) -> bool:
    """Return whether values seem to be rounded: of the numbers that agree in ``loose``, many do not agree in ``match``."""
    for name, fine in match.equal.items():
        if name in ("V", "dsinks"):
            continue
        there = loose.equal[name] & (np.abs(match.ours[name]) > ZERO)
        count, off = int(there.sum()), int((there & ~fine).sum())
        if off > max(FEW, SUSPECTED * count):
            return True
    return False


def forward_rounding(
    seen: Seen, match: Match, tolerance: float, stored: Outputs
) -> tuple[str, ...] | None:
    """Return which values of the forward pass are rounded, in words; None if a difference does not look like rounding.

    ``match``: what a ring with the kernel's faults gives. ``tolerance``: that of a kernel without such rounding.
    ``stored``: the results of a call with random inputs.
    """
    found: dict[str, str | None] = {}
    of = {"o": (seen.weights, match.ours["A"], np.abs(match.ours["A"]))}
    if seen.lse is not None:
        of["lse"] = (seen.lse, match.ours["lse"], np.maximum(1.0, np.abs(match.ours["lse"])))
    for name, (got, ours, size) in of.items():
        values = Values(got, ours, ~near(got, ours, size, tolerance))
        if values.wrong.any():
            found[name] = how_rounded(values, name, name, stored)
    if "o" in found and (found["o"] is None or COARSE in found["o"]):
        found["o"] = rounded_products(seen.weights, match.ours["A"], tolerance) or found["o"]
    return in_words(found)


def rounded_products(seen: Array, ours: Array, tolerance: float) -> str | None:
    """Say that the p in the product with v is rounded, if the weights [a, b, h, i, j] show it; None if they do not.

    A kernel rounds e^(s - m), with the maximum m of the keys so far, which is some score of the row. So some pair of the
    row must have a score from which the rounding of this pair follows. Each number of o shows one pair, so a running o
    that is rounded once looks the same.
    """
    rows, expected = (
        np.moveaxis(x, 1, 3).reshape(-1, x.shape[1] * x.shape[4]) for x in (seen, ours)
    )
    pairs = np.abs(expected) > ZERO
    for name in NARROW:
        for words, rounding in ((ROUNDED, round_to), (CUT, cut)):
            fits = np.zeros(rows.shape, bool)
            for other in expected.T:
                with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                    p = expected / other[:, None]
                    possible = np.isfinite(p) & (p <= 1)
                    p = np.where(possible, p, 1.0)
                    error = np.abs(rows - expected * (rounding(p, name) / p))
                fits |= possible & (error <= tolerance * np.abs(expected))
            if fits[pairs].mean() >= NEARLY_ALL:
                return f"{OF_PRODUCTS} is {words} {name}"
    return None


def less_exact(words: str) -> str:
    """Return a weaker statement about the same values, which may hold in more problems; '' if there is none."""
    return f"o is {COARSE} {words.split()[-1]}" if words.startswith(OF_PRODUCTS) else ""


def cut(x: Array, name: str) -> Array:
    """Return positive numbers, rounded towards 0 to a 16-bit format."""
    nearest = round_to(x, name)
    return np.where(nearest > x, round_to(x * (1 - unit_roundoff(name)), name), nearest)


def backward_rounding(
    seen: Seen, match: Match, tolerance: float, stored: Outputs, largest: float, scale: float
) -> tuple[str, ...] | None:
    """Return the same for the backward pass; ``largest``: the largest <dy, v>."""
    assert seen.p is not None and seen.ds_of_dq is not None and seen.ds_of_dk is not None
    ours, found = match.ours, dict[str, str | None]()
    p = Values(seen.p, ours["P"], ~near(seen.p, ours["P"], np.abs(ours["P"]), tolerance))
    if p.wrong.any():
        found["p"] = how_rounded(p, "dv", "p in the product for dv", stored)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_p = np.where(np.abs(p.ours) > ZERO, p.seen / p.ours, 1.0)
    each: dict[str, Values] = {}
    parts = np.abs(p.ours) * (largest + np.abs(seen.delta)[:, None, :, :, None])
    for name, x in (("dq", seen.ds_of_dq), ("dk", seen.ds_of_dk)):
        expected = ours[f"dS of {name}"]
        size = np.maximum(np.abs(expected), parts)
        wrong = ~near(x, expected, size, tolerance)
        if p.wrong.any() and near(x, expected * of_p, size, tolerance).all():
            wrong = np.zeros_like(wrong)  # the rounded p explains it
            found["p"] = found["p"] and found["p"].replace(" in the product for dv", "")
        if wrong.any():
            each[name] = Values(x, expected, wrong)
    if len(each) == 2 and near(each["dq"].seen, each["dk"].seen, parts, tolerance).all():
        delta = delta_used(seen, p.ours, each["dq"])
        both = delta and how_rounded(delta, "", "delta", stored)
        if both and COARSE not in both:  # in a readout, this sum is one number of o
            both = both.replace("delta", OF_DELTA_OR_O, 1)
        found["dS"] = both or how_rounded(each["dq"], "", "dS", stored)
    else:
        for name, ds in each.items():
            scaled = Values(scale * ds.seen, scale * ds.ours, ds.wrong)
            words = f"dS in the product for {name}"
            of_ds = how_rounded(ds, "", words, stored)
            own = how_rounded(scaled, name, name, stored)
            found[name] = of_ds if of_ds and COARSE not in of_ds and not own else own
    return in_words(found)


def delta_used(seen: Seen, p: Array, ds: Values) -> Values | None:
    """Return the delta that a backward pass used, [a, h, i], if the differences in dS are those of one delta for a row."""
    flat, size = (
        np.moveaxis(x, 1, 3).reshape(*seen.delta.shape, -1) for x in (ds.ours - ds.seen, p)
    )
    best = size.argmax(axis=3)[..., None]
    more = np.take_along_axis(flat, best, 3) / np.take_along_axis(size, best, 3)
    if not near(flat, size * more, size * (1 + np.abs(seen.delta))[..., None], 10 * OF_DELTA).all():
        return None
    more = more[..., 0]
    return Values(seen.delta + more, seen.delta, np.abs(more) > OF_DELTA, OF_DELTA)


def how_rounded(values: Values, tensor: str, words: str, stored: Outputs) -> str | None:
    """Say how values are rounded; None if the differences do not look like rounding.

    ``words``: a noun for the values. ``tensor``: the result that contains them, or ''. If that result is rounded with
    random inputs, too, it is named in place of the values.
    """
    at = values.wrong & np.isfinite(values.seen) & (np.abs(values.ours) > ZERO)
    count = int(at.sum())
    if count < FEW or count < int(values.wrong.sum()):
        return None
    x, y = values.seen[at], values.ours[at]
    error = (x - y) / np.abs(y)
    for name in NARROW:
        if on_grid(x, name, values.error) >= NEARLY_ALL and np.abs(
            error
        ).max() <= 2 * MOST_UNITS * unit_roundoff(name):
            kept = [load(z) for z in stored.get(tensor, ())]
            if kept and on_grid(np.concatenate([z.ravel() for z in kept]), name) >= NEARLY_ALL:
                words = tensor
            towards_0 = (np.sign(y) * error <= 0).all()
            return f"{words} is {CUT if towards_0 else ROUNDED} {name}"
    rms = float(np.sqrt((error * error).mean()))
    name = NARROW[0] if rms > 2 * unit_roundoff(NARROW[1]) else NARROW[1]
    large = np.abs(error).max() > MOST_UNITS * unit_roundoff(name)
    biased = abs(float(error.mean())) > BIASED * rms
    level = np.log(np.abs(y))
    spread = float(level.std())
    slope = abs(float(np.corrcoef(error, level)[0, 1])) if spread > 0 else 0.0
    if large or biased or not slope <= DEPENDENT:
        return None
    return f"{words} is {COARSE} {name}"


def narrow_results(format: str, stored: Outputs) -> dict[str, str]:
    """Return the results of a call with random inputs that are all numbers of bfloat16, in words, if ``format`` is float16.

    They have three bits fewer than float16 holds. A readout's tolerance is larger than that.
    """
    found = {}
    for name, shards in stored.items() if format == "float16" else ():
        x = np.concatenate([load(one).ravel() for one in shards])
        if np.count_nonzero(x) >= FEW and np.isfinite(x).all() and on_grid(x, NARROW[0]) == 1.0:
            found[name] = f"{name} is {ROUNDED} {NARROW[0]}, not to {format}"
    return found


def on_grid(x: Array, name: str, error: float = 0.0) -> float:
    """Return the fraction of the values, without zeros, that are numbers of a format; ``error`` is their absolute error."""
    x = x[np.isfinite(x) & (np.abs(x) > ZERO)]
    if not x.size:
        return 0.0
    return float((np.abs(x - round_to(x, name)) <= ON_GRID * np.abs(x) + error).mean())


def in_words(found: Mapping[str, str | None]) -> tuple[str, ...] | None:
    if any(words is None for words in found.values()):
        return None
    return tuple(str(words) for words in found.values())
