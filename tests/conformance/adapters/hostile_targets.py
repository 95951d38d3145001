"""Targets that try to stop or deceive the runner from their own process; right answers otherwise."""

import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from conformance import faulty_targets

SLEEP = 600
HERE = Path.cwd()
LARGE = 1 << 26  # bytes


def write_everywhere(data):
    """Into every descriptor that is neither a standard stream nor a plain file."""
    for handle in range(3, 128):
        try:
            if not os.path.isfile(f"/proc/self/fd/{handle}"):
                os.write(handle, data)
        except OSError:
            continue


def writes_part(result, call):
    write_everywhere(b"\x00\x00\x10\x00{")  # of JSON, or of a message of multiprocessing
    time.sleep(SLEEP)


def writes_garbage(result, call):
    write_everywhere(b"\x00\x00\x00\x05hello\n")


class Touches:
    """Unpickling it makes a file."""

    def __reduce__(self):
        return Path.touch, (HERE / "unpickled",)


def writes_pickle(result, call):
    data = pickle.dumps(Touches())
    write_everywhere(struct.pack("!i", len(data)) + data + b"\n")


def forges_answer(result, call):
    write_everywhere(
        b'{"kind":"stop","id":"%s","outcome":"pass","message":""}\n' % call.id.encode()
    )


def forks(result, call):
    child = os.fork()
    if child == 0:
        time.sleep(SLEEP)
        os._exit(0)
    (HERE / "child").write_text(str(child))


def forks_and_hangs(result, call):
    forks(result, call)
    time.sleep(SLEEP)


def starts_a_program_and_crashes(result, call):
    command = [sys.executable, "-c", f"import time; time.sleep({SLEEP})"]
    (HERE / "child").write_text(str(subprocess.Popen(command).pid))
    os.abort()


def prints_much(result, call):
    line = "x" * (1 << 20)
    for _ in range(LARGE >> 20):
        print(line)
        os.write(1, line.encode())
        os.write(2, line.encode())
    kept = max(os.fstat(handle).st_size for handle in (1, 2))
    assert kept < LARGE // 8, f"{kept} bytes were kept on the disk"
    print("the end")


def prints_for_ever(result, call):
    while True:
        print("again and again")
        os.write(2, b"and again\n" * 1000)


def widens(result, call):
    result.o = [np.asarray(x, np.complex64) for x in result.o]


def swaps_bytes(result, call):
    result.dq = [x.astype(">f4") for x in result.dq]


def is_huge(result, call):
    result.dk = [np.zeros((1 << 23,), np.float32) for _ in result.dk]


def one_hole(result, call):
    result.lse = [*result.lse[:-1], None]


def ragged(result, call):
    result.dv = [*result.dv[:-1], result.dv[-1][..., :-1]]


def made(behind):
    return faulty_targets.Faulty(behind.__name__, behind=behind)


part, garbage, pickled, forged = map(
    made, (writes_part, writes_garbage, writes_pickle, forges_answer)
)
forking, hanging, crashing = map(made, (forks, forks_and_hangs, starts_a_program_and_crashes))
much, for_ever = map(made, (prints_much, prints_for_ever))
complex64, big_endian, huge, hole, uneven = map(
    made, (widens, swaps_bytes, is_huge, one_hole, ragged)
)
