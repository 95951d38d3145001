"""``ringspec simulate``: what it prints, and that the errors which it shows are true."""

import dataclasses
import json

import jsonschema
import numpy as np
import pytest
from cli.commands import NAMES, SCHEMA, SMALL, call, document
from oracle.row_scale import row_scale, worst_row_error

import ringspec as rs
from ringspec.cli.commands import simulate
from ringspec.cli.shared.inputs import drawn
from ringspec.cli.views import reference
from ringspec.formats import store
from ringspec.recipes import Recipe
from ringspec.truth import dense

# What it prints


def test_the_quiet_report_is_31_lines_of_eighty_columns_of_plain_ascii():
    result = call("--workers", 4, "--quiet")
    assert result.exit_code == 0 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert len(lines) <= 31 and max(map(len, lines)) <= 80
    assert result.stdout.isascii() and "\x1b" not in result.stdout
    loud = call("--workers", 4).stdout
    assert loud.startswith(result.stdout + "\nlegend:\n")
    assert max(map(len, loud.splitlines())) <= 80


def test_the_first_line_is_the_verdict():
    assert call().stdout.startswith("verdict: ring agrees with dense attention: largest error ")
    unknown = call("--compare", "none").stdout
    assert unknown.startswith("verdict: not compared with dense attention")


def test_the_schedule_is_the_table_of_the_run():
    run = rs.ring(*(drawn(0, n, (1, 2, 64, 16)) for n in "qkv"), workers=4, causal=True)
    table = [line for line in str(run).splitlines() if " x k0" in line]
    assert len(table) == 4
    assert [line for line in call("--quiet").stdout.splitlines() if " x k0" in line] == table


def test_hops_bytes_and_pairs_are_those_of_the_cost():
    data = document(*SMALL, "--layout", "zigzag", "--circulation", "q", "--batch", 2)
    q = np.zeros((2, 2, 24, 4))
    run = rs.ring(q, q, q, q, workers=3, causal=True, layout="zigzag", circulation="q")
    for shown, schedule in zip(data["passes"], (run.schedule, run.backward_schedule), strict=True):
        counted = rs.cost(run.problem, schedule, run.layout_q, run.layout_k, run.recipe)
        assert shown["hops"] == counted.hops
        assert shown["bytes_sent"] == counted.sent.sum()
        pairs = [[w["visible_pairs"] for w in step["workers"]] for step in shown["steps"]]
        sent = [[w["bytes_sent"] for w in step["workers"]] for step in shown["steps"]]
        assert np.array_equal(pairs, counted.pairs) and np.array_equal(sent, counted.sent)


@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag", "zigzag_per_document"])
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_every_worker_is_in_the_error_table(layout, circulation):
    asked = ("--workers", 5, "--length", 40, "--documents", "11,0,20", "--head-dim", 4)
    asked += ("--layout", layout, "--circulation", circulation)
    data = document(*asked)
    assert [entry["worker"] for entry in data["comparison"]["workers"]] == list(range(5))
    assert all(set(NAMES) < set(entry) for entry in data["comparison"]["workers"])
    assert data["comparison"]["within_bound"] is True
    text = call(*asked).stdout
    table = text[text.index("ring against") : text.index("legend:")].splitlines()
    assert [line.split()[0] for line in table if line.startswith("    ")] == list("01234")


COMBINATIONS = [
    (),
    ("--no-backward",),
    ("--no-causal", "--window", "5,none"),
    ("--window", 4, "--skip-masked"),
    ("--window", "none"),
    ("--softcap", 3, "--sinks", 2, "--dropout", 0.25, "--dropout-seed", 9),
    ("--dlse", "--scale", -0.7, "--circulation", "q"),
    ("--kv-length", 48, "--q-offset", 24, "--direction", -1),
    ("--documents", "5,3,8", "--kv-documents", "4,4,9", "--kv-length", 36),
    ("--heads", 6, "--kv-heads", 2, "--value-dim", 3, "--batch", 2, "--circulation", "gather"),
    ("--layout", "striped", "--seed", 2**64 - 1),
    ("--q-offset", -1000, "--sinks", 1),
    ("--q-offset", -1000),
    ("--compare", "none"),
    ("--compare", "rows"),
]


@pytest.mark.parametrize("arguments", COMBINATIONS, ids=lambda a: " ".join(map(str, a)) or "none")
def test_every_option_gives_a_document_that_fits_the_schema_and_stays_in_bound(arguments):
    data = document(*SMALL, *arguments)
    expected = None if arguments == ("--compare", "none") else True
    assert data["comparison"]["within_bound"] is expected
    assert call(*SMALL, *arguments).exit_code == 0


