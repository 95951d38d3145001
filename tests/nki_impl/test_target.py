"""The kernels as targets of the conformance suite."""

from __future__ import annotations

import dataclasses
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nki_impl import target
from nki_impl.ordering import orders_of
from nki_impl.target import (
    NkiImpl,
    lse_by_rows,
    lse_by_tiles,
    nki_impl,
    nki_impl_lnc2,
    nki_impl_official,
)
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.noise import noise_call
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.run.load import load_target
from ringspec.conformance.run.suite import run
from ringspec.conformance.target.protocol import Call, Refused, Result
from ringspec.conformance.target.results import due_of
from ringspec.formats import load

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    "nki_impl": nki_impl,
    "nki_impl-lnc2": nki_impl_lnc2,
    "nki_impl-official": nki_impl_official,
}
CLAIMED = {"nki_impl": 850, "nki_impl-lnc2": 850, "nki_impl-official": 150}
"""The least numbers of cases of profile core."""


@lru_cache
def cases(profile: str) -> list[RunCase]:
    return list(run_cases(profile))


def claimed(target: NkiImpl, profile: str) -> list[str]:
    return [case.id for case in cases(profile) if case.why_not(target.capabilities) is None]


def call(workers: int = 2, dtype: str = "bf16", mask: str = "causal", **sizes: int) -> Call:
    sizes = {"tokens": 128 * workers, "kv_heads": 2} | sizes
    return noise_call("test", dtype, workers, "contiguous", mask, **sizes)


def arrays(result: Result) -> dict[str, list[np.ndarray]]:
    return {name: getattr(result, name) for name in ("o", "lse", "dq", "dk", "dv")}


def same_bits(one: Result, two: Result) -> bool:
    pairs = zip(arrays(one).values(), arrays(two).values(), strict=True)
    return all((a == b).all() for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", TARGETS)
def test_the_package_registers_the_target(name: str) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    place = pyproject["project"]["entry-points"]["ringspec.targets"][name]
    assert load_target(place) is TARGETS[name]
    assert TARGETS[name].name == name


# Two cores give the bits of one, as a test below says; every_claimed_case runs both.
@pytest.mark.parametrize(
    "name",
    [
        "nki_impl",
        pytest.param("nki_impl-lnc2", marks=pytest.mark.slow),
        "nki_impl-official",
    ],
)
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_smoke_cases_pass(name: str, stride: int) -> None:
    chosen = cases("smoke")[::stride]
    summary = run(TARGETS[name], chosen)
    assert summary.exit_code == 0
    ids = set(claimed(TARGETS[name], "smoke"))
    assert summary.claimed == len([case for case in chosen if case.id in ids]) >= 3


# Whole tiles and their noise: without a mask, causal, striped, with grouped heads.
TILES = [
    "kernel-shape/contiguous-causal-w2",
    "kernel-shape/contiguous-w3",
    "kernel-shape/grouped-heads-w2",
    "kernel-shape/striped-causal-w3",
    "noise/causal-contiguous-w1-bf16",
]


@pytest.mark.parametrize("name", TARGETS)
def test_cases_of_tiles_and_of_noise_pass(name: str) -> None:
    ids = [id for id in claimed(TARGETS[name], "core") if id in TILES]
    summary = run(TARGETS[name], cases("core"), only=ids)
    assert [record.id for record in summary.failures] == []
    assert summary.claimed == len(ids) >= 4


@pytest.mark.parametrize("name", TARGETS)
def test_the_number_of_claimed_cases(name: str) -> None:
    assert len(claimed(TARGETS[name], "core")) >= CLAIMED[name]


def test_the_official_interface_claims_a_part_of_what_the_kernels_claim() -> None:
    assert set(claimed(nki_impl_official, "full")) < set(claimed(nki_impl, "full"))


# One case of each kind of mask that becomes bounds, in a layout of its own.
BOUNDED = [
    "probe/pattern/causal-zigzag-w4-fp16",
    "probe/pattern/two-sided-window-zigzag-w4-f32",
    "probe/pattern/documents-striped-w3-bf16",
    "probe/pattern/documents-zigzag-per-document-w3-bf16",
]


@pytest.mark.parametrize("name", ["nki_impl", "nki_impl-lnc2"])
def test_masks_that_become_bounds_pass(name: str) -> None:
    summary = run(TARGETS[name], cases("core"), only=BOUNDED)
    assert [record.outcome for record in summary.records] == ["pass"] * len(BOUNDED)


@pytest.mark.parametrize("kind", ["q-offset", "padding", "table", "segments", "bounds", "empty"])
def test_a_case_of_each_feature_that_becomes_bounds_passes(kind: str) -> None:
    ids = [id for id in claimed(nki_impl, "core") if kind in id and not id.startswith("noise/")]
    assert ids
    summary = run(nki_impl, cases("core"), only=[ids[0], ids[-1]])
    assert [record.id for record in summary.failures] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_every_claimed_case_passes(name: str) -> None:
    summary = run(TARGETS[name], cases("full"), only=claimed(TARGETS[name], "full"))
    assert [record.id for record in summary.failures] == []


def test_two_cores_give_the_bits_of_one() -> None:
    asked = call(3)
    assert same_bits(nki_impl.run(asked), nki_impl_lnc2.run(asked))


def test_circulation_does_not_change_what_runs() -> None:
    asked = call(3)
    turned = dataclasses.replace(asked, circulation="q")
    assert same_bits(nki_impl.run(asked), nki_impl.run(turned))


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "f32"])
def test_a_backward_alone_reads_the_o_and_lse_that_it_is_given(dtype: str) -> None:
    asked = call(dtype=dtype)
    both = nki_impl.run(asked)
    assert both.o is not None and both.lse is not None
    tensors = {**asked.tensors, "o": tuple(both.o), "lse": tuple(both.lse)}
    alone = dataclasses.replace(asked, passes=("backward",), tensors=tensors)
    found = nki_impl.run(alone)
    assert found.o is None and found.lse is None
    for name in ("dq", "dk", "dv"):
        for a, b in zip(getattr(found, name), getattr(both, name), strict=True):
            assert (a == b).all()


