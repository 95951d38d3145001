"""Explain NaN by an lse of +infinity, which flash-attn returns for a row without a visible key.

A ring that merges such a block gives it the whole weight. The row's o becomes 0, and with a second such block, NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.faults.masks import masks_of
from ringspec.conformance.readout.faults.merges import HIDDEN_TOO, INFINITE, WRONG
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.proof.replay import Replayed, replay_of
from ringspec.conformance.readout.reading import GRADIENT, SAME, Named, PassRead, Reading, in_words

WORDS = WRONG[INFINITE], f"{WRONG[INFINITE]}{HIDDEN_TOO}"


def by_infinite_rows(problem: Problem, found: Reading, outputs: Outputs) -> Reading:
    """Return the reading of a problem with NaN in o that an infinite lse explains, alone or beside a wrong mask.

    ``found``: the reading without that, which is returned if it does not.
    """
    replayed = replay_of(problem.call, outputs)
    for faults in possible(problem, replayed):
        compared = replayed.compared(Conclusion(faults), "forward")
        if compared is None or not (compared.fits and compared.wrong):
            continue
        forward = PassRead((faults,))
        if found.backward is None:
            return Reading(problem.id, False, forward)
        for base in (GRADIENT, SAME):
            whole = replayed.compared(Conclusion(faults, base=base))
            if whole is not None and whole.fits:
                return Reading(problem.id, False, forward, PassRead(base=base))
        return Reading(problem.id, False, forward, found.backward)
    return found


def possible(problem: Problem, replayed: Replayed) -> Iterator[tuple[Named, ...]]:
    """Yield the sets of faults that are tried: an infinite lse, and each wrong mask with it."""
    ring = replayed.rings[0][0]
    masks = [x.words for x in masks_of(problem.pairs.geometry) if x.words and not x.of_tiles]
    for words in ((), *((x,) for x in masks)):
        for infinite in WORDS:
            faults = [ring.fault(("forward", one, "")) for one in (*words, infinite)]
            yield tuple(in_words(one) for one in faults if one is not None)
