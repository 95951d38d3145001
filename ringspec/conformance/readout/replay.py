"""What a ring with given faults computes for any call that the model ring can express.

This is the proof of an explanation: faults that were read from a few problems must give the numbers of other failing
calls as well, whose inputs are not of our choice. The model ring takes S = scale q k^T and G = dy v^T of the call. Its
matrices A, P and dS then give::

    o = A v        dv = P^T dy        dq = scale dS k        dk = scale dS^T q
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.choices import Choices
from ringspec.conformance.readout.geometry import Geometry, dealt_otherwise
from ringspec.conformance.readout.masks import masks_of
from ringspec.conformance.readout.model import Model
from ringspec.conformance.readout.pairs import Pairs
from ringspec.conformance.readout.problems import TOLERANCES
from ringspec.conformance.readout.search import CARRIED, GRADIENT, SAME, composed, near
from ringspec.conformance.readout.told import Told
from ringspec.conformance.readout.vocabulary import fault_named
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.problem.model import Array, Booleans, Integers
from ringspec.recipes import RECIPES

TENSORS = {"q", "k", "v", "dy", "segments_q", "segments_k"}
TERMS = {"scale", "causal", "window", "cu_seqlens"}
NOT_LINEAR = {"dy_ones"}  # a fault of the inputs, which matrices of pairs do not show
NEARER = 0.25  # of the distance from the correct results, in each tensor
MOST_PAIRS = 1 << 18  # B * H * Sq * Sk
Results = dict[str, Array]


@dataclass(frozen=True)
class Given:
    """A call as the model ring takes it: q, dy [W, H, n, D] and k, v [W, Hkv, n, D] of one batch entry, float64.

    ``also`` [a, b, 1, i, j]: pairs of the same document.
    """

    geometry: Geometry
    q: Array
    k: Array
    v: Array
    dy: Array | None
    also: Booleans


def explains(told: Told, calls: Sequence[Call], outputs: Sequence[Outputs]) -> bool:
    """Tell whether the faults that were told give all outputs of a case's calls, and the definition does not.

    False where the model ring cannot express a call.
    """
    if not told.faults or not all(map(expressible, calls)):
        return False
    wrong = False
    for call, got in zip(calls, outputs, strict=True):
        right = run_right(call, RECIPES["float64"])
        for entry in range(call.worker("q", 0).shape[0]):
            fits, moved = compared(told, call, entry, got, right)
            if not fits:
                return False
            wrong = wrong or moved
    return wrong


def compared(
    told: Told, call: Call, entry: int, outputs: Outputs, right: Mapping[str, Sequence[Array]]
) -> tuple[bool, bool]:
    """Whether the faults give one batch entry of the outputs, and whether the ``right`` results are other ones.

    Each element is within the tolerance of its format; each wrong tensor is much nearer to the faults than to the
    right results.
    """
    made = results_of(told, given_of(call, entry))
    if made is None:
        return False, False
    ours, sizes = made
    tolerance, wrong = TOLERANCES[call.formats["inputs"]], False
    for name in outputs.keys() & ours.keys():
        got, true = (
            np.stack([load(np.asarray(x))[entry] for x in shards])
            for shards in (outputs[name], right[name])
        )
        if not near(got, ours[name], sizes[name], tolerance).all():
            return False, wrong
        far, close = distance(got, true, sizes[name]), distance(got, ours[name], sizes[name])
        if far > tolerance:
            wrong = True
            if not close <= NEARER * far:
                return False, wrong
    return True, wrong


def distance(x: Array, y: Array, size: Array) -> float:
    """The largest difference in units of ``size``; infinities are left out."""
    with np.errstate(invalid="ignore", divide="ignore"):
        z = np.abs(x - y) / np.where(size == 0, 1.0, size)
    return float(np.where(np.isfinite(z), z, 0.0).max(initial=0.0))


def expressible(call: Call) -> bool:
    """Tell whether the model ring has everything that a call asks for."""
    if call.operation != "ring" or "forward" not in call.passes:
        return False
    tables = (call.index_q, call.index_k, call.position_q, call.position_k)
    if any(x is None for x in tables) or not set(call.tensors) <= TENSORS:
        return False
    if not set(call.terms) <= TERMS or call.formats["inputs"] not in TOLERANCES:
        return False
    index_q, index_k, position_q, position_k = map(np.asarray, tables)
    batch, heads, slots, _ = call.worker("q", 0).shape
    pairs = batch * heads * (slots * call.workers) ** 2
    one_side = np.array_equal(index_q, index_k) and np.array_equal(position_q, position_k)
    return one_side and position_q.shape[1] == 1 and index_q.min() >= 0 and pairs <= MOST_PAIRS


def given_of(call: Call, entry: int) -> Given:
    """One batch entry of a call that is expressible."""
    q, k, v, dy = (
        np.stack([load(x)[entry] for x in call.tensors[name]]) if name in call.tensors else None
        for name in ("q", "k", "v", "dy")
    )
    assert q is not None and k is not None and v is not None
    assert call.position_q is not None
    terms = call.terms
    geometry = Geometry(
        call.workers,
        call.circulation,
        call.direction,
        call.layout,
        call.position_q[:, 0],
        bool(terms.get("causal")),
        terms.get("window"),
        q.shape[1],
        q.shape[1] // k.shape[1],
        float(terms["scale"]),
    )
    return Given(geometry, q, k, v, dy, same_document(call, entry))


def same_document(call: Call, entry: int) -> Booleans:
    """[a, b, 1, i, j]: whether query and key are of one document and one segment."""
    assert call.index_q is not None
    workers, slots = call.index_q.shape
    same = np.ones((workers, workers, 1, slots, slots), dtype=bool)
    if "cu_seqlens" in call.terms:
        document = np.searchsorted(np.asarray(call.terms["cu_seqlens"]), call.index_q, "right")
        same &= pairwise(document, document)
    if "segments_q" in call.tensors:
        of_q, of_k = (
            np.stack([x[min(entry, len(x) - 1)] for x in call.tensors[name]])
            for name in ("segments_q", "segments_k")
        )
        same &= pairwise(of_q, of_k)
    return same


def pairwise(of_q: Integers, of_k: Integers) -> Booleans:
    return np.asarray(of_q[:, None, None, :, None] == of_k[None, :, None, None, :])


def results_of(told: Told, given: Given) -> tuple[Results, Results] | None:
    """Results of one batch entry, [W, heads, n, d] and lse [W, heads, n], and the sizes of their elements' parts.

    None if no fault has a counterpart in this ring.
    """
    geometry = given.geometry
    masks = masks_of(geometry)
    found = [fault_named(geometry, masks, one.name) for one in told.faults]
    faults = [one for one in found if one is not None]  # two workers have no step 2
    if not faults or any(one.kind.slots & NOT_LINEAR for one in faults):
        return None
    patterns = [mask.pattern & given.also for mask in masks]
    model = Model(pairs_of_call(given), patterns, dealt_otherwise(geometry))
    forward = composed(model.right, [one for one in faults if one.phase == "forward"])
    base = model.right
    if told.base == SAME:
        kept = {slot: getattr(forward, slot) for slot in CARRIED}
        base = dataclasses.replace(base, **kept)
    backward = composed(base, [one for one in faults if one.phase == "backward"])
    with np.errstate(all="ignore"):  # wrong choices overflow
        return numbers(told.base == GRADIENT, given, model, forward, backward)


def pairs_of_call(given: Given) -> Pairs:
    """S and G [Hkv, a, b, h, i, j]: of each query head with each key head."""
    s = given.geometry.scale * np.einsum("ahid,bcjd->cabhij", given.q, given.k)
    dy = np.zeros_like(given.q[..., : given.v.shape[3]]) if given.dy is None else given.dy
    return Pairs(given.geometry, s, np.einsum("ahid,bcjd->cabhij", dy, given.v))


def numbers(
    derived: bool, given: Given, model: Model, forward: Choices, backward: Choices
) -> tuple[Results, Results]:
    """Results and sizes of the forward and, if there is a dy, of the backward; ``derived``: it is that forward's gradient."""
    heads, group, scale = given.geometry.heads, given.geometry.group, given.geometry.scale
    first = model.forward(forward)
    v = given.v[:, model.head_map(forward.map_of_values)]
    results = {"o": np.einsum("abhij,bhjd->ahid", first.weights, v), "lse": first.lse}
    sizes = {
        "o": np.einsum("abhij,bhjd->ahid", np.abs(first.weights), np.abs(v)),
        "lse": np.maximum(1.0, np.abs(np.nan_to_num(first.lse, neginf=0.0))),
    }
    if given.dy is None:
        return results, sizes
    delta = (given.dy * results["o"]).sum(axis=3)
    if derived:
        p, of_dq, of_dk = model.gradient_of_forward(forward)
    else:
        p, of_dq, of_dk = model.backward(backward, first, first.lse, delta)
    k = given.k[:, model.head_map(backward.map_of_heads)]
    parts = np.abs(p) * (np.abs(model.pairs.g).max() + np.abs(delta)[:, None, :, :, None])

    def of_keys(matrix: Array, rows: Array) -> Array:
        each = np.einsum("abhij,ahid->bhjd", matrix, rows)
        return each.reshape(len(each), heads // group, group, *each.shape[2:]).sum(axis=2)

    results["dq"] = scale * np.einsum("abhij,bhjd->ahid", of_dq, k)
    results["dk"] = scale * of_keys(of_dk, given.q)
    results["dv"] = of_keys(p, given.dy)
    size_dq, size_dk = np.maximum(np.abs(of_dq), parts), np.maximum(np.abs(of_dk), parts)
    sizes["dq"] = scale * np.einsum("abhij,bhjd->ahid", size_dq, np.abs(k))
    sizes["dk"] = scale * of_keys(size_dk, np.abs(given.q))
    sizes["dv"] = of_keys(np.abs(p), np.abs(given.dy))
    return results, sizes
