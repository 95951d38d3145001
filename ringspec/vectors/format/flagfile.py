"""Write and read flags.json, the file that explains the flags (classes of bugs) of the cases in a set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ringspec.errors import VectorError, shown
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.format.json_text import check_schema, parse, pretty

MAX_FLAGS_BYTES = 1 << 20


def flags_from_json(text: str | bytes, what: str = "flags.json") -> Mapping[str, Flag]:
    """Parse a flags.json and return its flags by name; raise :class:`~ringspec.errors.VectorError` if it is invalid."""
    data = parse(text, what, MAX_FLAGS_BYTES, code="flag-format")
    check_schema(data, "flags", what, code="flag-format")
    flags = {}
    for name, entry in data.items():
        reports, statuses = tuple(entry["reports"]), tuple(entry["statuses"])
        if len(reports) != len(statuses):
            got = f"{len(reports)} and {len(statuses)}"
            raise VectorError(
                f"one status for each report of {name!r} in {what}",
                got,
                "give lists of equal length",
                code="flag-format",
            )
        flags[name] = Flag(name, entry["bug_class"], entry["effect"], reports, statuses)
    return MappingProxyType(flags)


def flags_to_json(flags: Iterable[Flag]) -> str:
    """Return the text of flags.json, sorted by name.

    >>> print(flags_to_json([Flag("stale-keys", "schedule", "Wrong from W = 2 on.")]), end="")
    {
     "stale-keys": {
      "bug_class": "schedule",
      "effect": "Wrong from W = 2 on.",
      "reports": [],
      "statuses": []
     }
    }
    """
    names = ("bug_class", "effect", "reports", "statuses")
    data = {
        one.name: {
            name: list(value) if isinstance(value := getattr(one, name), tuple) else value
            for name in names
        }
        for one in sorted(flags, key=lambda one: one.name)
    }
    return pretty(data)


def check_flags_known(case: Case, flags: Mapping[str, Flag]) -> None:
    for name in case.flags:
        if name not in flags:
            raise VectorError(
                f"flags of {case.id} that flags.json explains",
                shown(name),
                "add it to flags.json",
                code="flag-format",
            )
