"""Capabilities: the claims of a target, as data that the suite compares with a case before running it.

A target is the program under test; its claims say what it supports. A claim is a tuple of names or numbers, or a single
name or number; None claims everything. A case that requires something else does not run: its outcome is "not claimed",
and the reason is the first requirement that is not claimed. If the target refuses a claimed case, that is a failure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringspec.conformance.target.declared import Declared, check_declared, check_name
from ringspec.errors import OptionError, shown

__all__ = ["Capabilities", "capabilities_from", "why_not"]

OPERATIONS = ("ring-forward", "ring-backward", "block-forward", "block-backward", "merge")
INTEGER_OPERATIONS = (
    "layout-table",
    "layout-positions",
    "layout-lengths",
    "layout-cu_seqlens",
    "layout-visible",
)
"""The results of the operation ``layout``, which has integers in and out; a ring does not claim them."""
SCHEME_OPERATIONS = ("context_parallel-forward", "context_parallel-backward")
SCHEMES = ("ring", "double_ring", "all_gather", "ulysses", "usp", "joint", "pcp", "dcp")
"""The ways to split attention of the operation ``context_parallel``, by their names in ringspec.context_parallel."""
LAYOUTS = ("contiguous", "striped", "zigzag", "zigzag_per_document", "table")
DOCUMENT_LAYOUTS = ("zigzag_padded", "contiguous_padded", "striped_padded", "interleaved")
CIRCULATIONS = ("kv", "q", "gather")
MASKS = ("causal", "window", "documents", "segments", "bounds", "dense", "bias-minus-infinity")
FEATURES = (
    "bias",
    "softcap",
    "sinks",
    "several-sinks",
    "dropout",
    "keep",
    "dlse",
    "positions",
    "q-offset",
    "scale",
    "unequal-lengths",
    "empty-rows",
    "padding-slots",
)
DOCUMENT_FEATURES = ("prefix",)
SCHEME_FEATURES = (
    "replicated-tokens",
    "kv-replicas",
    "padded-documents",
    "empty-ranks",
    "multi-token-decode",
    "mla",
)
SCHEME_TERMS = ("bias", "sinks", "several-sinks", "dropout", "keep", "dlse")
"""Of :data:`FEATURES`, those that cases of schemes need."""
FORMATS = ("bfloat16", "float16", "float32", "float64")
NAMES: dict[str, Any] = {
    "operations": OPERATIONS + INTEGER_OPERATIONS + SCHEME_OPERATIONS,
    "layouts": LAYOUTS + DOCUMENT_LAYOUTS,
    "circulations": CIRCULATIONS,
    "masks": MASKS,
    "features": FEATURES + DOCUMENT_FEATURES + SCHEME_FEATURES,
    "schemes": SCHEMES,
    "formats": FORMATS,
}
CONVENTIONS = {
    "lse": ("natural", "base2", "hidden"),
    "lse_of_empty_rows": ("minus-infinity", "plus-infinity", "finite"),
    "axes": ("BHSD", "BSHD", "SBHD", "HSD", "SHD"),
    "invariant_under_workers": ("nothing", "unmerged-rows", "all"),
}

EACH_WORKER = "workers"
"""The value of ``kv_heads_multiple`` that stands for the number of workers of a call."""


@dataclass(frozen=True)
class Capabilities:
    """The claims of a target. The defaults claim a plain ring, with or without a causal mask.

    Lists of names: ``operations``, ``layouts``, ``circulations`` (None: any), ``masks``, ``features``, ``formats``.
    This module lists the possible names. ``only_causal``: True if the target cannot run without a causal mask.

    Supported values (None: all): ``workers``, ``head_ratios`` (H / Hkv), ``head_dims``, ``value_dims``, ``batch``,
    ``directions``. ``value_dim_equals_head_dim``: True if the target needs Dv = D. ``tokens_multiple``: the number of
    tokens on each worker must be a multiple of it. ``kv_heads_multiple``: Hkv must be a multiple of it, as in an
    implementation that divides heads among workers; 'workers' stands for W.

    Of the operation 'context_parallel': ``schemes``, the names of the schemes (by default none); ``meshes``, the axes of
    their meshes, outermost first, such as 'ring x ulysses'; ``interleaves``, sizes of the blocks in which the keys of a
    cache are distributed (both None: all). These cases run only for a target that claims a scheme.

    Conventions: ``lse`` is natural, base2 or hidden (not returned); ``lse_of_empty_rows`` is the value of lse in rows
    without visible keys; ``axes`` is the order of axes of q, k, v, dy, o and the gradients. ``repeats_bitwise``: equal
    calls give equal bits.

    ``invariant_under_workers``: which bits do not depend on the number of workers W. 'all': those of every result, as with
    Ulysses. 'unmerged-rows': those of a ring's rows whose keys are on one worker, so that nothing is merged; every other
    row may change with W. 'nothing' (default): no promise. Only a target that promises something gets the cases
    ``property/worker-bits``.

    ``recipe``: where the target rounds, and to which format. It is the name of a recipe for all input formats, or a
    mapping from each input format to a name or to changes. Changes are rounding points and tiles that differ from those
    of the recipe ``base``. None: not declared; the recipe of the input format is assumed. See
    :func:`ringspec.conformance.target.declared.declared_recipe`.

    >>> ours = {"bfloat16": {"base": "bf16", "tile_dq": "bfloat16", "tile_k": 512}, "float32": "float32"}
    >>> Capabilities(formats=("bfloat16", "float32"), recipe=ours).recipe["bfloat16"]["tile_k"]
    512
    """

    operations: tuple[str, ...] = ("ring-forward", "ring-backward")
    layouts: tuple[str, ...] = ("contiguous",)
    circulations: tuple[str, ...] | None = None
    directions: tuple[int, ...] | None = None
    workers: tuple[int, ...] | None = None
    masks: tuple[str, ...] = ("causal",)
    only_causal: bool = False
    features: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("float32",)
    head_ratios: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    value_dims: tuple[int, ...] | None = None
    value_dim_equals_head_dim: bool = False
    tokens_multiple: int = 1
    kv_heads_multiple: int | str = 1
    batch: tuple[int, ...] | None = None
    lse: str = "natural"
    lse_of_empty_rows: str = "minus-infinity"
    axes: str = "BHSD"
    repeats_bitwise: bool = False
    recipe: Declared = field(default=None, hash=False)  # a mapping has no hash
    schemes: tuple[str, ...] = ()
    meshes: tuple[str, ...] | None = None
    interleaves: tuple[int, ...] | None = None
    invariant_under_workers: str = "nothing"

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if str(f.type).startswith("tuple") and isinstance(value, (str, int)):
                object.__setattr__(self, f.name, (value,))  # "causal" is one name, not six
            elif isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
                object.__setattr__(self, f.name, tuple(value))
        for name, names in NAMES.items():
            for value in getattr(self, name) or ():
                check_name(f"a name in {name}", value, names)
        for name, names in CONVENTIONS.items():
            check_name(f"a convention {name}", getattr(self, name), names)
        check_declared(self.recipe)
        if not (type(self.tokens_multiple) is int and self.tokens_multiple >= 1):
            raise OptionError(
                "tokens_multiple >= 1", shown(self.tokens_multiple), "pass 1 if any length works"
            )
        multiple = self.kv_heads_multiple
        if multiple != EACH_WORKER and not (type(multiple) is int and multiple >= 1):
            raise OptionError(
                f"kv_heads_multiple >= 1, or {EACH_WORKER!r}",
                shown(multiple),
                "pass 1 if any number of heads works",
            )

    def kv_heads_unit(self, workers: int) -> int:
        """Return the number of which Hkv must be a multiple in a ring of this many workers.

        >>> Capabilities(kv_heads_multiple="workers").kv_heads_unit(4), Capabilities().kv_heads_unit(4)
        (4, 1)
        """
        multiple = self.kv_heads_multiple
        return multiple if isinstance(multiple, int) else workers

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for reports and for programs in other languages; claims of schemes only if there are any.

        A promise of bits for every number of workers is left out if there is none.
        """
        own = () if self.schemes else ("schemes", "meshes", "interleaves")
        if self.invariant_under_workers == "nothing":
            own = (*own, "invariant_under_workers")
        return {name: x for name, x in dataclasses.asdict(self).items() if name not in own}


