"""A golden case as data: frozen dataclasses and their text form, which is unique.

``case.json`` describes the case completely; the file of tensors holds only its numbers.
:func:`case_from_json` checks everything: strict JSON, then the schema ``schemas/case.schema.json``,
then ``check_case``.

In memory a list is a tuple and ``"-inf"`` is the float -inf; both are converted when a dataclass is
made, so that a case read from its text equals the case that was written.
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
    """Lengths of the axes ``B``, ``H``, ``Hkv``, ``Sq``, ``Sk``, ``D`` and ``Dv``.

    Merge: ``Sk`` is the number of parts, ``D = Dv``.
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
    """Names of :data:`ringspec.formats.FORMATS`.

    ``inputs``: q k v dy parts_o. ``outputs``: o dq dk dv dbias. ``statistics``: lse dlse delta
    sinks dsinks bias parts_lse.
    """

    inputs: str
    outputs: str
    statistics: str


@dataclass(frozen=True)
class Ring:
    """The W = ``workers``, which of them holds which token (``layout``), and what is sent.

    ``circulation`` 'kv', 'q' or 'gather'; ``direction`` 1: worker r sends to r + 1, -1: to r - 1.
    ``table_q`` and ``table_k`` [W, n] of tokens with layout "table" only.
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
    """A change of part of a drawn tensor: exactly one of ``set`` and ``multiply`` is not None.

    ``at`` has one entry for each axis: an index, a pair (start, stop), or None for the whole axis.
    ``multiply`` is a power of two, so that the result is exact.
    """

    at: tuple[int | tuple[int, int] | None, ...]
    set: float | int | bool | None = None
    multiply: float | int | None = None

    def __post_init__(self) -> None:
        freeze(self, "at", "set")


@dataclass(frozen=True)
class TensorRecipe:
    """How the elements of one input are made, without rounding.

    ``kind`` is one of the following. ``uniform``: (u - 2**(bits-1) + head*h + shard*g) * 2**exponent, with u the top ``bits`` bits of
    the element's word, h its index on the head axis, g = token*shards // length. ``constant``:
    ``value``. ``values``: the given nested tuples. ``bernoulli``: True iff the top 8 bits of the
    word are >= ``threshold``. Then the ``patches``, in order. ``shape`` is given if it does not follow from
    the name of the input.
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
    """``tensors`` maps the name of an input to its recipe; ``seed`` is that of their random words."""

    seed: str
    tensors: dict[str, TensorRecipe]


@dataclass(frozen=True)
class Withdrawn:
    """From set version ``since`` on the case is not used, for ``reason``. It stays in the set."""

    since: str
    reason: str


@dataclass(frozen=True)
class Case:
    """One case; the fields are the keys of case.json, in their order (docs/vectors/format.md).

    ``id`` is its path in the set, ``reason`` why it exists; ``operation`` and ``passes`` what is computed;
    ``rules`` and ``flags`` which rules it tests and which bugs it would find; ``shape``, ``formats``, ``terms``
    and ``ring`` the problem; ``inputs`` how they are made; ``storage`` and ``digests`` what the set holds
    of its tensors; ``requires`` what an implementation must be able to do; ``withdrawn`` None, or why.
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
    """Lists in these fields become tuples, and "-inf" the float, in a frozen dataclass."""
    for name in names:
        object.__setattr__(record, name, frozen(getattr(record, name)))


def frozen(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple(frozen(item) for item in x)
    if isinstance(x, dict):
        return {name: frozen(item) for name, item in x.items()}
    return float("-inf") if isinstance(x, str) and x == "-inf" else x
