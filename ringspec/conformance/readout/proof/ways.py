"""Say what a kernel computes as one range, where the faults depend on it: tiles begin at its first query and key."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ringspec.conformance.cases.model import Outputs
from ringspec.conformance.readout.conclusion import Conclusion
from ringspec.conformance.readout.faults.kinds import listing
from ringspec.conformance.readout.problem.geometry import OWN_CHUNKS, VISIBLE, WAYS, WHOLE
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.proof.replay import gives, of_parts

# What a kernel computes as one range, if not whole blocks, or chunks of them in the layout zigzag.
OF_WAYS = {
    VISIBLE: "only the visible part of a block is computed, as one range",
    OWN_CHUNKS: "only the visible part of a block is computed, as one range, or as one for each chunk of a worker's own keys",
    WHOLE: "each block is computed as one range, with its hidden parts",
}


def with_ways(
    found: Conclusion, problems: Sequence[tuple[Problem, Sequence[Outputs]]]
) -> Conclusion:
    """Say what the kernel computes as one range, in the layouts in which the faults depend on it.

    Nothing is said where they hold for the usual ranges: whole blocks, in zigzag the chunks of their keys and queries.
    """
    by_problem = {
        id: Conclusion(one.faults, one.base) for one in found.separate for id in one.problems
    }
    by_problem |= dict.fromkeys(found.explained, Conclusion(found.faults, found.base))
    ways: dict[str, list[str]] = {}
    for problem, outputs in problems:
        one, layout = by_problem.get(problem.id), problem.pairs.geometry.layout
        if one is not None and of_parts(one) and layout in WAYS:
            compared = gives(one, problem.proof, outputs[1])
            if compared is not None and compared.fits and compared.parts:
                layouts = ways.setdefault(OF_WAYS[compared.parts], [])
                layouts += [layout] if layout not in layouts else []
    said = (
        f"In the layout{'s' * (len(x) > 1)} {listing(x)}, {words}." for words, x in ways.items()
    )
    return dataclasses.replace(found, ways=tuple(said))
