"""What a mutant is, and how one is run: on a call, or as a target of the conformance suite."""

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
    """Another form of a bug, which its title names as well; ``words`` say what is different.

    Kernels that have the bug differ in it: which pass, what a buffer holds that nobody wrote, which
    results are spared. A guise is looked for in a diagnosis; the suite is measured against the bug itself.
    """

    words: str
    hooks: Make
    applies: Condition


@dataclass(frozen=True)
class Mutant:
    """One known bug as a change of a few pieces of the ring.

    ``title`` is the sentence by which a report names it; ``what`` says how it comes about, what it does
    and what hides it. ``links`` are public reports (empty: a mistake that the definition makes easy, of
    which no report is known); ``flags`` are classes of :data:`ringspec.vectors.catalogue.flags.FLAGS`.
    ``applies(call)`` is False where the bug cannot change a result. ``unseen`` maps a recipe in which
    nothing can show the bug to the reason. ``guises`` are other forms of the same bug. ``supposes(call)``
    is False where the call lacks what the title takes for granted, a mask for example: another name for
    the same numbers is then preferred.
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
        """For 'bf16' and 'float32' the id of a case, of ``core`` or ``noise``, that it fails.

        A recipe is missing where no bound fails it: see ``needs`` and ``unseen``.
        """
        cases = zip(RECIPES, KILLS.get(self.id, ("", "")), strict=True)
        return {recipe: case for recipe, case in cases if case}

    @property
    def needs(self) -> str:
        """'statistics' where a bound on each value lets the mutant pass in some recipe, else 'bounds'."""
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
    """A mutant; ``links`` are paths below https://github.com, ``pieces`` those that are always the same."""
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
    """A guise, from the same pieces as a mutant."""
    return Guise(words, made_of(hooks, pieces), applies)


def made_of(hooks: Make | None, pieces: Mapping[str, Any]) -> Make:
    fixed = Hooks(**pieces)
    return (lambda call, recipe: fixed) if hooks is None else hooks


def run_mutant(mutant: Mutant | Guise, call: Call, recipe: Recipe, way: Way = USUAL) -> Results:
    """What the mutant gives for a call under a recipe: results by name, one float64 array a worker.

    Where the mutant does not apply, the correct results. NaN and infinities raise no warning.
    """
    hooks = mutant.hooks(call, recipe) if mutant.applies(call) else Hooks()
    with np.errstate(all="ignore"):
        return RESULTS[call.operation](call, recipe, hooks, way)


class MutantTarget:
    """A mutant as a target: the claims are those of the correct program in the same recipe."""

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
