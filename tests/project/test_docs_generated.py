"""The pages that docs/ makes from the code: rules, known bugs and their pictures, decisions, links."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ringspec.conformance.diagnose.mutants import MUTANTS, precision_bugs
from ringspec.spec.rules import RULES
from ringspec.vectors import open_set

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = {"generated", "_build", "_extra"}
PAGES = sorted(path for path in DOCS.rglob("*.md") if not GENERATED & set(path.parts))
MARKDOWN = [*PAGES, DOCS.parent / "README.md"]
drawn = pytest.mark.notebook


@pytest.fixture(scope="module")
def module_of():
    """A module of docs/ by its name; conf.py puts the folder on the path likewise."""
    sys.path.insert(0, str(DOCS))
    yield importlib.import_module
    sys.path.remove(str(DOCS))


# --- rules ------------------------------------------------------------------------------------


def test_every_rule_has_a_formula_or_says_why_not(module_of):
    formulas = module_of("formulas").FORMULAS
    assert list(formulas) == [rule.id for rule in RULES]
    assert all(one.lines or one.where for one in formulas.values())
    assert [id for id, one in formulas.items() if not one.lines] == ["RING-6", "NUM-2"]


@drawn
def test_every_formula_is_read_by_mathtext(module_of):
    parser = importlib.import_module("matplotlib.mathtext").MathTextParser("path")
    for id, one in module_of("formulas").FORMULAS.items():
        for line in one.lines:
            assert parser.parse(f"${line}$")[0] > 0, id


def test_every_rule_has_code_tests_and_golden_cases(module_of):
    index = module_of("rule_index")
    for rule in RULES:
        places = index.stated_at(rule)
        assert places and places[0].startswith("ringspec."), rule.id
        assert index.tests_of(rule.id), rule.id
        if not rule.id.startswith("CP-"):  # no set of golden cases has schemes yet
            assert index.cases_of(rule.id) or index.layout_cases_of(rule.id), rule.id


def test_marks_are_found_on_functions_classes_modules_and_tables(module_of):
    import ast

    source = """
pytestmark = [pytest.mark.slow, pytest.mark.rule("NUM-1")]
TABLE = {"a": ("MASK-1",), "b": ("MASK-2", "MASK-3")}
ALONE = [pytest.param(x, marks=pytest.mark.rule(*TABLE[x])) for x in TABLE]

@pytest.mark.rule("RING-1")
@pytest.mark.parametrize("x", [1])
def test_one(x): ...

@pytest.mark.parametrize("x", ALONE)
def test_two(x): ...

@pytest.mark.rule("BWD-1", "BWD-2")
class TestThree:
    def test_inside(self): ...

