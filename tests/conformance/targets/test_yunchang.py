"""yunchang over the stand-in: its rings, Ulysses and USP, and which of them are wrong.

Needs torch and the package; see its requirements file. Every failure is confirmed by ``by_hand_yunchang.py``, a program
without ringspec.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringspec.conformance.cases import probes, properties
from ringspec.conformance.run.suite import run
from ringspec.conformance.targets import yunchang_usp
from ringspec.errors import MissingPackageError

BY_HAND = Path(__file__).with_name("by_hand_yunchang.py")
BF16, FP16 = 2**-7, 2**-10
# Without windows, which are wrong in every ring; of Ulysses they are tested as well.
PROPERTIES = ("property/workers/causal-*", "property/workers/full-*")
GRADIENTS = "probe/gradient-pattern/causal-contiguous-w2-*16"


def by_hand(*arguments):
    command = [sys.executable, str(BY_HAND), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.yunchang
@pytest.mark.slow
def test_by_hand_dq_of_the_ring_has_the_precision_of_bfloat16_for_float16_inputs():
    found = by_hand("ring", "low", "fa", "float16", 3, "causal")
    assert found["dq"]["finer_than_bfloat16"] == 0 and min(found["dq"]["errors"]) > FP16
    for name in ("o", "dk", "dv"):
        assert found[name]["finer_than_bfloat16"] > 0, name
        assert all(error <= FP16 for error in found[name]["errors"]), name


@pytest.mark.yunchang
@pytest.mark.slow
def test_by_hand_at_the_sizes_of_the_noise_cases_the_ring_is_wrong_in_the_same_tensors():
    """noise/full-contiguous-w2-fp16 and noise/window-contiguous-w4-bf16."""
    found = by_hand("ring", "low", "fa", "float16", 2, "full", "noise")
    assert found["dq"]["finer_than_bfloat16"] == 0 and min(found["dq"]["errors"]) > FP16
    for name in ("o", "dk", "dv", "lse"):
        assert found[name]["finer_than_bfloat16"] > 0, name
        assert all(error <= FP16 for error in found[name]["errors"]), name
    found = by_hand("ring", "low", "fa", "bfloat16", 4, "window", "noise")
    assert all(max(one["errors"]) > 0.1 for one in found.values()), found


@pytest.mark.yunchang
@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("usp", "low", "window", "noise"),
        ("usp-strip", "low", "window", "noise"),
        ("usp-zigzag", "low", "window", "noise"),
        ("usp", "high", "window", "noise"),
        ("usp", "high", "causal", "noise"),
        ("usp", "high", "causal", "many-heads"),
    ],
    ids="-".join,
)  # fmt: skip
def test_by_hand_at_the_sizes_of_the_noise_cases_usp_is_wrong_in_every_tensor(words):
    what, order, *rest = words
    found = by_hand(what, order, "fa", "bfloat16", 4, *rest)
    assert all(max(one["errors"]) > 0.1 for one in found.values()), found


@pytest.mark.yunchang
@pytest.mark.slow
def test_by_hand_causal_usp_is_right_only_if_neighbours_exchange_heads():
    for name, one in by_hand("usp", "low", "fa", "bfloat16", 4, "causal").items():
        assert all(error <= BF16 for error in one["errors"]), name
    for name, one in by_hand("usp", "high", "fa", "bfloat16", 4, "full").items():
        assert all(error <= BF16 for error in one["errors"]), name
    found = by_hand("usp", "high", "fa", "bfloat16", 4, "causal")
    for name, wrong in {"o": (1, 2), "dq": (1, 2), "dk": (0, 1, 2), "dv": (0, 1, 2)}.items():
        errors = found[name]["errors"]
        assert {rank for rank in range(4) if errors[rank] > 0.1} == set(wrong), name
        assert all(errors[rank] <= BF16 for rank in range(4) if rank not in wrong), name


@pytest.mark.yunchang
@pytest.mark.slow
def test_by_hand_the_ring_of_torch_math_merges_with_wrong_weights():
    found = by_hand("usp", "low", "torch_math", "bfloat16", 4, "full")
    assert list(found) == ["o"] and min(found["o"]["errors"]) > 0.1
    for size in ("noise", "many-heads"):
        found = by_hand("usp", "low", "torch_math", "bfloat16", 4, "causal", size)
        assert max(found["o"]["errors"]) > 0.1


@pytest.mark.yunchang
@pytest.mark.slow
def test_by_hand_ulysses_with_torchs_flash_kernel_sees_the_keys_of_other_heads():
    for words in (["full"], ["causal", "many-heads"]):
        found = by_hand("ulysses", "low", "torch_flash", "bfloat16", 2, *words)
        assert list(found) == ["o"] and min(found["o"]["errors"]) > 0.1


@pytest.mark.yunchang
@pytest.mark.slow
@pytest.mark.parametrize(("what", "workers"), [("ring", 3), ("usp", 4)])
def test_by_hand_a_window_goes_to_each_block_without_its_distance(what, workers):
    """Queries of later ranks see keys of earlier blocks beyond their window; those of rank 0 are right."""
    found = by_hand(what, "low", "fa", "bfloat16", workers, "window")
    assert all(max(one["errors"]) > 0.1 for one in found.values())
    assert found["o"]["errors"][0] <= BF16 and found["dq"]["errors"][0] <= BF16


@pytest.mark.yunchang
@pytest.mark.slow
def test_by_hand_causal_stripes_are_right_only_if_neighbours_exchange_heads_and_zigzag_in_both_orders():
    for what, order in (("usp-strip", "low"), ("usp-zigzag", "low"), ("usp-zigzag", "high")):
        for name, one in by_hand(what, order, "fa", "bfloat16", 4, "causal").items():
            assert all(error <= BF16 for error in one["errors"]), (what, order, name)
    for name, one in by_hand("usp-strip", "high", "fa", "bfloat16", 4, "causal").items():
        assert all(error > 0.1 for error in one["errors"]), name


@pytest.mark.yunchang
@pytest.mark.slow
@pytest.mark.parametrize("what", ["stripe", "zigzag"])
def test_by_hand_the_rings_of_stripes_and_zigzag_are_right_but_for_windows(what):
    for name, one in by_hand(what, "low", "fa", "bfloat16", 3, "causal").items():
        assert all(error <= BF16 for error in one["errors"]), name
    for name, one in by_hand(what, "low", "fa", "bfloat16", 3, "window").items():
        assert any(error > 0.1 for error in one["errors"]), name


@pytest.mark.yunchang
@pytest.mark.slow
@pytest.mark.parametrize("what", ["usp-strip", "usp-zigzag"])
@pytest.mark.parametrize("order", ["low", "high"])
def test_by_hand_windows_of_stripes_and_zigzag_are_wrong(what, order):
    for name, one in by_hand(what, order, "fa", "bfloat16", 4, "window").items():
        assert any(error > 0.1 for error in one["errors"]), name


# What the cases find: the wrong tensors of each case that fails.
WRONG = {
    "ring": {"probe/gradient-pattern/causal-contiguous-w2-fp16": {"dq"}},
    "zigzag": {},
    "stripe": {},
    "ulysses": {},
    "ulysses-torch-flash": {
        f"property/workers/{mask}-contiguous-{name}": {"o"}
        for mask in ("causal", "full")
        for name in ("bf16", "fp16")
    },
    "usp": {},
    "usp-zigzag": {},
    "usp-stripe": {},
    "usp-high": {
        "property/workers/causal-contiguous-bf16": {"o", "dk", "dv"},  # dq is within its bound
        "property/workers/causal-contiguous-fp16": {"o", "dq", "dk", "dv"},
    },
    "usp-torch-math": {
        f"property/workers/{mask}-contiguous-{name}": {"o"}
        for mask in ("causal", "full")
        for name in ("bf16", "fp16")
    },
}


@pytest.mark.yunchang
@pytest.mark.slow
@pytest.mark.parametrize("variant", WRONG)
def test_the_suite_finds_what_was_confirmed_by_hand_and_nothing_else(variant):
    try:
        target = yunchang_usp.target(variant)
    except MissingPackageError as error:
        pytest.skip(str(error))
    try:
        windows = ("property/workers/*window*",) if variant == "ulysses" else ()
        only = (GRADIENTS, *PROPERTIES, *windows)
        summary = run(target, [*probes.cases(), *properties.cases()], only=only)
    finally:
        target.close()
    wrong = {
        one.id: {finding.tensor for finding in one.findings if finding.kind != "ok"}
        for one in summary.records
        if one.outcome not in ("pass", "not claimed")
    }
    assert wrong == WRONG[variant]
    assert sum(one.outcome != "not claimed" for one in summary.records) >= 2


def test_every_variant_has_a_test_and_an_entry_point():
    import tomllib

    project = Path(__file__).parents[3] / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]["ringspec.targets"]
    for variant in yunchang_usp.VARIANTS:
        name = f"{yunchang_usp.__name__}:{variant.replace('-', '_')}"
        assert points[f"yunchang-{variant}"] == name
    assert set(WRONG) == set(yunchang_usp.VARIANTS)


@pytest.mark.parametrize("variant", yunchang_usp.VARIANTS)
def test_kernels_of_flash_attn_claim_windows_and_usp_claims_an_even_number_of_heads(variant):
    claims = yunchang_usp.claims(variant)
    assert ("window" in claims.masks) == ("torch" not in variant)
    assert claims.only_causal == variant.endswith(("zigzag", "stripe"))
    multiple = {"usp": 2, "ulysses": "workers"}.get(variant.partition("-")[0], 1)
    assert claims.kv_heads_multiple == multiple
    assert claims.workers == ((4,) if variant.startswith("usp") else (2, 3, 4))
