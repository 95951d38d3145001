"""Kernels with a seeded fault: each is caught, and by the check that should.

A fault is a line that reads differently. What breaks a rule of the machine is refused by the simulator
with the class of that rule; what is legal but wrong gives wrong numbers, in the tensors that it
touches and in no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nki_impl import kernels
from nki_impl.sim import errors
from nki_impl.sim.machine.launch import run_ranks

from .altered import Change, altered
from .reference import Case, draw
from .running import (
    both,
    errors_of_backward,
    errors_of_forward,
    run_backward,
    run_forward,
    wrong,
)

CONTIGUOUS = Case(workers=3, causal=True)
STRIPED = Case(workers=3, causal=True, striped=True)
PACKED = Case(workers=3, causal=True, striped=True, packed=True)
LONG = Case(workers=2, length=640, causal=True)
RAGGED = Case(workers=2, length=150)
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Fault:
    """``changes`` to the source, and what shows it: an error class, or the tensors that go wrong."""

    changes: tuple[Change, ...]
    shows: type[errors.SimulatorError] | tuple[str, ...]
    case: Case = CONTIGUOUS
    lnc: int = 1


def one(file: str, old: str, new: str) -> tuple[Change, ...]:
    return ((file, old, new),)


FORWARD = {
    "no barrier between filling the buffers and sending them": Fault(
        one("ring_forward.py", "wait_for_both_cores(ring, (keys, values))", "pass"),
        errors.RaceError,
        lnc=2,
    ),
    "no barrier before a buffer is filled anew": Fault(
        one("ring.py", "wait_for_both_cores(ring, (held(pair, step + 1),))", "pass"),
        errors.RaceError,
        lnc=2,
    ),
    "a barrier that one core leaves out": Fault(
        one("ring.py", "    if ring.cores > 1:\n        for", "    if ring.core == 1:\n        for"),
        errors.DeadlockError,
        lnc=2,
    ),
    "a permute that one core leaves out": Fault(
        one("ring_forward.py", "            pass_on(ring, values, step)", "            ring.core or pass_on(ring, values, step)"),
        errors.CollectiveError,
        Case(workers=2),
        lnc=2,
    ),
    "a permute into the buffer that it sends": Fault(
        one("ring.py", "dsts_by_channel=[[held(pair, step + 1)]]", "dsts_by_channel=[[held(pair, step)]]"),
        errors.CollectiveError,
    ),
    "travelling buffers that the other core cannot see": Fault(
        one("ring.py", "        return nl.shared_hbm", "        return nl.private_hbm"),
        errors.PlacementError,
        lnc=2,
    ),
    "keys of the next step": Fault(
        one("ring_forward.py", "held(keys, step)[i", "held(keys, step + 1)[i"), ("o", "lse")
    ),
    "values of the next step": Fault(
        one("ring_forward.py", "held(values, step)[i", "held(values, step + 1)[i"), ("o",)
    ),
    "a chunk that is not transposed": Fault(
        one("tiles.py", "        nisa.nc_transpose(dst=turned[:, c, :]", "        if c > 0:\n            nisa.nc_transpose(dst=turned[:, c, :]"),
        errors.UninitializedError,
    ),
    "a query tile whose first block is dropped": Fault(
        one("ring_forward.py", "take(running, part)", "pass"), errors.UninitializedError
    ),
    "a product wider than a bank": Fault(
        one("tiles.py", "KEYS = 512", "KEYS = 1024"), errors.MatmulError, LONG
    ),
    "a PSUM tile across two banks": Fault(
        one(
            "block_forward.py",
            "product = nl.ndarray((ROWS, stop - start), dtype=nl.float32, buffer=nl.psum)",
            "product = nl.ndarray((ROWS, stop - start), dtype=nl.float32, buffer=nl.psum, address=(0, 1024))",
        ),
        errors.ShapeError,
        LONG,
    ),
    "a partial tile whose padding is not written": Fault(
        one("block_forward.py", "zero_padding(p, length)", "pass"), errors.UninitializedError, RAGGED
    ),
    "a partial tile that is left out": Fault(
        one("ring_forward.py", "range(tile_count(rows.end - rows.first))", "range((rows.end - rows.first) // 128)"),
        errors.UninitializedError,
        RAGGED,
    ),
    "bounds of another head": Fault(
        one("bounds.py", "entry = i * heads + head if bounds.per_head else i", "entry = 0"),
        ("o", "lse"),
        Case(workers=2, batch=2, causal=True, striped=True, packed=True),
    ),
    "P in float32 beside bfloat16 values": Fault(
        one("block_forward.py", "dtype=v.dtype", "dtype=nl.float32"), errors.MatmulError
    ),
    "o in memory that is no output": Fault(
        one("ring_forward.py", "dtype=q.dtype, buffer=nl.shared_hbm", "dtype=q.dtype, buffer=nl.private_hbm"),
        errors.OutputError,
    ),
    "the diagonal hidden": Fault(one("masks.py", "offset=1", "offset=0"), ("o", "lse")),
    "one key too many": Fault(one("masks.py", "comp_op1=nl.less,", "comp_op1=nl.less_equal,"), ("o", "lse")),
    "an inclusive bound_max": Fault(
        (
            ("masks.py", "offset=1", "offset=0"),
            ("masks.py", "comp_op1=nl.less,", "comp_op1=nl.less_equal,"),
        ),
        ("o", "lse"),
        PACKED,
    ),
    "an exclusive bound_min": Fault(
        one("masks.py", "comp_op0=nl.greater_equal", "comp_op0=nl.greater"), ("o", "lse"), PACKED
    ),
    "a striped offset of the wrong sign": Fault(
        one("masks.py", "factor = -1.0", "factor = 1.0"), ("o", "lse"), STRIPED
    ),
    "ring positions the wrong way round": Fault(
        one("ring_forward.py", "row_limits(mask, forward.o.shape[2], mine, owner)", "row_limits(mask, forward.o.shape[2], owner, mine)"),
        ("o", "lse"),
    ),
    "the mask of the step before": Fault(
        one("ring_forward.py", "position_at(ring, table, step)", "position_at(ring, table, step - 1)"),
        ("o", "lse"),
    ),
    "a block that replaces the others": Fault(
        one("ring_forward.py", "merge(running, part)", "take(running, part)"), ("o", "lse")
    ),
    "a sum that is not rescaled": Fault(
        one("merge.py", "add_weighted(held.l, c_held,", "add_weighted(held.l, c_block,"), ("o", "lse")
    ),
    "o of the block that is not rescaled": Fault(
        one("merge.py", "add_weighted(held.o, c_held, block.o, c_block)", "add_weighted(held.o, c_held, block.o, c_held)"),
        ("o",),
    ),
}  # fmt: skip

BACKWARD = {
    "dq one hop short": Fault(
        one("ring_backward.py", "held(home, ring.workers - 1)", "held(home, ring.workers - 2)"), ("dq",)
    ),
    "dq that stays behind at the last step": Fault(
        one("ring_backward.py", "        if ring.workers > 1:\n", "        if step + 1 < ring.workers:\n"),
        ("dq",),
    ),
    "dq that stays behind on a ring of two": Fault(
        one("ring_backward.py", "        if ring.workers > 1:\n", "        if step + 1 < ring.workers:\n"),
        errors.UninitializedError,
        Case(workers=2),
    ),
    "dq that starts anew at every step": Fault(
        one("ring_backward.py", "    if step == 0:\n", "    if step >= 0:\n"), ("dq",)
    ),
    "no barrier before dq is sent": Fault(
        one("ring_backward.py", "wait_for_both_cores(ring, (block,))", "pass"),
        errors.RaceError,
        Case(workers=3, heads=2),
        lnc=2,
    ),
    "no barrier between filling the buffers and sending them": Fault(
        one("ring_backward.py", "wait_for_both_cores(backward.ring, (q, dy, planes))", "pass"),
        errors.RaceError,
        Case(workers=3, heads=2),
        lnc=2,
    ),
    "an odd item that one core does not repeat": Fault(
        one("ring_backward.py", "one_item(backward, (0, 0), None, spare[0], spare[1])", "pass"),
        errors.CollectiveError,
        Case(workers=2, heads=3),
        lnc=2,
    ),
    "dq and its block in one buffer": Fault(
        one("ring_backward.py", "block, target = held(travellers.dq_block, step), held(travellers.dq, step)", "block, target = held(travellers.dq, step), held(travellers.dq, step)"),
        errors.CollectiveError,
    ),
    "dy of the next step": Fault(
        one("ring_backward.py", "held(travellers.dy, step)[core]", "held(travellers.dy, step + 1)[core]"),
        GRADIENTS,
    ),
    "row data that do not travel": Fault(
        one("ring_backward.py", "            pass_on(ring, travellers.planes, step)\n", ""),
        errors.UninitializedError,
    ),
    "one dv for every step": Fault(
        one("ring_backward.py", "dv_sum = load_sum(dv, start, stop, narrow, is_begun)", "dv_sum = load_sum(dv, start, stop, narrow, False)"),
        ("dv",),
    ),
    "dk and dv in one bank": Fault(
        one(
            "block_backward.py",
            "    dv = nl.ndarray((width, stop - start), dtype=nl.float32, buffer=nl.psum)",
            "    dv = dk",
        ),
        ("dk", "dv"),
        LONG,
    ),
    "accumulation onto a bank that nothing has started": Fault(
        one("block_backward.py", "accumulate=c > 0", "accumulate=True"), errors.MatmulError
    ),
    "a diagonal tile left out": Fault(
        one("block_backward.py", "(keys.first + start - queries.first) // ROWS", "(keys.first + start - queries.first) // ROWS + 1"),
        GRADIENTS,
        Case(workers=1, length=256, causal=True),
    ),
    "dy_o_sum of the wrong sign": Fault(
        one("block_backward.py", "op0=nl.subtract", "op0=nl.add"), ("dq", "dk")
    ),
    "ring positions the wrong way round": Fault(
        one("ring_backward.py", "row_limits(mask, backward.q.shape[3], owner, mine)", "row_limits(mask, backward.q.shape[3], mine, owner)"),
        GRADIENTS,
    ),
    "bounds of the wrong rows": Fault(
        one("bounds.py", "owner = owner_of(ring, step)", "owner = owner_of(ring, 0)"), GRADIENTS, PACKED
    ),
    "bounds that are sent before both cores have written them": Fault(
        one("bounds.py", "wait_for_both_cores(ring, (sent,))", "pass"),
        errors.RaceError,
        Case(workers=2, batch=2, causal=True, striped=True, packed=True),
        lnc=2,
    ),
    "a partial tile whose padding is not written": Fault(
        one("block_backward.py", "zero_padding(ds, stop - start)", "pass"), errors.UninitializedError, RAGGED
    ),
    "lse read in its padding": Fault(
        one("row_data.py", "load_numbers(lse, length)", "load_numbers(lse, 256)"), ("dk", "dv"), RAGGED
    ),
    "dq of the first key tile alone": Fault(
        one("block_backward.py", "moving=turned[:, c, :], accumulate=c > 0", "moving=turned[:, c, :], accumulate=False"),
        ("dq",),
        LONG,
    ),
}  # fmt: skip


def load(tmp_path: Path, fault: Fault) -> ModuleType:
    return altered(tmp_path, *fault.changes)


@pytest.mark.parametrize("name", FORWARD)
def test_a_fault_of_the_forward_is_caught(name: str, tmp_path: Path) -> None:
    fault = FORWARD[name]
    module, given, launch = load(tmp_path, fault), draw(fault.case), {"lnc": fault.lnc}
    if not isinstance(fault.shows, tuple):
        with pytest.raises(fault.shows) as caught:
            run_forward(fault.case, given, module, launch)
        if fault.shows is not errors.OutputError:  # what is returned has no line of its own
            assert tmp_path.name in str(caught.value)
        return
    run = run_forward(fault.case, given, module, launch)
    assert set(wrong(errors_of_forward(fault.case, run))) == set(fault.shows)


@pytest.mark.parametrize("name", BACKWARD)
def test_a_fault_of_the_backward_is_caught(name: str, tmp_path: Path) -> None:
    fault = BACKWARD[name]
    module, given, launch = load(tmp_path, fault), draw(fault.case), {"lnc": fault.lnc}
    ahead = run_forward(fault.case, given)
    if not isinstance(fault.shows, tuple):
        with pytest.raises(fault.shows):
            run_backward(fault.case, given, ahead.o, ahead.lse, module, launch)
        return
    run = run_backward(fault.case, given, ahead.o, ahead.lse, module, launch)
    assert set(wrong(errors_of_backward(fault.case, ahead, run))) == set(fault.shows)


def test_a_fault_of_the_unpermute_is_caught(tmp_path: Path) -> None:
    arguments = [{"x": np.full((1, 4, 2), rank, np.float32), "num_workers": 2} for rank in range(2)]
    unordered = altered(tmp_path, ("unpermute.py", "wait_for_both_cores(ring, (sent,))", "pass"))
    with pytest.raises(errors.RaceError):
        run_ranks(unordered.ring_attention_unpermute, arguments, lnc=2)
    (tmp_path / "b").mkdir()
    swapped = altered(
        tmp_path / "b", ("unpermute.py", "rows[:, :, source, :]", "rows[:, :, 1 - source, :]")
    )
    first_rows = [
        run_ranks(module.ring_attention_unpermute, arguments).results[0][0, :, 0].tolist()
        for module in (kernels, swapped)
    ]
    assert first_rows == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_an_unaltered_copy_passes_on_every_case(tmp_path: Path) -> None:
    module = altered(tmp_path)
    faults = [*FORWARD.values(), *BACKWARD.values()]
    for case, lnc in {(fault.case, fault.lnc) for fault in faults}:
        ahead, back = both(case, module, {"lnc": lnc})
        assert not wrong(errors_of_forward(case, ahead))
        assert not wrong(errors_of_backward(case, ahead, back))
