"""The commands that read sets of golden vectors: list, show, diff, export."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

import ringspec
from ringspec.cli.shared import output
from ringspec.cli.shared.progress import counting
from ringspec.cli.views.vectors import case_data, case_lines
from ringspec.cli.views.vectors_table import show_flags, show_table, show_tensors
from ringspec.errors import OptionError, VectorError, nearest, shown
from ringspec.vectors.export import export_set
from ringspec.vectors.format.case import OPERATIONS, Case
from ringspec.vectors.format.flag import Flag
from ringspec.vectors.sets.diff import diff_sets, diff_to_data, diff_to_text
from ringspec.vectors.sets.stored import SETS, VectorSet, open_set


def versions(vectors: VectorSet) -> dict[str, Any]:
    """Return the versions of the package, the specification, the set and its format, and the number of cases."""
    return {
        "version": ringspec.__version__,
        "specification": vectors.spec_version,
        "set": vectors.name,
        "set_version": vectors.set_version,
        "format_version": vectors.format_version,
        "count": len(vectors),
    }


def versions_line(vectors: VectorSet) -> str:
    return (
        f"set {vectors.name} {vectors.set_version}, {len(vectors)} cases; vector format "
        f"{vectors.format_version}, specification {vectors.spec_version}, ringspec "
        f"{ringspec.__version__}"
    )


def list_cases(
    name: str,
    rule: str | None,
    flag: str | None,
    operation: str | None,
    all_flags: bool,
    as_json: bool,
) -> None:
    vectors = open_set(name)
    with counting("read") as progress:
        cases = []
        for done, case in enumerate(vectors, start=1):
            cases.append(case)
            progress(done, len(vectors), case.id)
    check_known(rule, {name for case in cases for name in case.rules}, "a rule of a case")
    check_known(flag, vectors.flags, "a flag of the set")
    check_known(operation, OPERATIONS, "an operation")
    chosen = [
        case
        for case in cases
        if (rule is None or rule in case.rules)
        and (flag is None or flag in case.flags)
        and (operation is None or operation == case.operation)
    ]
    flags = [vectors.flags[one] for one in sorted(vectors.flags)] if all_flags else []
    if as_json:
        document = {"command": "list", **versions(vectors)}
        document["cases"] = [summary(case) for case in chosen]
        output.show_json(document | ({"flags": list(map(flag_data, flags))} if all_flags else {}))
        return
    output.show([versions_line(vectors)])
    if all_flags:
        show_flags(flags, chosen)
    else:
        show_table(chosen)
        output.show([f"{len(chosen)} of {len(cases)} cases"])


def check_known(name: str | None, known: Iterable[str], what: str) -> None:
    if name is not None and name not in (names := set(known)):
        raise OptionError(f"{what}", shown(name), nearest(name, names), code="unknown-name")


def summary(case: Case) -> dict[str, Any]:
    """Return what the JSON list of cases says about one case."""
    return {
        "id": case.id,
        "reason": case.reason,
        "operation": case.operation,
        "passes": list(case.passes),
        "rules": list(case.rules),
        "flags": list(case.flags),
        "shape": None if case.shape is None else dict(vars(case.shape)),
        "formats": None if case.formats is None else dict(vars(case.formats)),
        "storage": case.storage,
        "withdrawn": case.withdrawn is not None,
    }


def flag_data(flag: Flag) -> dict[str, Any]:
    return {
        "name": flag.name,
        "bug_class": flag.bug_class,
        "effect": flag.effect,
        "reports": list(flag.reports),
        "statuses": list(flag.statuses),
    }


def show_case(id: str, name: str | None, tensors: bool, as_json: bool) -> None:
    vectors = open_set(name) if name is not None else set_with(id)
    case = vectors.case(id)
    stored = vectors.tensors(id)
    flags = [vectors.flags[one] for one in case.flags]
    if as_json:
        document = {"command": "show", **versions(vectors)}
        document |= case_data(case, stored, vectors.entry(id).content, tensors)
        output.show_json(document | {"flags": list(map(flag_data, flags))})
        return
    output.show([versions_line(vectors), "", *case_lines(case, flags)])
    show_tensors(case, stored, tensors)


def set_with(id: str) -> VectorSet:
    """Return the first packaged set that has a case with this id, or the core set if no set has one."""
    sets = []
    for name in SETS:
        try:
            sets.append(open_set(name))
        except VectorError:  # the package does not contain this set
            continue
        if id in sets[-1].manifest.cases:
            return sets[-1]
    known = [known for vectors in sets for known in vectors.ids]
    raise OptionError("the id of a case", shown(id), nearest(id, known), code="unknown-name")


def diff(old: str, new: str, as_json: bool) -> None:
    before, after = open_set(old), open_set(new)
    with counting("compare") as progress:
        found = diff_sets(before, after, progress)
    if as_json:
        output.show_json(
            {
                "command": "diff",
                "version": ringspec.__version__,
                "old": versions(before),
                "new": versions(after),
                "difference": diff_to_data(found),
            }
        )
    else:
        output.show(diff_to_text(found).splitlines())
    if not found.equal:
        click.get_current_context().exit(1)


def export(name: str, destination: Path, as_json: bool) -> None:
    vectors = open_set(name)
    with counting("pack") as progress:
        export_set(vectors, destination, progress)
    size = destination.stat().st_size
    if as_json:
        document = {"command": "export", **versions(vectors)}
        output.show_json(document | {"destination": str(destination), "bytes": size})
        return
    output.show([versions_line(vectors)])
    output.echo([f"{size} bytes in {destination}"])
