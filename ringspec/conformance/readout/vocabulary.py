"""The single faults that are tried: what a kernel may do wrong. ``places`` says in which blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout import merges
from ringspec.conformance.readout.choices import (
    DELTAS,
    FINISHES,
    HEAD_MAPS,
    LSES,
    LSES_GIVEN,
    OF_ALL,
    OF_BLOCKS,
    OF_ROWS,
    SLOT_MAPS,
    Choices,
)
from ringspec.conformance.readout.geometry import LATER, SHORT, Geometry, believed, relations
from ringspec.conformance.readout.masks import Mask, every_mask, number_of
from ringspec.conformance.readout.merges import LN2, MERGES
from ringspec.conformance.readout.places import Place, place_named
from ringspec.problem.model import Booleans, Integers

ONE_HEAD_MAP = ("heads", "v_heads")


@dataclass(frozen=True)
class Kind:
    """A wrong choice: ``changes`` of slots of :class:`Choices`, and ``words`` that complete 'In the forward pass, ...'.

    ``cost`` is lower for what is more usual. ``of_workers``: it is chosen for workers, not for blocks.
    """

    words: str
    changes: tuple[tuple[str, object], ...]
    cost: float = 1.0
    of_workers: bool = False

    @property
    def slots(self) -> set[str]:
        return {slot for slot, _ in self.changes}

    @property
    def parts(self) -> str:
        """The axes within a block by which it may differ."""
        if self.slots & {*ONE_HEAD_MAP, *OF_ALL}:
            return ""
        if self.slots & set(OF_BLOCKS):
            return "h"
        return "hi" if self.slots & set(OF_ROWS) else "hij"


@dataclass(frozen=True)
class Fault:
    """A kind in some blocks of one pass."""

    phase: str
    kind: Kind
    place: Place

    @property
    def cost(self) -> float:
        return self.kind.cost + self.place.cost

    @property
    def name(self) -> tuple[str, str, str]:
        """Names the same fault in another problem."""
        return self.phase, self.kind.words, self.place.words

    def applied(self, choices: Choices) -> Choices:
        for slot, value in self.kind.changes:
            choices = choices.with_value(slot, self.place.table, value)
        return choices

    def told(self) -> str:
        """Say it in one sentence."""
        where = f", {self.place.words}" if self.place.words else ""
        return f"In the {self.phase} pass{where}, {self.kind.words}."


def kinds_of(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool = True
) -> list[Kind]:
    """Every wrong choice of a pass; ``distinct``: without those that are the same there as simpler ones."""
    own = forward_kinds if phase == "forward" else backward_kinds
    return [
        *block_kinds(geometry, phase, masks, distinct),
        *slot_kinds(),
        *own(geometry, distinct),
    ]


def fault_named(
    geometry: Geometry, masks: Sequence[Mask], name: tuple[str, str, str]
) -> Fault | None:
    """The fault with this ``Fault.name`` in a geometry whose patterns are ``masks``; None if it has no such fault.

    A fault may be the same there as another one, or change nothing.
    """
    phase, words, where = name
    kinds = kinds_of(geometry, phase, masks, False)
    kind = next((one for one in kinds if one.words == words), None)
    if kind is None:
        return None
    place = place_named(geometry, phase, masks[0].pattern, where, kind.of_workers)
    return None if place is None else Fault(phase, kind, place)


def factors(geometry: Geometry, distinct: bool) -> list[tuple[str, float]]:
    """Factors that kernels apply by mistake, in words that follow 'is' or 'are'."""
    scale, W, group = geometry.scale, geometry.workers, geometry.group
    numbers = {3, W, W + 1, group} if distinct else set(range(3, max(W + 2, group + 1, 9)))
    return [
        ("twice too large", 2.0),
        ("half as large", 0.5),
        ("of the wrong sign", -1.0),
        ("multiplied by ln 2", LN2),
        ("divided by ln 2", 1 / LN2),
        ("not multiplied by the scale", 1 / scale),
        ("multiplied by the scale twice", scale),
        ("multiplied by the square root of the scale", scale**-0.5),
        *((f"{x} times too large", float(x)) for x in sorted(numbers - {1, 2})),
        *((f"divided by {x}", 1.0 / x) for x in sorted(numbers - {1, 2})),
    ]


def block_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """What a block may do wrong in either pass: masks, scores, sources, heads."""
    for mask in masks if distinct else every_mask(geometry):
        if mask.words:
            yield Kind(mask.words, (("mask", number_of(mask.pattern, masks)),), mask.cost)
    if not geometry.sees_all:
        everything = next(n for n, mask in enumerate(masks) if mask.pattern.all())
        yield Kind("hidden pairs get the score 0, not -inf", (("hidden_score", 0.0),), 1.1)
        yield Kind(
            "hidden pairs enter the product with the values (the row sums are right)",
            (("value_mask", everything),),
            1.2,
        )
    yield Kind("the block is not computed", (("count", 0.0),), 0.9)
    yield Kind("the block is counted twice", (("count", 2.0),), 0.9)
    yield Kind("the block is counted three times", (("count", 3.0),), 1.3)
    for words, value in factors(geometry, distinct):
        if value != 0.5:
            yield Kind(f"scores are {words}", (("times", value),))
    yield Kind("all scores are 0", (("times", 0.0),), 1.2)
    step = geometry.steps(phase)[:, :, None, None, None]
    yield Kind(
        "scores are multiplied by the scale once more in every step",
        (("times", geometry.scale**step),),
        1.2,
    )
    yield Kind("scores are doubled in every step", (("times", 2.0**step),), 1.4)
    for owner, table in relations(geometry, phase, "k", distinct).items():
        yield Kind(f"keys and values are those of {owner}", (("k", table), ("v", table)))
        yield Kind(f"keys are those of {owner}", (("k", table),), 1.1)
        yield Kind(f"values are those of {owner}", (("v", table),), 1.1)
        moved = number_of(masks[0].pattern[np.arange(len(table))[:, None], table], masks)
        if moved or not (distinct or moved is None):
            words = f"keys, values and their positions are those of {owner}"
            yield Kind(words, (("k", table), ("v", table), ("mask", moved)), 1.05)
    for owner, table in relations(geometry, phase, "q", distinct).items():
        yield Kind(f"the scores use the queries of {owner}", (("q", table),), 1.1)
    if geometry.group < geometry.heads:
        for number, words in enumerate(HEAD_WORDS):
            if number:
                yield Kind(f"query head h reads {words}", (("heads", number),))
                yield Kind(f"query head h reads the values of {words}", (("v_heads", number),), 1.1)


HEAD_WORDS = (
    "", "key head h mod Hkv", "key head 0", "key head min(h, Hkv - 1)", "its key head, but the last query head reads key head 0",
)  # fmt: skip
assert len(HEAD_WORDS) == len(HEAD_MAPS)


COME = (
    "", "with the two halves of a block exchanged", "with the first half of a block in both halves",
    "with the second half of a block in both halves", "shifted by one slot", "shifted back by one slot",
    "in reversed order",
)  # fmt: skip
ADDED = (
    "", "with its two halves exchanged", "with its second half at the first", "with its first half at the second",
    "shifted by one slot", "shifted back by one slot", "in reversed order",
)  # fmt: skip
assert len(COME) == len(ADDED) == len(SLOT_MAPS)


def slot_kinds() -> Iterator[Kind]:
    """Tokens of a block in a wrong order."""
    for number, words in enumerate(COME):
        if number:
            yield Kind(
                f"keys and values come {words}", (("k_slots", number), ("v_slots", number)), 1.2
            )
            yield Kind(f"keys come {words}", (("k_slots", number),), 1.25)
            yield Kind(f"values come {words}", (("v_slots", number),), 1.25)
            yield Kind(f"queries come {words}", (("q_slots", number),), 1.25)


FINISH_WORDS = {
    "not divided": "o is not divided by l",
    "divided twice": "o is divided by l twice",
    "divided by the last block's l": "o is divided by the l of the last block alone",
    "before the last merge": "o is that before the last block was merged (lse is right)",
}
LSE_GIVEN_WORDS = {
    "maximum": "lse is the row maximum alone",
    "log l": "lse is log l without the maximum",
    "base 2": "lse is in base 2",
    "last block": "lse is that of the last block alone",
    "first block": "lse is that of the first block alone",
    "log2 l": "lse is the maximum plus log2 l",
    "read token first": "lse is read in the order token, head",
    "written token first": "lse is written in the order token, head",
    "base 2 twice": "lse is divided by ln 2 twice",
    "times ln 2": "lse is multiplied by ln 2",
    "negative": "lse has the wrong sign",
    "last maximum": "lse is the maximum of the last block, not the running one, plus log l",
    "first of group": "lse is that of the first query head of each key head",
}


def forward_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """What a forward may do wrong besides: merges, the end of a row, where results are stored."""
    for number, name in enumerate(MERGES):
        if number:
            words = merges.WRONG[name]
            yield Kind(words, (("merge", number),))
            if not (geometry.sees_all and distinct):
                more = f"{words}, and blocks without a visible pair are merged too"
                yield Kind(more, (("merge", number), ("hidden_merge", True)), 1.05)
    for name, words in FINISH_WORDS.items():
        yield Kind(words, (("finish", FINISHES.index(name)),), 1.0, True)
    for name, words in LSE_GIVEN_WORDS.items():
        yield Kind(words, (("lse_out", LSES_GIVEN.index(name)),), 1.0, True)
    yield Kind("o is 0", (("o_times", 0.0),), 1.2, True)
    for words, value in factors(geometry, distinct):
        yield Kind(f"o is {words}", (("o_times", value),), 1.2, True)
    if geometry.travels("forward") == "queries":
        for names, what in (
            ("l", "l"),
            ("m", "m"),
            ("the running lse", "n"),
            ("l and m", "lm"),
            ("o", "o"),
        ):
            words = f"{names} (not sent with the queries) are what the worker computed for the last visitor"
            yield Kind(words, (("stays", what),), 1.1)
    yield Kind(
        "the running softmax starts as if a key with score 0 had been seen", (("started", True),)
    )
    r = np.arange(geometry.workers)
    for words, table in (("next worker", (r + 1) % len(r)), ("worker before", (r - 1) % len(r))):
        yield Kind(f"o and lse are stored at the {words}", (("o_to", table),), 1.3, True)
    yield from put_back_kinds(geometry, ("o",))


def put_back_kinds(geometry: Geometry, names: Sequence[str]) -> Iterator[Kind]:
    for number, layout in enumerate(believed(geometry), 1):
        for name in names if layout not in (LATER, SHORT) else ():
            words = f"tokens of {name} are put back into order as in the layout {layout}"
            yield Kind(words, (("put_back", (name, number)),), 1.2)


LSE_WORDS = {
    "block": "p is made with the lse of the block alone",
    "base 2": "lse is divided by ln 2 (taken for natural where it is in base 2)",
    "times ln 2": "lse is multiplied by ln 2",
    "maximum": "p is made with the row maximum in place of lse",
    "zero": "p is made without lse",
    "log l": "p is made with log l in place of lse",
    "last block": "p is made with the lse of the last block alone",
    "first block": "p is made with the lse of the first block alone",
    "so far": "p is made with the lse of the blocks up to this one",
}
DELTA_WORDS = {
    "block": "delta is summed over the block's keys alone",
    "none": "delta is left out",
    "block's own p": "delta is <dp, p> of the block with p summing to 1",
    "times p": "delta is multiplied by the block's sum of p",
    "first block": "delta is made from o after the first block",
    "last block": "delta is made from the o of the last block alone",
    "block's own o": "delta is <dy, o> of the block's own normalised o",
    "used dy": "delta is made from the dy that the block uses",
}
ROW_WORDS = {
    "read token first": "is read in the order token, head",
    "written token first": "is written in the order token, head",
    "first of group": "is that of the first query head of each key head",
    "next head": "is that of the next head",
    "group first": "is read with the heads in another order (h mod group, then h // group)",
    "halves exchanged": "is that of the other half of a worker's queries",
}


def row_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """lse and delta of the wrong row, or another number."""
    both = (("lse", LSES.index("block")), ("delta", DELTAS.index("block")))
    yield Kind("p is made with the lse of the block alone, and so is delta", both, 1.1)
    for name, words in LSE_WORDS.items():
        yield Kind(words, (("lse", LSES.index(name)),))
    for name, words in DELTA_WORDS.items():
        yield Kind(words, (("delta", DELTAS.index(name)),))
    for name, words in ROW_WORDS.items():
        yield Kind(f"lse {words}", (("lse", LSES.index(name)),))
        yield Kind(f"delta {words}", (("delta", DELTAS.index(name)),))
        yield Kind(
            f"each of lse and delta {words}",
            (("lse", LSES.index(name)), ("delta", DELTAS.index(name))),
            1.1,
        )
    for owner, table in relations(geometry, "backward", "q", distinct).items():
        yield Kind(f"lse is that of {owner}", (("lse_of", table),))
        yield Kind(f"delta is that of {owner}", (("delta_of", table),))
        yield Kind(f"lse and delta are those of {owner}", (("lse_of", table), ("delta_of", table)))
        mixed = (("delta", DELTAS.index("used dy")), ("delta_of", table))
        yield Kind(f"delta is made with the o of {owner}", mixed, 1.1)


def backward_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """What a backward may do wrong besides."""
    yield from row_kinds(geometry, distinct)
    yield from product_kinds(geometry, distinct)
    yield from route_kinds(geometry, distinct)
    for words, value in factors(geometry, distinct):
        yield Kind(f"delta is {words}", (("delta_times", value),), 1.1)
        yield Kind(f"dS is {words}", (("ds_times", value),), 1.1)
        yield Kind(f"dq and dk are {words}", (("dq_count", value), ("dk_count", value)), 1.15)
        yield Kind(f"dk and dv are {words}", (("dk_count", value), ("dv_count", value)), 1.15)
        for name in ("dq", "dk", "dv"):
            yield Kind(
                f"{name} is {words}", ((f"{name}_count", value),), 1.0 if value == 2 else 1.2
            )
    for name in ("dq", "dk", "dv"):
        yield Kind(f"the share of {name} is lost", ((f"{name}_count", 0.0),))
    yield Kind("the shares of dk and dv are lost", (("dk_count", 0.0), ("dv_count", 0.0)))
    later = later_steps(geometry)
    for words, factor in (
        ("multiplied by the scale", geometry.scale),
        ("doubled", 2.0),
        ("halved", 0.5),
    ):
        for name in ("dq", "dk", "dv"):
            grown = ((f"{name}_count", factor**later),)
            yield Kind(f"what {name} holds is {words} again in every later step", grown, 1.2)
    yield from put_back_kinds(geometry, ("dq", "dk", "dv"))


def later_steps(geometry: Geometry) -> Integers:
    """[a, b, 1, 1, 1]: how many steps follow the one of a block."""
    return (geometry.workers - 1 - geometry.steps("backward"))[:, :, None, None, None]


def product_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Wrong operands of the products that give dq, dk and dv."""
    yield Kind("dy is taken as 1 everywhere (the gradient of the sum of o)", (("dy_ones", True),))
    yield Kind("dS is not transposed in the product for dk", (("turned", 1),))
    yield Kind("P is not transposed in the product for dv", (("turned", 2),))
    yield Kind(
        "neither P nor dS is transposed in the products for dv and dk", (("turned", 3),), 1.1
    )
    for number, name in enumerate(believed(geometry), 1):
        yield Kind(
            f"dy is dealt to the workers in the layout {name}", (("dy_tokens", number),), 1.1
        )
    for number, words in enumerate(COME):
        if number:
            yield Kind(f"dy comes {words}", (("dy_slots", number),), 1.25)
    for owner, table in relations(geometry, "backward", "q", distinct).items():
        used = (("delta", DELTAS.index("used dy")),)
        whole = (("q", table), ("dy", table), ("lse_of", table), ("delta_of", table))
        yield Kind(f"dy is that of {owner}", (("dy", table),), 1.1)
        yield Kind(f"dy is that of {owner}, also in delta", (("dy", table), *used), 1.15)
        yield Kind(f"queries and dy are those of {owner}", (("q", table), ("dy", table)))
        yield Kind(f"queries, dy, lse and delta are those of {owner}", whole, 1.3)
        yield Kind(f"the product for dv uses the dy of {owner}", (("dv_dy", table),), 1.05)
        yield Kind(f"the product for dk uses the queries of {owner}", (("dk_q", table),), 1.05)
    for owner, table in relations(geometry, "backward", "k", distinct).items():
        yield Kind(f"the product for dq uses the keys of {owner}", (("dq_k", table),), 1.05)


