"""``ringspec explore``: the file it writes, what it refuses, and that its records are those of a run."""

import json
import os

import numpy as np
import pytest
from cli.commands import assert_one_paragraph
from cli.commands import call as call_any

import ringspec as rs
from ringspec.cli.shared.inputs import drawn
from ringspec.cli.views import explore_bug
from ringspec.cli.views.bug_record import recorded
from ringspec.cli.views.explore_bug import bug_records
from ringspec.cli.views.explore_records import (
    HEAD_DIM,
    PASSES,
    masks,
    one_run,
    records,
    traces_of,
    travel,
)
from ringspec.conformance.diagnose.mutants.hooks import Hooks

SMALL = ("--workers", "2", "--tokens", "8")


def call(*arguments):
    return call_any(*arguments, command="explore")


@pytest.fixture(scope="module")
def three():
    return records(workers=(3,), tokens=12, seed=5)


def test_the_page_holds_the_records_that_json_prints(tmp_path):
    path = tmp_path / "ring.html"
    result = call("-o", path, "--json", *SMALL)
    assert result.exit_code == 0, result.output
    inside = path.read_text(encoding="utf-8").split('id="records">', 1)[1].split("</script>", 1)[0]
    assert json.loads(inside) == json.loads(result.stdout)
    assert os.listdir(tmp_path) == ["ring.html"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_it_says_what_it_wrote(tmp_path):
    result = call("-o", tmp_path / "ring.html", *SMALL, "--workers", "1,2")
    # 2 sizes, 3 layouts, 4 masks, 3 circulations
    assert result.exit_code == 0 and "72 rings" in result.stdout


@pytest.mark.parametrize(
    "arguments,says",
    [
        ((), "--output"),
        (("--json", "--workers", "9"), "from 1 to 8"),
        (("--json", "--workers", "0"), "from 1 to 8"),
        (("--json", "--workers", "2,x"), "2,3,4,8"),
        (("--json", "--tokens", "49"), "from 1 to 48"),
        (("--json", "--tokens", "0"), "from 1 to 48"),
        (("--json", "--tokens", "7", "--workers", "2"), "multiple of 2W"),
        (("--json", "--seed", "-1"), "--seed"),
        (("--json", "--bug", "stale-key"), "write 'stale-keys'"),
        (("--json", "--bug", "stale-keys", "--workers", "2,4"), "one ring size"),
        (("--json", "--bug", "stale-keys", "--workers", "9"), "from 1 to 8"),
        (("--json", "--bug", "sink-dropped"), "changes no number"),
    ],
)
def test_bad_input_is_refused_in_one_paragraph(arguments, says):
    assert_one_paragraph(call(*arguments), says)


def test_a_missing_folder_is_refused_before_any_ring_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr("ringspec.cli.commands.explore.records", None)
    assert_one_paragraph(call("-o", tmp_path / "none" / "ring.html"), "no such folder")
    assert_one_paragraph(call("-o", tmp_path), "directory")
    assert os.listdir(tmp_path) == []


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "ring.html"
    path.write_text("old", encoding="utf-8")

    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr("ringspec.tensorfile.os.replace", fails)
    assert_one_paragraph(call("-o", path, *SMALL), "no space left")
    assert path.read_text(encoding="utf-8") == "old" and os.listdir(tmp_path) == ["ring.html"]


def test_a_layout_that_cannot_deal_the_tokens_is_named_with_its_reason():
    document = records(workers=(3,), tokens=9)
    assert set(document["missing"]) == {"3/zigzag"}
    assert "divisible by 2W = 6" in document["missing"]["3/zigzag"]
    assert set(document["tables"]) == {"3/contiguous", "3/striped"}


def numbers_of(document, differences):
    """The rows of numbers at each stop, token by token."""
    return [
        [document["numbers"][place] for place in np.cumsum(document["traces"][trace])]
        for trace in np.cumsum(differences)
    ]


@pytest.mark.parametrize("mask", masks(12))
@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_the_records_end_with_what_attention_gives(three, layout, circulation, mask):
    q, k, v, dy = (drawn(5, n, (1, 1, 12, HEAD_DIM)) for n in ("q", "k", "v", "dy"))
    options = masks(12)[mask][1]
    forward = rs.attention(q, k, v, **options)
    o, lse = forward.o, forward.lse
    gradients = rs.attention_backward(q, k, v, dy, **options)
    both = three["runs"][f"3/{layout}/{mask}/{circulation}"]
    for phase, name, expected in (
        ("forward", "softmax", np.concatenate((lse[0, 0, :, None], o[0, 0]), axis=1)),
        ("backward", "dq", gradients.dq[0, 0]),
        ("backward", "dk", gradients.dk[0, 0]),
    ):
        ends = [trace[-1] for trace in numbers_of(three, both[phase]["traces"][name])]
        assert np.abs(np.array(ends) * 1e-4 - expected).max() <= 0.5e-4 + 1e-12
    visible = np.array([[int(x) for x in row] for row in three["visible"][mask]])
    assert np.sum(both["forward"]["pairs"]) == np.sum(both["backward"]["pairs"]) == visible.sum()


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
def test_who_holds_what_depends_on_neither_layout_nor_mask(three, circulation):
    for layout, mask in (("striped", "documents"), ("zigzag", "none")):
        run = one_run(3, layout, mask, circulation, 12, 5)
        for phase in ("forward", "backward"):
            assert travel(run, phase) == three["travels"][f"3/{circulation}/{phase}"]


def test_what_a_row_has_not_seen_is_none_and_not_a_number(three):
    run = three["runs"]["3/contiguous/causal/gather"]["forward"]
    assert numbers_of(three, run["traces"]["softmax"])[7][0] == [None, 0, None, 0, 0, 0, 0]


def test_every_gradient_is_at_its_owner_at_the_end(three):
    for name in ("3/kv/backward", "3/q/backward", "3/gather/backward"):
        for worker, blocks in enumerate(three["travels"][name]["stops"][-1]):
            owners = {
                n: owner for owner, *names in blocks for n in names if n in ("dq", "dk", "dv")
            }
            assert owners == {"dq": worker, "dk": worker, "dv": worker}, name


@pytest.mark.parametrize("mask", masks(12))
@pytest.mark.parametrize("circulation", ["kv", "q"])
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
def test_without_a_bug_the_recorded_pieces_are_those_of_the_ring(layout, mask, circulation):
    given = (3, layout, mask, circulation, 12, 5)
    run = one_run(*given)
    table = run.layout_q.table.tolist()
    record = recorded(explore_bug.call_of_ring(*given), Hooks())
    for phase in PASSES:
        right = travel(run, phase)
        told = explore_bug.wrong_travel(record, phase, right)
        assert told["stops"] == right["stops"] and told["meets"] == right["meets"]
        assert pairs_sent(told) == pairs_sent(right)
        assert explore_bug.wrong_traces(record, phase, table) == traces_of(run)[phase]
        pairs = run.cost(phase).pairs
        assert (explore_bug.work(record, phase, 3).pairs == pairs).all()
        ones = [["".join(rows).count("1") for rows in step] for step in told["seen"]]
        assert ones == pairs.tolist()


def pairs_sent(of_pass):
    return [[sorted(map(list, one["pairs"])) for one in step] for step in of_pass["sends"]]


def test_dk_that_stops_one_hop_short_is_that_of_the_next_worker():
    document = bug_records("dkv-not-home", 4, 8, 0)
    right = document["runs"]["4/contiguous/causal/kv"]["backward"]["traces"]["dk"]
    right_ends = [trace[-1] for trace in numbers_of(document, right)]
    wrong = document["wrong"]["backward"]["traces"]["dk"]
    wrong_ends = [trace[-1] for trace in numbers_of(document, wrong)]
    assert wrong_ends == right_ends[2:] + right_ends[:2]
    end = document["wrong"]["backward"]["stops"][-1]
    assert [[1, "dk", "dv"] in end[0], [0, "dk", "dv"] in end[3]] == [True, True]
    assert document["bug"]["places"] == [{"pass": "backward", "step": 4, "row": 4}]


def test_values_that_are_late_are_those_of_the_previous_visitor():
    wrong = bug_records("values-one-step-late", 4, 8, 0)["wrong"]["forward"]
    assert wrong["stops"][0][2] == [[2, "q", "m", "l", "o"], [2, "k", "v"]]
    assert wrong["stops"][1][2] == [[2, "q", "m", "l", "o"], [1, "k"], [2, "v"]]


def test_pairs_of_a_wrong_mask_are_those_that_it_lets_through():
    wrong = bug_records("diagonal-inclusive", 2, 8, 0)["wrong"]["forward"]
    assert wrong["seen"][0] == [["1100", "1110", "1111", "1111"]] * 2
    assert wrong["pairs"][0] == [13, 13]


def test_a_page_of_a_bug_names_it_and_its_ring(tmp_path):
    path = tmp_path / "bug.html"
    result = call("--bug", "stale-queries", "-o", path, "--tokens", 8)
    assert result.exit_code == 0 and "stale-queries in 4/contiguous/causal/q" in result.stdout
    assert "Known bug: stale-queries" in path.read_text(encoding="utf-8")


def test_a_page_of_schemes_offers_those_that_were_asked_for(tmp_path):
    path = tmp_path / "schemes.html"
    result = call("--scheme", "usp,dcp", "-o", path, "--tokens", 8)
    assert result.exit_code == 0 and "2 schemes" in " ".join(result.stdout.split())
    text = path.read_text(encoding="utf-8")
    assert 'value="usp"' in text and 'value="dcp"' in text and 'value="ulysses"' not in text
    result = call("--scheme", "usp", "--mesh", "ulysses=2,ring=3", "--tokens", 24, "--json")
    assert json.loads(result.stdout)["schemes"]["usp"]["mesh"] == [["ulysses", 2], ["ring", 3]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--scheme", "uylsses"), "write 'ulysses'"),
        (("--mesh", "ring=2"), "Fix: add --scheme ring."),
        (
            ("--scheme", "usp", "--workers", "4"),
            "leave out --workers; give the ranks as --mesh ring=2,ulysses=2",
        ),
        (("--scheme", "usp,ring", "--workers", "4"), "Fix: leave out --workers."),
        (("--scheme", "usp", "--mesh", "ring"), "as ring=2,ulysses=4"),
        (("--scheme", "usp", "--mesh", "ring=0,ulysses=2"), "sizes above 0"),
        (("--mesh", "dcp=2"), "Fix: add --scheme dcp."),
        (("--scheme", "ring", "--bug", "stale-keys"), "Fix: leave out --bug."),
        (("--scheme", "usp", "--mesh", "ring=2,ulysses=3"), "Fix: write --mesh ring=2,ulysses=2."),
        (("--scheme", "usp", "--mesh", "ring=8,ulysses=2"), "got 16: ring 8 x ulysses 2"),
        (("--scheme", "ring", "--mesh", "ring=5"), "Fix: choose --tokens 40."),
        (("--scheme", "ring", "--mesh", "ring=7"), "Fix: choose fewer ranks, as --mesh ring=4."),
        (("--scheme", "joint", "--mesh", "ring=3,ulysses=2"), "Fix: choose --tokens 32."),
    ],
)
def test_options_of_schemes_that_do_not_fit_are_refused(arguments, words):
    result = call(*arguments, "--json")
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


def test_gradients_that_travel_the_other_way_keep_their_owner():
    stops = bug_records("ring-direction", 5, 10, 0)["wrong"]["backward"]["stops"]
    assert stops[1][0][1:] == [[4, "k", "v"], [1, "dk", "dv"]]
    assert stops[3][0][1:] == [[2, "k", "v"], [3, "dk", "dv"]]
