"""Bad arguments of runs, schedules, layouts, recipes and costs."""

import copy

import numpy as np
import pytest
from bad_input.calls import (
    DY,
    LONG,
    K,
    Q,
    V,
    refused,
    ring,
    with_value,
)

import ringspec as rs
from ringspec.errors import (
    LayoutError,
    NonFiniteError,
    NotRecordedError,
    OptionError,
    ScheduleError,
    ShapeError,
)
from ringspec.recipes import RECIPES
from ringspec.rings.layouts import from_table, lse_from_tiles, lse_to_tiles, make_layout
from ringspec.rings.schedules import zigzag_offsets
from ringspec.spec.schedule import Step, Transfer

RUN = ring()
RECORDED = ring(record=True)
RING = rs.forward_schedule("kv", 3)
THREE = make_layout("contiguous", 6, 3)
COST = rs.Cost("x", np.ones((1, 2), int), np.ones((1, 2), int), 1)
FLOAT64 = RECIPES["float64"]


def schedule_with(uses=(0, 1, 2), pairs=((0, 1), (1, 2), (2, 0)), **changes) -> rs.Schedule:
    """A KV ring of three workers with some of its data replaced."""
    first = Step(uses, (Transfer("permute", pairs, ("k", "v", "columns")),))
    made = copy.copy(RING)
    for name, value in ({"steps": (first, *RING.steps[1:])} | changes).items():
        object.__setattr__(made, name, value)
    return made


OFFSETS = {"workers": 3, "n_q": 2, "n_k": 2}
RATES = {"pairs_per_second": 1.0, "bytes_per_second": 1.0}

