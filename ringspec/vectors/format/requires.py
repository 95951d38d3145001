"""What an implementation must be able to do to take a case: capabilities as data.

Everything here follows from the case itself, so that no author can forget to state a need.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.vectors.format.case import Case, Ring, Shape
from ringspec.vectors.format.inputs import default_scale, input_of

__all__ = ["requires"]

Booleans = NDArray[np.bool_]


def requires(case: Case) -> dict[str, Any]:
    """Capabilities that a case asks for, in a fixed order of keys.

    ``operation``, ``passes``; of a ring: ``workers``, ``layout``, ``circulation``, ``direction``,
    ``tokens_per_worker`` (n_q, n_k; padding slots count); ``inputs``, ``outputs``, ``statistics``:
    names of formats; ``batch``, ``heads``, ``head_ratio`` (H / Hkv), ``head_dim``, ``value_dim``,
    ``lengths`` (Sq, Sk); ``parts`` (merge); ``masks`` and ``features``: sorted names. A key that
    makes no sense for the operation is left out.
    """
    needs: dict[str, Any] = {"operation": case.operation, "passes": case.passes}
    if case.ring is not None:
        needs |= ring_needs(case, case.ring)
    if case.shape is None or case.formats is None:
        return needs
    needs |= {
        "inputs": case.formats.inputs,
        "outputs": case.formats.outputs,
        "statistics": case.formats.statistics,
        "batch": case.shape.B,
        "heads": case.shape.H,
    }
    if case.operation == "merge":
        return needs | {
            "value_dim": case.shape.Dv,
            "lengths": (case.shape.Sq,),
            "parts": case.shape.Sk,
        }
    return needs | {
        "head_ratio": case.shape.H // case.shape.Hkv,
        "head_dim": case.shape.D,
        "value_dim": case.shape.Dv,
        "lengths": (case.shape.Sq, case.shape.Sk),
        "masks": masks(case),
        "features": features(case, case.shape),
    }


def ring_needs(case: Case, ring: Ring) -> dict[str, Any]:
    needs: dict[str, Any] = {
        "workers": ring.workers,
        "circulation": ring.circulation,
        "direction": ring.direction,
    }
    if case.shape is not None:
        needs["layout"] = ring.layout
        needs["tokens_per_worker"] = slots(case, ring, case.shape)
    return needs


def slots(case: Case, ring: Ring, shape: Shape) -> tuple[int, int]:
    """n_q and n_k, the slots of one worker."""
    if ring.layout == "table":
        assert ring.table_q is not None
        table_k = ring.table_q if ring.table_k is None else ring.table_k
        return len(ring.table_q[0]), len(table_k[0])
    if ring.layout == "zigzag_per_document":
        cu_q = case.terms["cu_seqlens"]
        cu_k = case.terms.get("cu_seqlens_k", cu_q)
        return (
            document_slots(cu_q, shape.Sq, ring.workers),
            document_slots(cu_k, shape.Sk, ring.workers),
        )
    return shape.Sq // ring.workers, shape.Sk // ring.workers


def document_slots(cu_seqlens: tuple[int, ...], length: int, workers: int) -> int:
    """Slots of a worker under LAYOUT-4; tokens behind the last document are one more document.

    >>> document_slots((0, 4, 6), 6, 2)
    4
    """
    starts = np.array([*cu_seqlens, length])
    return int((-(-np.diff(starts) // (2 * workers)) * 2).sum())


def has_padding(case: Case) -> bool:
    """Whether some slot of some worker holds no token."""
    if case.ring is None or case.shape is None:
        return False
    n_q, n_k = slots(case, case.ring, case.shape)
    workers = case.ring.workers
    return n_q * workers != case.shape.Sq or n_k * workers != case.shape.Sk


def masks(case: Case) -> tuple[str, ...]:
    """Which kinds of mask terms a case has."""
    given = {
        "causal": case.terms.get("causal", False),
        "window": case.terms.get("window") is not None,
        "documents": "cu_seqlens" in case.terms,
        "segments": "segments_q" in case.inputs.tensors,
        "bounds": "bound_min" in case.inputs.tensors,
        "dense": "mask" in case.inputs.tensors,
        "bias-minus-infinity": "bias" in case.inputs.tensors
        and bool(np.isneginf(input_of(case, "bias").astype(np.float64)).any()),
    }
    return tuple(sorted(name for name, needed in given.items() if needed))


def features(case: Case, shape: Shape) -> tuple[str, ...]:
    """What else than masks a case uses.

    ``dropout`` is the counter-based mask, ``keep`` a given one; ``empty-rows``: some query sees no
    key; ``padding-slots``: some slot of a worker holds no token; ``positions``: positions other
    than the indices are given.
    """
    tensors = case.inputs.tensors
    sinks = input_of(case, "sinks").shape[1] if "sinks" in tensors else 0
    given = {
        "bias": "bias" in tensors,
        "softcap": "softcap" in case.terms,
        "sinks": sinks > 0,
        "several-sinks": sinks > 1,
        "dropout": "dropout_p" in case.terms and "keep" not in tensors,
        "keep": "keep" in tensors,
        "dlse": "dlse" in tensors,
        "positions": "positions_q" in tensors or "positions_k" in tensors,
        "q-offset": "q_offset" in case.terms,
        "scale": case.terms["scale"] != default_scale(shape.D),
        "unequal-lengths": shape.Sq != shape.Sk,
        "empty-rows": bool((~visible(case, shape).any(axis=3)).any()),
        "padding-slots": has_padding(case),
    }
    return tuple(sorted(name for name, needed in given.items() if needed))


def visible(case: Case, shape: Shape) -> Booleans:
    """Pairs that all mask terms allow, [B|1, H|1, Sq, Sk] (MASK-1 to MASK-9)."""
    terms, tensors = case.terms, case.inputs.tensors
    given = {name: input_of(case, name) for name in tensors if name not in ("q", "k", "v", "dy")}
    rows_q = np.arange(shape.Sq)[None] + terms.get("q_offset", 0)
    pq = np.atleast_2d(given.get("positions_q", rows_q))[:, None, :, None]
    pk = np.atleast_2d(given.get("positions_k", np.arange(shape.Sk)))[:, None, None, :]
    allowed = np.ones((1, 1, shape.Sq, shape.Sk), dtype=np.bool_)
    if terms.get("causal"):
        allowed = allowed & (pk <= pq)
    left, right = terms.get("window") or (None, None)
    if left is not None:
        allowed = allowed & (pk - pq >= -left)
    if right is not None:
        allowed = allowed & (pk - pq <= right)
    if "cu_seqlens" in terms:
        for_k = terms.get("cu_seqlens_k", terms["cu_seqlens"])
        given["segments_q"] = documents(terms["cu_seqlens"], shape.Sq)
        given["segments_k"] = documents(for_k, shape.Sk)
    if "segments_q" in given:
        sq = np.atleast_2d(given["segments_q"])[:, None, :, None]
        sk = np.atleast_2d(given.get("segments_k", given["segments_q"]))[:, None, None, :]
        allowed = allowed & (sq == sk) & (sq >= 0) & (sk >= 0)
    if "bound_min" in given:
        low, high = (np.atleast_2d(given[n])[:, None, :, None] for n in ("bound_min", "bound_max"))
        allowed = allowed & (low <= pk) & (pk < high)
    if "mask" in given:
        allowed = allowed & given["mask"]
    if "bias" in given:
        allowed = allowed & ~np.isneginf(given["bias"].astype(np.float64))
    return allowed


def documents(cu_seqlens: tuple[int, ...], length: int) -> NDArray[np.int64]:
    """Document number of each token, -1 behind the last one (MASK-5)."""
    numbers = np.searchsorted(np.array(cu_seqlens), np.arange(length), side="right") - 1
    return np.where(numbers < len(cu_seqlens) - 1, numbers, -1)
