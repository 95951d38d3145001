"""Say in which rows results are NaN or infinite although the correct results are finite.

A pass with such results is not searched for faults, because the search compares finite numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ringspec.conformance.readout.faults.kinds import listing
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.faults.places import counted
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans

NOT_FINITE = "NaN or infinite"
GRADIENTS = ("dq", "dk", "dv")
RESULTS = {"forward": ("o", "lse"), "backward": GRADIENTS}
FROM_FORWARD = "the gradients, which the backward pass computes from these results"


def not_finite(
    geometry: Geometry, results: Mapping[str, Array], right: Mapping[str, Array]
) -> dict[str, str]:
    """Return, by pass, the rows whose results are not finite, in words; ``right``: the correct results.

    A pass whose results are finite, or infinite where they should be, is left out; and a forward pass whose o is finite,
    because a model can leave out a row of lse.
    """
    found = {}
    for phase, names in RESULTS.items():
        wrong = {
            name: rows_of(name, results[name], right[name]) for name in names if name in results
        }
        if any(rows.any() for name, rows in wrong.items() if name != "lse"):
            found[phase] = told_of(geometry, wrong)
    return found


def rows_of(name: str, x: Array, right: Array) -> Booleans:
    """Return the rows [W, heads, n] with values that are not finite, but should be."""
    wrong = ~np.isfinite(x) & (np.isnan(x) | (x != right))
    return np.asarray(wrong if name == "lse" else wrong.any(axis=3))


def told_of(geometry: Geometry, wrong: Mapping[str, Booleans]) -> str:
    """Name the results that are not finite, with their rows; those with the same rows together."""
    by_rows: dict[str, list[str]] = {}
    for name, rows in wrong.items():
        if rows.any():
            by_rows.setdefault(where(geometry, name, rows), []).append(name)
    return "; ".join(
        f"{listing(names)} {'is' if len(names) == 1 else 'are'} {NOT_FINITE} {rows}"
        for rows, names in by_rows.items()
    )


def where(geometry: Geometry, name: str, rows: Booleans) -> str:
    """Describe rows [W, heads, n]: by a rule if one fits, otherwise as a list."""
    real = np.broadcast_to(geometry.real[:, None], rows.shape)  # padding is not read
    if rows[real].all():
        return "in all rows"
    if name not in ("dk", "dv"):
        for words, pattern in rules(geometry):
            if np.array_equal(rows[real], np.broadcast_to(pattern, rows.shape)[real]):
                return f"for queries that see no key of {words}, and nowhere else"
    noun = ("key", "keys") if name in ("dk", "dv") else ("query", "queries")
    found = [
        f"{counted(*noun, np.flatnonzero(rows[a].any(axis=0)).tolist())} of worker {a}"
        for a in range(geometry.workers)
        if rows[a].any()
    ]
    return "for " + ", ".join(found)


def rules(geometry: Geometry) -> Iterator[tuple[str, Booleans]]:
    """Yield rules for queries, as a part of a sentence and the queries [W, heads or 1, n] to which it applies."""
    visible = masks_of(geometry)[0].pattern
    whole = (geometry.workers, geometry.workers, *visible.shape[2:])
    sees = np.asarray(np.broadcast_to(visible, whole).any(axis=4))  # [a, b, heads or 1, i]
    hidden = np.broadcast_to(~sees.any(axis=(2, 3), keepdims=True), sees.shape)
    step = geometry.steps("forward")[:, :, None, None]
    yield "any worker", np.asarray(~sees.any(axis=1))
    for skipped, words in (
        (hidden, ""),
        (np.zeros_like(hidden), " (a block that the mask hides counts)"),
    ):
        computed = np.where(skipped, geometry.workers, step)
        first = computed == computed.min(axis=1, keepdims=True)
        yield f"the first block{words}", np.asarray((first & ~sees & ~skipped).any(axis=1))
        yield f"some block{words}", np.asarray((~sees & ~skipped).any(axis=1))
