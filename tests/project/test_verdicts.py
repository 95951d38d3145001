"""The matrix of verdicts says what the stored reports show, and calls nothing wrong that nobody has confirmed."""

import dataclasses
import doctest
import json
import re
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from conformance.report.reports import HOSTILE, findings, needs, report

from ringspec.conformance.diagnose.mutants import MUTANTS
from ringspec.conformance.report.records import FAILURES, Finding, Record
from ringspec.render.verdicts import verdicts_page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import verdict_cells  # noqa: E402
import verdict_rows  # noqa: E402
import verdicts  # noqa: E402

FEED = json.loads(verdicts.STORED.read_text(encoding="utf-8"))
FACTS = verdict_rows.read_facts()
FACT = {
    "target": "haoliuhl",
    "versions": {"ringattention": ["0.1.2"]},
    "tensors": ["dk", "dv"],
    "workers_from": 3,
    "inputs": ["float32"],
    "bug": "stale-keys",
    "text": "stale",
    "hand_check": "tests/conformance/targets/by_hand_zhuzilin.py",
}
VERSIONS = {"versions": {"ringattention": "0.1.2+cpu", "jax": "0.10", "ringspec": "0.1.0"}}


@pytest.fixture(scope="module")
def smallest():
    """The smallest stored report, by its name."""
    path = min(verdicts.REPORTS.iterdir(), key=lambda one: one.stat().st_size)
    return verdicts.stored_reports(only=path.name.removesuffix(verdicts.SUFFIX))


def failing(id="ring/a", tensors=("dk",), **changes):
    wrong = [
        Finding(name, 0, "beyond bound", 9.0, (0, 0, 0, 0), 1.0, 0.0, 1, 4) for name in tensors
    ]
    asked = needs(inputs="float32") | changes
    return Record(id, "mismatch", asked, findings=findings(wrong, asked["workers"]))


def row(*records, facts=None, cases=None, complete=True, **header):
    whole = {"cases": {"profile": len(records) if cases is None else cases}}
    made = report(records, complete, "haoliuhl", **VERSIONS | whole | header)
    return verdict_rows.row_of(made, {"wrong": [FACT]} if facts is None else facts)


def verdict(found, column):
    return found["cells"][column]["verdict"]


def passing(id="ring/p", **changes):
    return Record(id, "pass", needs(inputs="float32") | changes)


@pytest.mark.parametrize("module", [verdicts, verdict_rows, verdict_cells])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.slow
def test_the_feed_is_made_of_the_stored_reports():
    made = verdicts.feed_of(verdicts.stored_reports().values(), FACTS)
    assert json.loads(verdicts.as_text(made)) == FEED


def test_a_row_is_made_of_its_stored_report_which_names_no_path_of_a_machine(smallest):
    ((id, stored),) = smallest.items()
    (want,) = [one for one in FEED["rows"] if one["id"] == id]
    assert json.loads(verdicts.as_text(verdict_rows.row_of(stored, FACTS))) == want
    assert "files" not in stored.header and not verdicts.PATH.search(verdicts.published(stored))


def test_the_tables_are_made_of_the_feed():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "conform" / "verdicts.md").read_text(encoding="utf-8")
    assert verdicts.front_table(FEED["rows"]) in readme and "docs/conform/verdicts.md" in readme
    assert verdicts.table(FEED["rows"]) in page


def test_the_feed_fits_its_schema_and_the_ids_of_its_rows_are_unique():
    jsonschema.validate(FEED, json.loads(verdicts.SCHEMA.read_text(encoding="utf-8")))
    ids = [one["id"] for one in FEED["rows"]]
    assert len(ids) == len(set(ids))
    files = {path.name.removesuffix(verdicts.SUFFIX) for path in verdicts.REPORTS.iterdir()}
    assert {one["id"] for one in FEED["rows"] if one["report"]} == files


