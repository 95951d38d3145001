"""``ringspec cases``: write the cases of the conformance suite as files, for a program on another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ringspec.cli.shared.group import Commands

if TYPE_CHECKING:
    from ringspec.conformance.adapters.wire import Claims

EPILOG = """\b
Examples:
  ringspec cases write calls --profile smoke
  ringspec cases write calls --claims target.json
  ringspec check dir:calls

\b
Exit code: 0; 2 for bad input; 130 after Ctrl-C.
"""
MAX_CLAIMS = 1 << 20


@click.group(
    "cases",
    cls=Commands,
    epilog=EPILOG,
    short_help="Write test cases as files for another machine.",
)
def cases_group() -> None:
    """Write the cases of the conformance suite as files, for a program on another machine."""


@cases_group.command("write", short_help="Write the inputs of all cases to a new folder.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    type=click.Choice(["smoke", "core", "full", "seeds", "noise"]),
    default="core",
    show_default=True,
    help="Which set of cases.",
)
@click.option(
    "--only",
    metavar="PATTERN",
    help="Only cases whose full id matches this pattern, such as 'ring/*'.",
)
@click.option(
    "--claims",
    "claims_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="JSON with name, capabilities and notes of the program. Only cases that it claims are written.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
def write_command(
    directory: Path, profile: str, only: str | None, claims_file: Path | None, as_json: bool
) -> None:
    """Write the inputs of all cases to a new folder, with a README for the other machine.

    A case consists of one or more calls of the program, and each call has a folder. A program in any language adds
    result.safetensors to each of these folders. Then "ringspec check dir:DIR" judges the results. Expected values are
    not written. DIR must not exist.
    """
    from ringspec.cli.shared import output
    from ringspec.cli.shared.progress import counting
    from ringspec.conformance.cases.profiles import cases_for, run_cases
    from ringspec.conformance.cases.write import write_cases
    from ringspec.conformance.run.suite import selected

    claims = None if claims_file is None else read_claims(claims_file)
    every = run_cases(profile) if claims is None else cases_for(profile, claims.capabilities)
    cases = selected(every, only)
    with counting("written", wanted=not as_json) as progress:
        written = write_cases(
            directory, cases, profile=profile, only=only, claims=claims, progress=progress
        )
    if as_json:
        output.show_json(
            {
                "command": "write",
                "directory": str(directory),
                "profile": profile,
                "cases": written.cases,
                "not_claimed": len(cases) - written.cases,
                "calls": written.calls,
                "bytes": written.bytes,
            }
        )
        return
    left_out = len(cases) - written.cases
    click.echo(
        f"{written.cases} cases, {written.calls} calls, {written.bytes / 2**20:.1f} MiB in {directory}"
        + (f"; {left_out} cases not written, because FILE does not claim them" if left_out else "")
    )
    click.echo(
        f"next: put result.safetensors next to each call.json, then run: ringspec check dir:{directory}"
    )


def read_claims(path: Path) -> Claims:
    """Read from a file what a program claims to support."""
    from ringspec.conformance.adapters.wire import claims_from, message_of
    from ringspec.conformance.target.protocol import Garbage
    from ringspec.errors import FileFormatError
    from ringspec.plainfile import read_plain_file

    data = read_plain_file(path, MAX_CLAIMS)
    try:
        return claims_from(message_of(data, path.name), path.stem)
    except Garbage as fault:
        raise FileFormatError(
            f"claims of a program in {path.name}",
            str(fault),
            'write {"name": ..., "capabilities": {...}}, as in the answer to hello',
        ) from None
