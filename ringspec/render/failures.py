"""One failed case on the page of a report: what is wrong, where, and a command that reproduces only this failure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringspec.render.picture import Picture, picture
from ringspec.render.tables import (
    Case,
    ErrorGrid,
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


@dataclass(frozen=True)
class Wrong:
    """One wrong tensor of one worker; ``tensor``, ``worker`` and ``kind`` are copied from the report."""

    tensor: Any
    worker: Any
    kind: Any
    error: str
    place: str
    got: str
    want: str
    rows: str


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a failure: the known bug with the same results, or a description of where results are wrong."""

    title: str
    what: Any
    links: list[str]
    where: list[str]


@dataclass(frozen=True)
class Failure:
    """The fields of one case in ``templates/failure.html``; an empty field is not shown.

    ``more``: number of wrong tensors that are not listed in ``wrong``. ``has_picture``: whether the report contains the
    data of a picture of the case. ``picture``: the picture; None if the report has none or it cannot be drawn.
    ``opened``: whether the page shows the details at first.
    """

    id: str
    outcome: str
    worst: str
    reason: Any
    message: Any
    errors: ErrorGrid | None
    wrong: list[Wrong]
    more: int
    picture: Picture | None
    has_picture: bool
    diagnosis: Diagnosis | None
    flags: list[Any]
    command: str
    truth: str
    opened: bool


def failure(case: Case, header: Mapping[str, Any], opened: bool) -> Failure:
    """Return the entry of a failed case on the page."""
    findings = listed(case.get("findings"))
    wrong = sorted((one for one in findings if one.get("kind") != "ok"), key=badness, reverse=True)
    errors = None
    if findings:
        held = 1 + max(number_of(one) for one in findings)
        errors = error_grid(findings, max(workers_of(case) or 1, held))
    return Failure(
        id=case["id"],
        outcome=case["outcome"],
        worst=worst_text(case),
        reason=case.get("reason"),
        message=case.get("message"),
        errors=errors,
        wrong=[wrong_tensor(one) for one in wrong[:MOST_FINDINGS]],
        more=len(wrong) - MOST_FINDINGS,
        picture=picture(case.get("picture")),
        has_picture=bool(case.get("picture")),
        diagnosis=diagnosis(case),
        flags=listed(case.get("flags")),
        command=replay_command(case, header),
        truth=str(case.get("truth") or "").removesuffix(" values") if findings else "",
        opened=opened,
    )


def replay_command(case: Case, header: Mapping[str, Any]) -> str:
    """Return the shell command that runs only ``case`` again.

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


def wrong_tensor(one: Mapping[str, Any]) -> Wrong:
    return Wrong(
        tensor=one.get("tensor"),
        worker=one.get("worker"),
        kind=one.get("kind"),
        error=brief(one.get("error")),
        place=place(one),
        got=figure(one.get("got")),
        want=figure(one.get("want")),
        rows=f"{one.get('rows', 0)} of {one.get('of', 0)}",
    )


def figure(value: Any) -> str:
    """Format a number from a report with seven digits; None becomes an empty text.

    >>> figure(0.123456789), figure("Infinity"), figure(None)
    ('0.1234568', 'inf', '')
    """
    return "" if value is None else f"{number(value):.7g}"


def brief(value: Any) -> str:
    """Format a number from a report with three digits.

    >>> brief(147023.2), brief(1.25), brief("Infinity")
    ('1.47e+05', '1.25', 'inf')
    """
    return f"{number(value):.3g}"


def place(finding: Mapping[str, Any]) -> str:
    where = listed(finding.get("where"))
    if finding.get("tensor") in ("dsinks", "dbias") or len(where) > len(AXES):
        return str(where) if where else ""
    return ", ".join(f"{axis} {n}" for axis, n in zip(AXES, where, strict=False))


def diagnosis(case: Case) -> Diagnosis | None:
    data = case.get("diagnosis")
    if not isinstance(data, Mapping) or not data.get("title"):
        return None
    return Diagnosis(
        title=str(data["title"]) + (f" [{data['id']}]" if data.get("id") else ""),
        what=data.get("what"),
        # A link of another kind could run a script.
        links=[str(one) for one in listed(data.get("links")) if str(one).startswith("https://")],
        where=[str(line) for line in listed(data.get("where"))],
    )