def route_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Shares of gradients that are added at the wrong place."""
    for owner, table in relations(geometry, "backward", "q", distinct).items():
        yield Kind(f"dq is added to that of {owner}", (("dq_to", table),))
    for owner, table in relations(geometry, "backward", "k", distinct).items():
        # Simpler than keys and values from elsewhere, which give the same where nothing is masked.
        both = (("dk_to", table), ("dv_to", table))
        yield Kind(f"dk and dv are added to those of {owner}", both, 0.95)
        yield Kind(f"dk is added to that of {owner}", (("dk_to", table),), 1.1)
        yield Kind(f"dv is added to that of {owner}", (("dv_to", table),), 1.1)
    for number, words in enumerate(ADDED):
        if number:
            for name in ("dq", "dk", "dv"):
                yield Kind(
                    f"the share of {name} is added {words}", ((f"{name}_slots", number),), 1.2
                )
            slots = (("dk_slots", number), ("dv_slots", number))
            yield Kind(f"the shares of dk and dv are added {words}", slots, 1.15)
    group, kv = geometry.group, geometry.heads // geometry.group
    if group > 1 and kv > 1:
        h = np.arange(geometry.heads)
        right: Booleans = (h // group == h % kv)[:, None, None]
        for names in (("dk",), ("dv",), ("dk", "dv")):
            words = f"{' and '.join(names)} of query head h {'is' if len(names) == 1 else 'are'} added to key head h mod Hkv"
            yield Kind(words, tuple((f"{name}_count", right.astype(float)) for name in names), 1.0)