def test_one_number_as_a_window_is_both_of_its_sides():
    shown = [
        document("--workers", 3, "--length", 12, "--no-causal", "--window", text)
        for text in ("4", "4,4")
    ]
    assert shown[0]["problem"]["window"] == [4, 4] and shown[0] == shown[1]
    # 5 + 6 + 7 + 8 + 4 * 9 + 8 + 7 + 6 + 5 pairs of each of two heads
    assert shown[0]["passes"][0]["visible_pairs"] == 2 * 88


@pytest.mark.parametrize("name", [n for n in rs.RECIPES if n != "float64"])
def test_narrow_recipes_have_no_bound_and_say_so(name):
    data = document(*SMALL, "--recipe", name)
    assert data["comparison"]["bound"] is None and data["comparison"]["within_bound"] is None
    assert "no bound for this recipe" in " ".join(call(*SMALL, "--recipe", name).stdout.split())


def test_json_is_the_only_thing_on_stdout_and_text_says_what_errors_are_relative_to():
    result = call(*SMALL, "--json")
    assert json.loads(result.stdout) and result.stderr == ""
    assert "row scale" in json.loads(result.stdout)["comparison"]["relative_to"]
    assert "in units of the row scale" in call(*SMALL).stdout


def test_the_schema_refuses_a_document_with_an_unknown_or_missing_key():
    data = document(*SMALL)
    for broken in ({**data, "more": 1}, {k: v for k, v in data.items() if k != "comparison"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)


def test_scores_beyond_float64_are_refused(tmp_path):
    huge = {n: 1e200 * drawn(0, n, (1, 1, 6, 4)) for n in ("q", "k", "v", "dy")}
    np.savez(tmp_path / "x.npz", **huge)
    result = call("--input", tmp_path / "x.npz", "--workers", 3, "--json")
    assert result.exit_code == 2 and "float64's range" in result.stderr


def test_numbers_beyond_a_narrow_recipe_are_strings_in_json(tmp_path):
    large = {n: 1e30 * drawn(0, n, (1, 1, 6, 4)) for n in ("q", "k", "v", "dy")}
    np.savez(tmp_path / "x.npz", **large)
    result = call("--input", tmp_path / "x.npz", "--workers", 3, "--json", "--recipe", "float32")
    assert result.stderr == ""
    data = json.loads(result.stdout, parse_constant=pytest.fail)
    jsonschema.validate(data, SCHEMA)
    assert data["comparison"]["all"]["o"]["rel"] == "nan"


def test_many_workers_get_no_table_but_all_of_their_errors():
    text = call("--workers", 17, "--length", 34, "--quiet").stdout
    assert " x k0" not in text and "no table for W > 16" in text
    table = text[text.index("ring against") :].splitlines()
    first_words = [line.split()[0] for line in table if line.startswith("    ")]
    assert first_words == [str(r) for r in range(17)]


# That the errors are true


def test_shown_errors_are_those_that_the_oracles_measure_gives():
    data = document(*SMALL, "--recipe", "bf16", "--heads", 4, "--kv-heads", 2, "--dlse")
    tensors = {
        "q": drawn(0, "q", (1, 4, 24, 4)),
        "k": drawn(0, "k", (1, 2, 24, 4)),
        "v": drawn(0, "v", (1, 2, 24, 4)),
        "dy": drawn(0, "dy", (1, 4, 24, 4)),
    }
    run = rs.ring(
        **tensors, dlse=drawn(0, "dlse", (1, 4, 24)), workers=3, causal=True, recipe="bf16"
    )
    rounded = {n: store(x, "bfloat16").astype(np.float64) for n, x in tensors.items()}
    given = {**rounded, "dlse": drawn(0, "dlse", (1, 4, 24)), "causal": True}
    scale = row_scale(**given)
    want = rs.attention_backward(**given)
    forward = rs.attention(rounded["q"], rounded["k"], rounded["v"], causal=True)
    for entry in data["comparison"]["workers"]:
        worker = run.worker(entry["worker"])
        tokens = slice(8 * entry["worker"], 8 * entry["worker"] + 8)
        for name in NAMES:
            true = getattr(forward if name in ("o", "lse") else want, name)[:, :, tokens]
            got = getattr(worker, name)
            measured = worst_row_error(got, true, getattr(scale, name)[:, :, tokens])
            assert abs(entry[name]["rel"] - measured) <= 1e-6 * measured
            assert abs(entry[name]["abs"] - np.abs(got - true).max()) <= 1e-6 * measured * 100


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("error", [1e-9, np.nan])
def test_one_wrong_number_of_any_worker_is_exit_code_1(monkeypatch, name, worker, error):
    def wrong(*arguments, **options):
        run = rs.ring(*arguments, **options)
        results = list(run.workers)
        changed = getattr(results[worker], name).copy()
        changed.reshape(-1)[-1] += error
        results[worker] = dataclasses.replace(results[worker], **{name: changed})
        return dataclasses.replace(run, workers=tuple(results))

    monkeypatch.setattr(simulate, "ring", wrong)
    result = call(*SMALL)
    assert result.exit_code == 1
    assert result.stdout.startswith("verdict: ring DISAGREES with dense attention: ")
    data = json.loads(call(*SMALL, "--json").stdout)["comparison"]
    failed = [
        (entry["worker"], n)
        for entry in data["workers"]
        for n in NAMES
        if entry[n]["rel"] == "nan" or not entry[n]["rel"] <= 1e-14
    ]
    assert failed == [(worker, name)] and data["within_bound"] is False


def test_a_wrong_dsinks_is_exit_code_1(monkeypatch):
    def wrong(*arguments, **options):
        run = rs.ring(*arguments, **options)
        gradients = dataclasses.replace(run.gradients, dsinks=run.dsinks + 1e-9)
        return dataclasses.replace(run, gradients=gradients)

    monkeypatch.setattr(simulate, "ring", wrong)
    assert call(*SMALL, "--sinks", 1).exit_code == 1


def test_the_reference_sees_the_inputs_as_the_recipe_rounds_them():
    q, k, v, dy = (drawn(0, n, (1, 2, 24, 4)) for n in ("q", "k", "v", "dy"))
    run = rs.ring(q, k, v, dy, workers=3, recipe=Recipe("inputs alone", inputs="bfloat16"))
    data = reference.compare(run, dy, None, "dense")
    assert data["bound"] is None
    assert all(entry["rel"] <= 1e-14 for entry in data["all"].values())


def test_a_reference_in_parts_is_the_reference_in_one(monkeypatch):
    whole = document(*SMALL, "--sinks", 2, "--dropout", 0.3, "--documents", "10,9")
    monkeypatch.setattr(dense, "PART", 300)
    parts = document(*SMALL, "--sinks", 2, "--dropout", 0.3, "--documents", "10,9")
    assert parts["comparison"]["rows_compared"] == whole["comparison"]["rows_compared"] == 24
    for name in (*NAMES, "dsinks"):
        assert parts["comparison"]["all"][name]["rel"] <= 1e-15
        assert whole["comparison"]["all"][name]["rel"] <= 1e-15


def test_above_the_limit_some_rows_of_every_worker_are_compared_and_it_says_so(monkeypatch):
    monkeypatch.setattr(reference, "DENSE_LIMIT", 1000)
    data = document("--workers", 3, "--length", 60)["comparison"]
    assert data["method"] == "rows" and data["rows_compared"] == 24
    assert all(set(entry) == {"worker", "o", "lse", "dq"} for entry in data["workers"])
    assert (
        "dk and dv need all rows and are not compared"
        in call("--length", 60, "--workers", 3).stdout
    )
    whole = document("--length", 60, "--workers", 3, "--compare", "dense")
    assert whole["comparison"]["rows_compared"] == 60


def test_the_rows_that_are_compared_have_each_workers_first_and_last():
    q = np.zeros((1, 1, 60, 2))
    run = rs.ring(q, q, q, workers=3, layout="zigzag")
    rows = set(reference.rows_to_compare(run, "rows").tolist())
    assert all({table[0], table[-1]} <= rows for table in run.layout_q.table.tolist())


@pytest.mark.parametrize("recipe", ["float64", "float32"])
def test_the_fast_blocks_give_the_same_report_but_for_rounding(recipe):
    asked = ("--workers", 3, "--length", 48, "--layout", "zigzag", "--recipe", recipe)
    slow, quick = (document(*asked, "--blocks", blocks) for blocks in ("spec", "fast"))
    assert slow["passes"] == quick["passes"] and slow["problem"] == quick["problem"]


def test_the_fast_blocks_refuse_a_recipe_that_they_cannot_follow():
    done = call("--recipe", "bf16", "--blocks", "fast")
    assert done.exit_code == 2 and "float64 or float32 throughout" in " ".join(done.stderr.split())


def test_the_fast_blocks_have_no_limit_of_length():
    asked = (
        "--workers",
        1,
        "--length",
        9000,
        "--heads",
        1,
        "--head-dim",
        4,
        "--compare",
        "none",
        "--no-backward",
    )
    refused = call(*asked)
    assert refused.exit_code == 2 and "--blocks fast" in " ".join(refused.stderr.split())
    assert call(*asked, "--blocks", "fast").exit_code == 0
