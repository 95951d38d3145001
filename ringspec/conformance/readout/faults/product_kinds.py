"""The mistakes in the products that give the gradients, in their buffers, and in where they are added.

A *share* is what one pair of tokens adds to a row of a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ringspec.conformance.readout.faults.choices import (
    BY_CAUSAL,
    DS_FORMS,
    DV_FORMS,
)
from ringspec.conformance.readout.faults.kinds import (
    GRADIENTS,
    WITH_A_MASK,
    Kind,
    at_counts,
    factors_beside_scores,
    listing,
    verb,
)
from ringspec.conformance.readout.faults.operands import Operand, of_tables, tables_at
from ringspec.conformance.readout.faults.sources import ranges, sources
from ringspec.conformance.readout.faults.tile_rules import LARGEST_TILE, Tiling, sizes_in
from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans


def dbias_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the faults of the gradient of the bias."""
    yield Kind("the share of dbias is lost", (("dbias_count", 0.0),), 0.95)
    for words, value in factors_beside_scores(geometry, distinct):
        yield Kind(f"dbias is {words}", (("dbias_count", value),), 1.0)
    yield Kind("dbias is transposed within each block", (("turned", 4),), 1.0)
    for name, words in DS_WORDS.items():
        if name != "hidden pairs":
            yield Kind(f"dbias takes {words}", (("dbias_form", DS_FORMS.index(name)),), 1.1)
    yield from of_tables(
        geometry, "backward", distinct, ("dbias_to", "dbias_k"), "dbias", Operand.given
    )


DS_WORDS = {
    "p dp - delta": "p dp - delta, not p (dp - delta)",
    "dp - delta": "dp - delta, not multiplied by p",
    "p": "p, not p (dp - delta)",
    "p dp": "p dp without delta",
    "p delta": "p delta, not p (dp - delta)",
    "p (dp + delta)": "p (dp + delta), not p (dp - delta)",
    "dp": "dp, not p (dp - delta)",
    "p (1 - p) dp": "p (1 - p) dp, not p (dp - delta)",
    "p p (dp - delta)": "p p (dp - delta), with p once too often",
    "hidden pairs": "hidden pairs as well",
}

# Those of DS_WORDS that are not 0 at hidden pairs, as far as these are computed.
IN_HIDDEN_PAIRS = ("p dp - delta", "dp - delta", "dp", "hidden pairs")

DV_WORDS = {
    "block's maximum": "exp(s - the block's row maximum), not p",
    "row maximum": "exp(s - the row maximum), not p",
    "block's lse": "p normalised over only the block",
    "dS": "dS in place of p",
    "p dp": "p dp in place of p",
    "dp": "dp in place of p",
}


REPLACED = "written over what was added up before"


