"""The page that steps through a ring: what it holds, and how a browser and its user take it.

What the page shows is compared with what NumPy makes here of the same tensors: sums over the keys
that a row has seen so far, with no block, no merge and no ring.
"""

import importlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from render.browser import Browser

from ringspec.cli.shared.inputs import drawn
from ringspec.cli.views.explore_bug import bug_records
from ringspec.cli.views.explore_records import HEAD_DIM, TOKENS, records
from ringspec.render.explore import explore_page

# Half a unit of the last of four decimals.
HALF = 0.5e-4 + 1e-12
MINUS = "\u2212"
# The row that the page shows first, and all pairs of a causal mask.
ROW, PAIRS_IN_ALL = 27, TOKENS * (TOKENS + 1) // 2


@pytest.fixture(scope="module")
def document():
    return records()


@pytest.fixture(scope="module")
def address(document, tmp_path_factory):
    path = tmp_path_factory.mktemp("explore") / "ring.html"
    path.write_text(explore_page(document), encoding="utf-8")
    assert path.stat().st_size < 1_000_000
    return path.as_uri()


@pytest.fixture(scope="module")
def without_zigzag(tmp_path_factory):
    """A page of 12 tokens, which have no zigzag layout for 4 workers."""
    path = tmp_path_factory.mktemp("explore") / "twelve.html"
    path.write_text(explore_page(records(workers=(4, 2), tokens=12)), encoding="utf-8")
    return path.as_uri()


def test_every_layout_can_show_the_ring_that_the_page_opens_on(document):
    assert document["missing"] == {}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started, address):
    """A desktop's screen and no motion; at the end the page must not have complained."""
    started.errors.clear()
    started.screen(1280, 900)
    started.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    started.open(address)
    yield started
    assert started.errors == []


def tokens_of(layout, workers):
    """The tokens of each worker, in global order."""
    if layout == "contiguous":
        return [list(x) for x in np.arange(TOKENS).reshape(workers, -1)]
    chunks = np.arange(TOKENS).reshape(2 * workers, -1)
    return [[*chunks[r], *chunks[2 * workers - 1 - r]] for r in range(workers)]


def attention_so_far(met):
    """For the set of pairs ``met`` [S, S] of a causal problem: m, l, o, lse, dq, dk of every row."""
    q, k, v, dy = (drawn(0, n, (1, 1, TOKENS, HEAD_DIM))[0, 0] for n in ("q", "k", "v", "dy"))
    s = q @ k.T / 2  # sqrt(HEAD_DIM)
    causal = np.tri(TOKENS, dtype=bool)
    weights = np.exp(s) * causal
    p = weights / weights.sum(axis=1, keepdims=True)
    delta = (dy * (p @ v)).sum(axis=1, keepdims=True)
    ds = p * (dy @ v.T - delta) * met
    seen = np.where(met, s, -np.inf)
    m = seen.max(axis=1)
    with np.errstate(invalid="ignore"):
        e = np.where(met, np.exp(seen - m[:, None]), 0.0)
    l = e.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = m + np.log(l)
    return SimpleNamespace(m=m, l=l, o=e @ v, lse=lse, dq=ds @ k / 2, dk=ds.T @ q / 2, y=p @ v)


def numbers_in(text):
    """The numbers of a cell, with the page's signs."""
    words = text.replace(MINUS + "\u221e", "-inf").replace(MINUS, "-")
    return [float(word) for word in words.split()]


def assert_shown(text, expected):
    got, expected = np.array(numbers_in(text)), np.atleast_1d(expected)
    assert got.shape == expected.shape, text
    assert ((got == expected) | (np.abs(got - expected) <= HALF)).all(), (text, expected)


def pick(browser, name, value):
    browser.click(f'input[name="{name}"][value="{value}"]')


# The words of every chip by the box in which its middle lies.
CHIPS = """
[...document.querySelectorAll(".box")].map((box) => {
  const b = box.getBoundingClientRect();
  return [...document.querySelectorAll(".chip")].filter((chip) => {
    const c = chip.getBoundingClientRect();
    const [x, y] = [c.x + c.width / 2, c.y + c.height / 2];
    return b.left < x && x < b.right && b.top < y && y < b.bottom;
  }).map((chip) => chip.textContent.normalize("NFKC")).sort();
})
"""
PANELS = ("#place", "#say", "#travel", "#state", "#pattern", "#pattern-key", "#load", "#bytes")
PAIRS = '[...document.querySelectorAll("[data-pair]")].map((x) => x.dataset.pair)'


