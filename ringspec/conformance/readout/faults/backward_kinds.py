"""The mistakes that only a backward pass can make, such as a wrong lse, delta or product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringspec.conformance.readout.faults.choices import (
    CAP_SLOPES,
    CAPS,
    DELTAS,
    DS_FORMS,
    KEY_TILES,
    LSES,
)
from ringspec.conformance.readout.faults.kinds import (
    GRADIENTS,
    OWN_SCALE,
    Kind,
    at_counts,
    factors,
    factors_beside_scores,
    factors_on,
    listing,
    verb,
)
from ringspec.conformance.readout.faults.last_tiles import clamped_kinds, copied_kinds
from ringspec.conformance.readout.faults.merge_formulas import LN2
from ringspec.conformance.readout.faults.operands import Operand, operand_kinds
from ringspec.conformance.readout.faults.product_kinds import (
    dbias_kinds,
    goal_kinds,
    overwritten_kinds,
    product_kinds,
    replaced_kinds,
)
from ringspec.conformance.readout.faults.sink_kinds import dsink_kinds
from ringspec.conformance.readout.faults.sources import sources
from ringspec.conformance.readout.faults.visible import Mask
from ringspec.conformance.readout.problem.geometry import Geometry

CAP_SLOPE_WORDS = {
    "none": "dS lacks the derivative of the soft cap",
    "of the capped score": "the derivative of the soft cap is taken at the capped score",
    "not squared": "the derivative of the soft cap is 1 - tanh(s / cap), not 1 - tanh(s / cap)^2",
    "capped score not divided": "the derivative of the soft cap is 1 - s^2 with the capped score s, not divided by the cap",
}

LSE_WORDS = {
    "block": "p is computed with the block's own lse",
    "base 2": "lse is divided by ln 2 (an lse in base 2 is used as if in base e)",
    "times ln 2": "lse is multiplied by ln 2",
    "maximum": "p is computed with the row maximum in place of lse",
    "zero": "p is computed without lse",
    "zero if empty": "where a row sees no key in the forward pass, p is computed without lse",
    "log l": "p is computed with log l in place of lse",
    "last block": "p is computed with the lse of the last block",
    "first block": "p is computed with the lse of the first block",
    "so far": "p is computed with the lse of the blocks up to this one",
    "before the last step": "p is computed with the lse of all blocks but that of the last step",
    "negative": "lse has the wrong sign",
    "block's maximum": "p is computed with the block's row maximum in place of lse",
    "delta": "delta is taken for lse",
    "times scale": "lse is multiplied by the scale",
    "divided by scale": "lse is divided by the scale",
}

DELTA_WORDS = {
    "block": "delta is summed over only the block's keys",
    "so far": "delta is summed over only the keys of the blocks up to this one",
    "none": "delta is left out",
    "block's own p": "delta is <dp, p> of the block, with p normalised over the block",
    "times p": "delta is multiplied by the block's sum of p",
    "lse": "lse is taken for delta",
    "times l": "delta is computed from o before the division by l",
    "first block": "delta is computed from o after the first block",
    "last block": "delta is computed from only the last block's o",
    "block's own o": "delta is <dy, o> of the block's own normalised o",
    "block's p dp twice": "delta contains the block's sum of p dp once more",
    "of the group": "delta is summed over the query heads of a key head",
    "of all heads": "delta is summed over all query heads",
    "mean of all heads": "delta is averaged over all query heads",
}

# A kernel that saves tensors in every step and reads those of the first.
OF_STEP_0 = {
    "keys and values are those of the worker that computes": "the keys, values, lse and o",
    "keys, values and their positions are those of the worker that computes": "the keys, their positions, values, lse and o",
}

DIMS_WORDS = {
    "the first half": (0.0, 0.5), "the second half": (0.5, 1.0), "the first quarter": (0.0, 0.25),
    "the first three quarters": (0.0, 0.75), "the last three quarters": (0.25, 1.0),
}  # fmt: skip


def backward_parts(
    geometry: Geometry, masks: Sequence[Mask], distinct: bool
) -> Iterator[Iterator[Kind]]:
    """Yield the mistakes that only a backward pass can make, in parts, such as a wrong lse, delta or product."""
    yield statistic_kinds(geometry, masks, distinct)
    yield operand_kinds(geometry, "backward", masks, distinct)
    yield product_kinds(geometry, distinct)
    yield zero_kinds()
    yield clamped_kinds(geometry, masks[0].pattern, "backward", distinct)
    yield copied_kinds(geometry, distinct)
    yield overwritten_kinds(geometry, masks[0].pattern, distinct)
    yield replaced_kinds(geometry, masks[0].pattern)
    if geometry.softcap is not None:
        yield softcap_kinds()
    if geometry.dlse:
        yield dlse_kinds(geometry, distinct)
    if geometry.sinks:
        yield dsink_kinds(geometry, distinct)
    if geometry.bias:
        yield dbias_kinds(geometry, distinct)
    yield goal_kinds(geometry, distinct)
    yield factor_kinds(geometry, distinct)
    yield growing_kinds(geometry)


def statistic_kinds(geometry: Geometry, masks: Sequence[Mask], distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes in lse and delta, and in all that a kernel saved in step 0."""
    both = (("lse", LSES.index("block")), ("delta", DELTAS.index("block")))
    yield Kind(
        "p is computed with the block's own lse, and delta is summed over only the block's keys",
        both,
        1.1,
    )
    if geometry.travels("backward") == "keys":
        for kind in operand_kinds(geometry, "backward", masks, distinct):
            saved = OF_STEP_0.get(kind.words)
            if saved:
                yield Kind(f"every step uses {saved} of step 0", (*kind.changes, *both), 1.2)
    if geometry.run < geometry.slots:
        yield from chunk_kinds()
    yield from key_tile_kinds(geometry)
    for name, words in LSE_WORDS.items():
        if name != "before the last step" or geometry.workers > 1:
            yield Kind(words, (("lse", LSES.index(name)),))
    for name, words in DELTA_WORDS.items():
        yield Kind(words, (("delta", DELTAS.index(name)),))
    for words, times, lse in (
        ("p is 2**(s - lse), where s and lse are natural", LN2, "times ln 2"),
        ("p is exp(s - lse), where s and lse are in base 2", 1 / LN2, "base 2"),
    ):
        yield Kind(words, (("times", times), ("lse", LSES.index(lse))), 1.05)
    for words, part in DIMS_WORDS.items():
        yield Kind(
            f"delta is summed over only {words} of the head dimension", (("delta_dims", part),)
        )


