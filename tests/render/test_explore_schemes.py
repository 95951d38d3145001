"""The page that steps through ways to split attention: its numbers are those of dense NumPy, and a browser shows them."""

import json
import re

import numpy as np
import pytest
from refusals import refuses
from render.browser import Browser

from ringspec.cli.shared.inputs import drawn
from ringspec.cli.views.explore_schemes import HEADS, KV_HEADS, MESHES, NEW, PREFIX, scheme_records
from ringspec.errors import LayoutError, OptionError
from ringspec.render.explore import explore_page

TOKENS = 24


@pytest.fixture(scope="module")
def document():
    return scheme_records(list(MESHES))


def dense(queries, causal):
    """o, dq, dk of the last ``queries`` tokens by plain softmax in float64; dy flows into all rows."""
    q, dy = (drawn(0, x, (1, HEADS, queries, 4))[0] for x in ("q", "dy"))
    k, v = (drawn(0, x, (1, KV_HEADS, TOKENS, 4))[0] for x in ("k", "v"))
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=0) for x in (k, v))
    s = q @ k.swapaxes(1, 2) / 2
    seen = np.arange(TOKENS) <= np.arange(queries)[:, None] + TOKENS - queries
    s = np.where(seen | (not causal), s, -np.inf)
    e = np.exp(s - s.max(axis=2, keepdims=True))
    p = e / e.sum(axis=2, keepdims=True)
    o = p @ v
    ds = p * (dy @ v.swapaxes(1, 2) - (dy * o).sum(axis=2, keepdims=True)) / 2
    dk = (ds.swapaxes(1, 2) @ q).reshape(KV_HEADS, HEADS // KV_HEADS, TOKENS, 4).sum(axis=1)
    return {"o lse": o, "dq": ds @ k, "dk dv": dk}


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_every_copy_at_the_end_is_what_dense_attention_gives(document, name, mask):
    queries = {"dcp": NEW, "pcp": TOKENS - PREFIX}.get(name, TOKENS)
    expected = dense(queries, mask == "causal")
    passes = document["runs"][f"{name}/{mask}"]
    assert list(passes) == ["forward"] if name in ("pcp", "dcp") else ["forward", "backward"]
    for phase, of_pass in passes.items():
        met = set()
        for held in of_pass["stops"][-1]:
            for thing, tokens, heads, numbers in held:
                for h, head in enumerate(heads if numbers else ()):
                    for t, token in enumerate(tokens):
                        shown = np.array(numbers[h][t][-4:]) * 1e-4
                        assert np.abs(shown - expected[thing][head, token]).max() <= 0.51e-4
                        met.add((thing, token, head))
        of_queries = queries * HEADS
        assert len(met) == (of_queries if phase == "forward" else of_queries + TOKENS * KV_HEADS)
        whole = queries * TOKENS if mask == "none" else sum(range(TOKENS - queries + 1, TOKENS + 1))
        text = TOKENS // 3 if name == "joint" else 0
        copies = whole + (text * TOKENS if mask == "none" else sum(range(text + 1)))
        # Forward, both ring coordinates compute the rows of the text.
        assert np.sum(of_pass["pairs"]) == HEADS * (copies if phase == "forward" else whole)


def test_bytes_of_the_page_are_those_of_the_run(document):
    assert document["runs"]["ring/causal"]["forward"]["sent"] == [[6 * 2 * 8 * 8] * 4] * 3 + [
        [0] * 4
    ]
    usp = document["runs"]["usp/none"]["forward"]["sent"]
    assert usp[1] == [12 * 1 * 8 * 8] * 4 and usp[2] == [6 * 2 * 6 * 8] * 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((["uyls"],), (OptionError, "unknown-name")),
        ((["usp", "ring"], (("ring", 2),)), OptionError),
        ((["ring"], (("ring", 9),)), OptionError),
        ((["ring"], (("cp", 2),)), (LayoutError, "mesh")),
        ((["ulysses"], (("ulysses", 3),)), OptionError),
        ((["ring"], None, 20), OptionError),
        ((["ring"], None, 56), OptionError),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, expected):
    with refuses(expected):
        scheme_records(*arguments)


