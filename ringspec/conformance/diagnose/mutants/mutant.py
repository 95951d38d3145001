"""Mutants: known bugs that can be run, on one call or as a target of the suite.

A mutant is the correct ring with a few of its functions replaced. These functions are called pieces; see
:class:`~ringspec.conformance.diagnose.mutants.hooks.Hooks`. A recipe says where a kernel rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringspec.conformance.diagnose.mutants.conditions import Condition, anything
from ringspec.conformance.diagnose.mutants.hooks import Hooks, Results
from ringspec.conformance.diagnose.mutants.kills import KILLS
from ringspec.conformance.diagnose.mutants.ring import RESULTS
from ringspec.conformance.diagnose.mutants.variants import USUAL, Way
from ringspec.conformance.target.declared import base_recipe
from ringspec.conformance.target.protocol import Call, Result
from ringspec.conformance.target.results import due_of
from ringspec.conformance.targets.reference import REFERENCES
from ringspec.formats import store
from ringspec.recipes import Recipe
from ringspec.vectors.format.flag import SITE

RECIPES = ("bf16", "float32")
Make = Callable[[Call, Recipe], Hooks]


@dataclass(frozen=True)
class Guise:
    """Another form of a bug, for which the bug's title is true as well; ``words`` say what is different.

    Kernels with the same bug differ: the bug may be in another pass, unwritten memory may hold other numbers, or other
    results may stay correct. A diagnosis also tries these forms; the table of detecting cases covers only the bug
    itself.
    """

    words: str
    hooks: Make
    applies: Condition


@dataclass(frozen=True)
class Mutant:
    """One known bug, as replacements for a few pieces of the ring.

    ``title``     the sentence by which a report names the bug
    ``what``      its cause, its effect and what hides it
    ``links``     public reports; empty for a likely mistake without a known report
    ``flags``     classes of :data:`ringspec.vectors.catalogue.flags.FLAGS`
    ``applies``   applies(call) is False if the bug cannot change a result of the call
    ``hooks``     hooks(call, recipe) returns the pieces
    ``unseen``    for each recipe in which no case can detect the bug, the reason
    ``guises``    other forms of the bug
    ``supposes``  supposes(call) is False if the call lacks something that the title mentions, such as a mask. Among
                  bugs that give the same results, a diagnosis names one whose title suits the call
    """

    id: str
    title: str
    what: str
    links: tuple[str, ...]
    flags: tuple[str, ...]
    applies: Condition
    hooks: Make
    unseen: Mapping[str, str] = field(default_factory=dict)
    guises: tuple[Guise, ...] = ()
    supposes: Condition = anything

    @property
    def kills(self) -> Mapping[str, str]:
        """Map each recipe ('bf16', 'float32') to a case of the profile ``core`` or ``noise`` that fails with this bug.

        A recipe in which no case detects the bug is missing; ``unseen`` says why.
        """
        cases = zip(RECIPES, KILLS.get(self.id, ("", "")), strict=True)
        return {recipe: case for recipe, case in cases if case}

    @property
    def needs(self) -> str:
        """Return 'statistics' if, in some recipe, only statistics of whole tensors detect the bug; else 'bounds'."""
        found = any(case.startswith("noise/") for case in self.kills.values())
        return "statistics" if found else "bounds"


def mutant(
    id: str,
    title: str,
    what: str,
    *links: str,
    applies: Condition,
    hooks: Make | None = None,
    flags: tuple[str, ...] = (),
    unseen: Mapping[str, str] | None = None,
    guises: Sequence[Guise] = (),
    supposes: Condition = anything,
    **pieces: Any,
) -> Mutant:
    """Return a mutant.

    ``links`` are paths below https://github.com. Give either ``pieces``, if they are the same for every call, or
    ``hooks``, a function that makes them from a call and a recipe.
    """
    addresses = tuple(SITE + link for link in links)
    made = made_of(hooks, pieces)
    return Mutant(
        id,
        title,
        what,
        addresses,
        flags,
        applies,
        made,
        dict(unseen or {}),
        tuple(guises),
        supposes,
    )


def guise(words: str, applies: Condition, hooks: Make | None = None, **pieces: Any) -> Guise:
    """Return another form of a bug; ``hooks`` and ``pieces`` are as in :func:`mutant`."""
    return Guise(words, made_of(hooks, pieces), applies)


def made_of(hooks: Make | None, pieces: Mapping[str, Any]) -> Make:
    fixed = Hooks(**pieces)
    return (lambda call, recipe: fixed) if hooks is None else hooks


def run_mutant(mutant: Mutant | Guise, call: Call, recipe: Recipe, way: Way = USUAL) -> Results:
    """Run a mutant on a call and return its results by name, as one float64 array per worker.

    ``way``: choices that the specification leaves to an implementation. If the mutant does not apply to the call, the
    results are correct. NaN and infinities raise no warning.
    """
    hooks = mutant.hooks(call, recipe) if mutant.applies(call) else Hooks()
    with np.errstate(all="ignore"):
        return RESULTS[call.operation](call, recipe, hooks, way)


class MutantTarget:
    """A mutant as a target (program under test), with the claims of the correct program in the same recipe."""

    def __init__(self, mutant: Mutant, recipe: str) -> None:
        right = REFERENCES[recipe]
        self.mutant = mutant
        self.name = f"{mutant.id} in {recipe}"
        self.capabilities = right.capabilities
        self.notes = (mutant.title,)

    def run(self, call: Call) -> Result:
        recipe = base_recipe(self.capabilities.recipe, call.formats["inputs"])
        results = run_mutant(self.mutant, call, recipe)
        return Result(
            **{
                name: [store(x, due.format) for x in results[name]]
                for name, due in due_of(call).items()
            }
        )