def held(words, owner):
    return " ".join(f"{name}{owner}" for name in words.split())


RINGS = {
    # (travelling inputs, travelling sums, what stays, its sums, what arrives at the end)
    ("forward", "kv"): ("k v", None, "q", "m l o", None),
    ("backward", "kv"): ("k v", "dk dv", "q dy lse \u03b4", "dq", "dk dv"),
    ("backward", "q"): ("q dy lse \u03b4", "dq", "k v", "dk dv", "dq"),
}


@pytest.mark.external("chromium")
@pytest.mark.parametrize("phase,circulation", RINGS)
def test_a_whole_ring_shows_at_every_step_what_numpy_computes(browser, phase, circulation):
    workers, slots = 4, TOKENS // 4
    for name, value in (("layout", "zigzag"), ("pass", phase), ("circulation", circulation)):
        pick(browser, name, value)
    table = tokens_of("zigzag", workers)
    moving, moving_sums, staying, staying_sums, _ = RINGS[phase, circulation]
    met, total, done = np.zeros((TOKENS, TOKENS), dtype=bool), 0, np.zeros(workers, dtype=int)
    for t in range(workers):
        assert browser.text("#place") == f"step {t} of 0\u20133"
        visitor = [(r - t) % workers for r in range(workers)]
        now = set()
        for r, other in enumerate(visitor):
            of_q, of_k = (other, r) if circulation == "q" else (r, other)
            now |= {(i, j, r) for i in table[of_q] for j in table[of_k] if j <= i}
            met[np.ix_(table[of_q], table[of_k])] = True
        met &= np.tri(TOKENS, dtype=bool)
        assert {tuple(map(int, pair.split(","))) for pair in browser.value(PAIRS)} == now
        counts = [int(browser.text(f"#pairs-{k}")) for k in ("now", "past", "later", "never")]
        wanted = [len(now), met.sum() - len(now)]
        wanted += [PAIRS_IN_ALL - met.sum(), TOKENS**2 - PAIRS_IN_ALL]
        assert counts == wanted
        chips = [[held(staying, r), held(staying_sums, r)] for r in range(workers)]
        for r, other in enumerate(visitor):
            chips[r] += [held(names, other) for names in (moving, moving_sums) if names]
        assert browser.value(CHIPS) == [sorted(one) for one in chips]
        of_step = np.array([sum(r == x[2] for x in now) for r in range(workers)])
        done += of_step
        load = browser.cells("#load-table")
        assert [int(row[2]) for row in load] == of_step.tolist()
        assert [int(row[3]) for row in load] == (of_step.max() - of_step).tolist()
        assert [int(row[4]) for row in load] == done.tolist()
        total += bytes_of(phase, circulation, t, slots) * workers
        sent = browser.cells("#bytes-table")[t]
        assert sent[2:] == [str(bytes_of(phase, circulation, t, slots)), sent[3], str(total)]
        assert int(sent[3]) == bytes_of(phase, circulation, t, slots) * workers
        check_row(browser, phase, t, attention_so_far(met))
        browser.click("#next")
    assert browser.text("#place") == "the end"
    check_end(browser, phase, circulation, attention_so_far(met))


def bytes_of(phase, circulation, t, slots):
    """What a worker sends after step t, in float64; a position of 8 bytes goes with each token."""
    last = t == 3
    if phase == "forward":
        return 0 if last else slots * 8 * (HEAD_DIM + HEAD_DIM + 1)
    if circulation == "kv":
        return slots * 8 * (2 * HEAD_DIM + (0 if last else 2 * HEAD_DIM + 1))
    return slots * 8 * (HEAD_DIM + (0 if last else 2 * HEAD_DIM + 2 + 1))


def check_row(browser, phase, t, so_far):
    if phase == "forward":
        row = browser.cells("#row-state")[1 + t]
        for cell, name in zip(row[2:], ("m", "l", "lse", "o"), strict=True):
            assert_shown(cell, getattr(so_far, name)[ROW])
        return
    for name in ("dq", "dk"):
        assert_shown(browser.cells(f"#row-{name}")[t][3], getattr(so_far, name)[ROW])