def test_the_page_is_small_and_names_nothing_outside_itself(document):
    text = explore_page(document)
    assert len(text.encode()) < 600_000
    assert len(explore_page(scheme_records(["usp"])).encode()) < 130_000
    addresses = set(re.findall(r"https?://[^\"' ]+", text))
    assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|innerHTML|outerHTML|insertAdjacent|eval", text)
    words = "</script><script>document.title = 'owned'</script>"
    assert explore_page(document | {"version": words}).count("<script") == 2


@pytest.fixture(scope="module")
def browser(document, tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "schemes.html"
    path.write_text(explore_page(document), encoding="utf-8")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    browser.screen(1280, 900)
    browser.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    browser.open(path.as_uri())
    yield browser
    assert browser.errors == []
    browser.close()


EVERY = """(() => {
  const found = {};
  for (const scheme of CHOICES.scheme) for (const pass of CHOICES.pass) {
    Object.assign(state, {scheme, pass, mask: "causal", head: "1", step: 0});
    show();
    const now = scene();
    if (!now) { found[`${scheme}/${pass}`] = byId("note").textContent; continue; }
    const drawn = [];
    for (state.step = 0; state.step <= now.steps; state.step++) {
      show();
      drawn.push([document.querySelectorAll("[data-pair]").length,
        [...document.querySelectorAll("[data-held]")].map((cell) => cell.dataset.held)]);
    }
    found[`${scheme}/${pass}`] = drawn;
  }
  return found;
})()"""


@pytest.mark.external("chromium")
def test_every_scheme_draws_the_pairs_and_the_cells_of_its_run(browser, document):
    found = browser.value(EVERY)
    for name in MESHES:
        for phase in ("forward", "backward"):
            drawn = found[f"{name}/{phase}"]
            if isinstance(drawn, str):
                assert name in ("pcp", "dcp") and "has no backward pass" in drawn
                continue
            of_pass = document["runs"][f"{name}/causal"][phase]
            visible = document["visible"][f"{name}/causal"]
            for (pairs, cells), used in zip(drawn, [*of_pass["used"], []], strict=True):
                met = {
                    (i, j)
                    for one in used
                    if one and 1 in one[0][1]
                    for i in one[0][0]
                    for j in one[1][0]
                    if visible[i][j] == "1"
                }
                assert pairs == len(met)
                assert len(set(cells)) == len(cells)
            for (_, cells), stop in zip(drawn, of_pass["stops"], strict=True):
                held = {
                    f"{rank},{thing},{token},{head}"
                    for rank, things in enumerate(stop)
                    for thing, tokens, heads, _ in things
                    for token in tokens
                    for head in heads
                }
                assert set(cells) == held


@pytest.mark.external("chromium")
def test_the_partial_states_of_decoding_are_shown_rank_by_rank_and_then_merged(browser, document):
    state = {
        "scheme": "dcp",
        "mask": "causal",
        "head": "0",
        "pass": "forward",
        "row": 23,
        "step": 1,
    }
    browser.value(f"Object.assign(state, {json.dumps(state)}); show()")
    rows = browser.cells("#row-state")
    assert [row[:2] for row in rows] == [
        ["step 0", "none"],
        ["step 1", "rank 0"],
        ["step 1", "rank 1"],
    ]
    browser.value("go(Infinity)")
    last = browser.cells("#row-state")[-1]
    numbers = [float(x.replace("\u2212", "-")) for x in re.findall(r"[\u2212\d.]+", last[-1])]
    assert (
        last[1] == "rank 0" and np.abs(numbers - dense(NEW, True)["o lse"][0, 1]).max() <= 0.51e-4
    )
    assert "reduce_scatter along dcp" in browser.value("go(1), byId('travel').textContent")


@pytest.mark.external("chromium")
def test_a_phone_shows_a_scheme_without_scrolling_sideways(browser):
    browser.screen(360, 740, phone=True)
    for scheme in ("double_ring", "usp", "joint"):
        browser.value(
            f"Object.assign(state, {{scheme: {scheme!r}, pass: 'backward', step: 1}}); show()"
        )
        assert browser.value("document.documentElement.scrollWidth") == 360
    browser.screen(1280, 900)
