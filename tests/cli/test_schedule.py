"""``ringspec schedule``: who holds what, counted again here pair by pair."""

import pytest
from cli.commands import call as call_any
from cli.commands import document as document_of

from ringspec.cli.views.passes import runs, then_lines, tokens_text

LAYOUTS = ("contiguous", "striped", "zigzag", "zigzag_per_document")
SMALL = ("--workers", 3, "--length", 12, "--heads", 1)


def call(*arguments):
    return call_any(*arguments, command="schedule")


def document(*arguments, command="schedule"):
    return document_of(*arguments, command=command)


def sees(offset, i, j, n_q, n_k):
    """Whether the causal offset of two blocks lets local query i see local key j."""
    if isinstance(offset, int):
        return j <= i + offset
    half_q, half_k = n_q // 2, n_k // 2
    return j % half_k <= i % half_q + offset[i // half_q][j // half_k]


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "extra", [(), ("--kv-length", 24, "--q-offset", 7), ("--q-offset", -3), ("--direction", -1)]
)
def test_pairs_and_offsets_are_those_of_the_positions(layout, circulation, extra):
    documents = ("--documents", "12") if layout == "zigzag_per_document" else ()
    if documents and "--kv-length" in extra:
        documents += ("--kv-documents", "24")
    data = document(*SMALL, "--layout", layout, "--circulation", circulation, *extra, *documents)
    held_q, held_k = data["layout"]["queries"], data["layout"]["keys"]
    shift = data["problem"]["q_offset"]
    for one_pass in data["passes"]:
        met = []
        for step in one_pass["steps"]:
            for worker in step["workers"]:
                a, b = worker["query_owner"], worker["key_owner"]
                if a is None:
                    assert worker["visible_pairs"] == 0 and worker["cp_offset"] is None
                    continue
                met.append((a, b))
                visible = [
                    (i, j)
                    for i, query in enumerate(held_q[a])
                    for j, key in enumerate(held_k[b])
                    if query >= 0 and key >= 0 and key <= query + shift
                ]
                assert worker["visible_pairs"] == len(visible)
                offset, n_q, n_k = worker["cp_offset"], len(held_q[a]), len(held_k[b])
                if layout == "zigzag_per_document":
                    assert offset is None
                    continue
                derived = [
                    (i, j) for i in range(n_q) for j in range(n_k) if sees(offset, i, j, n_q, n_k)
                ]
                assert derived == visible
        assert sorted(met) == [(a, b) for a in range(3) for b in range(3)]


def test_pairs_are_counted_over_batches_and_query_heads():
    one = document("--workers", 3)["passes"][0]  # 2 heads
    more = document("--workers", 3, "--batch", 5, "--heads", 8)["passes"][0]
    assert more["visible_pairs"] == one["visible_pairs"] * 5 * 4


@pytest.mark.parametrize("circulation", ["kv", "q", "gather"])
@pytest.mark.parametrize("recipe", ["float64", "bf16"])
def test_the_passes_are_those_that_simulate_ran(circulation, recipe):
    asked = (*SMALL, "--circulation", circulation, "--layout", "striped", "--recipe", recipe)
    asked += ("--window", "3,none", "--documents", "7,4")
    planned, done = document(*asked), document(*asked, command="simulate")
    assert planned["passes"] == done["passes"]
    assert planned["layout"] == done["layout"]
    assert planned["problem"] == done["problem"]


def test_skipped_pairs_are_declared_and_not_computed():
    data = document(*SMALL, "--skip-masked")
    for one_pass in data["passes"]:
        assert one_pass["skipped"] == [[0, 1], [0, 2], [1, 2]]
        met = {(w["query_owner"], w["key_owner"]) for s in one_pass["steps"] for w in s["workers"]}
        assert met == {(a, b) for a in range(3) for b in range(a + 1)} | {(None, None)}


def test_imbalance_is_the_busiest_worker_over_the_mean():
    data = document("--workers", 4, "--length", 64)["passes"][0]
    work = [sum(step["workers"][r]["visible_pairs"] for step in data["steps"]) for r in range(4)]
    assert abs(data["imbalance"] - 4 * max(work) / sum(work)) <= 1e-15
    assert document("--workers", 4, "--layout", "zigzag")["passes"][0]["imbalance"] == 1.0


def test_no_memory_is_taken_for_tensors():
    data = document(*SMALL, "--batch", 2**20, "--head-dim", 2**20)
    assert data["passes"][0]["visible_pairs"] == 78 * 2**20


def test_without_causality_there_is_no_offset():
    data = document(*SMALL, "--no-causal")
    assert all(w["cp_offset"] is None for s in data["passes"][0]["steps"] for w in s["workers"])
    assert "cp_offset" not in call(*SMALL, "--no-causal").stdout
    assert "cp_offset" in call(*SMALL).stdout


def test_text_is_plain_and_shows_tokens_table_and_offsets():
    for layout in LAYOUTS:
        result = call("--workers", 4, "--layout", layout, "--documents", "40,24", "--length", 64)
        assert result.exit_code == 0 and result.stdout.isascii() and "\x1b" not in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 100
        assert "worker  tokens" in result.stdout and "q3 x k0" in result.stdout
    assert "no table for W > 16" in call("--workers", 17).stdout


def test_steps_after_which_the_same_travels_are_named_by_the_first_and_the_last():
    steps = [{"then": name, "transfers": [name]} for name in ("k", "v", "v", "v", "dk")]
    steps += [{"then": "nothing", "transfers": []}] * 2
    assert then_lines(steps) == ["after step 0: k", "after steps 1 to 3: v", "after step 4: dk"]
    text = call("--workers", 5, "--circulation", "q").stdout
    assert "after steps 0 to 3: q dy lse row_term rows dq dbias" in text
    assert "after step 4: dq dbias" in text


def test_tokens_in_words_name_every_token():
    assert tokens_text([3]) == "3"
    assert tokens_text([3, 9]) == "3, 9"
    assert tokens_text([0, 1, 2, 9, 8]) == "0..2, 9, 8"
    assert tokens_text([-1, -1]) == "and 2 padding slots"
    assert tokens_text([0, 5, 1, 9, 2, 8, 3, 4]) == "0, 5, 1, 9, 2, 8, 3..4"
    assert tokens_text([0, 5, 1, 9, 2, 8, 3, 7, 12]).endswith("... (9 tokens)")
    assert runs([0, 1, 2, 9]) == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("--workers", 0), "W >= 1"),
        (("--layout", "zig-zag"), "write 'zigzag'"),
        (("--length", 10), "S divisible"),
        (("--length", 2**20), "smaller lengths"),
        (("--length", 2**14, "--workers", 1), "one block"),
        (("--heads", 2**30), "fewer heads"),
        (("--heads", 3, "--kv-heads", 2), "multiple"),
        (("--window", "-1"), "window"),
        (("--circulation", "k"), "write 'kv'"),
        (("--seed", 1), "No such option"),
    ],
)
def test_bad_input_is_one_paragraph_and_exit_code_2(arguments, says):
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert says in result.stderr.rpartition("Error: ")[2]
