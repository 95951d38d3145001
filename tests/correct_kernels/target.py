"""The members of the collection as targets of the judge.

``ringspec check tests/correct_kernels/target.py:members.carried_state``
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.adapters.numpy_lists import NumPyTarget
from ringspec.conformance.target.capabilities import (
    FEATURES,
    LAYOUTS,
    MASKS,
    OPERATIONS,
    Capabilities,
)
from ringspec.conformance.target.protocol import Call

# `ringspec check` loads this file by its path, pytest as correct_kernels.target.
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[1]))

from correct_kernels.backward import backward, delta_of
from correct_kernels.forward_normalised import merge_all
from correct_kernels.members import MEMBERS, Member, both_passes, forward_of
from correct_kernels.ring import Ring
from correct_kernels.rounding import narrowed

WAYS = ("undeclared", "named", "declared")
RECIPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32"}
STORAGE = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
FLOATS = ("q", "k", "v", "dy", "dlse", "o", "lse", "delta", "bias", "parts_o", "parts_lse")
OPTIONAL = ("segments_q", "bound_min", "bound_max", "mask", "bias", "keep")
OF_STATISTICS = ("lse", "dsinks")
Workers = list[NDArray[Any]]


def member_target(name: str, way: str = "undeclared", format: str | None = None) -> NumPyTarget:
    """A member as a target, with one of the WAYS to declare the recipe of each input format.

    'undeclared': it declares none; 'named': the name alone; 'declared': also what the member knows of tiles,
    merges and of what P is relative to.

    ``format``: the only one that it claims; None: bfloat16, float16 and float32.
    """
    member = MEMBERS[name]

    def run(call: Call) -> dict[str, Workers]:
        return answer(member, call)

    recipe: dict[str, Any] | None = None
    if way != "undeclared":
        changes = member.declares if way == "declared" else {}
        recipe = {x: {"base": RECIPES[x]} | changes for x in RECIPES}
    return NumPyTarget(
        run,
        Capabilities(
            operations=tuple(x for x in OPERATIONS if x != "merge" or member.merge is not None),
            layouts=LAYOUTS,
            masks=MASKS,
            features=tuple(
                x for x in FEATURES if not (member.way.delta_column and x in ("dropout", "keep"))
            ),
            formats=tuple(RECIPES) if format is None else (format,),
            repeats_bitwise=True,
            recipe=recipe,
        ),
        name,
        (member.what,),
    )


def answer(member: Member, call: Call) -> dict[str, Workers]:
    """What the member computes, rounded to the formats that the call asks for."""
    wide = {
        name: [np.asarray(x, np.float32) for x in given] if name in FLOATS else list(given)
        for name, given in call.tensors.items()
    }
    if call.operation == "merge":
        found = merged(member, wide)
    else:
        found = attention(member, call, ring_of(call, wide, member.base2), wide)
    if call.operation == "block":
        found.pop("dsinks", None)
    return {name: stored(x, call.formats[kind(name)]) for name, x in found.items()}


def kind(name: str) -> str:
    return "statistics" if name in OF_STATISTICS else "outputs"


def stored(given: Workers, format: str) -> Workers:
    return [narrowed(x, format).astype(STORAGE[format]) for x in given]


def merged(member: Member, wide: dict[str, Workers]) -> dict[str, Workers]:
    pairs = zip(wide["parts_o"][0], wide["parts_lse"][0], strict=True)
    o, lse = merge_all(member.merge, [(o, lse[..., None]) for o, lse in pairs])
    return {"o": [o], "lse": [lse[..., 0]]}


def attention(
    member: Member, call: Call, ring: Ring, wide: dict[str, Workers]
) -> dict[str, Workers]:
    if call.passes == ("forward",):
        o, lse = forward_of(member, ring)
        return {"o": o, "lse": lse}
    dy, dlse = wide["dy"], wide.get("dlse")
    if call.passes == ("backward",):
        delta = wide.get("delta") or [delta_of(a, b) for a, b in zip(dy, wide["o"], strict=True)]
        return backward(ring, dy, wide["lse"], delta, dlse, member.way)
    return both_passes(member, ring, dy, dlse, call.formats["outputs"])


def ring_of(call: Call, wide: dict[str, Workers], base2: bool) -> Ring:
    """The ring that a call asks for."""
    terms = {
        name: call.terms[name]
        for name in ("causal", "window", "softcap", "dropout_p", "dropout_seed")
        if name in call.terms
    }
    given: dict[str, Any] = {name: wide[name] for name in OPTIONAL if name in wide}
    if "segments_q" in wide:
        given["segments_k"] = wide.get("segments_k", wide["segments_q"])
    starts = call.terms.get("cu_seqlens")
    if starts is not None:
        of_keys = call.terms.get("cu_seqlens_k") or starts
        given["segments_q"] = [document(x, starts) for x in call.index_q]
        given["segments_k"] = [document(x, of_keys) for x in call.index_k]
    if "sinks" in wide:
        given["sinks"] = wide["sinks"][0]
    return Ring(
        *(wide[name] for name in ("q", "k", "v")),
        list(call.index_q),
        list(call.index_k),
        list(call.position_q),
        list(call.position_k),
        call.terms["scale"],
        call.formats["inputs"],
        base2,
        circulation=call.circulation,
        direction=call.direction,
        **terms,
        **given,
    )


def document(tokens: NDArray, starts: Any) -> NDArray:
    """Document of each token [1, n]; -1 for padding and after the last one."""
    found = np.searchsorted(np.asarray(starts), tokens, side="right") - 1
    return np.where((tokens >= 0) & (tokens < starts[-1]), found, -1)[None]


# For the command line, with underscores for hyphens: target.py:declared.lazy_rescaling.
members, declared = (
    SimpleNamespace(**{name.replace("-", "_"): member_target(name, told) for name in MEMBERS})
    for told in (False, True)
)
