"""One self-contained HTML page from the lines of a report.

It names no other file and fetches nothing, and its content security policy forbids both; the only
script and style that run are its own, by their hashes. All text of a report is hostile and escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from ringspec.render.failures import failure
from ringspec.render.html import Html, badge, class_of, element, join
from ringspec.render.tables import Case, all_cases, listed, matrix, reasons, worst_errors

MOST_FAILURES = 500


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page of a report's lines: the header, the cases, the footer where there is one.

    >>> header = {"kind": "header", "target": {"name": "<mine>"}, "profile": "core"}
    >>> cases = [{"kind": "case", "id": "ring/one", "outcome": "pass"}]
    >>> text = page([header, *cases])
    >>> "&lt;mine&gt;" in text, "<mine>" in text, "Incomplete" in text
    (True, False, True)
    """
    header = next((line for line in lines if line.get("kind") == "header"), {})
    footer = next((line for line in lines if line.get("kind") == "footer"), None)
    verdict = next((line for line in lines if line.get("kind") == "verdict"), {})
    cases = [line for line in lines if line.get("kind") == "case"]
    failed = [case for case in cases if class_of(case["outcome"]) == "bad"]
    name = described(header.get("target")).get("name", "a target")
    body = element(
        "body",
        top(header, footer, cases, listed(verdict.get("lines"))),
        element(
            "main",
            section("failures", f"Failures ({len(failed)})", *failures(failed, header)),
            section("features", "Features by capabilities", *features(cases)),
            section("errors", "Errors by tensor and worker", *errors(cases)),
            section("unclaimed", "Not claimed", *unclaimed(cases)),
            section("cases", f"All cases ({len(cases)})", *table(cases)),
            section("run", "The run", run_details(header, footer)),
        ),
        element("script", Html(asset("page.js"))),
    )
    title = element("title", f"{name}: ringspec conformance")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        title,
        element("style", Html(asset("page.css"))),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def asset(name: str) -> str:
    """The style or the script, which lie beside this file."""
    return files("ringspec.render").joinpath(name).read_text(encoding="utf-8")


def policy() -> str:
    """Nothing is loaded; the page's own script and style, and no other, are taken."""
    hashes = {
        name: base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()
        for name in ("page.js", "page.css")
    }
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{hashes['page.js']}'; style-src 'sha256-{hashes['page.css']}'"
    )


