"""Bad input: an error of its own class that says what was expected, what came and how to mend it.

No exception of Python or NumPy may come through a public function, no bad value may be taken for a
good one, and no finite input may give NaN. The second half holds the other side: what is good input
in an unusual form (views, byte orders, NumPy scalars, read-only, empty) gives the same result.
"""

import copy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspec as rs
from ringspec.errors import (
    BoundsError,
    DropoutError,
    DtypeError,
    HeadCountError,
    LayoutError,
    NonFiniteError,
    NotRecordedError,
    OptionError,
    PackingError,
    RingspecError,
    ScheduleError,
    ShapeError,
    UnknownKeywordError,
    UnknownNameError,
    WindowError,
    WorkerCountError,
)
from ringspec.recipes import RECIPES
from ringspec.spec.layout import (
    contiguous,
    from_table,
    lse_from_tiles,
    lse_to_tiles,
    striped,
    zigzag,
    zigzag_per_document,
)
from ringspec.spec.schedule import Step, Transfer, zigzag_offsets

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
    dy, q, k, v = (given_.pop(name) for name in ("dy", "q", "k", "v"))
    return rs.attention_backward(dy, q, k, v, **given_)


def ring(**changes):
    given_ = {"workers": W} | INPUTS | changes
    q, k, v, dy = (given_.pop(name) for name in ("q", "k", "v", "dy"))
    return rs.ring(q, k, v, dy, **given_)


FUNCTIONS = (attention, backward, ring)


def refused(error_class, call) -> RingspecError:
    """The call fails with exactly this class, and its message has its three parts."""
    with pytest.raises(RingspecError) as caught:
        call()
    error = caught.value
    assert type(error) is error_class
    parts = (error.expected, error.got, error.mend)
    assert all(isinstance(part, str) and part.strip() for part in parts)
    assert str(error) == f"expected {parts[0]}; got {parts[1]}. To mend it: {parts[2]}."
    assert len(str(error)) < 2000
    return error


def marked(cases: dict, faults: dict[str, str]) -> list:
    """The names of the cases; a case that the code gets wrong today carries the cause."""
    assert set(faults) <= set(cases)
    marks = {case: pytest.mark.xfail(strict=True, reason=cause) for case, cause in faults.items()}
    return [pytest.param(case, marks=marks.get(case, ()), id=case) for case in cases]


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


# --- q, k, v and the options of every function ------------------------------------------------

