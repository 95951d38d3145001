"""Bad arguments of the ring alone: workers, layouts, schedules, circulations, recipes."""

import numpy as np
import pytest
from bad_input.calls import (
    LONG,
    LONGER,
    K,
    OnAnotherDevice,
    V,
    WithoutText,
    refused,
    ring,
)

import ringspec as rs
from ringspec.errors import DtypeError, LayoutError, OptionError, ScheduleError
from ringspec.recipes import RECIPES


def table(*rows):
    return {"workers": len(rows), "layout": [list(row) for row in rows]}


BAD_RING = {
    "workers 0": ({"workers": 0}, (LayoutError, "worker-count")),
    "workers -3": ({"workers": -3}, (LayoutError, "worker-count")),
    "workers 3.0": ({"workers": 3.0}, (LayoutError, "worker-count")),
    "workers True": ({"workers": True}, (LayoutError, "worker-count")),
    "workers None": ({"workers": None}, (LayoutError, "worker-count")),
    "workers text": ({"workers": "3"}, (LayoutError, "worker-count")),
    "workers array": ({"workers": np.array([3])}, (LayoutError, "worker-count")),
    "workers of 5000 digits below zero": ({"workers": -LONGER}, (LayoutError, "worker-count")),
    "workers without text": ({"workers": WithoutText()}, (LayoutError, "worker-count")),
    "workers 4 of 6 tokens": ({"workers": 4}, LayoutError),
    "workers 10**400": ({"workers": LONG}, (LayoutError, "worker-count")),
    "workers of 5000 digits": ({"workers": LONGER}, (LayoutError, "worker-count")),
    "striped 4 of 6 tokens": ({"workers": 4, "layout": "striped"}, LayoutError),
    "zigzag 2W does not divide": ({"workers": 2, "layout": "zigzag"}, LayoutError),
    "zigzag shorter than 2W": ({"workers": 6, "layout": "zigzag"}, LayoutError),
    "layout misspelt": ({"layout": "contigous"}, (OptionError, "unknown-name")),
    "layout in capitals": ({"layout": "Striped"}, (OptionError, "unknown-name")),
    "layout empty": ({"layout": ""}, (OptionError, "unknown-name")),
    "layout None": ({"layout": None}, (OptionError, "unknown-name")),
    "layout a number": ({"layout": 3}, LayoutError),
    "layout bytes": ({"layout": b"zigzag"}, LayoutError),
    "layout a tuple of one name": ({"layout": ("striped",)}, LayoutError),
    "layout of keys misspelt": ({"layout": ("striped", "strided")}, (OptionError, "unknown-name")),
    "layout without documents": ({"layout": "zigzag_per_document"}, (OptionError, "packing")),
    "table that misses a token": (table([0, 1], [2, 3], [4, -1]), LayoutError),
    "table that doubles a token": (table([0, 1, 2], [2, 3, 4], [5, 0, 1]), LayoutError),
    "table with a foreign token": (table([0, 1, 6], [2, 3, -1], [4, 5, -1]), LayoutError),
    "table with too few rows": (table([0, 1, 2], [3, 4, 5]) | {"workers": 3}, LayoutError),
    "table with too many rows": (table([0, 1], [2, 3], [4, 5]) | {"workers": 2}, LayoutError),
    "table of floats": (table([0.0, 1], [2, 3], [4, 5]), LayoutError),
    "table of booleans": ({"layout": np.ones((3, 2), bool)}, LayoutError),
    "table of rank 1": ({"layout": np.arange(6)}, LayoutError),
    "table of rank 3": ({"layout": np.arange(6).reshape(3, 2, 1)}, LayoutError),
    "table that is ragged": ({"layout": [[0, 1], [2], [3, 4, 5]]}, DtypeError),
    "table on another device": ({"layout": OnAnotherDevice()}, DtypeError),
    "table of unsigned -1": (
        {"layout": np.array([[0, 1, 2**64 - 1], [2, 3, 2**64 - 1], [4, 5, 2**64 - 1]], "u8")}, LayoutError),
    "one table for two lengths": (table([0, 1], [2, 3], [4, 5]) | {"k": K[:, :, :3], "v": V[:, :, :3]}, LayoutError),
    "layout with a broken table": ({"layout": rs.Layout("mine", None)}, (OptionError, "unknown-name")),
    "circulation misspelt": ({"circulation": "kw"}, (OptionError, "unknown-name")),
    "circulation in capitals": ({"circulation": "KV"}, (OptionError, "unknown-name")),
    "circulation None": ({"circulation": None}, (OptionError, "unknown-name")),
    "circulation a list": ({"circulation": ["kv"]}, (OptionError, "unknown-name")),
    "circulation an array": ({"circulation": np.array(["kv", "q"])}, (OptionError, "unknown-name")),
    "recipe unknown": ({"recipe": "flaot64"}, (OptionError, "unknown-name")),
    "recipe None": ({"recipe": None}, (OptionError, "unknown-name")),
    "recipe a dtype": ({"recipe": np.float32}, (OptionError, "unknown-name")),
    "recipe a list": ({"recipe": ["bf16"]}, (OptionError, "unknown-name")),
    "recipe without text": ({"recipe": WithoutText()}, (OptionError, "unknown-name")),
    "direction 2": ({"direction": 2}, OptionError),
    "direction 0": ({"direction": 0}, OptionError),
    "direction True": ({"direction": True}, OptionError),
    "direction 1.0": ({"direction": 1.0}, OptionError),
    "direction 1j": ({"direction": 1 + 0j}, OptionError),
    "direction text": ({"direction": "1"}, OptionError),
    "direction array": ({"direction": np.array([1, 1])}, OptionError),
    "direction of 5000 digits": ({"direction": LONGER}, OptionError),
    "direction 2 of gathered keys": ({"direction": 2, "circulation": "gather"}, OptionError),
    "record text": ({"record": "yes"}, OptionError),
    "record array": ({"record": np.array([True, False])}, OptionError),
    "skip_masked 1": ({"skip_masked": 1}, OptionError),
    "skip_masked array": ({"skip_masked": np.array([True, False])}, OptionError),
    "a schedule for other workers": ({"schedule": rs.forward_schedule("kv", 2)}, OptionError),
    "a backward schedule as forward": ({"schedule": rs.backward_schedule("kv", 3)}, OptionError),
    "a forward schedule as backward": ({"schedule_backward": rs.forward_schedule("kv", 3)}, OptionError),
    "a schedule that is a number": ({"schedule": 3}, ScheduleError),
    "a schedule that is an empty list": ({"schedule": []}, ScheduleError),
    "a backward schedule that is text": ({"schedule_backward": "q"}, ScheduleError),
    "observer a number": ({"observer": 3}, OptionError),
    "block_forward text": ({"block_forward": "mine"}, OptionError),
    "block_backward a list": ({"block_backward": []}, OptionError),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", BAD_RING)
def test_bad_arguments_of_the_ring_are_refused(case):
    changes, expected = BAD_RING[case]
    refused(expected, lambda: ring(**changes))


def test_a_misspelt_layout_or_recipe_is_answered_with_the_nearest_name():
    assert (
        "'contiguous'"
        in refused((OptionError, "unknown-name"), lambda: ring(layout="contigous")).fix
    )
    assert "'float64'" in refused((OptionError, "unknown-name"), lambda: ring(recipe="flaot64")).fix
    assert (
        "'bfloat16'"
        in refused((OptionError, "unknown-name"), lambda: RECIPES["bf16"].replace(p="bflaot16")).fix
    )
    assert (
        "'gather'"
        in refused((OptionError, "unknown-name"), lambda: ring(circulation="gathered")).fix
    )
