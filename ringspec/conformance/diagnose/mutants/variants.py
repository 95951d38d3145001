"""Choices that the specification leaves to an implementation, and that can change the results of a bug.

The results of a correct program do not depend on these choices, except for rounding. The results of a bug in merging,
in empty rows or in accumulators may. For example, only some orders of merging combine two empty partial results, and a
block that is skipped cannot spoil a row.

A part is the partial result of one worker's queries for one block of keys. ``hooks`` holds the functions of the ring
that a bug can replace, called pieces. A recipe says where a program rounds and how it tiles.
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
    """The choices of one implementation; the specification permits each of them.

    ``skips``         pairs of blocks in which every query-key pair is masked are not computed
    ``first_as_is``   the first part becomes the running state instead of being merged into an empty one
    ``tree``          neighbouring parts are merged in pairs, then pairs of pairs; otherwise one by one
    ``normalised``    parts are normalised to (o, lse) before they are merged, whatever the recipe says
    ``masks_p``       the backward pass sets p of a masked pair to 0, whatever exp(s - lse) is
    ``tile_k``        keys per tile; None: as the recipe says
    """

    skips: bool = False
    first_as_is: bool = False
    tree: bool = False
    normalised: bool = False
    masks_p: bool = False
    tile_k: int | None = None

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the changes that these choices make."""
        changes: dict[str, str | int] = {}
        if self.normalised:
            changes["merge_order"] = "normalised"
        if self.tile_k is not None:
            changes["tile_k"] = self.tile_k
        return dataclasses.replace(recipe, **changes) if changes else recipe  # type: ignore[arg-type]

    def pieces(self, hooks: Hooks) -> Hooks:
        """Return the pieces ``hooks``, changed as ``masks_p`` says."""
        if not self.masks_p:
            return hooks

        def probabilities(s: Array, lse: Array, recipe: Recipe) -> Array:
            return np.where(np.isneginf(s), 0.0, hooks.probabilities(s, lse, recipe))

        return dataclasses.replace(hooks, probabilities=probabilities)

    def in_words(self) -> str:
        """Describe the choices for a report; '' for the usual ones.

        >>> Way(skips=True, tile_k=2).in_words()
        'fully masked blocks are skipped, tiles have 2 keys'
        """
        words = {
            "fully masked blocks are skipped": self.skips,
            "the running state starts as the first block's result": self.first_as_is,
            "partial results are merged as a tree": self.tree,
            "partial results are normalised": self.normalised,
            "p of masked pairs is set to 0": self.masks_p,
            f"tiles have {self.tile_k} keys": self.tile_k is not None,
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
# With small tiles, most rows have a fully masked tile.
SMALL_TILES = dataclasses.replace(SKIPPING, tile_k=2)
# The variants in which a bug in a piece can give different results. They are tried if the usual variant does not
# explain the results.
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
    """Return the choices, other than the usual ones, that can change the results of a bug for a call.

    ``forward_is_right``: only consider replaced pieces with which o and lse can still be correct.

    >>> from ringspec.conformance.cases.noise import noise_call
    >>> call = noise_call("example", "bf16", 2, mask="causal", tokens=16)
    >>> ways_of(Hooks(), call)
    []
    >>> [way.in_words() for way in ways_of(Hooks(add=print), call)]
    ['fully masked blocks are skipped']
    """
    usual = Hooks()
    pieces = OF_BACKWARD if forward_is_right else tuple(OF_PIECE)
    changed = (name for name in pieces if getattr(hooks, name) is not getattr(usual, name))
    ways = (way for name in changed for way in OF_PIECE[name])
    return [way for way in dict.fromkeys(on_call(way, call) for way in ways) if way != USUAL]


def on_call(way: Way, call: Call) -> Way:
    """Drop those choices that have no effect on this call."""
    return dataclasses.replace(
        way,
        skips=way.skips and hides(call),
        tree=way.tree and (call.workers > 3 or not ring(1)(call)),
    )


def meets(hooks: Hooks, way: Way, at: At, terms: Terms) -> bool:
    """Tell whether the ring computes a pair of blocks, one of queries and one of keys."""
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
    """Merge the parts of one worker, which are given in the order of the ring steps."""

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
