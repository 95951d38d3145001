"""Mistakes in the result of one part of a row: in the lse with which it is merged, and in the state from which its softmax begins.

A *part* is what a kernel computes at once and merges into the running result: a block, or one of the chunks of keys of a
zigzag shard. Inside a part, a kernel takes *tiles* of queries and of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringspec.conformance.readout.problem.geometry import Geometry

LARGEST_TILE = 7
# Wrong lse of a part by form, with the words that complete "the new block's lse ...".
PLAIN = {
    "divided by ln 2": "is divided by ln 2 before the merge (it is in base 2 and taken for natural)",
    "times ln 2": "is multiplied by ln 2 before the merge",
    "maximum": "is only its row maximum",
    "log l": "is log l without the maximum",
    "log2 l": "is the maximum plus log2 l",
    "scaled maximum": "has a maximum that is multiplied by the scale again",
    "unscaled maximum": "has a maximum that is not scaled",
    "maximum in base 2": "has a maximum in base 2 (not multiplied by ln 2), and a natural log l",
    "maximum times ln 2": "has a maximum that is multiplied by ln 2, and a log l that is not",
    "unscaled maximum in base 2": "has a maximum that is divided by ln 2 and not scaled",
    "log l times ln 2": "has a log l that is multiplied by ln 2, and a maximum that is not",
    "maximum plus l": "is the maximum plus l, not plus log l",
    "maximum minus log l": "is the maximum minus log l, not plus log l",
    "log1p l": "is the maximum plus log(1 + l)",
    "sum": "is l, not the maximum plus log l",
}
OF_HEADS = {
    "first head": "is that of the first query head of each key head",
    "last head": "is that of the last query head of each key head",
    "head 0": "is that of head 0",
    "next head": "is that of the next head",
    "previous head": "is that of the previous head",
}
OF_ROWS = {
    "first rows": "is that of the first tile",
    "rows before": "is that of the tile before (the first tile is right)",
}
OF_TILES = {
    "old maximum": "has the maximum from before its last tile of {} keys",
    "last maximum": "has the maximum of only its last tile of {} keys",
    "first maximum": "has the maximum of only its first tile of {} keys",
    "old sum": "has the sum from before its last tile of {} keys",
    "last sum": "has the sum of only its last tile of {} keys",
    "before the last": "is that from before its last tile of {} keys",
    "last": "is that of only its last tile of {} keys",
    "first": "is that of only its first tile of {} keys",
}


@dataclass(frozen=True)
class PartLse:
    """A wrong lse of a part. ``rows`` and ``keys``: the size of its tiles; 0 if it does not depend on this size.

    A kernel skips the tiles without a visible pair, so that the last tile of a row depends on the tile of its query.
    ``rows`` 0 also stands for a kernel that skips no tile.
    """

    form: str
    rows: int = 0
    keys: int = 0

    @property
    def words(self) -> str:
        """Complete "the new block's lse ..."."""
        found = (PLAIN | OF_HEADS | OF_ROWS | OF_TILES)[self.form].format(self.keys)
        return f"{found}, in tiles of {self.rows} queries" if self.rows else found


@dataclass(frozen=True)
class Begins:
    """The softmax of a query begins with values that the tile before left: ``what`` is 'm and l', 'm and o' or 'm, l and o'.

    ``rows``: the number of queries in a tile.
    """

    what: str
    rows: int

    @property
    def words(self) -> str:
        return f"{self.what} are not cleared between tiles of {self.rows} queries within a block"


def every_lse() -> list[PartLse]:
    """Return all wrong lse of a part; the correct one, which has no words, is number 0."""
    sizes = range(2, LARGEST_TILE + 1)
    return [
        PartLse("right"),
        *(PartLse(form) for form in (*PLAIN, *OF_HEADS)),
        *(PartLse(form, rows) for form in OF_ROWS for rows in sizes),
        *(
            PartLse(form, rows, keys)
            for form in OF_TILES
            for keys in sizes
            for rows in (0, *range(1, LARGEST_TILE + 1))
        ),
    ]


PART_LSES = tuple(every_lse())


def lses_in(geometry: Geometry, distinct: bool) -> list[tuple[int, PartLse]]:
    """Return the wrong lse that a part of this ring can have, each with its number in PART_LSES.

    ``distinct``: leave out those that have the same effect as a simpler one.
    """
    heads, group = geometry.heads, geometry.group

    def may(one: PartLse) -> bool:
        if max(one.rows, one.keys) >= geometry.run or one.form == "right":
            return False
        if one.form in OF_HEADS and distinct:
            return heads > 1 and (group > 1 or one.form not in ("first head", "last head"))
        return not (distinct and geometry.sees_all and one.rows and one.keys)

    return [(number, one) for number, one in enumerate(PART_LSES) if may(one)]


def begins_in(geometry: Geometry) -> list[Begins]:
    return [
        Begins(what, rows)
        for rows in range(2, geometry.run)
        for what in ("m and l", "m and o", "m, l and o")
    ]
