"""Functions that make cases with defaults, so that the catalogue lists only what differs from the defaults.

By default, a case has two query heads, sixteen tokens and D = 4. ``rules`` and ``flags`` are names separated by blanks;
``dtype`` is one of :data:`DTYPES`. A tensor is given as nested lists of values, or as a recipe, which says how its
elements are computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringspec.problem.options import default_scale
from ringspec.vectors.format.case import (
    Case,
    CaseFormats,
    Inputs,
    Patch,
    Ring,
    SchemeCall,
    Shape,
    TensorRecipe,
)
from ringspec.vectors.format.inputs import NAMES
from ringspec.vectors.format.requires import requires

TERMS = (
    "scale", "causal", "window", "softcap", "dropout_p", "dropout_seed", "q_offset", "cu_seqlens",
    "cu_seqlens_k", "lse_base", "empty_lse",
)  # fmt: skip


@dataclass(frozen=True)
class Dtype:
    """The number formats of a case, and the ``bits`` and ``exponent`` of the random numbers in its q, k, v and dy.

    The magnitudes of these numbers are at most about 2.
    """

    inputs: str
    statistics: str
    bits: int
    exponent: int


DTYPES = {
    "bf16": Dtype("bfloat16", "float32", 6, -4),
    "fp16": Dtype("float16", "float32", 8, -6),
    "f32": Dtype("float32", "float32", 14, -12),
    "f64": Dtype("float64", "float64", 32, -30),
}
# Offsets per head and per key shard, in sixteenths. At kernel shapes those of q and k are small, because
# their product grows with sqrt(D) and would put all weight on one shard.
SMALL = {"q": (3, 0), "k": (5, 4), "v": (6, 7), "dy": (4, 3)}
LARGE = {"q": (1, 0), "k": (2, 1), "v": (6, 7), "dy": (4, 3)}
LARGE_HEAD_DIM = 32


def put(value: Any, *at: Any) -> Patch:
    """Return a patch that sets part of a tensor; ``at`` has for each axis an index, (start, stop), or None for all."""
    return Patch(at, set=value)


def times(factor: float, *at: Any) -> Patch:
    """Return a patch that multiplies part of a tensor by a power of two; ``at`` is as in :func:`put`."""
    return Patch(at, multiply=factor)


def numbers(
    bits: int, exponent: int, shape: tuple[int, ...] | None = None, **more: Any
) -> TensorRecipe:
    """Return a recipe of random integers with ``bits`` bits, multiplied by 2**exponent."""
    return TensorRecipe("uniform", shape=shape, bits=bits, exponent=exponent, **more)


def constant(value: Any, shape: tuple[int, ...] | None = None, *patches: Patch) -> TensorRecipe:
    return TensorRecipe("constant", shape=shape, value=value, patches=patches)


def coins(threshold: int, *shape: int, patches: tuple[Patch, ...] = ()) -> TensorRecipe:
    """Return a recipe of random booleans that are False with probability ``threshold`` / 256."""
    return TensorRecipe("bernoulli", shape=shape, threshold=threshold, patches=patches)


def bias_of(*shape: int, patches: tuple[Patch, ...] = ()) -> TensorRecipe:
    """Return a recipe of a random bias whose mean is different for each head and each quarter of the keys."""
    return numbers(8, -7, shape, head=24, shard=20, shards=4, patches=patches)


def spread(first: float, step: float, modulus: int, *shape: int, stride: int = 7) -> TensorRecipe:
    """Return a recipe of the values first + step * (stride * i mod modulus), where i is the element's index in C order."""
    flat: list[Any] = []
    count = 1
    for length in shape:
        count *= length
    flat = [first + step * (stride * i % modulus) for i in range(count)]
    for length in reversed(shape[1:]):
        flat = [flat[i : i + length] for i in range(0, len(flat), length)]
    return TensorRecipe("values", values=tuple(flat))


def recipe_of(x: Any) -> TensorRecipe:
    return x if isinstance(x, TensorRecipe) else TensorRecipe("values", values=x)


def standard(name: str, dtype: Dtype, shape: Shape, shards: int) -> TensorRecipe:
    """Return the default recipe of q, k, v or dy: random, with a mean that differs by head and part of the tokens."""
    head, shard = (LARGE if shape.D >= LARGE_HEAD_DIM else SMALL)[name]
    unit = 2 ** (dtype.bits - 6)
    more = {"shard": shard * unit, "shards": shards} if shard else {}
    return numbers(dtype.bits, dtype.exponent, head=head * unit, **more)


def telling(kv_heads: int, keys: int) -> TensorRecipe:
    """Return values that are 1 + the head in the component of the key's number and 0 elsewhere: o shows each weight."""
    each = [
        put(1.0 + head, None, head, key, key) for head in range(kv_heads) for key in range(keys)
    ]
    return constant(0.0, None, *each)


def packed_requests(lengths: Sequence[int], queries: Sequence[int]) -> dict[str, Any]:
    """Return the terms of packed requests of so many keys, of which each has all its keys and its last queries.

    >>> packed_requests((3, 2), (1, 2))["positions_q"]
    (2, 3, 4)
    """
    starts, starts_k = [0], [0]
    positions: list[int] = []
    for n, new in zip(lengths, queries, strict=True):
        positions += range(starts_k[-1] + n - new, starts_k[-1] + n)
        starts.append(starts[-1] + new)
        starts_k.append(starts_k[-1] + n)
    return {
        "causal": True, "cu_seqlens": tuple(starts), "cu_seqlens_k": tuple(starts_k),
        "positions_q": tuple(positions),
    }  # fmt: skip


