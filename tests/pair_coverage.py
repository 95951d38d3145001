"""Which values of a case meet in it: pairs of claims that both change its result.

Factors are those of a target's claims. A pair counts where both values matter: a mask term hides
something that the other terms leave visible, a layout and a circulation have two workers or more, a
direction three, the Q ring has a backward.
"""

import dataclasses
from itertools import combinations

from ringspec.vectors.format.case import Case
from ringspec.vectors.format.requires import visible

NONE = ("mask", "none")
TERMS_OF_MASKS = {
    "causal": ("causal",),
    "window": ("window",),
    "documents": ("cu_seqlens", "cu_seqlens_k"),
    "segments": ("segments_q", "segments_k"),
    "bounds": ("bound_min", "bound_max"),
    "dense": ("mask",),
    "bias-minus-infinity": ("bias",),
}
FACTORS = {
    "operation": ("ring-forward", "ring-backward", "block-forward", "block-backward", "merge"),
    "workers": (1, 2, 3, 4, 8),
    "layout": ("contiguous", "striped", "zigzag", "zigzag_per_document", "table"),
    "circulation": ("kv", "q", "gather"),
    "direction": (1, -1),
    "format": ("bfloat16", "float16", "float32", "float64"),
    "head_ratio": (1, 2, 4),
    "mask": ("none", *TERMS_OF_MASKS),
    "feature": (
        "bias", "softcap", "sinks", "several-sinks", "dropout", "keep", "dlse", "positions",
        "q-offset", "scale", "unequal-lengths", "empty-rows", "padding-slots",
    ),
}  # fmt: skip
OF_POSITIONS = {"positions": ("positions_q", "positions_k"), "q-offset": ("q_offset",)}
SEVERAL = ("mask", "feature")  # one problem may have several values of these
OF_RINGS = ("workers", "layout", "circulation", "direction")
# Values that no problem has together. A factor alone stands for all of its values.
IMPOSSIBLE = (
    # A block is one worker's work; sinks and dlse are added once per row, by the ring.
    *((("operation", one), other) for one in ("block-forward", "block-backward") for other in (
        *OF_RINGS, ("feature", "sinks"), ("feature", "several-sinks"), ("feature", "dlse"),
        ("feature", "padding-slots"),
    )),
    # A merge knows formats alone.
    *((("operation", "merge"), other) for other in (*OF_RINGS, "head_ratio", "mask", "feature")),
    (("operation", "ring-forward"), ("circulation", "q")),
    (("operation", "ring-forward"), ("feature", "dlse")),
    *((("workers", 1), other) for other in ("layout", "circulation", "direction")),
    (("workers", 1), ("feature", "padding-slots")),
    (("workers", 2), "direction"),
    (("circulation", "gather"), "direction"),
    (("layout", "zigzag_per_document"), ("mask", "segments")),
    (("layout", "zigzag_per_document"), NONE),
    *((("layout", one), ("feature", "padding-slots")) for one in ("contiguous", "striped", "zigzag")),
    (("mask", "documents"), ("mask", "segments")),
    *((NONE, ("mask", name)) for name in TERMS_OF_MASKS),
    (NONE, ("feature", "empty-rows")),
    (("feature", "dropout"), ("feature", "keep")),
)  # fmt: skip


def possible() -> set[frozenset]:
    """All pairs of values that some problem can have together."""
    values = [(factor, value) for factor, several in FACTORS.items() for value in several]
    return {
        frozenset(pair)
        for pair in combinations(values, 2)
        if (pair[0][0] != pair[1][0] or pair[0][0] in SEVERAL) and not excluded(*pair)
    }


def excluded(a: tuple, b: tuple) -> bool:
    return any(
        (one in (a, a[0]) and other in (b, b[0])) or (one in (b, b[0]) and other in (a, a[0]))
        for one, other in IMPOSSIBLE
    )


def met(case: Case) -> set[frozenset]:
    """The pairs of values that a case has together, both of which change its result."""
    found = set()
    for one in case.passes:
        values = values_of(case, one)
        found |= {
            frozenset(pair) for pair in combinations(sorted(values, key=str), 2)
            if not excluded(*pair)
        }  # fmt: skip
    return found


def values_of(case: Case, one: str) -> set[tuple]:
    """(factor, value) of all that matters in one pass of a case."""
    needs = case.requires
    if case.operation in ("schedule", "merge"):
        return (
            {("operation", "merge"), ("format", needs["inputs"])} if needs.get("parts") else set()
        )
    ring = "ring" if case.operation in ("ring", "attention") else "block"
    found = {
        ("operation", f"{ring}-{one}"),
        ("format", needs["inputs"]),
        ("head_ratio", needs["head_ratio"]),
        *(("mask", name) for name in mattering_masks(case) or ("none",)),
        *(("feature", name) for name in mattering_features(case, one)),
    }
    if ring == "ring":
        workers = needs.get("workers", 1)
        found.add(("workers", workers))
        if workers >= 2:
            found.add(("layout", needs["layout"]))
            if needs["circulation"] != "q" or one == "backward":
                found.add(("circulation", needs["circulation"]))
        if workers >= 3 and needs["circulation"] != "gather":
            found.add(("direction", needs["direction"]))
    return found


def mattering_masks(case: Case) -> list[str]:
    """The mask terms without which the case would have other visible pairs."""
    return [name for name in case.requires["masks"] if hides(case, *TERMS_OF_MASKS[name])]


def mattering_features(case: Case, one: str) -> list[str]:
    """All features but a dlse in the forward, and positions that change no mask and no dropout."""
    found = []
    for name in case.requires["features"]:
        if name == "dlse" and one == "forward":
            continue
        if name in OF_POSITIONS and "dropout" not in case.requires["features"]:
            if not hides(case, *OF_POSITIONS[name]):
                continue
        found.append(name)
    return found


def hides(case: Case, *names: str) -> bool:
    """Whether the visible pairs change without these terms and inputs."""
    terms = {name: x for name, x in case.terms.items() if name not in names}
    tensors = {name: x for name, x in case.inputs.tensors.items() if name not in names}
    other = dataclasses.replace(
        case, terms=terms, inputs=dataclasses.replace(case.inputs, tensors=tensors)
    )
    a, b = visible(case, case.shape), visible(other, case.shape)
    return a.shape[2:] == b.shape[2:] and bool((a != b).any())


def named(pairs: set[frozenset]) -> list[str]:
    """Pairs as text, sorted: 'circulation q with feature sinks'."""
    return sorted(
        " with ".join(f"{factor} {value}" for factor, value in sorted(pair, key=str))
        for pair in pairs
    )
