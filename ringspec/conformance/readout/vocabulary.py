"""The single faults that are tried: every mistake that a kernel may make.

A *kind* is a mistake, expressed as wrong values of a ring's choices. A *fault* is a kind at a place, which is a set of
pairs of tokens (:mod:`ringspec.conformance.readout.places`). A *block* contains the pairs of one worker's queries with
one worker's keys. A *share* is what one pair adds to a row of dq, dk or dv. A backward pass may consist of two KERNELS,
one for dq, and one for dk and dv.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.readout import merges
from ringspec.conformance.readout.choices import (
    CAP_SLOPES,
    CAPS,
    DELTAS,
    DROPS,
    DROPS_IN_DS,
    DROPS_IN_L,
    DS_FORMS,
    DSINKS,
    DV_FORMS,
    FINISHES,
    KERNELS,
    LSES,
    LSES_GIVEN,
    OF_ALL,
    SINKS,
    Choices,
    Tiles,
    components,
    home,
)
from ringspec.conformance.readout.geometry import LATER, SHORT, Geometry, believed
from ringspec.conformance.readout.masks import Mask, every_mask, number_of
from ringspec.conformance.readout.merges import LN2, MERGES
from ringspec.conformance.readout.places import Place, place_named
from ringspec.conformance.readout.sources import Source, query_heads, sources

# Choices for what both kernels of a backward pass compute: p, dp and dS.
OF_BOTH = {
    "q", "k", "v", "dy", "mask", "centred", "hidden_score", "times", "count", "lse", "lse_of", "delta", "delta_dy", "delta_o",
    "delta_times", "ds_times", "dlse_of", "dlse_times", "bias_q", "bias_k", "bias_times", "drop_q", "drop_k", "drop",
    "drop_times", "drop_ds",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A mistake: ``changes`` are names of choices in :class:`Choices` with their wrong values.

    ``words`` complete 'In the forward pass, ...'. ``cost`` is lower for more usual mistakes. ``of_workers``: the choice
    is made for whole workers or their queries, not for blocks. ``only``: the one of KERNELS that makes the mistake;
    '' if both do.
    """

    words: str
    changes: tuple[tuple[str, object], ...]
    cost: float = 1.0
    of_workers: bool = False
    only: str = ""

    @property
    def slots(self) -> set[str]:
        return {slot for slot, _ in self.changes}


@dataclass(frozen=True)
class Fault:
    """A mistake (``kind``) at a ``place`` in one pass: ``phase`` is 'forward' or 'backward'."""

    phase: str
    kind: Kind
    place: Place

    @property
    def cost(self) -> float:
        return self.kind.cost + self.place.cost

    @property
    def name(self) -> tuple[str, str, str]:
        """The name by which the same fault is recognised in another problem."""
        return self.phase, self.kind.words, self.place.words

    def applied(self, choices: Choices) -> Choices:
        for slot, value in self.kind.changes:
            choices = choices.with_value(slot, self.place.table, value, self.kind.only)
        return choices


def kinds_of(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool = True
) -> list[Kind]:
    """Return every kind of mistake in a pass.

    ``distinct``: leave out kinds that have the same effect in this ring as a simpler one.
    """
    blocks = block_kinds(geometry, phase, masks, distinct)
    if phase == "forward":
        return [*blocks, *forward_kinds(geometry, masks, distinct)]
    kinds = [*blocks, *backward_kinds(geometry, masks, distinct)]
    return [*kinds, *(one for kind in kinds if both_kernels(kind) for one in in_one_kernel(kind))]


def both_kernels(kind: Kind) -> bool:
    """Return whether one of KERNELS can make this mistake without the other.

    Factors on dS and on a block are excluded: in a single kernel they are factors on its gradients, which have their
    own kinds.
    """
    slots = {slot.split(".")[0] for slot in kind.slots}
    alone = slots <= {"ds_times", "count"} or slots & {*OF_ALL, "exchanged"}
    return bool(slots & OF_BOTH) and not alone


def in_one_kernel(kind: Kind) -> Iterator[Kind]:
    """Yield the mistake as made only by the kernel of dq, then as made only by the kernel of dk and dv."""
    for kernel in KERNELS:
        words = f"{kind.words} (for {kernel} alone)"
        yield dataclasses.replace(kind, words=words, cost=kind.cost + 0.4, only=kernel)


