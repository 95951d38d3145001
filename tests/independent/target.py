"""The ring of ``torch_ring.py`` as targets of ringspec, right or with one of the bugs of ``bugs.py``.

``ringspec check tests/independent/target.py:independent_bf16``. A bug is asked for by its name:
``independent("dkv_against_kv")`` in Python.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ringspec.conformance.target.capabilities import (
    FEATURES,
    FORMATS,
    LAYOUTS,
    MASKS,
    OPERATIONS,
    Capabilities,
)
from ringspec.conformance.target.protocol import Call, Result

# `ringspec check` loads this file by its path, pytest as independent.target.
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.append(str(Path(__file__).parents[1]))

from independent import bugs, philox, torch_backward, torch_forward
from independent.torch_ring import Ring, attention, inputs_of

DTYPES = {name: getattr(torch, name) for name in FORMATS}
RECIPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32", "float64": "float64"}
PER_TOKEN = ("segments_q", "segments_k", "bound_min", "bound_max")
OTHERS = (*PER_TOKEN, "bias", "mask", "keep", "sinks")


class Independent:
    """One ring: ``bug`` names an entry of ``bugs.BUGS``; ``formats`` are claimed, the first one's
    recipe declared."""

    def __init__(self, bug: str | None = None, formats: tuple[str, ...] = FORMATS) -> None:
        self.parts = {} if bug is None else bugs.BUGS[bug].parts
        self.name = f"independent-{formats[0]}" + ("" if bug is None else f" with {bug}")
        self.capabilities = Capabilities(
            operations=OPERATIONS,
            layouts=LAYOUTS,
            masks=MASKS,
            features=FEATURES,
            formats=formats,
            recipe=RECIPES[formats[0]] if len(formats) < len(FORMATS) else None,
        )
        self.notes = () if bug is None else (bugs.BUGS[bug].what,)

    def run(self, call: Call) -> Result:
        torch.set_num_threads(1)
        tensors = {name: [to_torch(x) for x in given] for name, given in call.tensors.items()}
        compute = merged if call.operation == "merge" else computed
        found = compute(call, tensors, self.parts)
        outputs, statistics = (DTYPES[call.formats[x]] for x in ("outputs", "statistics"))
        results = {
            name: [
                to_numpy(x.to(statistics if name in ("lse", "dsinks") else outputs)) for x in given
            ]
            for name, given in found.items()
            if given
        }
        if call.operation == "block":
            results.pop("dsinks", None)
        return Result(**results)


def to_torch(x: np.ndarray) -> torch.Tensor:
    """The same bits in memory of its own."""
    copied = np.array(x)
    if copied.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copied)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    plain = x.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def ring_of(call: Call, tensors: dict[str, list[torch.Tensor]], parts: dict[str, Any]) -> Ring:
    """The ring that a call asks for."""
    token_q, token_k, position_q, position_k = (
        [to_torch(x) for x in table]
        for table in (call.index_q, call.index_k, call.position_q, call.position_k)
    )
    given = {name: tensors[name] for name in OTHERS if name in tensors}
    if "segments_q" in given:  # those of the keys are the same ones where they are not given
        given.setdefault("segments_k", given["segments_q"])
    starts = call.terms.get("cu_seqlens")
    if starts is not None:
        given["segments_q"] = [documents(x, starts) for x in token_q]
        starts = call.terms.get("cu_seqlens_k") or starts
        given["segments_k"] = [documents(x, starts) for x in token_k]
    dropout_p = call.terms.get("dropout_p", 0.0)
    tokens = int(call.index_k.max()) + 1
    if dropout_p > 0 and "keep" not in tensors:
        shape = tensors["q"][0].shape[:2]
        columns = by_token(token_k, position_k, tokens)
        seed = call.terms.get("dropout_seed", 0)
        given["keep"] = [philox.keep(seed, dropout_p, *shape, x, columns) for x in position_q]
    window = call.terms.get("window")
    return Ring(
        *(tensors[name] for name in ("q", "k", "v")),
        token_q,
        token_k,
        position_q,
        position_k,
        tokens,
        call.terms["scale"],
        causal=bool(call.terms.get("causal", False)),
        window=None if window is None else tuple(window),
        softcap=call.terms.get("softcap"),
        dropout_p=dropout_p,
        circulation=call.circulation,
        direction=call.direction,
        out=DTYPES[call.formats["outputs"]],
        statistics=DTYPES[call.formats["statistics"]],
        parts=parts,
        **given,
    )


def documents(tokens: torch.Tensor, starts: Any) -> torch.Tensor:
    """Document of each token [1, n]; -1 behind the last one."""
    edges = torch.tensor(list(starts))
    found = torch.searchsorted(edges, tokens, right=True) - 1
    return torch.where((tokens >= 0) & (tokens < edges[-1]), found, -1)[None]


def by_token(token: list[torch.Tensor], position: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """Positions [1|B, S] of all tokens, from the workers' tables."""
    whole = torch.zeros(position[0].shape[0], tokens, dtype=torch.int64)
    for index, own in zip(token, position, strict=True):
        whole[:, index[index >= 0]] = own[:, index >= 0]
    return whole


