"""Try wrong merges of tiles of keys on one query of each worker, before a whole ring is computed with them.

There are many of them, for each size of tiles and each mistake, and most explain nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ringspec.conformance.readout.faults.choices import Choices, Tiles
from ringspec.conformance.readout.faults.kinds import Kind
from ringspec.conformance.readout.faults.merges import OF_L, OTHER_TOKENS
from ringspec.conformance.readout.model.arrays import log_of
from ringspec.conformance.readout.model.ring import Model
from ringspec.conformance.readout.model.scores import OF_SCORES, scores_of_pairs
from ringspec.conformance.readout.model.tile_merging import in_tiles, through_tiles
from ringspec.conformance.readout.problem.pairs import Seen
from ringspec.conformance.readout.search.context import SearchContext
from ringspec.conformance.readout.search.matches import Match, finite_size, near, ratio_steady
from ringspec.conformance.readout.search.row_search import worst_query
from ringspec.problem.model import Array, Booleans

FAINT = 1e-3  # of weights below it in one tile, the ratios are not compared: some may count as 0


def fitting_sample(
    context: SearchContext, seen: Seen, choices: Choices, wrong: Booleans
) -> Callable[[Kind], bool]:
    """Return a function that tells whether a kind may explain all rows; its answer is True if the sample cannot tell.

    ``wrong`` [a, h, i]: the rows that ``choices`` do not explain. The sample has the query slot with most of them.
    """
    model, geometry = context.model, context.geometry
    others = (x is model.right[slot] for slot, x in choices.of.items() if slot not in OF_SCORES)
    featured = geometry.sinks or geometry.padding or geometry.dropout is not None
    if featured or not all(others):
        return lambda kind: True
    one = worst_query(wrong)
    s, weights = scores_of_pairs(model, choices)[:, :, :, one], seen.weights[:, :, :, one]
    lse = None if seen.lse is None else seen.lse[..., one]
    everywhere = np.ones((1, 1, 1, 1, 1), bool)

    def fits(kind: Kind) -> bool:
        tiles: Any = dict(kind.changes).get("tiles")
        if kind.slots != {"tiles"} or tiles.merge == OTHER_TOKENS:
            return True
        model.evaluations += 1
        found, ours = merged_rows(model, s, choices.with_value("tiles", everywhere, tiles))
        same = near(weights, found, np.abs(found), context.tolerance).all()
        if lse is not None:
            same &= near(lse, ours, np.maximum(1.0, finite_size(ours)), context.tolerance).all()
        return bool(same)

    return fits


def merged_rows(model: Model, s: Array, c: Choices) -> tuple[Array, Array]:
    """Return the weights [a, b, h, i, j] and lse [a, h, i] of some queries with the scores ``s`` [a, b, h, i, j].

    Tiles of keys are merged wrongly, as the choice 'tiles' says, and blocks correctly.
    """
    tiles = c["tiles"]
    if tiles.through:
        m, l, weights = through_tiles(model, s, c)
        return weights, log_of(m, l)
    m, l, p = in_tiles(model, s, tiles)
    of_blocks = log_of(m, l)
    lse = np.logaddexp.reduce(of_blocks, axis=1)
    shift = np.where(np.isneginf(lse), 0.0, lse)[:, None]
    return p * np.exp(of_blocks - shift)[..., None], lse


def tiles_of_use(
    context: SearchContext, kind: Kind, seen: Seen, match: Match, known: dict[int, bool]
) -> bool:
    """Return whether a wrong merge of tiles may help; ``known``: results of :func:`tiles_alike` by size of the tiles."""
    tiles: Any = dict(kind.changes)["tiles"]
    if tiles.size not in known:
        known[tiles.size] = tiles_alike(context, tiles, seen.weights, match.ours["A"])
    # Rows are compared in halves: a wrong merge of these leaves the halves right.
    halves = 2 * tiles.size == context.geometry.slots
    return known[tiles.size] and (halves or tiles.merge in OF_L or not match.alike["A"].all())


def tiles_alike(context: SearchContext, tiles: Tiles, seen: Array, ours: Array) -> bool:
    """Return whether, in every tile, each row is correct up to a factor, as after a wrong merge of these tiles."""
    n, runs = context.geometry.slots, {context.geometry.run, context.geometry.own_run}
    starts = sorted({keys.start for run in runs for keys in tiles.in_ranges(n, run)})
    parts = [(seen[..., x:y], ours[..., x:y]) for x, y in itertools.pairwise((*starts, n))]
    return all(
        (ratio_steady(x, y, context.tolerance) | (np.abs(x) <= FAINT).all(axis=-1)).all()
        for x, y in parts
    )