def check_end(browser, phase, circulation, so_far):
    """The results, and that every sum lies with its owner: token 27 belongs to worker 3."""
    home = RINGS[phase, circulation][4]
    for r, chips in enumerate(browser.value(CHIPS)):
        assert home is None or held(home, r) in chips
    if phase == "forward":
        row = browser.cells("#row-state")[-1]
        assert_shown(row[4], so_far.lse[ROW])
        assert_shown(row[5], so_far.y[ROW])
        return
    for name in ("dq", "dk"):
        row = browser.cells(f"#row-{name}")[-1]
        assert row[2] == "worker 3"
        assert_shown(row[3], getattr(so_far, name)[ROW])


@pytest.mark.external("chromium")
def test_waiting_of_a_contiguous_causal_ring_is_counted_by_worker(browser):
    browser.press("End")
    load = browser.cells("#load-table")
    # 78 pairs on the diagonal, 144 in a block below it; step 0 takes 78, the others 144 each.
    assert [int(row[4]) for row in load] == [78 + 144 * r for r in range(4)]
    assert [int(row[5]) for row in load] == [144 * (3 - r) for r in range(4)]
    assert "1176 pairs" in browser.text("#load-words")
    assert f"{510 / 294:.2f} times the mean" in browser.text("#load-words")


@pytest.mark.external("chromium")
def test_the_words_below_the_row_say_how_much_a_rising_maximum_shrinks_what_was_there(browser):
    m = attention_so_far(np.tri(TOKENS, dtype=bool) & (np.arange(TOKENS) >= 24)).m[ROW]
    rise = attention_so_far(np.tri(TOKENS, dtype=bool) & (np.arange(TOKENS) >= 12)).m[ROW] - m
    assert rise > 0
    said = []
    for _ in range(5):
        said.append(browser.text("#merge"))
        browser.press("ArrowRight")
    assert said[0] == f"The first keys: m is their largest score, {m:.4f}."
    assert f" = {np.exp(-rise):.3f};" in said[1]
    assert said[2].startswith("m did not rise") and said[3].startswith("No key of this step")
    assert said[4].startswith("o is divided by l once")


@pytest.mark.external("chromium")
def test_gathered_keys_are_everywhere_and_their_gradients_are_sums_only_at_the_end(browser):
    pick(browser, "circulation", "gather")
    pick(browser, "pass", "backward")
    assert browser.text("#pairs-now") == "0" and "No worker computes" in browser.text("#say")
    browser.press("ArrowRight")
    assert browser.cells("#row-dk")[1][2:] == ["worker 0\u20133", "4 partial sums, not yet added"]
    assert len(browser.value(CHIPS)[2]) == 2 + 4 + 4
    browser.press("End")
    whole = attention_so_far(np.tri(TOKENS, dtype=bool))
    assert_shown(browser.cells("#row-dk")[-1][3], whole.dk[ROW])
    assert browser.cells("#row-dk")[-1][2] == "worker 2"


@pytest.mark.external("chromium")
def test_keys_buttons_and_slider_step_alike(browser):
    places = [
        "step 0 of 0\u20133",
        "step 1 of 0\u20133",
        "step 2 of 0\u20133",
        "step 3 of 0\u20133",
        "the end",
    ]
    seen = [browser.text("#place")]
    for _ in range(5):
        browser.press("ArrowRight")
        seen.append(browser.text("#place"))
    assert seen == [*places, "the end"]
    for key, place in (("Home", 0), ("End", 4), ("ArrowLeft", 3)):
        browser.press(key)
        assert browser.text("#place") == places[place]
    # A button that has become of no use keeps no key to itself.
    for button, place in (("#last", 4), ("#back", 3), ("#first", 0), ("#next", 1), ("#last", 4)):
        browser.click(button)
        assert browser.text("#place") == places[place]
    browser.press("ArrowLeft")
    assert browser.text("#place") == places[3]
    browser.click("#step", x=0.5)
    assert browser.text("#place") == places[2]
    browser.press("ArrowRight")  # on the slider, which has the focus
    assert browser.text("#place") == places[3]
    assert (
        browser.value('document.getElementById("step").getAttribute("aria-valuetext")') == places[3]
    )


@pytest.mark.external("chromium")
def test_arrows_on_a_choice_change_the_choice_and_not_the_step(browser):
    browser.value('document.querySelector(\'input[name="layout"][value="contiguous"]\').focus()')
    browser.press("ArrowRight")
    assert browser.value("location.hash.split('&')[1]") == "layout=striped"
    assert browser.text("#place").startswith("step 0")
    pick(browser, "layout", "zigzag")  # with the mouse, after which the arrows step
    browser.press("ArrowRight")
    assert browser.value("location.hash.split('&')[1]") == "layout=zigzag"
    assert browser.text("#place").startswith("step 1")


