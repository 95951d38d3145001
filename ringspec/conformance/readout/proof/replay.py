"""Compare a target's results with those of a ring with given faults, for any call that the model ring can express.

The *model ring* computes ring attention with or without *faults*, the mistakes of a kernel. Faults that were read from a
few problems are proved here: they must also give the numbers of other failing calls, whose inputs were not chosen for
this purpose.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.diagnose.candidates import run_right
from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.faults.product_kinds import DS_WORDS, IN_HIDDEN_PAIRS
from ringspec.conformance.readout.problem.geometry import VISIBLE, WHOLE
from ringspec.conformance.readout.problem.pairs import OF_SLOTS
from ringspec.conformance.readout.problem.problems import TOLERANCES
from ringspec.conformance.readout.proof.calls import (
    expressible,
    given_of,
    number_of_pairs,
    ways_of,
)
from ringspec.conformance.readout.proof.ring_results import OF_FORWARD, Made, Results, RingOf
from ringspec.conformance.readout.reading import Named
from ringspec.conformance.readout.search.matches import near
from ringspec.conformance.readout.search.rounding import LOOSE, is_rounding
from ringspec.conformance.target.protocol import Call
from ringspec.formats import load
from ringspec.problem.model import Array
from ringspec.recipes import RECIPES

SUMS = ("dsinks",)
NEARER = 0.25  # of the distance from the correct results, in each tensor
# Replays that are kept: those of a target's readouts, each with its proof. Their calls have few pairs; those of others
# would take much memory.
MOST_KEPT, FEW_PAIRS = 40, 1 << 15
TILES = re.compile(r"\btiles?\b")


@dataclass(frozen=True)
class Compared:
    """``fits``: whether the outputs are those that the faults give. ``wrong``: whether they differ from the correct ones.

    ``parts``: what the ring of the faults computes as one range, as in its geometry.
    """

    fits: bool
    wrong: bool
    parts: str = ""


def explains(conclusion: Conclusion, calls: Sequence[Call], outputs: Sequence[Outputs]) -> bool:
    """Return whether the faults give all outputs of a case's calls, and some of these outputs are not correct.

    The result is False if the model ring cannot express one of the calls.
    """
    if not conclusion.faults:
        return False
    found = [gives(conclusion, call, got) for call, got in zip(calls, outputs, strict=True)]
    return all(one is not None and one.fits for one in found) and any(
        one is not None and one.wrong for one in found
    )


def gives(conclusion: Conclusion, call: Call, outputs: Outputs) -> Compared | None:
    """Compare the outputs of a call with what the faults give; None if the model ring cannot express the call."""
    return replay_of(call, outputs).compared(conclusion) if expressible(call) else None


KEPT: dict[tuple[int, ...], Replayed] = {}


def replay_of(call: Call, outputs: Outputs) -> Replayed:
    """Return the call and the outputs, ready to be compared; made once for the same objects if they are small."""
    if number_of_pairs(call) > FEW_PAIRS:
        return Replayed(call, outputs)
    held = {name: tuple(shards) for name, shards in outputs.items()}
    key = id(call), *(id(x) for shards in held.values() for x in shards)
    if key not in KEPT:
        while len(KEPT) >= MOST_KEPT:
            del KEPT[next(iter(KEPT))]
        KEPT[key] = Replayed(call, held)  # it keeps the objects, so their ids are not used again
    return KEPT[key]


def of_parts(conclusion: Conclusion) -> bool:
    """Return whether one of the faults depends on the part of a block that is computed.

    It is a rule about tiles, or in some tiles, or a dS that is not 0 in the hidden pairs of this part.
    """
    words = [DS_WORDS[form] for form in IN_HIDDEN_PAIRS]
    return any(
        TILES.search(x) or any(one in x for one in words)
        for fault in conclusion.faults
        for x in (fault.kind, fault.place)
    )


class Replayed:
    """A call and a target's outputs, ready to be compared with what the model ring computes with given faults.

    If queries travel in the backward pass, either keys or queries may travel in the forward pass; both are tried. So are
    the parts of a block that a kernel may compute as one range, for faults that depend on them.
    """

    def __init__(self, call: Call, outputs: Outputs) -> None:
        self.call, self.outputs = call, outputs
        self.right = run_right(call, RECIPES["float64"])
        self.known: dict[tuple[Any, ...], Compared | None] = {}
        batch = call.worker("q", 0).shape[0]
        self.rings = [[RingOf(one) for one in ways_of(given_of(call, n))] for n in range(batch)]

    def compared(
        self, conclusion: Conclusion, phase: str = "", in_every_way: bool = False
    ) -> Compared | None:
        """Compare the outputs with what the faults give; None if the model ring cannot compute that.

        ``phase``: the only pass whose outputs are compared; '' for both. A backward pass that is compared alone is
        given the target's own o and lse. ``in_every_way``: None also if only some of the ways in which a ring may compute
        this call can have the faults, as where tiles are larger than a chunk.
        """
        key = conclusion.faults, conclusion.base, phase, in_every_way
        if key not in self.known:
            self.known[key] = self.compare(conclusion, phase, in_every_way)
        return self.known[key]

    def compare(self, conclusion: Conclusion, phase: str, in_every_way: bool) -> Compared | None:
        """Do what :func:`compared` returns."""
        parts: list[Compared] = []
        rounded = {fault.phase for fault in conclusion.faults if is_rounding(fault.kind)}
        for entry, rings in enumerate(self.rings):
            found: list[Compared] = []
            for ring in rings:
                way = ring.given.geometry.parts
                if way and (
                    any(one.fits for one in found)
                    or (way in (VISIBLE, WHOLE) and not of_parts(conclusion))
                ):
                    continue
                made = ring.passes_of(
                    conclusion, saved_in(self.outputs, entry) if phase == "backward" else None
                )
                if made is None and in_every_way:
                    return None
                if made is not None:
                    one = self.nearer(entry, made, phase, rounded)
                    found.append(dataclasses.replace(one, parts=way))
            if not found:
                return None
            parts.append(next((one for one in found if one.fits), found[0]))
        fits, wrong = all(one.fits for one in parts), any(one.wrong for one in parts)
        return Compared(fits, wrong, parts[0].parts)

    @property
    def has_window(self) -> bool:
        return self.rings[0][0].given.geometry.window is not None

    def possible(self, faults: Sequence[Named]) -> list[Named]:
        """Return the faults that a ring of this call can have: without a mask, none can be in the mask."""
        return [
            fault
            for fault in faults
            if is_rounding(fault.kind)
            or any(ring.fault(fault.name) is not None for ring in self.rings[0])
        ]

    def nearer(
        self, entry: int, made: Iterable[Made], phase: str, rounded: Collection[str]
    ) -> Compared:
        """Compare one batch entry with what the passes of a ring with the faults make, until one pass does not fit.

        ``phase``: as for :meth:`compared`. ``rounded``: the passes in which some values are rounded to 16 bits.
        """
        usual = TOLERANCES[self.call.formats["inputs"]]
        o, wrong = None, False
        for of_pass, (ours, sizes) in zip(("forward", "backward"), made, strict=False):
            if phase in ("", of_pass):
                loose = of_pass in rounded or (of_pass == "backward" and rounded)
                tolerance = max(usual, LOOSE) if loose else usual
                outputs = {name: x for name, x in self.outputs.items() if name in ours}
                one = nearer(self.call, entry, outputs, self.right, ours, sizes, tolerance, o)
                wrong |= one.wrong
                if not one.fits:
                    return Compared(False, wrong)
                o = ours.get("o")
        return Compared(True, wrong)

    def without_contradiction(self, conclusion: Conclusion) -> Conclusion:
        """Reduce each fault to what no later one changes again, if the faults then fit as well.

        Otherwise sentences contradict each other: 'lse and delta are those of the visitor', 'delta is that of the next
        worker'.
        """
        ring = self.rings[0][0]
        faults = tuple(
            ring.reduced(conclusion.faults, number) for number in range(len(conclusion.faults))
        )
        reduced = dataclasses.replace(conclusion, faults=faults)
        compared = self.compared(reduced) if faults != conclusion.faults else None
        return reduced if compared is not None and compared.fits else conclusion


def saved_in(outputs: Outputs, entry: int) -> tuple[Array, Array] | None:
    """Return a target's own o [W, H, n, D] and lse [W, H, n]; None if it hides lse."""
    if "lse" not in outputs:
        return None
    o, lse = (np.stack([load(np.asarray(x))[entry] for x in outputs[name]]) for name in OF_FORWARD)
    return o, lse


