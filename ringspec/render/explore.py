"""One self-contained HTML page that steps through a ring, from the data of ``ringspec explore``.

The page refers to no other file and loads nothing. The content security policy of the page forbids loading and allows
only the page's own script and style, by their hashes. The data are embedded in the page, and the script inserts them
only as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ringspec.render.environment import asset, filled_in

# Joined in this order into one script.
SCRIPTS = (
    "explore.js",
    "explore_ring.js",
    "explore_pattern.js",
    "explore_tables.js",
    "explore_bug.js",
)
SCHEME_SCRIPTS = ("explore.js", "explore_pattern.js", "explore_tables.js", "explore_scheme.js")
STYLE = "explore.css"

LAYOUT_WORDS = {
    "contiguous": "each worker holds consecutive tokens",
    "striped": "token i is on worker i mod W",
    "zigzag": "each worker holds one early and one late chunk of tokens",
}
CIRCULATION_WORDS = {
    "kv": "the keys and values travel",
    "q": "backward, the queries travel instead",
    "gather": "no ring: all keys are copied to all workers first",
}
SCHEME_WORDS = {
    "ring": "keys and values travel",
    "double_ring": "a ring of rings",
    "all_gather": "every rank gets all keys first",
    "ulysses": "tokens are exchanged for heads",
    "usp": "Ulysses along one axis, a ring along the other",
    "joint": "some tokens, the text, are on all ranks",
    "pcp": "prefill: the keys of a cached prefix and of new tokens are gathered",
    "dcp": "decoding: keys stay, partial results are merged",
}
RING_WORDS = {"wrong": "the ring with the bug", "right": "the ring of the specification"}
# First examples for a beginner: (title, state of the page that shows it).
TOURS = (
    (
        "Contiguous and causal: worker 0 is soon idle",
        {"layout": "contiguous", "mask": "causal", "circulation": "kv", "pass": "forward"},
        2,
    ),
    (
        "Zigzag: the same pairs, no worker waits",
        {"layout": "zigzag", "mask": "causal", "circulation": "kv", "pass": "forward"},
        2,
    ),
    (
        "Backward: dk and dv travel, and make one more hop to their owners",
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


def explore_page(document: Mapping[str, Any]) -> str:
    """Return the page for the data of ``ringspec.cli.views.explore_records``, or of schemes, of ``explore_schemes``.

    >>> document = {"choices": {"workers": [2], "layouts": [], "masks": {}, "circulations": [],
    ...                         "passes": []}, "problem": {"tokens": 4, "heads": 1, "head_dim": 4,
    ...             "seed": 0, "recipe": "float64", "decimals": 4}, "version": "</script>"}
    >>> text = explore_page(document)
    >>> text.count("<script"), text.count("</script>"), "http-equiv" in text
    (2, 2, True)
    """
    return filled_in(
        "explore.html",
        '"use strict";\n'
        + "".join(asset(name) for name in (SCHEME_SCRIPTS if "schemes" in document else SCRIPTS)),
        asset(STYLE),
        problem=document["problem"],
        version=document["version"],
        tours=tours(document),
        choices=choices(document["choices"]),
        bug=document.get("bug"),
        schemes="schemes" in document,
        records=embedded(document),
    )


def embedded(document: Mapping[str, Any]) -> str:
    r"""Return JSON that cannot end the HTML element around it, whatever strings it contains.

    >>> embedded({"a": "</script><!--&"})
    '{"a":"\\u003c/script\\u003e\\u003c!--\\u0026"}'
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def tours(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the title and address of each link to an instructive state of the page."""
    if "schemes" in document:
        return []
    if "bug" in document:
        return [bug_tour(place) for place in document["bug"]["places"]]
    workers = document["choices"]["workers"]
    count = 4 if 4 in workers else max(workers)
    links = []
    for words, state, step in TOURS:
        known = state["layout"] in document["choices"]["layouts"]
        if count == 1 or not known or f"{count}/{state['layout']}" in document.get("missing", {}):
            continue
        place = {"w": count, **state, "step": min(step, count)}
        links.append((words, "#" + "&".join(f"{name}={value}" for name, value in place.items())))
    return links


def bug_tour(place: Mapping[str, Any]) -> tuple[str, str]:
    """Return the title and address of a link to the step and row where a pass of the wrong ring first differs.

    >>> bug_tour({"pass": "backward", "step": 2, "row": 5})
    ('First difference of the backward pass', '#ring=wrong&pass=backward&step=2&row=5')
    """
    words = f"First difference of the {place['pass']} pass"
    address = "&".join(f"{name}={value}" for name, value in {"ring": "wrong", **place}.items())
    return words, "#" + address


def choices(given: Mapping[str, Any]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return the name, title and buttons of each group of radio buttons; a button is a pair (value, meaning)."""

    def explained(names: Sequence[str], words: Mapping[str, str]) -> list[tuple[str, str]]:
        return [(name, words.get(name, "")) for name in names]

    passes = ("pass", "Pass", [(name, f"the {name} pass") for name in given["passes"]])
    if "schemes" in given:
        return [
            ("scheme", "Scheme", explained(given["schemes"], SCHEME_WORDS)),
            ("mask", "Mask", list(given["masks"].items())),
            ("head", "Query head", [(head, f"query head {head}") for head in given["heads"]]),
            passes,
        ]
    rings = [("ring", "Ring", explained(given["rings"], RING_WORDS))] if "rings" in given else []
    return [
        *rings,
        ("w", "Workers", [(str(count), f"W = {count}") for count in given["workers"]]),
        ("layout", "Layout", explained(given["layouts"], LAYOUT_WORDS)),
        ("mask", "Mask", list(given["masks"].items())),
        ("circulation", "Circulation", explained(given["circulations"], CIRCULATION_WORDS)),
        passes,
    ]
