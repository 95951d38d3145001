"""Write the calls of cases to a folder, for a program on another machine.

:mod:`ringspec.conformance.adapters.offline` describes the folder, and reads the results that the program adds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ringspec.conformance.adapters.offline import (
    CALL,
    CALLS,
    INDEX,
    INPUTS,
    RESULT,
    digest,
    encoded,
)
from ringspec.conformance.adapters.wire import PROTOCOL, Claims, call_message
from ringspec.conformance.cases.model import RunCase
from ringspec.conformance.cases.readme import README
from ringspec.conformance.target.capabilities import NAMES, Capabilities
from ringspec.conformance.target.conventions import as_seen
from ringspec.conformance.target.protocol import Call
from ringspec.vectors.format.files import new_folder

__all__ = ["write_cases"]

# The claims of a folder by default.
EVERYTHING = Capabilities(**NAMES)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Written:
    """The numbers of cases, calls and bytes that :func:`write_cases` wrote."""

    cases: int
    calls: int
    bytes: int


def write_cases(
    directory: str | os.PathLike[str],
    cases: Iterable[RunCase],
    *,
    profile: str = "",
    only: str | None = None,
    claims: Claims | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write the calls of all ``cases`` that ``claims`` cover to the new folder ``directory``.

    The folder contains no expected values. If writing fails, no folder is left. ``claims``: what the program on the
    other machine supports, and its conventions; None: everything, in the conventions of the suite. ``profile`` and
    ``only``: the profile and the patterns of ids that selected ``cases``. The folder stores them, so that a check of
    its results runs the same cases. ``progress(done, total, id)`` is called after each case. Raises OptionError if the
    path exists or its parent does not.
    """
    root, chosen = Path(directory), list(cases)
    said = claims or Claims(f"dir:{root.name}", EVERYTHING)
    chosen = [case for case in chosen if case.why_not(said.capabilities) is None]
    entries: dict[str, str] = {}
    size = 0
    with new_folder(root) as folder:
        for done, case in enumerate(chosen):
            for name, call in named_calls(case, said.capabilities):
                message, inputs = encoded(call)
                size += write_call(folder / CALLS / name, call, inputs)
                entries[name] = digest(message, inputs)
            if progress is not None:
                progress(done + 1, len(chosen), case.id)
        index = {
            "kind": "ringspec-calls",
            "protocol": PROTOCOL,
            "profile": profile,
            "only": only or "",
            "name": said.name,
            "capabilities": said.capabilities.as_dict(),
            "notes": list(said.notes),
            "calls": entries,
        }
        (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="ascii")
        (folder / "README.md").write_text(README, encoding="utf-8")
    return Written(len(chosen), len(entries), size)


def named_calls(case: RunCase, claims: Capabilities) -> Iterator[tuple[str, Call]]:
    """Yield each call of a case, in the program's conventions, with the name of its folder."""
    for number, call in enumerate(case.make(claims)):
        yield (case.id if number == 0 else f"{case.id}.{number}"), as_seen(call, claims)


def write_call(folder: Path, call: Call, inputs: bytes) -> int:
    """Write the two files of a call and return their size in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(call_message(call, INPUTS, RESULT), indent=1, allow_nan=False) + "\n"
    (folder / CALL).write_text(text, encoding="ascii")
    (folder / INPUTS).write_bytes(inputs)
    return len(text) + len(inputs)