def test_every_row_has_a_command_that_this_version_knows_and_files_that_exist():
    with open(ROOT / "pyproject.toml", "rb") as file:
        registered = tomllib.load(file)["project"]["entry-points"]["ringspec.targets"]
    for one in FEED["rows"]:
        if "command" in FACTS["target"].get(
            one["target"], {}
        ):  # no target exists, and the row says why
            assert one["target"] not in registered and not one["date"] and one["cut"]
            continue
        assert one["target"] in registered
        assert one["command"].startswith(f"ringspec check {one['target']}")
        for path in [one["install"], *re.findall(r"--expected-failures (\S+)", one["command"])]:
            assert path is None or (ROOT / path).is_file(), path


def test_what_is_called_wrong_has_a_program_without_ringspec_that_confirms_it():
    for fact in FACTS["wrong"]:
        check = ROOT / fact["hand_check"]
        assert re.fullmatch(r"by_hand_\w+\.py", check.name) and check.is_file()
        assert not re.search(r"^\s*(from|import) ringspec", check.read_text("utf-8"), re.M)
        assert fact.get("bug") is None or fact["bug"] in MUTANTS
        assert fact["target"] in FACTS["target"]
    for one in FEED["rows"]:
        told = {name for cell in one["cells"].values() for name in cell["counts"]}
        if not one["date"]:
            assert told == set()
            continue
        assert ("wrong" in told) == any(fact["cases"] for fact in one.get("wrong", ())), one["id"]
        assert ("failed" in told) == bool(one.get("unchecked")), one["id"]


def test_a_reproducer_is_a_short_program_without_ringspec_with_a_text_for_an_issue_beside_it():
    told = [one["reproducer"] for one in FACTS["wrong"] if "reproducer" in one]
    files = {f"reproducers/{path.name}" for path in verdicts.REPRODUCERS.glob("*.py")}
    assert set(told) == files  # several targets may have the same fault
    for name in told:
        path = verdicts.REPRODUCERS.parent / name
        program, text = path.read_text("utf-8"), path.with_suffix(".md").read_text("utf-8")
        assert len(program.splitlines()) <= 100, name
        assert "ringspec" not in program + text, name
        assert "sys.exit(1 if wrong else 0)" in program and path.name in text, name


def test_the_pages_link_to_the_reproducers_and_have_them(tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "stored_reports", dict)
    (tmp_path / "reproducers").mkdir()
    verdicts.pages(tmp_path)
    page = (tmp_path / "matrix.html").read_text("utf-8")
    for fact in FACTS["wrong"]:
        if "reproducer" in fact:
            for link in (fact["reproducer"], fact["reproducer"].replace(".py", ".md")):
                assert f'href="{link}"' in page and (tmp_path / link).is_file(), link


def test_a_confirmed_failure_is_wrong_in_every_column_that_its_case_uses():
    found = row(failing(), passing(passes=["forward"], workers=2))
    for column in ("backward", "w3", "zigzag", "causal", "float32"):
        assert verdict(found, column) == "wrong", column
    assert (verdict(found, "forward"), verdict(found, "w2")) == ("passed", "passed")
    assert (found["unchecked"], found["wrong"][0]["cases"]) == (0, 1)
    assert found["badge"]["color"] == "red"


def test_a_property_counts_as_a_case_with_the_workers_of_its_largest_ring():
    def unchecked(workers):
        failed = failing("property/rings/a", workers=1)
        asked = {name: value for name, value in failed.needs.items() if name != "workers"}
        return row(dataclasses.replace(failed, needs=asked, used={"workers": workers}))["unchecked"]

    assert (unchecked([1, 2, 3]), unchecked([1, 2]), unchecked([])) == (0, 1, 1)


@pytest.mark.parametrize(
    "record",
    [
        failing(tensors=("dk", "o")),
        failing(workers=2),
        failing(inputs="bfloat16"),
        failing("noise/a"),
        Record("ring/a", "mismatch", needs(inputs="float32"), message="no tensor is named"),
        *(Record("ring/a", one, needs(inputs="float32")) for one in FAILURES if one != "mismatch"),
    ],
    ids=lambda one: f"{one.id}-{one.outcome}-{len(one.findings)}",
)
def test_a_failure_that_the_hand_check_does_not_cover_is_never_called_wrong(record):
    found = row(record)
    told = {name for cell in found["cells"].values() for name in cell["counts"]}
    assert "failed" in told and "wrong" not in told and found["unchecked"] == 1
    assert found["badge"]["color"] == "orange" and "1 not yet checked" in found["badge"]["message"]


