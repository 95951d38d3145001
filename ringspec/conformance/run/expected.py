"""Expected failures: case ids, or patterns with a count, each with a reason, in a TOML file.

.. code-block:: toml

    ["ring/bias-w3"]
    reason = "bias is not sharded yet, issue 12"

    ["ring/zigzag-*"]
    count = 12
    reason = "the last chunk is not sent, issue 15"

A listed case that passes is an 'unexpected pass', which is a failure. It is an error to list an id that names no case
of the profile, or a case that the target (the program under test) does not claim to support.

In a pattern ``*`` matches any characters, ``?`` matches one character, and ``[ab]`` matches a or b. Of the claimed
cases that match, exactly ``count`` must fail, no matter which ones. Each failure above ``count`` is a failure of the
run; each missing failure is an unexpected pass. If only some of the matching cases run, an unexpected pass is reported
only when ``count`` failures are no longer possible.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.report.records import FAILURES, Record
from ringspec.conformance.target.declared import check_name
from ringspec.conformance.target.protocol import Target
from ringspec.errors import FileFormatError, OptionError, nearest, shown
from ringspec.plainfile import read_plain_file

MAX_BYTES = 1 << 20
KEYS = ("reason", "count")
WILD = frozenset("*?[")


@dataclass(frozen=True)
class Several:
    """Expected failures of a pattern: ``count`` of the matching cases are expected to fail, for one ``reason``."""

    count: int
    reason: str


Listed = Mapping[str, str | Several]


def read_expected(path: str | Path) -> dict[str, str | Several]:
    """Read and check a TOML file: return reasons by id, and :class:`Several` by pattern.

    Raises :class:`~ringspec.errors.FileFormatError` if the file is not such a list.
    """
    file = Path(path)
    try:
        data = read_plain_file(file, MAX_BYTES)
    except OSError as error:
        raise FileFormatError(
            "a file of expected failures", f"{file}: {error.strerror}", "pass the path of a file"
        ) from None
    return expected_from(data, str(file))


def expected_from(data: bytes, what: str = "the list") -> dict[str, str | Several]:
    r"""Parse a list: return reasons by id, and :class:`Several` by pattern.

    >>> expected_from(b'["ring/bias-w3"]\nreason = "bias is not sharded yet"')
    {'ring/bias-w3': 'bias is not sharded yet'}
    >>> expected_from(b'["ring/zigzag-*"]\ncount = 12\nreason = "the last chunk is lost"')
    {'ring/zigzag-*': Several(count=12, reason='the last chunk is lost')}
    """
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"TOML in {what}", shown(str(error)), "correct the file") from None
    return {id: entry_of(id, table, what) for id, table in tables.items()}


def entry_of(id: str, table: object, what: str) -> str | Several:
    """Check one entry; return the reason for an id, or :class:`Several` for a pattern."""
    if not isinstance(table, dict):
        raise FileFormatError(
            f"a table for each id in {what}", f"{id} = {shown(table)}", f'write ["{id}"]'
        )
    for key in table:
        check_name(f"a key of {id} in {what}", key, KEYS)
    reason = table.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise FileFormatError(
            f"a reason for {id} in {what}", shown(reason), 'write reason = "why it fails"'
        )
    if not is_pattern(id):
        if "count" in table:
            raise FileFormatError(
                f"a count only for patterns in {what}", f"one for the id {id}", "leave it out"
            )
        return reason
    count = table.get("count")
    if type(count) is not int or count < 1:
        raise FileFormatError(
            f"a count for the pattern {id} in {what}",
            "none" if count is None else shown(count),
            "write count = how many of its cases fail",
        )
    return Several(count, reason)


def is_pattern(id: str) -> bool:
    """Tell whether an entry is a pattern; no case id contains its special characters.

    >>> is_pattern("ring/zigzag-*"), is_pattern("ring/zigzag-causal-w4")
    (True, False)
    """
    return not WILD.isdisjoint(id)


class Expectation:
    """A list of expected failures, applied to the cases of a run.

    Raises :class:`~ringspec.errors.OptionError` if an entry names no case that the target claims, if fewer
    cases match a pattern than must fail, or if two entries name the same case.
    """

    def __init__(self, listed: Listed, target: Target, cases: Sequence[RunCase]) -> None:
        self.entries: dict[str, Several] = {}
        self.entry_of: dict[str, str] = {}
        for entry, value in listed.items():
            several = value if isinstance(value, Several) else Several(1, value)
            claimed = claimed_of(entry, target, cases)
            if len(claimed) < several.count:
                raise OptionError(
                    f"a count of at most {len(claimed)} for {entry}, as many claimed cases as match it",
                    str(several.count),
                    "count the cases that fail",
                )
            for id in claimed:
                if id in self.entry_of:
                    raise OptionError(
                        "each case in one entry of the list",
                        f"{id} in {self.entry_of[id]!r} and in {entry!r}",
                        "narrow a pattern, or remove the id from the list",
                    )
                self.entry_of[id] = entry
            self.entries[entry] = several
        self.cases = Counter(self.entry_of.values())
        self.passed, self.failed = Counter[str](), Counter[str]()

    def settle(self, record: Record) -> Record:
        """Return the record with the outcome that the list gives it; must be called once for each record."""
        entry = self.entry_of.get(record.id)
        if entry is None or record.outcome not in ("pass", *FAILURES):
            return record
        several, cases = self.entries[entry], self.cases[entry]
        counted = self.passed if record.outcome == "pass" else self.failed
        counted[entry] += 1
        if record.outcome == "pass":
            if counted[entry] <= cases - several.count:
                return record
            said = f"{several.count} of the {cases} cases {entry} are expected to fail"
            message = said if is_pattern(entry) else record.message
            return replace(
                record, outcome="unexpected pass", reason=several.reason, message=message
            )
        if counted[entry] > several.count:
            said = f"failure {counted[entry]} of {entry}, where {several.count} are expected"
            return replace(record, reason=said)
        message = f"{record.outcome}: {record.message}"
        return replace(record, outcome="expected failure", reason=several.reason, message=message)


def claimed_of(entry: str, target: Target, cases: Sequence[RunCase]) -> list[str]:
    """Return the ids of the claimed cases that an entry names; raise OptionError if there are none."""
    named = [case for case in cases if names(entry, case.id)]
    if not named:
        raise OptionError(
            "expected failures that name cases of this profile",
            shown(entry),
            nearest(entry, [case.id for case in cases]),
        )
    reasons = {case.id: case.why_not(target.capabilities) for case in named}
    claimed = [id for id, reason in reasons.items() if reason is None]
    if not claimed:
        id, reason = next(iter(reasons.items()))
        raise OptionError(
            "expected failures of cases that the target claims",
            f"{entry}, which is not claimed ({reason})"
            if id == entry
            else f"{entry}, of which none is claimed ({id}: {reason})",
            "remove it from the list",
        )
    return claimed


def names(entry: str, id: str) -> bool:
    return fnmatchcase(id, entry) if is_pattern(entry) else id == entry
