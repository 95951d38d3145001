"""Recognise inputs that a kernel rounds to a 16-bit format, by its results for random inputs.

The inputs of a readout are whole numbers and eighths, which 16-bit formats hold exactly. So its results do not show
whether a kernel rounds q, k, v or dy, as when it sends them. With random inputs, they are those of the correct ring
whose inputs are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.faults.hints import ROUNDING
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.faults.places import FROM_STEP_1
from ringspec.conformance.readout.problem.problems import TOLERANCES
from ringspec.conformance.readout.proof.calls import Given, given_of, ways_of
from ringspec.conformance.readout.proof.replay import nearer, saved_in
from ringspec.conformance.readout.proof.ring_results import Results
from ringspec.conformance.readout.reading import Named, PassRead
from ringspec.conformance.readout.search.rounding import NARROW, ROUNDED
from ringspec.conformance.target.protocol import Call
from ringspec.formats import round_to
from ringspec.problem.model import Array, Booleans
from ringspec.recipes import RECIPES

# Inputs that kernels round together, with the words for them.
FORWARD_INPUTS = {
    ("k", "v"): "keys and values",
    ("q", "k", "v"): "queries, keys and values",
    ("q",): "queries",
    ("k",): "keys",
    ("v",): "values",
}
BACKWARD_INPUTS = {
    **FORWARD_INPUTS,
    ("q", "k", "v", "dy"): "queries, keys, values and dy",
    ("q", "dy"): "queries and dy",
    ("dy",): "dy",
}
PASSES = (
    ("forward", FORWARD_INPUTS, ("o", "lse")),
    ("backward", BACKWARD_INPUTS, ("dq", "dk", "dv")),
)
EINSUMS = {
    "o": "abhij,abhjd->ahid",
    "dq": "abhij,abhjd->ahid",
    "dk": "abhij,abhid->bhjd",
    "dv": "abhij,abhid->bhjd",
}


@dataclass(frozen=True)
class Rounding:
    """The ``inputs`` that are rounded to ``format``, in the pairs of blocks ``where`` [a, b, 1, 1, 1]; ``fault`` says so in words."""

    inputs: tuple[str, ...]
    format: str
    where: Booleans
    fault: Named


def rounded_inputs(call: Call, outputs: Outputs) -> tuple[PassRead | None, PassRead | None] | None:
    """Return what is rounded in the forward and in the backward pass of a ring whose results are otherwise correct.

    A pass is None if its results are correct. The result is None if no rounding gives the outputs of ``call``, or if the
    call has more than a mask.
    """
    first = given_of(call, 0)
    geometry = first.geometry
    features = (first.dlse, first.sinks, first.bias, first.keep, geometry.softcap, geometry.dropout)
    if any(one is not None for one in features):
        return None
    entries = [given_of(call, entry) for entry in range(call.worker("q", 0).shape[0])]
    right = run_right(call, RECIPES["float64"])
    found: list[PassRead | None] = []
    for phase, inputs, names in PASSES:
        of_phase = {name: outputs[name] for name in names if name in outputs}
        said = None
        for rounding in (None, *roundings(entries[0], phase, inputs)):
            if all(
                fits(call, number, given, of_phase, outputs, right, rounding)
                for number, given in enumerate(entries)
            ):
                said = rounding
                break
        else:
            return None
        found.append(None if said is None else PassRead(((said.fault,),)))
    return (found[0], found[1]) if any(found) else None


def roundings(
    given: Given, phase: str, inputs: Mapping[tuple[str, ...], str]
) -> Iterator[Rounding]:
    """Yield what a kernel may round in a pass: the inputs of all blocks, or only those that came from other workers."""
    W = given.geometry.workers
    for geometry in dict.fromkeys(one.geometry for one in ways_of(given)):
        step = geometry.steps(phase)[:, :, None, None, None]
        for place, where in (("", np.ones((W, W, 1, 1, 1), bool)), (FROM_STEP_1, step > 0)):
            for names, words in inputs.items():
                for format in NARROW:
                    kind = f"{words} {'is' if words == 'dy' else 'are'} {ROUNDED} {format}"
                    yield Rounding(names, format, where, Named(phase, kind, place, 1.0, ROUNDING))


def fits(
    call: Call,
    entry: int,
    given: Given,
    of_phase: Outputs,
    outputs: Outputs,
    right: Mapping[str, Sequence[Array]],
    rounding: Rounding | None,
) -> bool:
    """Return whether one batch entry of the results ``of_phase`` is what the rounding gives."""
    names = tuple(of_phase)
    saved = saved_in(outputs, entry) if "dq" in names else None
    with np.errstate(all="ignore"):
        ours, sizes = results_of(given, rounding, saved)
    tolerance = TOLERANCES[call.formats["inputs"]]
    ours = {name: ours[name] for name in names}
    found = nearer(call, entry, of_phase, right, ours, sizes, tolerance)
    return found.fits and (found.wrong or rounding is None)


def results_of(
    given: Given, rounding: Rounding | None, saved: tuple[Array, Array] | None
) -> tuple[Results, Results]:
    """Return the results of the correct ring with rounded inputs, and the sizes of their elements.

    ``saved``: o and lse for the backward pass; None for those of this ring.
    """
    geometry = given.geometry
    group = geometry.group

    def in_blocks(name: str, x: Array) -> Array:
        """Return [a, b, h, slot, d]: the input as each block uses it."""
        x = x[:, None] if name in ("q", "dy") else np.repeat(x, group, axis=1)[None]
        if rounding is None or name not in rounding.inputs:
            return np.broadcast_to(x, (geometry.workers, geometry.workers, *x.shape[2:]))
        return np.where(rounding.where, round_to(x, rounding.format), x)

    q, k, v = (in_blocks(x, getattr(given, x)) for x in ("q", "k", "v"))
    visible = masks_of(geometry)[0].pattern & given.also
    s = np.where(visible, geometry.scale * np.einsum("abhid,abhjd->abhij", q, k), -np.inf)
    m = np.maximum(s.max(axis=(1, 4), keepdims=True), np.finfo(float).min)
    lse = (m + np.log(np.exp(s - m).sum(axis=(1, 4), keepdims=True)))[:, 0, ..., 0]
    p = np.where(visible, np.exp(s - lse[:, None, ..., None]), 0.0)
    shares = {"o": (p, v)}
    if given.dy is not None:
        dy = in_blocks("dy", given.dy)
        o, of_rows = saved or (np.einsum(EINSUMS["o"], p, v), lse)
        p = np.where(visible, np.exp(s - of_rows[:, None, ..., None]), 0.0)
        delta = np.einsum("abhid,ahid->abhi", dy, o)[..., None]
        g = np.einsum("abhid,abhjd->abhij", dy, v)
        ds, parts = p * (g - delta), p * (np.abs(g) + np.abs(delta))
        scale = geometry.scale
        shares |= {"dv": (p, dy), "dq": (scale * ds, k), "dk": (scale * ds, q)}
        parts = scale * parts
    results: Results = {"lse": lse}
    sizes: Results = {"lse": np.maximum(1.0, np.abs(lse))}
    for name, (weights, x) in shares.items():
        size = parts if name in ("dq", "dk") else np.abs(weights)
        for found, y in ((results, (weights, x)), (sizes, (size, np.abs(x)))):
            found[name] = np.einsum(EINSUMS[name], *y)
            if name in ("dk", "dv"):
                W, H, n, d = found[name].shape
                found[name] = found[name].reshape(W, H // group, group, n, d).sum(axis=2)
    return results, sizes
