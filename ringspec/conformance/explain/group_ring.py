"""Read a target whose workers form groups as a ring of these groups.

In USP, the workers of a group exchange heads for tokens, so that a group computes like one worker that has the tokens
of all of them; keys and values travel between the groups. What such a ring gets wrong is a simple mistake between
groups, and often no simple one between workers. The target is the program under test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringspec.conformance.readout.problem.settings import LAYOUTS
from ringspec.conformance.run.call import ask, outputs_of
from ringspec.conformance.target.capabilities import Capabilities
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Call, Result, Target
from ringspec.problem.model import Integers

SIZES = (2, 3)  # workers in a group
Rearrange = Callable[[Sequence[NDArray]], Sequence[NDArray]]
READ = ("scale", "softcap", "dlse")  # features that need no other tensors than q, k, v, dy and dlse


@dataclass(frozen=True)
class RingOfGroups:
    """A target whose ring has the groups of ``size`` neighbouring workers of ``target`` in place of its workers."""

    target: Target
    size: int
    capabilities: Capabilities

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def notes(self) -> tuple[str, ...]:
        """How the target is read, in a sentence."""
        (groups,), (layout,) = self.capabilities.workers or (0,), self.capabilities.layouts
        workers = [
            " and ".join(map(str, range(r * self.size, (r + 1) * self.size)))
            if self.size == 2
            else f"{r * self.size} to {(r + 1) * self.size - 1}"
            for r in range(groups)
        ]
        how = "" if layout == LAYOUTS[0] else f" with the layout {layout}"
        return (f"Read as a ring of {groups} groups of workers ({'; '.join(workers)}){how}.",)

    def run(self, call: Call) -> Result:
        """Give the groups' tokens to their workers, in the order of the sequence, and put the results back."""
        assert call.index_q is not None
        workers, token = call.workers * self.size, call.index_q.ravel()

        def arranged(order: Integers, parts: int) -> Rearrange:
            return lambda shards: np.split(
                np.concatenate(shards, axis=2)[:, :, order], parts, axis=2
            )

        there, back = arranged(np.argsort(token), workers), arranged(token, call.workers)
        return run_gathered(self.target, call, workers, there, back)


def run_gathered(
    target: Target, call: Call, workers: int, there: Rearrange, back: Rearrange
) -> Result:
    """Run a call on ``workers`` workers that gather the keys of contiguous shards.

    ``there`` rearranges the shards of each tensor for these workers, and ``back`` those of each result for the call.
    """
    claims = target.capabilities
    given = {name: tuple(there(x)) for name, x in call.tensors.items()}
    table = np.arange(sum(x.shape[2] for x in given["q"])).reshape(workers, -1)
    asked = dataclasses.replace(
        call, workers=workers, tensors=given, layout=LAYOUTS[0], circulation="gather",
        index_q=table, index_k=table, position_q=table[:, None], position_k=table[:, None],
    )  # fmt: skip
    result, _ = ask(target, as_seen(asked, claims))
    found = outputs_of(result, asked, claims)
    return Result(**{name: tuple(back(x)) for name, x in found.items()})


def rings_of_groups(target: Target) -> Iterator[RingOfGroups]:
    """Yield the rings of at least two groups that a target may consist of: it gathers contiguous shards of 4 or more workers."""
    claims = target.capabilities
    if claims.circulations != ("gather",) or LAYOUTS[0] not in claims.layouts:
        return
    workers = claims.workers[0] if claims.workers else 0
    layouts = LAYOUTS if "causal" in claims.masks else LAYOUTS[:1]
    for size in SIZES if workers >= 2 * SIZES[0] else ():
        for layout in layouts if workers % size == 0 and workers > size else ():
            yield RingOfGroups(target, size, claims_of(claims, workers // size, layout))


def claims_of(claims: Capabilities, groups: int, layout: str) -> Capabilities:
    """Return the claims of a ring of ``groups`` groups of workers, as far as readouts use them."""
    return dataclasses.replace(
        claims_of_ring(claims, groups),
        layouts=(layout,),
        tokens_multiple=2 * claims.tokens_multiple,
        features=tuple(x for x in claims.features if x in READ),
    )


def claims_of_ring(claims: Capabilities, workers: int) -> Capabilities:
    """Return the claims of a target that is read as a KV ring of so many ``workers``."""
    return dataclasses.replace(
        claims,
        operations=tuple(x for x in claims.operations if x.startswith("ring-")),
        circulations=("kv",),
        directions=(1,),
        workers=(workers,),
        schemes=(),
        meshes=None,
        axes="BHSD",
        recipe=None,
    )
