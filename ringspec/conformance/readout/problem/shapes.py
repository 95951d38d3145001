"""The sizes and the ring of a readout, for a target with given claims, or the reason why the target cannot run it.

A *target* is the implementation under test. Its *claims* say what it supports.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout.problem.geometry import (
    PER_DOCUMENT,
    Geometry,
    document_starts,
    positions,
    with_padding,
)
from ringspec.conformance.readout.problem.settings import (
    BANDED,
    BATCH,
    CAUSAL,
    CIRCULATIONS,
    CLAIMED,
    FEATURES,
    FORMATS,
    GROUPS_OF_HEADS,
    IN_TILES,
    LAYOUTS,
    MOST_SLOTS,
    NARROW,
    PACKED,
    SLOTS,
    WINDOWS,
    WORKERS,
    Setting,
)
from ringspec.conformance.target.capabilities import Capabilities

SOFTCAP = 4.5  # the largest scores are 6
DROPOUT = 0.375, 20240230  # dropout_p, and a dropout_seed with which every query keeps a key
WINDOW = (5, 2)  # beside a causal mask; without one, by layout:
BANDS = {"contiguous": (5, 2), "zigzag": (5, 0), "striped": (5, 2)}
BAND_IN_DOCUMENTS = (3, 2)  # narrow enough to hide keys on both sides in the shortest document
# Of the settings with a scale of their own: 1/sqrt(D) of no head dimension that is used.
SCALE = 0.21
HEAD_DIMENSION = "a head dimension"
OF_SHAPE = (HEAD_DIMENSION, "at most")


def subject_of(geometry: Geometry) -> str:
    """Return what a problem is about besides the ring: 'window', 'documents', one of FEATURES or ''."""
    return next(
        (name for name in ("documents", "window", *FEATURES) if getattr(geometry, name)), ""
    )


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

    In the target's call, the tokens lie ``spread`` slots apart (:mod:`ringspec.conformance.readout.problem.spread`).
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
