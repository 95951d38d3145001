"""``ringspec power``: its table, its JSON against its schema, its refusals."""

import json
from pathlib import Path

import jsonschema
import pytest
from cli.commands import assert_one_paragraph
from cli.commands import call as call_any

import ringspec as rs
from ringspec.compare.rivals import RULES

SCHEMA = json.loads((Path(rs.__file__).parent / "cli" / "power.schema.json").read_text())
SMALL = ("--tokens", 48, "--head-dim", 8, "--workers", 3, "--layout", "striped")


def call(*arguments):
    return call_any(*SMALL, *arguments, command="power")


def document(*arguments):
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    jsonschema.validate(data, SCHEMA)
    return data


def test_the_document_fits_the_schema_and_names_all_defects_and_rules():
    data = document()
    assert data["correct"] is True and data["problem"]["layout"] == "striped"
    assert [rule["name"] for rule in data["rules"]] == [rule.name for rule in RULES]
    assert {row["passes"] for row in data["defects"]} == {"forward", "gradients"}
    for row in data["defects"]:
        assert set(row["rivals"]) == {rule.name for rule in RULES}
        assert row["ringspec"]["confirmed"] in (True, None)


def test_forward_only_without_a_mask_has_neither_gradients_nor_a_diagonal():
    data = document("--forward-only", "--no-causal", "--no-confirm", "--recipe", "fp16")
    names = [row["name"] for row in data["defects"]]
    assert names == ["factor", "scale", "offset", "hop", "truncation"]
    assert {row["passes"] for row in data["defects"]} == {"forward"}
    assert data["correct"] is None and data["problem"]["recipe"] == "fp16"


def test_one_worker_has_no_ring_step_and_a_float32_kernel_little_to_truncate():
    data = document("--workers", 1, "--recipe", "float32", "--no-confirm", "--forward-only")
    names = [row["name"] for row in data["defects"]]
    assert "hop" not in names and {"factor", "scale", "diagonal"} <= set(names)
    scale = next(row for row in data["defects"] if row["name"] == "scale")
    assert scale["ringspec"]["size"] < 1e-5


def test_the_schema_refuses_a_missing_and_an_unknown_key():
    data = document("--no-confirm", "--forward-only")
    for broken in ({**data, "more": 1}, {k: v for k, v in data.items() if k != "rules"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)


def test_the_text_is_ascii_within_100_columns_and_has_every_defect_and_rule():
    result = call("--forward-only")
    assert result.exit_code == 0 and result.stdout.isascii()
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines if "https:" not in line) <= 100
    for rule in RULES:
        assert any(line.startswith(rule.name + ": ") for line in lines)
    names = ["factor", "scale", "offset", "hop", "truncation", "diagonal"]
    assert sum(line.split() == names for line in lines) == 1
    assert all(any(line.startswith(name + ": ") for line in lines) for name in names)
    assert "found; no alarm without" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokens", 0), "--tokens"),
        (("--power", 1), "power from 0.5"),
        (("--recipe", "bf61"), "bf16"),
        (("--recipe", "float64"), "rounding noise"),
        (("--layout", "zigzig"), "zigzag"),
        (("--tokens", 100000), "pairs"),
    ],
)
def test_bad_input_is_refused_in_one_paragraph(arguments, says):
    assert_one_paragraph(call(*arguments), says)
