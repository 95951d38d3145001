"""The rings of ringspec.schemes are the rings of the specification, bit for bit."""

import numpy as np
import pytest

import ringspec as rs
from ringspec.schemes.api import context_parallel

RESULTS = ("o", "lse", "dq", "dk", "dv")


def tensors(length: int, seed: int = 0) -> list[np.ndarray]:
    """Return q, k, v and dy: 2 batches, 4 query heads, 2 key heads, D = 5, Dv = 3."""
    generator = np.random.default_rng(seed)
    shapes = [(2, 4, length, 5), (2, 2, length, 5), (2, 2, length, 3), (2, 4, length, 3)]
    return [generator.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("circulation", ["kv", "q"])
@pytest.mark.parametrize("direction", [1, -1])
def test_the_scheme_ring_equals_the_ring_bit_for_bit(workers, layout, circulation, direction):
    keywords = {
        "layout": layout,
        "circulation": circulation,
        "direction": direction,
        "causal": True,
    }
    q, k, v, dy = tensors(24)
    expected = rs.ring(q, k, v, dy, workers=workers, **keywords)
    run = context_parallel(q, k, v, dy, mesh={"ring": workers}, scheme="ring", **keywords)
    for name in RESULTS:
        np.testing.assert_array_equal(getattr(run, name), getattr(expected, name), strict=True)


ACCUMULATORS = rs.RECIPES["bf16"].replace(name="mine", carried_dq="bfloat16")


@pytest.mark.parametrize("recipe", ["bf16_partials", "fp16", "nki", "nki_low", ACCUMULATORS])
def test_the_scheme_ring_rounds_where_the_ring_rounds(recipe):
    q, k, v, dy = tensors(12)
    keywords = {"recipe": recipe, "causal": True}
    expected = rs.ring(q, k, v, dy, workers=3, **keywords)
    run = context_parallel(q, k, v, dy, mesh={"ring": 3}, scheme="ring", **keywords)
    for name in RESULTS:
        np.testing.assert_array_equal(getattr(run, name), getattr(expected, name), strict=True)


def test_the_scheme_ring_keeps_padding_dropout_sinks_and_windows_bit_for_bit():
    q, k, v, dy = tensors(7)
    table = [[0, 6, -1], [5, 1, 2], [-1, 3, 4]]
    sinks = np.random.default_rng(1).standard_normal((4, 2))
    keywords = {
        "layout": table,
        "window": (3, 1),
        "dropout_p": 0.3,
        "dropout_seed": 5,
        "sinks": sinks,
    }
    expected = rs.ring(q, k, v, dy, workers=3, **keywords)
    run = context_parallel(q, k, v, dy, mesh={"ring": 3}, scheme="ring", **keywords)
    for name in (*RESULTS, "dsinks"):
        np.testing.assert_array_equal(getattr(run, name), getattr(expected, name), strict=True)


@pytest.mark.parametrize("shape", [(1, 4, 12, 12), (2, 1, 12, 1), (1, 4, 1, 12)], ids=str)
def test_the_scheme_ring_returns_the_bias_gradient_of_the_ring(shape):
    q, k, v, dy = tensors(12)
    keywords = {"bias": np.random.default_rng(2).standard_normal(shape), "layout": "zigzag"}
    expected = rs.ring(q, k, v, dy, workers=3, **keywords)
    run = context_parallel(q, k, v, dy, mesh={"ring": 3}, scheme="ring", **keywords)
    if shape[1] == 1:  # heads of one key head are added before those of the next
        np.testing.assert_allclose(run.dbias, expected.dbias, rtol=0, atol=1e-14)
    else:
        np.testing.assert_array_equal(run.dbias, expected.dbias, strict=True)
