"""A golden case as data: frozen dataclasses with the fields of ``case.json``.

``case.json`` describes the case completely; the tensor file contains only numbers.
:func:`case_from_json` checks everything: strict JSON, then the schema ``schemas/case.schema.json``,
then ``check_case``.

The dataclasses convert lists to tuples and ``"-inf"`` to the float. So a case that is read from case.json equals the
case that was written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CaseFormats", "Inputs", "Patch", "Ring", "Shape", "TensorRecipe", "Withdrawn"]

OPERATIONS = ("attention", "ring", "block", "merge", "schedule")
PASSES = (("forward",), ("forward", "backward"), ("backward",))
STORAGES = ("full", "sampled", "digests")
KINDS = ("uniform", "constant", "values", "bernoulli")
LAYOUTS = ("contiguous", "striped", "zigzag", "zigzag_per_document", "table")
CIRCULATIONS = ("kv", "q", "gather")


@dataclass(frozen=True)
class Shape:
    """The lengths of the axes ``B``, ``H``, ``Hkv``, ``Sq``, ``Sk``, ``D`` and ``Dv``.

    For the operation "merge", ``Sk`` is the number of partial results, and ``D`` equals ``Dv``.
    """

    B: int
    H: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int


@dataclass(frozen=True)
class CaseFormats:
    """The number formats of a case, named as in :data:`ringspec.formats.FORMATS`.

    ``inputs``: the format of q, k, v, dy and parts_o. ``outputs``: the format of o, dq, dk, dv and dbias.
    ``statistics``: the format of lse, dlse, delta, sinks, dsinks, bias and parts_lse.
    """

    inputs: str
    outputs: str
    statistics: str


@dataclass(frozen=True)
class Ring:
    """The ring of a case: the number of ``workers`` W, the ``layout`` of tokens, and the transfers.

    ``circulation``: what travels: 'kv' (keys and values), 'q' (queries), or 'gather' (every worker collects all keys
    and values). ``direction``: 1 if worker r sends to r + 1, -1 if it sends to r - 1. ``table_q`` and ``table_k``: the
    token in each slot, [W, n], for the layout "table" only.
    """

    workers: int
    layout: str
    circulation: str = "kv"
    direction: int = 1
    table_q: tuple[tuple[int, ...], ...] | None = None
    table_k: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        freeze(self, "table_q", "table_k")


@dataclass(frozen=True)
class Patch:
    """A change to part of an input: the part is set to ``set`` or multiplied by ``multiply``.

    ``at`` selects the part, with one entry for each axis: an index, a pair (start, stop), or None for the whole axis.
    ``multiply`` is a power of two, so that the result is exact. Exactly one of ``set`` and ``multiply`` is not None.
    """

    at: tuple[int | tuple[int, int] | None, ...]
    set: float | int | bool | None = None
    multiply: float | int | None = None

    def __post_init__(self) -> None:
        freeze(self, "at", "set")


@dataclass(frozen=True)
class TensorRecipe:
    """The recipe of one input: it says how the elements are computed, without rounding.

    ``kind`` is one of:

    ``uniform``    (u - 2**(bits-1) + head*h + shard*g) * 2**exponent, where u is the top ``bits`` bits of the element's
                   random 64-bit word, h is its index on the head axis, and g = token*shards // length is its shard, if
                   the tokens are divided into ``shards`` parts
    ``constant``   ``value``
    ``values``     the given nested tuples
    ``bernoulli``  True if and only if the top 8 bits of the element's random word are >= ``threshold``

    The ``patches`` are then applied in order. ``shape`` is given if it does not follow from the input's name and case.
    """

    kind: str
    shape: tuple[int, ...] | None = None
    bits: int | None = None
    exponent: int | None = None
    head: int = 0
    shard: int = 0
    shards: int = 1
    value: float | int | bool | None = None
    values: tuple[Any, ...] | None = None
    threshold: int | None = None
    patches: tuple[Patch, ...] = ()

    def __post_init__(self) -> None:
        freeze(self, "shape", "value", "values", "patches")


@dataclass(frozen=True)
class Inputs:
    """The recipes of all inputs: ``tensors`` maps names to recipes, ``seed`` seeds their random words."""

    seed: str
    tensors: dict[str, TensorRecipe]


@dataclass(frozen=True)
class Withdrawn:
    """Says that a case is no longer used since version ``since`` of the set, and for what ``reason``."""

    since: str
    reason: str


@dataclass(frozen=True)
class Case:
    """One case; the fields are the keys of case.json, in the same order (docs/vectors/format.md).

    ``id`` is the path of the case in the set, and ``reason`` says why the case exists. ``operation`` and ``passes`` say
    what is computed. ``rules`` lists the rules of the specification that the case tests, and ``flags`` the classes of
    bugs that it detects. ``shape``, ``formats``, ``terms`` and ``ring`` define the problem, and ``inputs`` says how the
    inputs are made. ``storage`` says how much of the tensors the set stores ("full", "sampled" or "digests"), and
    ``digests`` has their SHA-256. ``requires``: what an implementation must support. ``withdrawn``: None, or why the
    case is no longer used.
    """

    id: str
    reason: str
    operation: str
    passes: tuple[str, ...]
    rules: tuple[str, ...]
    flags: tuple[str, ...]
    shape: Shape | None
    formats: CaseFormats | None
    terms: dict[str, Any]
    ring: Ring | None
    inputs: Inputs
    storage: str
    requires: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    withdrawn: Withdrawn | None = None

    def __post_init__(self) -> None:
        freeze(self, "passes", "rules", "flags", "terms", "requires")


def freeze(record: Any, *names: str) -> None:
    """In the fields ``names`` of a frozen dataclass, convert lists to tuples and "-inf" to the float, in place."""
    for name in names:
        object.__setattr__(record, name, frozen(getattr(record, name)))


def frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        if x and set(map(type, x)) <= {float, int, bool}:
            return tuple(x)
        return tuple(frozen(item) for item in x)
    if isinstance(x, dict):
        return {name: frozen(item) for name, item in x.items()}
    return float("-inf") if isinstance(x, str) and x == "-inf" else x
