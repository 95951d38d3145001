"""Prove what was read: the faults have to give the results for random inputs in the same ring as well.

A readout's inputs are of a special form, in which different faults may look alike: half of a head's columns, for example,
belong to other heads than the rest.
"""

from __future__ import annotations

import dataclasses
from itertools import product

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.problems import Problem
from ringspec.conformance.readout.reading import PassRead, Reading
from ringspec.conformance.readout.replay import gives
from ringspec.conformance.readout.told import Told

MOST_TRIED = 6  # sets of faults of a pass
NOT_PROVED = "a change that gives the numbers of this readout was found, but it does not give those of random inputs"


def proven(reading: Reading, problem: Problem, outputs: Outputs) -> Reading:
    """Keep the sets of faults that give the ``outputs`` of the problem's proof as well.

    If none does, the reading is not explained. It stays as it is if the model ring cannot compute the proof.
    """
    if not reading.explained:
        return reading
    passes = [one or PassRead() for one in (reading.forward, reading.backward)]
    sets = [one.sets[:MOST_TRIED] or ((),) for one in passes]
    kept: list[dict[tuple, None]] = [{}, {}]
    for forward, backward in product(*sets):
        told = Told(faults=(*forward, *backward), base=passes[1].base)
        if not told.faults:
            return reading
        found = gives(told, problem.proof, outputs)
        if found is None:
            return reading
        if found.fits:
            kept[0][forward], kept[1][backward] = None, None
    if not kept[0]:
        left = PassRead(left=NOT_PROVED)
        return dataclasses.replace(reading, forward=left, backward=None)
    changed = [
        dataclasses.replace(one, sets=tuple(x for x in found if x))
        for one, found in zip(passes, kept, strict=True)
    ]
    return dataclasses.replace(
        reading,
        forward=changed[0],
        backward=None if reading.backward is None else changed[1],
    )