def helper(): ...
"""
    found = dict(module_of("rule_index").marks_of(ast.parse(source)))
    assert found == {
        "test_one": {"NUM-1", "RING-1"},
        "test_two": {"NUM-1", "MASK-1", "MASK-2", "MASK-3"},
        "TestThree::test_inside": {"NUM-1", "BWD-1", "BWD-2"},
    }


def test_the_page_of_rules_has_each_rule_once(module_of):
    page = module_of("generate").rules_page()
    labels = re.findall(r"^   \* - \.\. _([a-z]+-\d+):$", page, re.M)
    assert labels == [rule.id.lower() for rule in RULES]
    assert page.count("* Tests: ``tests/") == page.count("<details>") == len(RULES)
    assert "and 4 more (``ringspec vectors list --rule MASK-1``)" in page


def code_alone(source):
    """The lines of code of a file, without docstrings and blank lines."""
    import ast

    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        is_named = isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        if is_named and ast.get_docstring(node):
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return [line for line in lines if line.strip()]


@pytest.mark.parametrize("room", ["spec", "problem", "rings"])
def test_a_page_of_the_specification_has_each_line_of_its_file_once_and_in_order(module_of, room):
    generate = module_of("generate")
    for path in sorted((generate.PACKAGE / room).glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        pieces = list(generate.pieces(source))
        shown = "".join(code for _, code in pieces).splitlines()
        assert [line for line in shown if line.strip()] == code_alone(source), path.name
        page = generate.module_page(room, path.stem)
        for kind, name in (definition for definition, _ in pieces if definition):
            assert page.count(f".. auto{kind}:: ringspec.{room}.{path.stem}.{name}\n") == 1


@pytest.mark.notebook  # needs Sphinx
def test_no_source_page_is_written_for_a_file_that_has_a_page(module_of):
    links = module_of("source_links")
    modules = {
        "ringspec.spec.block": (),
        "ringspec.exact.ziv": (),
        "functools": (),
        "ringspec.errors": (),
    }
    app = SimpleNamespace(env=SimpleNamespace(_viewcode_modules=modules))
    links.forget(app)
    assert list(modules) == ["ringspec.errors"]


def test_the_formulas_of_the_essence_take_the_place_of_its_indented_lines(module_of):
    from ringspec.spec import essence

    generate, lines = module_of("generate"), essence.__doc__.splitlines()
    shown = generate.with_formulas(lines)
    assert [line for line in shown if line.startswith("    ")] == []
    assert sum(line.startswith(".. math:: ") for line in shown) == len(generate.ESSENCE)
    assert shown[0] == lines[0] and shown[-2:] == lines[-2:]


# --- formulas held to the code, where integers decide ------------------------------------------


@pytest.mark.parametrize(("length", "workers"), [(24, 2), (24, 3), (32, 4)])
def test_the_formulas_of_layouts_are_what_the_code_does(length, workers):
    """Each line is the formula of the rule, written once more."""
    from ringspec.spec import layout

    n, c = length // workers, length // (2 * workers)
    striped, zigzag = layout.striped(length, workers), layout.zigzag(length, workers).table
    for r in range(workers):
        for t in range(n):
            assert layout.contiguous(length, workers).table[r, t] == r * n + t
            assert striped.table[r, t] == t * workers + r
            assert zigzag[r, t] == (r * c + t if t < c else (2 * workers - 1 - r) * c + (t - c))
    local = [np.asarray(row) for row in striped.table]
    back = layout.unpermute(local, axis=0)
    for r in range(workers):
        for t in range(n):
            assert back[r][t] == local[(r * n + t) % workers][(r * n + t) // workers]


@pytest.mark.parametrize("q_offset", [-5, 0, 3])
def test_the_formulas_of_offsets_are_what_positions_say(q_offset):
    """RING-8 to RING-10, against pk <= pq over the tables of LAYOUT-1 to LAYOUT-3."""
    workers, n_q, n_k = 3, 4, 8
    for a in range(workers):
        for b in range(workers):
            for i in range(n_q):
                for j in range(n_k):
                    contiguous = b * n_k + j <= a * n_q + i + q_offset
                    assert contiguous == (j <= i + a * n_q - b * n_k + q_offset)
                    striped = j * workers + b <= i * workers + a + q_offset
                    assert striped == (j <= i + (a + q_offset - b) // workers)
            for c in (a, 2 * workers - 1 - a):
                for d in (b, 2 * workers - 1 - b):
                    for i in range(n_q // 2):
                        for j in range(n_k // 2):
                            chunks = d * n_k // 2 + j <= c * n_q // 2 + i + q_offset
                            assert chunks == (j <= i + c * n_q // 2 - d * n_k // 2 + q_offset)


def test_the_formula_of_a_layout_by_documents_is_what_the_code_does():
    from ringspec.spec import layout

    lengths, workers = (5, 8, 3), 2
    starts = [0, 5, 13, 16]
    table = layout.zigzag_per_document(16, workers, starts).table
    for r in range(workers):
        row = []
        for first, tokens in zip(starts, lengths, strict=False):
            c = -(-tokens // (2 * workers))
            for t in range(2 * c):
                entry = r * c + t if t < c else (2 * workers - 1 - r) * c + (t - c)
                row.append(first + entry if entry < tokens else -1)
        assert table[r].tolist() == row


# --- known bugs -------------------------------------------------------------------------------


def test_every_known_bug_has_a_section_with_a_picture_and_its_cases(module_of):
    bugs = module_of("generate_bugs")
    asked = []

    def draw(mutant, path):
        asked.append((mutant.id, path.name))
        return f"what {mutant.id} does"

    text = "\n".join(bugs.family_page(module, draw) for module in bugs.MODULES)
    assert asked == [(id, f"{id}.png") for id in MUTANTS]
    for mutant in MUTANTS.values():
        assert text.count(f"\n.. _bug-{mutant.id}:\n") == 1
        assert f".. figure:: {mutant.id}.png\n   :alt: {mutant.id}. what {mutant.id} does\n" in text
        for case in mutant.kills.values():
            assert case in text
        assert all(link in text for link in mutant.links)


def test_most_bugs_of_schedule_mask_and_merge_have_a_page_to_step_through(module_of):
    bugs = module_of("generate_bugs")
    linked = {
        module.__name__.rpartition(".")[2]: re.findall(
            r"<../../../bug-([\w-]+).html>", bugs.family_page(module, lambda *_: "")
        )
        for module in bugs.MODULES
    }
    families = ("schedule_bugs", "mask_bugs", "merge_bugs")
    assert sum(len(linked[name]) for name in families) >= 30
    assert len(linked["schedule_bugs"]) == 18 and "dkv-not-home" in linked["travel_bugs"]
    # Rounding does not show in four decimals, and this ring has neither sinks nor several heads.
    assert linked["precision_bugs"] == linked["sink_bugs"] == linked["head_bugs"] == []


def test_the_page_of_a_bug_has_what_explain_says_of_it(module_of):
    bugs = module_of("generate_bugs")
    told = module_of("readouts").sentences_by_bug()
    assert set(told) <= set(MUTANTS) and len(told) > 60
    text = "\n".join(bugs.family_page(module, lambda *_: "") for module in bugs.MODULES)
    assert text.count("ringspec explain <../../readout>") == len(told)


@pytest.mark.slow
@pytest.mark.parametrize(
    "id", ["dkv-not-home", "window-per-block", "gqa-not-summed", "merge-averages"]
)
def test_explain_still_says_what_the_page_of_a_bug_has(module_of, id):
    assert (
        module_of("readouts").sentences_of(MUTANTS[id])
        == module_of("readouts").sentences_by_bug()[id]
    )


def test_the_list_of_known_bugs_leads_to_every_bug(module_of):
    listing = module_of("generate_bugs").known_bugs()
    assert re.findall(r"<bug-([\w-]+)>", listing) == list(MUTANTS)


def test_a_triangle_on_every_step_is_seen_as_missing_pairs(module_of):
    """W = 2, n = 8: of the block of earlier keys the triangle hides n (n - 1) / 2 pairs."""
    runs, pictures = module_of("bug_runs"), module_of("bug_pictures_words")
    seen = runs.shown(MUTANTS["causal-on-every-step"])
    assert (seen.tensor, seen.weights, seen.expected.shape) == ("o", False, (16, 16))
    assert pictures.counts(seen) == (136, 0, 28, 0)
    assert (np.argwhere((seen.got == 0) & (seen.expected != 0)) // 8 == [1, 0]).all()
    assert "136 pairs should be visible; missing: 28" in pictures.caption(seen)


def test_stale_keys_are_seen_in_dq_at_the_keys_of_the_other_worker(module_of):
    seen = module_of("bug_runs").shown(MUTANTS["stale-keys"])
    lost = (seen.got == 0) & (seen.expected != 0)
    assert seen.tensor == "dq"
    assert np.array_equal(lost, seen.workers_q[:, None] != seen.workers_k[None, :])


def test_a_missing_factor_is_seen_as_that_factor(module_of):
    """The case has the scale 1/2, so that dq without it is twice too large."""
    runs = module_of("bug_runs")
    seen = runs.shown(MUTANTS["scale-missing-in-dq"])
    ratio = runs.factors(seen)
    assert (seen.tensor, seen.weights) == ("dq", True)
    assert np.abs(ratio[~np.isnan(ratio)] - 2).max() < 1e-9


def test_a_bug_of_rounding_is_seen_in_units_of_the_bound(module_of):
    seen = module_of("bug_runs").shown(precision_bugs.BUGS[0])
    assert (seen.recipe, seen.errors.shape) == ("float32", (16,))
    assert (seen.errors > 1).any()


@pytest.mark.slow
@pytest.mark.parametrize("id", MUTANTS)
def test_every_bug_shows_something_and_says_so_in_numbers(module_of, id):
    seen = module_of("bug_runs").shown(MUTANTS[id])
    caption = module_of("bug_pictures_words").caption(seen)
    assert re.search(r"\d", caption) and seen.case in caption
    if hasattr(seen, "expected"):
        assert not np.array_equal(seen.expected, seen.got)
    elif hasattr(seen, "axis"):
        assert not (seen.errors <= 1).all()


@drawn
@pytest.mark.parametrize("id", ["striped-diagonal", "first-sink-alone", "lse-rebased-twice"])
def test_a_picture_is_a_small_png(module_of, id, tmp_path):
    path = tmp_path / "bug.png"
    module_of("bug_pictures").draw(module_of("bug_runs").shown(MUTANTS[id]), path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and 2_000 < len(data) < 60_000


def test_the_cases_that_pictures_are_drawn_of_are_golden_but_for_two(module_of):
    shown_in = {id: module_of("bug_runs").case_to_show(one)[1] for id, one in MUTANTS.items()}
    golden = set(open_set("core").ids)
    assert [id for id, case in shown_in.items() if case not in golden] == [
        "truncated-p",
        "truncated-ds",
    ]


# --- decisions --------------------------------------------------------------------------------


def test_every_decision_has_its_context_and_its_consequence():
    pages = {path.stem: path.read_text(encoding="utf-8") for path in DOCS.glob("decisions/*.md")}
    index = pages.pop("index")
    listed = re.findall(r"^(\w+)$", index.split("```{toctree}")[1], re.M)
    assert sorted(listed) == sorted(pages)
    for name, text in pages.items():
        for entry in text.split("\n## ")[1:]:
            parts = re.findall(r"^\*\*(\w+)\.\*\*", entry, re.M)
            assert parts == ["Context", "Decision", "Consequence"], (name, entry.splitlines()[0])


# --- names ------------------------------------------------------------------------------------

INDEX_PAGES = {"vectors/functions": "vectors/use.md"}


def test_the_index_page_of_a_folder_has_the_list_of_each_of_its_pages(module_of):
    for folder in module_of("generate_api").FOLDERS:
        pages = {path.stem for path in (DOCS / folder).glob("*.md")}
        index = (DOCS / INDEX_PAGES.get(folder, f"{folder}.md")).read_text(encoding="utf-8")
        name = Path(folder).name
        lists = re.findall(rf"^\.\. include:: .*generated/names/{name}-(\w+)\.rst$", index, re.M)
        listed = re.findall(rf"^{name}/(\w+)$", index, re.M)
        linked = re.findall(rf"\[Full descriptions\]\({name}/(\w+)\.md\)", index)
        assert lists == listed == linked and set(lists) == pages and pages


def test_every_letter_of_the_index_is_folded(module_of):
    table = (
        '<table style="width: 100%" class="indextable genindextable"><ul><li>a</li></ul></table>'
    )
    page = (
        f'<div class="genindex-jumpbox"><a href="#A">A</a></div><h2>A</h2>{table}<h2>B</h2>{table}'
    )
    folded = module_of("generate_api").folded_index(page)
    assert folded.count("<details><summary>1 entry</summary><table ") == 2
    assert '</a></div><div class="open-all"></div><h2>A</h2>' in folded


def test_a_list_has_every_name_of_its_page_with_its_first_sentence_and_anchors(module_of):
    text = module_of("generate_api").names_of(DOCS / "reference" / "conformance" / "testing.md")
    shown = re.findall(r'href="conformance/testing\.html#([\w.]+)"', text)
    names = ("assert_ring_attention", "check", "Checked")
    assert shown == [f"ringspec.testing.{name}" for name in names]
    assert '<span id="ringspec.testing.Checked.headline"></span>' in text
    assert "\n     - The results of a check.\n" in text


# --- links ------------------------------------------------------------------------------------


def relative_links(text: str) -> list[str]:
    """Targets of Markdown links and images outside code, without those that lead elsewhere."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)
    return [link for link in found if not re.match(r"[a-z]+:|#", link)]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_relative_links_of_a_page_lead_to_files(path):
    for link in relative_links(path.read_text(encoding="utf-8")):
        target = (path.parent / link.partition("#")[0]).resolve()
        if target.parent == DOCS / "learn" / "notebooks":
            target = DOCS.parent / "notebooks" / target.name
        # What a build makes is followed in the built pages, by docs/check_links.py.
        if "generated" not in target.parts:
            assert target.exists(), link


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_a_link_to_a_generated_page_says_that_a_clone_does_not_have_it(path):
    for paragraph in re.split(r"\n\n|\n(?=- )", path.read_text(encoding="utf-8")):
        if any("/generated/" in f"/{link}" for link in relative_links(paragraph)):
            assert "built documentation" in paragraph, paragraph