@pytest.mark.external("chromium")
def test_a_row_is_chosen_by_key_by_list_and_in_the_pattern(browser):
    browser.press("ArrowDown")
    assert "Query 28," in browser.text("#row-state caption")
    browser.press("ArrowUp")
    assert "Query 27," in browser.text("#row-state caption")
    # 38 of the picture's 38 + 48 * 10 + 3 units lie before the first row.
    browser.click("#pattern svg", y=(38 + 10 * 5.5) / (38 + 48 * 10 + 3))
    assert "Query 5, which stays with worker 0" in browser.text("#row-state caption")
    browser.value('byId("row").value = "20"; byId("row").dispatchEvent(new Event("change"))')
    assert "Query 20," in browser.text("#row-state caption")


@pytest.mark.external("chromium")
def test_the_page_opens_on_the_ring_of_the_readmes_picture(browser, document, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    ring = importlib.import_module("picture").RING
    opened = browser.value(
        "({w: +state.w, layout: state.layout, mask: state.mask, circulation: state.circulation})"
    )
    opened |= {name: document["problem"][name] for name in ("tokens", "seed")}
    assert opened == {"w" if name == "workers" else name: value for name, value in ring.items()}
    assert browser.value("state.pass") == "forward"


@pytest.mark.external("chromium")
def test_the_address_is_the_state(browser, address):
    for name, value in (
        ("w", 3),
        ("layout", "striped"),
        ("mask", "documents"),
        ("pass", "backward"),
    ):
        pick(browser, name, value)
    browser.press("ArrowRight")
    wanted = "#w=3&layout=striped&mask=documents&circulation=kv&pass=backward&step=1&row=27"
    assert browser.value("location.hash") == wanted
    before = [browser.value(CHIPS), *map(browser.text, PANELS)]
    browser.open(address + wanted)
    assert [browser.value(CHIPS), *map(browser.text, PANELS)] == before
    browser.value(f"location.hash = {json.dumps(wanted.replace('step=1', 'step=2'))}")
    assert wait_for(browser, "step 2") == "step 2 of 0\u20132"
    browser.open(address + "#w=5&layout=<b>&mask=__proto__&step=99&row=-1&toString=1&step=1e3&x")
    assert browser.text("#place") == "the end"
    assert browser.value("location.hash").startswith("#w=4&layout=contiguous&mask=causal")


def wait_for(browser, words):
    """The words of the step, when an event that the browser delivers later has arrived."""
    for _ in range(200):
        if words in browser.text("#place"):
            break
    return browser.text("#place")


def wait_until(browser, expression):
    """Return when an expression is true, or an event should have arrived long ago."""
    for _ in range(200):
        if browser.value(expression):
            break


@pytest.mark.external("chromium")
def test_the_links_at_the_head_show_what_they_say(browser):
    links = browser.value("[...document.querySelectorAll('nav a')].map((a) => a.textContent)")
    assert len(links) == 5
    browser.click("nav li:nth-child(1) a")
    wait_for(browser, "step 2")
    assert "Workers 0, 1 find no visible pair" in browser.text("#say")
    browser.click("nav li:nth-child(3) a")
    wait_for(browser, "step 3")
    assert "dk, dv go one more hop, to their owners" in browser.text("#say")


@pytest.mark.external("chromium")
def test_what_does_not_exist_is_explained(browser, without_zigzag):
    browser.open(without_zigzag)
    pick(browser, "layout", "zigzag")
    assert "divisible by 2W = 8" in browser.text("#note")
    assert browser.value("byId('panels').offsetHeight + byId('player').offsetHeight") == 0
    pick(browser, "w", 2)
    assert browser.value("byId('note').hidden") and browser.value("byId('panels').offsetHeight") > 0
    pick(browser, "circulation", "q")
    assert "only in the backward pass" in browser.text("#note")


@pytest.mark.external("chromium")
@pytest.mark.parametrize("phase,workers", [("forward", 4), ("backward", 8)])
def test_a_phone_shows_it_without_scrolling_sideways(browser, address, phase, workers):
    browser.screen(360, 740, phone=True)
    browser.open(f"{address}#w={workers}&pass={phase}&step=2")
    for circulation in ("kv", "q", "gather"):
        browser.value(f"state.circulation = {circulation!r}; show()")
        assert browser.value("document.documentElement.scrollWidth") == 360
        assert browser.value("innerWidth") == 360
        lowest = "Math.min(...[...document.querySelectorAll('button')].map((b) => b.offsetHeight))"
        assert browser.value(lowest) >= 36


@pytest.mark.external("chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_in_both_schemes(browser, scheme):
    browser.prefer(prefers_color_scheme=scheme)
    style = "getComputedStyle(document.documentElement).getPropertyValue"
    colours = {
        name: rgb(
            browser.value(f"{style}.call(getComputedStyle(document.documentElement), '--{name}')")
        )
        for name in ("ground", "raised", "ink", "soft", "link", "accent", "on-accent", "notice")
        + tuple(f"{kind}{n}" for kind in "ci" for n in range(8))
    }
    shown = browser.value("getComputedStyle(document.body).backgroundColor")
    assert shown == "rgb({}, {}, {})".format(*colours["ground"])
    assert (sum(colours["ground"]) < 150) is (scheme == "dark")
    for front, back in (
        *((x, y) for x in ("ink", "soft") for y in ("ground", "raised")),
        *((f"i{n}", f"c{n}") for n in range(8)),
        ("link", "ground"),
        ("on-accent", "accent"),
        ("ink", "notice"),
    ):
        assert contrast(colours[front], colours[back]) >= 4.5, (front, back)


def rgb(text):
    """'#rgb' or '#rrggbb' as three numbers."""
    digits = text.strip().lstrip("#")
    digits = "".join(2 * one for one in digits) if len(digits) == 3 else digits
    return tuple(int(digits[n : n + 2], 16) for n in (0, 2, 4))


def contrast(one, other):
    """https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    parts = [x / 255 for x in colour]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.external("chromium")
def test_blocks_move_only_for_a_reader_who_wants_motion(browser):
    lasts = "getComputedStyle(document.querySelector('.chip')).transitionDuration"
    assert browser.value(lasts) == "0s"
    browser.prefer(prefers_reduced_motion="no-preference")
    assert browser.value(lasts) == "0.45s"


@pytest.mark.external("chromium")
def test_every_control_and_picture_has_a_name(browser):
    tree = browser.ask("Accessibility.getFullAXTree")["nodes"]
    asked = ("button", "radio", "slider", "combobox", "image", "region", "group", "link", "table")
    named = [
        (node["role"]["value"], node.get("name", {}).get("value"))
        for node in tree
        if not node.get("ignored") and node.get("role", {}).get("value") in asked
    ]
    assert {role for role, _ in named} >= {"button", "radio", "slider", "combobox", "image"}
    assert [one for one in named if not one[1]] == []


@pytest.mark.slow
@pytest.mark.external("chromium")
def test_every_ring_and_step_draws_the_pairs_that_were_counted(browser, document):
    """Also that no ring and no step makes the page's script complain."""
    drawn_pairs = """((name) => {
      const wrong = [];
      for (const pass of CHOICES.pass) {
        const [w, layout, mask, circulation] = name.split("/");
        Object.assign(state, {w, layout, mask, circulation, pass, step: 0});
        const {run, steps} = scene();
        for (state.step = 0; state.step < steps; state.step++) {
          show();
          const count = document.querySelectorAll("[data-pair]").length;
          if (count !== sum(run.pairs[state.step])) wrong.push([name, pass, state.step, count]);
        }
        go(Infinity);
        if (byId("pairs-later").textContent !== "0") wrong.push([name, pass, "end"]);
      }
      return wrong;
    })"""
    for name in document["runs"]:
        assert browser.value(f"{drawn_pairs}({name!r})") == []


class Outline(HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))


def test_the_page_names_nothing_outside_itself():
    text = explore_page(records(workers=(2,), tokens=8))
    assert len(text.encode()) < 100_000
    for tag, attributes in Outline(text).elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert "style" not in attributes and "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")
    # The one address is the name of a space that elements of HTML or SVG are made in.
    addresses = set(re.findall(r"https?://[^\"' ]+", text))
    assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert not re.search(
        r"url\(|@import|innerHTML|outerHTML|insertAdjacent|document\.write|eval", text
    )
    [policy] = [given["content"] for _, given in Outline(text).elements if "http-equiv" in given]
    assert policy.startswith("default-src 'none'; ")