def capabilities_from(data: Mapping[str, Any]) -> Capabilities:
    """Make capabilities from plain data, such as JSON from a program in another language.

    Raises OptionError for an unknown key, and the errors that :class:`Capabilities` raises.

    >>> capabilities_from({"layouts": ["zigzag"], "workers": [2, 4]}).workers
    (2, 4)
    """
    known = [f.name for f in dataclasses.fields(Capabilities)]
    for name in data:
        check_name("the name of a capability", name, known)
    return Capabilities(**dict(data))


def why_not(claims: Capabilities, needs: Mapping[str, Any]) -> str | None:
    """Return the first requirement of a case that a target does not claim; None if it claims all.

    ``needs``: the requirements, as ``ringspec.vectors.format.requires`` makes them.

    >>> why_not(Capabilities(), {"operation": "ring", "passes": ("forward",), "layout": "zigzag"})
    'layout zigzag'
    """
    for operation in operations(needs):
        if operation not in claims.operations:
            return f"operation {operation}"
    for key, claimed in (
        ("scheme", claims.schemes),
        ("mesh", claims.meshes),
        ("interleave", claims.interleaves),
        ("layout", claims.layouts),
        ("circulation", claims.circulations),
        ("direction", claims.directions),
        ("workers", claims.workers),
        ("inputs", claims.formats),
        ("outputs", claims.formats),
        ("head_ratio", claims.head_ratios),
        ("head_dim", claims.head_dims),
        ("value_dim", claims.value_dims),
        ("batch", claims.batch),
    ):
        if key in needs and claimed is not None and needs[key] not in claimed:
            return f"{key} {needs[key]}"
    for key, several in (("masks", claims.masks), ("features", claims.features)):
        for name in needs.get(key, ()):
            if name not in several:
                return f"{key[:-1]} {name}"
    if claims.only_causal and "masks" in needs and "causal" not in needs["masks"]:
        return "attention that is not causal"
    if claims.value_dim_equals_head_dim and needs.get("value_dim") != needs.get("head_dim"):
        return f"value_dim {needs.get('value_dim')} with head_dim {needs.get('head_dim')}"
    for tokens in needs.get("tokens_per_worker", ()):
        if tokens % claims.tokens_multiple != 0:
            return f"{tokens} tokens per worker"
    if "head_ratio" in needs:
        kv_heads = needs["heads"] // needs["head_ratio"]
        unit = claims.kv_heads_unit(needs.get("workers", 1))
        if kv_heads % unit != 0:
            return f"{kv_heads} heads of k and v, not a multiple of {unit}"
    return None


def operations(needs: Mapping[str, Any]) -> tuple[str, ...]:
    """List the operations that a case requires, by their names in :data:`OPERATIONS`."""
    operation = needs["operation"]
    if operation == "merge":
        return ("merge",)
    return tuple(
        f"{'ring' if operation == 'attention' else operation}-{one}" for one in needs["passes"]
    )
