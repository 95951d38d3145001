"""The readouts: problems of ring attention whose results show what a target computed for each pair of tokens.

A *target* is the implementation under test. Its *claims* say what it supports, and it is called only with problems that
it claims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.cases.calls import call_of, forward_alone
from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.cases.problems import over
from ringspec.conformance.readout.geometry import (
    PER_DOCUMENT,
    Geometry,
    document_starts,
    positions,
    with_padding,
)
from ringspec.conformance.readout.pairs import Pairs, inputs_of, pairs_of
from ringspec.conformance.readout.tiles import spread_out, with_mark
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load, store
from ringspec.problem.model import Array, Integers
from ringspec.vectors.catalogue import build
from ringspec.vectors.format.case import Case, Ring, TensorRecipe

MOST, MOST_WINDOWS = 6, 2
FEATURES = ("softcap", "dlse", "sinks", "bias", "dropout", "padding", "batches")
BATCH = 3
BANDED = "documents-band"  # a window in each document, without a causal mask
# In place of a worker, a group of heads that has all tokens: each worker's tokens are a document of their own.
HEADS, FULL_HEADS = "heads", "heads-full"
# The names under which a target claims a feature, any one of them, if these are not the feature's name alone. A batch
# is not claimed as a feature.
CLAIMED: dict[str, tuple[str, ...]] = {
    "dropout": ("dropout", "keep"),
    "padding": ("padding-slots",),
    "batches": (),
}
CAUSAL, WINDOWS = ("causal", "window", "documents", HEADS, *FEATURES), ("window", "band", BANDED)
PACKED = "documents", BANDED
GROUPS_OF_HEADS = HEADS, FULL_HEADS
SOFTCAP = 4.5  # the largest scores are 6
DROPOUT = 0.375, 20240230  # dropout_p, and a dropout_seed with which every query keeps a key
WORKERS, MORE_WORKERS, SLOTS, MOST_SLOTS = 3, 4, 8, 16
ODD_SLOTS = 11  # with it, tiles of any size but 11 are cut short at the end of a shard
WINDOW = (5, 2)  # beside a causal mask; without one, by layout:
BANDS = {"contiguous": (5, 2), "zigzag": (5, 0), "striped": (5, 2)}
BAND_IN_DOCUMENTS = (3, 2)  # narrow enough to hide keys on both sides in the shortest document
LAYOUTS = ("contiguous", "zigzag", "striped")
CIRCULATIONS = ("kv", "q", "gather")
NARROW = ("bfloat16", "float16")
FORMATS = ("float32", "float64", *reversed(NARROW))
DTYPES = {"float32": "f32", "float64": "f64", "float16": "fp16", "bfloat16": "bf16"}
# Relative to the sizes of a number's parts. Those of 16-bit formats leave room for 16-bit partial results and lse.
COARSE = 0.05
PROOF_DIM = 12  # no power of two, whose scale would hide in another factor
SCALE = (
    0.21  # of the settings with a scale of their own: 1/sqrt(D) of no head dimension that is used
)
REASON = "Results that spell out the weight of each pair of tokens."
Asked = tuple[Case, Call]
BACKWARDS = "backwards"  # in the id of a problem with direction -1
HEAD_DIMENSION = "a head dimension"
OF_SHAPE = (HEAD_DIMENSION, "at most")
TOLERANCES = {"float64": 2e-4, "float32": 2e-4, "float16": 0.02, "bfloat16": COARSE}


@dataclass(frozen=True)
class Setting:
    """What distinguishes one readout from another: its mask, layout, circulation, direction and sizes.

    ``mask`` is 'causal', 'full', 'window' (a window and a causal mask) or 'band' (a window alone). ``circulation`` ''
    is the first of 'kv', 'q', 'gather' that the target claims. ``group`` is the number of query heads per key head.
    ``workers`` and ``group`` None are 3 and 2 if the target claims these numbers, and otherwise a number that it
    claims. ``narrow``: the inputs have 16 bits. ``scaled``: the call gives a scale, which is not 1/sqrt(D).
    """

    mask: str
    layout: str
    circulation: str = "kv"
    direction: int = 1
    workers: int | None = None
    group: int | None = None
    narrow: bool = False
    scaled: bool = False
    slots: int | None = None

    @property
    def id(self) -> str:
        """The id of the case with this setting, such as 'readout/causal-contiguous-kv'."""
        parts = [self.mask, self.layout, *([self.circulation] if self.circulation else [])]
        parts += [BACKWARDS] if self.direction < 0 else []
        parts += [] if self.workers is None else [f"w{self.workers}"]
        parts += [] if self.group is None else [f"ratio{self.group}"]
        parts += [] if self.slots is None else [f"n{self.slots}"]
        parts += (["16bit"] if self.narrow else []) + (["scale"] if self.scaled else [])
        return "readout/" + "-".join(parts)


def usual_settings() -> Iterator[Setting]:
    """Yield settings with different masks, layouts and circulations, the most informative first."""
    for circulation in CIRCULATIONS:
        for layout in LAYOUTS:
            yield Setting("causal", layout, circulation)
            if circulation == "kv" or layout == LAYOUTS[0]:
                yield Setting("full", layout, circulation)
    for layout in LAYOUTS:
        yield Setting("window", layout, "")
        yield Setting("band", layout, "")
    for layout in (*LAYOUTS, PER_DOCUMENT):
        yield Setting("documents", layout, "")
    yield Setting(BANDED, PER_DOCUMENT, "")
    for feature in FEATURES:
        yield Setting(feature, "table" if feature == "padding" else LAYOUTS[0], "")


def other_settings() -> Iterator[Setting]:
    """Yield settings for the other direction, rounding, a scale of their own, more workers and other head counts."""
    for circulation in CIRCULATIONS[:2]:
        yield Setting("causal", LAYOUTS[0], circulation, direction=-1)
    yield Setting("causal", LAYOUTS[0], "", scaled=True)
    yield Setting("causal", LAYOUTS[1], narrow=True)
    yield Setting("causal", LAYOUTS[0], workers=MORE_WORKERS)
    for group in (1, 4):
        yield Setting("causal", LAYOUTS[0], group=group)


USUAL = tuple(usual_settings())
# In explain, targets that claim these features are also read in another layout, or only there.
IN_OTHER_LAYOUTS = tuple(
    Setting(feature, layout, "")
    for feature in ("sinks", "bias", "dropout")
    for layout in LAYOUTS[1:]
)
# In explain, targets that claim these are read in them, too; in those with sizes of their own only if all others are
# right, because lists of pairs found in one size say nothing about another.
OF_CALLS = (
    Setting("causal", LAYOUTS[0], "q"),
    Setting("causal", LAYOUTS[0], "gather"),
    Setting("causal", LAYOUTS[0], "", direction=-1),
    Setting("causal", LAYOUTS[1], "", direction=-1),
    Setting("causal", LAYOUTS[2], "", direction=-1),
    Setting("full", LAYOUTS[1], ""),
    Setting("full", LAYOUTS[2], ""),
    Setting("window", LAYOUTS[1], ""),
    Setting("window", LAYOUTS[2], ""),
    Setting("causal", LAYOUTS[0], "", scaled=True),
    Setting("causal", LAYOUTS[0], "", workers=MORE_WORKERS),
    Setting("causal", LAYOUTS[0], "", slots=ODD_SLOTS),
)
# Those that a kernel with large tiles gets, too: their exact truth takes seconds.
IN_TILES = tuple(
    Setting(mask, layout) for mask, layout in (("causal", "contiguous"), ("causal", "zigzag"), ("full", "contiguous"))
)  # fmt: skip
SETTINGS = (*USUAL, *other_settings())


@dataclass(frozen=True)
class Problem:
    """Two calls of a target: the results of the first spell out what it computes, the second has random inputs.

    ``call`` and ``proof`` are these calls, in the same ring. What is read from ``call`` must also explain the results
    of ``proof``. ``cases`` are the cases of the two calls; their expected results decide whether the target passes.
    ``asked`` are the calls that the target gets. If ``spread`` is above 1, these calls have ``spread`` slots for each
    token of ``call`` and ``proof``, because the target needs whole tiles. In a problem about batches, they have one
    head, and batch entries in place of the heads of ``call`` and ``proof``. ``requires`` are the claims that the calls in
    ``asked`` need.
    """

    pairs: Pairs
    tolerance: float
    call: Call
    proof: Call
    asked: tuple[Call, Call]
    cases: tuple[Case, Case]
    requires: Mapping[str, Any]
    spread: int = 1

    @property
    def id(self) -> str:
        return self.cases[0].id

    @property
    def inputs(self) -> dict[str, Array]:
        """q, dy [W, H, n, dim] and k, v [W, Hkv, n, dim] of ``call``."""
        inputs = inputs_of(self.pairs, self.call.worker("q", 0).shape[3])
        return inputs if self.spread == 1 else with_mark(inputs)

    @property
    def of_other_sizes(self) -> bool:
        """Tell whether the problem has another number of workers or slots than most."""
        geometry = self.pairs.geometry
        return geometry.slots == ODD_SLOTS or f"-w{geometry.workers}" in self.id

    def results(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        """Return the results of ``call`` and ``proof``, given the outputs of the calls in ``asked``."""
        if self.pairs.geometry.batches:
            return [{name: exchanged(x) for name, x in one.items()} for one in outputs]
        if self.spread == 1:
            return list(outputs)
        return [
            {name: tuple(x[:, :, :: self.spread] for x in shards) for name, shards in one.items()}
            for one in outputs
        ]

    def in_batches(self, results: Outputs) -> tuple[Call, Outputs]:
        """Return ``call`` and its results, in a problem about batches with batch entries in place of heads."""
        if not self.pairs.geometry.batches:
            return self.call, results
        return self.asked[0], {name: exchanged(x) for name, x in results.items()}


def settings_for(claims: Capabilities) -> tuple[list[Setting], str]:
    """Return the settings of the problems for a target with these claims; if there are none, also the reason.

    After the usual ones come those of other circulations, of the other direction, of other layouts without a mask or
    with a window, of a given scale, of four workers, of an odd length, with documents and with other features, in this
    order.
    Sinks, a bias and dropout are read in at most two layouts.
    """
    found: dict[str, list[Setting]] = {}
    reasons = []
    for setting in (*USUAL, *IN_OTHER_LAYOUTS):
        shape = unclaimed(setting, claims) or shape_for(claims, setting)
        if isinstance(shape, str):
            reasons.append(shape)
        else:
            name = group_of(geometry_for(setting, shape, claims))
            found.setdefault(name, []).append(setting)
    windows, packed, others, *features = (
        found.get(name, []) for name in ("window", "documents", "", *FEATURES)
    )
    read = sorted({one.layout for one in USUAL if one.mask != "padding"})
    last = max(reasons, key=lambda reason: reason.startswith(OF_SHAPE), default="")
    if not set(read) & set(claims.layouts):
        last = f"one of the layouts {', '.join(read)}"
    chosen = [*others[: MOST - min(len(windows), MOST_WINDOWS)], *windows][:MOST]
    in_layouts = chain(*(settings[:2] for settings in features))
    known = {with_circulation(one, claims) for one in chosen}
    of_calls = [
        one
        for one in OF_CALLS
        if with_circulation(one, claims) not in known
        and not unclaimed(one, claims)
        and isinstance(shape_for(claims, one), Shape)
    ]
    in_documents = [one for one in packed if one.mask == BANDED or one == packed[0]]
    return [*chosen, *of_calls, *in_documents, *in_layouts], "" if found else f"it needs {last}"


def problems_for(claims: Capabilities) -> tuple[list[Problem], str]:
    """Return the problems of :func:`settings_for`; if there are none, also the reason."""
    settings, reason = settings_for(claims)
    return [problem_of(setting, claims) for setting in settings], reason


def problem_of(setting: Setting, claims: Capabilities) -> Problem:
    """Return the problem of one of the settings for a target with these claims."""
    made = problem_for(setting, claims)
    assert isinstance(made, Problem), made
    return made


def group_of(geometry: Geometry) -> str:
    """Return what a problem is about besides the ring: 'window', 'documents', one of FEATURES or ''."""
    return next(
        (name for name in ("documents", "window", *FEATURES) if getattr(geometry, name)), ""
    )


@lru_cache(maxsize=64)
def problem_for(setting: Setting, claims: Capabilities) -> Problem | str:
    """Return the problem of a setting for a target with these claims, or the reason why there is none."""
    reason = unclaimed(setting, claims)
    if reason:
        return reason
    names = [name for name in (NARROW if setting.narrow else FORMATS) if name in claims.formats]
    shape = shape_for(claims, setting)
    return shape if isinstance(shape, str) else problem(setting, names[0], shape, claims)


def unclaimed(setting: Setting, claims: Capabilities) -> str:
    """Return what a target with these claims lacks for a setting; '' if it lacks nothing."""
    usual = usual_workers(claims)
    several = set(claims.layouts) & set(LAYOUTS)
    reasons = {
        "a forward pass (operation ring-forward)": "ring-forward" not in claims.operations,
        f"layout {setting.layout}": setting.layout not in claims.layouts,
        "mask causal": setting.mask in CAUSAL and "causal" not in claims.masks,
        "mask window": setting.mask in WINDOWS and "window" not in claims.masks,
        "mask documents": setting.mask in PACKED and "documents" not in claims.masks,
        f"feature {setting.mask}": bool(names_of(setting.mask))
        and not set(names_of(setting.mask)) & set(claims.features),
        "a backward pass (operation ring-backward)": setting.mask == "dlse"
        and "ring-backward" not in claims.operations,
        "a call without a causal mask": setting.mask not in CAUSAL and claims.only_causal,
        "no other layout, which is read without a mask": setting.mask == "full"
        and setting.layout != LAYOUTS[0]
        and setting.circulation != ""
        and bool(several - {setting.layout})
        and "causal" in claims.masks,
        f"circulation {setting.circulation}": circulation_of(setting, claims)
        not in (claims.circulations or ("kv",)),
        f"direction {setting.direction}": setting.direction not in (claims.directions or (1, -1))
        and (setting.direction == -1 or -1 not in (claims.directions or ())),
        "several workers": setting.direction == -1 and usual == 1,
        "feature scale": setting.scaled and "scale" not in claims.features,
        "a batch of 1": claims.batch is not None and 1 not in claims.batch,
        f"a batch of {BATCH}": setting.mask == "batches"
        and claims.batch is not None
        and BATCH not in claims.batch,
        "as many key heads as query heads": setting.mask == "batches"
        and claims.head_ratios is not None
        and 1 not in claims.head_ratios,
        f"{setting.workers} workers": setting.workers is not None
        and (setting.workers == usual or setting.workers not in (claims.workers or (usual, 4))),
        f"{setting.group} query heads of a key head": setting.group is not None
        and (
            setting.group == usual_group(claims)
            or setting.group not in (claims.head_ratios or (1, 2, 4))
        ),
        "a 16-bit format besides a wider one": setting.narrow
        and (not set(NARROW) & set(claims.formats) or set(claims.formats) <= set(NARROW)),
        "an input format": not set(FORMATS) & set(claims.formats),
    }
    missing = [words for words, is_missing in reasons.items() if is_missing]
    return missing[0] if missing else ""


def names_of(mask: str) -> tuple[str, ...]:
    """Return the names under which a target claims the feature of a setting; none if it needs no feature."""
    return CLAIMED.get(mask, (mask,)) if mask in FEATURES else ()


def with_circulation(setting: Setting, claims: Capabilities) -> Setting:
    return dataclasses.replace(setting, circulation=circulation_of(setting, claims))


def circulation_of(setting: Setting, claims: Capabilities) -> str:
    claimed = claims.circulations or ("kv",)
    return setting.circulation or min(claimed, key=CIRCULATIONS.index)


def usual_workers(claims: Capabilities) -> int:
    several = [w for w in claims.workers or (WORKERS,) if w >= WORKERS]
    return min(several) if several else max(claims.workers or (WORKERS,))


def usual_group(claims: Capabilities) -> int:
    ratios = claims.head_ratios or (2, 1)
    return 2 if 2 in ratios else ratios[0]


@dataclass(frozen=True)
class Shape:
    """The sizes of a problem: ``slots`` tokens per worker, ``group`` query heads per key head.

    In the target's call, the tokens lie ``spread`` slots apart (:mod:`ringspec.conformance.readout.tiles`).
    """

    workers: int
    slots: int
    heads: int
    group: int
    dim: int
    spread: int = 1


def shape_for(claims: Capabilities, setting: Setting) -> Shape | str:
    """Return the sizes of a problem for a target with these claims, or the reason why there are none."""
    workers = setting.workers or usual_workers(claims)
    batches = setting.mask == "batches"
    group = 1 if batches else setting.group or usual_group(claims)
    unit = claims.kv_heads_unit(workers)
    if batches and unit != 1:  # each of its entries has one head
        return f"1 head of k and v, not a multiple of {unit}"
    fewest = group * unit
    several_heads = (BATCH,) if batches else (2 * fewest, fewest) if fewest < 4 else (fewest,)
    zigzag = setting.layout in ("zigzag", PER_DOCUMENT)
    multiple = int(np.lcm(claims.tokens_multiple, 2 if zigzag else 1))
    if multiple > MOST_SLOTS and (multiple % SLOTS or setting not in IN_TILES):
        return f"at most {MOST_SLOTS} tokens on a worker"
    spread = multiple // SLOTS if multiple > MOST_SLOTS else 1
    if setting.slots is not None and setting.slots % multiple:
        return f"{setting.slots} tokens on a worker"
    sizes = (SLOTS,) if spread > 1 else (-(-SLOTS // multiple) * multiple, max(multiple, 4))
    sizes = sizes if setting.slots is None else (setting.slots,)
    for slots in dict.fromkeys(sizes):
        for heads in several_heads:
            least = (heads + 1) * workers * slots + (spread > 1)
            dims = claims.head_dims or (least,)
            if claims.value_dims is not None:
                dims = tuple(d for d in dims if d in claims.value_dims)
            fitting = [d for d in dims if d >= least]
            if fitting:
                return Shape(workers, slots, heads, group, min(fitting), spread)
    return f"{HEAD_DIMENSION} of at least {least}, for {workers} workers with {slots} tokens each"


def geometry_for(setting: Setting, shape: Shape, claims: Capabilities) -> Geometry:
    """Return the ring of a setting's problem."""
    mask, layout, documents = setting.mask, setting.layout, None
    if mask in PACKED:
        documents = document_starts(layout, shape.workers, shape.slots)
    elif mask in GROUPS_OF_HEADS:
        documents = tuple(range(0, shape.workers * shape.slots, shape.slots))
    if mask == "padding":
        table = with_padding(shape.workers, shape.slots)
    else:
        table = positions(layout, shape.workers, shape.slots)
    directions = claims.directions or (1,)
    return Geometry(
        shape.workers,
        circulation_of(setting, claims),
        setting.direction if setting.direction in directions else directions[0],
        layout,
        table,
        mask in CAUSAL,
        {"window": WINDOW, "band": BANDS.get(layout), BANDED: BAND_IN_DOCUMENTS}.get(mask),
        shape.heads,
        shape.group,
        SCALE if setting.scaled else shape.dim**-0.5,
        documents=documents,
        softcap=SOFTCAP if mask == "softcap" else None,
        dlse=mask == "dlse",
        sinks=0 if mask != "sinks" else 2 if "several-sinks" in claims.features else 1,
        bias=mask == "bias",
        dropout=DROPOUT if mask == "dropout" else None,
        padding=tuple(np.flatnonzero(table < 0).tolist()),
        batches=mask == "batches",
        usual_scale=shape.dim**-0.5,
    )


