"""The mistakes with sinks, which are counted in the softmax sum of each row, and with their gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringspec.conformance.readout.faults.choices import (
    DSINKS,
    LSES,
    SINKS,
)
from ringspec.conformance.readout.faults.kinds import Kind, factors_beside_scores
from ringspec.conformance.readout.faults.sources import query_heads
from ringspec.conformance.readout.problem.geometry import Geometry

SINK_WORDS = {
    "none": "the sinks are left out",
    "every step": "the sinks are counted once in every step",
    "every block": "the sinks are counted once in every block in which a row sees a key",
    "times scale": "the sinks are multiplied by the scale",
    "divided by scale": "the sinks are divided by the scale",
    "times ln 2": "the sinks are multiplied by ln 2",
    "divided by ln 2": "the sinks are divided by ln 2",
    "first": "only the first of each head's sinks is counted",
    "unshifted": "exp(sink) is added to l, not exp(sink - m)",
    "not exponentiated": "the sink itself is added to l, not exp(sink - m)",
    "negated": "the sinks have the wrong sign",
}

DSINK_WORDS = {
    "lse without the sinks": "dsinks is computed with an lse that does not include the sinks",
    "without delta": "dsinks is the sum of the sinks' weights, without delta",
    "of all workers": "the dsinks of each worker is already the sum over all workers",
    "of p (1 - p)": "dsinks has p (1 - p) in place of p",
}


def sink_kinds(geometry: Geometry) -> Iterator[Kind]:
    """Yield the faults of counting the sinks in the softmax sum of each row."""
    for name, words in SINK_WORDS.items():
        number = SINKS.index(name)
        if name != "first" or geometry.sinks > 1:
            both = (("sink_o", number), ("sink_lse", number))
            yield Kind(words, both, 0.95, True)
            yield Kind(f"{words} (lse is correct)", both[:1], 1.0, True)
            yield Kind(f"{words} (o is correct)", both[1:], 1.0, True)
    h = np.arange(geometry.heads)
    for words, of in query_heads(geometry).items():
        if (of != h).any():
            table = of.reshape(1, 1, -1, 1, 1)
            yield Kind(f"the sinks are those of {words}", (("sink_of.head", table),), 1.0, True)


def dsink_kinds(geometry: Geometry, distinct: bool) -> Iterator[Kind]:
    """Yield the faults of the gradient of the sinks, and of an lse without them."""
    without = LSES.index("without the sinks")
    alone = ("dsink", DSINKS.index("lse without the sinks"))
    words = "p is computed with an lse that does not include the sinks"
    yield Kind(f"{words} (dsinks is correct)", (("lse", without),), 1.0)
    yield Kind(words, (("lse", without), alone), 1.0)
    yield Kind("dsinks is 0", (("dsink_times", 0.0),), 0.95, True)
    for words, value in factors_beside_scores(geometry, distinct):
        yield Kind(f"dsinks is {words}", (("dsink_times", value),), 1.0, True)
    for name, words in DSINK_WORDS.items():
        yield Kind(words, (("dsink", DSINKS.index(name)),), 1.0, True)
    for name, words in SINK_WORDS.items():
        if name not in ("none", "every step") and (name != "first" or geometry.sinks > 1):
            yield Kind(f"{words} (for dsinks)", (("sink_o", SINKS.index(name)),), 1.1, True)
    h = np.arange(geometry.heads)
    for words, of in query_heads(geometry).items():
        if (of != h).any():
            table = of.reshape(1, 1, -1, 1, 1)
            yield Kind(
                f"dsinks is computed with the sinks of {words}",
                (("sink_of.head", table),),
                1.1,
                True,
            )
            yield Kind(
                f"dsinks is added to that of {words}", (("dsink_of.head", table),), 1.1, True
            )
