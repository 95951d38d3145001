"""What a bug of this ring is, and the decorators that enter it into ``BUGS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Part = Callable[..., Any]


@dataclass
class Bug:
    """One bug: other functions for some of ``torch_ring.PARTS``.

    ``what``: what is wrong, in a sentence. ``shown_by``: a problem of ``problems.PROBLEMS`` on which
    it shows, in ``dtype``. ``ids``: names in ``reports.REPORTS`` of public reports of such a bug;
    empty for a trap that no report tells of.
    """

    name: str
    what: str
    shown_by: str
    ids: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    parts: dict[str, Part] = field(default_factory=dict)


BUGS: dict[str, Bug] = {}


def bug(
    part: str, ids: str, what: str, shown_by: str, dtype: str = "bfloat16"
) -> Callable[[Part], Part]:
    """The function takes the place of ``part``, and its name is the bug's."""

    def enter(function: Part) -> Part:
        name = function.__name__
        assert name not in BUGS
        BUGS[name] = Bug(name, what, shown_by, tuple(ids.split()), dtype, {part: function})
        return function

    return enter


def also(name: str, part: str) -> Callable[[Part], Part]:
    """One more part of a bug that is there already."""

    def enter(function: Part) -> Part:
        BUGS[name].parts[part] = function
        return function

    return enter
