"""A report as JUnit XML, for dashboards.

The outcomes 'error', 'garbage', 'exit', 'crash' and 'timeout' become errors, the other failing outcomes failures. The
``type`` of an error or failure is the outcome, and its message ends with the diagnosis, which names a known bug. A case
becomes a skipped test, with the reason, if it is not claimed, fails as expected, or was not run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from ringspec.conformance.diagnose.summary import most_likely
from ringspec.conformance.report.limits import limits_of
from ringspec.conformance.report.limits_text import limit_lines
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.report.report import Report
from ringspec.conformance.report.words import record_text, verdict_lines
from ringspec.conformance.target.provenance import CHANGING

ERRORS = ("error", "garbage", "exit", "crash", "timeout")
# The characters that XML 1.0 cannot contain, not even escaped.
NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Report) -> str:
    """Convert a report to JUnit XML. An incomplete run gets one additional test case, which is an error.

    >>> xml = junit(Report({"target": {"name": "mine"}, "profile": "core"}, (Record("a", "pass"),), None))
    >>> 'tests="2" failures="0" errors="1"' in xml
    True
    """
    name = clean(f"{report.header['target']['name']}")
    found = most_likely(report.records)
    cases = [case_element(record, name, found) for record in report.records]
    if not report.complete:
        cases.append(element("testcase", name="the whole run", classname=name))
        error = element("error", type="incomplete", message="the run did not reach its end")
        cases[-1].append(error)
    totals = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": sum(case.find("error") is not None for case in cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "time": f"{sum(record.seconds for record in report.records):.3f}",
    }
    suite = element(
        "testsuite",
        name=clean(f"ringspec {report.header['profile']}"),
        **totals,
        timestamp=clean(str(report.header.get("started", ""))),
    )
    suite.append(properties(report, found))
    suite.extend(cases)
    suites = element("testsuites", **totals)
    suites.append(suite)
    ElementTree.indent(suites)
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suites, "unicode") + "\n"
    )


def properties(report: Report, found: Mapping[str, Any] | None) -> ElementTree.Element:
    """Make the properties of a run: verdict, diagnosis, untested claims, limits, versions and imported files.

    Limits are the smallest errors that the run detects.
    """
    footer = report.footer or {}
    coverage = footer.get("coverage") or {}
    values = {
        "verdict": footer.get("headline", ""),
        "diagnosis": "\n".join(
            verdict_lines(found, report.header["target"].get("spec", "")) if found else ()
        ).removeprefix("diagnosis: "),
        "not tested": coverage.get("untested_line", ""),
        "hint": " ".join(coverage.get("hints", ())),
        "not seen": "\n".join(limit_lines(limits_of(report.records))),
    }
    for kind in CHANGING:
        named = {**report.header.get(kind, {}), **footer.get(kind, {})}
        values |= {f"{kind} {name}": value for name, value in named.items()}
    made = element("properties")
    made.extend(
        element("property", name=clean(name), value=clean(value))
        for name, value in values.items()
        if value
    )
    return made


def case_element(
    record: Record, target: str, found: Mapping[str, Any] | None = None
) -> ElementTree.Element:
    """Make the element of one case.

    ``found``: the diagnosis of the whole run, which is used for a failure without a diagnosis.
    """
    case = element(
        "testcase", name=clean(record.id), classname=target, time=f"{record.seconds:.3f}"
    )
    if record.outcome in FAILURES:
        kind = "error" if record.outcome in ERRORS else "failure"
        problem = element(kind, type=record.outcome, message=clean(message_of(record, found)))
        problem.text = clean(record_text(record))
        case.append(problem)
    elif record.outcome != "pass":
        case.append(element("skipped", message=clean(f"{record.outcome}: {record.reason}")))
    return case


def message_of(record: Record, found: Mapping[str, Any] | None) -> str:
    """Summarise a failure in one line: what is wrong, then the known bug that the diagnosis names, if any.

    >>> wrong = Record("ring/a", "mismatch", message="o is wrong", diagnosis={"id": "x", "title": "X"})
    >>> message_of(wrong, None)
    'ring/a: mismatch: o is wrong; diagnosis: X [x]'
    >>> message_of(Record("ring/b", "mismatch", message="o is wrong"), {"id": "x", "title": "X"})
    'ring/b: mismatch: o is wrong; most failures of this run: X [x]'
    """
    lines = record_text(record, 1).splitlines()
    line = lines[0]
    if len(lines) > 1 and line == f"{record.id}: {record.outcome}" and record.findings:
        line = f"{line}: {lines[1].strip()}"
    own = record.diagnosis or {}
    explanation = (found or {}).get("explanation")
    if own.get("explained") and explanation:
        line = f"{line}; explanation: {' '.join(explanation['sentences'])}"
    if own.get("id"):
        return f"{line}; diagnosis: {own['title']} [{own['id']}]"
    if record.outcome == "mismatch" and not own and found is not None and found["id"]:
        return f"{line}; most failures of this run: {found['title']} [{found['id']}]"
    return line


def element(tag: str, **attributes: object) -> ElementTree.Element:
    return ElementTree.Element(tag, {name: str(value) for name, value in attributes.items()})


def clean(text: str) -> str:
    r"""Replace the characters that XML cannot contain.

    >>> clean("a\x00b")
    'a\ufffdb'
    """
    return NO_XML.sub("\ufffd", text)