def test_results_come_in_the_formats_that_are_asked_for() -> None:
    asked = call()
    for formats in (asked.formats, {**asked.formats, "outputs": "float32"}):
        changed = dataclasses.replace(asked, formats=formats)
        result = nki_impl.run(changed)
        for name, due in due_of(changed).items():
            shapes = tuple(x.shape for x in getattr(result, name))
            assert shapes == due.shapes
            assert {str(x.dtype) for x in getattr(result, name)} == {due.format}


def test_wider_gradients_are_not_rounded() -> None:
    asked = call()
    wide = dataclasses.replace(asked, formats={**asked.formats, "outputs": "float32"})
    narrow, exact = nki_impl.run(asked), nki_impl.run(wide)
    assert narrow.dv is not None and exact.dv is not None
    assert (narrow.dv[0] != load(exact.dv[0])).any()
    assert (narrow.dv[0] == exact.dv[0].astype(narrow.dv[0].dtype)).all()


def test_the_scale_of_each_head_dimension_of_the_official_interface_is_exact() -> None:
    for width in target.EXACT_SCALES:
        mantissa, _ = np.frexp(1 / np.sqrt(width))
        assert mantissa == 0.5
    asked = call()
    plan = target.plan_of(asked, orders_of(asked), official=True)
    assert plan.prescale
    scaled = target.query(asked, plan, 1)
    assert (load(scaled) / asked.terms["scale"] == load(asked.worker("q", 1))).all()


def test_both_ways_to_scale_give_the_same_bits_if_the_scale_is_a_power_of_two() -> None:
    assert same_bits(nki_impl.run(call(3)), nki_impl_official.run(call(3)))


def test_another_backend_than_the_simulator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "BACKEND", "device")
    with pytest.raises(Refused, match="device"):
        nki_impl.run(call())


class Wrong(NkiImpl):
    """The kernels, asked for something else than the call."""

    def __init__(self, **changes: Any) -> None:
        super().__init__("wrong", **target.EVERYTHING)
        self.changes = changes

    def run(self, call: Call) -> Result:
        return super().run(dataclasses.replace(call, **self.changes))


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"layout": "contiguous"}, "kernel-shape/striped-causal-w3"),
        ({"layout": "striped"}, "kernel-shape/contiguous-causal-w4"),
        ({"terms": {"scale": 0.125}}, "kernel-shape/float16-causal-w2"),
        ({"terms": {"scale": 0.25}}, "kernel-shape/contiguous-w3"),
    ],
)
def test_a_wrong_layout_mask_or_scale_fails(changes: dict[str, Any], id: str) -> None:
    assert run(nki_impl, cases("core"), only=id).exit_code == 0
    summary = run(Wrong(**changes), cases("core"), only=id)
    assert [record.outcome for record in summary.records] == ["mismatch"]


def test_rows_of_lse_lie_by_tiles() -> None:
    lse = np.arange(2 * 3 * 256, dtype=np.float32).reshape(2, 3, 256)
    tiles = lse_by_tiles(lse)
    assert tiles.shape == (2, 3, 128, 2)
    assert tiles[1, 2, 5, 1] == lse[1, 2, 128 + 5]
    assert (lse_by_rows(tiles, 256) == lse).all()
    assert (lse_by_rows(lse_by_tiles(lse[..., :200]), 200) == lse[..., :200]).all()
