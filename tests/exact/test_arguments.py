"""What exact refuses, and how partial sums and blocks of rows add up."""

import numpy as np
import pytest

from ringspec import exact
from ringspec.errors import NonFiniteError, OptionError, RingspecError, ShapeError
from ringspec.exact import Problem, evaluate

GENERATOR = np.random.default_rng(5)
Q = GENERATOR.standard_normal((2, 4, 6, 3))
K = GENERATOR.standard_normal((2, 2, 5, 3))
V = GENERATOR.standard_normal((2, 2, 5, 2))
DY = GENERATOR.standard_normal((2, 4, 6, 2))

BAD = {
    "q with three axes": ({"q": Q[0]}, ShapeError),
    "float32": ({"q": Q.astype(np.float32)}, ShapeError),
    "another head size": ({"k": K[..., :2]}, ShapeError),
    "heads that do not divide": ({"q": Q[:, :3]}, ShapeError),
    "NaN": ({"v": V * np.nan}, NonFiniteError),
    "an infinite scale": ({"scale": np.inf}, NonFiniteError),
    "softcap 0": ({"softcap": 0.0}, OptionError),
    "dropout of everything": ({"dropout_p": 1.0}, OptionError),
    "a mask of numbers": ({"visible": np.ones((1, 1, 6, 5))}, ShapeError),
    "a mask of another length": ({"visible": np.ones((1, 1, 5, 5), bool)}, ShapeError),
    "a bias of +inf": ({"bias": np.full((1, 1, 1, 5), np.inf)}, NonFiniteError),
    "a bias with NaN": ({"bias": np.full((1, 1, 1, 5), np.nan)}, NonFiniteError),
    "sinks of other heads": ({"sinks": np.zeros((2, 1))}, ShapeError),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_has_an_error_of_its_own(name):
    changes, error = BAD[name]
    with pytest.raises(error):
        Problem(**({"q": Q, "k": K, "v": V, "scale": 0.5} | changes))


@pytest.mark.parametrize("formats", [(), "float64", ("float8_e4m3fn",), ("double",)])
def test_formats_that_cannot_be_had_are_refused(formats):
    with pytest.raises(RingspecError):
        exact.forward(Problem(Q, K, V, 0.5), formats)


def test_seeds_and_groups_of_another_shape_are_refused():
    problem = Problem(Q, K, V, 0.5)
    with pytest.raises(ShapeError):
        exact.backward(problem, DY[:, :, :5])
    with pytest.raises(ShapeError):
        exact.backward(problem, DY, np.zeros((2, 4)))
    with pytest.raises(ShapeError):
        exact.backward(problem, DY, row_groups=np.zeros(5, dtype=np.int64), groups=1)
    with pytest.raises(ShapeError):
        exact.backward(problem, DY, row_groups=np.full(6, 2), groups=2)


def test_the_length_of_the_blocks_cannot_change_a_bit(monkeypatch):
    bias = GENERATOR.standard_normal((1, 4, 1, 5))
    sinks = GENERATOR.standard_normal((4, 2))
    problem = Problem(Q, K, V, 0.5, bias=bias, sinks=sinks, softcap=3.0, dropout_p=0.1)
    whole = exact.backward(problem, DY, formats=("float64", "bfloat16"), scales=True)
    monkeypatch.setattr(evaluate, "BLOCK", 2)
    parts = exact.backward(problem, DY, formats=("float64", "bfloat16"), scales=True)
    for tensor, formats in whole.tensors.items():
        for name, want in formats.items():
            assert parts.tensors[tensor][name].tobytes() == want.tobytes()
    for tensor, want in whole.scales.items():
        assert parts.scales[tensor].tobytes() == want.tobytes()


def test_partial_sums_are_those_of_a_problem_with_these_rows_alone():
    bias = GENERATOR.standard_normal((1, 4, 1, 5))
    sinks = GENERATOR.standard_normal((4, 2))
    workers = np.array([0, 1, 1, -1, 0, 2])
    problem = Problem(Q, K, V, 0.5, bias=bias, sinks=sinks)
    whole = exact.backward(problem, DY, scales=True, row_groups=workers, groups=3)
    for worker in range(3):
        rows = workers == worker
        own = Problem(Q[:, :, rows], K, V, 0.5, bias=bias, sinks=sinks)
        alone = exact.backward(own, DY[:, :, rows], scales=True)
        for tensor in ("dsinks", "dbias"):
            got = whole.tensors[tensor + "_parts"]["float64"][worker]
            assert got.tobytes() == alone.tensors[tensor]["float64"].tobytes()
            assert (
                whole.scales[tensor + "_parts"][worker].tobytes() == alone.scales[tensor].tobytes()
            )


def test_block_backward_with_the_rows_own_lse_is_near_the_whole_backward():
    problem = Problem(Q, K, V, 0.5, softcap=2.0, sinks=np.ones((4, 1)))
    whole = exact.backward(problem, DY)
    delta = (DY * whole.tensors["o"]["float64"]).sum(axis=3)
    block = exact.block_backward(problem, DY, whole.tensors["lse"]["float64"], delta, scales=True)
    for tensor in ("dq", "dk", "dv", "dsinks"):
        got, want = block.tensors[tensor]["float64"], whole.tensors[tensor]["float64"]
        scale = block.scales[tensor].reshape(
            *block.scales[tensor].shape, *[1] * (got.ndim - block.scales[tensor].ndim)
        )
        assert (abs(got - want) <= 1e-15 * scale).all()


def test_merging_the_parts_is_near_the_whole_row():
    whole = exact.forward(Problem(Q, K, V, 0.5))
    parts = [
        exact.forward(Problem(Q, K[:, :, s], V[:, :, s], 0.5)) for s in (slice(0, 2), slice(2, 5))
    ]
    o, lse = (np.stack([part.tensors[name]["float64"] for part in parts]) for name in ("o", "lse"))
    merged = exact.merge(o, lse, scales=True)
    for tensor in ("o", "lse"):
        got, want = merged.tensors[tensor]["float64"], whole.tensors[tensor]["float64"]
        scale = merged.scales[tensor]
        assert (abs(got - want) <= 1e-15 * (scale[..., None] if got.ndim == 4 else scale)).all()
