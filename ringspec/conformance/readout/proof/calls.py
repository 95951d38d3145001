"""Which calls the model ring can express, and one batch entry of them as tensors and a geometry."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.readout.problem.geometry import WAYS, Geometry
from ringspec.conformance.readout.problem.pairs import kept
from ringspec.conformance.readout.problem.problems import TOLERANCES
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.problem.model import Array, Booleans, Integers

TENSORS = {"q", "k", "v", "dy", "dlse", "sinks", "bias", "keep", "segments_q", "segments_k"}
TERMS = {"scale", "causal", "window", "cu_seqlens", "softcap", "dropout_p", "dropout_seed"}
MOST_PAIRS = 1 << 18  # B * H * Sq * Sk


@dataclass(frozen=True)
class Given:
    """One batch entry of a call, in the form that the model ring takes.

    ``q`` and ``dy`` are [W, H, n, D], ``k`` and ``v`` [W, Hkv, n, D], in float64. ``also`` [a, b, 1, i, j]: whether
    query i of worker a and key j of worker b are in the same document and segment. ``bias`` [W, H, n, (b, j)] has the
    keys in the order of the workers, and ``columns`` [W, n] their columns in the call's bias.
    """

    geometry: Geometry
    q: Array
    k: Array
    v: Array
    dy: Array | None
    also: Booleans
    dlse: Array | None = None
    sinks: Array | None = None
    bias: Array | None = None
    keep: Array | None = None
    columns: Integers | None = None


def expressible(call: Call) -> bool:
    """Return whether the model ring can compute everything that a call asks for."""
    if call.operation != "ring" or "forward" not in call.passes:
        return False
    tables = (call.index_q, call.index_k, call.position_q, call.position_k)
    if any(x is None for x in tables) or not set(call.tensors) <= TENSORS:
        return False
    if not set(call.terms) <= TERMS or call.formats["inputs"] not in TOLERANCES:
        return False
    index_q, index_k, position_q, position_k = map(np.asarray, tables)
    batch, heads, slots, _ = call.worker("q", 0).shape
    if batch > 1 and {"sinks", "bias", "keep", "dropout_p"} & {*call.tensors, *call.terms}:
        return False
    for name in {"bias", "keep"} & set(call.tensors):
        table, whole = call.worker(name, 0), (1, heads, slots, slots * call.workers)
        if table.shape != whole or not np.isfinite(of_pairs(table)).all():
            return False
    if index_q.min() < 0 and {"bias", "keep", "dropout_p"} & {*call.tensors, *call.terms}:
        return False
    one_side = np.array_equal(index_q, index_k) and np.array_equal(position_q, position_k)
    return one_side and position_q.shape[1] == 1 and number_of_pairs(call) <= MOST_PAIRS


def number_of_pairs(call: Call) -> int:
    """Return how many pairs of a query and a key all batch entries and heads of a call have."""
    batch, heads, slots, _ = call.worker("q", 0).shape
    return int(batch * heads * (slots * call.workers) ** 2)


def ways_of(given: Given) -> list[Given]:
    """Return the same call for each way in which a correct ring may compute it, the usual one first."""
    geometry = given.geometry
    travels = ("keys", "queries") if geometry.circulation == "q" else ("keys",)
    return [
        dataclasses.replace(
            given,
            geometry=dataclasses.replace(geometry, forward_travels=x, parts=part),
        )
        for part in WAYS.get(geometry.layout, ("",))
        for x in travels
    ]


def given_of(call: Call, entry: int) -> Given:
    """Return one batch entry of a call that the model ring can express."""
    q, k, v, dy, dlse = (
        np.stack([load(x)[entry] for x in call.tensors[name]]) if name in call.tensors else None
        for name in ("q", "k", "v", "dy", "dlse")
    )
    assert q is not None and k is not None and v is not None
    assert call.position_q is not None and call.index_k is not None
    terms, starts = call.terms, documents_of(call)
    dropout = None
    if terms.get("dropout_p"):
        dropout = (
            terms["dropout_p"],
            None if "keep" in call.tensors else terms.get("dropout_seed", 0),
        )
    sinks = load(call.worker("sinks", 0)) if "sinks" in call.tensors else None
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
        documents=starts,
        softcap=terms.get("softcap"),
        dlse="dlse" in call.tensors,
        sinks=0 if sinks is None else sinks.shape[1],
        bias="bias" in call.tensors,
        dropout=dropout,
        padding=() if call.index_q is None else tuple(np.flatnonzero(call.index_q < 0).tolist()),
        usual_scale=q.shape[3] ** -0.5,
    )
    columns = call.index_k.ravel()
    bias, keep = (
        np.stack([of_pairs(x)[0] for x in call.tensors[name]])[..., columns]
        if name in call.tensors
        else None
        for name in ("bias", "keep")
    )
    keep = kept(geometry) if keep is None else keep
    return Given(
        geometry, q, k, v, dy, same_document(call, entry), dlse, sinks, bias, keep, call.index_k
    )


def of_pairs(table: NDArray) -> Array:
    """Return a tensor over pairs, a bias or a mask of booleans, in float64."""
    return table.astype(np.float64) if table.dtype == bool else load(table)


def documents_of(call: Call) -> tuple[int, ...] | None:
    """Return the first position of each document; None if there are none, or if positions do not number the tokens."""
    assert call.index_q is not None and call.position_q is not None
    if "cu_seqlens" not in call.terms or not np.array_equal(call.index_q, call.position_q[:, 0]):
        return None
    return tuple(int(x) for x in call.terms["cu_seqlens"][:-1])


def same_document(call: Call, entry: int) -> Booleans:
    """Return whether a query and a key are in the same document and segment, for each pair [a, b, 1, i, j]."""
    assert call.index_q is not None
    workers, slots = call.index_q.shape
    same = np.ones((workers, workers, 1, slots, slots), dtype=bool)
    if "cu_seqlens" in call.terms and documents_of(call) is None:
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