def fault_named(
    geometry: Geometry,
    masks: Sequence[Mask],
    name: tuple[str, str, str],
    kinds: Sequence[Kind] | None = None,
) -> Fault | None:
    """Return the fault with this ``Fault.name`` in the ring of ``geometry`` and ``masks``; None if it has no such fault.

    In this ring, the fault may have the same effect as another one, or none. ``kinds``: the kinds of this pass, if the
    caller has them already; they must include those that have the same effect as a simpler one.
    """
    phase, words, where = name
    kinds = kinds_of(geometry, phase, masks, False) if kinds is None else kinds
    kind = next((one for one in kinds if one.words == words), None)
    if kind is None:
        return None
    place = place_named(geometry, phase, masks[0].pattern, where, kind.of_workers)
    return None if place is None else Fault(phase, kind, place)


def factors(geometry: Geometry, distinct: bool) -> list[tuple[str, float]]:
    """Return the factors that a kernel may apply by mistake, with words that follow 'is' or 'are'."""
    scale, W, group = geometry.scale, geometry.workers, geometry.group
    numbers = {3, W, W + 1, group} if distinct else set(range(3, max(W + 2, group + 1, 9)))
    return [
        ("too large by a factor of 2", 2.0),
        ("too small by a factor of 2", 0.5),
        ("negated", -1.0),
        ("multiplied by ln 2", LN2),
        ("divided by ln 2", 1 / LN2),
        ("not multiplied by the scale", 1 / scale),
        ("multiplied by the scale twice", scale),
        ("multiplied by the square root of the scale", scale**-0.5),
        ("multiplied by the scale and divided by ln 2", scale / LN2),
        *((f"too large by a factor of {x}", float(x)) for x in sorted(numbers - {1, 2})),
        *((f"divided by {x}", 1.0 / x) for x in sorted(numbers - {1, 2})),
    ]


def factors_beside_scores(geometry: Geometry, distinct: bool) -> list[tuple[str, float]]:
    """Return the factors on what is correct without a factor, with words that follow 'is' or 'are'."""
    scale = geometry.scale
    usual = [(words, x) for words, x in factors(geometry, distinct) if "scale" not in words]
    return [("multiplied by the scale", scale), ("divided by the scale", 1 / scale), *usual]


CAP_WORDS = {
    "none": "the soft cap is not applied",
    "before the scale": "the soft cap is applied before the scale",
    "not multiplied back": "scores are tanh(s / cap), not multiplied by the cap",
    "not divided": "scores are cap tanh(s), with s not divided by the cap",
    "twice": "the soft cap is applied twice",
}
CAP_SLOPE_WORDS = {
    "none": "dS lacks the derivative of the soft cap",
    "of the capped score": "the derivative of the soft cap is taken at the capped score",
    "not squared": "the derivative of the soft cap is 1 - tanh(s / cap), not 1 - tanh(s / cap)^2",
    "capped score not divided": "the derivative of the soft cap is 1 - s^2 with the capped score s, not divided by the cap",
}


def block_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """Yield the mistakes that a block can have in either pass, such as a wrong mask or a factor on the scores."""
    for mask in masks if distinct else every_mask(geometry):
        if mask.words:
            yield Kind(mask.words, (("mask", number_of(mask.pattern, masks)),), mask.cost)
    if not geometry.sees_all:
        everything = next(n for n, mask in enumerate(masks) if mask.pattern.all())
        yield Kind("hidden pairs get the score 0, not -inf", (("hidden_score", 0.0),), 1.1)
        words = (
            "hidden pairs are included in the product with the values (the row sums are correct)"
        )
        yield Kind(words, (("value_mask", everything),), 1.2)
    nothing = next(n for n, mask in enumerate(masks) if not mask.pattern.any())
    words = "visible pairs enter the row sums and not the product with the values"
    yield Kind(words, (("value_mask", nothing),), 1.3)
    yield Kind("the block is not computed", (("count", 0.0),), 0.9)
    yield Kind("the block is counted twice", (("count", 2.0),), 0.9)
    yield Kind("the block is counted three times", (("count", 3.0),), 1.3)
    for words, value in factors(geometry, distinct):
        if value != 0.5:
            yield Kind(f"scores are {words}", (("times", value),))
    words = "each block's mean over its keys is subtracted from the scores"
    yield Kind(words, (("centred", True),), 1.2)
    if geometry.softcap is not None:
        for name, words in CAP_WORDS.items():
            yield Kind(words, (("cap", CAPS.index(name)),), 0.95)
        if not geometry.sees_all:
            words = "hidden pairs get the score -cap (they are masked before the soft cap)"
            yield Kind(words, (("hidden_score", -geometry.softcap),), 1.0)
    if geometry.bias:
        yield from bias_kinds(geometry, phase, distinct)
    if geometry.dropout is not None:
        yield from drop_kinds(geometry, phase, distinct, geometry.dropout)
    yield Kind("all scores are 0", (("times", 0.0),), 1.2)
    step = geometry.steps(phase)[:, :, None, None, None]
    yield Kind(
        "scores are multiplied by the scale once more in every step",
        (("times", geometry.scale**step),),
        1.2,
    )
    yield Kind("scores are doubled in every step", (("times", 2.0**step),), 1.4)
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


