"""Interrupts at chosen lines, forks with a deadline, and what must hold after either."""

import gc
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

import ringspec as rs
from ringspec import fast
from ringspec.fast.forks import GATE
from ringspec.fast.team import IDLE

FAST = str(Path(fast.__file__).parent)
# Seconds in which a child or a thread must end: what would wait for ever fails.
END = 120.0
TILES = fast.TileSizes(rows=8, keys=16, granule=8, chunk=16)


class Lines:
    """Counts the lines of ringspec/fast that the calling thread begins, and raises at the ``last``."""

    def __init__(self, last=None):
        self.count, self.last = 0, last

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.called)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def called(self, frame, event, argument):
        return self.line if frame.f_code.co_filename.startswith(FAST) else None

    def line(self, frame, event, argument):
        if event == "line":
            self.count += 1
            if self.count == self.last:
                raise KeyboardInterrupt
        return self.line


def lines_of(call):
    with Lines() as lines:
        call()
    return lines.count


def interrupted(call, line):
    """Whether an interrupt at the line'th line came out of the call; nothing holds its traceback."""
    try:
        with Lines(line):
            call()
    except KeyboardInterrupt:
        return True
    return False


def nothing_is_left():
    """No thread but those of idle crews, nobody computes, and BLAS has its threads back."""
    gc.collect()
    end = time.monotonic() + END
    while others := crew_threads() - idle_threads():
        assert time.monotonic() < end, f"left behind: {others}"
        time.sleep(0.001)
    assert not GATE.computing and not GATE.forking


def crew_threads():
    return {x for x in threading.enumerate() if x.name.startswith("ringspec-fast")}


def idle_threads():
    return {x for crews in IDLE.values() for crew in crews for x in crew.executor._threads}


def blas_threads():
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def inputs(seed=0, n=24):
    return np.random.default_rng(seed).normal(size=(4, 1, 2, n, 4))


def ring_bits(x, pieces, workers=3):
    run = rs.ring(*x, workers=workers, causal=True, layout="contiguous", **pieces)
    return b"".join(part.tobytes() for part in (run.o, run.lse, run.dq, run.dk, run.dv))


def dense_bits(x, threads=2):
    q, k, v, dy = x
    options = {"causal": True, "sizes": TILES, "threads": threads}
    share = fast.attention_backward(q, k, v, dy, **options)
    o = fast.attention(q, k, v, **options).o
    return b"".join(part.tobytes() for part in (o, share.dq, share.dk, share.dv))


def forked(compute, want):
    """Fork; the child computes and must end with status 0 within the deadline."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if compute() == want else 3
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def ends_well(child):
    end = time.monotonic() + END
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("a child hangs")
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(found[1]) == 0