OTHER = {
    "state of an unrecorded run": (lambda: RUN.state(worker=0, step=0), NotRecordedError),
    "replay of an unrecorded run": (lambda: list(RUN.replay()), NotRecordedError),
    "state of a worker that is not": (lambda: RECORDED.state(3, 0), NotRecordedError),
    "state of a step that is not": (lambda: RECORDED.state(0, 3), NotRecordedError),
    "state of a phase that is not": (lambda: RECORDED.state(0, 0, "sideways"), NotRecordedError),
    "state at no known time": (lambda: RECORDED.state(0, 0, when="later"), OptionError),
    "state of an array": (lambda: RECORDED.state(np.array([0, 1]), 0), NotRecordedError),
    "worker W": (lambda: RUN.worker(3), NotRecordedError),
    "worker -1": (lambda: RUN.worker(-1), NotRecordedError),
    "worker text": (lambda: RUN.worker("0"), NotRecordedError),
    "worker True": (lambda: RUN.worker(True), NotRecordedError),
    # schedules
    "schedule circulation": (lambda: rs.forward_schedule("vk", 3), (OptionError, "unknown-name")),
    "schedule direction": (lambda: rs.backward_schedule("q", 3, direction=0), OptionError),
    "schedule of 0 workers": (lambda: rs.forward_schedule("kv", 0), (LayoutError, "worker-count")),
    "gather schedule of -1 workers": (lambda: rs.forward_schedule("gather", -1), (LayoutError, "worker-count")),
    "schedule of 2.5 workers": (lambda: rs.backward_schedule("q", 2.5), (LayoutError, "worker-count")),
    "schedule of True workers": (lambda: rs.backward_schedule("kv", True), (LayoutError, "worker-count")),
    "validate a number": (lambda: rs.validate(3), ScheduleError),
    "validate steps of numbers": (lambda: rs.validate(schedule_with(steps=(1, 2))), ScheduleError),
    "validate no steps": (lambda: rs.validate(schedule_with(steps=())), ScheduleError),
    "validate uses of text": (lambda: rs.validate(schedule_with(uses=(0, 1, "2"))), ScheduleError),
    "validate pairs of text": (lambda: rs.validate(schedule_with(pairs=((0, "1"), (1, 2), (2, 0)))), ScheduleError),
    "validate pairs of three": (lambda: rs.validate(schedule_with(pairs=((0, 1, 2),) * 3)), ScheduleError),
    "validate workers of text": (lambda: rs.validate(schedule_with(workers="3")), ScheduleError),
    "validate skipped numbers": (lambda: rs.validate(schedule_with(skipped=frozenset({3}))), ScheduleError),
    "validate no inputs": (lambda: rs.validate(schedule_with(inputs=())), ScheduleError),
    "cp_offset layout": (lambda: rs.cp_offset("zigzag", 0, 0, **OFFSETS), (OptionError, "unknown-name")),
    "cp_offset of 0 workers": (lambda: rs.cp_offset("striped", 0, 0, workers=0, n_q=2, n_k=2), (LayoutError, "worker-count")),
    "cp_offset of worker W": (lambda: rs.cp_offset("striped", 3, 0, **OFFSETS), OptionError),
    "cp_offset of worker 0.5": (lambda: rs.cp_offset("contiguous", 0.5, 0, **OFFSETS), OptionError),
    "zigzag_offsets of odd blocks": (lambda: zigzag_offsets(0, 0, workers=3, n_q=3, n_k=3), LayoutError),
    # layouts
    "contiguous length -6": (lambda: make_layout("contiguous", -6, 3), LayoutError),
    "contiguous length 6.0": (lambda: make_layout("contiguous", 6.0, 3), LayoutError),
    "striped length text": (lambda: make_layout("striped", "6", 3), LayoutError),
    "zigzag workers 0": (lambda: make_layout("zigzag", 6, 0), (LayoutError, "worker-count")),
    "zigzag_per_document workers 1.0": (lambda: make_layout("zigzag_per_document", 6, 1.0, [0, 6]), (LayoutError, "worker-count")),
    "zigzag_per_document too long": (lambda: make_layout("zigzag_per_document", 6, 2, [0, 7]), (OptionError, "packing")),
    "table for length -1": (lambda: from_table([[0]], -1), LayoutError),
    "table without rows": (lambda: from_table(np.zeros((0, 2), int), 0), LayoutError),
    "shard a shorter array": (lambda: rs.shard(Q[:, :, :5], THREE), ShapeError),
    "shard a longer array": (lambda: rs.shard(np.ones((1, 1, 9, 2)), THREE), ShapeError),
    "shard along no axis": (lambda: rs.shard(Q, THREE, axis=4), ShapeError),
    "unshard nothing": (lambda: rs.unshard([], THREE), ShapeError),
    "unshard too few": (lambda: rs.unshard(rs.shard(Q, THREE)[:2], THREE), ShapeError),
    "unshard too many": (lambda: rs.unshard([*rs.shard(Q, THREE), Q], THREE), ShapeError),
    "unshard short parts": (lambda: rs.unshard([Q[:, :, :1]] * 3, THREE), ShapeError),
    "unshard long parts": (lambda: rs.unshard([Q] * 3, THREE), ShapeError),
    "unshard parts of different heads": (
        lambda: rs.unshard([Q[:, :1, :2], Q[:, :, :2], Q[:, :, :2]], THREE), ShapeError),
    "unpermute nothing": (lambda: rs.unpermute([]), ShapeError),
    "unpermute parts of different lengths": (
        lambda: rs.unpermute([Q[:, :, :2], Q[:, :, :3]]), ShapeError),
    "LSE tiles of rank 2": (lambda: lse_to_tiles(np.zeros((1, 128))), ShapeError),
    "LSE tiles of 100 rows": (lambda: lse_from_tiles(np.zeros((1, 1, 100, 2))), ShapeError),
    "LSE from tiles of rank 3": (lambda: lse_from_tiles(np.zeros((1, 128, 1))), ShapeError),
    # recipes
    "recipe with an unknown point": (lambda: FLOAT64.replace(pp="float32"), (OptionError, "unknown-name")),
    "recipe with an unknown format": (lambda: FLOAT64.replace(p="fp32"), (OptionError, "unknown-name")),
    "recipe with a dtype as format": (lambda: FLOAT64.replace(p=np.float32), (OptionError, "unknown-name")),
    "recipe with a list as format": (lambda: FLOAT64.replace(p=["float32"]), (OptionError, "unknown-name")),
    "recipe with 16-bit products": (lambda: FLOAT64.replace(products="bfloat16"), OptionError),
    "recipe with an unknown order": (lambda: FLOAT64.replace(merge_order="tree"), (OptionError, "unknown-name")),
    "recipe with tiles of 0": (lambda: FLOAT64.replace(tile_k=0), OptionError),
    "recipe with tiles of 1.5": (lambda: FLOAT64.replace(tile_q=1.5), OptionError),
    "recipe with tiles of True": (lambda: FLOAT64.replace(tile_q=True), OptionError),
    # costs
    "rate 0": (lambda: rs.timeline(COST, **RATES | {"pairs_per_second": 0}), OptionError),
    "rate NaN": (lambda: rs.timeline(COST, **RATES | {"bytes_per_second": np.nan}), OptionError),
    "rate text": (lambda: rs.timeline(COST, **RATES | {"bytes_per_second": "fast"}), OptionError),
    "rate 10**400": (lambda: rs.timeline(COST, **RATES | {"pairs_per_second": LONG}), OptionError),
    # partial results
    "merge nothing": (lambda: rs.merge_partials([]), ShapeError),
    "merge a number": (lambda: rs.merge_partials(3), ShapeError),
    "merge parts that are no pairs": (lambda: rs.merge_partials([(DY,)]), ShapeError),
    "merge parts of different shapes": (
        lambda: rs.merge_partials([(DY, DY[..., 0]), (DY[:1], DY[:1, ..., 0])]), ShapeError),
    "merge o with lse of another shape": (lambda: rs.merge_partials([(DY, DY)]), ShapeError),
    "merge NaN": (lambda: rs.merge_partials([(DY, with_value(DY[..., 0], np.nan))]), NonFiniteError),
    "merge +inf": (lambda: rs.merge_partials([(DY, with_value(DY[..., 0], np.inf))]), NonFiniteError),
    "block backward with lse NaN": (
        lambda: rs.attention_block_backward(
            Q, K, V, DY, lse=with_value(DY[..., 0], np.nan), delta=DY[..., 0]), NonFiniteError),
    "block backward with delta of rank 4": (
        lambda: rs.attention_block_backward(Q, K, V, DY, lse=DY[..., 0], delta=DY), ShapeError),
    "block backward with lse of another length": (
        lambda: rs.attention_block_backward(Q, K, V, DY, lse=DY[:, :, 1:, 0], delta=DY[..., 0]), ShapeError),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", OTHER)
def test_bad_arguments_of_everything_else_are_refused(case):
    call, expected = OTHER[case]
    refused(expected, call)
