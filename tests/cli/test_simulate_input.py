"""``ringspec simulate``: files in and out, and bad input of every kind."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from cli.commands import NAMES, SMALL, assert_one_paragraph, call, document, input_file
from click.testing import CliRunner

import ringspec as rs
from ringspec.cli import main
from ringspec.cli.commands import simulate
from ringspec.cli.shared.inputs import drawn

# Files


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_is_compared_like_drawn_tensors(tmp_path, suffix):
    path = input_file(tmp_path / f"x{suffix}", other=np.zeros(3))
    data = document("--input", path, "--workers", 3)
    assert data["inputs"] == {"source": str(path), "ignored": ["other"]}
    assert [data["problem"][n] for n in ("heads", "length", "head_dim")] == [2, 12, 4]
    assert data["comparison"]["all"]["dv"]["rel"] <= 1e-14
    assert "not read: 'other'" in call("--input", path, "--workers", 3).stdout


def test_a_file_without_dy_has_a_forward_pass_alone(tmp_path):
    data = document("--input", input_file(tmp_path / "x.npz", dy=None), "--workers", 3)
    assert len(data["passes"]) == 1 and set(data["comparison"]["all"]) == {"o", "lse"}
    path = input_file(tmp_path / "y.npz", dlse=drawn(1, "dlse", (1, 2, 12)), dy=None)
    assert set(document("--input", path, "--workers", 3)["comparison"]["all"]) == set(NAMES)
    assert len(document("--input", path, "--workers", 3, "--no-backward")["passes"]) == 1


@pytest.mark.parametrize("compare", ["dense", "rows"])
@pytest.mark.parametrize("n_q, n_k", [(0, 0), (0, 12), (12, 0)])
def test_sequences_without_tokens_are_a_result_and_no_failure(tmp_path, n_q, n_k, compare):
    changes = {"q": np.zeros((1, 2, n_q, 4)), "dy": np.zeros((1, 2, n_q, 4))}
    changes |= {"k": np.zeros((1, 2, n_k, 4)), "v": np.zeros((1, 2, n_k, 4))}
    path = input_file(tmp_path / "x.npz", **changes)
    data = document("--input", path, "--workers", 3, "--compare", compare, "--layout", "striped")
    assert data["comparison"]["all"]["o"] == {"abs": 0.0, "rel": 0.0}
    assert call("--input", path, "--workers", 3).exit_code == 0


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"q": None}, "no q"),
        ({"q": np.zeros((2, 12, 4))}, "rank 4"),
        ({"q": np.zeros((1, 2, 12, 4), int)}, "int64"),
        ({"k": np.full((1, 2, 12, 4), np.nan)}, "nan"),
        ({"dy": np.zeros((1, 2, 12, 3))}, "dy of o's shape"),
        ({"v": np.zeros((1, 1, 12, 4))}, "(1, 1, 12, 4)"),
        ({"q": np.zeros((1, 2, 12, 4), "U1")}, "U1"),
    ],
)
def test_bad_tensors_in_a_file_are_one_paragraph_and_exit_code_2(tmp_path, changes, says):
    result = call("--input", input_file(tmp_path / "x.npz", **changes), "--workers", 3)
    assert_one_paragraph(result, says)


def test_options_that_the_file_decides_are_refused_with_it(tmp_path):
    path = input_file(tmp_path / "x.npz")
    for option in ("--length", "--heads", "--value-dim", "--seed"):
        assert_one_paragraph(call("--input", path, option, 4), option)
    assert call("--input", path, "--workers", 3, "--sinks", 1, "--seed", 4).exit_code == 0


def test_save_writes_results_and_every_state(tmp_path):
    path = tmp_path / "run.safetensors"
    assert f"saved to {path}" in call(*SMALL, "--save", path).stdout.replace("\n  ", " ")
    tensors = rs.read_tensors(path)
    run = rs.ring(
        *(drawn(0, n, (1, 2, 24, 4)) for n in ("q", "k", "v", "dy")), workers=3, causal=True
    )
    assert np.array_equal(tensors["results/dk"], run.dk)
    assert {f"forward/step{t}/worker{r}/after/m" for t in range(3) for r in range(3)} < set(tensors)
    call(*SMALL, "--save", path, "--no-states")
    assert not any(name.startswith("forward") for name in rs.read_tensors(path))


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "run.safetensors"
    path.write_text("old")

    def interrupted(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    result = call(*SMALL, "--save", path)
    assert result.exit_code == 130 and result.stderr == "interrupted\n" and result.stdout == ""
    assert path.read_text() == "old" and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("target", ["missing/run.safetensors", "."])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, target):
    monkeypatch.setattr(simulate, "ring", None)
    assert_one_paragraph(call(*SMALL, "--save", tmp_path / target), "--save")


# Bad input


BAD = [
    (("--workers", 0), "W >= 1"),
    (("--workers", 1025), "at most 1024"),
    (("--workers", "four"), "integer"),
    (("--length", 10), "S divisible by W = 4"),
    (("--length", 0), "--length from 1"),
    (("--length", 12, "--layout", "zigzag"), "2W = 8"),
    (("--length", 2**40), "elements"),
    (("--heads", 2**70), "--heads from 1"),
    (("--heads", 3, "--kv-heads", 2), "multiple"),
    (("--layout", "stripped"), "write 'striped'"),
    (("--layout", "zigzag_per_document"), "cu_seqlens"),
    (("--circulation", "kw"), "write 'kv'"),
    (("--recipe", "bfloat"), "recipe"),
    (("--recipe", "bf61"), "write 'bf16'"),
    (("--compare", "dens"), "write 'dense'"),
    (("--direction", 2), "direction 1"),
    (("--window", "3,x"), "not a window"),
    (("--window", "1,2,3"), "not a window"),
    (("--window", "-3"), "window"),
    (("--documents", "5,-3"), "whole numbers"),
    (("--documents", "50,50", "--length", 64), "cu_seqlens"),
    (("--documents", f"{10**30}", "--length", 64), "cu_seqlens"),
    (("--dropout", 1), "dropout_p"),
    (("--dropout", "nan"), "dropout_p"),
    (("--dropout-seed", -1), "dropout_seed"),
    (("--softcap", 0), "softcap"),
    (("--scale", "inf"), "finite"),
    (("--sinks", -1), "--sinks"),
    (("--seed", -1), "--seed"),
    (("--q-offset", 2**63), "--q-offset"),
    (("--input", "missing.npz"), "regular file"),
    (("--input", "tensors.pt"), ".safetensors or .npz"),
    (("--lenght", 8), "--length"),
    (("--length", 2**15, "--head-dim", 2, "--workers", 1), "one block"),
    (("--length", 2**13, "--workers", 16, "--heads", 4, "--save", "x"), "--no-states"),
]


@pytest.mark.parametrize(
    "arguments, says", BAD, ids=[" ".join(map(str, arguments))[:40] for arguments, _ in BAD]
)
def test_bad_input_is_one_paragraph_and_exit_code_2(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert_one_paragraph(call(*arguments), says)


def test_an_unknown_command_names_the_nearest():
    result = CliRunner().invoke(main, ["simulat"])
    assert_one_paragraph(result, "write 'simulate'")


@pytest.mark.parametrize("failure", [OSError("disk full"), MemoryError()])
def test_failures_of_the_machine_are_messages_too(monkeypatch, failure):
    def fails(*arguments, **options):
        raise failure

    monkeypatch.setattr(simulate, "ring", fails)
    assert_one_paragraph(call(*SMALL), str(failure) or "not enough memory")


def test_help_shows_two_examples_and_the_exit_codes():
    text = CliRunner().invoke(main, ["simulate", "--help"]).stdout
    assert text.count("  ringspec simulate --") == 2
    assert "Exit code: 0; 1 if" in text and "2**24" in text


def test_the_examples_of_the_help_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    input_file(Path("qkv.npz"))
    for command in ("simulate", "schedule"):
        text = CliRunner().invoke(main, [command, "--help"]).stdout
        examples = [x.split() for x in text.splitlines() if x.strip().startswith("ringspec ")]
        assert len(examples) == 2
        for example in examples:
            result = CliRunner().invoke(main, example[1:])
            assert result.exit_code == 0, (example, result.output)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_may_hold_masks_bias_and_sinks(tmp_path, suffix):
    """Every mask of the specification; the visible pairs are counted here by brute force."""
    S, random = 12, np.random.default_rng(5)
    arrays = {n: random.normal(size=(1, 2, S, 4)) for n in ("q", "k", "v", "dy")}
    low = random.integers(0, S // 2, (1, S))
    masks = {
        "mask": random.random((1, 1, S, S)) < 0.8,
        "bias": random.normal(size=(2, S, S)),
        "segments_q": np.repeat([0, 1, -1], 4),
        "segments_k": np.repeat([0, 1, 0], 4),
        "bound_min": low,
        "bound_max": low + 6,
        "sinks": random.normal(size=2),
    }
    masks["bias"][0, :, 1] = -np.inf
    path = tmp_path / f"masked{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays, **masks)
    else:
        rs.write_tensors(path, arrays | masks)
    result = call("--input", path, "--workers", 3, "--layout", "striped", "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["comparison"]["within_bound"] is True
    i, j = np.arange(S)[:, None], np.arange(S)[None, :]
    same = (masks["segments_q"][:, None] == masks["segments_k"]) & (i < 8)
    inside = (low[0][:, None] <= j) & (j < low[0][:, None] + 6)
    visible = masks["mask"][0] & ~np.isneginf(masks["bias"]) & same & inside & (j <= i)
    text = call("--input", path, "--workers", 3, "--layout", "striped").stdout
    assert f" bytes, {int(visible.sum())} pairs; " in text
    both = call("--input", path, "--workers", 3, "--sinks", 1, "--seed", 1)
    assert both.exit_code == 2 and "sinks in the file" in both.stderr
