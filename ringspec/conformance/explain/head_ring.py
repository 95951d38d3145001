"""Read a target whose workers exchange heads for tokens as a ring of groups of heads.

After the exchange, a worker has all tokens of its heads, and computes them without the other workers. A kernel that
nevertheless communicates in between, such as a ring, lets queries see keys of other heads, which no mask over tokens
describes. The target is the program under test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.explain.group_ring import Rearrange, claims_of_ring, run_gathered
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.pairs import joined, of_rows
from ringspec.conformance.readout.problem.problems import Problem
from ringspec.conformance.readout.problem.settings import GROUPS_OF_HEADS, LAYOUTS, Setting
from ringspec.conformance.readout.problem.shapes import usual_workers
from ringspec.conformance.run.call import Stop, ask, outputs_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.protocol import Call, Result, Target
from ringspec.formats import load


@dataclass(frozen=True)
class RingOfHeads:
    """A target whose ring has groups of heads, one for each worker of ``target``, in place of these workers.

    The tokens of a group are a document of their own, because a right kernel computes each group by itself.
    """

    target: Target
    capabilities: Capabilities

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def notes(self) -> tuple[str, ...]:
        """How the target is read, in a sentence."""
        (groups,) = self.capabilities.workers or (0,)
        return (f"Read as a ring of {groups} groups of heads, each with all tokens.",)

    def run(self, call: Call) -> Result:
        """Give all groups' heads to every worker, with the worker's part of the tokens, and put the results back."""
        terms = {name: x for name, x in call.terms.items() if name != "cu_seqlens"}

        def exchanged(joined: int, divided: int) -> Rearrange:
            return lambda shards: np.split(
                np.concatenate(shards, axis=joined), call.workers, axis=divided
            )

        whole = dataclasses.replace(call, terms=terms)
        return run_gathered(self.target, whole, call.workers, exchanged(1, 2), exchanged(2, 1))


def rings_of_heads(target: Target) -> Iterator[tuple[RingOfHeads, Problem]]:
    """Yield the ring of groups of heads that a target may consist of, and its problem; nothing if it cannot be one."""
    claims = target.capabilities
    exchanges = claims.circulations == ("gather",) and claims.kv_heads_multiple == "workers"
    if not exchanges or LAYOUTS[0] not in claims.layouts:
        return
    ring = RingOfHeads(target, claims_of(claims, usual_workers(claims)))
    found = (problem_for(Setting(mask, LAYOUTS[0]), ring.capabilities) for mask in GROUPS_OF_HEADS)
    problem = next((one for one in found if isinstance(one, Problem)), None)
    if problem is not None and problem.call.workers > 1:
        yield ring, problem


def sees_other_heads(ring: RingOfHeads, problem: Problem) -> bool:
    """Tell whether a query gives weight to a key of another group of heads; False if the target has no results."""
    call, geometry = problem.asked[0], problem.pairs.geometry
    try:
        result, _ = ask(ring, call)
        o = joined(map(load, outputs_of(result, call, ring.capabilities)["o"]))
    except Stop:
        return False
    weights = of_rows(geometry, o[..., : geometry.tokens])
    return bool((np.abs(weights[~np.eye(len(weights), dtype=bool)]) > problem.tolerance).any())


def claims_of(claims: Capabilities, groups: int) -> Capabilities:
    """Return the claims of a ring of ``groups`` groups of heads, as far as readouts use them."""
    return dataclasses.replace(
        claims_of_ring(claims, groups),
        masks=(*claims.masks, "documents"),
        kv_heads_multiple=1,
        tokens_multiple=int(np.lcm(groups, claims.tokens_multiple)),
        features=(),
    )
