"""Every choice that a ring makes, as data: the correct choices, and how to change one of them somewhere.

A choice made for each pair has the axes [a, b, h, i, j] (query i of worker a, key j of worker b, head h); an axis of
length 1 stands for all. A choice made for each row of a worker has the axes [a, 1, h, i, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.readout.geometry import Geometry
from ringspec.problem.model import Booleans, Integers

# What a pass reads or writes at the token of a query (worker, query head, slot), and its use.
OF_QUERIES = {
    "q": "the scores", "dy": "dp", "dv_dy": "dv", "dk_q": "dk", "lse_of": "the lse that a block uses",
    "dlse_of": "the dlse that is subtracted from delta", "delta_dy": "the dy in delta", "delta_o": "the o in delta", "dq_to": "where dq is added",
    "result_of": "the row whose block result is merged into this row", "lse_row": "the row whose lse is returned",
    "o_row": "the row whose o is returned",
}  # fmt: skip
# The same by the token of a key (worker, key head, slot).
OF_KEYS = {
    "k": "the scores", "v": "o, and dp", "dq_k": "dq", "dk_to": "where dk is added", "dv_to": "where dv is added",
}  # fmt: skip
COMPONENTS = ("worker", "head", "slot")
KERNELS = ("dq", "dk and dv")  # which many backwards compute apart, each with its own masks and p

# The numbered variants of some choices; the correct one is number 0.
FINISHES = (
    "right", "not divided", "divided twice", "divided by the last block's l", "before the last merge",
    "divided by the first block's l", "multiplied by l", "divided by l before the last merge",
)  # fmt: skip
LSES_GIVEN = (
    "right", "maximum", "log l", "base 2", "last block", "first block", "log2 l", "base 2 twice", "times ln 2",
    "negative", "last maximum", "before the last merge", "l", "twice the maximum", "scaled maximum",
    "unscaled maximum", "maximum plus l", "maximum minus log l", "first maximum",
)  # fmt: skip
LSES = (
    "right", "block", "base 2", "times ln 2", "maximum", "zero", "log l", "last block", "first block", "so far",
    "negative", "block's maximum", "delta", "times scale", "divided by scale",
)  # fmt: skip
DELTAS = (
    "right", "block", "none", "block's own p", "times p", "first block", "last block", "block's own o", "block's p dp twice",
    "times l", "lse", "of the group",
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
DV_FORMS = ("right", "block's maximum", "row maximum", "block's lse", "dS", "p dp", "dp")
OF_ALL = (
    "hidden_merge", "started", "dy_ones", "turned", "stays", "resets", "o_tokens", "adds", "uncleared", "dq_of_group", "l_of_group", "tiles", "not_home",
)  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """A wrong ``merge`` of the tiles of ``size`` keys into which a kernel divides a block.

    ``through``: tiles are merged into the state that travels on to the next step; otherwise each block begins anew.
    ``own``: only the block of a worker's own keys (step 0) is divided.
    """

    size: int
    merge: str
    through: bool
    own: bool = False

    def of(self, geometry: Geometry, step: int = 0) -> list[slice]:
        """Return the keys of each tile of a block."""
        if self.own and step > 0:
            return [slice(0, geometry.slots)]
        starts = range(0, geometry.slots, geometry.run)
        return [
            slice(x, min(x + self.size, start + geometry.run))
            for start in starts
            for x in range(start, start + geometry.run, self.size)
        ]


@dataclass(frozen=True)
class Choices:
    """All choices of a ring: ``of`` maps the name of each choice (its slot) to the value for every pair, row or worker.

    Tokens, three slots each ('q.worker', 'q.head', 'q.slot'): those of OF_QUERIES and OF_KEYS.
    Pairs:    ``mask``  number of a pattern; ``value_mask``  pattern for the products with v and dy, -1: as ``mask``;
              ``hidden_score``  score of a hidden pair; ``times``  factor on the score;
              ``cap``, ``cap_slope``  variant of the soft cap, and of its derivative;
              ``centred``  whether the mean over the block's keys is subtracted from the scores; ``count``  how often a pair is computed;
              ``lse``, ``delta``  variant of the row constant in the backward pass; ``delta_times``, ``dlse_times``, ``ds_times``  factors;
              ``dq_form``, ``dk_form``, ``dv_form``  the matrix in the last product for dq, dk, dv;
              ``dq_count``, ``dk_count``, ``dv_count``  how often a share is added
    Rows:     ``merge``  how a block's result is merged into the running one
    Workers:  ``o_to``, [a]  worker that stores the results; ``o_times``  factor on o; ``finish``, ``lse_out``  how o and lse
              are completed; ``exchanged``  whether dk and dv are exchanged
    All:      ``o_tokens``  layout by which the tokens of o are put in order; ``stays``  which of 'l', 'm', 'o' a Q ring does
              not send, 'n': the running lse; ``not_home``  which of 'l' and 'm' it does not send on its last hop;
              ``resets``  which of 'l', 'm', 'o' is 0 on arrival, and whether it is 0 on arrival at home; ``hidden_merge``  whether blocks without a visible
              pair are merged; ``started``  whether the running softmax starts with l = 1; ``dy_ones``  whether dy is 1
              everywhere; ``adds``  gradients that a hop adds to what the receiver has sent on;
              ``uncleared``  gradients of a block whose buffer is not cleared, and after how many steps it is used again;
              ``tiles``  :class:`Tiles` that are merged wrongly; None if tiles of keys are merged correctly;
              ``l_of_group``  whether the row sum of a block is taken over all query heads of a key head;
              ``dq_of_group``  whether dS is summed over the query heads of a key head before the product for dq;
              ``turned``  bits: dS is not transposed for dk (1), P is not transposed for dv (2)
    """

    of: Mapping[str, Any]

    def __getitem__(self, slot: str) -> Any:
        return self.of[slot]

    def with_value(self, slot: str, where: Booleans, value: Any, only: str = "") -> Choices:
        """The same choices but ``value`` in the slot where ``where``, [a, b, h, i, j].

        ``only``: one of KERNELS, for a backward that computes dq apart from dk and dv; '' is both.
        """
        changed = {}
        for kernel in (only,) if only else ("", *KERNELS):
            name = of_kernel(kernel, slot)
            if kernel == only or name in self.of:
                changed[name] = replaced(self.of.get(name, self.of[slot]), slot, where, value)
        return Choices({**self.of, **changed})

    def in_kernel(self, kernel: str) -> Choices:
        """Return the choices as one of KERNELS sees them."""
        start = of_kernel(kernel, "")
        own = {x.removeprefix(start): value for x, value in self.of.items() if x.startswith(start)}
        return Choices({**self.of, **own}) if own else self

    def taking(self, slots: Iterable[str], other: Choices) -> Choices:
        """Return the same choices except those of ``other`` in ``slots``."""
        return Choices({**self.of, **{slot: other[slot] for slot in slots}})


def of_kernel(kernel: str, slot: str) -> str:
    """Return the name of a slot in which one of KERNELS has its own value."""
    return f"{kernel}: {slot}" if kernel else slot


def replaced(old: Any, slot: str, where: Booleans, value: Any) -> Any:
    """Return the ``old`` value of a slot, changed to ``value`` at the pairs ``where``."""
    if slot in OF_ALL or where.all():
        return value if slot in OF_ALL or np.ndim(value) else np.full_like(old, value)
    return np.where(where[:, 0, 0, 0, 0] if slot == "o_to" else where, value, old)


def components(name: str) -> tuple[str, ...]:
    """Return the three slots that give the worker, head and slot of a token."""
    return tuple(f"{name}.{one}" for one in COMPONENTS)


def home(geometry: Geometry, of: str) -> tuple[Integers, Integers, Integers]:
    """Return worker, head and slot, [a, b, h, i, j], of the query ('q') or the key ('k') of each pair."""
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
        "merge",
        "finish",
        "lse_out",
        "cap",
        "cap_slope",
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
        "o_times",
    )
    of |= dict.fromkeys(numbers, number) | dict.fromkeys(factors, one)
    return Choices(
        {
            **of,
            "value_mask": number - 1,
            "centred": number > 0,
            "hidden_score": np.full(one.shape, -np.inf),
            "exchanged": number > 0,
            "o_to": np.arange(geometry.workers),
            "o_tokens": 0,
            "stays": "",
            "resets": (),
            "not_home": "",
            "hidden_merge": False,
            "started": False,
            "dy_ones": False,
            "adds": (),
            "uncleared": (),
            "l_of_group": False,
            "tiles": None,
            "dq_of_group": False,
            "turned": 0,
        }
    )
