"""What the tests of sinks, bias, dropout and padding in readouts share."""

import numpy as np
import pytest

from ringspec.conformance.explain.read_problems import run_problem
from ringspec.conformance.readout.problem.chosen import problem_for
from ringspec.conformance.readout.problem.settings import Setting
from ringspec.conformance.target import Capabilities


class Planted:
    """A causal KV ring with faults, read in float32 with two query heads of a key head."""

    def __init__(self, ring, layout, features, **faults):
        self.name, self.ring, self.faults = f"ring with {', '.join(features)}", ring, faults
        self.capabilities = Capabilities(
            circulations=("kv",), directions=(1,), workers=(3,), head_ratios=(2,), only_causal=True, batch=(1,),
            layouts=(layout,), masks=("causal",), formats=("float32",), features=features,
        )  # fmt: skip

    def run(self, call):
        with np.errstate(all="ignore"):
            return self.ring(call, **self.faults)


def told_of(target, feature, layout="contiguous", share=1.0):
    """The reading of the problem with a feature, by a part of the search."""
    problem = problem_for(Setting(feature, layout, ""), target.capabilities)
    return run_problem(target, problem, share=share).reading


def named(fault):
    return ", ".join(filter(None, (fault.place, fault.kind)))


def marked(names, few):
    """All names as parameters of a test; all but a few are slow."""
    return [x if x in few else pytest.param(x, marks=pytest.mark.slow) for x in names]
