"""Compare the backward pass of a ring with some faults with what was read, matrix by matrix."""

from __future__ import annotations

import numpy as np

from ringspec.conformance.readout.faults.choices import KERNELS, Choices
from ringspec.conformance.readout.model.backward import Gradients
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.matches import ZERO, Match, alike, near
from ringspec.problem.model import Array, Booleans

# The matrices of the backward pass, and the names under which the model and Seen have them.
GRADIENTS_READ = {
    "P": "p", "dS of dq": "ds_of_dq", "dS of dk": "ds_of_dk", "dS of bias": "ds_of_bias", "dsinks": "dsinks",
}  # fmt: skip


def match_backward(context: SearchContext, seen: Seen, ours: Gradients) -> Match:
    """Return which elements of each matrix that was read agree with ``ours``, the results of a ring with some faults."""
    assert seen.p is not None
    was = {name: getattr(seen, of) for name, of in GRADIENTS_READ.items()}
    every = {name: getattr(ours, of) for name, of in GRADIENTS_READ.items()}
    arrays = {name: x for name, x in every.items() if x is not None and was[name] is not None}
    equal = {}
    parts: Array | None = None
    for name, x in arrays.items():
        known = context.judged.get(name)
        if (
            known is not None
            and known[0] is x
            and (name == "P" or "P" in context.judged and context.judged["P"][0] is arrays["P"])
        ):
            equal[name] = known[1].equal[name]
        elif name == "P":
            equal[name] = near(seen.p, x, np.abs(x), context.tolerance)
        elif name == "dsinks":
            equal[name] = equal_sinks(context, seen, x, arrays["P"])
        else:
            if parts is None:
                largest = context.largest + np.abs(seen.delta)[:, None, :, :, None]
                parts = np.abs(arrays["P"]) * largest
            equal[name] = near(was[name], x, np.maximum(np.abs(x), parts), context.tolerance)
    known = context.judged.get("P")
    if known is not None and known[0] is arrays["P"]:
        same = known[1]
        return Match(equal, lambda: arrays, lambda: same.alike)
    seen_p = seen.p
    return Match(
        equal, lambda: arrays, lambda: {"P": alike(seen_p, arrays["P"], context.tolerance)}
    )


def equal_sinks(context: SearchContext, seen: Seen, ours: Array, p: Array) -> Booleans:
    """Return where the predicted dsinks [a, h, sink] agree; ``p`` has the predicted weights of the backward pass."""
    weight = np.abs(1 - p.sum(axis=(1, 4)))
    size = (weight * np.abs(seen.delta)).sum(axis=2)[..., None]
    return near(np.asarray(seen.dsinks), ours, np.maximum(np.abs(ours), size), context.tolerance)


def zeros_of(
    seen: Seen, match: Match, choices: Choices | None = None
) -> dict[str, tuple[Booleans, Booleans]]:
    """Return the pairs that are not 0, as predicted and as observed, in a matrix of both kernels (''), of each, and in dk.

    ``choices``: if the product for dv has its own mask there, the matrix of both is dS, in which other masks show.
    """
    p, ds, of_dk = (
        (np.abs(match.ours[name]) > ZERO, np.abs(np.asarray(was)) > ZERO)
        for name, was in (("P", seen.p), ("dS of dq", seen.ds_of_dq), ("dS of dk", seen.ds_of_dk))
    )
    own = choices is not None and (choices["value_mask"] >= 0).any()
    return {"": ds if own else p, KERNELS[1]: p, KERNELS[0]: ds, "dk": of_dk}
