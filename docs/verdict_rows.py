"""One report as a row of the matrix of verdicts, with what docs/conform/verdicts.toml adds to it."""

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from verdict_cells import cells, columns_of, state_of, wrong_tensors
from verdict_columns import COLUMNS

from ringspec.compare.bounds import RESULTS
from ringspec.conformance.cases.model import PROFILES
from ringspec.conformance.cases.profiles import run_cases
from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.badge import badge, day_of
from ringspec.conformance.report.records import Record
from ringspec.conformance.report.report import Report, counts_of

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "docs" / "conform" / "verdicts.toml"
REQUIREMENTS = "ringspec/conformance/targets/requirements-{}.txt"
OTHERS = ("python", "numpy", "ringspec", "specification")  # versions that are not the target's


def read_facts(path: Path = FACTS) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def registered() -> dict[str, str]:
    """The names of the bundled targets, by 'module:object'."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {
        spec: name for name, spec in data["project"]["entry-points"]["ringspec.targets"].items()
    }


@cache
def profile_ids(profile: str) -> frozenset[str]:
    return frozenset(case.id for case in run_cases(profile)) if profile in PROFILES else frozenset()


def name_of(report: Report) -> str:
    """The registered name of a target; for another one the text that was checked, such as 'mine.py:ring'."""
    spec = report.header["target"]["spec"]
    return registered().get(spec, spec)


def id_of(target: str, versions: Mapping[str, str]) -> str:
    """A name for files and links, from the target and the version of its first package.

    >>> id_of("diffusers-ring", {"diffusers": "0.42.1", "torch": "2.13.0"}), id_of("../x y", {})
    ('diffusers-ring-0.42.1', 'x-y')
    """
    text = "-".join([target, *list(versions.values())[:1]])
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:100] or "target"


def cut_of(report: Report) -> str:
    """Why cases of the profile are missing in a report; empty if none is."""
    header = report.header
    if not report.complete:
        return "the run was interrupted"
    whole = header.get("cases", {}).get("profile") == len(report.records)
    return "" if whole else f"the run had only a part of the profile {header['profile']}"


def explains(fact: Mapping[str, Any], record: Record) -> bool:
    """Whether a confirmed failure explains that of a case: no other tensors, enough workers, such inputs and masks.

    Of the noise cases, only those that the fact lists, because the hand check repeats their sizes.
    """
    wrong, needs = wrong_tensors(record) | noisy_tensors(record), record.needs
    return (
        record.outcome == "mismatch"
        and bool(wrong)
        and wrong <= {*fact["tensors"]}
        and most_workers(record) >= fact.get("workers_from", 1)
        and ("inputs" not in fact or needs.get("inputs") in fact["inputs"])
        and {*fact.get("masks", ())} <= {*needs.get("masks", ())}
        and not {*fact.get("without_masks", ())} & {*needs.get("masks", ())}
        and (not record.id.startswith("noise/") or record.id in fact.get("noise", ()))
    )


def noisy_tensors(record: Record) -> set[str]:
    """The tensors whose errors are not the declared rounding noise."""
    return {alarm.partition(",")[0] for alarm in (record.noise or {}).get("alarms", ())}


def most_workers(record: Record) -> int:
    """The workers of a case; of a property, which compares several rings with each other, those of the largest."""
    return max(record.needs.get("workers", 1), *record.used.get("workers", ()), 1)


def about(fact: Mapping[str, Any], target: str, versions: Mapping[str, str]) -> bool:
    """Whether a confirmed failure is one of this target in these versions."""
    return fact["target"] == target and all(
        plain_version(versions.get(name, "")) in wanted for name, wanted in fact["versions"].items()
    )


def plain_version(version: str) -> str:
    """A version without its local part: '2.13.0' of '2.13.0+cpu'."""
    return version.partition("+")[0]


def failed_in(records: tuple[Record, ...]) -> dict[str, int]:
    """Tensors by the number of cases in which they are wrong; other failures by their outcome."""
    counts: dict[str, int] = {}
    for record in records:
        if record.outcome in ("pass", "not claimed", "not run", "expected failure"):
            continue
        for name in wrong_tensors(record) or {record.outcome}:
            counts[name] = counts.get(name, 0) + 1
    order = [*RESULTS, *sorted(counts.keys() - {*RESULTS})]
    return {name: counts[name] for name in order if name in counts}


def row_of(report: Report, facts: Mapping[str, Any], stored: bool = True) -> dict[str, Any]:
    """One report as a row. ``stored``: the report is published beside the matrix, under the id of the row."""
    target = name_of(report)
    said = facts.get("target", {}).get(target, {})
    known = {**report.header["versions"], **(report.footer or {}).get("versions", {})}
    packages = said.get("packages") or [name for name in known if name not in OTHERS]
    versions = {name: known[name] for name in packages if name in known}
    mine = [fact for fact in facts.get("wrong", ()) if about(fact, target, versions)]
    confirmed = partial(is_confirmed, mine)
    id = id_of(target, versions)
    cut = cut_of(report)
    unchecked = sum(is_unchecked(record, confirmed) for record in report.records)
    return {
        "id": id,
        "target": target,
        "title": said.get("title") or report.header["target"]["name"],
        "link": said.get("link"),
        "date": day_of(report),
        "versions": versions,
        "ringspec": known.get("ringspec", ""),
        "specification": known.get("specification", ""),
        "profile": report.header["profile"],
        "cut": cut,
        "notes": [str(note) for note in report.header["target"].get("notes") or ()],
        "install": REQUIREMENTS.format(said["requirements"]) if said.get("requirements") else None,
        "command": command_of(target, report, said),
        "report": f"reports/{id}.jsonl" if stored else None,
        "report_page": f"reports/{id}.html" if stored else None,
        "badge_file": f"badges/{id}.json" if stored else None,
        "counts": counts_of(report.records),
        "failed_in": failed_in(report.records),
        "wrong": [with_cases(fact, report.records) for fact in mine],
        "unchecked": unchecked,
        "known_failures": sorted(
            {one.reason for one in report.records if one.outcome == "expected failure"}
        ),
        "diagnosis": diagnosis_of(report),
        "cells": cells(report.records, confirmed, cut),
        "badge": badge_of(report, cut, unchecked),
    }


def badge_of(report: Report, cut: str, unchecked: int) -> dict[str, Any]:
    """The badge of a report; if nothing has confirmed some of its failures, it says so and is not red."""
    made = badge(report, whole=not cut)
    if not unchecked or not report.complete:
        return made
    return made | {"message": f"{made['message']}, {unchecked} not yet checked", "color": "orange"}


def is_confirmed(facts: list[Mapping[str, Any]], record: Record) -> bool:
    return any(explains(fact, record) for fact in facts)


def is_unchecked(record: Record, confirmed: Callable[[Record], bool]) -> bool:
    """Whether a case fails, and nothing has confirmed it."""
    mine = columns_of(record) or COLUMNS[-1:]
    return any(state_of(record, one, confirmed) == "failed" for one in mine)


def with_cases(fact: Mapping[str, Any], records: tuple[Record, ...]) -> dict[str, Any]:
    """A confirmed failure as plain data, with the number of cases that it explains."""
    names = ("tensors", "bug", "text", "since", "hand_check", "public_report", "reproducer")
    which = [f"{name} {one}" for name, some in fact["versions"].items() for one in some]
    return {name: fact.get(name) for name in names} | {
        "versions": which,
        "cases": sum(explains(fact, record) for record in records),
    }


def diagnosis_of(report: Report) -> dict[str, Any] | None:
    """The known bug that most diagnoses name, and the sentences of the readouts; None without failures."""
    found = most_likely(report.records)
    if found is None:
        return None
    kept = {name: found[name] for name in ("id", "title", "count", "of")}
    return kept | {"sentences": list((found["explanation"] or {}).get("sentences", ()))}


def command_of(target: str, report: Report, said: Mapping[str, Any]) -> str:
    """The command that repeats the run."""
    profile = report.header["profile"]
    words = shlex.join(
        ["ringspec", "check", target, *([] if profile == "core" else ["--profile", profile])]
    )
    expected = any(record.outcome == "expected failure" for record in report.records)
    return (
        f"{words} --expected-failures {said['expected']}"
        if expected and "expected" in said
        else words
    )


def row_without_report(target: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a target of which no report is kept: every cell says why, and what was confirmed is told."""
    said = facts["target"][target]
    why = said.get("no_report", "no report is kept")
    return {
        "id": id_of(target, {}),
        "target": target,
        "title": said["title"],
        "link": said.get("link"),
        "date": None,
        "command": said.get("command", f"ringspec check {target}"),
        "install": REQUIREMENTS.format(said["requirements"]) if said.get("requirements") else None,
        "cut": why,
        "report": None,
        "wrong": [with_cases(one, ()) for one in facts.get("wrong", ()) if one["target"] == target],
        "cells": {
            column.id: {"verdict": "not run", "counts": {}, "why": why} for column in COLUMNS
        },
    }
