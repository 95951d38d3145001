"""Read and check the lines of a report, which are untrusted."""

from __future__ import annotations

import dataclasses
import math
from json import JSONDecodeError
from typing import Any, NoReturn

from ringspec import strictjson
from ringspec.compare.statistics.power import Limits
from ringspec.conformance.report.records import OUTCOMES, TENSORS, Finding, Record
from ringspec.errors import FileFormatError, shown

MAX_LINE = 1 << 24
KINDS = {one.name for one in dataclasses.fields(Limits)}
TEXT = 1 << 20
NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
HEADER = {
    "kind": str,
    "format": str,
    "target": dict,
    "versions": dict,
    "capabilities": dict,
    "machine": dict,
    "vectors": dict,
    "profile": str,
    "started": str,
}


def refuse(expected: str, got: object) -> NoReturn:
    raise FileFormatError(
        expected, shown(got), "pass the file unchanged, as ringspec check --report wrote it"
    )


def lines_of(data: bytes, what: str, partial: bool) -> list[dict[str, Any]]:
    """Parse one JSON object per line; if ``partial``, drop an incomplete last line."""
    raw = data.split(b"\n")
    if raw.pop() != b"" and not partial:
        refuse(f"a newline at the end of {what}", "an incomplete last line")
    return [object_of(line, f"line {n} of {what}") for n, line in enumerate(raw, start=1)]


