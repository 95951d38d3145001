"""Formulas as MathML, written at build time: the pages need no script and no network to show them.

Browsers draw MathML themselves (https://developer.mozilla.org/docs/Web/MathML); latex2mathml converts.
"""

import re
from typing import Any

import latex2mathml.converter
from docutils import nodes


def converted(latex: str, display: str) -> str:
    """LaTeX as a MathML element. Raises ValueError for a command that the converter does not convert."""
    # A browser fits delimiters to what is between them.
    sized = re.sub(r"\\[bB]igg?[lrm]?(?![A-Za-z])", "", latex)
    markup = latex2mathml.converter.convert(sized, display=display)
    if "\\" in markup:
        raise ValueError(f"expected LaTeX that latex2mathml knows; got {latex!r}")
    return markup


def inline(self: Any, node: nodes.Element) -> None:
    self.body.append(converted(node.astext(), "inline"))
    raise nodes.SkipNode


def block(self: Any, node: nodes.Element) -> None:
    markup = converted(node.astext(), "block")
    # The theme lets it scroll, which shows a scroll bar where ink leaves the line.
    self.body.append(f'<div class="math" style="overflow-y: hidden">{markup}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
