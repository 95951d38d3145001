"""Export a set as one tar file; the same set always gives the same bytes.

The archive contains only the files that the set's manifest lists, sorted by name, without time, owner or mode. The
bytes of a ``.tar`` are the same on every machine; those of a ``.tar.gz`` also depend on the version of zlib.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import BinaryIO

from ringspec.errors import OptionError, VectorError, shown
from ringspec.vectors.format.files import new_file, read_listed, read_plain
from ringspec.vectors.format.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    FileEntry,
    manifest_from_json,
)
from ringspec.vectors.sets.stored import VectorSet, path_of

SUFFIXES = (".tar", ".tar.gz")
COMPRESSION = 9


def export_set(
    vectors: VectorSet,
    destination: str | os.PathLike[str],
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Write the set ``vectors`` to a new ``.tar`` or ``.tar.gz`` file, completely or not at all.

    Every file is compared with the manifest while it is packed. ``progress(done, total, path)`` is called
    after each file. Raises :class:`~ringspec.errors.OptionError` for another suffix or if
    ``destination`` exists, and :class:`~ringspec.errors.VectorError` if a file differs from the manifest.
    """
    target = path_of(destination)
    if not target.name.endswith(SUFFIXES):
        raise OptionError("a file name that ends in .tar or .tar.gz", shown(target.name), "add it")
    with new_file(target) as file:
        if target.name.endswith(".tar"):
            pack(vectors, file, progress)
            return
        # No file name and no time in the header, so that the bytes do not depend on them.
        with gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as packed:
            pack(vectors, packed, progress)


def pack(
    vectors: VectorSet,
    file: BinaryIO | gzip.GzipFile,
    progress: Callable[[int, int, str], None] | None,
) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        add_set(vectors, archive, vectors.name, progress)


def add_set(
    vectors: VectorSet,
    archive: tarfile.TarFile,
    top: str,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Add the files of a set to an open archive, below the folder ``top``."""
    listed = vectors.manifest.files()
    files = [MANIFEST_FILE, *listed]
    folders = {str(parent) for name in files for parent in PurePosixPath(name).parents} - {"."}
    done = 0
    archive.addfile(member(top, None))
    for name in sorted([*files, *folders]):
        if name in folders:
            archive.addfile(member(f"{top}/{name}", None))
            continue
        data = content(vectors, name, listed.get(name))
        archive.addfile(member(f"{top}/{name}", len(data)), io.BytesIO(data))
        done += 1
        if progress is not None:
            progress(done, len(files), name)


def content(vectors: VectorSet, name: str, listed: FileEntry | None) -> bytes:
    if listed is not None:
        return read_listed(vectors.path, name, listed.bytes, listed.sha256)
    data = read_plain(vectors.path, name, MAX_MANIFEST_BYTES)
    if manifest_from_json(data) != vectors.manifest:
        raise VectorError(
            "the manifest that was opened",
            "a manifest that has changed",
            "open the set again",
            code="digest-file-hash",
        )
    return data


def member(name: str, size: int | None) -> tarfile.TarInfo:
    """Return the tar header of a file of ``size`` bytes, or of a folder if ``size`` is None."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.DIRTYPE if size is None else tarfile.REGTYPE
    info.mode = 0o755 if size is None else 0o644
    info.size = size or 0
    info.mtime = info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
