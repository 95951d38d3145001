"""Elements of HTML and SVG in which every text is escaped."""

from __future__ import annotations

import re
from html import escape

# Every other outcome is a failure.
CLASSES = {
    "pass": "good",
    "expected failure": "known",
    "not claimed": "neutral",
    "not run": "neutral",
}
SIGNS = {"good": "\u2713", "known": "!", "neutral": "\u2013", "bad": "\u2717"}
NO_CONTENT = ("meta", "input", "br", "path", "rect", "line")
# No C0 and C1 controls but tab and newline, no surrogates, no marks that turn the direction of text.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


class Html(str):
    """Text that is markup already. Everything else is escaped on its way into an element."""


def text(value: object) -> Html:
    """Escaped, with a sign in place of characters that cannot be seen.

    >>> str(text("<b>\\x00"))
    '&lt;b&gt;\\ufffd'
    """
    if isinstance(value, Html):
        return value
    return Html(escape(UNSEEN.sub("\ufffd", str(value)), quote=True))


def element(tag: str, *children: object, **attributes: object) -> Html:
    """One element. ``class_`` and ``data_x`` are attributes class and data-x; None is left out.

    >>> str(element("p", "1 < 2", element("b", 3), class_="x"))
    '<p class="x">1 &lt; 2<b>3</b></p>'
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    given = "".join(
        f' {names[name]}="{text(value)}"' for name, value in attributes.items() if value is not None
    )
    if tag in NO_CONTENT:
        return Html(f"<{tag}{given}/>")
    inner = "".join(text(child) for child in children if child is not None)
    return Html(f"<{tag}{given}>{inner}</{tag}>")


def join(parts: list[Html]) -> Html:
    return Html("".join(parts))


def badge(outcome: str) -> Html:
    """The name of an outcome with its colour and a sign."""
    sign = SIGNS[class_of(outcome)]
    return element("span", f"{sign} {outcome}", class_=f"badge {class_of(outcome)}")


def class_of(outcome: str) -> str:
    """
    >>> [class_of(one) for one in ("pass", "expected failure", "not claimed", "crash")]
    ['good', 'known', 'neutral', 'bad']
    """
    return CLASSES.get(outcome, "bad")