def product_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes in the products that give dq, dk and dv, and in the buffers that hold these gradients."""
    yield Kind("dy is taken as 1 everywhere (the gradient of the sum of o)", (("dy_ones", True),))
    yield Kind("dp is <dy, k>, not <dy, v>", (("dp_of_k", True),), 1.1)
    yield Kind("dS is not transposed in the product for dk", (("turned", 1),))
    yield Kind("P is not transposed in the product for dv", (("turned", 2),))
    yield Kind(
        "neither P nor dS is transposed in the products for dv and dk", (("turned", 3),), 1.1
    )
    for name, words in DS_WORDS.items():
        form = DS_FORMS.index(name)
        if name == "hidden pairs" and geometry.sees_all:
            continue
        if name not in ("p dp", "hidden pairs"):
            both = (("dq_form", form), ("dk_form", form))
            yield Kind(f"dS is {words}", both)
            if name in IN_HIDDEN_PAIRS and not (geometry.sees_all and distinct):
                # 0 is the number of the correct mask.
                yield Kind(f"dS is {words}, at visible pairs", (*both, ("computed", 0)), 1.05)
        yield Kind(f"the product for dq takes {words}", (("dq_form", form),), 1.1)
        yield Kind(f"the product for dk takes {words}", (("dk_form", form),), 1.1)
    for name, words in DV_WORDS.items():
        yield Kind(f"the product for dv takes {words}", (("dv_form", DV_FORMS.index(name)),), 1.1)
    if geometry.group > 1:
        words = "dS is summed over the query heads of a key head before the product for dq"
        yield Kind(words, (("dq_of_group", True),), 1.1)
    yield from over_head_kinds(geometry)
    yield from over_worker_kinds(geometry)
    yield Kind("dk and dv are exchanged", (("exchanged", True),), 1.1)
    if geometry.travels("backward") == "keys" and geometry.workers > 1:
        hops = (geometry.workers - geometry.steps("backward"))[:, :, None, None, None]
        yield Kind("dk and dv are exchanged at each hop", (("exchanged", hops % 2 == 1),), 1.15)
    for names in (("dk",), ("dv",), ("dk", "dv")):
        of = listing([name.removeprefix("d") for name in names])
        words = (
            f"{names[0]} starts as a copy of {of}"
            if len(names) == 1
            else f"{listing(names)} start as copies of {of}"
        )
        yield Kind(f"{words}, not as zeros", (("starts", names),), 1.15)
    words = "dk is returned as dk + dv, and dv as the dk + dv of the next worker"
    yield Kind(words, (("stacked", True),), 1.2)
    travelling = (
        (("dq",),)
        if geometry.travels("backward") == "queries"
        else (("dk",), ("dv",), ("dk", "dv"))
    )
    for names in travelling:
        words = (
            f"each hop adds the arriving {listing(names)} to what the worker has already sent on"
        )
        yield Kind(words, (("routed", (*names, "added")),), 1.1)
        yield from skipped_kinds(geometry, names, distinct)
        yield from buffer_kinds(geometry, names, distinct)
    of_masks = {} if distinct and geometry.sees_all else WITH_A_MASK
    for size in (x for x in sizes_in(geometry.run) if x < geometry.run):
        for names in GRADIENTS[:4]:
            words = f"{listing(names)} of a tile of {size} tokens still contain{'s' if len(names) == 1 else ''} those of the tiles before it (the tile is not cleared)"
            yield Kind(words, (("uncleared", (*names, "tiles", size)),), 1.2)
            for blocks, which in of_masks.items():
                there = f"{words}, in a block {which}"
                yield Kind(there, (("uncleared", (*names, blocks, size)),), 1.25)
    # If the buffer of a gradient that stays on a worker is not cleared, every later step adds its contents again.
    again = (geometry.workers - geometry.steps("backward"))[:, :, None, None, None].astype(float)
    for names in GRADIENTS[:4]:
        if not {"dq"} <= set(names) if ("dq",) in travelling else names == ("dq",):
            words = f"a block's {listing(names)} {verb(names)} added again in every later step"
            yield Kind(words, at_counts(names, again), 1.2)


def replaced_kinds(geometry: Geometry, visible: Booleans) -> Iterator[Kind]:
    """Yield the mistakes of writing a block's gradients over what was added up before; ``visible``: the correct mask."""
    of_blocks = np.asarray(visible.any(axis=(3, 4), keepdims=True))
    for names in GRADIENTS[:4]:
        axis = 1 if names == ("dq",) else 0  # of the workers that add to a row
        of_rows = np.asarray(visible.any(axis=3 + axis, keepdims=True))
        what = f"a block's {listing(names)} {verb(names)}"
        words = f"{what} added again with each later block that the row sees"
        left = blocks_left(geometry, "backward", of_rows, axis)
        yield Kind(words, at_counts(names, left), 1.25)
        for seen, where in ((of_rows, "the rows that it sees"), (of_blocks, "all rows")):
            last, first = last_and_first(geometry, seen, axis)
            words = f"{what} {REPLACED}, in {where}"
            yield Kind(words, at_counts(names, last.astype(float)), 1.2)
            doubled = f"{words}, and then added to itself"
            yield Kind(doubled, at_counts(names, last * (2.0 - first)), 1.25)


def blocks_left(geometry: Geometry, phase: str, seen: Booleans, axis: int) -> Array:
    """Return how many blocks a row sees along ``axis`` of ``seen`` from each block on, with this block."""
    step = geometry.steps(phase)[:, :, None, None, None]
    found = np.zeros(seen.shape)
    for number in range(geometry.workers):
        found += (step <= number) & (seen & (step == number)).any(axis=axis, keepdims=True)
    return found


def last_and_first(geometry: Geometry, seen: Booleans, axis: int) -> tuple[Booleans, Booleans]:
    """Return whether a block is the last, and the first, that a row sees along ``axis`` of ``seen``."""
    step = geometry.steps("backward")[:, :, None, None, None]
    last = np.where(seen, step, -1).max(axis=axis, keepdims=True)
    first = np.where(seen, step, geometry.workers).min(axis=axis, keepdims=True)
    return seen & (step == last), seen & (step == first)


