"""What a target declares about form is converted, and a value never is."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from conformance.target import by_hand_conventions

from ringspec.conformance.cases.calls import call_of
from ringspec.conformance.target.capabilities import CONVENTIONS, Capabilities
from ringspec.conformance.target.conventions import (
    as_seen,
    lse_back,
    settle_empty_rows,
    shape_seen,
    to_numpy,
    turned,
    turned_back,
)
from ringspec.errors import DtypeError
from ringspec.formats import bits, store
from ringspec.vectors import open_set

CORE = open_set("core")


def made(id="ring/dlse-w2"):
    return call_of(CORE.case(id), CORE.tensors(id))


@pytest.mark.parametrize("axes", CONVENTIONS["axes"])
def test_axes_turn_there_and_back(axes):
    x = np.arange(2 * 5 * 4).reshape(1, 2, 5, 4)
    there = turned("q", x, axes)
    assert np.array_equal(there, by_hand_conventions.from_natural(x, axes))
    assert there.shape == shape_seen("q", x.shape, axes)
    assert np.array_equal(turned_back("q", there, axes), x)
    row = x[..., 0]
    assert turned("lse", row, axes).shape == shape_seen("lse", row.shape, axes)
    assert np.array_equal(turned_back("lse", turned("lse", row, axes), axes), row)


@pytest.mark.parametrize("axes", [axes for axes in CONVENTIONS["axes"] if "B" in axes])
def test_the_target_sees_its_own_axes_read_only_and_in_c_order(axes):
    call = made()
    seen = as_seen(call, Capabilities(axes=axes))
    for name in ("q", "k", "v", "dy"):
        for x, original in zip(seen.tensors[name], call.tensors[name], strict=True):
            assert np.array_equal(bits(x), bits(by_hand_conventions.from_natural(original, axes)))
            assert x.flags.c_contiguous and not x.flags.writeable
    assert seen.worker("dlse", 0).shape == call.worker("dlse", 0).shape


def test_an_lse_given_to_a_target_is_in_its_own_base():
    call = made("block/backward-empty-rows")
    assert np.isneginf(call.worker("lse", 0)).any()
    seen = as_seen(call, Capabilities(lse="base2", lse_of_empty_rows="plus-infinity"))
    got, natural = (one.worker("lse", 0).astype(np.float64) for one in (seen, call))
    empty = np.isneginf(natural)
    assert np.isposinf(got[empty]).all()
    assert np.allclose(got[~empty] * math.log(2), natural[~empty], rtol=1e-7)
    assert seen.worker("lse", 0).dtype == call.worker("lse", 0).dtype


def test_a_merge_keeps_its_axes():
    call = made("merge/two-parts")
    seen = as_seen(call, Capabilities(axes="SBHD"))
    assert seen.worker("parts_o", 0).shape == call.worker("parts_o", 0).shape


def test_an_lse_comes_back_natural():
    x = np.array([[[2.0, np.inf, -np.inf, np.nan]]], np.float32)
    got = lse_back(x, Capabilities(lse="base2", lse_of_empty_rows="plus-infinity"))[0, 0]
    assert got[0] == 2 * math.log(2) and np.isneginf(got[1])
    # +inf is what the target declared: its -inf is no empty row, and must not pass as one.
    assert np.isnan(got[2]) and np.isnan(got[3])
    assert lse_back(x, Capabilities()) is x


def test_a_declared_finite_value_counts_in_empty_rows_alone():
    want = np.array([[[-np.inf, -np.inf, -np.inf, 1.0, 1.0]]])
    got = np.array([[[-1e30, np.nan, np.inf, -1e30, -np.inf]]])
    settled = settle_empty_rows(got, want, Capabilities(lse_of_empty_rows="finite"))[0, 0]
    assert np.isneginf(settled[0]) and np.isnan(settled[1]) and np.isposinf(settled[2])
    assert settled[3] == -1e30 and np.isneginf(settled[4])
    assert settle_empty_rows(got, want, Capabilities()) is got


class Bits:
    """What PyTorch shows of a bfloat16 tensor."""

    dtype = "torch.bfloat16"

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    cpu = contiguous = detach

    def view(self, dtype):
        assert dtype == "int16"
        return SimpleNamespace(numpy=lambda: bits(self.values).astype(np.int16))


def test_a_bfloat16_tensor_of_torch_goes_by_its_bits(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(int16="int16"))
    values = store([1.0, 2.0**-130, 3.5], "bfloat16")
    got = to_numpy(Bits(values))
    assert got.dtype == values.dtype and np.array_equal(bits(got), bits(values))


def test_what_is_no_array_of_numbers_is_refused():
    for wrong in ("text", [object()], [[1.0], [1.0, 2.0]], np.array(["a"])):
        with pytest.raises(DtypeError):
            to_numpy(wrong)
