"""Write and read manifest.json, which lists the files of a set, with the size and the SHA-256 of each file.

Only files that the manifest lists are ever opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ringspec.errors import VectorError, shown
from ringspec.vectors.format.case_json import MAX_CASE_BYTES
from ringspec.vectors.format.check_case import is_id
from ringspec.vectors.format.digest import set_digest
from ringspec.vectors.format.flagfile import MAX_FLAGS_BYTES
from ringspec.vectors.format.json_text import check_schema, parse, pretty

FORMAT_VERSION = "1.1"
MAX_MANIFEST_BYTES = 8 << 20
MAX_TENSORS_BYTES = 64 << 20
MAX_CASES = 100_000
CASE_FILE, TENSORS_FILE, FLAGS_FILE, MANIFEST_FILE = (
    "case.json",
    "tensors.safetensors",
    "flags.json",
    "manifest.json",
)
LIMITS = {CASE_FILE: MAX_CASE_BYTES, TENSORS_FILE: MAX_TENSORS_BYTES, FLAGS_FILE: MAX_FLAGS_BYTES}
FIX = "get the set again from its source"


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class CaseEntry:
    """The files of a case by name, and the digest of the case (``digest.case_digest``)."""

    files: Mapping[str, FileEntry]
    content: str


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    ``bytes``: total size of flags.json and the files of the cases. ``content``: the digest of the set, which
    :func:`~ringspec.vectors.format.digest.set_digest` computes from the digests of the cases.
    """

    set: str
    set_version: str
    format_version: str
    spec_version: str
    count: int
    bytes: int
    content: str
    flags: FileEntry
    cases: Mapping[str, CaseEntry]

    def files(self) -> dict[str, FileEntry]:
        """Return the entry of every file of the set except the manifest, by the path of the file in the set."""
        listed = {
            f"{id}/{name}": entry
            for id, case in self.cases.items()
            for name, entry in case.files.items()
        }
        return {FLAGS_FILE: self.flags} | listed


def make_manifest(
    name: str,
    set_version: str,
    spec_version: str,
    flags: FileEntry,
    cases: Mapping[str, CaseEntry],
    format_version: str,
) -> Manifest:
    """Make the manifest of a set, with cases sorted by id; ``format_version`` is the oldest with all that they use."""
    sizes = [flags.bytes] + [file.bytes for case in cases.values() for file in case.files.values()]
    return Manifest(
        set=name,
        set_version=set_version,
        format_version=format_version,
        spec_version=spec_version,
        count=len(cases),
        bytes=sum(sizes),
        content=set_digest({id: case.content for id, case in cases.items()}),
        flags=flags,
        cases=dict(sorted(cases.items())),
    )


def manifest_to_json(manifest: Manifest) -> str:
    """Return the text of manifest.json; equal sets give equal bytes."""
    data: dict[str, Any] = dict(vars(manifest))
    data["flags"] = vars(manifest.flags)
    data["cases"] = {
        id: {
            "files": {name: vars(file) for name, file in sorted(case.files.items())},
            "content": case.content,
        }
        for id, case in sorted(manifest.cases.items())
    }
    return pretty(data)


def manifest_from_json(text: str | bytes, what: str = MANIFEST_FILE) -> Manifest:
    """Parse a manifest of at most 8 MiB and check its consistency.

    Raises :class:`~ringspec.errors.VectorError`. Its code is 'manifest-version' for another major version of the
    format, 'digest-content' for a wrong digest of the set, and 'manifest' for anything else.
    """
    data = parse(text, what, MAX_MANIFEST_BYTES, code="manifest")
    check_version(data, what)
    check_schema(data, "manifest", what, code="manifest")
    cases = {
        id: CaseEntry(
            {name: FileEntry(**file) for name, file in entry["files"].items()}, entry["content"]
        )
        for id, entry in data["cases"].items()
    }
    manifest = Manifest(**data | {"flags": FileEntry(**data["flags"]), "cases": cases})
    check_manifest(manifest, what)
    return manifest


def check_version(data: Any, what: str) -> None:
    """Check the version of the format; this comes before the schema, because a major version may have other keys."""
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, str):
        return  # the check of the schema reports it
    major, ours = version.split(".")[0], FORMAT_VERSION.split(".")[0]
    if major != ours:
        newer = major.isdecimal() and int(major[:9]) > int(ours)
        raise VectorError(
            f"format version {ours}.x in {what}",
            shown(version),
            "install a newer ringspec (pip install --upgrade ringspec)"
            if newer
            else "generate the set again with this ringspec, or install the one that wrote it",
            code="manifest-version",
        )


def check_manifest(manifest: Manifest, what: str) -> None:
    for id in manifest.cases:
        require(is_id(id), what, "ids of two or three short names", shown(id))
        for parent in parents(id):
            got = f"{parent!r} and {id!r}"
            require(parent not in manifest.cases, what, "no case inside another's folder", got)
    got = f"{manifest.count}, and {len(manifest.cases)} cases"
    require(manifest.count == len(manifest.cases), what, "count as the number of cases", got)
    total = 0
    for path, file in manifest.files().items():
        limit = LIMITS[path.rsplit("/", 1)[-1]]
        require(file.bytes <= limit, what, f"{path} of at most {limit} bytes", f"{file.bytes}")
        total += file.bytes
    got = f"{manifest.bytes}, and files of {total} bytes"
    require(manifest.bytes == total, what, "bytes as the sum over the files", got)
    content = set_digest({id: case.content for id, case in manifest.cases.items()})
    if manifest.content != content:
        expected = f"content {content} in {what}, from the digests of the cases"
        raise VectorError(expected, manifest.content, FIX, code="digest-content")


def parents(id: str) -> list[str]:
    parts = id.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def require(holds: bool, what: str, expected: str, got: str) -> None:
    if not holds:
        raise VectorError(f"{expected} in {what}", got, FIX, code="manifest")
