"""Combine the readings of several problems into the explanation that accounts for most of those that failed.

A *reading* is what was found out from the results of one problem. For each pass (forward or backward), it has sets of
*faults*: mistakes, such as a wrong mask, that together give every number of the results.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringspec.conformance.readout.faults import hints
from ringspec.conformance.readout.faults.places import LISTED, PAIRS
from ringspec.conformance.readout.reading import (
    BY_ROUNDING,
    GRADIENT,
    SAME,
    SAVED,
    Named,
    PassRead,
    Reading,
)
from ringspec.conformance.readout.search.rounding import is_rounding

MOST_ALTERNATIVES = 2
MOST_OTHERS = 3  # problems with further faults
SIMPLE = 2.0  # the largest cost of such a fault in a problem that was not searched
STILL_SIMPLE = 3.5  # and in one that was: less simple ones may have another cause
ABOUT_AS_SIMPLE = 0.5  # difference in cost up to which another explanation is reported, too
OF_LSE_ALONE = ("lse is ", "the returned lse is ")
RIGHT_GRADIENTS = "The gradients are right."
# Wrong keys and queries are those of the scores; the heads of the keys are also those of the product for dq.
OF_TOKENS = re.compile(r"^(keys|queries)\b.* are (those|taken)\b")
SAME_SCORES = "The backward pass makes p and dS in the same way; its products with dS use the correct keys and queries."
# In a problem about batches, these words stand in place of the first ones.
BATCHES = "/batches"  # in the id of a problem
OF_BATCHES = (
    (r"\b(query |key )?head h\b", "batch entry b"),
    (r"\(h \+ 1\) // group", "min(b + 1, B - 1)"),
    (r"\b(query |key )?heads\b", "batch entries"),
    (r"\b(query |key )?head\b", "batch entry"),
)
# A kind of fault in a problem with a window, and the same fault in a problem with only a causal mask.
WITHOUT_CAUSAL = "the causal mask is ignored"
WITH_A_WINDOW = {f"{WITHOUT_CAUSAL} and the window kept": "no pair is masked"}


@dataclass(frozen=True)
class Alternative:
    """Another explanation that fits as well: its ``words``, and all ``faults`` of a ring that has it."""

    words: str
    faults: tuple[Named, ...]


@dataclass(frozen=True)
class Separate:
    """What is said of some ``problems`` alone: ``words``, in place of the first sentences or, as ``how`` says, beside them.

    ``faults`` and ``base`` are all that explains these problems, as in :class:`Conclusion`.
    """

    problems: tuple[str, ...]
    how: str
    words: str
    faults: tuple[Named, ...]
    base: str

    def sentence(self) -> str:
        return f"{', '.join(self.problems)}{self.how}: {self.words}"


@dataclass(frozen=True)
class Conclusion:
    """What a target, the implementation under test, computes instead of attention.

    ``faults``: the faults that account for most of the problems; ``stated``: these faults in words. ``explained``: the ids
    of these problems. ``ways``: what the kernel computes as one range, where tiles depend on it. ``refuted``: where the
    faults do not hold. ``separate``: what is said of problems that have other faults. ``left``: what is wrong in a problem
    that nothing explains.
    ``alternatives``: other explanations that fit as well, each of both passes. ``hint``: where in a kernel to look for
    the first fault. ``shown_by``: the id of a problem in which the faults show. ``base``: what the backward pass computes
    apart from the faults; '' if it is the correct gradient.
    """

    faults: tuple[Named, ...] = ()
    base: str = ""
    stated: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    refuted: tuple[str, ...] = ()
    separate: tuple[Separate, ...] = ()
    left: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    explained: tuple[str, ...] = ()
    hint: str = ""
    shown_by: str = ""

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything that is said, the faults first."""
        return (
            *self.stated,
            *self.ways,
            *self.refuted,
            *[one.sentence() for one in self.separate],
            *self.left,
        )

    @property
    def others(self) -> tuple[str, ...]:
        """The ids of the problems that a separate sentence explains."""
        return tuple(id for one in self.separate for id in one.problems)


def conclude(readings: Sequence[Reading]) -> Conclusion:
    """Combine the readings of the problems that failed."""
    found = combined(readings)
    if not readings or not all(BATCHES in one.problem for one in readings):
        return found
    return dataclasses.replace(
        found,
        stated=tuple(map(in_batches, found.stated)),
        left=tuple(map(in_batches, found.left)),
        alternatives=tuple(
            dataclasses.replace(one, words=in_batches(one.words)) for one in found.alternatives
        ),
        hint=hints.BATCHES if found.hint == hints.HEADS else found.hint,
    )


def in_batches(sentence: str) -> str:
    """Say a sentence about heads of batch entries."""
    return in_other_words(sentence, OF_BATCHES)


