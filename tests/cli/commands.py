"""Calls of the command line, in this process and in one of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
from click.testing import CliRunner

import ringspec as rs
from ringspec.cli import main
from ringspec.cli.shared.inputs import drawn

SCHEMA = json.loads((Path(rs.__file__).parent / "cli" / "schema.json").read_text())
NAMES = ("o", "lse", "dq", "dk", "dv")
SMALL = ("--length", "24", "--workers", "3", "--head-dim", "4")


def call(*arguments, command="simulate"):
    return CliRunner().invoke(main, [command, *map(str, arguments)])


def document(*arguments, command="simulate"):
    """The JSON document of a call that must not fail, checked against the schema."""
    result = call(*arguments, "--json", command=command)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    jsonschema.validate(data, SCHEMA)
    return data


def run_program(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Neither may reach what goes into a pipe.
    environment |= {"FORCE_COLOR": "1", "COLUMNS": "40"}
    return subprocess.run(
        [sys.executable, "-m", "ringspec", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        **options,
    )


def input_file(path: Path, **changes) -> Path:
    tensors = {n: drawn(1, n, (1, 2, 12, 4)) for n in ("q", "k", "v", "dy")} | changes
    tensors = {name: x for name, x in tensors.items() if x is not None}
    if path.suffix == ".npz":
        np.savez(path, **tensors)
    else:
        rs.write_tensors(path, tensors)
    return path


def assert_one_paragraph(result, *says):
    """Exit code 2; one paragraph on stderr after click's usage lines; nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and "Traceback" not in result.stderr
    usage, _, message = result.stderr.rpartition("Error: ")
    assert message.count("\n") == 1 and message.endswith("\n")
    assert usage == "" or usage.startswith("Usage: ")
    for text in says:
        assert text in message