def test_hostile_words_in_the_records_stay_data():
    document = records(workers=(2,), tokens=4)
    words = "</script><script>document.title = 'owned'</script><!--<img src=x>\u2028"
    choices = document["choices"] | {"masks": {words: words}, "layouts": [words]}
    changed = {"version": words, "missing": {"8/zigzag": words}, "choices": choices}
    text = explore_page(document | changed)
    kinds = [tag for tag, _ in Outline(text).elements]
    assert kinds.count("script") == 2 and "img" not in kinds
    inside = text.split('id="records">', 1)[1].split("</script>", 1)[0]
    assert json.loads(inside)["version"] == words


@pytest.fixture
def bug_page(started, tmp_path):
    """A page of a ring whose keys travel against the direction that the mask assumes."""
    path = tmp_path / "bug.html"
    path.write_text(explore_page(bug_records("ring-direction-of-keys", 4, 24, 0)), encoding="utf-8")
    assert path.stat().st_size < 90_000
    started.errors.clear()
    started.screen(1280, 900)
    started.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    started.open(path.as_uri())
    yield started
    assert started.errors == []


DIFFERING_CHIPS = """[...document.querySelectorAll(".chip.differs")].map(
  (chip) => chip.textContent.normalize("NFKC")).sort()"""
DIFFERING_PAIRS = '[...document.querySelectorAll("[data-differs]")].map((x) => x.dataset.differs)'


