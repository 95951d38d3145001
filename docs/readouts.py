"""Write what ``ringspec explain`` says of each known bug, for the bugs' pages and for ``explain`` itself.

    python docs/readouts.py

runs each bug as a kernel, in the first recipe in which it fails a case, and searches for its faults. The sentences and
the readings by bug go to ringspec/conformance/explain/known_bugs.json, beside the program that tries these readings before
it searches. Takes about 15 minutes on one core.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ringspec.conformance.diagnose.mutants import MUTANTS, Mutant, MutantTarget
from ringspec.conformance.explain import explain, known_bugs, read_problems
from ringspec.conformance.readout.reading import PassRead
from ringspec.conformance.readout.search.context import EVALUATIONS
from ringspec.conformance.readout.search.rounding import is_rounding

CIRCULATIONS = ("kv", "q", "gather")  # only those that a target states are read
STORED = Path(known_bugs.__file__).with_name(known_bugs.FILE)


def stored_of(mutant: Mutant) -> dict[str, Any]:
    """What a bug computes: the sentences, if everything is explained, and the readings that were found by a search."""
    if not mutant.kills:
        return {}
    target = MutantTarget(mutant, next(iter(mutant.kills)))
    target.capabilities = replace(target.capabilities, circulations=CIRCULATIONS)
    with np.errstate(all="ignore"):
        found = explain.explain_target(target, catalogue=False)
    explained = {*found.conclusion.explained, *found.conclusion.others}
    searched = [(one.problem, x) for one in found.runs if (x := one.reading) and x.evaluations]
    kept = [
        known_bugs.as_stored(problem, x)
        for problem, x in searched
        if not any(map(of_rounding, x.passes)) and (problem.id in explained or not x.explained)
    ]
    whole = found.wrong and len(explained) == found.wrong
    stored = {"sentences": list(found.conclusion.sentences) if whole else [], "readings": kept}
    return {name: x for name, x in stored.items() if x}


def of_rounding(one: PassRead) -> bool:
    """Whether a pass has a fault of rounding, which is measured anew in each problem."""
    return any(is_rounding(fault.kind) for faults in one.sets for fault in faults)


def sentences_by_bug() -> dict[str, list[str]]:
    """The stored sentences by bug."""
    return {id: one["sentences"] for id, one in known_bugs.of_bugs().items() if "sentences" in one}


def main() -> None:
    # Longer searches than those of a user.
    read_problems.LEAST = read_problems.EVALUATIONS_OF_ONE
    read_problems.EVALUATIONS_OF_ONE = EVALUATIONS
    read_problems.EVALUATIONS_OF_ALL = 4 * EVALUATIONS
    made = {mutant.id: stored_of(mutant) for mutant in MUTANTS.values()}
    found = {id: one for id, one in made.items() if one}
    # One line for each bug.
    lines = ",\n".join(f"{json.dumps(id)}: {json.dumps(one)}" for id, one in found.items())
    STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    explained = sum("sentences" in one for one in found.values())
    print(f"{explained} of {len(MUTANTS)} bugs are explained")


if __name__ == "__main__":
    main()