def in_other_words(sentence: str, rules: Sequence[tuple[str, str]]) -> str:
    """Replace the first text of each rule, a regular expression, by the second; in the order of the rules."""
    for old, new in rules:
        sentence = re.sub(old, new, sentence)
    return sentence


def combined(readings: Sequence[Reading]) -> Conclusion:
    """Combine the readings of the problems that failed, in the words of a ring's heads."""
    if not readings:
        return Conclusion()
    explained = [one for one in readings if one.explained]
    left = [one for one in readings if one not in explained]
    if not explained:
        return Conclusion(left=tuple(unexplained(left)), shown_by=left[0].problem)
    first = explained[0]
    alternatives: list[tuple[Named, ...]] = []
    best_sets: dict[str, tuple[Named, ...]] = {}
    for phase in ("forward", "backward"):
        found = getattr(first, phase)
        if found is not None:
            best_sets[phase], others = best_of(phase, found, explained)
            alternatives += others

    base = first.backward.base if first.backward else ""

    def same(one: Reading) -> bool:
        with_base = one.backward is None or one.backward.base == base
        return with_base and all(accounts(x, best, one) for x, best in best_sets.items())

    windowed = any(keeps_window(one) for one in explained if same(one))
    faults = in_all(best_sets)
    return Conclusion(
        faults=faults,
        base=base,
        stated=tuple(stated_of(first, best_sets, windowed)),
        separate=separate(faults, base, [one for one in explained if not same(one)]),
        left=tuple(unexplained(left)),
        alternatives=tuple(
            Alternative(" ".join(stated_of(first, sets, windowed)), in_all(sets))
            for one in alternatives
            for sets in [best_sets | {one[0].phase: one}]
        ),
        explained=tuple(one.problem for one in explained if same(one)),
        hint=next((fault.hint for fault in faults if fault.hint), ""),
        shown_by=first.problem,
    )


def stated_of(reading: Reading, faults: Mapping[str, Sequence[Named]], windowed: bool) -> list[str]:
    """Return what a target computes in sentences: its faults, by pass, and what the passes of ``reading`` are besides.

    ``windowed``: whether words about the causal mask must be true of a window, too.
    """
    sentences: list[str] = []
    before: list[Named] = []
    for phase, of_pass in faults.items():
        before += of_pass
        in_words = [(with_window(fault) if windowed else fault).sentence() for fault in of_pass]
        base = getattr(reading, phase).base
        if base:
            said = base_in_words(base, before)
            rounded = all(is_rounding(fault.kind) for fault in of_pass)
            in_words = [*in_words, said] if rounded else [said, *in_words]
        sentences += in_words
    return sentences


def keeps_window(one: Reading) -> bool:
    """Tell whether a fault in a problem with a window is one that leaves the window."""
    sets = [one.sets[0] for one in one.passes if one.sets]
    return any(fault.kind in WITH_A_WINDOW for faults in sets for fault in faults)


def with_window(fault: Named) -> Named:
    """Return a fault of the causal mask in the words that are true with and without a window."""
    kept = dict.fromkeys(WITH_A_WINDOW.values(), f"{WITHOUT_CAUSAL} (a window is kept)")
    return dataclasses.replace(fault, kind=kept.get(fault.kind, fault.kind))


def in_all(sets: Mapping[str, Sequence[Named]]) -> tuple[Named, ...]:
    """Return the faults of all passes."""
    return tuple(fault for of_pass in sets.values() for fault in of_pass)


def separate(
    faults: Sequence[Named], base: str, others: Sequence[Reading], before: Sequence[Separate] = ()
) -> tuple[Separate, ...]:
    """Say what is wrong in a few of the problems ``others``, which ``faults`` with this ``base`` do not explain.

    'also': beside these faults; 'only': some of these faults; otherwise in their place. ``before``: what is already said
    of other problems.
    """
    known = {name_in_any(fault) for fault in faults}
    said_of = {(one.how, one.words): one for one in before}
    # Problems that were searched come first.
    for one in sorted(others, key=lambda one: one.evaluations == 0):
        found = [
            fault
            for phase in ("forward", "backward")
            if (part := getattr(one, phase)) is not None
            for fault in best_of(phase, part, others)[0]
        ]
        new = [fault for fault in found if name_in_any(fault) not in known]
        missing = known - {name_in_any(fault) for fault in found}
        base_here = one.backward.base if one.backward else ""
        if not found or not (new or missing or base_here != base):
            continue
        how = ", also" if new and not missing else ", only" if missing and not new else ""
        how = how if base_here == base else ""
        said = new if how == ", also" else found
        more = base_in_words(base_here, said) if said[0].phase == "forward" else ""
        words = [fault.sentence() for fault in said] + ([more] if more else [])
        words = [in_batches(x) for x in words] if BATCHES in one.problem else words
        key = how, " ".join(words)
        largest = STILL_SIMPLE if one.evaluations else SIMPLE
        if key not in said_of and (
            len(said_of) == MOST_OTHERS or any(fault.cost > largest for fault in new)
        ):
            continue
        same = said_of.get(key) or Separate((), *key, tuple(found), base_here)
        said_of[key] = dataclasses.replace(same, problems=(*same.problems, one.problem))
    return tuple(said_of.values())


