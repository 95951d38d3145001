"""One call for each class of ringspec.errors that raises it; the documentation runs them and shows what they print.

A function has the name of its class in small letters. Its docstring says how to repair such a call in general; its
body is what the page shows. The body of ``ringspec_error`` raises a subclass, because callers never meet the base alone.
"""

import numpy as np

import ringspec as rs

x = np.linspace(-1.0, 1.0, 64).reshape(1, 2, 8, 4)  # [B, H, S, D]


def ringspec_error():
    """Catch the base class to handle every error of ringspec, and print the error: its last part is the remedy."""
    rs.ring(x, x, x, workers=2, recipe="bf61")


def shape_error():
    """Compare the shapes of all arrays with `[B, H, S, D]`: the message names the axis that differs."""
    rs.attention(x, x[..., :3], x)


def dtype_error():
    """Convert the array before the call. ringspec never converts silently, because a conversion may round."""
    rs.attention(x.astype(np.int64), x, x)


def non_finite_error():
    """Find the step that produced the NaN or infinity. To hide a pair, pass a mask; never put infinity into q, k or v."""
    rs.attention(x, np.where(x > 0.9, np.inf, x), x)


def option_error():
    """Read `error.code`, which names the option, and correct its value."""
    rs.attention(x, x, x, window=-1)


def unknown_keyword_error():
    """Correct the spelling; the message proposes the nearest keyword."""
    rs.attention(x, x, x, casual=True)


def layout_error():
    """Pad the sequence, or choose another number of workers or another layout."""
    rs.ring(x, x, x, workers=3, layout="zigzag")


def schedule_error():
    """Read `error.problems`: it lists every defect with its step. Here the last step was removed."""
    import dataclasses

    whole = rs.forward_schedule("kv", 3)
    rs.validate(dataclasses.replace(whole, steps=whole.steps[:-1]))


def not_recorded_error():
    """Run the ring again with `record=True`, and with `dy` if you need states of the backward pass."""
    run = rs.ring(x, x, x, workers=2)
    run.state(worker=1, step=0)


def refused_error():
    """Change the call as the message says. The real system also refuses it, or computes something else."""
    from ringspec.interfaces import nkilib

    q, k, v = np.ones((3, 2, 1, 2, 100, 4))  # 100 tokens on each of two ranks
    nkilib.ring_attention_spmd_fwd(q, k, v, tp_q=True, tp_k=True)


def missing_package_error():
    """Install the package that the message names. The rest of ringspec works without it."""
    import sys
    from unittest import mock

    from ringspec.comm import ring_mpi

    with mock.patch.dict(sys.modules, {"mpi4py.MPI": None}):  # as if mpi4py were not installed
        ring_mpi(x, x, x)


def communication_error():
    """Look at the rank that the message names; its own log has the traceback."""
    from ringspec.comm.threads import ring_in_threads

    def observer(moment):
        if moment.worker == 2:
            raise KeyError("no such tensor")

    ring_in_threads(x, x, x, workers=4, observer=observer)


def lost_worker_error():
    """Find out why that rank does not answer. If it is only busy with a long computation, raise the time limit."""
    import time

    from ringspec.comm.threads import ring_in_threads

    def observer(moment):
        time.sleep(1.0 if moment.worker == 1 else 0.0)

    ring_in_threads(x, x, x, workers=2, observer=observer, timeout=0.2)


def undecided_error():
    """Change the inputs slightly, or ask for another format. Here o is 1 + 2**-8 + exp(-100000), next to a midpoint of bfloat16."""
    from ringspec import exact

    q, k = np.array([[[[1.0]]]]), np.array([[[[0.0], [-1e5]]]])
    v = np.array([[[[1 + 2.0**-8], [2.0]]]])
    exact.forward(exact.Problem(q, k, v, 1.0), ("bfloat16",))


def file_format_error():
    """Write the file again with the program that made it, or pass the correct path."""
    from pathlib import Path

    Path("run.safetensors").write_bytes(b"not tensors")
    rs.read_tensors("run.safetensors")


def vector_error():
    """List the ids with `ringspec vectors list`. For a damaged set, install ringspec again, or generate the set again."""
    from ringspec import vectors

    vectors.open_set("core").case("ring/zigzag-causal-w5")