def of_tables(
    geometry: Geometry,
    phase: str,
    distinct: bool,
    names: tuple[str, str],
    noun: str,
    made: Callable[[Operand, Source], Kind],
) -> Iterator[Kind]:
    """Yield the faults of wrong rows or columns of a table over pairs, as ``made`` describes them.

    ``names``: the choices of its rows and columns.
    """
    the = "" if noun == "dbias" else "the "
    for side, which, of in (("k", "columns", names[1]), ("q", "rows", names[0])):
        for source in sources(geometry, phase, side, distinct):
            if side == "q" or "head" not in dict(source.tables):
                yield made(Operand(f"the {which} of {the}{noun}", (of,)), source)


@dataclass(frozen=True)
class Operand:
    """An input of a block, with the ``noun`` that sentences use for it.

    ``of`` has the names of the choices that say from which token the input is taken.
    """

    noun: str
    of: tuple[str, ...]
    cost: float = 1.0

    def taken(self, source: Source) -> Kind:
        """Return the mistake of taking this input from a wrong source."""
        return Kind(self.told(source), tables_at(self.of, source), self.cost + source.cost)

    def given(self, source: Source) -> Kind:
        """Return the mistake of adding what belongs to this operand to that of a wrong source."""
        words = f"{self.noun} are added {source.added or f'to those {source.words}'}"
        return Kind(words, tables_at(self.of, source), self.cost + source.cost)

    def told(self, source: Source) -> str:
        many = self.noun.startswith(
            (
                "keys",
                "values",
                "queries",
                "the keys",
                "the queries",
                "the rows",
                "the columns",
                "lse and",
            )
        )
        if source.added:
            return f"{self.noun} {'are' if many else 'is'} taken {source.words}"
        if "head" in dict(source.tables) and not {"k", "v", "dq_k"}.isdisjoint(self.of):
            what = "" if self.noun == "keys and values" else f"{self.noun} of "
            return f"query head h reads {what}{source.words.removeprefix('of ')}"
        return f"{self.noun} {'are those' if many else 'is that'} {source.words}"


def tables_at(names: Sequence[str], source: Source) -> tuple[tuple[str, object], ...]:
    return tuple((f"{name}.{one}", table) for name in names for one, table in source.tables)


FORWARD_OPERANDS = {
    "k": (
        Operand("keys and values", ("k", "v")), Operand("keys", ("k",), 1.1), Operand("values", ("v",), 1.1),
    ),
    "q": (Operand("queries", ("q",), 1.1),),
}  # fmt: skip
BACKWARD_OPERANDS = {
    "k": (
        Operand("keys and values", ("k", "v", "dq_k")), Operand("keys", ("k", "dq_k"), 1.1),
        Operand("values", ("v",), 1.1), Operand("the keys in the scores", ("k",), 1.2),
        Operand("the keys in the product for dq", ("dq_k",), 1.05),
    ),
    "q": (
        Operand("lse", ("lse_of",)), Operand("delta", ("delta_dy", "delta_o")),
        Operand("lse and delta", ("lse_of", "delta_dy", "delta_o"), 1.02),
        Operand("queries and dy", ("q", "dk_q", "dy", "dv_dy")), Operand("dy", ("dy", "dv_dy"), 1.1),
        Operand("queries", ("q", "dk_q"), 1.1), Operand("the dy in the product for dv", ("dv_dy",), 1.05),
        Operand("the queries in the product for dk", ("dk_q",), 1.05), Operand("the dy in dp", ("dy",), 1.12),
        Operand("the queries in the scores", ("q",), 1.2), Operand("the o in delta", ("delta_o",), 1.1),
        Operand("the dy in delta", ("delta_dy",), 1.15),
        Operand("dy (also in delta)", ("dy", "dv_dy", "delta_dy"), 1.13),
        Operand("queries, dy, lse and delta", ("q", "dk_q", "dy", "dv_dy", "lse_of", "delta_dy", "delta_o"), 1.3),
    ),
}  # fmt: skip