@pytest.mark.external("chromium")
def test_a_wrong_ring_is_shown_beside_the_right_one(bug_page):
    """In step 1 worker r has the keys of r + 1 and the mask of r - 1: workers 1, 2 and 3 compute whole blocks."""
    assert bug_page.text("#place") == "step 1 of 0\u20133"
    assert bug_page.value("location.hash").startswith("#w=4&layout=contiguous&mask=causal")
    wrong = {(i, j) for i in range(6, 24) for j in range(24) if j // 6 == (i // 6 + 1) % 4}
    right = {(i, j) for i in range(6, 24) for j in range(24) if j // 6 == i // 6 - 1}
    pairs = [tuple(map(int, pair.split(",")[:2])) for pair in bug_page.value(PAIRS)]
    assert set(pairs) == wrong and len(pairs) == 108
    differing = {tuple(map(int, pair.split(","))) for pair in bug_page.value(DIFFERING_PAIRS)}
    assert differing == wrong ^ right
    assert bug_page.value(DIFFERING_CHIPS) == ["k0 v0", "k1 v1", "k2 v2", "k3 v3"]
    assert bug_page.text("#pairs-differ") == "216" and "18 of 24 queries" in bug_page.text("#note")
    assert bug_page.value("document.querySelector('.bytes').hidden")
    rows = bug_page.cells("#row-state")
    bug_page.press("r")
    assert bug_page.value("state.ring") == "right" and bug_page.text("#place").startswith("step 1")
    pairs = {tuple(map(int, pair.split(",")[:2])) for pair in bug_page.value(PAIRS)}
    assert pairs == right and bug_page.text("#pairs-differ") == "216"
    others = bug_page.cells("#row-state")
    # The rows of this step, and below each that of the other ring.
    assert rows[2][1:] == others[3][1:] and rows[3][1:] == others[2][1:] and rows[2] != rows[3]
    assert [rows[3][0], others[3][0]] == ["right ring", "wrong ring"]


@pytest.mark.external("chromium")
def test_where_the_rings_do_not_differ_nothing_is_marked(bug_page):
    bug_page.press("Home")
    assert bug_page.text("#pairs-differ") == "0" and "0 of 24 queries" in bug_page.text("#note")
    marked = "document.querySelectorAll('.mark:not(.sample), td.differs, .chip.differs').length"
    assert bug_page.value(marked) == 0
    bug_page.click("nav li:nth-child(2) a")
    wait_until(bug_page, "state.pass === 'backward'")
    assert bug_page.value("state.pass") == "backward" and bug_page.value(marked) > 0


@pytest.mark.external("chromium")
def test_a_phone_shows_a_wrong_ring_without_scrolling_sideways(bug_page):
    bug_page.screen(360, 740, phone=True)
    for phase in ("forward", "backward"):
        bug_page.value(f"state.pass = {phase!r}; state.step = 2; show()")
        assert bug_page.value("document.documentElement.scrollWidth") == 360
