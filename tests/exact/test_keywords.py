"""``ringspec.exact`` with the keywords of ``ringspec.attention``: every keyword, and the ones that are refused."""

import inspect

import numpy as np
import pytest

import ringspec as rs
from ringspec import exact
from ringspec.errors import ShapeError, UnknownKeywordError
from ringspec.formats import store
from ringspec.problem.options import DEFAULTS

B, H, HKV, SQ, SK, D, DV = 2, 4, 2, 6, 6, 3, 2
RANDOM = np.random.default_rng(11)
Q, K = RANDOM.normal(size=(B, H, SQ, D)), RANDOM.normal(size=(B, HKV, SK, D))
V, DY = RANDOM.normal(size=(B, HKV, SK, DV)), RANDOM.normal(size=(B, H, SQ, DV))
DLSE = RANDOM.normal(size=(B, H, SQ))
BIAS = RANDOM.normal(size=(H, SQ, SK))
BIAS[0, 2, 1] = -np.inf
# Together they use every keyword.
CASES = {
    "none": {},
    "causal": {"causal": True, "q_offset": -1},
    "window": {"window": (2, 1), "scale": 0.7, "softcap": 1.5},
    "documents": {"cu_seqlens": [0, 2, 6], "cu_seqlens_k": [0, 3, 6]},
    "segments": {"segments_q": [0, 0, 1, 1, -1, 2], "segments_k": [0, 1, 1, 2, 2, -1]},
    "bounds": {"bound_min": [0, 0, 1, 2, 3, 3], "bound_max": [1, 2, 3, 4, 3, 6]},
    "positions": {"causal": True, "positions_q": [5, 0, 3, 2, 1, 4], "positions_k": [0, 2, 4, 1, 3, 5]},
    "mask": {"mask": RANDOM.random((1, 1, SQ, SK)) < 0.7, "bias": BIAS},
    "sinks": {"sinks": RANDOM.normal(size=H), "causal": True},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 5},
    "keep": {"dropout_p": 0.5, "keep": RANDOM.random((B, H, SQ, SK)) < 0.5},
}  # fmt: skip


def values(truth: exact.Truth) -> dict[str, np.ndarray]:
    return {name: by_format["float64"] for name, by_format in truth.tensors.items()}


def close(got: np.ndarray, want: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        same = (got == want) | (np.abs(got - want) <= 1e-13 * (1 + np.abs(want)))
    return got.shape == want.shape and bool(same.all())


def test_the_cases_use_every_keyword():
    assert {name for case in CASES.values() for name in case} == set(DEFAULTS)


@pytest.mark.parametrize("name", CASES)
def test_each_keyword_means_what_it_means_for_dense_attention(name):
    options = CASES[name]
    forward = rs.attention(Q, K, V, **options)
    got = values(exact.attention(Q, K, V, **options))
    assert close(got["o"], forward.o) and close(got["lse"], forward.lse)
    want = vars(rs.attention_backward(dy=DY, q=Q, k=K, v=V, dlse=DLSE, **options))
    backward = values(exact.attention_backward(Q, K, V, DY, dlse=DLSE, **options))
    given = {key: x for key, x in want.items() if x is not None}
    assert set(backward) == {*given, "o", "lse"}
    assert [key for key, x in given.items() if not close(backward[key], x)] == []
    delta = (DY * forward.o).sum(axis=3) - DLSE
    at = {"lse": forward.lse, "delta": delta, **options}
    share = values(exact.attention_block_backward(Q, K, V, DY, **at))
    assert [key for key, x in given.items() if not close(share[key], x)] == []


def test_formats_and_scales_are_those_of_forward():
    q, k, v = (store(x, "bfloat16") for x in (Q, K, V))
    truth = exact.attention(q, k, v, formats=("bfloat16",), statistics=("float32",), scales=True)
    assert list(truth.tensors["o"]) == ["bfloat16"] and list(truth.tensors["lse"]) == ["float32"]
    assert truth.scales["o"].shape == (B, H, SQ)


@pytest.mark.parametrize(
    "function", [exact.attention, exact.attention_backward, exact.attention_block_backward]
)
def test_the_keywords_are_those_of_attention_and_help_lists_them(function):
    own = set(inspect.signature(function).parameters)
    assert set(inspect.signature(rs.attention).parameters) <= own


@pytest.mark.parametrize("name", ["recipe", "workers", "layout", "dtype", "causa1"])
def test_a_keyword_of_something_else_is_refused_and_the_error_says_where_it_belongs(name):
    with pytest.raises(UnknownKeywordError) as caught:
        exact.attention(Q, K, V, **{name: 1})
    assert ("write 'causal'" if name == "causa1" else "leave it out") in str(caught.value)


def test_shapes_are_checked_as_in_attention():
    with pytest.raises(ShapeError):
        exact.attention_backward(Q, K, V, DY[:, :, :-1])