def nearer(
    call: Call,
    entry: int,
    outputs: Outputs,
    right: Mapping[str, Sequence[Array]],
    ours: Results,
    sizes: Results,
    tolerance: float,
    o: Array | None = None,
) -> Compared:
    """Compare one batch entry of the outputs with the results of the faults and with the correct ones.

    ``ours`` are the results that the faults give, and ``right`` the correct ones. The outputs fit if each element is
    within the tolerance, and each wrong tensor is much nearer to ``ours`` than to ``right``; NaN fits only NaN in ``ours``.
    ``sizes``: for each element, the sum of the absolute values of its terms. ``o``: the forward pass's, for gradients.
    """
    wrong = False
    for name in outputs.keys() & ours.keys():
        at = ... if name in SUMS else entry  # these are sums over a batch, which has one entry
        got, true = (
            np.stack([load(np.asarray(x))[at] for x in shards])
            for shards in (outputs[name], right[name])
        )
        if name in OF_SLOTS and call.index_q is not None:
            empty = (call.index_q < 0).reshape(call.workers, 1, -1, *[1] * (got.ndim - 3))
            got, true = np.where(empty, ours[name], got), np.where(empty, ours[name], true)
        # The gradients of a forward pass with NaN are compared where they are finite.
        passed_on = o is not None and np.isnan(o).any()
        missing = np.isnan(got) & (passed_on | np.isnan(ours[name]))
        if not (missing | near(got, ours[name], sizes[name], tolerance)).all():
            return Compared(False, wrong)
        wrong |= bool((missing & ~np.isnan(true)).any())
        far, close = distance(got, true, sizes[name]), distance(got, ours[name], sizes[name])
        if far > tolerance:
            wrong = True
            if not close <= NEARER * far:
                return Compared(False, wrong)
    return Compared(True, wrong)


def distance(x: Array, y: Array, size: Array) -> float:
    """Return the largest finite difference of two arrays, in units of ``size``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        z = np.abs(x - y) / np.where(size == 0, 1.0, size)
    return float(np.where(np.isfinite(z), z, 0.0).max(initial=0.0))
