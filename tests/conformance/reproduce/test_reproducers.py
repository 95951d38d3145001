"""Each reproducer of docs/conform/reproducers fails with the version that it names, and passes where the fault is not.

A program that crashes also ends with status 1, so these tests read the lines that it prints.
"""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "conform" / "reproducers"
LINE = re.compile(r"(right|WRONG): (\w+) of worker \d.*: got \S+, float64 \S+")
DIFFUSERS = pytest.mark.diffusers
LUCIDRAINS = pytest.mark.lucidrains
ZHUZILIN = pytest.mark.zhuzilin
YUNCHANG = pytest.mark.yunchang
XFUSER = pytest.mark.xfuser
TRANSFORMER_ENGINE = pytest.mark.transformer_engine


def wrong_results(name, *words):
    """The names of the results that the program calls wrong."""
    ran = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [LINE.fullmatch(line) for line in ran.stdout.splitlines()]
    assert lines and all(lines), ran.stdout + ran.stderr
    found = {line[2] for line in lines if line[1] == "WRONG"}
    assert ran.returncode == (1 if found else 0), ran.stderr
    return found


GRADIENTS = {"dq", "dk", "dv"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "package", "wrong"),
    [
        pytest.param(
            "diffusers_ring_stale_keys",
            (),
            "diffusers",
            {"0.39.0": GRADIENTS, "0.42.1": set()},
            marks=DIFFUSERS,
        ),
        pytest.param(
            "diffusers_ring_direction",
            (),
            "diffusers",
            {"0.39.0": GRADIENTS, "0.42.1": {"dk", "dv"}},
            marks=DIFFUSERS,
        ),
        pytest.param(
            "diffusers_unified_stale_keys",
            (),
            "diffusers",
            {"0.39.0": GRADIENTS, "0.42.1": set()},
            marks=DIFFUSERS,
        ),
        *(
            pytest.param(
                "diffusers_unified_direction",
                words,
                "diffusers",
                {"0.42.1": wrong},
                marks=DIFFUSERS,
            )
            for words, wrong in (((), {"dk", "dv"}), (("2",), set()))
        ),
        pytest.param(
            "lucidrains_dkv",
            (),
            "ring-attention-pytorch",
            {"0.5.20": {"dk", "dv"}},
            marks=LUCIDRAINS,
        ),
        pytest.param(
            "zhuzilin_ring_float16", (), "ring-flash-attn", {"0.1.8": {"dq"}}, marks=ZHUZILIN
        ),
        pytest.param(
            "zhuzilin_ring_float16",
            ("bfloat16",),
            "ring-flash-attn",
            {"0.1.8": set()},
            marks=ZHUZILIN,
        ),
        *(
            pytest.param(name, words, "yunchang", {"0.6.4": wrong}, marks=YUNCHANG)
            for name, words, wrong in (
                ("yunchang_ring_float16", (), {"dq"}),
                ("yunchang_ring_float16", ("bfloat16",), set()),
                ("yunchang_ring_window", (), {"o", *GRADIENTS}),
                ("yunchang_ring_window", ("causal",), set()),
                ("yunchang_usp_high", (), {"o", *GRADIENTS}),
                ("yunchang_usp_high", ("low",), set()),
                ("yunchang_usp_torch_math", (), {"o"}),
                ("yunchang_usp_torch_math", ("1",), set()),
                ("yunchang_ulysses_torch_flash", (), {"o"}),
                ("yunchang_ulysses_torch_flash", ("1",), set()),
            )
        ),
        *(
            pytest.param(f"xfuser_long_{name}", words, "xfuser", {"0.7.0": wrong}, marks=XFUSER)
            for name, words, wrong in (
                ("window", (), {"o", *GRADIENTS}),
                ("window", ("causal",), set()),
                ("fa3_causal", (), {"o", *GRADIENTS}),
                ("fa3_causal", ("full",), set()),
            )
        ),
        *(
            pytest.param(
                f"transformer_engine_all_gather_{name}",
                words,
                "transformer_engine",
                {"2.20.2": wrong},
                marks=TRANSFORMER_ENGINE,
            )
            for name, words, wrong in (
                ("fused", (), {"o"}),
                ("fused", ("sbhd",), {"o"}),
                ("fused", ("causal",), set()),
                ("fused", ("sbhd", "causal"), set()),
                ("documents", (), {"o"}),
                ("documents", ("same",), set()),
            )
        ),
    ],
)
def test_a_reproducer_finds_wrong_exactly_what_is_wrong_in_this_version(
    name, words, package, wrong
):
    version = importlib.metadata.version(package)
    if version not in wrong:
        pytest.skip(f"known are the results of {package} {', '.join(wrong)}; got {version}")
    assert wrong_results(name, *words) == wrong[version]
