"""``dir:FOLDER``: calls written to files, with the results that a program on another machine added.

    FOLDER/README.md              instructions
    FOLDER/index.json             profile, pattern, claims, and for each call its folder and digest
    FOLDER/versions.json          optional, from the other machine: the packages that computed the results
    FOLDER/calls/<case>[.n]/      call.json and inputs.safetensors, to which the other machine adds
                                  result.safetensors or refused.txt; n numbers the further calls of a case

call.json and the tensor files have the form of the command protocol (docs/conform/protocol.md); paths are relative to
the call's folder. The suite finds the folder of a call by a digest of the call. So a folder that another version wrote,
or that was written for other claims, is reported as such, not as missing results.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from ringspec.conformance.adapters.command import check_unchanged
from ringspec.conformance.adapters.wire import (
    MAX_TEXT,
    PROTOCOL,
    call_message,
    claims_from,
    inputs_file,
    line_of,
    message_of,
    read_result,
)
from ringspec.conformance.target.protocol import Call, Garbage, Refused, Result
from ringspec.conformance.target.versions import Installed, said_installed
from ringspec.errors import FileFormatError, VectorError, shown
from ringspec.vectors.format.files import read_plain

__all__ = ["OfflineTarget"]

INDEX, CALLS, VERSIONS = "index.json", "calls", "versions.json"
CALL, INPUTS, RESULT, REFUSED = (
    "call.json",
    "inputs.safetensors",
    "result.safetensors",
    "refused.txt",
)
MAX_INDEX = 1 << 22
MAX_REFUSED = 1 << 16
MAX_WORD = 100
FIX = 'write the folder with "ringspec cases write"'
FOLDER = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?(/[a-z0-9]([a-z0-9._-]*[a-z0-9])?){0,7}")


def encoded(call: Call) -> tuple[bytes, bytes]:
    return line_of(call_message(call, INPUTS, RESULT)), inputs_file(call)


def digest(message: bytes, inputs: bytes) -> str:
    return hashlib.sha256(message + inputs).hexdigest()


class OfflineTarget:
    """A folder of calls and results as a target, in place of a program that can be run.

    ``directory``: a folder that :func:`ringspec.conformance.cases.write.write_cases` made. ``profile`` and ``only``:
    the profile and pattern for which the folder was written; ``installed``: from versions.json. Nothing runs, so
    ``timeout`` has no effect.

    ``run`` returns the result in result.safetensors. If there is a refused.txt instead, ``run`` raises Refused with its
    text. If there is neither, it returns an empty result, which the suite calls 'missing'. It raises Mutated if the
    inputs were changed (they may be removed), and Garbage for an invalid result and for a call that the folder does not
    contain. An invalid index.json or versions.json raises FileFormatError.
    """

    timeout: float | None = None

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.root = Path(directory)
        index = read_index(self.root)
        self.profile = str(index.pop("profile", ""))[:MAX_WORD]
        only = str(index.pop("only", ""))[:MAX_WORD]
        self.only = (only,) if only else ()
        self.folders = {value: name for name, value in index.pop("calls").items()}
        index.pop("kind")
        try:
            claims = claims_from(index, f"dir:{self.root.name}")
        except Garbage as fault:
            raise FileFormatError(f"an index.json in {self.root.name}", str(fault), FIX) from None
        self.name, self.capabilities, self.notes = claims.name, claims.capabilities, claims.notes
        self.installed = read_versions(self.root)

    def run(self, call: Call) -> Result:
        """Return the other machine's result of this call."""
        message, inputs = encoded(call)
        name = self.folders.get(digest(message, inputs))
        if name is None:
            raise Garbage(
                f"the folder does not contain this call of {call.id}: it was written by another version, "
                f"with --only, for another profile, or for other claims"
            )
        place = f"{CALLS}/{name}"
        if not (self.root / place).is_dir():
            return Result()
        if not os.path.lexists(self.root / place / RESULT):
            self.raise_refused(place)
        result = read_result(self.root, f"{place}/{RESULT}", call)
        check_unchanged(self.root / place, INPUTS, inputs)
        return result

    def raise_refused(self, place: str) -> None:
        """Raise Refused if the folder ``place`` has a refused.txt."""
        if not os.path.lexists(self.root / place / REFUSED):
            return
        try:
            text = read_plain(self.root, f"{place}/{REFUSED}", MAX_REFUSED)
        except VectorError as error:
            raise Garbage(f"{REFUSED}: expected {error.expected}; got {error.got}") from None
        raise Refused(text.decode("utf-8", "replace").strip()[:MAX_TEXT])


def read_versions(root: Path) -> Installed:
    """Read versions.json, if it exists."""
    if not os.path.lexists(root / VERSIONS):
        return Installed()
    fix = 'write {"versions": {"package": "1.0"}}, or remove the file'
    try:
        return said_installed(message_of(read_plain(root, VERSIONS, MAX_REFUSED), VERSIONS))
    except Garbage as fault:
        raise FileFormatError(f"versions by package in {VERSIONS}", str(fault), fix) from None
    except VectorError as fault:
        raise FileFormatError(f"a plain file {VERSIONS}", fault.got, fix) from None


def read_index(root: Path) -> dict[str, Any]:
    """Read and check index.json; it is untrusted, because another machine could write to its folder."""
    try:
        index = message_of(read_plain(root, INDEX, MAX_INDEX), INDEX)
    except Garbage as fault:
        raise FileFormatError(f"an {INDEX} in {root.name}", str(fault), FIX) from None
    except VectorError as fault:
        raise FileFormatError(f"an {INDEX} in {root.name}", fault.got, FIX) from None
    calls = index.get("calls")
    if index.get("kind") != "ringspec-calls" or not isinstance(calls, dict):
        got = shown(index.get("kind"))
        raise FileFormatError(f"kind and calls in {INDEX} of {root.name}", got, FIX)
    if index.get("protocol") != PROTOCOL:
        got = shown(index.get("protocol"))
        raise FileFormatError(f"protocol {PROTOCOL} in {INDEX} of {root.name}", got, FIX)
    for name, value in calls.items():
        if not FOLDER.fullmatch(name) or not isinstance(value, str):
            raise FileFormatError(f"folders of calls in {INDEX} of {root.name}", shown(name), FIX)
    return index