def computed(call: Call, tensors: dict[str, list], parts: dict[str, Any]) -> dict[str, list]:
    """A ring or a block. Through autograd where its gradients can have the type that is asked for."""
    ring = ring_of(call, tensors, parts)
    dy, dlse = tensors.get("dy"), tensors.get("dlse")
    if call.passes == ("backward",):
        return torch_backward.backward(
            ring, dy, dlse, tensors.get("o", dy), tensors["lse"], tensors.get("delta")
        )
    if "backward" not in call.passes or ring.out != ring.narrow:
        o, lse = torch_forward.forward(ring)
        found = {"o": o, "lse": lse}
        return found | (torch_backward.backward(ring, dy, dlse, o, lse) if dy else {})
    inputs = inputs_of(ring)
    for x in inputs:
        x.requires_grad_()
    o, lse = attention(ring)
    torch.autograd.backward([*o, *lse], [*dy, *(dlse or map(torch.zeros_like, lse))])
    found = {"o": o, "lse": lse}
    for name in ("q", "k", "v", "bias", "sinks"):
        found[f"d{name}"] = [x.grad for x in getattr(ring, name) or ()]
    return found


def merged(call: Call, tensors: dict[str, list], parts: dict[str, Any]) -> dict[str, list]:
    """Normalised partial results, merged as a ring's own blocks are."""
    o, lse = tensors["parts_o"][0], tensors["parts_lse"][0]
    wide = torch.float64 if o.dtype == torch.float64 else torch.float32
    nothing = [torch.zeros(1, 1, 1, 1, dtype=o.dtype)]
    ring = Ring(nothing, nothing, nothing, [], [], [], [], 0, 1.0, parts=parts)
    found = [(a.to(wide), b.to(wide)) for a, b in zip(o, lse, strict=True)]
    o, lse = ring.do.merge_all(ring, found)
    return {"o": [o], "lse": [lse]}


def independent(bug: str | None = None, formats: tuple[str, ...] = FORMATS) -> Independent:
    """All formats, each with its own recipe; or those that are named, with the recipe of the first."""
    return Independent(bug, formats)


def independent_bf16(bug: str | None = None) -> Independent:
    """bfloat16 and float32 inputs, P and dS in the type of the inputs."""
    return Independent(bug, ("bfloat16", "float32"))


def independent_float32(bug: str | None = None) -> Independent:
    return Independent(bug, ("float32",))


# For the command line: `ringspec check tests/independent/target.py:bf16.dkv_against_kv`.
bf16 = SimpleNamespace(**{name: independent_bf16(name) for name in bugs.BUGS})
float32 = SimpleNamespace(**{name: independent_float32(name) for name in bugs.BUGS})
