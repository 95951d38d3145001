"""Write what ``ringspec explain`` says of each known bug, for the bugs' pages.

    python docs/readouts.py

runs each bug as a kernel, in the first recipe in which it fails a case, and writes the sentences by bug to
docs/conform/readouts.json. Takes about half an hour on one core.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from ringspec.conformance.diagnose.mutants import MUTANTS, Mutant, MutantTarget
from ringspec.conformance.run import explain

CIRCULATIONS = ("kv", "q", "gather")  # only those that a target states are read
STORED = Path(__file__).parent / "conform" / "readouts.json"


def sentences_of(mutant: Mutant) -> list[str]:
    """What a bug computes, in sentences; none if it does not show in readouts, or not everything is explained."""
    if not mutant.kills:
        return []
    target = MutantTarget(mutant, next(iter(mutant.kills)))
    target.capabilities = replace(target.capabilities, circulations=CIRCULATIONS)
    with np.errstate(all="ignore"):
        found = explain.explain_target(target)
    whole = found.wrong and len({*found.told.explained, *found.told.others}) == found.wrong
    return list(found.told.sentences) if whole else []


@cache
def told() -> dict[str, list[str]]:
    """The stored sentences by bug."""
    found: dict[str, list[str]] = json.loads(STORED.read_text(encoding="utf-8"))
    return found


def main() -> None:
    # Every problem gets the full search.
    explain.EVALUATIONS_OF_ONE = explain.LEAST = explain.EVALUATIONS
    explain.MOST_UNEXPLAINED = 1_000
    made = {mutant.id: sentences_of(mutant) for mutant in MUTANTS.values()}
    explained = {id: sentences for id, sentences in made.items() if sentences}
    STORED.write_text(json.dumps(explained, indent=1) + "\n", encoding="utf-8")
    print(f"{len(explained)} of {len(MUTANTS)} bugs are explained")


if __name__ == "__main__":
    main()