@pytest.mark.parametrize(
    ("listed", "alarms", "unchecked"),
    [
        (["noise/a"], ["dk, all: an error"], 0),
        (["noise/a"], [], 0),
        (["noise/a"], ["dk, all: an error", "o, all: an error"], 1),
        (["noise/b"], ["dk, all: an error"], 1),
    ],
)
def test_a_noise_case_is_wrong_only_if_the_hand_check_repeats_it_and_no_other_tensor_is_noisy(
    listed, alarms, unchecked
):
    noisy = dataclasses.replace(failing("noise/a"), noise={"alarms": alarms})
    assert row(noisy, facts={"wrong": [FACT | {"noise": listed}]})["unchecked"] == unchecked
    only_noisy = dataclasses.replace(noisy, findings=())
    found = row(only_noisy, facts={"wrong": [FACT | {"noise": listed}]})
    assert found["unchecked"] == (unchecked or not alarms)


@pytest.mark.parametrize(
    ("fact", "masks", "explained"),
    [
        ({"masks": ["window"]}, ["window"], True),
        ({"masks": ["window"]}, ["causal"], False),
        ({"masks": ["window"], "without_masks": ["causal"]}, ["causal", "window"], False),
        ({"masks": ["window", "documents"]}, ["window"], False),
    ],
)
def test_a_fact_about_masks_explains_only_cases_that_have_them(fact, masks, explained):
    record = failing(masks=masks)
    fact = {"tensors": ["dk", "dv"]} | fact
    assert verdict_rows.explains(fact, record) == explained


@pytest.mark.parametrize("version", ["0.1.1", "0.1.20", "0.1.2.post1", ""])
def test_a_hand_check_holds_for_its_own_versions_only(version):
    found = row(failing(), versions={"ringattention": version, "ringspec": "0.1.0"})
    assert verdict(found, "backward") == "failed" and found["wrong"] == []


def test_wrong_gradients_leave_the_column_forward_as_it_is():
    found = row(failing(tensors=("dk", "dv")))
    assert (verdict(found, "forward"), verdict(found, "backward")) == ("passed", "wrong")


def test_noise_counts_only_in_the_column_rounding():
    found = row(failing("noise/causal"), passing())
    assert verdict(found, "rounding") == "failed"
    assert all(verdict(found, one) == "passed" for one in ("forward", "backward", "causal", "w3"))


def test_a_case_that_is_not_claimed_is_never_passed_and_says_why():
    skipped = Record("ring/b", "not claimed", needs(masks=["window"]), "mask window")
    found = row(passing(), skipped)
    cell = found["cells"]["window"]
    assert (cell["verdict"], cell["why"], cell["counts"]) == (
        "not claimed",
        "mask window",
        {"not claimed": 1},
    )
    assert verdict(found, "sinks") == "not run"


def test_a_case_without_a_number_of_workers_is_no_case_of_one_worker():
    merged = Record("merge/a", "pass", {"operation": "merge", "passes": ["forward"]})
    block = Record("block/a", "pass", {"operation": "block", "passes": ["forward"]})
    found = row(merged, block)
    assert [verdict(found, one) for one in ("w1", "full", "forward")] == [
        "not run",
        "not run",
        "passed",
    ]


def test_expected_failures_are_known_failures_with_their_reason():
    found = row(Record("ring/a", "expected failure", needs(), "issue 12"), passing())
    assert verdict(found, "causal") == "known failure"
    assert found["known_failures"] == ["issue 12"]


def test_an_interrupted_report_and_a_part_of_a_profile_are_marked():
    interrupted = row(passing(), complete=False)
    assert interrupted["cut"] == "the run was interrupted"
    assert interrupted["badge"]["message"].startswith("incomplete")
    part = row(passing(), cases=2)
    assert part["cut"] == "the run had only a part of the profile core"
    assert part["cells"]["sinks"] == {"verdict": "not run", "counts": {}, "why": part["cut"]}
    assert row(passing())["cut"] == ""


