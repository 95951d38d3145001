"""Find known bugs that give the same results for a call, so that a report must name them together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.diagnose.mutants.hooks import Hooks, Results
from ringspec.conformance.diagnose.mutants.mutant import Mutant, run_mutant
from ringspec.conformance.diagnose.mutants.ring import RESULTS
from ringspec.conformance.target.protocol import Call
from ringspec.conformance.target.results import due_of
from ringspec.formats import load, unit_roundoff
from ringspec.recipes import ROUNDING_POINTS, Recipe

RIGHT = "right"
LEAST, UNITS = 1e-9, 16.0


def same_on(call: Call, mutants: Iterable[Mutant], recipe: Recipe) -> list[tuple[str, ...]]:
    """Group mutants whose results for a call agree within the rounding of a recipe.

    A mutant is a known bug that can be run; a recipe says where a program rounds. The first group begins with 'right',
    the program without a bug. The call cannot detect the other members of this group.

    Two values agree if they differ by at most unit * (m + u). unit is 16 unit roundoffs of the coarsest format in the
    recipe, and at least 1e-9. m is the largest magnitude in the row, and u the mean magnitude of v or dy. Slots without
    a token do not count.

    >>> from ringspec.conformance.cases.calls import call_of
    >>> from ringspec.conformance.diagnose.mutants import MUTANTS
    >>> from ringspec.recipes import RECIPES
    >>> from ringspec.vectors import open_set
    >>> core, id = open_set("core"), "ring/contiguous-causal-w2"
    >>> names = ("ring-direction", "inverted-skip", "future-not-skipped", "offset-sign")
    >>> call = call_of(core.case(id), core.tensors(id))
    >>> same_on(call, [MUTANTS[name] for name in names], RECIPES["float64"])
    [('right', 'ring-direction'), ('inverted-skip',), ('future-not-skipped',), ('offset-sign',)]
    """
    with np.errstate(all="ignore"):
        right = RESULTS[call.operation](call, recipe, Hooks())
    classes: list[tuple[list[str], Results]] = [([RIGHT], right)]
    for one in mutants:
        results = run_mutant(one, call, recipe)
        for names, known in classes:
            if coincide(call, known, results, recipe):
                names.append(one.id)
                break
        else:
            classes.append(([one.id], results))
    return [tuple(names) for names, _ in classes]


def coincide(call: Call, a: Results, b: Results, recipe: Recipe) -> bool:
    """Tell whether all expected tensors of all workers agree within rounding."""
    unit = UNITS * max(unit_roundoff(getattr(recipe, point)) for point in ROUNDING_POINTS)
    unit = max(LEAST, unit)
    return all(
        close(real_rows(call, name, r, x), real_rows(call, name, r, y), unit, usual(call, name))
        for name in due_of(call)
        for r, (x, y) in enumerate(zip(a[name], b[name], strict=True))
    )


def real_rows(call: Call, name: str, worker: int, x: NDArray) -> NDArray:
    """Return the rows of a worker's result that hold a token."""
    index = call.index_k if name in ("dk", "dv") else call.index_q
    if index is None or name not in ("o", "lse", "dq", "dk", "dv"):
        return x
    return x[:, :, index[worker] >= 0]


def usual(call: Call, name: str) -> float:
    """Return the mean magnitude of v or dy, of which the result is a weighted sum.

    Even if the sum cancels, its rounding errors have this scale.
    """
    source = {"o": "parts_o" if call.operation == "merge" else "v", "lse": ""}.get(name, "dy")
    if source not in call.tensors:
        return 1.0
    finite = [np.where(np.isfinite(x), np.abs(x), 0.0) for x in map(load, call.tensors[source])]
    return float(np.mean([x.mean() if x.size else 0.0 for x in finite]))


def close(a: NDArray, b: NDArray, unit: float, usual: float) -> bool:
    """Tell whether a and b differ by at most ``unit`` * (the row's largest magnitude + ``usual``); NaN equals NaN."""
    if a.ndim == 3:  # lse: every number is a row by itself
        a, b = a[..., None], b[..., None]
    finite = np.isfinite(a)
    if not (finite == np.isfinite(b)).all() or not np.array_equal(a[~finite], b[~finite], True):
        return False
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    allowed = unit * (np.abs(a).max(axis=-1, keepdims=True, initial=0.0) + usual)
    return bool((np.abs(a - b) <= allowed).all())