def base_in_words(base: str, faults: Sequence[Named]) -> str:
    """Say what the backward pass computes; the gradient of a forward pass whose lse alone is wrong is the correct one."""
    forward = [fault.kind for fault in faults if fault.phase == "forward"]
    lse_alone = bool(forward) and all(kind.startswith(OF_LSE_ALONE) for kind in forward)
    if base == SAME and any(OF_TOKENS.search(kind) for kind in forward):
        return SAME_SCORES
    right = base == GRADIENT or (base == SAVED and len(forward) == len(faults))
    return RIGHT_GRADIENTS if right and lse_alone else base


def best_of(
    phase: str, found: PassRead, explained: Sequence[Reading]
) -> tuple[tuple[Named, ...], list[tuple[Named, ...]]]:
    """Return the best set of faults for one pass, and other sets that fit as well.

    ``found`` is the reading of this pass for the first problem. Of its sets, the best one accounts for the most
    problems in ``explained``.
    """
    if not found.sets:
        return (), []
    counted = []
    for faults in worded(phase, found, explained):
        of = {one.problem for one in explained if accounts(phase, faults, one)}
        counted.append((-len(of), sum(fault.cost for fault in faults), faults, of))
    counted.sort(key=lambda one: one[:2])
    _, cheapest, best, told_of = counted[0]
    others: dict[tuple[str, ...], tuple[Named, ...]] = {}
    for _, price, faults, of in counted[1:]:
        # Pairs that were read are described in one way: other kinds in the same pairs say nothing else.
        same_pairs = [x.place for x in faults] == [x.place for x in best] and lists_pairs(best)
        if same_pairs:
            continue
        if of >= told_of and price <= cheapest + ABOUT_AS_SIMPLE and kinds(faults) != kinds(best):
            others.setdefault(kinds(faults), faults)
    return best, list(others.values())[:MOST_ALTERNATIVES]


def worded(
    phase: str, found: PassRead, explained: Sequence[Reading]
) -> Sequence[tuple[Named, ...]]:
    """Return the sets of ``found`` that list no blocks and no pairs, if every problem that needs faults has such a set.

    Otherwise the sets that list no pairs, on the same condition; else all sets.
    """
    passes = [one for one in (getattr(x, phase) for x in explained) if one is not None and one.sets]
    for lists in (lists_blocks, lists_pairs):
        if all(any(not lists(faults) for faults in one.sets) for one in passes):
            return [faults for faults in found.sets if not lists(faults)]
    return found.sets


def lists_blocks(faults: Sequence[Named]) -> bool:
    return any(LISTED in fault.place for fault in faults) or lists_pairs(faults)


def lists_pairs(faults: Sequence[Named]) -> bool:
    return any(PAIRS in fault.place for fault in faults)


def kinds(faults: Sequence[Named]) -> tuple[str, ...]:
    return tuple(fault.kind for fault in faults)


def accounts(phase: str, faults: Sequence[Named], one: Reading) -> bool:
    """Return whether the reading ``one`` has the same faults among its sets for this pass, compared by name.

    An empty set of faults accounts for a pass without faults.
    """
    found = one.forward if phase == "forward" else one.backward
    if not faults:
        return found is None or not found.sets
    if found is None or not found.whole:
        return False
    names = sorted(name_in_any(fault) for fault in faults)
    return any(sorted(name_in_any(fault) for fault in other) == names for other in found.sets)


def name_in_any(fault: Named) -> tuple[str, str, str]:
    """Return a name of the fault that is the same in every problem."""
    return fault.phase, WITH_A_WINDOW.get(fault.kind, fault.kind), fault.place


def unexplained(wrong: Sequence[Reading]) -> list[str]:
    """Say what is wrong in the first of the problems ``wrong``, which no set of faults explains.

    The faults of a pass are told if they explain all results of this pass.
    """
    if not wrong:
        return []
    one = wrong[0]
    lines = []
    for found in one.passes:
        if found.left:
            lines.append(f"{one.problem}: not explained: {found.left}.")
        elif found.sets and not lists_pairs(found.sets[0]):
            words = " ".join(fault.sentence() for fault in found.sets[0])
            lines.append(f"{one.problem}, in part: {words}")
    return lines or [f"{one.problem}: {BY_ROUNDING}"]