def terms_of(setting: Setting, geometry: Geometry, claims: Capabilities) -> dict[str, Any]:
    """Return the terms of the calls of a problem, apart from a scale of 1/sqrt(D)."""
    every: dict[str, Any] = {
        "scale": SCALE if setting.scaled else None,
        "causal": geometry.causal or None,
        "window": geometry.window,
        "cu_seqlens": geometry.documents and (*geometry.documents, geometry.tokens),
        "softcap": geometry.softcap,
    }
    if geometry.dropout is not None:
        every["dropout_p"] = geometry.dropout[0]
        every["dropout_seed"] = geometry.dropout[1] if "dropout" in claims.features else None
    return {name: value for name, value in every.items() if value is not None}


def tables_of(pairs: Pairs, claims: Capabilities) -> dict[str, NDArray]:
    """Return the tensors of a call over pairs of tokens, [a, h, i, (b, j)]: bias and, without counters, keep."""
    counted = "dropout" in claims.features or pairs.keep is None
    keep = None if counted else np.asarray(pairs.keep, bool)
    return {name: x for name, x in (("bias", pairs.bias), ("keep", keep)) if x is not None}


def problem(setting: Setting, storage: str, shape: Shape, claims: Capabilities) -> Problem:
    """Build the problem of a setting: its two calls, and a case for each."""
    workers, heads, group, spread = shape.workers, shape.heads, shape.group, shape.spread
    id, geometry = setting.id, geometry_for(setting, shape, claims)
    layout, circulation, direction = geometry.layout, geometry.circulation, geometry.direction
    pairs = pairs_of(geometry, shape.dim)
    terms = terms_of(setting, geometry, claims)

    def asked(id: str, dim: int, inputs: Mapping[str, Array] | None, spread: int = 1) -> Asked:
        """Return a case and its call, with inputs [W, heads, n, dim]; None: random inputs.

        If ``spread`` is above 1, only the call has the inputs. The case does not have them, and is not used to judge
        results.
        """
        slots = shape.slots * spread
        table = positions(layout, workers, slots) if spread > 1 else geometry.position
        order = np.argsort(table.ravel(), kind="stable")[len(geometry.padding) :]
        whole = {name: in_order(x, order) for name, x in (inputs or {}).items()}
        given: dict[str, Any] = {}
        if spread == 1:
            given = {name: TensorRecipe("values", values=x.tolist()) for name, x in whole.items()}
        if pairs.dlse is not None:
            chosen = in_order(pairs.dlse[..., None], order)[..., 0].tolist()
            given["dlse"] = TensorRecipe("values", values=chosen) if inputs else True
        for name, table in tables_of(pairs, claims).items():
            whole_table = in_order(table, order)[..., order].tolist()
            given[name] = TensorRecipe("values", values=whole_table)
        if pairs.sinks is not None:
            given["sinks"] = TensorRecipe("values", values=pairs.sinks.tolist())
        dtype, tokens = DTYPES[storage], len(order)
        dense = build.case(
            id, REASON, "", S=tokens, H=heads, Hkv=heads // group, D=dim, dtype=dtype, **given, **terms
        )  # fmt: skip
        rows = tuple(map(tuple, table.tolist())) if layout == "table" else None
        case = over(dense, id, Ring(workers, layout, circulation, direction, rows, rows))
        tensors = (
            {} if spread == 1 else {f"in.{name}": store(x, storage) for name, x in whole.items()}
        )
        call = call_of(case, tensors)
        call = dataclasses.replace(call, circulation=circulation, direction=direction)
        return case, call if "ring-backward" in claims.operations else forward_alone(call)

    proof_id, free = f"{id}-proof", claims.head_dims is None and claims.value_dims is None
    proof_dim = PROOF_DIM if free else shape.dim
    read, tolerance = inputs_of(pairs, shape.dim), TOLERANCES[storage]
    if spread == 1:
        first, second = asked(id, shape.dim, read), asked(proof_id, proof_dim, None)
        calls = first[1], second[1]
        cases, requires = (first[0], second[0]), first[0].requires
        if not geometry.batches:
            return Problem(pairs, tolerance, *calls, calls, cases, requires)
        apart = with_batches(first[1]), with_batches(second[1])
        return Problem(pairs, tolerance, *calls, apart, cases, {**requires, "batch": BATCH})
    random = inputs_in(asked(proof_id, proof_dim, None)[1])
    both = ((id, shape.dim, with_mark(read)), (proof_id, proof_dim, with_mark(random)))
    first, second = (asked(*one) for one in both)
    large = [asked(id, dim, spread_out(x, spread), spread) for id, dim, x in both]
    return Problem(
        pairs,
        tolerance,
        first[1],
        second[1],
        (large[0][1], large[1][1]),
        (first[0], second[0]),
        large[0][0].requires,
        spread,
    )


def with_batches(call: Call) -> Call:
    """Return a call with batch entries in place of its heads."""
    return dataclasses.replace(
        call, tensors={name: exchanged(x) for name, x in call.tensors.items()}
    )


def exchanged(shards: Sequence[NDArray]) -> tuple[NDArray, ...]:
    """Exchange the axes of batch and heads, the first two, in the array of each worker."""
    return tuple(np.ascontiguousarray(np.swapaxes(x, 0, 1)) for x in shards)


def inputs_in(call: Call) -> dict[str, Array]:
    """Return the inputs [W, heads, n, dim] of a call with batch size 1."""
    names = [name for name in ("q", "k", "v", "dy") if name in call.tensors]
    return {name: np.stack([load(x)[0] for x in call.tensors[name]]) for name in names}


def in_order(x: NDArray, order: Integers) -> NDArray:
    """Rearrange arrays of workers [W, heads, n, d] into one array [1, heads, S, d] in the order of the tokens."""
    workers, heads, slots, width = x.shape
    return x.swapaxes(0, 1).reshape(heads, workers * slots, width)[None, :, order]
