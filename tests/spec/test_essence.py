"""The page that is read first computes what everybody uses: bit for bit, and by mpmath and PyTorch's formula."""

import inspect
from pathlib import Path

import numpy as np
import pytest

import ringspec as rs
from ringspec.problem.options import default_scale
from ringspec.spec import essence

# 1/sqrt(6) is no power of two, and 24 tokens divide into 2 W chunks for each W.
SHAPE = (2, 3, 24, 6)


def tensors(width=5):
    rng = np.random.default_rng(19)
    q, k = rng.normal(size=SHAPE), rng.normal(size=SHAPE)
    return q, k, rng.normal(size=(*SHAPE[:3], width)), rng.normal(size=(*SHAPE[:3], width))


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("circulation", ["kv", "q"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_the_ring_is_the_essence_bit_for_bit(layout, circulation, workers):
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=workers, layout=layout, circulation=circulation, causal=True)
    o, lse, dq, dk, dv = essence.ring(q, k, v, dy, workers, layout, circulation)
    for name, x in (("o", o), ("lse", lse[..., 0]), ("dq", dq), ("dk", dk), ("dv", dv)):
        y = getattr(run, name) if name in ("o", "lse") else getattr(run.gradients, name)
        assert (x + 0.0).tobytes() == np.ascontiguousarray(y).tobytes(), name


def test_the_essence_agrees_with_the_definition():
    q, k, v, dy = tensors()
    o, lse = essence.attention(q, k, v)
    want = rs.attention(q, k, v, causal=True)
    np.testing.assert_allclose(o, want.o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse[..., 0], want.lse, rtol=1e-12, atol=1e-14)
    gradients = rs.attention_backward(q, k, v, dy, causal=True)
    for x, name in zip(essence.attention_backward(q, k, v, dy), ("dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(x, getattr(gradients, name), rtol=1e-11, atol=1e-13)


def test_each_worker_holds_what_the_loop_says():
    """Worker 1 of 3 after the forward of a Q ring's backward: its own dq, dk and dv, of all blocks."""
    q, k, v, dy = tensors()
    run = rs.ring(q, k, v, dy, workers=3, layout="zigzag", circulation="q", causal=True)
    token = essence.shards("zigzag", SHAPE[2], 3)
    parts = [[x.take(own, axis=-2) for own in token] for x in (q, k, v, dy)]
    o, lse = essence.ring_forward(*parts[:3], token)
    dq, dk, dv = essence.ring_backward_q(*parts, o, lse, token)
    for r in range(3):
        worker = run.worker(r)
        for mine, theirs in ((o, worker.o), (dq, worker.dq), (dk, worker.dk), (dv, worker.dv)):
            assert (mine[r] + 0.0).tobytes() == np.ascontiguousarray(theirs).tobytes()


def test_the_essence_fits_on_a_page():
    lines = open(essence.__file__, encoding="utf-8").read().splitlines()
    assert len(lines) <= 200


def test_the_readme_shows_the_forward_pass_as_it_is():
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert inspect.getsource(essence.ring_forward) in readme


def test_the_scale_of_the_essence_is_the_default_scale_at_usual_head_dimensions():
    assert [D for D in range(1, 577) if D**-0.5 != default_scale(D)] == []
