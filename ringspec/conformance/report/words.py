"""The outcome of a case and the verdict of a run as text, for the terminal, JUnit and an AssertionError."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ringspec.compare.explain import explain_all
from ringspec.conformance.report.records import OUTCOMES, Record

MOST_FINDINGS = 8
MOST_SENTENCES = 4
NEXT = (
    "  next: ringspec explain says what the target computes instead; "
    "ringspec replay repeats one failure"
)
NEXT_OF_SCHEMES = "  next: ringspec replay repeats one failure"


def record_text(record: Record, most: int = MOST_FINDINGS) -> str:
    """Describe a record in a paragraph: the outcome, the message, and where the tensors are wrong.

    >>> from ringspec.conformance.report.records import Finding
    >>> wrong = Finding("lse", 2, "beyond bound", 31.5, (0, 1, 3), 0.5, 0.25, rows=4, of=12)
    >>> print(record_text(Record("ring/a", "mismatch", message="a step is missing", findings=(wrong,))))
    ring/a: mismatch: a step is missing
      lse of worker 2: 4 of 12 rows beyond their bound; worst at batch 0, head 1, slot 3: got 0.5, want 0.25 (31.5 times the bound)
    """
    message = record.message.strip()
    if message == explain_all(record.findings).strip():
        message = ""  # the findings are listed below
    if not message and record.outcome not in ("pass", "mismatch"):
        message = OUTCOMES[record.outcome]
    findings = explain_all(record.findings, most).splitlines()
    # Do not repeat findings that the message already contains.
    findings = [line for line in findings if line not in message]
    lines = [f"{record.id}: {record.outcome}" + (f": {message}" if message else "")]
    if record.reason and record.reason not in message:
        lines.append(f"  {record.reason}")
    lines += [f"  {line}" for line in findings]
    return "\n".join([*lines, *diagnosis_lines(record)])


def diagnosis_lines(record: Record) -> list[str]:
    """Return the lines that name the known bug with the results of a failure; [] without a diagnosis."""
    text = str((record.diagnosis or {}).get("text", ""))
    return [
        f"  {'diagnosis: ' if n == 0 else '  '}{line}" for n, line in enumerate(text.splitlines())
    ]


def verdict_lines(found: Mapping[str, Any], spec: str = "TARGET") -> list[str]:
    r"""Describe the verdict of a run (:func:`ringspec.conformance.diagnose.summary.most_likely`).

    The target is the program under test. The lines say what it computes instead of attention, then which known bug
    explains most failures, then which bugs explain the remaining ones. ``spec``: the target, as written in the
    suggested commands.

    >>> other = {"id": "dlse-sign", "title": "a sign", "count": 1, "refuted_by": ["ring/a"]}
    >>> print("\n".join(verdict_lines({"id": None, "of": 5, "also": [other]})))
    no known bug explains most of the 5 diagnosed failures
      next: ringspec explain says what the target computes instead; ringspec replay repeats one failure
      1 other failure looks like: a sign [dlse-sign]; but then ring/a would fail, and it passes
    """
    explanation = found.get("explanation")
    lines = explanation_lines(explanation, spec) if explanation else []
    if found["id"] is not None:
        of = found["of"]
        where = (
            f"in the {diagnosed(of)}" if of == 1 else f"in {found['count']} of the {diagnosed(of)}"
        )
        lines.append(f"diagnosis: {found['title']} [{found['id']}], {where}")
        lines += [f"  {link}" for link in found["links"]]
        if found["alike"]:
            lines.append(f"  other bugs with the same results: {', '.join(found['alike'])}")
    elif found["of"]:
        most = "most of " if found["also"] else ""
        lines.append(f"no known bug explains {most}the {diagnosed(found['of'])}")
        lines += (
            [] if explanation else [NEXT if found.get("explainable", True) else NEXT_OF_SCHEMES]
        )
    return lines + [also_named(one) for one in found["also"]]


def explanation_lines(found: Mapping[str, Any], spec: str) -> list[str]:
    r"""Describe what the program under test computes instead of attention.

    >>> found = {"sentences": ["In the forward pass, the block is counted twice."], "alternatives": [],
    ...          "explained": ["a", "b", "c"], "failures": 4, "hint": "look at the loop", "shown_by": "readout/x",
    ...          "wrong": ["readout/x"], "right": 2}
    >>> print("\n".join(explanation_lines(found, "mine:ring")))
    explanation:
      In the forward pass, the block is counted twice.
      explains the numbers of 3 of 4 failures; 1 remains
      seen in readout/x; 2 other readouts pass
      look at the loop
      smallest command that shows it: ringspec replay mine:ring readout/x
    """
    lines = ["explanation:", *(f"  {sentence}" for sentence in found["sentences"][:MOST_SENTENCES])]
    lines += [f"  or, with the same results: {one}" for one in found["alternatives"]]
    explains, failures = len(found["explained"]), found["failures"]
    if explains:
        left = failures - explains
        rest = f"; {left} remain{'s' if left == 1 else ''}" if left else ""
        lines.append(f"  explains the numbers of {explains} of {failures} failures{rest}")
    if found["right"]:
        other = (
            "1 other readout passes"
            if found["right"] == 1
            else f"{found['right']} other readouts pass"
        )
        lines.append(f"  seen in {', '.join(found['wrong'])}; {other}")
    lines += [f"  {found['hint']}"] if found["hint"] else []
    command = shlex.join(["ringspec", "replay", spec, found["shown_by"]])
    return [*lines, f"  smallest command that shows it: {command}"]


def diagnosed(count: int) -> str:
    return "diagnosed failure" if count == 1 else f"{count} diagnosed failures"


def also_named(one: Mapping[str, Any]) -> str:
    """Describe a bug that the diagnoses of some cases name, but not the verdict of the run."""
    one_only = one["count"] == 1
    failures = "1 other failure looks" if one_only else f"{one['count']} other failures look"
    text = f"  {failures} like: {one['title']} [{one['id']}]"
    if not one["refuted_by"]:
        return text
    cases = ", ".join(one["refuted_by"])
    verb = "it passes" if len(one["refuted_by"]) == 1 else "they pass"
    return f"{text}; but then {cases} would fail, and {verb}"


def folded(lines: Sequence[str], width: int) -> list[str]:
    """Break lines between words to at most ``width`` characters; continuation lines are indented.

    >>> folded(["one two three"], 9)
    ['one two', '  three']
    """
    result = []
    for line in lines:
        parts = textwrap.wrap(
            line,
            width,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
        result += [line.rstrip()] if len(line) <= width else parts
    return result
