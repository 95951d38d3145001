"""The mistakes that a block can have in either pass: in its mask, scores, bias and dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ringspec.conformance.readout.faults.choices import (
    CAPS,
    DROPS,
    DROPS_IN_DS,
    DROPS_IN_L,
    DS_FORMS,
    components,
    home,
)
from ringspec.conformance.readout.faults.kinds import Kind, factors, factors_beside_scores
from ringspec.conformance.readout.faults.masks import every_mask, numbers_of
from ringspec.conformance.readout.faults.operands import Operand, of_tables
from ringspec.conformance.readout.faults.product_kinds import DS_WORDS, IN_HIDDEN_PAIRS, blocks_left
from ringspec.conformance.readout.faults.sources import ranges
from ringspec.conformance.readout.faults.visible import Mask
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans

CAP_WORDS = {
    "none": "the soft cap is not applied",
    "before the scale": "the soft cap is applied before the scale",
    "not multiplied back": "scores are tanh(s / cap), not multiplied by the cap",
    "not divided": "scores are cap tanh(s), with s not divided by the cap",
    "twice": "the soft cap is applied twice",
}


# The end of the words of a rule about tiles.
NOT_MASKED = "that should be masked in part are not masked"


def block_parts(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Iterator[Kind]]:
    """Yield the mistakes that a block can have in either pass, in parts, such as a wrong mask or a factor on the scores."""
    yield mask_kinds(geometry, phase, masks, distinct)
    yield count_kinds(geometry, phase, masks)
    yield score_kinds(geometry, distinct)
    if geometry.bias:
        yield bias_kinds(geometry, phase, distinct)
    if geometry.dropout is not None:
        yield drop_kinds(geometry, phase, distinct, geometry.dropout)
    yield repeated_kinds(geometry, phase, masks, distinct)


def mask_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """Yield the wrong masks; in a backward pass, also those of single products."""
    number_of = numbers_of(masks)
    for mask in masks if distinct else every_mask(geometry):
        if mask.of_tiles and (mask.pattern | ~masks[0].pattern).all() and phase == "backward":
            words = f"the product for dv (not dS) is made as if {mask.words}"
            changes = (("value_mask", number_of(mask.pattern)),)
            yield Kind(words, changes, mask.cost + 0.2, of_tiles=True)
            computed = (("computed", number_of(mask.pattern)),)
            for form in IN_HIDDEN_PAIRS:
                what = "includes hidden pairs" if form == "hidden pairs" else f"is {DS_WORDS[form]}"
                words = f"dS {what}, as if {mask.words}"
                both = tuple((name, DS_FORMS.index(form)) for name in ("dq_form", "dk_form"))
                yield Kind(words, (*both, *computed), mask.cost + 0.1, of_tiles=True)
                # A kernel that computes whole tiles has its hidden pairs in one product alone.
                alone = mask.words.endswith(NOT_MASKED) and form != "hidden pairs"
                for product, change in zip(("dq", "dk"), both, strict=True) if alone else ():
                    words = f"the product for {product} takes {DS_WORDS[form]}, as if {mask.words}"
                    yield Kind(words, (change, *computed), mask.cost + 0.15, of_tiles=True)
        if mask.words:
            changes = (("mask", number_of(mask.pattern)),)
            yield Kind(mask.words, changes, mask.cost, of_tiles=mask.of_tiles)


def count_kinds(geometry: Geometry, phase: str, masks: Sequence[Mask]) -> Iterator[Kind]:
    """Yield the mistakes in what hidden pairs add, and in how often a block counts."""
    forward = phase == "forward"
    if not geometry.sees_all:
        everything = next(n for n, mask in enumerate(masks) if mask.pattern.all())
        yield Kind("hidden pairs get the score 0, not -inf", (("hidden_score", 0.0),), 1.1)
        product = "with the values (the row sums are" if forward else "for dv (dS is"
        words = f"hidden pairs, also of fully masked blocks, are included in the product {product} correct)"
        yield Kind(words, (("value_mask", everything),), 1.2)
    nothing = next(n for n, mask in enumerate(masks) if not mask.pattern.any())
    words = "visible pairs enter the row sums and not the product with the values"
    if not forward:
        words = "visible pairs are left out of the product for dv (dS is correct)"
    yield Kind(words, (("value_mask", nothing),), 1.3)
    yield Kind("the block is not computed", (("count", 0.0),), 0.9)
    yield Kind("the block is counted twice", (("count", 2.0),), 0.9)
    yield Kind("the block is counted three times", (("count", 3.0),), 1.3)


def score_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield wrong factors on the scores, and wrong soft caps."""
    for words, value in factors(geometry, distinct):
        yield Kind(f"scores are {words}", (("times", value),))
    words = "each block's mean over its keys is subtracted from the scores"
    yield Kind(words, (("centred", True),), 1.2)
    if geometry.softcap is not None:
        for name, words in CAP_WORDS.items():
            yield Kind(words, (("cap", CAPS.index(name)),), 0.95)
        if not geometry.sees_all:
            words = "hidden pairs get the score -cap (they are masked before the soft cap)"
            yield Kind(words, (("hidden_score", -geometry.softcap),), 1.0)


