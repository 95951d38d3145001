"""Tell whether two known bugs give the same results for a call."""

import numpy as np

from ringspec.conformance.target.results import due_of
from ringspec.formats import load, unit_roundoff
from ringspec.recipes import ROUNDING_POINTS

LEAST, UNITS = 1e-9, 16.0


def coincide(call, a, b, recipe):
    """Tell whether the results of two programs for a call agree within the rounding of a recipe.

    Two values agree if they differ by at most unit * (m + u). unit is 16 unit roundoffs of the coarsest format in the
    recipe, and at least 1e-9. m is the largest magnitude in the row, and u the mean magnitude of v or dy. Slots without
    a token do not count.
    """
    unit = UNITS * max(unit_roundoff(getattr(recipe, point)) for point in ROUNDING_POINTS)
    unit = max(LEAST, unit)
    return all(
        close(real_rows(call, name, r, x), real_rows(call, name, r, y), unit, usual(call, name))
        for name in due_of(call)
        for r, (x, y) in enumerate(zip(a[name], b[name], strict=True))
    )


def real_rows(call, name, worker, x):
    """Return the rows of a worker's result that hold a token."""
    index = call.index_k if name in ("dk", "dv") else call.index_q
    if index is None or name not in ("o", "lse", "dq", "dk", "dv"):
        return x
    return x[:, :, index[worker] >= 0]


def usual(call, name):
    """Return the mean magnitude of v or dy, of which the result is a weighted sum.

    Even if the sum cancels, its rounding errors have this scale.
    """
    source = {"o": "parts_o" if call.operation == "merge" else "v", "lse": ""}.get(name, "dy")
    if source not in call.tensors:
        return 1.0
    finite = [np.where(np.isfinite(x), np.abs(x), 0.0) for x in map(load, call.tensors[source])]
    return float(np.mean([x.mean() if x.size else 0.0 for x in finite]))


def close(a, b, unit, usual):
    """Tell whether a and b differ by at most ``unit`` * (the row's largest magnitude + ``usual``); NaN equals NaN."""
    if a.ndim == 3:  # lse: every number is a row by itself
        a, b = a[..., None], b[..., None]
    finite = np.isfinite(a)
    if not (finite == np.isfinite(b)).all() or not np.array_equal(a[~finite], b[~finite], True):
        return False
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    allowed = unit * (np.abs(a).max(axis=-1, keepdims=True, initial=0.0) + usual)
    return bool((np.abs(a - b) <= allowed).all())