def case(
    id: str,
    reason: str,
    rules: str,
    flags: str = "",
    *,
    operation: str = "attention",
    passes: tuple[str, ...] = ("forward", "backward"),
    S: int = 16,
    Sq: int | None = None,
    Sk: int | None = None,
    B: int = 1,
    H: int = 2,
    Hkv: int | None = None,
    D: int = 4,
    Dv: int | None = None,
    dtype: str = "bf16",
    outputs: str | None = None,
    ring: Ring | None = None,
    storage: str = "full",
    recipes: tuple[str, ...] = (),
    scheme: SchemeCall | None = None,
    patches: Mapping[str, tuple[Patch, ...]] | None = None,
    **rest: Any,
) -> Case:
    """Make a case, by default of dense attention; ``rest`` are masks, other options and tensors.

    ``dlse=True`` gives a random upstream gradient of lse.
    """
    used = DTYPES[dtype]
    shape = Shape(
        B, H, H if Hkv is None else Hkv, S if Sq is None else Sq, S if Sk is None else Sk, D,
        D if Dv is None else Dv,
    )  # fmt: skip
    terms = {name: rest.pop(name) for name in TERMS if name in rest}
    if operation != "merge":
        terms = {"scale": terms.get("scale", default_scale(D))} | terms
    shards = min(4, shape.Sk) if ring is None else ring.workers
    if scheme is not None:
        shards = scheme.ranks
    tensors = tensors_of(operation, passes, used, shape, shards, rest)
    for name, changes in (patches or {}).items():
        tensors[name] = dataclasses.replace(tensors[name], patches=changes)
    formats = CaseFormats(used.inputs, outputs or used.inputs, used.statistics)
    made = Case(
        id, reason, operation, passes, tuple(rules.split()), tuple(flags.split()), shape, formats,
        terms, ring, Inputs(id, tensors), storage, recipes=recipes, scheme=scheme,
    )  # fmt: skip
    return dataclasses.replace(made, requires=requires(made))


def tensors_of(
    operation: str,
    passes: tuple[str, ...],
    dtype: Dtype,
    shape: Shape,
    shards: int,
    given: dict[str, Any],
) -> dict[str, TensorRecipe]:
    """Return the recipes of a case's tensors, in the order of NAMES: those ``given``, and defaults for the others."""
    unknown = set(given) - set(NAMES)
    assert not unknown, f"unknown names {unknown}"
    tensors: dict[str, TensorRecipe] = {}
    if operation != "merge":
        names = ("q", "k", "v", "dy") if "backward" in passes else ("q", "k", "v")
        tensors = {name: standard(name, dtype, shape, shards) for name in names}
    if given.get("dlse") is True:
        given["dlse"] = numbers(8, -6, head=30)
    tensors |= {name: recipe_of(x) for name, x in given.items()}
    return {name: tensors[name] for name in NAMES if name in tensors}


def ring(
    id: str,
    reason: str,
    rules: str,
    flags: str = "",
    *,
    W: int,
    layout: str = "contiguous",
    circulation: str = "kv",
    direction: int = 1,
    table_q: Any = None,
    table_k: Any = None,
    **data: Any,
) -> Case:
    """Make a ring case; if only one table is given, it is used for queries and keys."""
    if table_q is not None:
        layout, table_k = "table", table_q if table_k is None else table_k
    circle = Ring(W, layout, circulation, direction, table_q, table_k)
    return case(id, reason, rules, flags, operation="ring", ring=circle, **data)


def block_forward(id: str, reason: str, rules: str, flags: str = "", **data: Any) -> Case:
    return case(
        id, reason, rules, flags, operation="block", passes=("forward",), **({"S": 8} | data)
    )


def block_backward(id: str, reason: str, rules: str, flags: str = "", **data: Any) -> Case:
    """Make a case of one block's backward pass; lse is larger than in the block alone, and delta has both signs."""
    n = (data.get("B", 1), data.get("H", 2), data.get("Sq", data.get("S", 8)))
    rows = {"lse": spread(3.0, 0.125, 13, *n), "delta": spread(-1.5, 0.25, 11, *n)}
    return case(
        id,
        reason,
        rules,
        flags,
        operation="block",
        passes=("backward",),
        **({"S": 8} | rows | data),
    )


def merge(
    id: str,
    reason: str,
    rules: str,
    flags: str = "",
    *,
    N: int,
    Dv: int = 4,
    S: int = 6,
    **data: Any,
) -> Case:
    """Make a case that merges N partial results [N, B, H, S, Dv], each with a different mean."""
    bits, exponent = (
        DTYPES[data.get("dtype", "bf16")].bits,
        DTYPES[data.get("dtype", "bf16")].exponent,
    )
    unit = 2 ** (bits - 6)
    given = {
        "parts_o": numbers(bits, exponent, head=5 * unit, shard=9 * unit, shards=N),
        "parts_lse": numbers(8, -5, head=20, shard=13, shards=N),
    } | data
    return case(
        id, reason, rules, flags, operation="merge", passes=("forward",), Sq=S, Sk=N, D=Dv, **given
    )


def schedule(
    id: str, reason: str, rules: str, flags: str = "", *, W: int, circulation: str = "kv",
    direction: int = 1,
) -> Case:  # fmt: skip
    """Make a schedule case, which has the transfers of both passes of a ring and no input tensors."""
    made = Case(
        id, reason, "schedule", ("forward", "backward"), tuple(rules.split()), tuple(flags.split()),
        None, None, {}, Ring(W, "contiguous", circulation, direction), Inputs(id, {}), "full",
    )  # fmt: skip
    return dataclasses.replace(made, requires=requires(made))
