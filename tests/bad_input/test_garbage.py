"""Odd and hostile values in every argument: an error of ours or numbers, never NaN."""

import numpy as np
import pytest
from bad_input.calls import (
    FUNCTIONS,
    INPUTS,
    LONG,
    LONGER,
    B,
    H,
    OnAnotherDevice,
    Q,
    S,
    WithoutText,
    backward,
    only_our_errors,
    ring,
)
from hypothesis import given
from hypothesis import strategies as st

import ringspec as rs
from ringspec.errors import (
    RingspecError,
)
from ringspec.recipes import RECIPES

RUN, RING = ring(), rs.forward_schedule("kv", 3)
ODD_VALUES = [
    None, True, False, np.bool_(True), 0, 1, -1, 2, 7, np.int8(3), np.uint8(1), np.uint16(3), np.int64(-1),
    2**31, 2**62, -(2**62), 0.0, -0.0, 0.5, 1.0, 3.0, -2.5, 5e-324, np.nan, np.inf, -np.inf, 1j,
    np.float16(0.5), np.float32(-2), "", "q", "zigzag", "bf16", "gather", "nan", b"kv", b"",
    (), [], {}, set(), (1,), (1, 2), (1, None), (None, None), (1.0, 2), ("kv", "q"), [0, S], [[0]],
    [[0, 1], [2]], [None], [[0, 1], [2, 3], [4, 5]], range(S), ..., int, len, object(),
    OnAnotherDevice(), np.zeros(()), np.zeros(S), np.zeros((S, S)), np.zeros(Q.shape),
    np.full(S, np.nan), np.ones((S, S), bool), np.ones(S, bool), np.zeros(S, int),
    np.arange(S), np.zeros((B, S), ">i2"), np.zeros((3, 2), "u1"), np.zeros((0, 0)), np.zeros(H),
    np.zeros((H, 2), "c16"), np.array("kv"), np.array(["kv", "q"]), np.array([None]),
    np.array([True, False]), np.array(3), np.array([1, -1]), np.zeros((1,) * 9), RUN, RING,
]  # fmt: skip
ODD = st.sampled_from(ODD_VALUES) | st.floats(-100, 100) | st.text(max_size=4) | st.integers(-9, 9)

# Values that are good for at least one option, so that more than the first check is reached.
GOOD = {
    "causal": st.booleans(),
    "window": st.sampled_from([None, 0, 3, (1, None), (None, None), (0, 2)]),
    "scale": st.floats(-3, 3),
    "softcap": st.sampled_from([1e-3, 2.0, 1e6]),
    "bias": st.sampled_from([np.zeros((S, S)), np.full((H, 1, S), -np.inf), np.array(1.0)]),
    "mask": st.sampled_from([np.eye(S, dtype=bool), np.array(False), np.ones((B, 1, 1, S), bool)]),
    "segments_q": st.sampled_from([np.zeros(S, int), np.arange(S) - 2, np.full((B, S), -1)]),
    "segments_k": st.sampled_from([np.zeros(S, int), np.arange(S) - 2]),
    "cu_seqlens": st.sampled_from([[0], [0, S], [0, 2, 2, 5]]),
    "cu_seqlens_k": st.sampled_from([[0], [0, S], [0, 3]]),
    "bound_min": st.sampled_from([np.zeros(S, int), np.arange(S)]),
    "bound_max": st.sampled_from([np.full(S, S), np.arange(S) + 1]),
    "sinks": st.sampled_from([np.zeros(H), np.full((H, 2), -700.0), np.full(H, 700.0)]),
    "dropout_p": st.floats(0, 1, exclude_max=True),
    "dropout_seed": st.integers(0, 2**64 - 1),
    "keep": st.sampled_from([np.eye(S, dtype=bool), np.array(True)]),
    "q_offset": st.integers(-(2**60), 2**60),
    "positions_q": st.sampled_from([np.arange(S)[::-1], np.full((B, S), -(2**61))]),
    "positions_k": st.sampled_from([np.arange(S) * 2, np.full((1, S), 2**61)]),
}
GOOD_RING = {
    "layout": st.sampled_from(["contiguous", "striped", "zigzag", "zigzag_per_document"]),
    "circulation": st.sampled_from(["kv", "q", "gather"]),
    "recipe": st.sampled_from(sorted(RECIPES)),
    "direction": st.sampled_from([1, -1]),
    "workers": st.sampled_from([1, 2, 3, 6]),
    "skip_masked": st.booleans(),
    "dlse": st.sampled_from([None, np.ones((B, H, S))]),
}


def arguments(good: dict, odd) -> st.SearchStrategy:
    """Up to three arguments, each odd or good."""
    one = st.sampled_from(sorted(good)).flatmap(
        lambda name: st.tuples(st.just(name), odd | good[name])
    )
    return st.lists(one, min_size=1, max_size=3).map(dict)


QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def wrong_answers(function, name: str, values: list) -> list[str]:
    """What goes through one argument with these values that is neither refused nor a number."""
    wrong = []
    for number, value in enumerate(values):
        try:
            only_our_errors(lambda value=value: function(**{name: value}))
        except Exception as error:
            wrong.append(f"value {number}: {type(error).__name__}")
    return wrong


@QUIET
@pytest.mark.parametrize("name", sorted(GOOD))
def test_every_odd_value_in_every_option_is_refused_or_gives_numbers(name):
    for function in FUNCTIONS:
        assert wrong_answers(function, name, ODD_VALUES) == []


RING_ARGUMENTS = dict.fromkeys([*GOOD_RING, "record", "schedule", "observer", "dy"])


@QUIET
@pytest.mark.parametrize("name", RING_ARGUMENTS)
def test_every_odd_value_in_every_argument_of_the_ring_is_refused_or_gives_numbers(name):
    values = [value for value in ODD_VALUES if not (name == "observer" and callable(value))]
    assert wrong_answers(ring, name, values) == []


@QUIET
@given(arguments(GOOD, ODD))
def test_garbage_in_some_options_is_refused_or_gives_numbers(changes):
    for function in FUNCTIONS:
        only_our_errors(lambda function=function: function(**changes))


SAFE_TO_MIX = GOOD | {name: GOOD_RING[name] for name in ("layout", "recipe", "dlse")}


@QUIET
@given(arguments(SAFE_TO_MIX, ODD))
def test_garbage_in_options_layout_recipe_and_dlse_is_refused_or_gives_numbers(changes):
    only_our_errors(lambda: ring(**changes))


@QUIET
@given(arguments(GOOD | GOOD_RING, st.nothing()))
def test_good_options_in_any_combination_are_refused_or_give_numbers(changes):
    only_our_errors(lambda: ring(**changes))


@pytest.mark.parametrize("name", INPUTS)
def test_every_odd_value_as_a_tensor_is_refused(name):
    """But for an array of the right shape."""
    values = [value for value in ODD_VALUES if np.shape(INPUTS[name]) != getattr(value, "shape", 0)]
    values += [OnAnotherDevice()]
    for function in [backward] if name == "dy" else FUNCTIONS:
        for value in values:
            with pytest.raises(RingspecError):
                function(**{name: value})


HOSTILE = st.sampled_from([LONG, -LONG, LONGER, -LONGER, WithoutText(), 2**63, -(2**63) - 1, 2**64])


@QUIET
@given(arguments(GOOD, HOSTILE | st.tuples(HOSTILE, HOSTILE)))
def test_hostile_numbers_and_objects_are_refused_or_give_numbers(changes):
    for function in FUNCTIONS:
        only_our_errors(lambda function=function: function(**changes))
