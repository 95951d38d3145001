"""Make HTML pages from the Jinja2 templates in ``ringspec/render/templates``.

Every value is escaped, except the style, the script and the embedded data of a page, which are marked ``|safe``. A
template that uses a name without a value raises an error.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

# Any other outcome is a failure.
CLASSES = {
    "pass": "good",
    "expected failure": "known",
    "not claimed": "neutral",
    "not run": "neutral",
}
SIGNS = {"good": "\u2713", "known": "!", "neutral": "\u2013", "bad": "\u2717"}
# Control characters C0 and C1 except tab and newline, surrogates, and marks that change the direction of text.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def filled_in(template: str, script: str, style: str, **values: Any) -> str:
    """Return a complete page: ``template`` with ``values`` filled in.

    The page runs no other script and uses no other style than ``script`` and ``style``.
    """
    names = {"script": script, "style": style, "policy": policy(script, style)}
    return environment().get_template(template).render(values | names)


@cache
def environment() -> Environment:
    """Return the Jinja2 environment: the templates, with the settings that all pages share."""
    # Imported here, because most commands write no page.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("ringspec.render"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["signs"] = SIGNS
    made.filters["outcome_class"] = class_of
    return made


def visible(value: object) -> object:
    r"""Return a value as text, with U+FFFD in place of each invisible character; None becomes an empty text.

    >>> visible("<b>\x00"), visible(None), visible(3)
    ('<b>\ufffd', '', '3')
    """
    if hasattr(value, "__html__"):  # the output of a macro, or marked as safe
        return value
    return "" if value is None else UNSEEN.sub("\ufffd", str(value))


def class_of(outcome: str) -> str:
    """Return the CSS class of the outcome of a case.

    >>> [class_of(one) for one in ("pass", "expected failure", "not claimed", "crash")]
    ['good', 'known', 'neutral', 'bad']
    """
    return CLASSES.get(outcome, "bad")


def asset(name: str) -> str:
    """Return the text of a style or script file in the folder ``ringspec/render``."""
    return files("ringspec.render").joinpath(name).read_text(encoding="utf-8")


def policy(script: str, style: str) -> str:
    """Return a content security policy that forbids loading anything and allows only ``script`` and ``style``."""
    script_hash, style_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    )
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'"
    )
