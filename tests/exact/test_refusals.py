"""Near ties are decided, ties are proven, and what is neither is refused; bad input is refused.

More bad input is in test_arguments.py.
"""

import numpy as np
import pytest

from ringspec import exact
from ringspec.errors import RingspecError, UndecidedError


def near_tie(gap: float, **changes) -> exact.Problem:
    """o = 1 + 2**-8 + e**-gap / (1 + e**-gap): for bfloat16 a tie but for the last term."""
    zero = np.zeros((1, 1, 1, 1))
    v = np.array([1 + 2.0**-8, 2 + 2.0**-8]).reshape(1, 1, 2, 1)
    bias = np.array([0.0, -gap]).reshape(1, 1, 1, 2)
    fields = {"k": np.zeros((1, 1, 2, 1)), "v": v, "scale": 1.0, "bias": bias}
    return exact.Problem(**{"q": zero, **fields, **changes})


@pytest.mark.parametrize("gap", (10.0, 200.0, 900.0))
def test_a_near_tie_is_decided_with_more_bits(gap):
    above = exact.forward(near_tie(gap), ("bfloat16",)).tensors["o"]["bfloat16"]
    assert float(above.item()) == 1.0078125
    v = np.array([1 + 2.0**-8, 2.0**-8]).reshape(1, 1, 2, 1)
    below = exact.forward(near_tie(gap, v=v), ("bfloat16",)).tensors["o"]["bfloat16"]
    assert float(below.item()) == 1.0


def test_a_tie_is_decided_and_what_no_precision_decides_is_refused():
    """At a gap of 0 with opposite distances o is the midpoint; at 10**5 it lies e**-100000 beside it."""
    v = np.array([1.0, 1 + 2.0**-7]).reshape(1, 1, 2, 1)
    tie = exact.forward(near_tie(0.0, v=v), ("bfloat16",)).tensors["o"]["bfloat16"]
    assert float(tie.item()) == 1.0
    with pytest.raises(UndecidedError, match="undecided"):
        exact.forward(near_tie(1e5), ("bfloat16",))
    other = exact.forward(near_tie(1e5), ("float32",)).tensors["o"]["float32"]
    assert float(other.item()) == 1 + 2.0**-8  # no tie of float32


BAD = {
    "k of two axes": {"k": np.zeros((2, 1))},
    "v of another length": {"v": np.zeros((1, 1, 3, 1))},
    "a keep mask of two axes": {"keep": np.ones((1, 2), dtype=bool)},
    "NaN in sinks": {"sinks": np.full((1, 1), np.nan)},
    "sinks of one axis": {"sinks": np.zeros(1)},
    "a NaN soft cap": {"softcap": float("nan")},
    "a negative dropout_p": {"dropout_p": -0.1},
    "a NaN dropout_p": {"dropout_p": float("nan")},
    "a NaN scale": {"scale": float("nan")},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_problem_is_refused_with_an_error_of_ringspec(name):
    with pytest.raises(RingspecError):
        near_tie(1.0, **BAD[name])


ONE, NAN = np.ones((1, 1, 1)), np.full((1, 1, 1), np.nan)


@pytest.mark.parametrize(
    ("lse", "delta"),
    ((NAN, ONE), (np.inf * ONE, ONE), (-1e6 * ONE, ONE), (ONE, NAN), (ONE, -np.inf * ONE)),
)
def test_a_block_backward_refuses_an_lse_or_delta_that_gives_no_numbers(lse, delta):
    with pytest.raises(RingspecError):
        exact.block_backward(near_tie(1.0), ONE[..., None], lse, delta)


@pytest.mark.parametrize(
    ("o", "lse"),
    (
        (ONE, ONE),
        (ONE[None, ..., None], ONE),
        (ONE[None, ..., None], NAN[None]),
        (ONE[None, ..., None], np.inf * ONE[None]),
        (NAN[None, ..., None], ONE[None]),
    ),
)
def test_a_merge_refuses_parts_of_other_shapes_and_nan(o, lse):
    with pytest.raises(RingspecError):
        exact.merge(o, lse)
