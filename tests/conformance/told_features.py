"""What the tests of sinks, bias and dropout in readouts share."""

import pytest

from ringspec.conformance.readout.problems import Setting, problem_for
from ringspec.conformance.run.explain import run_problem


def told_of(target, feature):
    """The reading of the problem with a feature."""
    problem = problem_for(Setting(feature, "contiguous", ""), target.capabilities)
    return run_problem(target, problem).reading


def named(fault):
    return ", ".join(filter(None, (fault.place, fault.kind)))


def marked(names, few):
    """All names as parameters of a test; all but a few are slow."""
    return [x if x in few else pytest.param(x, marks=pytest.mark.slow) for x in names]
