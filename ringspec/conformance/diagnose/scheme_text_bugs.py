"""Known bugs of joint attention, whose text tokens are on all ranks.

Each function returns results of all ranks or a change, or None where the bug cannot occur, as in :mod:`.scheme_bugs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringspec.conformance.diagnose.scheme_answers import Change, answer
from ringspec.conformance.diagnose.scheme_world import Answer, Floats, World, ring_of

Made = Change | Answer | None
LINK = "https://github.com/"


def text_used(times: Callable[[World], int]) -> Callable[[World], Made]:
    return lambda world: (
        Change([world.blocks(rank, text=times(world)) for rank in world.ranks])
        if world.text
        else None
    )


def text_rows_local(world: World) -> Made:
    if not world.text or ring_of(world) == 1:
        return None
    found = []
    for rank in world.ranks:

        def visible(owner: int, columns: Any, rank: int = rank) -> Floats:
            seen = world.visible().copy()
            if owner not in (-1, rank):
                seen[list(world.terms["text"])] = 0.0
            return seen

        found.append(world.blocks(rank, visible=visible))
    return Change(found)


def text_without_ring(world: World) -> Made:
    if not world.text or ring_of(world) == 1:
        return None
    return Change([world.blocks(rank, visits=[rank]) for rank in world.ranks])


def text_heads_not_gathered(world: World) -> Made:
    if not world.text or world.mesh.size("ulysses") == 1:
        return None
    found = answer(world, Change())
    member = np.arange(world.heads) // (world.heads // world.mesh.size("ulysses"))
    for name in [name for name in ("o", "lse", "dq") if name in found]:
        for rank in world.ranks:
            far = member != world.mesh.coordinate(rank, "ulysses")
            found[name][rank][:, far, : world.text] = 0.0
    return found


def text_rows_of_every_copy(world: World) -> Made:
    if not world.text or world.dy is None:
        return None
    rows = np.ones(world.q.shape[2])
    rows[list(world.terms["text"])] = ring_of(world)
    return Change(take=lambda rank: rows[:, None])


def text_dk_own_part(world: World) -> Made:
    if not world.text or world.dy is None:
        return None

    def take(rank: int) -> Floats:
        at = [world.mesh.coordinate(int(r), "ring") for r in world.owner]
        here = np.array(at) == world.mesh.coordinate(rank, "ring")
        weights = np.ones((len(here), world.k.shape[2]))
        weights[:, list(world.terms["text"])] = np.where(here, 1.0, 0.0)[:, None]
        return weights

    return Change(take=take)


# Each id and title, the function, and public reports.
BUGS: tuple[tuple[Any, ...], ...] = (
    ("scheme-text-every-step", "the keys of the text are used in every step of the ring", text_used(ring_of), (f"{LINK}sgl-project/sglang/issues/33327",)),
    ("scheme-text-never", "the keys of the text are not used", text_used(lambda world: 0)),
    ("scheme-text-rows-local", "rows of the text meet only the keys of their own rank of the ring", text_rows_local),
    ("scheme-text-no-ring", "with a text, each rank of the ring uses only its own block and the text", text_without_ring, (f"{LINK}sgl-project/sglang/issues/33353",)),
    ("scheme-text-heads", "the output of the text has only the heads of its rank; the others are 0", text_heads_not_gathered),
    ("scheme-text-gradient-copies", "every copy of a text row is differentiated, so its gradients of keys count once for each rank of the ring", text_rows_of_every_copy),
    ("scheme-text-gradient-part", "each rank's dk and dv of the text lack the parts of the other ranks", text_dk_own_part),
)  # fmt: skip
