"""Compute the capabilities that a case requires of an implementation.

They follow from the fields of the case, so the author of a case cannot forget a capability.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.problem.options import default_scale
from ringspec.vectors.format.case import Case, Ring, SchemeCall, Shape
from ringspec.vectors.format.inputs import input_of
from ringspec.vectors.format.tensor_table import slots

__all__ = ["requires"]

Booleans = NDArray[np.bool_]
# What a scheme and its tables imply is not a feature of its own.
USUAL_LAYOUTS = {"pcp": "zigzag", "dcp": "interleaved"}
IMPLIED_BY_SCHEMES = ("positions", "q-offset", "unequal-lengths", "padding-slots")


def requires(case: Case) -> dict[str, Any]:
    """Return the capabilities that a case requires, in a fixed order of keys.

    Of every case: ``operation`` and ``passes``. Of a ring: ``workers``, ``layout``, ``circulation``, ``direction`` and
    ``tokens_per_worker`` (n_q, n_k, including padding slots). Number formats: ``inputs``, ``outputs``, ``statistics``.
    Sizes: ``batch``, ``heads``, ``head_ratio`` (H / Hkv), ``head_dim``, ``value_dim`` and ``lengths`` (Sq, Sk). Of a
    merge: ``parts``, the number of partial results, and what :func:`merge_needs` finds. ``masks`` and ``features`` are sorted names. Keys that do not
    apply to the operation are omitted.
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
        needs |= {
            "value_dim": case.shape.Dv,
            "lengths": (case.shape.Sq,),
            "parts": case.shape.Sk,
        }
        return needs | merge_needs(case)
    needs |= {
        "head_ratio": case.shape.H // case.shape.Hkv,
        "head_dim": case.shape.D,
        "value_dim": case.shape.Dv,
        "lengths": (case.shape.Sq, case.shape.Sk),
        "masks": masks(case),
        "features": features(case, case.shape),
    }
    return needs if case.scheme is None else needs | scheme_needs(case, case.scheme, case.shape)


def merge_needs(case: Case) -> dict[str, Any]:
    """Return what a merge requires beside finite, normalised parts with natural lse, of which -inf marks an empty one.

    ``lse_base``: 2; ``empty_lse``: '+inf'; ``unnormalised``: parts are (m, l, o); ``garbage``: o of an empty part is NaN.
    """
    needs: dict[str, Any] = dict(case.terms)
    if "parts_sum" in case.inputs.tensors:
        needs["unnormalised"] = True
    if np.isnan(input_of(case, "parts_o").astype(np.float64)).any():
        needs["garbage"] = True
    return needs


def ring_needs(case: Case, ring: Ring) -> dict[str, Any]:
    needs: dict[str, Any] = {
        "workers": ring.workers,
        "circulation": ring.circulation,
        "direction": ring.direction,
    }
    if case.shape is not None:
        needs["layout"] = ring.layout
        needs["tokens_per_worker"] = slots(case, ring)
    return needs


def scheme_needs(case: Case, call: SchemeCall, shape: Shape) -> dict[str, Any]:
    """Return what a case requires that splits attention over ranks.

    ``scheme``; ``mesh``, such as 'ring x ulysses'; ``workers``, the number of ranks; ``tokens_per_worker``; ``layout``, except
    for dcp; ``interleave`` for pcp and dcp; and in ``features`` those of its tokens and heads.
    """
    # Here: only these cases need ringspec.schemes, which takes time to import.
    from ringspec.vectors.scheme_tables import tables_of_scheme

    tables = tables_of_scheme(case)
    sizes = dict(call.mesh)
    parts = max(sizes.get("ulysses", 1), sizes.get("tp", 1))
    requests = len(case.terms.get("cu_seqlens", (0, 0))) - 1
    latent = shape.Hkv == 1 and shape.D > shape.Dv
    given = {
        "replicated-tokens": call.text is not None,
        "kv-replicas": shape.Hkv % parts != 0,
        "padded-documents": call.cu_seqlens_padded is not None,
        "empty-ranks": not (tables.k >= 0).any(axis=1).all()
        or not (tables.q >= 0).any(axis=1).all(),
        "multi-token-decode": call.name == "dcp" and shape.Sq > requests,
        "prefix": call.name == "pcp" and shape.Sk > shape.Sq,
        "mla": latent,
    }
    used = {name for name in features(case, shape) if name not in IMPLIED_BY_SCHEMES}
    used -= {"scale"} if latent else set()
    used |= {name for name, needed in given.items() if needed}
    needs: dict[str, Any] = {
        "scheme": call.name,
        "mesh": axes_of(call.mesh),
        "workers": call.ranks,
        "tokens_per_worker": (tables.q.shape[1], tables.k.shape[1]),
        "features": tuple(sorted(used)),
    }
    if call.name != "dcp":
        needs["layout"] = layout_of(call)
    if call.name in USUAL_LAYOUTS:
        needs["interleave"] = call.interleave or 1
    return needs


def axes_of(mesh: Iterable[tuple[str, int]]) -> str:
    """Return the axes of a mesh as claims name them.

    >>> axes_of((("ring", 2), ("ulysses", 2)))
    'ring x ulysses'
    """
    return " x ".join(name for name, _ in mesh)


def layout_of(call: SchemeCall) -> str:
    """Return the name of the layout of a scheme."""
    return call.layout or USUAL_LAYOUTS.get(call.name, "contiguous")


def has_padding(case: Case) -> bool:
    """Return whether any slot of any worker is padding."""
    if case.ring is None or case.shape is None:
        return False
    held = [n * case.ring.workers for n in slots(case, case.ring)]
    return held != [case.shape.Sq, case.shape.Sk]


def masks(case: Case) -> tuple[str, ...]:
    """Return the kinds of masks that a case has."""
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
    """Return the features other than masks that a case uses.

    ``dropout``: with the counter-based mask; ``keep``: with a given dropout mask; ``empty-rows``: some query has no
    visible key; ``padding-slots``: some slot of a worker holds no token; ``positions``: positions that differ from
    the token indices are given.
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
    """Return the pairs that all masks of a case allow, [B|1, H|1, Sq, Sk] (rules MASK-1 to MASK-9)."""
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
    """Return the document number of each token; -1 after the last document (rule MASK-5)."""
    numbers = np.searchsorted(np.array(cu_seqlens), np.arange(length), side="right") - 1
    return np.where(numbers < len(cu_seqlens) - 1, numbers, -1)
