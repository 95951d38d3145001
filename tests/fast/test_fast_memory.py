"""Memory of the fast path: results stay as they are, and what is kept of tiles is bounded."""

import numpy as np

import ringspec as rs
from ringspec import fast
from ringspec.fast import dense, job


def test_results_of_an_earlier_call_stay_as_they_are():
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 1024, 64))
    first = fast.attention(q, k, v)
    kept = first.o.copy()
    for _ in range(3):
        fast.attention(2 * q, k, -v)
    assert first.o.tobytes() == kept.tobytes()


def test_patterns_of_tiles_that_are_kept_are_few_however_many_tiles_are_mixed(monkeypatch):
    made = []
    monkeypatch.setattr(job, "MAX_PATTERNS", 5)
    prepare = dense.make_job
    monkeypatch.setattr(dense, "make_job", lambda *a, **k: made.append(prepare(*a, **k)) or made[0])
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 3, 96, 4))
    ids = np.random.default_rng(1).integers(0, 3, (1, 96))
    options = {"segments_q": ids, "causal": True}
    got = fast.attention(q, k, v, sizes=fast.TileSizes(8, 8, 8, 8), threads=3, **options)
    assert abs(got.o - rs.attention(q, k, v, **options).o).max() < 1e-14
    assert 0 < len(made[0].patterns) <= 5 + 3