def overwritten_kinds(geometry: Geometry, visible: Booleans, distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes of keeping a gradient of only one tile of each block, because the tiles overwrite each other.

    ``visible``: the correct mask. Tiles without a visible pair are skipped. Whether a tile has one depends on the size of
    the tiles of the other side; a size of 1 means that each query or key is tested alone.
    """
    run, n = geometry.run, geometry.slots
    # Of sizes with the same results, one tile for the whole range is the most likely.
    others = sorted(range(1, LARGEST_TILE + 1), key=lambda size: size not in (1, run))
    for side, across, of in (
        ("keys", "queries", (("dq",),)),
        ("queries", "keys", (("dk", "dv"), ("dk",), ("dv",))),
    ):
        for size in (x for x in sizes_in(run) if x < run):
            in_parts = geometry.of_visible_parts and geometry.layout == "zigzag"
            of_parts = kept_of_parts(geometry, visible, side, size) if in_parts else None
            for other in (1,) if geometry.sees_all and distinct else others:
                rows, keys = (other, size) if side == "keys" else (size, other)
                kept = kept_tiles(Tiling(n, run, rows, keys), visible, side)
                if of_parts is not None:
                    last, first = (
                        np.where(geometry.own_blocks, kept[x], of_parts[x]) for x in (0, 1)
                    )
                    kept = last, first
                for which, pattern in zip(("last", "first"), kept, strict=True):
                    words = f"each block keeps only the shares of its {which} tile of {size} {side}"
                    words += f", in tiles of {other} {across}" if other > 1 else ""
                    for names in of:
                        sentence = f"of {listing(names)}, {words}"
                        counts = at_counts(names, pattern.astype(float))
                        yield Kind(sentence, counts, 1.2 + 0.01 * (other > 1), of_tiles=True)
                # The last tile of the last block alone remains.
                axis = 1 if side == "keys" else 0
                computed = np.asarray(kept[0].any(axis=3 + axis, keepdims=True))
                last, _ = last_and_first(geometry, computed, axis)
                for names in of:
                    sentence = (
                        f"{listing(names)} of each tile of {size} {side} {verb(names)} {REPLACED}"
                    )
                    sentence += f", in tiles of {other} {across}" if other > 1 else ""
                    counts = at_counts(names, (kept[0] & last).astype(float))
                    yield Kind(sentence, counts, 1.25 + 0.01 * (other > 1), of_tiles=True)


def kept_of_parts(
    geometry: Geometry, visible: Booleans, side: str, size: int
) -> tuple[Booleans, Booleans]:
    """Return what :func:`kept_tiles` does for zigzag blocks with keys of another worker, whose visible parts need no mask."""
    i, start, length = ranges(geometry, "k" if side == "keys" else "q")
    number = (i - start) // size
    return visible & (number == (length - 1) // size), visible & (number == 0)


def kept_tiles(tiling: Tiling, visible: Booleans, side: str) -> tuple[Booleans, Booleans]:
    """Return the pairs in the last, and in the first, tile of ``side`` that is computed for each tile of the other side."""
    some, _ = tiling.some_and_all(visible)
    axis, (first, _) = (4, tiling.ends_of_keys) if side == "keys" else (3, tiling.ends_of_rows)
    number = first.reshape((1, 1, 1, 1, -1) if side == "keys" else (1, 1, 1, -1, 1))
    slots = np.arange(tiling.slots).reshape(number.shape)
    chunk = slots - slots % tiling.run
    found = []
    for sign in (1, -1):
        at = np.where(some, sign * number, -np.inf)
        kept = np.zeros_like(some)
        for start in range(0, tiling.slots, tiling.run):
            inside = chunk == start
            top = np.where(inside, at, -np.inf).max(axis=axis, keepdims=True)
            kept |= inside & some & (at == top)
        found.append(kept)
    return found[0], found[1]


def over_head_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes of adding up gradients over all heads; the heads may be batch entries."""
    for names in GRADIENTS:
        heads = {
            geometry.heads if name == "dq" else geometry.heads // geometry.group for name in names
        }
        if len(heads) > 1 or 1 in heads:
            continue
        what, those = f"{listing(names)} {verb(names)}", "that" if len(names) == 1 else "those"
        for how, words, cost in (
            ("sum", "summed over all heads, and every head gets the sum", 1.1),
            ("mean", "averaged over all heads, and every head gets the average", 1.15),
            ("last", f"{those} of the last head in every head", 1.15),
            ("first", f"{those} of the first head in every head", 1.15),
        ):
            yield Kind(f"{what} {words}", (("mixed", (*names, "heads", how)),), cost)


def over_worker_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes of gradients that workers share."""
    for names in GRADIENTS if geometry.workers > 1 else ():
        what, those = f"{listing(names)} {verb(names)}", "that" if len(names) == 1 else "those"
        for how, words, cost in (
            ("sum", "summed over all workers, and every worker gets the sum", 1.1),
            ("mean", "averaged over all workers, and every worker gets the average", 1.15),
            ("sum so far", "summed over a worker and the workers before it", 1.2),
            ("last", f"{those} of the last worker on every worker", 1.15),
            ("first", f"{those} of the first worker on every worker", 1.15),
        ):
            yield Kind(f"{what} {words}", (("mixed", (*names, "workers", how)),), cost)
    every = ("dq", "dk", "dv")
    for r in range(geometry.workers) if geometry.workers > 2 else ():
        for how, where in (("only", "all workers but "), ("without", "worker ")):
            changes = (("mixed", (*every, "workers", f"{how} {r}")),)
            yield Kind(f"{listing(every)} are 0 on {where}{r}", changes, 1.3)


def skipped_kinds(geometry: Geometry, names: Sequence[str], distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes with travelling gradients in steps that are skipped because the mask hides the whole block."""
    if distinct and geometry.sees_all:
        return
    what = listing(names)
    ways = {
        "kept if skipped": f"a worker drops the arriving {what} and sends its previous ones again",
        "lost if skipped": f"a worker sends zeros in place of the arriving {what}",
        "not sent if skipped": f"a worker sends no {what}, and the next one goes on with what it received last",
    }
    # A kernel may skip the blocks that a causal mask hides, and compute those that a window hides.
    steps = {"a skipped step": ""}
    if geometry.window and geometry.causal or not distinct:
        steps["a step that the causal mask alone skips"] = BY_CAUSAL
    for (step, by), (way, words) in itertools.product(steps.items(), ways.items()):
        yield Kind(f"in {step}, {words}", (("routed", (*names, way + by)),), 1.1)


def buffer_kinds(geometry: Geometry, names: Sequence[str], distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes in the buffers of the travelling gradients ``names``: not cleared, or added one step late."""
    what, still = f"a block's {listing(names)}", "still contain" + "s" * (len(names) == 1)
    for every, words, cost in (
        (1, "those of the earlier steps (the buffer is not cleared)", 1.1),
        (2, "those of every second step before (two buffers are not cleared)", 1.15),
    ):
        words = f"{what} {still} {words}"
        yield Kind(words, (("uncleared", (*names, "steps", every)),), cost)
        if not (geometry.sees_all and distinct):
            words += ", also where the mask hides the whole block"
            yield Kind(words, (("uncleared", (*names, "all steps", every)),), cost + 0.1)
    W, step = geometry.workers, geometry.steps("backward")
    a, b = np.indices((W, W))
    owner = a if names == ("dq",) else b
    for by, lost, words in (
        (-1, W - 1, "added one step late, to those of the next step's visitor, and those of the last step are lost"),
        (1, W - 1, "returned without the last hop: a worker returns those of another block, and those of the last step are lost"),
        (1, 0, "added one step early, to those of the previous step's visitor, and those of a worker's own block are lost"),
    ):  # fmt: skip
        at = ((owner + by * geometry.direction) % W)[:, :, None, None, None]
        there = tuple((f"{name}_to.worker", at) for name in names)
        kept = (step != lost)[:, :, None, None, None].astype(float)
        yield Kind(f"{what} {verb(names)} {words}", (*there, *at_counts(names, kept)), 1.1)


def goal_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes of adding shares of gradients to the wrong tokens."""
    for side, of in (("q", (("dq",),)), ("k", (("dk", "dv"), ("dk",), ("dv",)))):
        for source in sources(geometry, "backward", side, distinct):
            for names in of:
                what, several = listing(names), len(names) > 1
                # Lower than the cost of wrong keys and values, which give the same results where nothing is masked.
                cost = 0.95 if several else 1.0 if side == "q" else 1.1
                words = (
                    f"{what} {verb(names)} added to {'those' if several else 'that'} {source.words}"
                )
                if source.added:
                    words = f"the {'shares' if several else 'share'} of {what} {verb(names)} added {source.added}"
                changes = tables_at([f"{name}_to" for name in names], source)
                yield Kind(words, changes, cost + source.cost)