def operand_kinds(
    geometry: Geometry, phase: str, masks: Sequence[Mask], distinct: bool
) -> Iterator[Kind]:
    """Yield the mistakes of taking an input of a block from a wrong source."""
    operands = FORWARD_OPERANDS if phase == "forward" else BACKWARD_OPERANDS
    for side in ("k", "q"):
        for source in sources(geometry, phase, side, distinct):
            for operand in operands[side]:
                of_rows = "lse" in operand.noun or "delta" in operand.noun
                if side == "k" or of_rows or not source.words.startswith("as if"):
                    yield operand.taken(source)
            owners = dict(source.tables).get("worker")
            if side == "k" and owners is not None and not source.added:
                with_mask = masks[0].pattern[np.arange(len(owners))[:, None], owners[..., 0, 0, 0]]
                number = number_of(with_mask, masks)
                if number or not (distinct or number is None):
                    both = operands["k"][0].taken(source)
                    words = f"keys, values and their positions are those {source.words}"
                    yield Kind(words, (*both.changes, ("mask", number)), 1.05)


FINISH_WORDS = {
    "not divided": "o is not divided by l",
    "divided twice": "o is divided by l twice",
    "divided by the last block's l": "o is divided only by the l of the last block",
    "before the last merge": "o is the one before the last block was merged (lse is correct)",
    "divided by the first block's l": "o is divided only by the l of the first block",
    "multiplied by l": "o is multiplied by l instead of divided",
    "divided by l before the last merge": "o is divided by the l from before the last block was merged (lse is correct)",
}
LSE_GIVEN_WORDS = {
    "maximum": "lse is only the row maximum",
    "log l": "lse is log l without the maximum",
    "base 2": "lse is in base 2",
    "last block": "lse is that of only the last block",
    "first block": "lse is that of only the first block",
    "log2 l": "lse is the maximum plus log2 l",
    "base 2 twice": "lse is divided by ln 2 twice",
    "times ln 2": "lse is multiplied by ln 2",
    "negative": "lse has the wrong sign",
    "last maximum": "lse is the maximum of the last block, not the running one, plus log l",
    "before the last merge": "lse is the one before the last block was merged (o is correct)",
    "l": "lse is l, not the maximum plus log l",
    "scaled maximum": "the maximum in lse, which is scaled already, is multiplied by the scale again",
    "twice the maximum": "lse contains the maximum twice",
    "unscaled maximum": "the maximum in lse is not scaled",
    "maximum plus l": "lse is the maximum plus l, not plus log l",
    "maximum minus log l": "lse is the maximum minus log l, not plus log l",
    "first maximum": "lse is the maximum of the first block, not the running one, plus log l",
}


def sum_kinds(geometry: Geometry, masks: Sequence[Mask], distinct: bool) -> Iterator[Kind]:
    """Yield the masks that show too much, applied to the row sums alone. Padded keys change nothing else anyway."""
    hidden = ~masks[0].pattern & geometry.real_pairs
    for mask in masks if distinct else every_mask(geometry):
        more = (mask.pattern & hidden).any() or not hidden.any()
        if mask.words and (mask.pattern | ~masks[0].pattern).all() and more:
            words = f"the row sums (not o) are made as if {mask.words}"
            number = number_of(mask.pattern, masks)
            yield Kind(words, (("mask", number), ("value_mask", 0)), mask.cost + 0.3)


