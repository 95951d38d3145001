"""One self-contained HTML page that steps through a ring, from the records of ``ringspec explore``.

Like the page of a report it names no other file and fetches nothing; its content security policy
forbids both, and lets run no script and no style but its own, by their hashes. The records are data
in the page, which its script reads; what it shows, it sets as text.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from ringspec.render.html import Html, element, join
from ringspec.render.page import asset

# In this order they are one script.
SCRIPTS = ("explore.js", "explore_ring.js", "explore_pattern.js", "explore_tables.js")
STYLE = "explore.css"

LAYOUT_WORDS = {
    "contiguous": "each worker holds one run of tokens",
    "striped": "tokens are dealt like cards",
    "zigzag": "each worker holds one chunk from the front and one from the back",
}
CIRCULATION_WORDS = {
    "kv": "the keys and values travel",
    "q": "backward, the queries travel instead",
    "gather": "no ring: all keys are copied to everybody first",
}
# What a beginner looks at first: (words, the state of the page that shows it).
TOURS = (
    (
        "Contiguous and causal: worker 0 soon has nothing to do",
        {"layout": "contiguous", "mask": "causal", "circulation": "kv", "pass": "forward"},
        2,
    ),
    (
        "Zigzag: the same pairs, nobody waits",
        {"layout": "zigzag", "mask": "causal", "circulation": "kv", "pass": "forward"},
        2,
    ),
    (
        "Backward: dk and dv travel, and make one hop more to come home",
        {"layout": "zigzag", "mask": "causal", "circulation": "kv", "pass": "backward"},
        3,
    ),
    (
        "Q ring: dq travels, dk and dv stay",
        {"layout": "zigzag", "mask": "causal", "circulation": "q", "pass": "backward"},
        1,
    ),
    (
        "No ring: all keys are gathered first",
        {"layout": "contiguous", "mask": "none", "circulation": "gather", "pass": "forward"},
        0,
    ),
)
SYMBOLS = (
    ("q k v", "query, key and value of a token: D numbers each"),
    ("s", "q \u00b7 k / \u221aD, the score of a visible pair"),
    ("m", "largest s that the row has seen"),
    ("l", "sum of exp(s \u2212 m) over the keys that it has seen"),
    ("o", "sum of exp(s \u2212 m) v over the same keys; at the end divided by l"),
    ("lse", "m + log l"),
    ("dy", "gradient of the loss for o, given to the backward pass"),
    ("p", "exp(s \u2212 lse), the weight of a pair in the whole row"),
    ("\u03b4", "dy \u00b7 o of a row, computed once before the backward pass"),
    ("ds", "p (dy \u00b7 v \u2212 \u03b4), the gradient for s"),
    ("dq", "sum of ds k / \u221aD over the keys of a row"),
    ("dk", "sum of ds q / \u221aD over the queries that see a key"),
    ("dv", "sum of p dy over the same queries"),
)


def explore_page(document: Mapping[str, Any]) -> str:
    """The page of a document that ``ringspec.cli.views.explore_records.records`` made.

    >>> document = {"choices": {"workers": [2], "layouts": [], "masks": {}, "circulations": [],
    ...                         "passes": []}, "problem": {"tokens": 4, "heads": 1, "head_dim": 4,
    ...             "seed": 0, "recipe": "float64", "decimals": 4}, "version": "</script>"}
    >>> text = explore_page(document)
    >>> text.count("<script"), text.count("</script>"), "http-equiv" in text
    (2, 2, True)
    """
    body = element(
        "body",
        element("header", heading(document), tours(document)),
        element("main", controls(document), player(), *panels(document)),
        footer(document),
        element("script", Html(embedded(document)), type="application/json", id="records"),
        element("script", Html(script())),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", "Ring attention, step by step"),
        element("style", Html(asset(STYLE))),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


@cache
def script() -> str:
    """The parts of the script as one."""
    return '"use strict";\n' + "".join(asset(name) for name in SCRIPTS)


def policy() -> str:
    """Nothing is loaded; the page's own script and style, and no other, are taken."""
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script(), asset(STYLE))
    ]
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'"
    )


