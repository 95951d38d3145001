"""What the definition leaves free in a ring, and through which a bug may look different.

A correct program gives the same in all of these ways, up to rounding. A bug of a merge, of empty rows or of an
accumulator does not: two empty parts meet in one order of merging and not in another, and a block that is
skipped cannot spoil a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import hides, ring
from ringspec.conformance.diagnose.mutants.hooks import At, Hooks
from ringspec.conformance.target.protocol import Call
from ringspec.problem.model import Array, Terms
from ringspec.recipes import Recipe
from ringspec.spec.online_softmax import SoftmaxState

Part = tuple[At, SoftmaxState]


@dataclass(frozen=True)
class Way:
    """One way to go round.

    ``skips``         pairs of blocks without a visible pair of tokens are not computed
    ``first_as_is``   the first part is the running state, and is not merged into an empty one
    ``tree``          parts are merged in pairs of neighbours, then pairs of pairs; else in turn
    ``normalised``    parts leave their block as (o, lse), whatever the recipe says
    ``masks_p``       in the backward p of a hidden pair is set to 0, whatever exp(s - lse) is there
    ``tile_k``        keys of a tile, None for those of the recipe
    """

    skips: bool = False
    first_as_is: bool = False
    tree: bool = False
    normalised: bool = False
    masks_p: bool = False
    tile_k: int | None = None

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe in this way."""
        changes: dict[str, str | int] = {}
        if self.normalised:
            changes["merge_order"] = "normalised"
        if self.tile_k is not None:
            changes["tile_k"] = self.tile_k
        return dataclasses.replace(recipe, **changes) if changes else recipe  # type: ignore[arg-type]

    def pieces(self, hooks: Hooks) -> Hooks:
        """The pieces of the backward in this way."""
        if not self.masks_p:
            return hooks

        def probabilities(s: Array, lse: Array, recipe: Recipe) -> Array:
            return np.where(np.isneginf(s), 0.0, hooks.probabilities(s, lse, recipe))

        return dataclasses.replace(hooks, probabilities=probabilities)

    def told(self) -> str:
        """In words; empty for the usual way.

        >>> Way(skips=True, tile_k=2).told()
        'hidden blocks skipped, tiles of 2 keys'
        """
        words = {
            "hidden blocks skipped": self.skips,
            "the first part taken as it is": self.first_as_is,
            "parts merged as a tree": self.tree,
            "normalised parts": self.normalised,
            "p masked": self.masks_p,
            f"tiles of {self.tile_k} keys": self.tile_k is not None,
        }
        return ", ".join(word for word, so in words.items() if so)


USUAL = Way()
SKIPPING = Way(skips=True, first_as_is=True, normalised=True, masks_p=True)
NORMALISED = Way(normalised=True)
WAYS = (
    Way(skips=True, first_as_is=True),
    SKIPPING,
    dataclasses.replace(SKIPPING, tree=True),
    Way(first_as_is=True),
    Way(first_as_is=True, normalised=True, masks_p=True, tree=True),
    Way(normalised=True, masks_p=True),
)
# Of small tiles most rows have a hidden one.
SMALL_TILES = dataclasses.replace(SKIPPING, tile_k=2)
# Ways in which a bug of a piece may look different; tried where the usual one does not explain an answer.
OF_PIECE = {
    "recipe": (NORMALISED,),
    "absorb_tile": (SKIPPING, Way(normalised=True, masks_p=True), SMALL_TILES),
    "part": WAYS,
    "merge": WAYS,
    "finish": (NORMALISED,),
    "add": (Way(skips=True),),
}
OF_BACKWARD = ("recipe", "add")


def ways_of(hooks: Hooks, call: Call, forward_is_right: bool = False) -> list[Way]:
    """The ways, other than the usual one, in which a bug may look different on a call.

    ``forward_is_right``: only those of pieces that may leave o and lse right.

    >>> from ringspec.conformance.cases.noise import noise_call
    >>> call = noise_call("example", "bf16", 2, mask="causal", tokens=16)
    >>> ways_of(Hooks(), call)
    []
    >>> [way.told() for way in ways_of(Hooks(add=print), call)]
    ['hidden blocks skipped']
    """
    usual = Hooks()
    pieces = OF_BACKWARD if forward_is_right else tuple(OF_PIECE)
    changed = (name for name in pieces if getattr(hooks, name) is not getattr(usual, name))
    ways = (way for name in changed for way in OF_PIECE[name])
    return [way for way in dict.fromkeys(on_call(way, call) for way in ways) if way != USUAL]


def on_call(way: Way, call: Call) -> Way:
    """The same way, without what makes no difference on this call."""
    return dataclasses.replace(
        way,
        skips=way.skips and hides(call),
        tree=way.tree and (call.workers > 3 or not ring(1)(call)),
    )


def meets(hooks: Hooks, way: Way, at: At, terms: Terms) -> bool:
    """Whether two blocks are computed."""
    if not hooks.computes(at):
        return False
    if not way.skips:
        return True
    query, key = hooks.sees(at)
    assert query.rows is not None and key.columns is not None
    return bool(hooks.mask(at, query.rows, key.columns, terms).any())


def all_merged(
    hooks: Hooks, way: Way, parts: Sequence[Part], empty: SoftmaxState, recipe: Recipe
) -> SoftmaxState:
    """The state over all parts of a worker, in the order of the ring steps."""

    def merge(one: Part, other: Part) -> Part:
        at, part = other
        return at, hooks.merge(at, one[1], part, recipe)

    left = list(parts)
    if not left:
        return empty
    if not way.first_as_is:
        left.insert(0, (left[0][0], empty))
    while len(left) > 1:
        if way.tree:
            left = [
                merge(*left[i : i + 2]) if i + 1 < len(left) else left[i]
                for i in range(0, len(left), 2)
            ]
        else:
            left[:2] = [merge(left[0], left[1])]
    return left[0][1]
