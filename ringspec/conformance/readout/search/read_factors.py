"""Factors whose size is read from the results, for kernels that apply one that no list of mistakes contains."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import numpy as np

from ringspec.conformance.readout.faults.kinds import GRADIENTS, Kind, at_counts, listing, verb
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.matches import ZERO, Match, near
from ringspec.problem.model import Array, Booleans

READ = "(a number read from the results)"
NUMBER = re.compile(
    rf" (?:by|counts) (-?\d{{1,9}}(?:\.\d{{1,9}})?(?:e[+-]?\d{{1,2}})?)[ ,].*{re.escape(READ)}"
)
COST = 1.6
FEWEST = 8  # numbers from which a factor is read
LEAST_WEIGHT = 1e-3  # smaller weights are not used
LEAST_STEP = 0.2  # nor are smaller differences of scores
LARGEST_NAMED = 64  # factors n, 1/n, sqrt(n) and 1/sqrt(n) up to this n are told in this form, too
EXACT = 1e-3  # with a larger tolerance, a factor has three digits and no such form


def kinds_of_number(phase: str, words: str, value: float) -> Iterator[Kind]:
    """Yield the kinds of fault that are a wrong factor of this ``value``; ``words``: those of :func:`in_words`."""
    yield Kind(f"scores are multiplied by {words}", (("times", value),), COST)
    more = words.replace(READ, f"times {READ}", 1)
    yield Kind(f"the block counts {more}", (("count", value),), COST + 0.1)
    if phase == "forward":
        yield Kind(f"o is multiplied by {words}", (("o_times", value),), COST, True)
        return
    yield Kind(f"delta is multiplied by {words}", (("delta_times", value),), COST)
    yield Kind(f"dS is multiplied by {words}", (("ds_times", value),), COST)
    for names in GRADIENTS:
        of = f"{listing(names)} {verb(names)} multiplied by {words}"
        yield Kind(of, at_counts(names, value), COST + 0.1)


def number_in(kind: str) -> tuple[str, float] | None:
    """Return the words and the value of the factor in the words of a kind; None if its factor was not read."""
    found = NUMBER.search(kind)
    if found is None:
        return None
    words = kind[found.start(1) : kind.index(READ)].removesuffix("times ")
    return f"{words}{READ}", float(found[1])


def in_words(value: float, tolerance: float) -> str:
    """Say a factor, and that it was read from the results.

    >>> in_words(0.7071068, 2e-4)
    '0.707107, about 1/sqrt(2) (a number read from the results)'
    >>> in_words(0.9, 2e-4)
    '0.9 (a number read from the results)'
    """
    if tolerance > EXACT:
        return f"{value:.3g} {READ}"
    about = ""
    for n in range(2, LARGEST_NAMED + 1):
        whole = {f"{n}": n, f"1/{n}": 1 / n}
        of_root = {f"sqrt({n})": math.sqrt(n), f"1/sqrt({n})": 1 / math.sqrt(n)}
        for name, x in (*whole.items(), *(of_root.items() if math.isqrt(n) ** 2 != n else ())):
            if abs(value - x) <= tolerance / 2 * x and f"{value:.6g}" != name:
                about = about or f", about {name}"
    return f"{value:.6g}{about} {READ}"


def number_of(words: str) -> float:
    """Return the value of a factor, as its words say it."""
    return float(words.replace(",", " ").split(" ")[0])


def forward_factors(model: Model, seen: Seen, plain: Match, tolerance: float) -> list[str]:
    """Return, in words, the factors on o, on the scores and on the weights of blocks that most of the wrong weights show.

    ``plain``: how far the results agree with those of a ring without faults.
    """
    wrong, ours = ~plain.equal["A"], plain.ours["A"]
    found = [
        factor(seen.weights, ours, wrong, tolerance),
        of_scores(model, seen.weights, tolerance),
    ]
    if seen.lse is not None:
        e, right = (
            x * np.exp(lse)[:, None, ..., None]
            for x, lse in ((seen.weights, seen.lse), (ours, plain.ours["lse"]))
        )
        counted = ~near(e, right, right, tolerance)
        found.append(factor(e, right, counted, tolerance))
    return distinct(found, tolerance)


def backward_factors(model: Model, seen: Seen, plain: Match, tolerance: float) -> list[str]:
    """Return, in words, the factors on gradients, on the scores and on delta that most of the wrong elements show."""
    assert seen.p is not None and seen.ds_of_dq is not None
    found = [of_scores(model, seen.p, tolerance)]
    ours = plain.ours
    for name, x in (("P", seen.p), ("dS of dq", seen.ds_of_dq), ("dS of dk", seen.ds_of_dk)):
        assert x is not None
        found.append(factor(x, ours[name], ~plain.equal[name], tolerance))
    g, enough = model.of_heads("g"), np.minimum(seen.p, ours["P"]) > LEAST_WEIGHT
    of_seen, of_ours = (
        g - ds / np.where(enough, p, 1.0)
        for ds, p in ((seen.ds_of_dq, seen.p), (ours["dS of dq"], ours["P"]))
    )
    found.append(factor(of_seen, of_ours, enough & ~plain.equal["dS of dq"], tolerance))
    return distinct(found, tolerance)


def factor(seen: Array, ours: Array, wrong: Booleans, tolerance: float) -> float | None:
    """Return the factor between two arrays that at least half of the elements that are ``wrong`` show; None without one."""
    at = wrong & (np.abs(ours) > LEAST_WEIGHT) & (np.abs(seen) > ZERO)
    return most_frequent(seen[at] / ours[at], tolerance)


def of_scores(model: Model, weights: Array, tolerance: float) -> float | None:
    """Return the factor on the scores that the ratios of neighbouring weights of a row show, where it is not 1."""
    s, shown = model.of_heads("s"), weights > ZERO
    step = np.diff(s, axis=4)
    at = shown[..., 1:] & shown[..., :-1] & (np.abs(step) >= LEAST_STEP)
    ratios = np.diff(np.log(np.where(shown, weights, 1.0)), axis=4)[at] / step[at]
    loose = 2 * tolerance / LEAST_STEP
    return most_frequent(ratios[np.abs(ratios - 1) > loose], loose)


def most_frequent(ratios: Array, tolerance: float) -> float | None:
    """Return the median of the ratios if at least half of them are about as large; None if not, or if they are few."""
    if ratios.size < FEWEST:
        return None
    value = float(np.median(ratios))
    same = np.abs(ratios - value) <= 2 * tolerance * abs(value)
    return value if np.isfinite(value) and value != 0 and same.mean() >= 0.5 else None


def distinct(found: list[float | None], tolerance: float) -> list[str]:
    """Return the factors that are not 1, each once, in words."""
    kept = [1.0]
    for x in found:
        if x is not None and all(abs(x - y) > 3 * tolerance * abs(y) for y in kept):
            kept.append(x)
    return [in_words(x, tolerance) for x in kept[1:]]


def of_one_number(kind: Kind) -> bool:
    """Return whether all that a kind changes are choices of one number."""
    return all(isinstance(x, (int, float)) for _, x in kind.changes)


def same_effect(one: Kind, other: Kind) -> bool:
    """Return whether two kinds :func:`of_one_number` give the same choices about the same numbers."""
    ours, theirs = dict(one.changes), dict(other.changes)
    return (one.only, ours.keys()) == (other.only, theirs.keys()) and all(
        math.isclose(x, ours[name], rel_tol=EXACT)  # type: ignore[arg-type]
        for name, x in theirs.items()
    )