def embedded(document: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that holds it, whatever its strings are.

    >>> embedded({"a": "</script><!--&"})
    '{"a":"\\\\u003c/script\\\\u003e\\\\u003c!--\\\\u0026"}'
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def heading(document: Mapping[str, Any]) -> Html:
    tokens = document["problem"]["tokens"]
    words = (
        f"One sequence of {tokens} tokens is dealt to W workers. Each keeps its queries; blocks of keys "
        "and values go round until everybody has met everybody. Step through it: who holds what, "
        "which pairs are computed, what a row has become, what is sent, and who waits."
    )
    return join([element("h1", "Ring attention, step by step"), element("p", words)])


def tours(document: Mapping[str, Any]) -> Html | None:
    """Links to states of the page that show something."""
    workers = document["choices"]["workers"]
    count = 4 if 4 in workers else max(workers)
    links = []
    for words, state, step in TOURS:
        known = state["layout"] in document["choices"]["layouts"]
        if count == 1 or not known or f"{count}/{state['layout']}" in document.get("missing", {}):
            continue
        place = {"w": count, **state, "step": min(step, count)}
        target = "#" + "&".join(f"{name}={value}" for name, value in place.items())
        links.append(element("li", element("a", words, href=target)))
    if not links:
        return None
    return element("nav", element("b", "Look at"), element("ul", *links), aria_label="Look at")


def controls(document: Mapping[str, Any]) -> Html:
    """One group of radio buttons for each choice."""
    choices = document["choices"]
    groups = (
        ("w", "Workers", {str(count): f"W = {count}" for count in choices["workers"]}),
        ("layout", "Layout", {name: LAYOUT_WORDS.get(name, "") for name in choices["layouts"]}),
        ("mask", "Mask", choices["masks"]),
        (
            "circulation",
            "Circulation",
            {name: CIRCULATION_WORDS.get(name, "") for name in choices["circulations"]},
        ),
        ("pass", "Pass", {name: f"the {name} pass" for name in choices["passes"]}),
    )
    return element(
        "form",
        *(group(name, title, options) for name, title, options in groups),
        id="controls",
        aria_label="What is shown",
    )


def group(name: str, title: str, options: Mapping[str, str]) -> Html:
    buttons = [
        element(
            "label",
            element("input", type="radio", name=name, value=value),
            element("span", value),
            title=words,
        )
        for value, words in options.items()
    ]
    return element("fieldset", element("legend", title), element("div", *buttons), class_="choice")


def player() -> Html:
    """The buttons and the slider."""
    buttons = [
        element("button", sign, type="button", id=id, title=words)
        for id, sign, words in (
            ("first", "First", "First step: the key Home"),
            ("back", "Back", "Back: the key left arrow"),
            ("next", "Next", "Next step: the key right arrow"),
            ("last", "End", "End: the key End"),
        )
    ]
    slider = element(
        "input", type="range", id="step", min=0, max=0, value=0, aria_label="step of the ring"
    )
    place = element("output", "", id="place", for_="step")
    return element("div", *buttons, slider, place, id="player", role="group", aria_label="Steps")


def panels(document: Mapping[str, Any]) -> list[Html]:
    rows = [element("option", n, value=n) for n in range(document["problem"]["tokens"])]
    chooser = element("label", "Row (token) ", element("select", *rows, id="row"))
    return [
        element("noscript", element("p", "This page needs its script.", class_="notice")),
        element("p", "", id="say", aria_live="polite"),
        element("p", "", id="note", class_="notice", hidden="hidden"),
        element(
            "div",
            element(
                "div",
                panel("ring", "Who holds what", element("div", id="ring"), key_of_ring()),
                panel("state", "What one row has become", chooser, element("div", id="state")),
                panel("symbols", "What the letters mean", symbols()),
                class_="column",
            ),
            element(
                "div",
                panel(
                    "pattern",
                    "Which pairs are computed",
                    element("div", id="pattern"),
                    element("ul", id="pattern-key", class_="key"),
                ),
                panel(
                    "load",
                    "Work and waiting",
                    element("div", id="load"),
                    element("p", "", id="load-words"),
                ),
                panel("bytes", "What is sent", element("div", id="bytes")),
                class_="column",
            ),
            id="panels",
        ),
    ]


def panel(name: str, title: str, *content: Html) -> Html:
    heading = element("h2", title, id=f"{name}-title")
    return element(
        "section", heading, *content, class_=f"panel {name}", aria_labelledby=f"{name}-title"
    )


def key_of_ring() -> Html:
    words = (
        ("input", "filled: inputs of a block, with its owner's number and colour"),
        ("sum", "outlined: results that grow"),
        ("travels", "round ends: it travels; square: it stays"),
    )
    items = [
        element("li", element("span", class_=f"sample {name}", aria_hidden="true"), text)
        for name, text in words
    ]
    return join([element("p", "", id="travel"), element("ul", *items, class_="key")])


def symbols() -> Html:
    """The letters of the tables and of the picture, in the order in which they are computed."""
    entries = [join([element("dt", name), element("dd", words)]) for name, words in SYMBOLS]
    return element("dl", *entries)


def footer(document: Mapping[str, Any]) -> Html:
    problem = document["problem"]
    words = (
        f"Every number is from a recorded run, ringspec.ring(..., record=True) of ringspec "
        f"{document['version']}: S = {problem['tokens']} tokens, {problem['heads']} head, "
        f"D = {problem['head_dim']}, tensors drawn from seed {problem['seed']}, recipe "
        f"{problem['recipe']} (8 bytes a number), shown to {problem['decimals']} decimals. Pairs and "
        "bytes are those that ringspec.rings.cost counts; the position of a token travels with it and "
        "counts 8 bytes. Waiting is counted as if all workers begin a step together and a pair takes "
        "everywhere the same time; transfers are not timed."
    )
    keys = "Keys: left and right arrow, Home, End; up and down arrow choose the row."
    return element("footer", *(element("p", text) for text in (words, keys)))