def repeated_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """Yield the mistakes that multiply the scores again in every step, or by a number of heads."""
    yield Kind("all scores are 0", (("times", 0.0),), 1.2)
    step = geometry.steps(phase)[:, :, None, None, None]
    yield Kind(
        "scores are multiplied by the scale once more in every step",
        (("times", geometry.scale**step),),
        1.2,
    )
    words = "scores are multiplied by the scale once more with each block that the query sees"
    before = blocks_before(geometry, phase, masks[0].pattern)
    if not (distinct and (before == step).all()):
        yield Kind(words, (("times", geometry.scale**before),), 1.2)
    yield Kind("scores are doubled in every step", (("times", 2.0**step),), 1.4)
    j, start, _ = ranges(geometry, "k")
    for size in range(2, geometry.run):
        words = f"scores are multiplied by the scale once more in each later tile of {size} keys of a block"
        yield Kind(words, (("times", geometry.scale ** np.maximum((j - start) // size, 0)),), 1.25)
    for of, number in (("query", geometry.heads), ("key", geometry.heads // geometry.group)):
        words = f"scores are divided by the square root of the number of {of} heads as well"
        if number > 1 and not (distinct and number == 4):
            yield Kind(words, (("times", number**-0.5),), 1.3)


def bias_kinds(geometry: Geometry, phase: str, distinct: bool) -> Iterator[Kind]:
    """Yield the faults of adding the bias to the scores, in either pass."""
    yield Kind("the bias is left out", (("bias_times", 0.0),), 0.95)
    for words, value in factors_beside_scores(geometry, distinct):
        yield Kind(f"the bias is {words}", (("bias_times", value),), 1.0)
    yield from of_tables(geometry, phase, distinct, ("bias_q", "bias_k"), "bias", Operand.taken)
    of_q, of_k = home(geometry, "q"), home(geometry, "k")
    rows, columns = (of_k[0], of_q[1], of_k[2]), (of_q[0], of_k[1], of_q[2])
    tables = zip((*components("bias_q"), *components("bias_k")), (*rows, *columns), strict=True)
    yield Kind("the bias is transposed", tuple(tables), 1.1)


def drop_kinds(
    geometry: Geometry, phase: str, distinct: bool, dropout: tuple[float, int | None]
) -> Iterator[Kind]:
    """Yield the faults of the dropout mask: at wrong tokens, wrongly scaled, or applied in the wrong place."""
    less = 1 - dropout[0]
    yield Kind("dropout is left out", (("drop", DROPS.index("none")),), 0.95)
    yield Kind("the dropout mask is inverted", (("drop", DROPS.index("inverted")),), 0.95)
    if dropout[1] is not None:
        yield Kind(
            "the dropout mask is that of the seed + 1", (("drop", DROPS.index("next seed")),)
        )
    for words, value in (
        ("not divided by 1 - dropout_p", less), ("divided by 1 - dropout_p twice", 1 / less),
        ("multiplied by 1 - dropout_p, not divided by it", less * less),
    ):  # fmt: skip
        yield Kind(f"kept weights are {words}", (("drop_times", value),), 0.95)
    at = np.argsort(geometry.position.ravel())[np.arange(geometry.slots)]
    worker, slot = np.divmod(at, geometry.slots)
    of_q, of_k = (
        tuple(
            (f"drop_{side}.{one}", x.reshape(axes))
            for one, x in (("worker", worker), ("slot", slot))
        )
        for side, axes in (("q", (1, 1, 1, -1, 1)), ("k", (1, 1, 1, 1, -1)))
    )
    for changes, words in ((of_k, "key"), (of_q, "query"), ((*of_q, *of_k), "query and key")):
        words = f"the dropout mask is taken at the {words} slot within the worker, not at the global position"
        yield Kind(words, changes, 0.9)
    yield from of_tables(
        geometry, phase, distinct, ("drop_q", "drop_k"), "dropout mask", Operand.taken
    )
    rows, columns = home(geometry, "k"), home(geometry, "q")
    tables = zip(
        (*components("drop_q"), *components("drop_k")),
        (rows[0], columns[1], rows[2], *columns),
        strict=True,
    )
    yield Kind("the dropout mask is transposed", tuple(tables), 1.1)
    if phase == "forward":
        number = DROPS_IN_L.index("kept")
        words = "the row sums are those of the kept weights"
        yield Kind(
            f"{words}, divided by 1 - dropout_p",
            (("drop_l", DROPS_IN_L.index("kept and divided")),),
        )
        yield Kind(words, (("drop_l", number),))
        yield Kind(
            f"{words}, and o is not divided by 1 - dropout_p",
            (("drop_l", number), ("drop_times", less)),
        )
        return
    yield Kind("the product for dv lacks dropout", (("drop_dv", 1),), 1.0)
    for name, words in (
        ("not in dp", "dp lacks dropout"), ("in p too", "dS is p (dp - delta) with dropout in p as well as in dp"),
        ("in p, not in dp", "dS is p (dp - delta) with dropout in p, not in dp"),
    ):  # fmt: skip
        yield Kind(words, (("drop_ds", DROPS_IN_DS.index(name)),), 1.0)


def blocks_before(geometry: Geometry, phase: str, visible: Booleans) -> Array:
    """Return how many earlier blocks the query of a pair sees, [a, b, 1, i, 1 or j]; an own chunk may be a block.

    ``visible``: the correct mask.
    """
    whole = (geometry.workers, geometry.workers, *visible.shape[2:])
    sees = np.asarray(np.broadcast_to(visible, whole).any(axis=4, keepdims=True))
    found = sees.sum(axis=1, keepdims=True) - blocks_left(geometry, phase, sees, 1)
    run, own = geometry.own_run, geometry.own_blocks
    if run == geometry.run:
        return np.asarray(found)
    first, second = (visible[..., x : x + run].any(axis=4, keepdims=True) for x in (0, run))
    both = np.asarray((own & first & second).any(axis=1, keepdims=True))
    later = (np.arange(geometry.slots) >= run) & own
    return np.asarray(found + both * (later | ~own))
