"""Programs and functions that other processes load are no tests: pytest does not import them.

What many tests ask for again is computed once in a process.
"""

from functools import lru_cache

import pytest

from ringspec.conformance.cases import edges, golden, pairs, probes, problems, properties, readout
from ringspec.conformance.explain import known_bugs
from ringspec.vectors.format.inputs import inputs_of
from ringspec.vectors.generate import layouts_of_case

collect_ignore_glob = ["*/programs/*", "*_functions.py", "*/by_hand_*.py"]

# A run keeps the correct results of its last few problems; the tests have more of them in turn, in several recipes.
problems.truth_of = lru_cache(maxsize=512)(problems.truth_of.__wrapped__)


def kept(cases):
    """The cases of a profile in a new list; they themselves never change."""
    cached = lru_cache(cases)
    return lambda *profile: list(cached(*profile))


for part in (edges, golden, pairs, probes, properties, readout):
    part.cases = kept(part.cases)


class OnDemand(dict):
    """The inputs and layouts of a problem; correct results are computed when one is looked up."""

    def __init__(self, key, evaluated):
        super().__init__({f"in.{name}": x for name, x in inputs_of(key.case).items()})
        self.update(layouts_of_case(key.case))
        self.key, self.evaluated = key, evaluated

    def __missing__(self, name):
        return self.evaluated(self.key)[name]


@pytest.fixture
def truth_on_demand(monkeypatch):
    """For tests that make calls and run nothing: few calls hold correct results."""
    evaluated = problems.evaluated
    monkeypatch.setattr(problems, "evaluated", lambda key: OnDemand(key, evaluated))


@pytest.fixture
def no_catalogue(monkeypatch):
    """For tests of sentences alone: which known bug gives the same numbers takes half of the time."""
    monkeypatch.setattr(known_bugs.KnownBugs, "diagnosis", lambda *given, **how: None)
