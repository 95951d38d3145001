"""The calls that the tests of bad input make, and the error that they expect."""

import numpy as np
import pytest
from refusals import is_refusal

import ringspec as rs
from ringspec.errors import (
    RingspecError,
)

B, H, HKV, S, D, DV, W = 2, 4, 2, 6, 8, 3, 3
RANDOM = np.random.default_rng(11)
INPUTS = {
    "q": RANDOM.normal(size=(B, H, S, D)),
    "k": RANDOM.normal(size=(B, HKV, S, D)),
    "v": RANDOM.normal(size=(B, HKV, S, DV)),
    "dy": RANDOM.normal(size=(B, H, S, DV)),
}
Q, K, V, DY = INPUTS.values()


def attention(**changes):
    """rs.attention of the inputs above with some of them, or some options, changed."""
    given_ = INPUTS | changes
    q, k, v = (given_.pop(name) for name in ("q", "k", "v"))
    del given_["dy"]
    return rs.attention(q, k, v, **given_)


def backward(**changes):
    given_ = INPUTS | changes
    q, k, v, dy = (given_.pop(name) for name in ("q", "k", "v", "dy"))
    return rs.attention_backward(q, k, v, dy, **given_)


def ring(**changes):
    given_ = {"workers": W} | INPUTS | changes
    q, k, v, dy = (given_.pop(name) for name in ("q", "k", "v", "dy"))
    return rs.ring(q, k, v, dy, **given_)


FUNCTIONS = (attention, backward, ring)


def refused(expected, call) -> RingspecError:
    """The call fails with exactly this kind and code, and its message has its three parts."""
    with pytest.raises(RingspecError) as caught:
        call()
    error = caught.value
    assert is_refusal(error, expected), repr(error)
    parts = (error.expected, error.got, error.fix)
    assert all(isinstance(part, str) and part.strip() for part in parts)
    assert str(error) == f"expected {parts[0]}; got {parts[1]}. Fix: {parts[2]}."
    assert len(str(error)) < 2000
    return error


class OnAnotherDevice:
    """Like a tensor of another library: it has shape and dtype, but NumPy cannot read it."""

    shape, ndim, dtype = Q.shape, 4, "float32"

    def __array__(self, *arguments, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class WithoutText:
    """An object whose repr fails."""

    def __repr__(self):
        raise RuntimeError("no text")


LONG = 10**400  # beyond float64
LONGER = 10**5000  # beyond the digits that Python is willing to print


def with_value(x: np.ndarray, value: float) -> np.ndarray:
    """A copy with one element changed."""
    x = x.copy()
    x.flat[x.size // 2] = value
    return x


def only_our_errors(call) -> None:
    """The call is refused in our words, or gives results without NaN."""
    try:
        result = call()
    except RingspecError as error:
        assert error.expected and error.got and error.fix
        return
    for name in ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias"):
        value = getattr(result, name, None)
        assert value is None or not np.isnan(value).any(), name