def test_a_target_that_is_not_listed_is_taken_with_what_its_report_says():
    made = report([passing()], spec="mine.py:ring", **VERSIONS | {"cases": {"profile": 1}})
    found = verdict_rows.row_of(made, {})
    assert (found["target"], found["title"], found["link"]) == ("mine.py:ring", "my kernel", None)
    assert found["id"] == "mine.py-ring-0.1.2-cpu"
    feed = verdicts.feed_of([made], {})
    jsonschema.validate(feed, json.loads(verdicts.SCHEMA.read_text(encoding="utf-8")))


def hostile_feed():
    bad = Record(HOSTILE, "mismatch", needs(), HOSTILE, HOSTILE)
    skipped = Record("b", "not claimed", needs(masks=["window"]), HOSTILE)
    target = {"target": {"name": HOSTILE, "spec": f"../../{HOSTILE}", "notes": [HOSTILE]}}
    versions = {"versions": {"torch": HOSTILE, HOSTILE: "1", "ringspec": HOSTILE}}
    made = report([bad, skipped], **target | versions | {"profile": HOSTILE})
    return verdicts.feed_of([made], {})


def test_a_hostile_report_cannot_add_markup_scripts_or_paths():
    feed = hostile_feed()
    page = verdicts_page(feed)
    assert page.count("<script>") == 1 and "<img" not in page
    assert "\x00" not in page and "\x1b" not in page
    (one,) = feed["rows"]
    assert re.fullmatch(r"[\w.-]+", one["id"]) and ".." not in one["id"].split("-")
    for text in (verdicts.table(feed["rows"]), verdicts.linked(one)):
        assert "<script" not in text and "<img" not in text
        assert "\x00" not in text and len(text.splitlines()) <= 3


def test_links_lead_only_to_https_and_to_files_beside_the_page():
    feed = hostile_feed()
    for address in ("javascript:alert(1)", "http://x", "//x/y", "../x", "data:text/html,x"):
        feed["rows"][0]["link"] = feed["rows"][0]["report_page"] = address
        page = verdicts_page(feed)
        assert f'href="{address}"' not in page, address


def test_the_page_loads_nothing_and_the_legend_explains_every_verdict():
    page = verdicts_page(FEED)
    assert not re.search(r'(src|action)="|url\(|@import', page)
    assert "default-src &#39;none&#39;" in page
    text = (ROOT / "docs" / "conform" / "verdicts.md").read_text(encoding="utf-8")
    for name, words in verdict_cells.VERDICTS.items():
        assert f"| {name} | {words} |" in text
    used = {cell["verdict"] for one in FEED["rows"] for cell in one["cells"].values()}
    assert used <= set(verdict_cells.VERDICTS)


def test_the_pages_have_a_badge_and_a_report_for_every_row(tmp_path, monkeypatch, smallest):
    monkeypatch.setattr(verdicts, "stored_reports", lambda: smallest)
    verdicts.pages(tmp_path)
    for one in FEED["rows"]:
        if one["report"]:
            assert json.loads((tmp_path / one["badge_file"]).read_text()) == one["badge"]
        if one["id"] in smallest:
            assert (tmp_path / one["report_page"]).is_file() and (
                tmp_path / one["report"]
            ).is_file()


def test_a_report_is_stored_without_paths_and_reads_back(tmp_path, monkeypatch):
    place = "/" + "home/someone/env/lib/torch/__init__.py"
    broken = Record("ring/x", "error", needs(), message=f"File {place}, line 3")
    head = VERSIONS | {"files": {"torch": place}, "cases": {"profile": 2}}
    made = report([passing(), broken], spec="haoliuhl", **head)
    path = verdicts.store(made, FACTS, tmp_path)
    (back,) = verdicts.stored_reports(tmp_path).values()
    assert path.name == "haoliuhl-0.1.2-cpu.jsonl.xz"
    assert [one.outcome for one in back.records] == ["pass", "error"]
    assert "someone" not in verdicts.published(back) and "files" not in back.header


def test_the_picture_of_the_readme_is_the_one_that_its_program_draws():
    import picture

    stored = ROOT / "docs" / "images" / "ring.svg"
    assert picture.draw() == stored.read_text(encoding="utf-8")
    assert stored.stat().st_size < 300_000
    assert "docs/images/ring.svg" in (ROOT / "README.md").read_text(encoding="utf-8")
