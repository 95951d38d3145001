"""The text for an issue that ``ringspec reproduce`` writes beside the program."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

from ringspec.cli.views.shrink import describe
from ringspec.conformance.reproduce.reproduce import Reproducer


def report(found: Reproducer, header: dict[str, Any], file: str) -> str:
    """Return the text as Markdown. ``header``: that of a report; ``file``: the name of the program."""
    return "\n".join(lines(found, header, file)) + "\n"


def lines(found: Reproducer, header: dict[str, Any], file: str) -> Iterator[str]:
    """Yield the lines: what is wrong, versions, where, the cause with its evidence, the program."""
    shrunk, name = found.shrunk, header["target"]["name"]
    wrong = ", ".join(shrunk.last.tensors)
    yield f"# {name}: wrong {wrong} with {describe(shrunk.last.problem)}"
    yield ""
    yield f"`{file}` calls the function once and compares its results with dense attention in float64. It needs no"
    yield "other tool. It prints:"
    yield ""
    yield "```text"
    yield from found.output.strip().splitlines()
    yield "```"
    yield ""
    yield "## Versions"
    yield ""
    ours = ("ringspec", "specification")
    entries = {key: one for key, one in header["versions"].items() if key not in ours}
    yield from (f"- {key} {version}" for key, version in entries.items())
    yield f"- {platform.system()}, {platform.machine()}"
    yield ""
    yield "## What is wrong, and where"
    yield ""
    yield from (f"- {line}" for line in shrunk.message.splitlines())
    right = [
        one
        for one in ("o", "lse", "dq", "dk", "dv")
        if one in set(correct(found)) - set(shrunk.last.tensors)
    ]
    if right:
        yield f"- correct in the same call: {', '.join(right)}"
    yield ""
    yield "A bound is the largest error that rounding in the declared precision can explain."
    yield ""
    yield from cause(found)
    yield "## The program"
    yield ""
    yield "```python"
    yield from found.text.splitlines()
    yield "```"
    yield ""
    ringspec = header["versions"]["ringspec"]
    yield f"Found by ringspec {ringspec}, case {shrunk.id} ({describe(shrunk.first.problem)}), and made smaller."


def correct(found: Reproducer) -> list[str]:
    return [one.tensor for one in found.shrunk.last.findings if one.ok]


def cause(found: Reproducer) -> Iterator[str]:
    """Yield the cause, if one is known, and the evidence for it."""
    diagnosis = found.record.diagnosis or {}
    if not found.shrunk.explanation and not diagnosis.get("id"):
        return
    yield "## Cause"
    yield ""
    if found.shrunk.explanation:
        yield from found.shrunk.explanation
        yield ""
        yield "Evidence: a ring with exactly this fault gives the wrong numbers above, and those of the original case."
        yield ""
    if diagnosis.get("id"):
        yield f"Likely bug: {diagnosis['title']}. Evidence, from the case {found.record.id}:"
        yield ""
        yield "```text"
        yield from diagnosis["text"].splitlines()
        yield "```"
        yield ""