@pytest.fixture
def built(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<h1 id="top">x</h1><a href="sub/">s</a><a href="sub/index.html#here">h</a><img src="a.png">'
        '<a href="https://arxiv.org/abs/2310.01889">p</a><a href="#top">t</a><a href="#">u</a>'
    )
    (tmp_path / "sub" / "index.html").write_text('<a name="here"></a><a href="../index.html">b</a>')
    (tmp_path / "a.png").write_bytes(b"")
    return tmp_path


def test_good_links_pass(module_of, built, capsys):
    check = module_of("check_links")
    assert list(check.bad_links(built)) == [] and check.main(built) == 0
    assert "2 pages, 0 bad links" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("link", "wrong"),
    [
        ("nowhere.html", "there is no such file"),
        ("sub/index.html#gone", "there is no anchor gone"),
        ("#gone", "there is no anchor gone"),
        ("../outside.html", "leads out of the folder"),
        ("http://arxiv.org/abs/1", "is not https"),
        ("https://arxvi.org/abs/1", "host arxvi.org is not known"),
        ("https://github.com/{owner}/x", "has a place to be filled in"),
        ("https://github.com/a b", "has a blank"),
        ("https://example.com/", "has a place to be filled in"),
        ("file:///etc/hosts", "is not https"),
        ("javascript:void(0)", "is javascript"),
    ],
)
def test_a_bad_link_is_found(module_of, built, link, wrong):
    (built / "bad.html").write_text(f'<a href="{link}">x</a>')
    assert list(module_of("check_links").bad_links(built)) == [("bad.html", link, wrong)]


def test_source_pages_lead_back_to_the_module_that_has_the_object(module_of):
    """Sphinx gives every name of a file the prefix of the first; ``two`` is documented nowhere."""
    block = (
        '<div class="viewcode-block" id="{0}">\n<a class="viewcode-back" href="x#rs.{0}">[docs]</a>'
    )
    objects = {
        "rs.one": SimpleNamespace(docname="api", node_id="rs.one"),
        "rs.spec.a.one": SimpleNamespace(docname="spec/a", node_id="rs.spec.a.one"),
    }
    app = SimpleNamespace(
        env=SimpleNamespace(domains={"py": SimpleNamespace(objects=objects)}),
        builder=SimpleNamespace(get_relative_uri=lambda here, there: f"{there}.html"),
    )
    context = {"body": block.format("one") + block.format("two")}
    module_of("generate").correct_back_links(app, "_modules/rs/spec/a", "", context, None)
    assert re.findall('href="([^"]*)"', context["body"]) == ["spec/a.html#rs.spec.a.one"]
    assert context["body"].count("viewcode-block") == 2


def test_a_folder_without_pages_does_not_pass(module_of, tmp_path):
    assert module_of("check_links").main(tmp_path) == 1
