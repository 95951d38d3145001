"""Mutants (known bugs that can be run): their definition, and how to run one on a call or as a target."""

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
    """A variant of a bug to which the bug's title applies as well; ``words`` say what is different.

    Kernels with the same bug differ in the pass that has the bug, in the contents of unwritten memory, or in the
    results that stay correct. A diagnosis also tries the variants; the kill table counts only the bug itself.
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
    ``hooks``     hooks(call, recipe) makes the pieces
    ``unseen``    for each recipe in which no case can detect the bug, the reason
    ``guises``    variants of the bug
    ``supposes``  supposes(call) is False if the call lacks something that the title takes for granted, for
                  example a mask: a diagnosis then prefers another bug that gives the same results
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
        """For each recipe ('bf16', 'float32'), a case of the profile ``core`` or ``noise`` that fails with this bug.

        A recipe in which no case detects the bug is missing: see ``unseen``.
        """
        cases = zip(RECIPES, KILLS.get(self.id, ("", "")), strict=True)
        return {recipe: case for recipe, case in cases if case}

    @property
    def needs(self) -> str:
        """'statistics' if a recipe exists in which only statistics of whole tensors detect the bug, else 'bounds'."""
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
    """Make a mutant.

    ``links`` are paths below https://github.com. Give either ``pieces``, if they are the same for every call, or
    ``hooks``, which makes them from call and recipe.
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
    """Make a variant of a bug; ``hooks`` and ``pieces`` as in :func:`mutant`."""
    return Guise(words, made_of(hooks, pieces), applies)


def made_of(hooks: Make | None, pieces: Mapping[str, Any]) -> Make:
    fixed = Hooks(**pieces)
    return (lambda call, recipe: fixed) if hooks is None else hooks


def run_mutant(mutant: Mutant | Guise, call: Call, recipe: Recipe, way: Way = USUAL) -> Results:
    """Run a mutant on a call under a recipe: results by name, one float64 array per worker.

    If the mutant does not apply to the call, the results are correct. NaN and infinities raise no warning.
    """
    hooks = mutant.hooks(call, recipe) if mutant.applies(call) else Hooks()
    with np.errstate(all="ignore"):
        return RESULTS[call.operation](call, recipe, hooks, way)


class MutantTarget:
    """A mutant as a target of the suite, with the claims of the correct program in the same recipe."""

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
