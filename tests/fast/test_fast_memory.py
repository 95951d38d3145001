"""Memory that is used again: never while anybody holds it, and never more than is said."""

import gc
import threading

import numpy as np
import pytest

from ringspec.fast import memory
from ringspec.fast.memory import LEAST_BYTES, Free, empty

N = LEAST_BYTES // 8


@pytest.fixture(autouse=True)
def nothing_free(monkeypatch):
    monkeypatch.setattr(Free, "by_size", {})


def test_arrays_that_live_at_once_share_no_memory():
    arrays = [empty((N,), "float64") for _ in range(5)]
    for number, x in enumerate(arrays):
        x[:] = number
    assert all((x == number).all() for number, x in enumerate(arrays))


@pytest.mark.parametrize(
    "held",
    [lambda x: x[10:20], lambda x: x.reshape(2, -1).T, memoryview, lambda x: x.view("int64")],
)
def test_a_view_keeps_the_memory_from_being_used_again(held):
    x = empty((N,), "float64")
    where = x.ctypes.data
    view = held(x)
    del x
    gc.collect()
    other = empty((N,), "float64")
    assert other.ctypes.data != where
    del view, other
    both = empty((N,), "float64"), empty((N,), "float32"), empty((N,), "int64")
    assert where in [x.ctypes.data for x in both]


def test_what_is_kept_free_has_a_limit_and_old_sizes_make_room(monkeypatch):
    monkeypatch.setattr(memory, "MAX_FREE_BYTES", 4 * LEAST_BYTES)
    several = [empty((N,), "float64") for _ in range(6)]
    del several
    assert sum(map(len, Free.by_size.values())) == 4
    larger = [empty((3 * N,), "float64") for _ in range(2)]
    del larger
    assert {size: len(kept) for size, kept in Free.by_size.items()} == {3 * LEAST_BYTES: 1}
    huge = empty((9 * N,), "float64")
    del huge
    assert sum(size * len(kept) for size, kept in Free.by_size.items()) <= 4 * LEAST_BYTES


def test_small_arrays_are_not_kept():
    x = empty((N - 1,), "float64")
    assert x.flags.owndata
    del x
    assert Free.by_size == {}


def test_threads_that_make_and_drop_arrays_never_get_the_same_one():
    wrong = []

    def work(number):
        for _ in range(300):
            x, y = empty((N,), "float64"), empty((N,), "float64")
            x[::512], y[::512] = number, -number
            if not ((x[::512] == number).all() and (y[::512] == -number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_of_an_earlier_call_stay_as_they_are():
    from ringspec import fast

    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 1024, 64))
    first = fast.attention(q, k, v)
    kept = first.o.copy()
    for _ in range(3):
        fast.attention(2 * q, k, -v)
    assert first.o.tobytes() == kept.tobytes()


def test_patterns_of_tiles_that_are_kept_are_few_however_many_tiles_are_mixed(monkeypatch):
    import ringspec as rs
    from ringspec import fast
    from ringspec.fast import dense, job

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