def object_of(line: bytes, what: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        refuse(f"at most {MAX_LINE} bytes in {what}", len(line))
    try:
        value = strictjson.loads(line)
    except JSONDecodeError as error:
        refuse(f"a JSON object in {what}", f"text that is not JSON ({error})")
    except ValueError as error:
        refuse(f"a JSON object in {what}", str(error))
    if not isinstance(value, dict):
        refuse(f"a JSON object in {what}", value)
    return value


def read_header(line: dict[str, Any], what: str, format: str) -> dict[str, Any]:
    for name, kind in HEADER.items():
        if not isinstance(line.get(name), kind):
            refuse(f"a {kind.__name__} as {name} in the header of {what}", line.get(name))
    if line["format"] != format:
        refuse(f"the format {format} in {what}", line["format"])
    for name in ("name", "spec"):
        text(line["target"].get(name), f"{name} of the target in the header of {what}")
    for name in ("profile", "started"):
        text(line[name], f"{name} in the header of {what}")
    for name in ("versions", "files"):
        texts_by_name(line.get(name, {}), f"{name} in the header of {what}")
    for name, count in mapping(line.get("cases", {}), f"cases in the header of {what}").items():
        if whole(count, f"{name} of the cases in the header of {what}") < 0:
            refuse(f"a count as {name} of the cases in the header of {what}", count)
    return line


def texts_by_name(value: Any, what: str) -> None:
    for entry in mapping(value, what).values():
        text(entry, what)


def fields(line: dict[str, Any], of: type, called: str, what: str) -> None:
    """Refuse a line that does not have the fields of the dataclass ``of``.

    It must have all fields without a default, and no others than those of the dataclass.
    """
    known = {f.name: f for f in dataclasses.fields(of)}
    for name in line:
        if name not in known:
            refuse(f"a field of a {called} in {what}", name)
    for name, f in known.items():
        needed = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if needed and name not in line:
            refuse(f"the field {name} in {what}", sorted(line))


def read_record(line: dict[str, Any], what: str) -> Record:
    """Check one line and convert it to a :class:`Record`."""
    data = dict(line)
    if data.pop("kind", None) != "case":
        refuse(f"the kind 'case' in {what}", line.get("kind"))
    fields(data, Record, "record", what)
    for name in ("id", "outcome", "reason", "message", "truth"):
        text(data.get(name, ""), f"{name} in {what}")
    if data["outcome"] not in OUTCOMES:
        refuse(f"an outcome in {what}", data["outcome"])
    for name in ("needs", "picture", "noise", "diagnosis", "used"):
        mapping(data.get(name) or {}, f"{name} in {what}")
    check_diagnosis(data.get("diagnosis") or {}, f"the diagnosis in {what}")
    check_noise(data.get("noise") or {}, f"noise in {what}")
    if "seconds" in data:
        data["seconds"] = number(data["seconds"], f"seconds in {what}")
    flags, findings = (
        listed(data.get(name, []), f"{name} in {what}") for name in ("flags", "findings")
    )
    data["flags"] = tuple(text(flag, f"flags in {what}") for flag in flags)
    data["findings"] = tuple(read_finding(one, what) for one in findings)
    return Record(**data)


def check_diagnosis(found: dict[str, Any], what: str) -> None:
    """Check a diagnosis: its text, its reading, and the fields from which the verdict of a run is computed."""
    for name in ("title", "text"):
        text(found.get(name, ""), f"{name} of {what}")
    if found.get("id") is not None:
        text(found["id"], f"id of {what}")
        text(found.get("title"), f"title of {what}")
    if "reading" in found:
        check_reading(found["reading"], f"the reading of {what}")
    must_fail = mapping(found.get("must_fail", {}), f"must_fail of {what}")
    for value in (found.get("alike", []), found.get("links", []), *must_fail.values()):
        for one in listed(value, f"alike, links and must_fail of {what}"):
            text(one, what)


def check_reading(line: Any, what: str) -> None:
    """Check the plain data of a reading (:class:`ringspec.conformance.readout.reading.Reading`)."""
    exactly(mapping(line, what), ("problem", "right", "forward", "backward"), what)
    text(line["problem"], what)
    truth(line["right"], what)
    for name in ("forward", "backward"):
        if line[name] is None:
            continue
        found = mapping(line[name], what)
        exactly(found, ("sets", "left", "base"), what)
        text(found["left"], what)
        text(found["base"], what)
        for faults in listed(found["sets"], what):
            for fault in listed(faults, what):
                exactly(mapping(fault, what), ("phase", "kind", "place", "cost", "hint"), what)
                number(fault["cost"], what)
                for word in ("phase", "kind", "place", "hint"):
                    text(fault[word], what)


def exactly(line: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    if set(line) != set(names):
        refuse(f"{', '.join(names)} in {what}", sorted(line))


def truth(value: Any, what: str) -> bool:
    if type(value) is not bool:
        refuse(f"true or false in {what}", value)
    return value


def check_noise(found: dict[str, Any], what: str) -> None:
    """Check ``recipe``, ``declared`` and ``limits``, from which the limits of a run are computed."""
    if "limits" not in found:  # written by an earlier version
        return
    text(found.get("recipe"), f"recipe of {what}")
    truth(found.get("declared"), f"declared of {what}")
    for name, kinds in mapping(found["limits"], f"limits of {what}").items():
        if name not in TENSORS or not set(mapping(kinds, what)) <= KINDS:
            refuse(f"known tensors and errors as limits of {what}", {name: kinds})
        for kind, size in mapping(kinds, f"limits of {name} of {what}").items():
            found["limits"][name][kind] = positive(size, f"limit {kind} of {name} of {what}")


def read_finding(line: Any, what: str) -> Finding:
    data = dict(mapping(line, f"finding in {what}"))
    fields(data, Finding, "finding", what)
    for name in ("tensor", "kind"):
        text(data[name], f"{name} in {what}")
    for name in ("worker", "rows", "of"):
        whole(data.get(name, 0), f"{name} in {what}")
    data["error"] = number(data.get("error", 0.0), f"error in {what}")
    for name in ("got", "want"):
        if data.get(name) is not None:
            data[name] = number(data[name], f"{name} in {what}")
    if data.get("limit") is not None:
        data["limit"] = positive(data["limit"], f"limit in {what}")
    where = listed(data.get("where", []), f"where in {what}")
    data["where"] = tuple(whole(one, f"where in {what}") for one in where)
    return Finding(**data)


def check_coverage(line: Any, what: str) -> None:
    """Check what a footer says about untested claims: strings, and for each kind a list of names or numbers."""
    if not isinstance(line, dict) or set(line) != {"untested", "untested_line", "clauses", "hints"}:
        refuse(f"untested, untested_line, clauses and hints as {what}", line)
    text(line["untested_line"], what)
    for name in ("clauses", "hints"):
        for one in listed(line[name], f"{name} of {what}"):
            text(one, f"{name} of {what}")
    for kind, values in mapping(line["untested"], f"untested of {what}").items():
        for value in listed(values, f"{kind} of {what}"):
            if not isinstance(value, str):
                whole(value, f"{kind} of {what}")


def mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(f"an object as {what}", value)
    return value


def listed(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        refuse(f"a list as {what}", value)
    return value


def text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT:
        refuse(f"a short text as {what}", value)
    return value


def whole(value: Any, what: str) -> int:
    if type(value) is not int or abs(value) > 1 << 53:
        refuse(f"a whole number as {what}", value)
    return value


def positive(value: Any, what: str) -> float:
    found = number(value, what)
    if not 0 < found < math.inf:
        refuse(f"a positive number as {what}", value)
    return found


def number(value: Any, what: str) -> float:
    """Return ``value`` as float; NaN and infinities, which JSON lacks, are written as strings."""
    if isinstance(value, str) and value in NUMBERS:
        return NUMBERS[value]
    if (
        type(value) is int
        and abs(value) <= 1 << 53
        or type(value) is float
        and math.isfinite(value)
    ):
        return float(value)
    refuse(f"a number as {what}", value)
