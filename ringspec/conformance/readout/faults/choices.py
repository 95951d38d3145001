"""Every choice that a ring makes, as data: the correct choices, and how to change one of them somewhere.

A *pair* [a, b, h, i, j] is query i of worker a with key j of worker b in query head h. A choice that is made for each
pair is an array with these axes. A choice that is made for each query has the axes [a, 1, h, i, 1]. An axis of length 1
stands for equal entries.

A *block* [a, b] contains all pairs of two workers. Its *result* is its part of o, with the row maximum m and the row
sum l. A *share* is what one pair adds to a row of dq, dk or dv. The parameter ``slot`` is the name of a choice; the
slot of a token is its place on its worker. A backward pass may consist of two KERNELS, one for dq, and one for dk and
dv.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np

from ringspec.conformance.readout.problem.geometry import Geometry
from ringspec.problem.model import Array, Booleans, Integers

# What a pass reads or writes at the token of a query (worker, query head, slot), and what it is used for.
OF_QUERIES = {
    "q": "the scores", "dy": "dp", "dv_dy": "dv", "dk_q": "dk", "lse_of": "the lse that a block uses",
    "dlse_of": "the dlse that is subtracted from delta", "delta_dy": "the dy in delta", "delta_o": "the o in delta", "dq_to": "where dq is added",
    "result_of": "the row whose block result is merged into this row", "lse_row": "the row whose lse is returned",
    "o_row": "the row whose o is returned", "sink_of": "the sinks of a row", "dsink_of": "the head of dsinks",
    "bias_q": "the row of the bias", "dbias_to": "the row where dbias is added",
    "drop_q": "the row of the dropout mask",
}  # fmt: skip
# The same for the token of a key (worker, key head, slot).
OF_KEYS = {
    "k": "the scores", "v": "o, and dp", "dq_k": "dq", "dk_to": "where dk is added", "dv_to": "where dv is added",
    "bias_k": "the column of the bias", "dbias_k": "the column where dbias is added", "drop_k": "the column of the dropout mask",
}  # fmt: skip
COMPONENTS = ("worker", "head", "slot")
# Many backward passes compute these gradients in two kernels, each with its own masks and p.
KERNELS = ("dq", "dk and dv")

# The values of some choices, which are numbered; the correct one is number 0.
FINISHES = (
    "right", "not divided", "divided twice", "divided by the last block's l", "before the last merge",
    "divided by the first block's l", "multiplied by l", "divided by l before the last merge",
)  # fmt: skip
LSES_GIVEN = (
    "right", "maximum", "log l", "base 2", "last block", "first block", "log2 l", "base 2 twice", "times ln 2",
    "negative", "last maximum", "before the last merge", "l", "twice the maximum", "scaled maximum",
    "unscaled maximum", "maximum plus l", "maximum minus log l", "first maximum",
    "maximum in base 2", "maximum times ln 2", "unscaled maximum in base 2", "log l times ln 2", "log1p l", "old maximum", "old l",
    "last l", "times scale", "divided by scale",
)  # fmt: skip
# Tiles of keys of which alone the statistics may be, by the names of these, with their sizes.
KEY_TILES = {f"tile of {size}": size for size in range(2, 8)}
LSES = (
    "right", "block", "base 2", "times ln 2", "maximum", "zero", "log l", "last block", "first block", "so far",
    "negative", "block's maximum", "delta", "times scale", "divided by scale", "without the sinks", "chunk", "zero if empty", "before the last step",
    *KEY_TILES,
)  # fmt: skip
DELTAS = (
    "right", "block", "none", "block's own p", "times p", "first block", "last block", "block's own o", "block's p dp twice",
    "times l", "lse", "of the group", "of all heads", "mean of all heads", "chunk", "so far",
    *KEY_TILES,
)  # fmt: skip
DS_FORMS = (
    "right",
    "p dp - delta",
    "dp - delta",
    "p",
    "p dp",
    "p delta",
    "p (dp + delta)",
    "dp",
    "p (1 - p) dp",
    "p p (dp - delta)",
    "hidden pairs",
)
CAPS = ("right", "none", "before the scale", "not multiplied back", "not divided", "twice")
CAP_SLOPES = ("right", "none", "of the capped score", "not squared", "capped score not divided")
SINKS = (
    "right", "none", "every step", "every block", "times scale", "divided by scale", "times ln 2", "divided by ln 2",
    "first", "unshifted", "not exponentiated", "negated",
)  # fmt: skip
DROPS = ("right", "none", "inverted", "next seed")
DROPS_IN_L = ("right", "kept", "kept and divided")
DROPS_IN_DS = ("right", "not in dp", "in p too", "in p, not in dp")
DSINKS = ("right", "lse without the sinks", "without delta", "of all workers", "of p (1 - p)")
DV_FORMS = ("right", "block's maximum", "row maximum", "block's lse", "dS", "p dp", "dp")
# Ways that travelling gradients take by mistake, besides to a wrong worker.
OPEN, BY_CAUSAL = "open chain", " by the causal mask"
ROUTES = ("added", "kept if skipped", "lost if skipped", "not sent if skipped", OPEN)
OF_ALL = (
    "hidden_merge", "started", "dy_ones", "turned", "stays", "resets", "o_tokens", "routed", "uncleared", "dq_of_group", "l_of_group", "tiles", "begins", "delta_dims", "not_home", "stacked", "mixed", "padded", "other_o", "starts",
)  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """A wrong way of merging the tiles, of ``size`` keys each, into which a kernel divides a block.

    ``merge``: the name of the mistake. ``through``: the tiles of all blocks are merged into one running state;
    otherwise each block begins with an empty state. ``own``: only the block of a worker with its own keys (step 0) is
    divided. ``blocks``: only blocks that a mask hides in part ('masked'), or only the others ('whole'), are computed in these
    tiles; '' if all are. ``chunks``: each chunk of a block's keys begins with an empty state, and the results of the chunks are merged
    correctly. ``last``: only the merges of the last step are wrong. ``backwards``: the last tile comes first.
    """

    size: int
    merge: str
    through: bool
    own: bool = False
    chunks: bool = False
    last: bool = False
    blocks: str = ""
    backwards: bool = False

    def of(self, geometry: Geometry, step: int = 0) -> list[slice]:
        """Return the keys of each tile of a block, as slices."""
        if self.own and step > 0:
            return [slice(0, geometry.slots)]
        return self.in_ranges(geometry.slots, geometry.run)

    def in_ranges(self, slots: int, run: int) -> list[slice]:
        """Return the keys of each tile, as slices, if the tiles begin anew in each range of ``run`` of ``slots`` keys."""
        found = [
            slice(x, min(x + self.size, start + run))
            for start in range(0, slots, run)
            for x in range(start, start + run, self.size)
        ]
        return found[::-1] if self.backwards else found


@dataclass(frozen=True)
class Choices:
    """All choices of a ring: ``of`` maps the name of each choice to its values.

    ``own`` maps one of KERNELS to the values of choices that differ there; it is empty if none differ.

    Each use of a token takes three choices, the token's worker, head and slot: 'q.worker', 'q.head', 'q.slot'. The uses
    are listed in OF_QUERIES and OF_KEYS.

    For each pair or block:
    ``computed``: the mask of the pairs in which a wrong form of dS is computed; -1: all pairs of a block with a visible one.
    ``mask``: the number of a mask. ``value_mask``: the same for the products with v and dy; -1 is the mask in ``mask``.
    ``hidden_score``: the score of a masked pair. ``times``: a factor on the score.
    ``centred``: whether the mean over the block's keys is subtracted from the scores.
    ``bias_times``: a factor on the bias.
    ``drop``, ``drop_l``, ``drop_ds``: the mask of dropout, and its use in the row sums and in dS, as numbers in DROPS,
    DROPS_IN_L and DROPS_IN_DS. ``drop_dv``: whether the product for dv lacks it. ``drop_times``: a factor on it.
    ``count``: how often the pair is counted.
    ``lse``, ``delta``: what the backward pass takes for lse and delta, as numbers in LSES and DELTAS.
    ``dp_of_k``: whether dp is <dy, k>, not <dy, v>.
    ``delta_times``, ``dlse_times``, ``ds_times``: factors on delta, dlse and dS.
    ``cap``, ``cap_slope``: the form of the soft cap and of its derivative, as numbers in CAPS and CAP_SLOPES.
    ``dq_form``, ``dk_form``, ``dv_form``, ``dbias_form``: the matrix in each gradient's product, as numbers in DS_FORMS and DV_FORMS.
    ``dq_count``, ``dk_count``, ``dv_count``, ``dbias_count``: how often a share is added to each gradient.
    ``merge``: how a block's result is merged into the running one, as a number in MERGES.
    ``part_lse``: the lse of a block in this merge, as a number in PART_LSES. If chunks are merged, it is that of a chunk.

    For each query or worker:
    ``o_to`` [a]: the worker that stores o and lse. ``o_times``: a factor on o.
    ``finish``, ``lse_out``: how the final o and lse are computed, as numbers in FINISHES and LSES_GIVEN.
    ``exchanged``: whether dk and dv are exchanged.
    ``sink_o``, ``sink_lse``: how the sinks enter o and lse, as numbers in SINKS; ``sink_o`` is also used for dsinks.
    ``dsink``, ``dsink_times``: how dsinks is computed, as a number in DSINKS, and a factor on it.

    For the whole ring:
    ``o_tokens``: the number of the layout by which the tokens of o are put back in order.
    ``stays``: which of 'l', 'm', 'o' and 'n' (the running lse) are not sent with the queries, if queries travel.
    ``not_home``: which of 'l' and 'm' are not sent with the queries on their last hop, back to their own worker.
    ``resets``: which of 'l', 'm' or 'o' becomes 0 when queries arrive, and whether it does so after the last hop, too.
    ``hidden_merge``: whether blocks without a visible pair are merged; 'rows': only rows without a visible key are, too;
    'computed': all rows of which the causal mask hides no block's first key, whatever a window hides.
    ``started``: whether the running softmax starts with l = 1.
    ``dy_ones``: whether dy is taken as 1 everywhere.
    ``routed``: the travelling gradients that take a wrong way between the workers, and the name of this way, one of
    ROUTES; those with "skipped" may end in BY_CAUSAL.
    ``uncleared``: the gradients whose buffers are not cleared; then 'steps' (or 'all steps', which skips no block) and the number of steps after which a
    buffer is used again; or 'tiles', or the ``blocks`` of :class:`Tiles`, and the size of a tile.
    ``tiles``: the :class:`Tiles` that are merged wrongly; None if tiles are merged correctly.
    ``begins``: the :class:`Begins` of a query's softmax in each block or chunk; None if it begins with nothing.
    ``delta_dims``: the part of the head dimension over which delta is summed, from one fraction to another.
    ``l_of_group``: whether the row sum of a block is taken over all query heads of a key head.
    ``padded``: how many keys with score 0 and value 0 each row of a block sees besides its own, [a, b, 1, i]; None: none.
    ``other_o``: the block whose o is merged with a block's lse, as a name in OTHER_O of the kinds of the forward pass; '' if it is the block's own.
    ``dq_of_group``: whether dS is summed over the query heads of a key head before the product for dq.
    ``mixed``: the gradients that are mixed, 'heads' or 'workers', and how, as in :func:`mixing`.
    ``starts``: the gradients, of dk and dv, that start as copies of k and v, not as zeros.
    ``stacked``: whether dk + dv is returned as dk, and the dk + dv of the next worker as dv.
    ``turned``: 1 if dS is not transposed for dk, 2 if P is not transposed for dv, 3 for both, 4 if dS is transposed for dbias.
    """

    of: Mapping[str, Any]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __getitem__(self, slot: str) -> Any:
        return self.of[slot]

    def several(self, slots: Sequence[str]) -> tuple[Any, ...]:
        """Return the values of at least two choices."""
        found: tuple[Any, ...] = itemgetter(*slots)(self.of)
        return found

    def with_value(self, slot: str, where: Booleans, value: Any, only: str = "") -> Choices:
        """Return the same choices, but with ``value`` in the choice ``slot`` at the pairs ``where`` [a, b, h, i, j].

        ``only``: the one of KERNELS for which the choice changes; '' changes it for both.
        """

        def new(old: Any) -> Any:
            return replaced(old, slot, where, value)

        if only:
            slots = self.own.get(only, {})
            changed = {**slots, slot: new(slots.get(slot, self.of[slot]))}
            return Choices(self.of, {**self.own, only: changed})
        own = {
            kernel: {**slots, slot: new(slots[slot])} if slot in slots else slots
            for kernel, slots in self.own.items()
        }
        return Choices({**self.of, slot: new(self.of[slot])}, own)

    def in_kernel(self, kernel: str) -> Choices:
        """Return the choices as one of KERNELS sees them."""
        own = self.own.get(kernel)
        return Choices({**self.of, **own}) if own else self

    def taking(self, slots: Iterable[str], other: Choices) -> Choices:
        """Return the same choices, but take those named in ``slots`` from ``other``."""
        return Choices({**self.of, **{slot: other[slot] for slot in slots}}, self.own)


def replaced(old: Any, slot: str, where: Booleans, value: Any) -> Any:
    """Return the value ``old`` of a choice, changed to ``value`` at the pairs ``where``."""
    if slot in OF_ALL or where.all():
        return value if slot in OF_ALL or np.ndim(value) else np.full_like(old, value)
    return np.where(where[:, 0, 0, 0, 0] if slot == "o_to" else where, value, old)


def mixing(how: str, count: int) -> Array:
    """Return how much of each head's or worker's gradient, in columns, each one gets, in rows.

    ``how``: 'sum', 'mean', 'sum so far', 'first', 'last', or 'only 0' or 'without 0', where the number is the one whose
    gradient is kept or 0.
    """
    every = np.ones((count, count))
    one = {"first": 0, "last": count - 1}
    if how in one:
        return every * (np.arange(count) == one[how])
    what, _, number = how.partition(" ")
    if what in ("only", "without"):
        return np.diag((np.arange(count) == int(number)) == (what == "only")).astype(float)
    return {"sum": every, "mean": every / count, "sum so far": np.tril(every)}[how]


@cache
def components(name: str) -> tuple[str, ...]:
    """Return the names of the three choices that give the worker, head and slot of a token."""
    return tuple(f"{name}.{one}" for one in COMPONENTS)


def home(geometry: Geometry, of: str) -> tuple[Integers, Integers, Integers]:
    """Return the worker, head and slot of the query ('q') or of the key ('k') of each pair."""
    W, H, n = geometry.workers, geometry.heads, geometry.slots
    a, b, h, i, j = np.ogrid[:W, :W, :H, :n, :n]
    return (a, h, i) if of == "q" else (b, h // geometry.group, j)


def right_choices(geometry: Geometry) -> Choices:
    """Return the choices of a correct ring."""
    number = np.zeros((1, 1, 1, 1, 1), int)
    one = np.ones(number.shape)
    of: dict[str, Any] = {}
    for names, side in ((OF_QUERIES, "q"), (OF_KEYS, "k")):
        for name in names:
            of |= dict(zip(components(name), home(geometry, side), strict=True))
    numbers = (
        "mask",
        "lse",
        "delta",
        "dq_form",
        "dk_form",
        "dv_form",
        "dbias_form",
        "drop",
        "drop_l",
        "drop_ds",
        "drop_dv",
        "merge",
        "part_lse",
        "finish",
        "lse_out",
        "cap",
        "cap_slope",
        "sink_o",
        "sink_lse",
        "dsink",
    )
    factors = (
        "times",
        "count",
        "delta_times",
        "dlse_times",
        "ds_times",
        "dq_count",
        "dk_count",
        "dv_count",
        "dbias_count",
        "bias_times",
        "drop_times",
        "o_times",
        "dsink_times",
    )
    of |= dict.fromkeys(numbers, number) | dict.fromkeys(factors, one)
    return Choices(
        {
            **of,
            "value_mask": number - 1,
            "computed": number - 1,
            "centred": number > 0,
            "dp_of_k": number > 0,
            "hidden_score": np.full(one.shape, -np.inf),
            "exchanged": number > 0,
            "o_to": np.arange(geometry.workers),
            "o_tokens": 0,
            "stays": "",
            "resets": (),
            "not_home": "",
            "stacked": False,
            "starts": (),
            "mixed": (),
            "hidden_merge": False,
            "started": False,
            "dy_ones": False,
            "routed": (),
            "uncleared": (),
            "l_of_group": False,
            "padded": None,
            "other_o": "",
            "tiles": None,
            "begins": None,
            "delta_dims": (0.0, 1.0),
            "dq_of_group": False,
            "turned": 0,
        }
    )