def described(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def section(id: str, title: str, *content: Html | None) -> Html:
    return element("section", element("h2", title), *content, id=id)


def top(
    header: Mapping[str, Any],
    footer: Mapping[str, Any] | None,
    cases: Sequence[Case],
    verdict: Sequence[Any] = (),
) -> Html:
    """The target, the headline, what the failures say together, the counts, and a warning where the run
    did not reach its end.
    """
    counts = Counter(case["outcome"] for case in cases)
    target = described(header.get("target"))
    incomplete = None
    if footer is None or footer.get("complete") is not True:
        why = "it has no footer" if footer is None else "cases were not run"
        words = f"Incomplete: {why}. What follows is no verdict on the whole."
        incomplete = element("p", words, class_="warning", role="alert")
    bad = any(class_of(outcome) == "bad" for outcome in counts)
    none_ran = not any(class_of(outcome) != "neutral" for outcome in counts)
    colour = "bad" if bad or none_ran or incomplete is not None else "good"
    title = (
        footer.get("headline") if footer is not None else f"{counts['pass']} cases passed so far"
    )
    counted = [
        element("li", badge(outcome), element("b", count))
        for outcome, count in counts.most_common()
    ]
    links = [
        element("a", words, href=f"#{id}")
        for id, words in (
            ("failures", "Failures"),
            ("features", "Features"),
            ("errors", "Errors"),
            ("cases", "All cases"),
            ("run", "The run"),
        )
    ]
    return element(
        "header",
        element("p", f"ringspec conformance, profile {header.get('profile', '')}", class_="over"),
        element("h1", target.get("name", "a target")),
        element("p", title, class_=f"headline {colour}", id="headline"),
        incomplete,
        said_together(verdict),
        bar(counts),
        element("ul", *counted, class_="counts"),
        *untested(described((footer or {}).get("coverage"))),
        *(element("p", note, class_="note") for note in target.get("notes", ()) or ()),
        element("nav", *links),
    )


def said_together(lines: Sequence[Any]) -> Html | None:
    """The diagnosis of the run: its first line, and below it reports of the bug and other names."""
    if not lines:
        return None
    first, *rest = (str(line).strip() for line in lines)
    items = [
        element("li", element("a", line, href=line) if line.startswith("https://") else line)
        for line in rest
    ]
    return element(
        "div",
        element("p", first[:1].upper() + first[1:], class_="title"),
        element("ul", *items) if items else None,
        class_="diagnosis",
        id="diagnosis",
    )


def untested(coverage: Mapping[str, Any]) -> list[Html]:
    """What is claimed and was not tested, each value, and how to have it tested."""
    kinds = described(coverage.get("untested"))
    listed = [
        element("li", f"{str(kind).replace('_', ' ')}: {', '.join(map(str, values))}")
        for kind, values in kinds.items()
    ]
    hints = [element("p", hint, class_="note") for hint in coverage.get("hints", ())]
    if not listed:
        return hints
    title = element("summary", "Claimed, but used by no executed case")
    return [*hints, element("details", title, element("ul", *listed), id="untested")]


def bar(counts: Counter[str]) -> Html:
    """How the cases divide, as one bar."""
    total = sum(counts.values()) or 1
    x, parts = 0.0, []
    for kind in ("good", "known", "bad", "neutral"):
        width = 100 * sum(n for outcome, n in counts.items() if class_of(outcome) == kind) / total
        if width:
            parts.append(
                element("rect", class_=kind, x=f"{x:.3f}", y=0, width=f"{width:.3f}", height=4)
            )
        x += width
    return element(
        "svg",
        *parts,
        viewBox="0 0 100 4",
        preserveAspectRatio="none",
        class_="bar",
        aria_hidden="true",
    )


def failures(failed: Sequence[Case], header: Mapping[str, Any]) -> list[Html]:
    if not failed:
        return [element("p", "No case failed.")]
    more = len(failed) - MOST_FAILURES
    listed = [failure(case, header, n < 3) for n, case in enumerate(failed[:MOST_FAILURES])]
    if more > 0:
        listed.append(element("p", f"and {more} more; the table of all cases has them."))
    return listed


def features(cases: Sequence[Case]) -> list[Html]:
    words = (
        "Rows are what a case uses, columns what it asks for. A number counts cases that pass; 3/12 says "
        "that 3 of 12 do; a dash, that no case of the kind is claimed."
    )
    return [element("p", words), element("div", matrix(cases), class_="wide")]


def errors(cases: Sequence[Case]) -> list[Html]:
    words = (
        "The largest error of all cases in units of its row's bound: up to 1 passes. A bound follows "
        "from the declared precision recipe and the row's own scale, never from a tensor's maximum."
    )
    tables = [
        element(
            "div",
            element("h3", title),
            element("div", grid, class_="wide"),
        )
        for title, grid in worst_errors(cases)
    ]
    return [element("p", words), element("div", *tables, class_="grids")]


def unclaimed(cases: Sequence[Case]) -> list[Html]:
    listed = reasons(cases)
    return [element("ul", listed, class_="reasons") if listed else element("p", "Nothing.")]


def table(cases: Sequence[Case]) -> list[Html]:
    outcomes = sorted({case["outcome"] for case in cases})
    options = [element("option", "all outcomes", value="")]
    options += [element("option", outcome, value=outcome) for outcome in outcomes]
    filters = element(
        "div",
        element(
            "label", "Find ", element("input", type="search", id="find", placeholder="id or reason")
        ),
        element("label", "Outcome ", element("select", *options, id="only")),
        element("span", "", id="shown", aria_live="polite"),
        class_="filters",
    )
    return [filters, element("div", all_cases(cases), class_="wide")]


def run_details(header: Mapping[str, Any], footer: Mapping[str, Any] | None) -> Html:
    """Everything of the header, as it is, and what the footer says otherwise of versions."""
    rows: list[Html] = []
    later = {f"later {kind}": (footer or {}).get(kind) for kind in ("versions", "files")}
    said = {**header, **{name: value for name, value in later.items() if value}}
    for name, value in said.items():
        if name in ("kind", "format"):
            continue
        entries = value if isinstance(value, Mapping) else {"": value}
        for key, entry in entries.items():
            words = entry if isinstance(entry, str) else json.dumps(entry)
            rows.append(element("dt", f"{name} {key}".strip()))
            rows.append(element("dd", words))
    return element("dl", join(rows), class_="details")
