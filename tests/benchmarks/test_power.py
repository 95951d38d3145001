"""tests/benchmarks/power.py: its table and its refusals."""

import pytest
from benchmarks import power
from benchmarks.power_measure import measure
from benchmarks.power_problem import Asked
from benchmarks.rivals import RULES

SMALL = {"tokens": 48, "head_dim": 8, "workers": 3, "layout": "striped"}
WORDS = ["--tokens", "48", "--head-dim", "8", "--workers", "3", "--layout", "striped"]


def test_all_defects_and_rules_are_measured_and_none_that_is_injected_is_missed():
    measured = measure(Asked(**SMALL))
    assert measured.correct is True and measured.rules == RULES
    assert {row.passes for row in measured.rows} == {"forward", "gradients"}
    for row in measured.rows:
        assert set(row.rivals) == {rule.name for rule in RULES}
        assert row.confirmed in (True, None)


def test_forward_only_without_a_mask_has_neither_gradients_nor_a_diagonal():
    asked = Asked(recipe="fp16", gradients=False, causal=False, **SMALL)
    measured = measure(asked, confirm=False)
    names = [row.name for row in measured.rows]
    assert names == ["factor", "scale", "offset", "hop", "truncation"]
    assert {row.passes for row in measured.rows} == {"forward"}
    assert measured.correct is None


def test_one_worker_has_no_ring_step_and_a_float32_kernel_little_to_truncate():
    asked = Asked(recipe="float32", gradients=False, **(SMALL | {"workers": 1}))
    rows = measure(asked, confirm=False).rows
    names = [row.name for row in rows]
    assert "hop" not in names and {"factor", "scale", "diagonal"} <= set(names)
    scale = next(row for row in rows if row.name == "scale")
    assert scale.size is not None and scale.size < 1e-5


def test_the_text_is_ascii_within_100_columns_and_has_every_defect_and_rule(capsys):
    power.main([*WORDS, "--forward-only"])
    printed = capsys.readouterr().out
    assert printed.isascii()
    lines = printed.splitlines()
    assert max(len(line) for line in lines if "https:" not in line) <= 100
    for rule in RULES:
        assert any(line.startswith(rule.name + ": ") for line in lines)
    names = ["factor", "scale", "offset", "hop", "truncation", "diagonal"]
    assert sum(line.split() == names for line in lines) == 1
    assert all(any(line.startswith(name + ": ") for line in lines) for name in names)
    assert "found; no alarm without" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens", "0"], "tokens of at least 1"),
        (["--power", "1"], "power from 0.5"),
        (["--recipe", "bf61"], "bf16"),
        (["--recipe", "float64"], "rounding noise"),
        (["--layout", "zigzig"], "zigzag"),
        (["--tokens", "100000"], "pairs"),
    ],
)
def test_bad_input_is_refused_with_status_2(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        power.main([*WORDS, *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err