BAD = {
    "q of rank 3": ({"q": Q[0]}, ShapeError),
    "k of rank 5": ({"k": K[None]}, ShapeError),
    "v of rank 0": ({"v": np.float64(1)}, ShapeError),
    "heads that do not divide": ({"q": Q[:, :3]}, HeadCountError),
    "fewer query heads than key heads": ({"q": Q[:, :1]}, HeadCountError),
    "k and v of different heads": ({"v": V[:, :1]}, ShapeError),
    "k and v of different lengths": ({"v": V[:, :, :5]}, ShapeError),
    "q and k of different batches": ({"q": Q[:1]}, ShapeError),
    "q and k of different widths": ({"k": K[..., :4]}, ShapeError),
    "axes as [B, S, H, D]": ({"k": K.swapaxes(1, 2), "v": V.swapaxes(1, 2)}, HeadCountError),
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
    "window -1": ({"window": -1}, WindowError),
    "window (-1, 0)": ({"window": (-1, 0)}, WindowError),
    "window (None, -1)": ({"window": (None, -1)}, WindowError),
    "window of three": ({"window": (1, 2, 3)}, WindowError),
    "window of one": ({"window": (1,)}, WindowError),
    "window of none": ({"window": ()}, WindowError),
    "window 2.0": ({"window": 2.0}, WindowError),
    "window (1, 2.0)": ({"window": (1, 2.0)}, WindowError),
    "window True": ({"window": True}, WindowError),
    "window text": ({"window": "5"}, WindowError),
    "window NaN": ({"window": np.nan}, WindowError),
    "window in an array": ({"window": np.array([1, 2])}, WindowError),
    "window of nested pairs": ({"window": ((1, 2), 3)}, WindowError),
    "window of 5000 digits below zero": ({"window": -LONGER}, WindowError),
    "window without text": ({"window": WithoutText()}, WindowError),
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
    "dropout_p 1": ({"dropout_p": 1.0}, DropoutError),
    "dropout_p -0.1": ({"dropout_p": -0.1}, DropoutError),
    "dropout_p 1.5": ({"dropout_p": 1.5}, DropoutError),
    "dropout_p NaN": ({"dropout_p": np.nan}, OptionError),
    "dropout_p None": ({"dropout_p": None}, OptionError),
    "dropout_p 10**400": ({"dropout_p": LONG}, OptionError),
    "dropout_seed -1": ({"dropout_seed": -1}, DropoutError),
    "dropout_seed 2**64": ({"dropout_seed": 2**64}, DropoutError),
    "dropout_seed 10**400": ({"dropout_seed": LONG}, DropoutError),
    "dropout_seed of 5000 digits": ({"dropout_seed": LONGER}, DropoutError),
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
    "cu_seqlens that falls": ({"cu_seqlens": [0, 4, 2, S]}, PackingError),
    "cu_seqlens that starts at 1": ({"cu_seqlens": [1, S]}, PackingError),
    "cu_seqlens beyond S": ({"cu_seqlens": [0, S + 1]}, PackingError),
    "cu_seqlens of nothing": ({"cu_seqlens": []}, PackingError),
    "cu_seqlens of rank 2": ({"cu_seqlens": [[0, S]]}, PackingError),
    "cu_seqlens a number": ({"cu_seqlens": S}, PackingError),
    "cu_seqlens of floats": ({"cu_seqlens": [0.0, S]}, PackingError),
    "cu_seqlens below zero": ({"cu_seqlens": [0, -1]}, PackingError),
    "cu_seqlens that wraps round": ({"cu_seqlens": [0, 2**63 - 1, -(2**63)]}, PackingError),
    "cu_seqlens beyond 64 bits": ({"cu_seqlens": [0, LONG]}, DtypeError),
    "cu_seqlens_k alone": ({"cu_seqlens_k": [0, S]}, PackingError),
    "cu_seqlens_k that falls": ({"cu_seqlens": [0, S], "cu_seqlens_k": [0, 3, 1]}, PackingError),
    "bound_min alone": ({"bound_min": np.zeros(S, int)}, BoundsError),
    "bound_max alone": ({"bound_max": np.zeros(S, int)}, BoundsError),
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

BAD_FAULTS = {
    "q of NumPy's variable text": "formats.py load: dtype.newbyteorder raises TypeError",
    "q of masked values": "checks.py as_array takes numpy.ma as it is; shapes then break",
    "bias of masked values": "checks.py as_array takes numpy.ma as it is; the mask is ignored",
    "a product beyond float64": "attention.py scores: z = inf becomes NaN in exp(s - m)",
    "scale that leaves float64": "attention.py scores: z = inf becomes NaN in exp(s - m)",
    "bias that leaves float64": "attention.py scores: z = inf becomes NaN in exp(s - m)",
    "window of 5000 digits below zero": "checks.py check_window: repr(int) raises ValueError",
    "window without text": "checks.py check_window: repr raises",
    "causal without text": "checks.py flag: repr raises",
    "scale without text": "checks.py number: repr raises",
    "scale 10**400": "checks.py number: float(int) raises OverflowError",
    "scale of 5000 digits": "checks.py number: float(int) raises OverflowError",
    "softcap 10**400": "checks.py number: float(int) raises OverflowError",
    "dropout_p 10**400": "checks.py number: float(int) raises OverflowError",
    "dropout_seed of 5000 digits": "checks.py check_dropout: str(int) raises ValueError",
    "q_offset 2**63": "options.py check: arange + q_offset raises OverflowError",
    "q_offset of 5000 digits": "options.py check: arange + q_offset raises OverflowError",
    "q_offset that wraps round": "options.py check: arange + q_offset wraps to -2**63",
    "cu_seqlens that wraps round": "checks.py segments_from_cu_seqlens: np.diff wraps",
    "positions whose distance wraps round": "masks.py window: key - query wraps; far is near",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", marked(BAD, BAD_FAULTS))
def test_bad_arguments_are_refused_by_every_function(case, function):
    changes, error_class = BAD[case]
    refused(error_class, lambda: function(**changes))


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
    changes, error_class = BAD_GRADIENTS[case]
    refused(error_class, lambda: function(**changes))


def test_a_backward_without_dy_is_refused():
    refused(DtypeError, lambda: rs.attention_backward(None, Q, K, V))


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
    assert wrong in error.got and error.mend == f"write {right!r}"
    assert isinstance(error, TypeError)


@pytest.mark.parametrize(
    ("function", "wrong", "right"),
    [(ring, "circulaton", "circulation"), (ring, "layuot", "layout"), (ring, "recipes", "recipe"),
     (ring, "skip_mask", "skip_masked"), (ring, "recorded", "record"), (ring, "dir", "direction"),
     (ring, "dlses", "dlse"), (backward, "dlses", "dlse")],
)  # fmt: skip
def test_a_misspelt_keyword_of_the_function_itself_is_named(function, wrong, right):
    error = refused(UnknownKeywordError, lambda: function(**{wrong: 1}))
    assert error.mend == f"write {right!r}"


@pytest.mark.parametrize("name", ["", "workers", "dlse", "日本", "__class__"])
def test_any_other_keyword_is_refused_as_well(name):
    refused(UnknownKeywordError, lambda: attention(**{name: None}))


# --- the ring's own arguments -----------------------------------------------------------------


def table(*rows):
    return {"workers": len(rows), "layout": [list(row) for row in rows]}


BAD_RING = {
    "workers 0": ({"workers": 0}, WorkerCountError),
    "workers -3": ({"workers": -3}, WorkerCountError),
    "workers 3.0": ({"workers": 3.0}, WorkerCountError),
    "workers True": ({"workers": True}, WorkerCountError),
    "workers None": ({"workers": None}, WorkerCountError),
    "workers text": ({"workers": "3"}, WorkerCountError),
    "workers array": ({"workers": np.array([3])}, WorkerCountError),
    "workers of 5000 digits below zero": ({"workers": -LONGER}, WorkerCountError),
    "workers without text": ({"workers": WithoutText()}, WorkerCountError),
    "workers 4 of 6 tokens": ({"workers": 4}, LayoutError),
    "workers 10**400": ({"workers": LONG}, LayoutError),
    "workers of 5000 digits": ({"workers": LONGER}, LayoutError),
    "striped 4 of 6 tokens": ({"workers": 4, "layout": "striped"}, LayoutError),
    "zigzag 2W does not divide": ({"workers": 2, "layout": "zigzag"}, LayoutError),
    "zigzag shorter than 2W": ({"workers": 6, "layout": "zigzag"}, LayoutError),
    "layout misspelt": ({"layout": "contigous"}, UnknownNameError),
    "layout in capitals": ({"layout": "Striped"}, UnknownNameError),
    "layout empty": ({"layout": ""}, UnknownNameError),
    "layout None": ({"layout": None}, DtypeError),
    "layout a number": ({"layout": 3}, LayoutError),
    "layout bytes": ({"layout": b"zigzag"}, LayoutError),
    "layout a tuple of one name": ({"layout": ("striped",)}, LayoutError),
    "layout of keys misspelt": ({"layout": ("striped", "strided")}, UnknownNameError),
    "layout without documents": ({"layout": "zigzag_per_document"}, PackingError),
    "table that misses a token": (table([0, 1], [2, 3], [4, -1]), LayoutError),
    "table that doubles a token": (table([0, 1, 2], [2, 3, 4], [5, 0, 1]), LayoutError),
    "table with a foreign token": (table([0, 1, 6], [2, 3, -1], [4, 5, -1]), LayoutError),
    "table with too few rows": (table([0, 1, 2], [3, 4, 5]) | {"workers": 3}, LayoutError),
    "table with too many rows": (table([0, 1], [2, 3], [4, 5]) | {"workers": 2}, LayoutError),
    "table of floats": (table([0.0, 1], [2, 3], [4, 5]), LayoutError),
    "table of booleans": ({"layout": np.ones((3, 2), bool)}, LayoutError),
    "table of rank 1": ({"layout": np.arange(6)}, LayoutError),
    "table of rank 3": ({"layout": np.arange(6).reshape(3, 2, 1)}, LayoutError),
    "table that is ragged": ({"layout": [[0, 1], [2], [3, 4, 5]]}, DtypeError),
    "table on another device": ({"layout": OnAnotherDevice()}, DtypeError),
    "table of unsigned -1": (
        {"layout": np.array([[0, 1, 2**64 - 1], [2, 3, 2**64 - 1], [4, 5, 2**64 - 1]], "u8")}, LayoutError),
    "one table for two lengths": (table([0, 1], [2, 3], [4, 5]) | {"k": K[:, :, :3], "v": V[:, :, :3]}, LayoutError),
    "layout with a broken table": ({"layout": rs.Layout("mine", None)}, DtypeError),
    "circulation misspelt": ({"circulation": "kw"}, UnknownNameError),
    "circulation in capitals": ({"circulation": "KV"}, UnknownNameError),
    "circulation None": ({"circulation": None}, UnknownNameError),
    "circulation a list": ({"circulation": ["kv"]}, UnknownNameError),
    "circulation an array": ({"circulation": np.array(["kv", "q"])}, UnknownNameError),
    "recipe unknown": ({"recipe": "flaot64"}, UnknownNameError),
    "recipe None": ({"recipe": None}, UnknownNameError),
    "recipe a dtype": ({"recipe": np.float32}, UnknownNameError),
    "recipe a list": ({"recipe": ["bf16"]}, UnknownNameError),
    "recipe without text": ({"recipe": WithoutText()}, UnknownNameError),
    "direction 2": ({"direction": 2}, OptionError),
    "direction 0": ({"direction": 0}, OptionError),
    "direction True": ({"direction": True}, OptionError),
    "direction 1.0": ({"direction": 1.0}, OptionError),
    "direction 1j": ({"direction": 1 + 0j}, OptionError),
    "direction text": ({"direction": "1"}, OptionError),
    "direction array": ({"direction": np.array([1, 1])}, OptionError),
    "direction of 5000 digits": ({"direction": LONGER}, OptionError),
    "direction 2 of gathered keys": ({"direction": 2, "circulation": "gather"}, OptionError),
    "record text": ({"record": "yes"}, OptionError),
    "record array": ({"record": np.array([True, False])}, OptionError),
    "skip_masked 1": ({"skip_masked": 1}, OptionError),
    "skip_masked array": ({"skip_masked": np.array([True, False])}, OptionError),
    "a schedule for other workers": ({"schedule": rs.forward_schedule("kv", 2)}, OptionError),
    "a backward schedule as forward": ({"schedule": rs.backward_schedule("kv", 3)}, OptionError),
    "a forward schedule as backward": ({"schedule_backward": rs.forward_schedule("kv", 3)}, OptionError),
    "a schedule that is a number": ({"schedule": 3}, ScheduleError),
    "a schedule that is an empty list": ({"schedule": []}, ScheduleError),
    "a backward schedule that is text": ({"schedule_backward": "q"}, ScheduleError),
    "observer a number": ({"observer": 3}, OptionError),
    "block_forward text": ({"block_forward": "mine"}, OptionError),
    "block_backward a list": ({"block_backward": []}, OptionError),
}  # fmt: skip

BAD_RING_FAULTS = {
    "workers of 5000 digits below zero": "layout.py check_workers: repr(int) raises ValueError",
    "workers of 5000 digits": "layout.py divided: f'{int}' raises ValueError",
    "workers without text": "layout.py check_workers: repr raises",
    "table of unsigned -1": "layout.py from_table: astype(int64) makes padding of 2**64 - 1",
    "circulation an array": "schedule.py check_circulation: `in` on an array",
    "recipe without text": "recipes.py recipe: repr raises",
    "direction 1.0": "schedule.py check_direction: 1.0 in (1, -1); then TypeError in the validator",
    "direction 1j": "schedule.py check_direction: int(complex) raises TypeError",
    "direction array": "schedule.py check_direction: `in` on an array",
    "direction of 5000 digits": "schedule.py check_direction: repr(int) raises ValueError",
    "direction 2 of gathered keys": "schedule.py gather: direction is never checked",
    "record text": "ring.py: record is not checked",
    "record array": "ring.py observe: truth of an array",
    "skip_masked 1": "ring.py: skip_masked is not checked",
    "skip_masked array": "ring.py: truth of an array",
    "a schedule that is a number": "ring.py check_schedule: AttributeError",
    "a schedule that is an empty list": "ring.py: `schedule or ...` takes it for None",
    "a backward schedule that is text": "ring.py check_schedule: AttributeError",
    "observer a number": "ring.py observe: TypeError",
    "block_forward text": "ring_forward.py forward_step: TypeError",
    "block_backward a list": "ring_backward.py backward_step: TypeError",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", marked(BAD_RING, BAD_RING_FAULTS))
def test_bad_arguments_of_the_ring_are_refused(case):
    changes, error_class = BAD_RING[case]
    refused(error_class, lambda: ring(**changes))


def test_a_misspelt_layout_or_recipe_is_answered_with_the_nearest_name():
    assert "'contiguous'" in refused(UnknownNameError, lambda: ring(layout="contigous")).mend
    assert "'float64'" in refused(UnknownNameError, lambda: ring(recipe="flaot64")).mend
    assert (
        "'bfloat16'"
        in refused(UnknownNameError, lambda: RECIPES["bf16"].replace(p="bflaot16")).mend
    )
    assert "'gather'" in refused(UnknownNameError, lambda: ring(circulation="gathered")).mend


# --- runs, schedules, layouts, recipes, costs -------------------------------------------------

RUN = ring()
RECORDED = ring(record=True)
RING = rs.forward_schedule("kv", 3)
THREE = contiguous(6, 3)
COST = rs.Cost("x", np.ones((1, 2), int), np.ones((1, 2), int), 1)
FLOAT64 = RECIPES["float64"]


def schedule_with(uses=(0, 1, 2), pairs=((0, 1), (1, 2), (2, 0)), **changes) -> rs.Schedule:
    """A KV ring of three workers with some of its data replaced."""
    first = Step(uses, (Transfer("permute", pairs, ("k", "v", "columns")),))
    made = copy.copy(RING)
    for name, value in ({"steps": (first, *RING.steps[1:])} | changes).items():
        object.__setattr__(made, name, value)
    return made


OFFSETS = {"workers": 3, "n_q": 2, "n_k": 2}
RATES = {"pairs_per_second": 1.0, "bytes_per_second": 1.0}

OTHER = {
    "state of an unrecorded run": (lambda: RUN.state(worker=0, step=0), NotRecordedError),
    "replay of an unrecorded run": (lambda: list(RUN.replay()), NotRecordedError),
    "state of a worker that is not": (lambda: RECORDED.state(3, 0), NotRecordedError),
    "state of a step that is not": (lambda: RECORDED.state(0, 3), NotRecordedError),
    "state of a phase that is not": (lambda: RECORDED.state(0, 0, "sideways"), NotRecordedError),
    "state at no known time": (lambda: RECORDED.state(0, 0, when="later"), OptionError),
    "state of an array": (lambda: RECORDED.state(np.array([0, 1]), 0), NotRecordedError),
    "worker W": (lambda: RUN.worker(3), NotRecordedError),
    "worker -1": (lambda: RUN.worker(-1), NotRecordedError),
    "worker text": (lambda: RUN.worker("0"), NotRecordedError),
    "worker True": (lambda: RUN.worker(True), NotRecordedError),
    # schedules
    "schedule circulation": (lambda: rs.forward_schedule("vk", 3), UnknownNameError),
    "schedule direction": (lambda: rs.backward_schedule("q", 3, direction=0), OptionError),
    "schedule of 0 workers": (lambda: rs.forward_schedule("kv", 0), WorkerCountError),
    "gather schedule of -1 workers": (lambda: rs.forward_schedule("gather", -1), WorkerCountError),
    "schedule of 2.5 workers": (lambda: rs.backward_schedule("q", 2.5), WorkerCountError),
    "schedule of True workers": (lambda: rs.backward_schedule("kv", True), WorkerCountError),
    "validate a number": (lambda: rs.validate(3), ScheduleError),
    "validate steps of numbers": (lambda: rs.validate(schedule_with(steps=(1, 2))), ScheduleError),
    "validate no steps": (lambda: rs.validate(schedule_with(steps=())), ScheduleError),
    "validate uses of text": (lambda: rs.validate(schedule_with(uses=(0, 1, "2"))), ScheduleError),
    "validate pairs of text": (lambda: rs.validate(schedule_with(pairs=((0, "1"), (1, 2), (2, 0)))), ScheduleError),
    "validate pairs of three": (lambda: rs.validate(schedule_with(pairs=((0, 1, 2),) * 3)), ScheduleError),
    "validate workers of text": (lambda: rs.validate(schedule_with(workers="3")), ScheduleError),
    "validate skipped numbers": (lambda: rs.validate(schedule_with(skipped=frozenset({3}))), ScheduleError),
    "validate no inputs": (lambda: rs.validate(schedule_with(inputs=())), ScheduleError),
    "cp_offset layout": (lambda: rs.cp_offset("zigzag", 0, 0, **OFFSETS), UnknownNameError),
    "cp_offset of 0 workers": (lambda: rs.cp_offset("striped", 0, 0, workers=0, n_q=2, n_k=2), WorkerCountError),
    "cp_offset of worker W": (lambda: rs.cp_offset("striped", 3, 0, **OFFSETS), OptionError),
    "cp_offset of worker 0.5": (lambda: rs.cp_offset("contiguous", 0.5, 0, **OFFSETS), OptionError),
    "zigzag_offsets of odd blocks": (lambda: zigzag_offsets(0, 0, workers=3, n_q=3, n_k=3), LayoutError),
    # layouts
    "contiguous length -6": (lambda: contiguous(-6, 3), LayoutError),
    "contiguous length 6.0": (lambda: contiguous(6.0, 3), LayoutError),
    "striped length text": (lambda: striped("6", 3), LayoutError),
    "zigzag workers 0": (lambda: zigzag(6, 0), WorkerCountError),
    "zigzag_per_document workers 1.0": (lambda: zigzag_per_document(6, 1.0, [0, 6]), WorkerCountError),
    "zigzag_per_document too long": (lambda: zigzag_per_document(6, 2, [0, 7]), PackingError),
    "table for length -1": (lambda: from_table([[0]], -1), LayoutError),
    "table without rows": (lambda: from_table(np.zeros((0, 2), int), 0), LayoutError),
    "shard a shorter array": (lambda: rs.shard(Q[:, :, :5], THREE), ShapeError),
    "shard a longer array": (lambda: rs.shard(np.ones((1, 1, 9, 2)), THREE), ShapeError),
    "shard along no axis": (lambda: rs.shard(Q, THREE, axis=4), ShapeError),
    "unshard nothing": (lambda: rs.unshard([], THREE), ShapeError),
    "unshard too few": (lambda: rs.unshard(rs.shard(Q, THREE)[:2], THREE), ShapeError),
    "unshard too many": (lambda: rs.unshard([*rs.shard(Q, THREE), Q], THREE), ShapeError),
    "unshard short parts": (lambda: rs.unshard([Q[:, :, :1]] * 3, THREE), ShapeError),
    "unshard long parts": (lambda: rs.unshard([Q] * 3, THREE), ShapeError),
    "unshard parts of different heads": (
        lambda: rs.unshard([Q[:, :1, :2], Q[:, :, :2], Q[:, :, :2]], THREE), ShapeError),
    "unpermute nothing": (lambda: rs.unpermute([]), ShapeError),
    "unpermute parts of different lengths": (
        lambda: rs.unpermute([Q[:, :, :2], Q[:, :, :3]]), ShapeError),
    "LSE tiles of rank 2": (lambda: lse_to_tiles(np.zeros((1, 128))), ShapeError),
    "LSE tiles of 100 rows": (lambda: lse_from_tiles(np.zeros((1, 1, 100, 2))), ShapeError),
    "LSE from tiles of rank 3": (lambda: lse_from_tiles(np.zeros((1, 128, 1))), ShapeError),
    # recipes
    "recipe with an unknown point": (lambda: FLOAT64.replace(pp="float32"), UnknownNameError),
    "recipe with an unknown format": (lambda: FLOAT64.replace(p="fp32"), UnknownNameError),
    "recipe with a dtype as format": (lambda: FLOAT64.replace(p=np.float32), UnknownNameError),
    "recipe with a list as format": (lambda: FLOAT64.replace(p=["float32"]), UnknownNameError),
    "recipe with 16-bit products": (lambda: FLOAT64.replace(products="bfloat16"), OptionError),
    "recipe with an unknown order": (lambda: FLOAT64.replace(merge_order="tree"), UnknownNameError),
    "recipe with tiles of 0": (lambda: FLOAT64.replace(tile_k=0), OptionError),
    "recipe with tiles of 1.5": (lambda: FLOAT64.replace(tile_q=1.5), OptionError),
    "recipe with tiles of True": (lambda: FLOAT64.replace(tile_q=True), OptionError),
    # costs
    "rate 0": (lambda: rs.timeline(COST, **RATES | {"pairs_per_second": 0}), OptionError),
    "rate NaN": (lambda: rs.timeline(COST, **RATES | {"bytes_per_second": np.nan}), OptionError),
    "rate text": (lambda: rs.timeline(COST, **RATES | {"bytes_per_second": "fast"}), OptionError),
    "rate 10**400": (lambda: rs.timeline(COST, **RATES | {"pairs_per_second": LONG}), OptionError),
    # partial results
    "merge nothing": (lambda: rs.merge_partials([]), ShapeError),
    "merge a number": (lambda: rs.merge_partials(3), ShapeError),
    "merge parts that are no pairs": (lambda: rs.merge_partials([(DY,)]), ShapeError),
    "merge parts of different shapes": (
        lambda: rs.merge_partials([(DY, DY[..., 0]), (DY[:1], DY[:1, ..., 0])]), ShapeError),
    "merge o with lse of another shape": (lambda: rs.merge_partials([(DY, DY)]), ShapeError),
    "merge NaN": (lambda: rs.merge_partials([(DY, with_value(DY[..., 0], np.nan))]), NonFiniteError),
    "merge +inf": (lambda: rs.merge_partials([(DY, with_value(DY[..., 0], np.inf))]), NonFiniteError),
    "block backward with lse NaN": (
        lambda: rs.attention_block_backward(
            DY, Q, K, V, lse=with_value(DY[..., 0], np.nan), delta=DY[..., 0]), NonFiniteError),
    "block backward with delta of rank 4": (
        lambda: rs.attention_block_backward(DY, Q, K, V, lse=DY[..., 0], delta=DY), ShapeError),
    "block backward with lse of another length": (
        lambda: rs.attention_block_backward(DY, Q, K, V, lse=DY[:, :, 1:, 0], delta=DY[..., 0]), ShapeError),
}  # fmt: skip

OTHER_FAULTS = {
    "state of an array": "run.py moment: `==` on an array",
    "worker True": "run.py worker: bool is an int",
    "schedule of 0 workers": "schedule.py forward_schedule does not check workers",
    "gather schedule of -1 workers": "schedule.py forward_schedule does not check workers",
    "schedule of 2.5 workers": "schedule.py backward_schedule does not check workers",
    "schedule of True workers": "schedule.py backward_schedule does not check workers",
    "validate a number": "validator.py malformed: AttributeError",
    "validate steps of numbers": "validator.py malformed: AttributeError",
    "validate uses of text": "validator.py malformed: `<=` of text",
    "validate pairs of text": "validator.py move: sorted of text and numbers",
    "validate pairs of three": "validator.py move: too many values to unpack",
    "validate workers of text": "validator.py malformed: `<` of text",
    "validate skipped numbers": "validator.py malformed: a number is no pair",
    "cp_offset of 0 workers": "schedule.py cp_offset: ZeroDivisionError",
    "cp_offset of worker W": "schedule.py cp_offset does not check a and b",
    "cp_offset of worker 0.5": "schedule.py cp_offset does not check a and b",
    "zigzag_offsets of odd blocks": "schedule.py zigzag_offsets: n // 2 loses a token",
    "contiguous length -6": "layout.py divided does not check the length",
    "contiguous length 6.0": "layout.py contiguous: reshape raises TypeError",
    "striped length text": "layout.py divided: TypeError",
    "table without rows": "layout.py from_table: no worker at all is taken",
    "shard a shorter array": "problem.py take: IndexError",
    "shard a longer array": "layout.py shard drops tokens in silence",
    "shard along no axis": "problem.py take: IndexError",
    "unshard nothing": "layout.py unshard: IndexError",
    "unshard too few": "layout.py unshard leaves zeros in silence",
    "unshard too many": "layout.py unshard: IndexError",
    "unshard short parts": "layout.py unshard: IndexError",
    "unshard long parts": "layout.py unshard drops tokens in silence",
    "unshard parts of different heads": "layout.py unshard broadcasts in silence",
    "unpermute nothing": "layout.py unpermute: IndexError",
    "unpermute parts of different lengths": "layout.py unpermute drops tokens in silence",
    "LSE tiles of rank 2": "layout.py lse_to_tiles: ValueError",
    "LSE from tiles of rank 3": "layout.py lse_from_tiles: ValueError",
    "recipe with a list as format": "formats.py format_of: unhashable",
    "recipe with tiles of True": "recipes.py: bool is an int",
    "rate text": "cost.py timeline: `>` of text",
    "rate 10**400": "cost.py timeline: OverflowError",
    "merge a number": "attention.py merge_partials: TypeError",
    "merge parts that are no pairs": "attention.py merge_partials: ValueError",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", marked(OTHER, OTHER_FAULTS))
def test_bad_arguments_of_everything_else_are_refused(case):
    call, error_class = OTHER[case]
    refused(error_class, call)


# --- garbage ----------------------------------------------------------------------------------

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


def only_our_errors(call) -> None:
    """The call is refused in our words, or gives results without NaN."""
    try:
        result = call()
    except RingspecError as error:
        assert error.expected and error.got and error.mend
        return
    for name in ("o", "lse", "dq", "dk", "dv", "dsinks", "dbias"):
        value = getattr(result, name, None)
        assert value is None or not np.isnan(value).any(), name


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
ODD_FAULTS = {
    "workers": "see test_the_number_of_workers_may_be_a_numpy_integer",
    "circulation": "see 'circulation an array'",
    "direction": "see 'direction array', 'direction 1.0'",
    "skip_masked": "see 'skip_masked array'",
    "record": "see 'record array'",
    "schedule": "see 'a schedule that is a number'",
    "observer": "see 'observer a number'",
}


@QUIET
@pytest.mark.parametrize("name", marked(RING_ARGUMENTS, ODD_FAULTS))
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


@pytest.mark.xfail(strict=True, reason="see BAD_FAULTS: number, repr of long integers, q_offset")
@QUIET
@given(arguments(GOOD, HOSTILE | st.tuples(HOSTILE, HOSTILE)))
def test_hostile_numbers_and_objects_are_refused_or_give_numbers(changes):
    for function in FUNCTIONS:
        only_our_errors(lambda function=function: function(**changes))


# --- good input in unusual form ---------------------------------------------------------------

FULL = {
    "causal": True,
    "window": (4, 1),
    "scale": 0.5,
    "softcap": 2.0,
    "bias": RANDOM.normal(size=(B, H, S, S)),
    "mask": RANDOM.random((B, H, S, S)) < 0.8,
    "segments_q": RANDOM.integers(-1, 2, (B, S)),
    "segments_k": RANDOM.integers(-1, 2, (B, S)),
    "bound_min": RANDOM.integers(0, 3, (B, S)),
    "bound_max": RANDOM.integers(3, 9, (B, S)),
    "sinks": RANDOM.normal(size=(H, 2)),
    "dropout_p": 0.25,
    "dropout_seed": 5,
    "keep": RANDOM.random((B, H, S, S)) < 0.7,
    "positions_q": RANDOM.integers(0, 9, (B, S)),
    "positions_k": RANDOM.integers(0, 9, (B, S)),
}
DLSE = RANDOM.normal(size=(B, H, S))
TABLE = np.array([[5, 0, -1], [-1, 3, 1], [2, -1, 4]])


def everything(inputs: dict, options: dict, dlse, layout) -> list[np.ndarray]:
    """All results of all three functions."""
    q, k, v, dy = (inputs[name] for name in ("q", "k", "v", "dy"))
    forward = rs.attention(q, k, v, **options)
    gradients = rs.attention_backward(dy, q, k, v, dlse=dlse, **options)
    run = rs.ring(q, k, v, dy, dlse=dlse, workers=3, layout=layout, circulation="q", **options)
    names = ("dq", "dk", "dv", "dsinks", "dbias")
    return [
        forward.o, forward.lse, *(getattr(gradients, name) for name in names),
        run.o, run.lse, *(getattr(run, name) for name in names),
    ]  # fmt: skip


WANT = everything(INPUTS, FULL, DLSE, TABLE)


def form(change) -> list[np.ndarray]:
    """All results with every array changed to another form of the same values."""

    def changed(x):
        return change(x) if isinstance(x, np.ndarray) else x

    inputs = {name: changed(x) for name, x in INPUTS.items()}
    options = {name: changed(x) for name, x in FULL.items()}
    return everything(inputs, options, changed(DLSE), changed(TABLE))


def strided(x: np.ndarray) -> np.ndarray:
    """The same values as every second element of a larger array, in falling memory order."""
    wide = np.repeat(x[..., ::-1], 2, axis=-1)
    return wide[..., ::-2]


def read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def swapped(x: np.ndarray) -> np.ndarray:
    return x.astype(x.dtype.newbyteorder("S"))


FORMS = {
    "Fortran order": np.asfortranarray,
    "strided views": strided,
    "broadcast views": lambda x: np.broadcast_to(x[None], (2, *x.shape))[1],
    "read-only": read_only,
    "foreign byte order": swapped,
    "nested lists": lambda x: x.tolist(),
    "subclass": lambda x: x.view(type("Mine", (np.ndarray,), {})),
}


FORM_FAULTS = {"subclass": "checks.py as_array keeps subclasses, and results become such"}


@pytest.mark.parametrize("what", marked(FORMS, FORM_FAULTS))
def test_the_form_of_an_array_does_not_change_a_bit_of_any_result(what):
    for got, want in zip(form(FORMS[what]), WANT, strict=True):
        assert type(got) is np.ndarray and got.dtype == np.float64
        assert got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", ">u2", "u4", ">i8", "u8"])
def test_the_integer_dtype_does_not_change_a_bit_of_any_result(dtype):
    """Values from 0 on only, as unsigned dtypes need; padding as segment 2 against 3."""
    options = FULL | {"segments_q": FULL["segments_q"] % 3, "segments_k": FULL["segments_k"] % 3}
    want = everything(INPUTS, options, DLSE, "striped")
    changed = {
        name: x.astype(dtype) if isinstance(x, np.ndarray) and x.dtype.kind == "i" else x
        for name, x in options.items()
    }
    for got, expected in zip(everything(INPUTS, changed, DLSE, "striped"), want, strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16,
                                   ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])  # fmt: skip
def test_narrow_inputs_are_taken_at_their_values(dtype):
    narrow = {name: x.astype(dtype) for name, x in INPUTS.items()}
    same = {name: x.astype(np.float64) for name, x in narrow.items()}
    want = everything(same, FULL, DLSE, TABLE)
    for got, expected in zip(everything(narrow, FULL, DLSE, TABLE), want, strict=True):
        assert got.dtype == np.float64 and got.tobytes() == expected.tobytes()


NUMBERS = {"window": 2, "q_offset": 1, "dropout_seed": 3, "scale": 0.5, "softcap": 2.0,
           "dropout_p": 0.25, "causal": True}  # fmt: skip


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("real", [np.float16, np.float32, np.float64])
def test_numpy_scalars_are_taken_as_numbers(integer, real):
    want = ring(direction=-1, **NUMBERS)
    kinds = {int: integer, float: real, bool: np.bool_}
    got = ring(**{name: kinds[type(x)](x) for name, x in NUMBERS.items()}, direction=-1)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert (getattr(got, name) == getattr(want, name)).all()
    window = (integer(2), None)
    assert (attention(window=window).o == attention(window=(2, None)).o).all()


@pytest.mark.parametrize(
    "integer",
    [np.int8, np.int16, np.int64]
    + [pytest.param(unsigned, marks=pytest.mark.xfail(
        strict=True, reason="ring.py hands workers on as it came; worker - step is below 0"))
       for unsigned in (np.uint8, np.uint32, np.uint64)],
)  # fmt: skip
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_the_number_of_workers_may_be_a_numpy_integer(integer, circulation, layout):
    want = ring(circulation=circulation, layout=layout, causal=True)
    got = ring(workers=integer(W), circulation=circulation, layout=layout, causal=True)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert (getattr(got, name) == getattr(want, name)).all()


@pytest.mark.xfail(strict=True, reason="layout.py zigzag: 2 * workers wraps in a narrow integer")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("workers", [np.int8(64), np.uint8(128)])
def test_narrow_numpy_integers_do_not_wrap_round(workers):
    length = 4 * int(workers)
    assert (zigzag(length, workers).table == zigzag(length, int(workers)).table).all()


def test_inputs_are_never_changed():
    """Bytes of every array before and after all functions, with recording and every circulation."""
    arrays = {**INPUTS, **{n: x for n, x in FULL.items() if isinstance(x, np.ndarray)},
              "dlse": DLSE, "table": TABLE}  # fmt: skip
    before = {name: x.tobytes() for name, x in arrays.items()}
    everything(INPUTS, FULL, DLSE, TABLE)
    for circulation in ("kv", "q", "gather"):
        for recipe in ("float64", "bf16_partials", "nki"):
            ring(
                **FULL, dlse=DLSE, layout=TABLE, circulation=circulation, recipe=recipe, record=True
            )
    assert {name: x.tobytes() for name, x in arrays.items()} == before


def test_results_share_no_memory_with_inputs():
    inputs = {name: x.copy() for name, x in INPUTS.items()}
    options = {name: x.copy() if isinstance(x, np.ndarray) else x for name, x in FULL.items()}
    for result in everything(inputs, options, DLSE, TABLE):
        for x in [*inputs.values(), *options.values()]:
            assert not isinstance(x, np.ndarray) or not np.shares_memory(result, x)


@pytest.mark.xfail(strict=True, reason="problem.py take_rows keeps a broadcast row of the caller's")
@pytest.mark.parametrize("name", ["mask", "keep"])
def test_a_recorded_run_does_not_change_with_the_callers_arrays(name):
    pairs = RANDOM.random((1, S)) < 0.7  # the same for all rows
    run = ring(**{name: pairs}, record=True)
    before = [moment.after.o for moment in run.replay() if moment.phase == "forward"]
    pairs[:] = ~pairs
    after = [moment.after.o for moment in run.replay() if moment.phase == "forward"]
    assert all((a == b).all() for a, b in zip(after, before, strict=True))


# --- sequences without tokens -----------------------------------------------------------------

EMPTY_LAYOUTS = ("contiguous", "striped", "zigzag")


@pytest.mark.rule("FWD-8", "BWD-10")
@pytest.mark.parametrize("sinks", [None, np.zeros((H, 2))], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", EMPTY_LAYOUTS)
def test_no_key_gives_empty_rows_or_rows_of_sinks(layout, circulation, sinks):
    options = {"k": K[:, :, :0], "v": V[:, :, :0], "bias": np.zeros((S, 0)), "sinks": sinks,
               "mask": np.ones((S, 0), bool), "causal": True, "softcap": 1.0}  # fmt: skip
    want = -np.inf if sinks is None else np.log(2.0)
    run = ring(**options, layout=layout, circulation=circulation, dlse=DLSE)
    for result in (attention(**options), run):
        assert (result.o == 0).all() and result.o.shape == (B, H, S, DV)
        assert (
            (abs(result.lse - want) <= 1e-15).all()
            if sinks is not None
            else (result.lse == want).all()
        )
    for result in (backward(**options, dlse=DLSE), run):
        assert (result.dq == 0).all() and result.dk.shape == (B, HKV, 0, D)
        assert result.dv.shape == (B, HKV, 0, DV) and result.dbias.shape == (S, 0)
        if sinks is not None:  # both sinks of a head share dlse
            half = DLSE.sum(axis=(0, 2)) / 2
            assert (abs(result.dsinks - half[:, None]) <= 1e-13).all()


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", EMPTY_LAYOUTS)
def test_no_query_gives_no_row_and_zero_gradients(layout, circulation):
    options = {"q": Q[:, :, :0], "dy": DY[:, :, :0], "bias": np.zeros((H, 0, S)),
               "mask": np.ones((0, S), bool), "causal": True, "sinks": np.zeros(H)}  # fmt: skip
    run = ring(**options, layout=layout, circulation=circulation)
    for result in (attention(**options), run):
        assert result.o.shape == (B, H, 0, DV) and result.lse.shape == (B, H, 0)
    for result in (backward(**options), run):
        assert result.dq.shape == (B, H, 0, D) and result.dk.shape == K.shape
        assert (result.dk == 0).all() and (result.dv == 0).all() and (result.dsinks == 0).all()


@pytest.mark.xfail(
    strict=True, reason="problem.py columns_of: np.take of padding from no key at all"
)
def test_padding_slots_alone_hold_no_key():
    layout = ("contiguous", [[-1], [-1], [-1]])
    run = ring(k=K[:, :, :0], v=V[:, :, :0], bias=np.zeros((S, 0)), layout=layout)
    assert (run.o == 0).all() and (run.lse == -np.inf).all()


NO_TOKEN = {
    "positions_q": ("q", {"positions_q": np.zeros(0, int)}),
    "positions_k": ("k", {"positions_k": np.zeros((B, 0), int)}),
    "segments": ("k", {"segments_q": np.zeros(S, int), "segments_k": np.zeros(0, int)}),
    "bounds": ("q", {"bound_min": np.zeros(0, int), "bound_max": np.zeros((1, 0), int)}),
}


@pytest.mark.xfail(strict=True, reason="checks.py int_rows: reshape(-1, 0) raises ValueError")
@pytest.mark.parametrize("case", NO_TOKEN)
def test_options_of_no_token_go_with_no_token(case):
    side, options = NO_TOKEN[case]
    if side == "q":
        options = options | {"q": Q[:, :, :0], "dy": DY[:, :, :0]}
    else:
        options = options | {"k": K[:, :, :0], "v": V[:, :, :0]}
    for function in FUNCTIONS:
        only_our_errors(lambda function=function: function(**options))
    assert attention(**options).o.shape[2] == (0 if side == "q" else S)


def test_documents_of_no_token_are_allowed():
    options = {"k": K[:, :, :0], "v": V[:, :, :0], "cu_seqlens": [0, S], "cu_seqlens_k": [0, 0, 0]}
    assert (attention(**options).lse == -np.inf).all()
    run = ring(**options, workers=1, layout="zigzag_per_document")
    assert (run.o == 0).all() and (run.lse == -np.inf).all()
