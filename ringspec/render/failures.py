"""One failure: what went wrong, where, and one command that reproduces it alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from ringspec.render.html import Html, badge, element
from ringspec.render.picture import picture
from ringspec.render.tables import (
    Case,
    badness,
    error_grid,
    listed,
    number,
    number_of,
    workers_of,
    worst_text,
)

MOST_FINDINGS = 16
AXES = ("b", "h", "slot", "d")


def failure(case: Case, header: Mapping[str, Any], opened: bool) -> Html:
    """An article that unfolds."""
    command = replay_command(case, header)
    summary = element(
        "summary",
        badge(case["outcome"]),
        element("span", case["id"], class_="id"),
        element("span", worst_text(case), class_="worst"),
    )
    findings = listed(case.get("findings"))
    truth = str(case.get("truth") or "").removesuffix(" values")
    grid = None
    if findings:
        held = 1 + max(number_of(one) for one in findings)
        grid = error_grid(findings, max(workers_of(case) or 1, held))
    content = (
        element("p", case["reason"], class_="reason") if case.get("reason") else None,
        element("pre", case["message"], class_="message") if case.get("message") else None,
        element("h4", "Where") if findings else None,
        element("div", grid, class_="wide") if grid else None,
        worst_findings(findings) if findings else None,
        drawn(case),
        diagnosis(case),
        flags(case),
        element("h4", "Reproduce it alone"),
        element(
            "div",
            element("pre", command, class_="command"),
            element("button", "Copy", type="button", data_copy=command),
            class_="reproduce",
        ),
        element("p", f"Compared with {truth} values.", class_="truth")
        if findings and truth
        else None,
    )
    return element("details", summary, *content, class_="failure", open="" if opened else None)


def replay_command(case: Case, header: Mapping[str, Any]) -> str:
    """What to type in a shell.

    >>> replay_command({"id": "ring/a"}, {"target": {"spec": "my kernel.py:run"}, "profile": "full"})
    "ringspec replay 'my kernel.py:run' ring/a"
    """
    target = header.get("target")
    spec = target.get("spec", "TARGET") if isinstance(target, Mapping) else "TARGET"
    words = ["ringspec", "replay", shlex.quote(str(spec)), shlex.quote(str(case["id"]))]
    options = header.get("options")
    if isinstance(options, Mapping) and type(options.get("timeout")) in (int, float):
        words.append(f"--timeout {options['timeout']:g}")
    return " ".join(words)


def worst_findings(findings: list[Mapping[str, Any]]) -> Html | None:
    """The failing tensors, the worst first."""
    wrong = sorted((one for one in findings if one.get("kind") != "ok"), key=badness, reverse=True)
    if not wrong:
        return None
    names = ("tensor", "worker", "what", "error / bound", "worst element", "got", "want", "rows")
    rows = [
        element(
            "tr",
            element("td", one.get("tensor")),
            element("td", one.get("worker"), class_="figure"),
            element("td", one.get("kind")),
            element("td", brief(one.get("error")), class_="figure"),
            element("td", place(one)),
            element("td", figure(one.get("got")), class_="figure"),
            element("td", figure(one.get("want")), class_="figure"),
            element("td", f"{one.get('rows', 0)} of {one.get('of', 0)}"),
        )
        for one in wrong[:MOST_FINDINGS]
    ]
    head = element("thead", element("tr", *(element("th", name, scope="col") for name in names)))
    table = element("table", head, element("tbody", *rows), class_="findings")
    more = len(wrong) - MOST_FINDINGS
    rest = element("p", f"and {more} more") if more > 0 else None
    return element("div", table, rest, class_="wide")


def figure(value: Any) -> str:
    """
    >>> figure(0.123456789), figure("Infinity"), figure(None)
    ('0.1234568', 'inf', '')
    """
    return "" if value is None else f"{number(value):.7g}"


def brief(value: Any) -> str:
    """
    >>> brief(147023.2), brief(1.25), brief("Infinity")
    ('1.47e+05', '1.25', 'inf')
    """
    return f"{number(value):.3g}"


def place(finding: Mapping[str, Any]) -> str:
    where = listed(finding.get("where"))
    if finding.get("tensor") in ("dsinks", "dbias") or len(where) > len(AXES):
        return str(where) if where else ""
    return ", ".join(f"{axis} {n}" for axis, n in zip(AXES, where, strict=False))


def drawn(case: Case) -> Html | None:
    """The attention pattern, where a probe read it."""
    if not case.get("picture"):
        return None
    image = picture(case["picture"])
    if image is None:
        return element("p", "The report's picture of the attention pattern cannot be drawn.")
    return element("div", element("h4", "Attention pattern"), image)


def diagnosis(case: Case) -> Html | None:
    """The known bug that gives the same answer, or where the answer is wrong."""
    data = case.get("diagnosis")
    if not isinstance(data, Mapping) or not data.get("title"):
        return None
    title = str(data["title"]) + (f" [{data['id']}]" if data.get("id") else "")
    links = [str(link) for link in listed(data.get("links")) if str(link).startswith("https://")]
    anchors = [element("li", element("a", link, href=link)) for link in links]
    where = [element("li", str(line)) for line in listed(data.get("where"))]
    return element(
        "div",
        element("h4", "Diagnosis"),
        element("p", title, class_="title"),
        element("p", str(data["what"])) if data.get("what") else None,
        element("ul", *anchors, *where) if anchors or where else None,
        class_="diagnosis",
    )


def flags(case: Case) -> Html | None:
    names = listed(case.get("flags"))
    if not names:
        return None
    chips = [element("code", name) for name in names]
    return element("p", "Known bugs that this case finds: ", *chips, class_="flags")
