"""One case as a directory: case.json describes the case, and tensors.safetensors has its numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from numpy.typing import NDArray

from ringspec.errors import VectorError, shown
from ringspec.tensorfile import decode, encode, split
from ringspec.vectors.format.case import Case
from ringspec.vectors.format.case_json import case_from_json, case_to_json
from ringspec.vectors.format.digest import case_digest, sha256
from ringspec.vectors.format.files import read_listed, write_plain
from ringspec.vectors.format.manifest import CASE_FILE, TENSORS_FILE, CaseEntry, FileEntry
from ringspec.vectors.format.tensor_table import check_tensors

Tensors = Mapping[str, NDArray]


def read_case(root: Path, id: str, entry: CaseEntry) -> Case:
    """Read the case in the folder ``root/id``; the bytes of its case.json must match the manifest."""
    name, listed = f"{id}/{CASE_FILE}", entry.files[CASE_FILE]
    case = checked_case(read_listed(root, name, listed.bytes, listed.sha256), name)
    if case.id != id:
        raise VectorError(
            f"the id {id!r} in {name}",
            shown(case.id),
            "make the id the path of the case in its set",
            code="case-format",
        )
    return case


@functools.lru_cache(maxsize=2048)
def checked_case(data: bytes, name: str) -> Case:
    """Parse and check a case. Results are cached, because cases are read often and checking the schema is slow."""
    return case_from_json(data, name)


def read_case_tensors(root: Path, id: str, entry: CaseEntry) -> dict[str, NDArray]:
    """Return the stored tensors of the case in ``root/id``, read-only; an empty dict if no tensors are stored."""
    if TENSORS_FILE not in entry.files:
        return {}
    name, listed = f"{id}/{TENSORS_FILE}", entry.files[TENSORS_FILE]
    data = read_listed(root, name, listed.bytes, listed.sha256)
    if "__metadata__" in split(data, name)[0]:
        raise VectorError(
            f"{name} without metadata",
            "metadata",
            "move the metadata to case.json",
            code="case-tensors",
        )
    return decode(data, name)


def check_content(case: Case, tensors: Tensors, entry: CaseEntry) -> None:
    """Raise VectorError if a tensor of a case has a wrong name, dtype or shape, or the digest of the case is wrong."""
    check_storage(case, TENSORS_FILE in entry.files)
    check_tensors(case, tensors)
    digest = case_digest(case, tensors)
    if digest != entry.content:
        expected = f"content {entry.content} of {case.id}, as the manifest says"
        raise VectorError(
            expected, digest, "get the set again from its source", code="digest-content"
        )


def check_storage(case: Case, has_file: bool) -> None:
    """Raise VectorError unless a case has exactly the tensor file and the digests that its ``storage`` requires.

    "full": a tensor file and no digests. "sampled": a tensor file and digests. "digests": no tensor file, but digests.
    """
    wants_file = case.storage != "digests"
    if has_file != wants_file:
        raise VectorError(
            f"{'a' if wants_file else 'no'} {TENSORS_FILE} of {case.id} with storage {case.storage!r}",
            "one" if has_file else "none",
            "generate the case again",
            code="case-tensors",
        )
    wants_digests = case.storage != "full"
    if bool(case.digests) != wants_digests:
        raise VectorError(
            f"{'' if wants_digests else 'no '}digests in {case.id} with storage {case.storage!r}",
            f"{len(case.digests)}",
            "generate the case again",
            code="case-tensors",
        )


def write_case(root: Path, case: Case, tensors: Tensors | None) -> CaseEntry:
    """Write a case to ``root/<id>`` and return its manifest entry; refuse what :func:`read_case` would refuse."""
    text = case_to_json(case)
    if case_from_json(text, f"the case {shown(case.id)}") != case:
        raise VectorError(
            f"a case {case.id} that does not change when its JSON is written and read",
            "a different one",
            "use plain JSON values",
            code="case-format",
        )
    check_storage(case, tensors is not None)
    check_tensors(case, tensors or {})
    files = {CASE_FILE: text.encode()}
    if tensors is not None:
        files[TENSORS_FILE] = encode(dict(tensors))
    for name, data in files.items():
        write_plain(root / case.id / name, data)
    return CaseEntry(
        {name: file_entry(data) for name, data in files.items()}, case_digest(case, tensors)
    )


def file_entry(data: bytes) -> FileEntry:
    return FileEntry(len(data), sha256(data))
