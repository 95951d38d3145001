"""Seeded faults that give right numbers in a sequential run: order of the cores, addresses, overlaps, and Python.

Each is refused by name, on the line at fault.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nki_impl.sim import errors

from .reference import Case, draw
from .running import run_backward, run_forward
from .test_faults import LONG, Fault, load, one

PAIR = Case(workers=3, heads=2)

FORWARD = {
    "a barrier on the keys that leaves out the values": Fault(
        one("ring_forward.py", "wait_for_both_cores(ring, (keys, values))", "wait_for_both_cores(ring, (keys,))"),
        errors.RaceError,
        lnc=2,
    ),
    "a barrier on the values that leaves out the keys": Fault(
        one("ring_forward.py", "wait_for_both_cores(ring, (keys, values))", "wait_for_both_cores(ring, (values,))"),
        errors.RaceError,
        lnc=2,
    ),
    "a barrier on an unrelated tensor": Fault(
        one(
            "ring_forward.py",
            "wait_for_both_cores(ring, (keys, values))",
            "wait_for_both_cores(ring, (nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm, name='flag'),))",
        ),
        errors.RaceError,
        lnc=2,
    ),
    "a barrier on the buffer that is sent, not on the one that is filled": Fault(
        one("ring.py", "wait_for_both_cores(ring, (held(pair, step + 1),))", "wait_for_both_cores(ring, (held(pair, step),))"),
        errors.RaceError,
        lnc=2,
    ),
    "the transposed P over the product that accumulates": Fault(
        one(
            "block_forward.py",
            "product = nl.ndarray((ROWS, width), dtype=nl.float32, buffer=nl.psum)",
            "product = nl.ndarray((ROWS, width), dtype=nl.float32, buffer=nl.psum, address=(0, 2048))",
        )
        + one(
            "tiles.py",
            "turned = nl.ndarray((ROWS, chunks, ROWS), dtype=tile.dtype, buffer=nl.psum)",
            "turned = nl.ndarray((ROWS, chunks, ROWS), dtype=tile.dtype, buffer=nl.psum, address=(0, 2048))",
        ),
        errors.OverlapError,
        LONG,
    ),
    "both weights of a merge at one address": Fault(
        one(
            "merge.py",
            "c = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf)",
            "c = nl.ndarray((ROWS, 1), dtype=nl.float32, buffer=nl.sbuf, address=(0, 4096))",
        ),
        errors.OverlapError,
    ),
    "a copy to the next column of the same tile": Fault(
        one("tiles.py", "src=head[:, start:stop])", "src=head[:, start:stop])\n    nisa.tensor_copy(dst=tile[:, 1 : stop - start], src=tile[:, 0 : stop - start - 1])"),
        errors.OverlapError,
    ),
    "a DMA to the next row of the same buffer": Fault(
        one("ring_forward.py", "nisa.dma_copy(dst=values[i, j], src=v[i, j])", "nisa.dma_copy(dst=values[i, j], src=v[i, j])\n        nisa.dma_copy(dst=values[i, j, 1:s], src=values[i, j, 0 : s - 1])"),
        errors.OverlapError,
    ),
    "a maximum that NumPy takes": Fault(
        one(
            "block_forward.py",
            "nisa.tensor_reduce(dst=n, op=nl.maximum, data=tops, axis=1, negate=True, keepdims=True)",
            "n.array[...] = -tops.array.max(axis=1, keepdims=True)",
        ),
        errors.HiddenStateError,
    ),
    "an exponential that NumPy takes": Fault(
        one(
            "merge.py",
            "nisa.activation(dst=c, op=nl.exp, data=old, bias=new, scale=-1.0)",
            "import numpy as np\n    c = np.exp(new)",
        ),
        errors.DynamicValueError,
    ),
    "an owner read from its register": Fault(
        one("ring.py", "offset=0, scalar_offset=owner_of(ring, step), indirect_dim=0", "offset=owner_of(ring, step).state"),
        errors.HiddenStateError,
    ),
    "a tile that Python copies": Fault(
        one("merge.py", "nisa.tensor_copy(dst=held.o, src=block.o)", "import copy\n    held.o = copy.deepcopy(block.o)"),
        errors.DynamicValueError,
    ),
}  # fmt: skip

BACKWARD = {
    "a barrier on queries and dy that leaves out the row data": Fault(
        one("ring_backward.py", "wait_for_both_cores(backward.ring, (q, dy, planes))", "wait_for_both_cores(backward.ring, (q, dy))"),
        errors.RaceError,
        PAIR,
        lnc=2,
    ),
    "a barrier on the sum of dq that leaves out its block": Fault(
        one("ring_backward.py", "wait_for_both_cores(ring, (block,))", "wait_for_both_cores(ring, (target,))"),
        errors.RaceError,
        PAIR,
        lnc=2,
    ),
    "dk and dv at one address": Fault(
        one("block_backward.py", "dk = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum)", "dk = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum, address=(0, 0))")
        + one("block_backward.py", "dv = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum)", "dv = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum, address=(0, 0))"),
        errors.OverlapError,
    ),
    "a branch on the value of a sum": Fault(
        one("ring_backward.py", "    if dq is not None:\n", "    if dk[0:1, 0:1] != dv[0:1, 0:1]:\n"),
        errors.DynamicValueError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARD)
def test_a_fault_of_the_forward_is_refused_by_name_and_line(name: str, tmp_path: Path) -> None:
    fault = FORWARD[name]
    assert not isinstance(fault.shows, tuple)
    with pytest.raises(fault.shows) as caught:
        run_forward(fault.case, draw(fault.case), load(tmp_path, fault), {"lnc": fault.lnc})
    assert tmp_path.name in str(caught.value)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_fault_of_the_backward_is_refused_by_name_and_line(name: str, tmp_path: Path) -> None:
    fault = BACKWARD[name]
    assert not isinstance(fault.shows, tuple)
    module, given = load(tmp_path, fault), draw(fault.case)
    ahead = run_forward(fault.case, given)
    with pytest.raises(fault.shows) as caught:
        run_backward(fault.case, given, ahead.o, ahead.lse, module, {"lnc": fault.lnc})
    assert tmp_path.name in str(caught.value)
