"""The commands that derive expected values: verify, generate, make, materialise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringspec.cli.commands.vectors_read import versions, versions_line
from ringspec.cli.shared import output
from ringspec.cli.shared.options import request_from
from ringspec.cli.shared.progress import counting
from ringspec.errors import RingspecError
from ringspec.vectors.format.case import Ring, Shape
from ringspec.vectors.generate import generate
from ringspec.vectors.make import make, make_case
from ringspec.vectors.processes import default_jobs
from ringspec.vectors.sets.cache import materialise
from ringspec.vectors.sets.diff import line, tensor_line
from ringspec.vectors.sets.stored import VectorSet, check_set, open_set
from ringspec.vectors.verify import OUTCOMES, CaseReport, verify

MOST_CHANGES = 20


def verify_set(name: str, only: str | None, jobs: int | None, as_json: bool) -> None:
    """Derive the cases of a set again and print the differences; end the program with exit code 1 if there are any."""
    vectors = open_set(name)
    reports: tuple[CaseReport, ...] = ()
    fault = ""
    try:
        with counting("files") as progress:
            check_set(name, progress)
    except RingspecError as error:
        fault = str(error)
    else:
        with counting("derived") as progress:
            reports = verify(vectors, only=only, jobs=jobs or default_jobs(), progress=progress)
    failed = bool(fault) or any(report.failed for report in reports)
    if as_json:
        output.show_json(
            {
                "command": "verify",
                **versions(vectors),
                "ok": not failed,
                "fault": fault or None,
                "cases": [report_data(report) for report in reports],
            }
        )
    else:
        lines = [versions_line(vectors), *([f"the set is damaged: {fault}"] if fault else [])]
        for report in reports:
            lines += report_lines(report)
        lines += [] if fault else [counts(reports)]
        output.show(lines)
    if failed:
        click.get_current_context().exit(1)


def counts(reports: tuple[CaseReport, ...]) -> str:
    """Return one line that says how many reports have each outcome.

    >>> counts((CaseReport("a/b", "ok"), CaseReport("a/c", "differs"), CaseReport("a/d", "ok")))
    '3 cases: 2 ok, 1 differs'
    """
    found = [report.outcome for report in reports]
    parts = [f"{found.count(name)} {name}" for name in OUTCOMES if name in found]
    return f"{len(found)} case{'' if len(found) == 1 else 's'}: {', '.join(parts)}"


def report_lines(report: CaseReport) -> list[str]:
    """Return the report of a case as lines; no lines if the case is ok."""
    if report.outcome == "ok":
        return []
    heading = f"{report.id}: {report.outcome}"
    changes = [line(field) for field in report.fields]
    changes += [tensor_line(tensor) for tensor in report.tensors]
    shown = [f"  {change}" for change in changes[:MOST_CHANGES]]
    if len(changes) > MOST_CHANGES:
        shown.append(f"  and {len(changes) - MOST_CHANGES} more (see --json)")
    return [heading + (f": {report.message}" if report.message else ""), *shown]


def report_data(report: CaseReport) -> dict[str, Any]:
    return {
        "id": report.id,
        "outcome": report.outcome,
        "message": report.message,
        "fields": [dict(vars(change)) for change in report.fields],
        "tensors": [dict(vars(change)) for change in report.tensors],
    }


def generate_set(
    name: str, destination: Path, only: str | None, jobs: int | None, as_json: bool
) -> None:
    with counting(f"generate {name}") as progress:
        vectors = generate(
            name, destination, jobs=jobs or default_jobs(), progress=progress, only=only
        )
    if as_json:
        show_written("generate", vectors, destination)
        return
    output.show([versions_line(vectors)])
    manifest = vectors.manifest
    output.echo([f"{manifest.bytes} bytes in {destination}", f"content {manifest.content}"])


def show_written(command: str, vectors: VectorSet, destination: Path) -> None:
    """Print, as JSON, what ``command`` has written."""
    output.show_json(
        {
            "command": command,
            **versions(vectors),
            "destination": str(destination),
            "bytes": vectors.manifest.bytes,
            "content": vectors.manifest.content,
        }
    )


def make_set(destination: Path, as_json: bool, **given: Any) -> None:
    own = {
        name: given.pop(name)
        for name in ("id", "dense", "dtype", "softcap", "sinks", "bias", "dlse")
    }
    request = request_from(given | {"recipe": "float64", "skip_masked": False})
    lengths = request.shape
    shape = Shape(
        lengths.batch, lengths.heads, lengths.kv_heads, lengths.length, lengths.kv_length,
        lengths.head_dim, lengths.value_dim,
    )  # fmt: skip
    ring = Ring(request.workers, request.layout, request.circulation, request.direction)
    terms = {name: value for name, value in request.options.items() if value}
    case = make_case(
        own.pop("id"),
        shape,
        ring=None if own.pop("dense") else ring,
        backward=request.backward,
        **own,
        **terms,
    )
    with counting("made") as progress:
        vectors = make(destination, [case], progress=progress)
    tensors = vectors.tensors(case.id)
    if as_json:
        show_written("make", vectors, destination)
        return
    width = max(map(len, tensors))
    output.echo(
        [
            f"{case.id} in {destination}, {vectors.manifest.bytes} bytes:",
            *(f"  {name:<{width}}  {x.dtype}  {list(x.shape)}" for name, x in tensors.items()),
            f"look at it: ringspec vectors show {case.id} --set {destination} --tensors",
        ]
    )


def materialise_set(
    name: str, cache_dir: Path | None, only: str | None, jobs: int | None, as_json: bool
) -> None:
    vectors = open_set(name)
    with counting(f"materialise {vectors.name}") as progress:
        done = materialise(
            name, cache_dir, jobs=jobs or default_jobs(), only=only, progress=progress
        )
    if as_json:
        output.show_json(
            {
                "command": "materialise",
                **versions(vectors),
                "folder": str(done.folder),
                "materialised": done.cases,
                "derived": done.derived,
                "bytes": done.bytes,
            }
        )
        return
    output.show([versions_line(vectors)])
    output.echo(
        [
            f"{done.cases} cases with the correct digests, {done.derived} of them derived now, "
            f"{done.bytes / 2**20:.0f} MiB in {done.folder}"
        ]
    )
