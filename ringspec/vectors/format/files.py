"""Read plain files of an untrusted folder; write a folder or file completely or not at all.

Links are not followed: the last part of a path must be a plain file, and every other part a real folder. This is
checked before the file is opened, and again when it is open. Sizes are checked before anything is read.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from ringspec.errors import OptionError, VectorError, shown
from ringspec.vectors.format.digest import sha256

if sys.platform != "win32":
    import fcntl

UNFINISHED = ".unfinished"
AGAIN = "get the set again from its source"


def read_plain(root: Path, name: str, limit: int) -> bytes:
    """Return the bytes of the file ``root/name``, at most ``limit``; ``name`` may contain '/'."""
    path = checked_path(root, name)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    # Opening a pipe would wait for a writer.
    flags |= getattr(os, "O_NONBLOCK", 0)
    try:
        with os.fdopen(os.open(path, flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise VectorError(
                    f"a plain file {name}", "something else", AGAIN, code="path-special-file"
                )
            if status.st_size > limit:
                got = f"{status.st_size} bytes"
                raise VectorError(
                    f"{name} of at most {limit} bytes", got, AGAIN, code="digest-file-size"
                )
            data = file.read(status.st_size + 1)
    except OSError as cause:
        raise VectorError(
            f"the file {name} of the set", reason(cause), AGAIN, code="path-missing-file"
        ) from None
    if len(data) != status.st_size:
        raise VectorError(
            f"{name} of {status.st_size} bytes",
            "a file that changes",
            AGAIN,
            code="digest-file-size",
        )
    return data


def read_listed(root: Path, name: str, size: int, digest: str) -> bytes:
    """Return the bytes of a file; raise VectorError unless its size is ``size`` and its SHA-256 is ``digest``."""
    data = read_plain(root, name, size)
    if len(data) != size:
        raise VectorError(
            f"{name} of {size} bytes, as the manifest says",
            f"{len(data)}",
            AGAIN,
            code="digest-file-size",
        )
    if sha256(data) != digest:
        got = sha256(data)
        raise VectorError(
            f"{name} with the SHA-256 {digest}, as the manifest says",
            got,
            AGAIN,
            code="digest-file-hash",
        )
    return data


def checked_path(root: Path, name: str) -> Path:
    """Return the path ``root/name``; raise VectorError unless it is a plain file in real folders below ``root``."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts):
        raise VectorError("a path inside the set", shown(name), AGAIN, code="path")
    path = root
    for index, part in enumerate(parts):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except (OSError, ValueError) as cause:  # ValueError: a zero byte in the root's own path
            raise VectorError(
                f"the file {name} of the set", reason(cause), AGAIN, code="path-missing-file"
            ) from None
        check_kind(mode, name, is_folder=index + 1 < len(parts))
    return path


def reason(cause: Exception) -> str:
    """Return the reason why a file cannot be read; the text does not contain the path of the file."""
    return (getattr(cause, "strerror", None) or type(cause).__name__).lower()


def check_kind(mode: int, name: str, is_folder: bool) -> None:
    if stat.S_ISLNK(mode):
        raise VectorError(f"no symbolic link at {name}", "one", AGAIN, code="path-symlink")
    if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
        wanted = "folders" if is_folder else "a plain file"
        raise VectorError(f"{wanted} at {name}", "something else", AGAIN, code="path-special-file")


def check_listing(root: Path, listed: Collection[str]) -> None:
    """Raise VectorError unless ``root`` contains exactly the listed files and their folders."""
    files = set(listed)
    folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
    folders = {name.replace(os.sep, "/") for name in folders}
    found = set()
    for name, mode in walk(root, ""):
        if name not in files and name not in folders:
            refuse_unlisted(name, files | folders)
        check_kind(mode, name, is_folder=name in folders)
        found.add(name)
    for name in sorted(files - found):
        raise VectorError(
            f"the file {name} of the set", "no such file", AGAIN, code="path-missing-file"
        )


def walk(root: Path, below: str) -> Iterator[tuple[str, int]]:
    """Yield (name, mode) of everything below a folder, each folder before its contents; do not follow links."""
    try:
        with os.scandir(root / below) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                mode = entry.stat(follow_symlinks=False).st_mode
                yield name, mode
                if stat.S_ISDIR(mode):
                    yield from walk(root, name)
    except OSError as cause:
        raise VectorError(
            f"the folder {below or 'of the set'}", reason(cause), AGAIN, code="path-missing-file"
        ) from None


def refuse_unlisted(name: str, known: set[str]) -> None:
    twins = [other for other in known if other.casefold() == name.casefold()]
    got = f"{shown(name)}, which differs from {twins[0]!r} only in case" if twins else shown(name)
    raise VectorError(
        "only files that the manifest lists",
        got,
        "move it out of the set",
        code="path-unlisted-file",
    )


def check_destination(path: Path) -> None:
    if os.path.lexists(path):
        raise OptionError(
            "a path that does not exist",
            shown(str(path)),
            "choose another path, or remove this one first",
            code="destination",
        )
    if not path.parent.is_dir():
        raise OptionError(
            "a path in an existing folder",
            shown(str(path)),
            "make the folder first",
            code="destination",
        )


@contextlib.contextmanager
def in_work(temporary: Path) -> Iterator[None]:
    """Hold a file lock while a ``with`` statement runs; if this process is killed, the system releases the lock."""
    handle = os.open(temporary, os.O_RDONLY)
    try:
        if sys.platform != "win32":
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_left(path: Path) -> None:
    """Remove temporary folders next to ``path`` that were left by killed processes."""
    if sys.platform == "win32":  # the lock of another process is not visible there
        return
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{UNFINISHED}"):
        with contextlib.suppress(OSError):  # also BlockingIOError: a process is writing it
            handle = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(handle)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for a ``with`` statement, then rename it to ``path``, or remove it after an error."""
    check_destination(path)
    remove_left(path)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent))
    try:
        with in_work(temporary):
            yield temporary
        os.chmod(temporary, 0o777 & ~current_umask())
        sync_folders(temporary)
        check_destination(path)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file for a ``with`` statement, then rename it to ``path``, or remove it after an error."""
    check_destination(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~current_umask())
        check_destination(path)
        os.rename(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def write_plain(path: Path, data: bytes) -> None:
    """Write a new file, and return only when its data are on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        sync_folder(Path(folder))


def sync_folder(path: Path) -> None:
    """Write the directory entries of a folder to the disk; do nothing on Windows, which has no such call."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