def forward_kinds(geometry: Geometry, masks: Sequence[Mask], distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes that only a forward pass can make: in inputs, in merges, and in the final o and lse."""
    yield from operand_kinds(geometry, "forward", masks, distinct)
    yield from sum_kinds(geometry, masks, distinct)
    for number, name in enumerate(MERGES):
        if name == merges.EMPTY:
            yield Kind(merges.WRONG[name], (("merge", number), ("hidden_merge", True)), 1.05)
        elif number:
            words = merges.WRONG[name]
            yield Kind(words, (("merge", number),))
            if not (geometry.sees_all and distinct):
                more = f"{words}, and blocks without a visible pair are merged too"
                yield Kind(more, (("merge", number), ("hidden_merge", True)), 1.05)
    yield from tile_kinds(geometry)
    yield from result_kinds(geometry)
    if geometry.group > 1:
        words = "the row sum of each block is taken over all query heads of a key head"
        yield Kind(words, (("l_of_group", True),), 1.2)
    for name, words in FINISH_WORDS.items():
        yield Kind(words, (("finish", FINISHES.index(name)),), 1.0, True)
    for name, words in LSE_GIVEN_WORDS.items():
        yield Kind(words, (("lse_out", LSES_GIVEN.index(name)),), 1.0, True)
    for source in sources(geometry, "forward", "q", distinct):
        if "worker" not in dict(source.tables):
            both = (Operand("lse and o", ("lse_row", "o_row")),) if geometry.padding else ()
            for operand in (Operand("lse", ("lse_row",)), Operand("o", ("o_row",), 1.1), *both):
                taken = operand.taken(source)
                yield Kind(f"the returned {taken.words}", taken.changes, taken.cost, True)
    r = np.arange(geometry.workers)
    beside = ("next worker", (r + 1) % len(r)), ("previous worker", (r - 1) % len(r))
    for words, table in beside:
        at = (("lse_row.worker", table.reshape(-1, 1, 1, 1, 1)),)
        yield Kind(f"lse is that of the {words} (o is correct)", at, 1.1, True)
        at = (("o_row.worker", table.reshape(-1, 1, 1, 1, 1)),)
        yield Kind(f"o is that of the {words} (lse is correct)", at, 1.1, True)
    yield Kind("o is 0", (("o_times", 0.0),), 1.2, True)
    for words, value in factors(geometry, distinct):
        yield Kind(f"o is {words}", (("o_times", value),), 1.2, True)
    if geometry.sinks:
        yield from sink_kinds(geometry)
    if geometry.travels("forward") == "queries":
        for names, what in (
            ("l", "l"),
            ("m", "m"),
            ("the running lse", "n"),
            ("l and m", "lm"),
            ("o", "o"),
            ("l, m and o", "lmo"),
        ):
            words = f"the values of {names}, not sent with the queries, are those that the worker computed for its previous visitor"
            yield Kind(words, (("stays", what),), 1.1)
        for names in ("l", "m", "lm"):
            words = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not sent home (the worker's last visitor was another)"
            yield Kind(words, (("not_home", names),), 1.1)
        for name in ("m", "l", "o"):
            words = f"{name} is taken for 0 when queries arrive (it is not sent with them"
            yield Kind(f"{words}, nor home)", (("resets", (name, True)),), 1.15)
            yield Kind(f"{words}, but it is sent home)", (("resets", (name, False)),), 1.15)
    yield Kind(
        "the running softmax starts as if a key with score 0 had been seen", (("started", True),)
    )
    for words, table in beside:
        yield Kind(f"o and lse are stored at the {words}", (("o_to", table),), 1.3, True)
    for number, layout in enumerate(believed(geometry), 1):
        if layout not in (LATER, SHORT):
            words = f"the tokens of o are put in the order of the layout {layout}"
            yield Kind(words, (("o_tokens", number),), 1.2)
    words = "tokens of o are put back with the layout's permutation, not with its inverse"
    yield Kind(words, (("o_tokens", len(believed(geometry)) + 1),), 1.2)


SINK_WORDS = {
    "none": "the sinks are left out",
    "every step": "the sinks are counted once in every step",
    "every block": "the sinks are counted once in every block in which a row sees a key",
    "times scale": "the sinks are multiplied by the scale",
    "divided by scale": "the sinks are divided by the scale",
    "times ln 2": "the sinks are multiplied by ln 2",
    "divided by ln 2": "the sinks are divided by ln 2",
    "first": "only the first of each head's sinks is counted",
    "unshifted": "exp(sink) is added to l, not exp(sink - m)",
    "not exponentiated": "the sink itself is added to l, not exp(sink - m)",
    "negated": "the sinks have the wrong sign",
}
DSINK_WORDS = {
    "lse without the sinks": "dsinks is computed with an lse that does not include the sinks",
    "without delta": "dsinks is the sum of the sinks' weights, without delta",
    "of all workers": "the dsinks of each worker is already the sum over all workers",
    "of p (1 - p)": "dsinks has p (1 - p) in place of p",
}


def sink_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the faults of counting the sinks in the softmax sum of each row."""
    for name, words in SINK_WORDS.items():
        number = SINKS.index(name)
        if name != "first" or geometry.sinks > 1:
            both = (("sink_o", number), ("sink_lse", number))
            yield Kind(words, both, 0.95, True)
            yield Kind(f"{words} (lse is correct)", both[:1], 1.0, True)
            yield Kind(f"{words} (o is correct)", both[1:], 1.0, True)
    h = np.arange(geometry.heads)
    for words, of in query_heads(geometry).items():
        if (of != h).any():
            table = of.reshape(1, 1, -1, 1, 1)
            yield Kind(f"the sinks are those of {words}", (("sink_of.head", table),), 1.0, True)


def dsink_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the faults of the gradient of the sinks, and of an lse without them."""
    without = LSES.index("without the sinks")
    alone = ("dsink", DSINKS.index("lse without the sinks"))
    words = "p is computed with an lse that does not include the sinks"
    yield Kind(f"{words} (dsinks is correct)", (("lse", without),), 1.0)
    yield Kind(words, (("lse", without), alone), 1.0)
    yield Kind("dsinks is 0", (("dsink_times", 0.0),), 0.95, True)
    for words, value in factors_beside_scores(geometry, distinct):
        yield Kind(f"dsinks is {words}", (("dsink_times", value),), 1.0, True)
    for name, words in DSINK_WORDS.items():
        yield Kind(words, (("dsink", DSINKS.index(name)),), 1.0, True)
    for name, words in SINK_WORDS.items():
        if name not in ("none", "every step") and (name != "first" or geometry.sinks > 1):
            yield Kind(f"{words} (for dsinks)", (("sink_o", SINKS.index(name)),), 1.1, True)
    h = np.arange(geometry.heads)
    for words, of in query_heads(geometry).items():
        if (of != h).any():
            table = of.reshape(1, 1, -1, 1, 1)
            yield Kind(
                f"dsinks is computed with the sinks of {words}",
                (("sink_of.head", table),),
                1.1,
                True,
            )
            yield Kind(
                f"dsinks is added to that of {words}", (("dsink_of.head", table),), 1.1, True
            )


def tile_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes in merging tiles of keys, within each block or across all blocks."""
    for size in (2, 3, 4):
        for name in merges.IN_TILES if size < geometry.run else ():
            for through, where in ((False, "within a block"), (True, "of all blocks")):
                words = f"between tiles of {size} keys {where}, {merges.WRONG[name]}"
                yield Kind(words, (("tiles", Tiles(size, name, through)),), 1.2)
    if geometry.run < geometry.slots:
        for name, wrong in merges.WRONG.items():
            if name == merges.EMPTY:
                continue
            words = f"between the results of chunks of keys, {wrong}"
            yield Kind(words, (("tiles", Tiles(geometry.run, name, True)),), 1.15)
            words = (
                f"between the results of blocks, and of the chunks of a worker's own block, {wrong}"
            )
            yield Kind(words, (("tiles", Tiles(geometry.run, name, True, True)),), 1.2)


def result_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes of merging a block's result into the running results of other rows."""
    n, half = geometry.slots, max(geometry.slots // 2, 1)
    i, h = np.arange(n), np.arange(geometry.heads)
    for words, rows in (
        ("of the second half of the queries is merged into the rows of the first half", np.where(i < half, (i + half) % n, -1)),
        ("of the first half of the queries is merged into the rows of the second half", np.where(i < half, -1, i - half)),
        ("is merged into the rows with the two halves exchanged", (i + half) % n),
        ("is merged into the rows one slot too early", np.where(i < n - 1, i + 1, -1)),
        ("is merged into the rows one slot too late", i - 1),
        ("is merged into the rows in reversed order", i[::-1]),
    ):  # fmt: skip
        yield Kind(
            f"the block's result {words}", (("result_of.slot", rows.reshape(1, 1, 1, n, 1)),), 1.15
        )
    if geometry.heads > 1:
        for words, heads in (("next head", np.roll(h, 1)), ("previous head", np.roll(h, -1))):
            table = heads.reshape(1, 1, -1, 1, 1)
            yield Kind(
                f"the block's result is merged into the rows of the {words}",
                (("result_of.head", table),),
                1.25,
            )


LSE_WORDS = {
    "block": "p is computed with the block's own lse",
    "base 2": "lse is divided by ln 2 (an lse in base 2 is used as if in base e)",
    "times ln 2": "lse is multiplied by ln 2",
    "maximum": "p is computed with the row maximum in place of lse",
    "zero": "p is computed without lse",
    "log l": "p is computed with log l in place of lse",
    "last block": "p is computed with the lse of the last block",
    "first block": "p is computed with the lse of the first block",
    "so far": "p is computed with the lse of the blocks up to this one",
    "negative": "lse has the wrong sign",
    "block's maximum": "p is computed with the block's row maximum in place of lse",
    "delta": "delta is taken for lse",
    "times scale": "lse is multiplied by the scale",
    "divided by scale": "lse is divided by the scale",
}
DELTA_WORDS = {
    "block": "delta is summed over only the block's keys",
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
}
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
DV_WORDS = {
    "block's maximum": "exp(s - the block's row maximum), not p",
    "row maximum": "exp(s - the row maximum), not p",
    "block's lse": "p normalised over only the block",
    "dS": "dS in place of p",
    "p dp": "p dp in place of p",
    "dp": "dp in place of p",
}


def backward_kinds(geometry: Geometry, masks: Sequence[Mask], distinct: bool) -> Iterator[Kind]:
    """Yield the mistakes that only a backward pass can make, such as a wrong lse, delta or product."""
    both = (("lse", LSES.index("block")), ("delta", DELTAS.index("block")))
    yield Kind(
        "p is computed with the block's own lse, and delta is summed over only the block's keys",
        both,
        1.1,
    )
    for name, words in LSE_WORDS.items():
        yield Kind(words, (("lse", LSES.index(name)),))
    for name, words in DELTA_WORDS.items():
        yield Kind(words, (("delta", DELTAS.index(name)),))
    yield from operand_kinds(geometry, "backward", masks, distinct)
    yield from product_kinds(geometry)
    if geometry.softcap is not None:
        for name, words in CAP_SLOPE_WORDS.items():
            yield Kind(words, (("cap_slope", CAP_SLOPES.index(name)),), 0.95)
        both = (("cap", CAPS.index("none")), ("cap_slope", CAP_SLOPES.index("none")))
        yield Kind("the soft cap and its derivative are left out", both, 1.0)
    if geometry.dlse:
        yield from dlse_kinds(geometry, distinct)
    if geometry.sinks:
        yield from dsink_kinds(geometry, distinct)
    if geometry.bias:
        yield from dbias_kinds(geometry, distinct)
    yield from goal_kinds(geometry, distinct)
    for words, value in factors(geometry, distinct):
        yield Kind(f"delta is {words}", (("delta_times", value),), 1.1)
        yield Kind(f"dS is {words}", (("ds_times", value),), 1.1)
        for names in GRADIENTS:
            cost = 1.15 if len(names) > 1 else 1.0 if value == 2 else 1.2
            yield Kind(f"{listing(names)} {verb(names)} {words}", at_counts(names, value), cost)
    for names in GRADIENTS:
        shares = "the share" if len(names) == 1 else "the shares"
        yield Kind(
            f"{shares} of {listing(names)} {verb(names)} lost",
            at_counts(names, 0.0),
            1.0 if names != ("dq", "dk") else 1.1,
        )
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


def dlse_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the faults of using dlse, the gradient that arrives for lse."""
    yield Kind("dlse is left out", (("dlse_times", 0.0),), 0.95)
    yield Kind("dlse is added to delta, not subtracted from it", (("dlse_times", -1.0),), 0.95)
    for words, value in factors_beside_scores(geometry, distinct):
        if value != -1:
            yield Kind(f"dlse is {words}", (("dlse_times", value),), 1.0)
    for source in sources(geometry, "backward", "q", distinct):
        yield Operand("dlse", ("dlse_of",)).taken(source)


GRADIENTS = (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk"), ("dq", "dk", "dv"))


def listing(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


def verb(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def at_counts(names: Sequence[str], value: object) -> tuple[tuple[str, object], ...]:
    return tuple((f"{name}_count", value) for name in names)


def product_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes in the products that give dq, dk and dv, and in the buffers that hold these gradients."""
    yield Kind("dy is taken as 1 everywhere (the gradient of the sum of o)", (("dy_ones", True),))
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
            yield Kind(f"dS is {words}", (("dq_form", form), ("dk_form", form)))
        yield Kind(f"the product for dq takes {words}", (("dq_form", form),), 1.1)
        yield Kind(f"the product for dk takes {words}", (("dk_form", form),), 1.1)
    for name, words in DV_WORDS.items():
        yield Kind(f"the product for dv takes {words}", (("dv_form", DV_FORMS.index(name)),), 1.1)
    if geometry.group > 1:
        words = "dS is summed over the query heads of a key head before the product for dq"
        yield Kind(words, (("dq_of_group", True),), 1.1)
    yield from over_head_kinds(geometry)
    yield Kind("dk and dv are exchanged", (("exchanged", True),), 1.1)
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
        yield Kind(words, (("adds", names),), 1.1)
        yield from buffer_kinds(geometry, names)
    for size in (2, 3, 4):
        for names in GRADIENTS[:4]:
            words = f"{listing(names)} of a tile of {size} tokens still contain{'s' if len(names) == 1 else ''} those of the tiles before it (the tile is not cleared)"
            if size < geometry.run:
                yield Kind(words, (("uncleared", (*names, "tiles", size)),), 1.2)
    # If the buffer of a gradient that stays on a worker is not cleared, every later step adds its contents again.
    again = (geometry.workers - geometry.steps("backward"))[:, :, None, None, None].astype(float)
    for names in GRADIENTS[:4]:
        if not {"dq"} <= set(names) if ("dq",) in travelling else names == ("dq",):
            words = f"a block's {listing(names)} {verb(names)} added again in every later step"
            yield Kind(words, at_counts(names, again), 1.2)


def over_head_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the mistakes of adding up gradients over all heads; the heads may be batch entries."""
    for names in GRADIENTS:
        heads = {
            geometry.heads if name == "dq" else geometry.heads // geometry.group for name in names
        }
        if len(heads) > 1 or 1 in heads:
            continue
        what = f"{listing(names)} {verb(names)}"
        summed = (("over_heads", names),)
        yield Kind(f"{what} summed over all heads, and every head gets the sum", summed, 1.1)
        words = f"{what} averaged over all heads, and every head gets the average"
        yield Kind(words, (*summed, *at_counts(names, 1 / heads.pop())), 1.15)


def buffer_kinds(geometry: Geometry, names: Sequence[str]) -> Iterator[Kind]:
    """Yield the mistakes in the buffers of the travelling gradients ``names``: not cleared, or added one step late."""
    what = f"a block's {listing(names)}"
    yield Kind(
        f"{what} still contain{'s' if len(names) == 1 else ''} those of the earlier steps (the buffer is not cleared)",
        (("uncleared", (*names, "steps", 1)),),
        1.1,
    )
    yield Kind(
        f"{what} still contain{'s' if len(names) == 1 else ''} those of every second step before (two buffers are not cleared)",
        (("uncleared", (*names, "steps", 2)),),
        1.15,
    )
    W, step = geometry.workers, geometry.steps("backward")
    a, b = np.indices((W, W))
    owner = a if names == ("dq",) else b
    late = ((owner - geometry.direction) % W)[:, :, None, None, None]
    there = tuple((f"{name}_to.worker", late) for name in names)
    kept = (step < W - 1)[:, :, None, None, None].astype(float)
    words = f"{what} {verb(names)} added one step late, to the next visitor's, and those of the last step are lost"
    yield Kind(words, (*there, *at_counts(names, kept)), 1.1)


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
