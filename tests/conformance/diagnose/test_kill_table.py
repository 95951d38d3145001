"""The program that runs all of core against all mutants: what it writes, and that it goes on."""

import json
import re

from benchmarks import kill_table
from benchmarks.rivals import RULES

MUTANTS = ["stale-keys", "ring-direction", "truncated-p"]
ID = "ring/contiguous-w2"


def test_a_case_says_which_mutants_it_kills_and_which_do_not_apply():
    line = kill_table.killed("bf16", ID, MUTANTS)
    assert line["applied"] == ["stale-keys", "truncated-p"]
    assert line["kills"].keys() == {"stale-keys"}
    assert line["kills"]["stale-keys"]["outcome"] == "mismatch"
    assert "dq beyond bound" in line["kills"]["stale-keys"]["kinds"]


def test_rivals_see_the_right_program_as_well():
    line = kill_table.rivals("float32", ID, MUTANTS)
    assert line["applied"] == ["right", "stale-keys", "truncated-p"]
    assert line["passes"]["max-1e-2"] == ["right", "truncated-p"]
    assert set(line["passes"]) == {rule.name for rule in RULES}


def test_rules_with_a_naive_implementation_say_nothing_where_there_is_none():
    line = kill_table.rivals("bf16", "ring/sink-w3", ["sink-dropped"])
    assert set(line["passes"]) == {"max-1e-2", "max-2e-2", "assert_close"}


def test_a_plain_problem_has_four_workers():
    call = kill_table.plain_call("bf16", "striped", 64)
    assert (call.workers, call.worker("q", 0).shape, call.layout) == (4, (1, 2, 16, 64), "striped")


def test_an_interrupted_run_is_gone_on_with(tmp_path, capsys):
    path = tmp_path / "kills.jsonl"
    kill_table.fill(path, 1, MUTANTS, ID, 64)
    whole = path.read_text()
    lines = kill_table.read(path)
    assert [line["what"] for line in lines].count("case") == 2  # one for each recipe
    path.write_text(whole[:-20])  # the last line is cut
    kill_table.fill(path, 1, MUTANTS, ID, 64)
    again = kill_table.read(path)
    assert sorted((x["what"], x["recipe"], x["id"]) for x in again) == sorted(
        (x["what"], x["recipe"], x["id"]) for x in lines
    )
    table = kill_table.table(again)
    assert "| stale-keys | bf16 | 1 of 1 | `ring/contiguous-w2` |" in table
    assert "| truncated-p | float32 | 0 of 1 | none |" in table
    families = re.findall(r"<summary>(.*)</summary>", table)
    assert families == ["travel: 1 bug", "schedule: 1 bug", "precision: 1 bug"]
    assert json.loads(path.read_text().splitlines()[0])["mutants"] == MUTANTS