def zero_kinds() -> Iterator[Kind]:
    """Yield the mistake of a block whose keys and values are 0."""
    zeros = (
        ("times", 0.0),
        ("dq_count", 0.0),
        ("dk_form", DS_FORMS.index("p delta")),
        ("dk_count", -1.0),
    )
    yield Kind("keys and values are 0 (the block counts with score 0)", zeros, 1.2)


def softcap_kinds() -> Iterator[Kind]:
    """Yield the mistakes in the derivative of the soft cap."""
    for name, words in CAP_SLOPE_WORDS.items():
        yield Kind(words, (("cap_slope", CAP_SLOPES.index(name)),), 0.95)
    both = (("cap", CAPS.index("none")), ("cap_slope", CAP_SLOPES.index("none")))
    yield Kind("the soft cap and its derivative are left out", both, 1.0)


def factor_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield wrong factors on delta, dS and the gradients, and gradients that are lost."""
    for words, value in factors_beside_scores(geometry, distinct):
        yield Kind(f"delta is {words}", (("delta_times", value),), 1.1)
        if "scale" not in words:  # the scale is a factor of dq and dk, not of dS
            yield Kind(f"dS is {words}", (("ds_times", value),), 1.1)
    for names in GRADIENTS:
        for words, value in factors_on(names, geometry, distinct):
            cost = 1.15 if len(names) > 1 else 1.0 if value == 2 else 1.2
            yield Kind(f"{listing(names)} {verb(names)} {words}", at_counts(names, value), cost)
    mean = (geometry.usual_scale or geometry.scale) ** 2
    yield Kind("delta is a mean over the head dimension, not a sum", (("delta_times", mean),), 1.1)
    usual = dict(factors(geometry, distinct)).get(OWN_SCALE)
    if usual is not None:
        everywhere = (("times", usual), *at_counts(("dq", "dk"), usual))
        yield Kind("the scale is 1/sqrt(D), not the one that is given", everywhere, 1.0)
    for names in GRADIENTS:
        shares = "the share" if len(names) == 1 else "the shares"
        yield Kind(
            f"{shares} of {listing(names)} {verb(names)} lost",
            at_counts(names, 0.0),
            1.0 if names != ("dq", "dk") else 1.1,
        )


def growing_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes that add or multiply something again in every step."""
    later = (geometry.workers - 1 - geometry.steps("backward"))[:, :, None, None, None]
    step = geometry.steps("backward")[:, :, None, None, None]
    words = "delta is added to the delta of the earlier steps in every step"
    yield Kind(words, (("delta_times", step + 1.0),), 1.15)
    for words, factor in (
        ("multiplied by the scale", geometry.scale),
        ("doubled", 2.0),
        ("halved", 0.5),
    ):
        for names in (("dq",), ("dk",), ("dv",), ("dk", "dv")):
            held = f"the accumulated {listing(names)} {'is' if len(names) == 1 else 'are'} {words} again in every later step"
            yield Kind(held, at_counts(names, factor**later), 1.2)


def chunk_kinds() -> Iterator[Kind]:
    """Yield the mistakes of statistics of one chunk of keys, where a kernel computes each chunk of a shard by itself."""
    lse, delta = ("lse", LSES.index("chunk")), ("delta", DELTAS.index("chunk"))
    yield Kind("p is computed with the lse of the chunk of keys alone", (lse,), 1.05)
    yield Kind("delta is summed over only the keys of the chunk", (delta,), 1.05)
    words = "p is computed with the lse of the chunk of keys alone, and delta is summed over only its keys"
    yield Kind(words, (lse, delta), 1.15)


def key_tile_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the same mistakes for tiles of a block's keys."""
    for name, size in KEY_TILES.items():
        if size < geometry.run:
            lse, delta = ("lse", LSES.index(name)), ("delta", DELTAS.index(name))
            of = f"in tiles of {size} keys"
            yield Kind(f"p is computed with the lse of the tile of keys alone, {of}", (lse,), 1.15)
            yield Kind(f"delta is summed over only the keys of the tile, {of}", (delta,), 1.15)
            words = f"p is computed with the lse of the tile of keys alone, and delta is summed over only its keys, {of}"
            yield Kind(words, (lse, delta), 1.25)


def dlse_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the faults of using dlse, the gradient that arrives for lse."""
    yield Kind("dlse is left out", (("dlse_times", 0.0),), 0.95)
    yield Kind("dlse is added to delta, not subtracted from it", (("dlse_times", -1.0),), 0.95)
    for words, value in factors_beside_scores(geometry, distinct):
        if value != -1:
            yield Kind(f"dlse is {words}", (("dlse_times", value),), 1.0)
    for source in sources(geometry, "backward", "q", distinct):
        yield Operand("dlse", ("dlse_of",)).taken(source)
