"""Make a reproducer: a program without ringspec that shows a failure, and a text that describes it.

The shrinker finds the simplest call that fails. The program is then run where ringspec cannot be imported. It is kept
only if it shows the failure there, and if its dense check gives the exact values.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.diagnose.summary import Diagnoser
from ringspec.conformance.report.records import Record
from ringspec.conformance.reproduce.dense_text import RESULTS, check_known
from ringspec.conformance.reproduce.program import Place, Writable, places_of, program, supported
from ringspec.conformance.reproduce.shrink import Progress, Shrunk
from ringspec.conformance.reproduce.shrink_schemes import shrink_case
from ringspec.conformance.run.case import run_case
from ringspec.conformance.run.load import load_target
from ringspec.conformance.target.protocol import Target
from ringspec.errors import OptionError

SECONDS = 300.0  # time limit of the program
AGREEMENT = 0.5  # the dense value may differ from the exact one by this part of the bound
LINE = re.compile(
    r"^WRONG: (\w+) of worker (\d+), element .*: got (\S+), dense float64 gives (\S+)$", re.M
)
BLOCKED = 'raise ImportError("a reproducer must not import ringspec")\n'


@dataclass(frozen=True)
class Reproducer:
    """A program that shows a failure, what it prints, the shrunk call, and the record of the original case."""

    text: str
    output: str
    shrunk: Shrunk
    record: Record


def reproduce(
    target: Target, spec: str, case: RunCase, seconds: float, progress: Progress | None = None
) -> Reproducer:
    """Make the reproducer of a case that ``target`` fails.

    ``spec``: the text that names the target; its file is loaded in this process, because the program needs its source.
    ``seconds``: time limit of the search for the simplest call. Raises :class:`~ringspec.errors.OptionError` if the case
    does not fail by wrong numbers, if the call cannot be written, or if the program does not show the failure.
    """
    written = supported(load_target(spec))
    record = run_case(target, case, Diagnoser())
    shrunk = shrink_case(target, case, seconds, progress)
    call = shrunk.last.call
    check_known(call, shrunk.last.tensors)
    places = places_of([one for one in shrunk.last.findings if one.tensor in RESULTS])
    text = program(written, call, places, title(spec, shrunk))
    return Reproducer(text, confirmed(text, spec, written, places), shrunk, record)


def title(spec: str, shrunk: Shrunk) -> str:
    """Say in a line which target returns what wrong."""
    names = ", ".join(shrunk.last.tensors)
    return f"{spec} returns a wrong {names} ({shrunk.id} of ringspec, made smaller)."


def confirmed(text: str, spec: str, target: Writable, places: list[Place]) -> str:
    """Run the program where ringspec cannot be imported; return what it prints if it shows the failure."""
    python = getattr(target, "python", None) or sys.executable
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "blocked" / "ringspec").mkdir(parents=True)
        (folder / "blocked" / "ringspec" / "__init__.py").write_text(BLOCKED, encoding="utf-8")
        (folder / "repro.py").write_text(text, encoding="utf-8")
        paths = [str(folder / "blocked"), *folders(spec)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                [python, str(folder / "repro.py")], capture_output=True, text=True, env=environment,
                timeout=SECONDS, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            refuse(f"no end within {SECONDS:.0f} s")
    found = {(one[0], int(one[1])): float(one[3]) for one in LINE.findall(done.stdout)}
    if done.returncode != 1 or not found:
        end = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        refuse(f"exit status {done.returncode}\n{end}\n")
    for place in places:
        dense = found.get((place.tensor, place.worker), place.want)
        near = max(AGREEMENT * place.bound, 1e-12 * abs(place.want))
        if not (dense == place.want or abs(dense - place.want) <= near):
            refuse(f"{dense!r} for {place.tensor}, where {place.want!r} is exact")
    return done.stdout


def folders(spec: str) -> list[str]:
    """Return the folders from which the target's own modules are imported."""
    place = spec.rpartition(":")[0]
    return [str(Path(place).resolve().parent) if place.endswith(".py") else str(Path.cwd())]


def refuse(got: str) -> NoReturn:
    raise OptionError(
        "a program without ringspec that shows the failure", got,
        "use ringspec replay --shrink; the failure may depend on the process, or this is an error in ringspec",
    )  # fmt: skip
