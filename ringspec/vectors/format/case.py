"""A golden case as data: frozen dataclasses with the fields of ``case.json``.

``case.json`` describes the case completely; the tensor file contains only numbers.
:func:`case_from_json` checks everything: strict JSON, then the schema ``schemas/case.schema.json``,
then ``check_case``.

The dataclasses convert lists to tuples, and ``"-inf"`` and ``"inf"`` to floats; ``"nan"`` stays a text, because a NaN would
equal nothing. So a case that is read from case.json equals the case that was written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "CaseFormats",
    "Inputs",
    "Patch",
    "Ring",
    "SchemeCall",
    "Shape",
    "TensorRecipe",
    "Withdrawn",
]

OPERATIONS = ("attention", "ring", "block", "merge", "schedule", "context_parallel")
PASSES = (("forward",), ("forward", "backward"), ("backward",))
STORAGES = ("full", "sampled", "digests")
KINDS = ("uniform", "constant", "values", "bernoulli")
LAYOUTS = ("contiguous", "striped", "zigzag", "zigzag_per_document", "table")
PADDED_LAYOUTS = ("zigzag_padded", "contiguous_padded", "striped_padded")
CIRCULATIONS = ("kv", "q", "gather")
SCHEMES = ("ring", "double_ring", "all_gather", "ulysses", "usp", "joint", "pcp", "dcp")
SCALARS = {float, int, bool, type(None)}  # of values that freeze leaves as they are
INFINITIES = ("-inf", "inf")


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
    ``statistics``: the format of lse, dlse, delta, sinks, dsinks, bias, parts_lse and parts_sum.
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
class SchemeCall:
    """How a case splits attention over ranks: keywords of :func:`ringspec.context_parallel`.

    ``name``: the scheme. ``mesh``: pairs (axis, size), outermost first; rank numbers are row-major. ``layout``: one of
    LAYOUTS or PADDED_LAYOUTS; None: the scheme's default. ``table_q`` and ``table_k`` [W, n] are given for the layout
    'table', ``cu_seqlens_padded`` for a padded one: the rooms of the documents of ``cu_seqlens``. The others are as in
    ``context_parallel``; None: its default.
    """

    name: str
    mesh: tuple[tuple[str, int], ...]
    layout: str | None = None
    table_q: tuple[tuple[int, ...], ...] | None = None
    table_k: tuple[tuple[int, ...], ...] | None = None
    cu_seqlens_padded: tuple[int, ...] | None = None
    circulation: str | None = None
    direction: int | None = None
    text: tuple[int, ...] | None = None
    text_at: str | None = None
    interleave: int | None = None

    def __post_init__(self) -> None:
        freeze(self, "mesh", "table_q", "table_k", "cu_seqlens_padded", "text")

    @property
    def ranks(self) -> int:
        """W, the number of ranks."""
        return math.prod(size for _, size in self.mesh)


@dataclass(frozen=True)
class Patch:
    """A change to part of an input: the part is set to ``set`` or multiplied by ``multiply``.

    ``at`` selects the part, with one entry for each axis: an index, a pair (start, stop), or None for the whole axis.
    ``multiply`` is a power of two, so that the result is exact. Exactly one of ``set`` and ``multiply`` is not None.
    """

    at: tuple[int | tuple[int, int] | None, ...]
    set: float | int | bool | str | None = None
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
    value: float | int | bool | str | None = None
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
    case is no longer used. ``recipes``: the merge recipes (``ringspec.merges``) whose bits are stored beside the correctly
    rounded results of a merge. ``scheme``: how the operation "context_parallel" splits attention. These two are written to case.json
    only if they are given.
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
    recipes: tuple[str, ...] = ()
    scheme: SchemeCall | None = None

    def __post_init__(self) -> None:
        freeze(self, "passes", "rules", "flags", "terms", "requires", "recipes")

    @property
    def format_version(self) -> str:
        """The oldest version of the format that has everything the case uses."""
        recipes = self.inputs.tensors
        special = [patch.set == "nan" for one in recipes.values() for patch in one.patches]
        terms = {"lse_base", "empty_lse"} & set(self.terms)
        newer = self.recipes or self.scheme or terms or "parts_sum" in recipes or any(special)
        return "1.1" if newer else "1.0"


def freeze(record: Any, *names: str) -> None:
    """In the fields ``names`` of a frozen dataclass, convert lists to tuples and infinities to floats, in place."""
    for name in names:
        object.__setattr__(record, name, frozen(getattr(record, name)))


def frozen(x: Any) -> Any:
    # The usual kinds first: a profile has half a million values.
    kind = type(x)
    if kind in SCALARS:
        return x
    if isinstance(x, (list, tuple)):
        if SCALARS.issuperset(map(type, x)):
            return x if kind is tuple else tuple(x)
        return tuple([frozen(item) for item in x])
    if isinstance(x, dict):
        return {name: frozen(item) for name, item in x.items()}
    return float(x) if isinstance(x, str) and x in INFINITIES else x
