"""Bad tensors and options: an error of its kind and code, with what was expected, what came, how to fix it.

No exception of Python or NumPy may come through a public function, and no bad value may be taken for
a good one.
"""

import ml_dtypes
import numpy as np
import pytest
from bad_input.calls import (
    DY,
    FUNCTIONS,
    HKV,
    LONG,
    LONGER,
    B,
    H,
    K,
    OnAnotherDevice,
    Q,
    S,
    V,
    WithoutText,
    attention,
    backward,
    refused,
    ring,
    with_value,
)

import ringspec as rs
from ringspec.errors import DtypeError, NonFiniteError, OptionError, ShapeError, UnknownKeywordError

BAD = {
    "q of rank 3": ({"q": Q[0]}, ShapeError),
    "k of rank 5": ({"k": K[None]}, ShapeError),
    "v of rank 0": ({"v": np.float64(1)}, ShapeError),
    "heads that do not divide": ({"q": Q[:, :3]}, (ShapeError, "head-count")),
    "fewer query heads than key heads": ({"q": Q[:, :1]}, (ShapeError, "head-count")),
    "k and v of different heads": ({"v": V[:, :1]}, ShapeError),
    "k and v of different lengths": ({"v": V[:, :, :5]}, ShapeError),
    "q and k of different batches": ({"q": Q[:1]}, ShapeError),
    "q and k of different widths": ({"k": K[..., :4]}, ShapeError),
    "axes as [B, S, H, D]": ({"k": K.swapaxes(1, 2), "v": V.swapaxes(1, 2)}, (ShapeError, "head-count")),
    "no batch": ({"q": Q[:0], "k": K[:0], "v": V[:0]}, ShapeError),
    "no head": ({"q": Q[:, :0]}, ShapeError),
    "no key head": ({"k": K[:, :0], "v": V[:, :0]}, ShapeError),
    "no width": ({"q": Q[..., :0], "k": K[..., :0]}, ShapeError),
    "no value width": ({"v": V[..., :0]}, ShapeError),
    "NaN in q": ({"q": with_value(Q, np.nan)}, NonFiniteError),
    "inf in k": ({"k": with_value(K, np.inf)}, NonFiniteError),
    "-inf in v": ({"v": with_value(V, -np.inf)}, NonFiniteError),
    "NaN in a bfloat16 q": ({"q": with_value(Q, np.nan).astype(ml_dtypes.bfloat16)}, NonFiniteError),
    "q of objects": ({"q": Q.astype(object)}, DtypeError),
    "q of integers": ({"q": np.ones(Q.shape, np.int64)}, DtypeError),
    "k of booleans": ({"k": np.ones(K.shape, bool)}, DtypeError),
    "v of complex numbers": ({"v": V.astype(complex)}, DtypeError),
    "q of text": ({"q": Q.astype(str)}, DtypeError),
    "q of dates": ({"q": np.zeros(Q.shape, "M8[s]")}, DtypeError),
    "q of records": ({"q": np.zeros(Q.shape, [("x", "f8")])}, DtypeError),
    "q of long doubles": ({"q": Q.astype(np.longdouble)}, DtypeError),
    "q of NumPy's variable text": ({"q": np.array(["a"], np.dtypes.StringDType())}, DtypeError),
    "q of masked values": ({"q": np.ma.masked_array(Q, Q > 0)}, DtypeError),
    "q is None": ({"q": None}, DtypeError),
    "q is text": ({"q": "q"}, DtypeError),
    "ragged lists": ({"q": [[[[1.0, 2.0], [3.0]]]]}, DtypeError),
    "a tensor on another device": ({"q": OnAnotherDevice()}, DtypeError),
    "a dictionary": ({"v": {"v": V}}, DtypeError),
    "a product beyond float64": ({"q": 1e200 * Q, "k": 1e200 * K}, NonFiniteError),
    # window
    "window -1": ({"window": -1}, (OptionError, "window")),
    "window (-1, 0)": ({"window": (-1, 0)}, (OptionError, "window")),
    "window (None, -1)": ({"window": (None, -1)}, (OptionError, "window")),
    "window of three": ({"window": (1, 2, 3)}, (OptionError, "window")),
    "window of one": ({"window": (1,)}, (OptionError, "window")),
    "window of none": ({"window": ()}, (OptionError, "window")),
    "window 2.0": ({"window": 2.0}, (OptionError, "window")),
    "window (1, 2.0)": ({"window": (1, 2.0)}, (OptionError, "window")),
    "window True": ({"window": True}, (OptionError, "window")),
    "window text": ({"window": "5"}, (OptionError, "window")),
    "window NaN": ({"window": np.nan}, (OptionError, "window")),
    "window in an array": ({"window": np.array([1, 2])}, (OptionError, "window")),
    "window of nested pairs": ({"window": ((1, 2), 3)}, (OptionError, "window")),
    "window of 5000 digits below zero": ({"window": -LONGER}, (OptionError, "window")),
    "window without text": ({"window": WithoutText()}, (OptionError, "window")),
    # numbers and flags
    "causal 1": ({"causal": 1}, OptionError),
    "causal None": ({"causal": None}, OptionError),
    "causal text": ({"causal": "yes"}, OptionError),
    "causal array": ({"causal": np.array([True, False])}, OptionError),
    "causal without text": ({"causal": WithoutText()}, OptionError),
    "scale NaN": ({"scale": np.nan}, OptionError),
    "scale inf": ({"scale": -np.inf}, OptionError),
    "scale True": ({"scale": True}, OptionError),
    "scale text": ({"scale": "0.5"}, OptionError),
    "scale complex": ({"scale": 1j}, OptionError),
    "scale array": ({"scale": np.ones(H)}, OptionError),
    "scale 10**400": ({"scale": LONG}, OptionError),
    "scale of 5000 digits": ({"scale": -LONGER}, OptionError),
    "scale without text": ({"scale": WithoutText()}, OptionError),
    "scale that leaves float64": ({"scale": 1e308}, NonFiniteError),
    "bias that leaves float64": ({"bias": np.full((S, S), 1.7e308), "scale": 1e307}, NonFiniteError),
    "softcap 0": ({"softcap": 0}, OptionError),
    "softcap -1": ({"softcap": -1.0}, OptionError),
    "softcap NaN": ({"softcap": np.nan}, OptionError),
    "softcap inf": ({"softcap": np.inf}, OptionError),
    "softcap False": ({"softcap": False}, OptionError),
    "softcap text": ({"softcap": "30"}, OptionError),
    "softcap 10**400": ({"softcap": LONG}, OptionError),
    "dropout_p 1": ({"dropout_p": 1.0}, (OptionError, "dropout")),
    "dropout_p -0.1": ({"dropout_p": -0.1}, (OptionError, "dropout")),
    "dropout_p 1.5": ({"dropout_p": 1.5}, (OptionError, "dropout")),
    "dropout_p NaN": ({"dropout_p": np.nan}, OptionError),
    "dropout_p None": ({"dropout_p": None}, OptionError),
    "dropout_p 10**400": ({"dropout_p": LONG}, OptionError),
    "dropout_seed -1": ({"dropout_seed": -1}, (OptionError, "dropout")),
    "dropout_seed 2**64": ({"dropout_seed": 2**64}, (OptionError, "dropout")),
    "dropout_seed 10**400": ({"dropout_seed": LONG}, (OptionError, "dropout")),
    "dropout_seed of 5000 digits": ({"dropout_seed": LONGER}, (OptionError, "dropout")),
    "dropout_seed 1.0": ({"dropout_seed": 1.0}, OptionError),
    "dropout_seed None": ({"dropout_seed": None}, OptionError),
    "q_offset 0.5": ({"q_offset": 0.5}, OptionError),
    "q_offset None": ({"q_offset": None}, OptionError),
    "q_offset True": ({"q_offset": True}, OptionError),
    "q_offset 2**63": ({"q_offset": 2**63}, OptionError),
    "q_offset that wraps round": ({"q_offset": 2**63 - 1}, OptionError),
    "q_offset of 5000 digits": ({"q_offset": LONGER}, OptionError),
    # pairs
    "mask of integers": ({"mask": np.ones((S, S), int)}, DtypeError),
    "mask of floats": ({"mask": np.zeros((S, S))}, DtypeError),
    "mask of text": ({"mask": "causal"}, DtypeError),
    "mask of another length": ({"mask": np.ones((S, S + 1), bool)}, ShapeError),
    "mask of rank 5": ({"mask": np.ones((1, 1, 1, S, S), bool)}, ShapeError),
    "mask of key heads": ({"mask": np.ones((B, HKV, S, S), bool)}, ShapeError),
    "mask on another device": ({"mask": OnAnotherDevice()}, DtypeError),
    "keep of floats": ({"keep": np.ones((S, S))}, DtypeError),
    "keep of another shape": ({"keep": np.ones((S, 2), bool)}, ShapeError),
    "bias NaN": ({"bias": with_value(np.zeros((S, S)), np.nan)}, NonFiniteError),
    "bias +inf": ({"bias": with_value(np.zeros((S, S)), np.inf)}, NonFiniteError),
    "bias of integers": ({"bias": np.zeros((S, S), int)}, DtypeError),
    "bias of booleans": ({"bias": np.ones((S, S), bool)}, DtypeError),
    "bias of another length": ({"bias": np.zeros((S, S - 1))}, ShapeError),
    "bias of masked values": ({"bias": np.ma.masked_array(np.zeros((S, S)), np.eye(S))}, DtypeError),
    # documents and bounds
    "segments of floats": ({"segments_q": np.zeros(S)}, DtypeError),
    "segments of another length": ({"segments_q": np.zeros(S + 1, int)}, ShapeError),
    "segments of rank 3": ({"segments_q": np.zeros((1, 1, S), int)}, ShapeError),
    "segments_k alone": ({"segments_k": np.zeros(S, int)}, OptionError),
    "segments beyond 63 bits": ({"segments_q": np.full(S, 2**63, np.uint64)}, OptionError),
    "segments with cu_seqlens": ({"segments_q": np.zeros(S, int), "cu_seqlens": [0, S]}, OptionError),
    "cu_seqlens that falls": ({"cu_seqlens": [0, 4, 2, S]}, (OptionError, "packing")),
    "cu_seqlens that starts at 1": ({"cu_seqlens": [1, S]}, (OptionError, "packing")),
    "cu_seqlens beyond S": ({"cu_seqlens": [0, S + 1]}, (OptionError, "packing")),
    "cu_seqlens of nothing": ({"cu_seqlens": []}, (OptionError, "packing")),
    "cu_seqlens of rank 2": ({"cu_seqlens": [[0, S]]}, (OptionError, "packing")),
    "cu_seqlens a number": ({"cu_seqlens": S}, (OptionError, "packing")),
    "cu_seqlens of floats": ({"cu_seqlens": [0.0, S]}, (OptionError, "packing")),
    "cu_seqlens below zero": ({"cu_seqlens": [0, -1]}, (OptionError, "packing")),
    "cu_seqlens that wraps round": ({"cu_seqlens": [0, 2**63 - 1, -(2**63)]}, (OptionError, "packing")),
    "cu_seqlens beyond 64 bits": ({"cu_seqlens": [0, LONG]}, DtypeError),
    "cu_seqlens_k alone": ({"cu_seqlens_k": [0, S]}, (OptionError, "packing")),
    "cu_seqlens_k that falls": ({"cu_seqlens": [0, S], "cu_seqlens_k": [0, 3, 1]}, (OptionError, "packing")),
    "bound_min alone": ({"bound_min": np.zeros(S, int)}, (OptionError, "bounds")),
    "bound_max alone": ({"bound_max": np.zeros(S, int)}, (OptionError, "bounds")),
    "bounds of floats": ({"bound_min": np.zeros(S), "bound_max": np.ones(S)}, DtypeError),
    "bounds of another length": ({"bound_min": [0, 0], "bound_max": [6, 6]}, ShapeError),
    "bounds as numbers": ({"bound_min": 0, "bound_max": 6}, ShapeError),
    "positions_q of floats": ({"positions_q": np.arange(6.0)}, DtypeError),
    "positions_k of another length": ({"positions_k": np.arange(5)}, ShapeError),
    "positions_k of another batch": ({"positions_k": np.zeros((3, S), int)}, ShapeError),
    "positions beyond 64 bits": ({"positions_q": [LONG] * S}, DtypeError),
    "positions whose distance wraps round": (
        {"window": 1, "positions_q": [-(2**63)] * S, "positions_k": [2**63 - 1] * S}, OptionError),
    # sinks
    "sinks NaN": ({"sinks": with_value(np.zeros(H), np.nan)}, NonFiniteError),
    "sinks inf": ({"sinks": with_value(np.zeros(H), np.inf)}, NonFiniteError),
    "sinks -inf": ({"sinks": with_value(np.zeros(H), -np.inf)}, NonFiniteError),
    "sinks of key heads": ({"sinks": np.zeros(HKV)}, ShapeError),
    "sinks of rank 3": ({"sinks": np.zeros((H, 1, 1))}, ShapeError),
    "sinks of no column": ({"sinks": np.zeros((H, 0))}, ShapeError),
    "sinks a number": ({"sinks": 1.0}, ShapeError),
    "sinks of integers": ({"sinks": [0] * H}, DtypeError),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_by_every_function(case, function):
    changes, expected = BAD[case]
    refused(expected, lambda: function(**changes))


BAD_GRADIENTS = {
    "dy of rank 3": ({"dy": DY[0]}, ShapeError),
    "dy of q's width": ({"dy": Q}, ShapeError),
    "dy of key heads": ({"dy": DY[:, :2]}, ShapeError),
    "dy NaN": ({"dy": with_value(DY, np.nan)}, NonFiniteError),
    "dy inf": ({"dy": with_value(DY, np.inf)}, NonFiniteError),
    "dy of integers": ({"dy": np.ones(DY.shape, int)}, DtypeError),
    "dy on another device": ({"dy": OnAnotherDevice()}, DtypeError),
    "dlse of rank 4": ({"dlse": np.ones((B, H, S, 1))}, ShapeError),
    "dlse of another order": ({"dlse": np.ones((B, S, H))}, ShapeError),
    "dlse NaN": ({"dlse": with_value(np.ones((B, H, S)), np.nan)}, NonFiniteError),
    "dlse -inf": ({"dlse": with_value(np.ones((B, H, S)), -np.inf)}, NonFiniteError),
    "dlse a number": ({"dlse": 1.0}, ShapeError),
}


@pytest.mark.parametrize("function", (backward, ring), ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_bad_upstream_gradients_are_refused(case, function):
    changes, expected = BAD_GRADIENTS[case]
    refused(expected, lambda: function(**changes))


def test_a_backward_without_dy_is_refused():
    refused(DtypeError, lambda: rs.attention_backward(Q, K, V, None))


# --- keywords ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("casual", "causal"), ("windows", "window"), ("soft_cap", "softcap"), ("biases", "bias"),
     ("segment_q", "segments_q"), ("cu_seqlen", "cu_seqlens"), ("sink", "sinks"),
     ("dropout", "dropout_p"), ("position_k", "positions_k"), ("bounds_min", "bound_min")],
)  # fmt: skip
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_an_unknown_keyword_is_refused_with_the_nearest_name(function, wrong, right):
    error = refused(UnknownKeywordError, lambda: function(**{wrong: 1}))
    assert wrong in error.got and error.fix == f"write {right!r}"
    assert isinstance(error, TypeError)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("softmax_scale", "scale"), ("cu_seqlens_q", "cu_seqlens"), ("seed", "dropout_seed")],
)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_keyword_of_other_libraries_is_refused_with_the_name_that_means_the_same(
    function, wrong, right
):
    error = refused(UnknownKeywordError, lambda: function(**{wrong: 1}))
    assert error.fix == f"write {right!r}"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_cp_offset_is_said_to_follow_from_the_layout(function):
    error = refused(UnknownKeywordError, lambda: function(cp_offset=1))
    assert error.fix.startswith("leave it out: layout, worker and step decide it")
    assert (
        "q_offset" not in str(error)
        and rs.cp_offset("striped", 0, 1, workers=2, n_q=4, n_k=4) == -1
    )


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [(ring, "circulaton", "circulation"), (ring, "layuot", "layout"), (ring, "recipes", "recipe"),
     (ring, "skip_mask", "skip_masked"), (ring, "recorded", "record"), (ring, "dir", "direction"),
     (ring, "dlses", "dlse"), (backward, "dlses", "dlse")],
)  # fmt: skip
def test_a_misspelt_keyword_of_the_function_itself_is_named(function, wrong, right):
    error = refused(UnknownKeywordError, lambda: function(**{wrong: 1}))
    assert error.fix == f"write {right!r}"


@pytest.mark.parametrize("name", ["", "workers", "dlse", "日本", "__class__"])
def test_any_other_keyword_is_refused_as_well(name):
    refused(UnknownKeywordError, lambda: attention(**{name: None}))
